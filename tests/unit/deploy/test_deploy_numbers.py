"""Every query of the board and of the alert rules names metrics and labels that `GET /metrics` has, with Prometheus' endings."""

import ast
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.page_world import RUN

from ostinato.core.records import Holdback, PolicyVersion, Purpose, ReleaseEvent, Reward, Row, Window, WindowMaker
from ostinato.core.weights import Swap
from ostinato.launch.views.numbers import LearningNumbers, RunNumbers
from ostinato.release.ledger import State, fold
from ostinato.serve.metrics import Metrics
from ostinato.status.summary import Summary
from ostinato.status.worker_status import WorkerStatus
from ostinato.testing.engine import FakeEngine
from ostinato.testing.records import a_turn

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "ostinato.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
QUERIES += [(rule["alert"], rule["expr"]) for rule in RULES]
JOBS = {
    job["job_name"]
    for name in ("prometheus.yaml", "kubernetes.yaml")
    for job in yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["scrape_configs"]
}
ENGINES = ("embedded/engine.py", "vllm/engine.py")

NAME = re.compile(r"ostinato_[a-z0-9_]+")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
CHOSEN = re.compile(r"(ostinato_[a-z0-9_]+)\{([^}]*)\}")


def engine_numbers(path: str) -> set[str]:
    """What an engine's `stats` writes out by name, read from its source: an engine needs a model or servers."""
    tree = ast.parse((ROOT / "src" / "ostinato" / "engine" / path).read_text())
    (stats,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "stats")
    keys = (key for node in ast.walk(stats) if isinstance(node, ast.Dict) for key in node.keys)
    return {f"ostinato_engine_{key.value}" for key in keys if isinstance(key, ast.Constant)}


def counted_once() -> Metrics:
    """A gateway's numbers, each counted at least once."""
    metrics, turn = Metrics(FakeEngine(lambda request: "hi")), replace(a_turn("a:0"), parent="b:0")
    metrics.answered("/v1/chat/completions", 200)
    metrics.first_token(0.1)
    metrics.turn(turn)
    metrics.delivered("default", 1)
    metrics.refused("default", "quota")
    metrics.passed_on("default", "large")
    metrics.judged("default", "praised", "praised")
    metrics.not_judged("default", "late")
    metrics.judge_used("default", 10, 2, 0.1)
    metrics.event("default", "accepted", "stored", foreign=True)
    metrics.swapped(Swap(slot="live", policy=turn.spans[0].policy, pause_s=0.01, streams=2))
    return metrics


def sessions() -> Iterator[Row]:
    """Long sessions of twelve people on each side, half of them with a summary after which an answer names a fact again."""
    for number in range(24):
        long = replace(
            a_turn(f"l{number}:0", user=f"u{number}", prompt=range(1_000)), episode=f"e{number}", text="a.py"
        )
        if number % 2:
            yield from (long, replace(long, id=f"s{number}:0", purpose=Purpose.COMPACTION))
            long = replace(
                long, id=f"w{number}:0", window=Window(number=1, begins_with=f"s{number}:0", by=WindowMaker.AGENT)
            )
        yield from (long, Reward(turn=long.id, value=0.5, function="f@1", signals=("s",), at=1.0))


def learned() -> LearningNumbers:
    """A run that rated, held back and shipped something."""
    policy = PolicyVersion(number=0, hash="0" * 64)
    event = ReleaseEvent(id="r0", action="shipped", policy=policy, previous=None, reason="", detail={}, at=1.0)
    reward = Reward(turn="a:0", value=0.5, function="f@1", signals=("s",), at=1.0)
    seen = Summary()
    rows = (a_turn("a:0"), reward, Holdback(turn="b:0", reason="gone", at=1.0), event, *sessions())
    for cursor, row in enumerate(rows, start=1):
        seen.apply(cursor, row)
    return LearningNumbers(summary=seen, behind=0, ledger=fold(State(), event), dials=RUN.dials)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name -> labels of every sample of a gateway, of its run and of both engines."""
    board = tmp_path_factory.mktemp("run") / "workers.json"
    worker = WorkerStatus(
        name="train",
        pid=7,
        condition="running",
        since=1.0,
        doing="waiting",
        doing_since=1.0,
        trouble=None,
        restarts=1,
        reason=None,
        reason_at=None,
    )
    board.write_text(json.dumps({"at": 1.0, "pid": 1, "ended": None, "workers": [asdict(worker)]}))
    numbers, metrics = RunNumbers(board), counted_once()
    numbers.alarms.add("coverage:acme")
    for each in (numbers, learned()):
        metrics.registry.register(each)
    found: dict[str, set[str]] = {name: set() for path in ENGINES for name in engine_numbers(path)}
    for line in metrics.page().decode().splitlines():
        sample = re.match(r"(ostinato_[a-z0-9_]+)(?:\{(.*)\})? ", line)
        if sample:
            found.setdefault(sample[1], set()).update(re.findall(r'(\w+)="', sample[2] or ""))
    return found


def test_the_engines_numbers_are_read():
    for path in ENGINES:
        assert "ostinato_engine_running" in engine_numbers(path)


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{n}" for n, (title, _) in enumerate(QUERIES)])
def test_a_query_asks_for_what_there_is(exported, title, query):
    names = NAME.findall(query)
    if set(re.findall(r"([a-z_]+)\{", query)) == {"up"}:  # Prometheus' own
        assert {re.search(r'job="(\w+)"', query)[1]} == JOBS
        return
    assert names, title
    assert [name for name in names if name not in exported] == []
    had = set().union(*(exported[name] for name in names)) | {"instance"}  # which Prometheus adds
    assert {label.strip() for group in GROUPED.findall(query) for label in group.split(",")} <= had
    for name, chosen in CHOSEN.findall(query):
        assert set(re.findall(r"(\w+)=", chosen)) <= exported[name], query


def test_every_family_is_on_the_board(exported):
    shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for _, query in QUERIES for name in NAME.findall(query)}
    families = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in exported}
    assert {name for name in families - shown if not name.startswith("ostinato_engine_")} == set()


def test_what_is_read_from_the_log_is_not_added_up_over_gateways():
    """Each gateway says the same of learning, workers and alarms: a sum over them would count it twice."""
    from_log = {name for name in NAME.findall(" ".join(query for _, query in QUERIES)) if name in _once_per_run()}
    assert from_log
    for title, query in QUERIES:
        for name in from_log & set(NAME.findall(query)):
            assert not re.search(rf"sum(?: by \([^)]*\))? ?\((?:\w+\()?{name}\b", query), title


def _once_per_run() -> set[str]:
    return {sample.name for family in learned().collect() for sample in family.samples} | {
        "ostinato_alarm",
        "ostinato_worker_running",
        "ostinato_worker_restarts_total",
        "ostinato_worker_trouble",
    }


def test_a_gateway_that_nobody_finds_is_one_that_is_down():
    """Pods are found by label: without a pod there is no `up` to be 0."""
    (rule,) = (each for each in RULES if each["alert"] == "OstinatoDown")
    assert rule["expr"].endswith('or absent(up{job="ostinato"})')
    assert "{{ with $labels.instance }}" in rule["annotations"]["summary"]


def test_no_two_panels_cover_each_other():
    taken = defaultdict(set)
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                taken[x, y].add(panel["title"])
    assert [titles for titles in taken.values() if len(titles) > 1] == []
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_every_panel_asks_the_source_that_was_chosen():
    (source,) = BOARD["templating"]["list"]
    assert (source["name"], source["type"]) == ("source", "datasource")
    asked = [panel["datasource"] for panel in PANELS]
    asked += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    assert {(each["type"], each["uid"]) for each in asked} == {("prometheus", "${source}")}


def test_every_alert_says_how_bad_it_is_and_what_is_wrong():
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_promtool_finds_the_rules_right_and_they_fire_when_they_should():
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    place = DEPLOY / "prometheus"
    for command in (
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "alerts.test.yaml"),
        ("check", "config", "--syntax-only", "prometheus.yaml"),
    ):
        ran = subprocess.run(["promtool", *command], cwd=place, capture_output=True, text=True, timeout=WHOLE_PROGRAM_S)
        assert ran.returncode == 0, ran.stdout + ran.stderr
