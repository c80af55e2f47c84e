"""Every query of the dashboard names metrics and labels that `GET /metrics` has, with the endings that Prometheus gives them."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ostinato.core.weights import Swap
from ostinato.launch.placing.board import Standing
from ostinato.launch.views.numbers import RunNumbers
from ostinato.serve.metrics import Metrics
from ostinato.testing.engine import FakeEngine
from ostinato.testing.records import a_turn

BOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"ostinato_[a-z0-9_]+")
LABELS = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name -> labels of every sample of the gateway and of the run, once everything was counted once."""
    board = tmp_path_factory.mktemp("run") / "workers.json"
    worker = Standing(
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
    numbers = RunNumbers(board)
    numbers.alarms.add("coverage:acme")
    metrics = Metrics(FakeEngine(lambda request: "hi"))
    turn = replace(a_turn("a:0"), parent="b:0")
    metrics.answered("/v1/chat/completions", 200)
    metrics.first_token(0.1)
    metrics.turn(turn)
    metrics.delivered("default", 1)
    metrics.refused("default", "quota")
    metrics.event("default", "accepted", "stored", foreign=True)
    metrics.registry.register(numbers)
    metrics.swapped(Swap(slot="live", policy=turn.spans[0].policy, pause_s=0.01, streams=2))
    found: dict[str, set[str]] = {}
    for line in metrics.page().decode().splitlines():
        sample = re.match(r"(ostinato_[a-z0-9_]+)(?:\{(.*)\})? ", line)
        if sample:
            found.setdefault(sample[1], set()).update(re.findall(r'(\w+)="', sample[2] or ""))
    return found


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_asks_for_what_there_is(exported, title, query):
    names = NAME.findall(query)
    assert names, title
    assert [name for name in names if name not in exported] == []
    wanted = {label.strip() for group in LABELS.findall(query) for label in group.split(",")}
    assert wanted <= set().union(*(exported[name] for name in names))


def test_every_family_is_on_the_board(exported):
    asked = {name for _, query in QUERIES for name in NAME.findall(query)}
    families = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in exported}
    shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in asked}
    left_out = {name for name in families - shown if not name.startswith("ostinato_engine_")}
    assert left_out == set()


def test_no_two_panels_cover_each_other():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
