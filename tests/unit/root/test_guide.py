"""The guide's examples are run; every other page's are compiled or read."""

import json
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from ostinato import config
from ostinato.core.conversation import Message, Role
from ostinato.core.records import NoReward, Pending, Reward, Signal, Source
from ostinato.launch.views.screen import release_line, step_line
from ostinato.release.guard import Harm
from ostinato.release.metrics.config import BUILT_IN
from ostinato.release.metrics.facts import MEANINGS
from ostinato.reward.protocol import load
from ostinato.testing.records import a_turn
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.tasksets import parse

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "guide").glob("*.md"))
GUIDE = "\n".join(page.read_text() for page in PAGES)
BESIDE = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/guarantees.md", "docs/limits.md"))
OTHERS = [ROOT / name for name in ("README.md", "client/README.md", "deploy/README.md")]
EVERY = [*OTHERS, *sorted((ROOT / "docs").rglob("*.md"))]

KEYS = [name for name, _ in config.keys(config.Config)]
ROOMS = {name.partition(".")[0] for name in KEYS}


def blocks(language: str) -> list[object]:
    """Every page's blocks of code in a language, also those within a list, each named by its page and line."""
    found = []
    for page in EVERY:
        text = page.read_text()
        for block in re.finditer(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
            found.append(pytest.param(textwrap.dedent(block[2]), place, id=place))
    return found


@pytest.mark.parametrize(("settings", "place"), blocks("toml"))
def test_every_block_of_settings_is_taken(settings, place):
    config.Config.model_validate(tomllib.loads(settings))


@pytest.mark.parametrize(("program", "place"), blocks("python"))
def test_every_block_of_python_compiles(program, place):
    compile(program, place, "exec")


def test_every_setting_that_is_named_exists():
    """A key, a section of keys, or an entry of a table."""
    named = {
        name
        for name in re.findall(r"`\[{0,2}([a-z_]+(?:\.[a-z_0-9]+)+)\b(?=[\]` =])", GUIDE + BESIDE)
        if name.partition(".")[0] in ROOMS and not name.endswith((".py", ".json", ".jsonl", ".safetensors"))
    }
    assert len(named) > 100
    assert [name for name in sorted(named) if not any(_within(name, key) or _within(key, name) for key in KEYS)] == []


def _within(name: str, section: str) -> bool:
    return f"{name}.".startswith(f"{section}.")


def function(name: str):
    """The reward function of this name in the guide."""
    program = next(text for text in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if f"def {name}(" in text)
    space: dict[str, object] = {}
    exec(program, space)
    return space[name]


def signal(name: str) -> Signal:
    return Signal(id=name, turn="a:0", name=name, value=1.0, source=Source.HUMAN, occurred_at=11.0, received_at=11.0)


def test_the_reward_function_works():
    kept = function("kept")
    turn = a_turn("a:0", ended_at=10.0)
    assert kept(turn, [], 20.0) == Pending(until=3610.0)
    assert isinstance(kept(turn, [], 4000.0), Reward)
    assert [
        kept(turn, [signal(name) for name in names], 4000.0).value
        for names in ([], ["still_there"], ["still_there", "undone"])
    ] == [
        0.0,
        1.0,
        -1.0,
    ]


def test_the_default_reward_takes_one_more_signal():
    bookmarks, turn = function("bookmarks"), a_turn("a:0", ended_at=10.0)
    assert bookmarks(turn, [signal("bookmarked")], 20.0) == Pending(until=3610.0)
    values = [bookmarks(turn, [signal(name) for name in names], 4000.0).value for names in (
        [], ["accepted"], ["bookmarked"], ["accepted", "bookmarked"], ["rejected", "bookmarked"], ["unheard_of"],
    )]  # fmt: skip
    assert values == [0.0, 0.75, 0.5, 1.25, 0.25, 0.0]


def test_the_settings_for_a_model_that_may_suggest_nothing_are_taken(tmp_path):
    found = re.search(r"## Let the model suggest nothing.*?```toml\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    (tmp_path / "ostinato.toml").write_text(found[1])
    settings = config.load(tmp_path / "ostinato.toml").reward
    answer = load(settings.function, settings.options)(a_turn("a:0", ended_at=10.0), [], 4000.0)
    assert answer == NoReward(reason="silence")


async def test_the_suite_item_parses_and_is_graded():
    item = re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    assert item is not None
    (task,) = parse("guide", json.dumps(json.loads(item[1])) + "\n", ROOT).tasks
    for text, value in (("Hello Ann!", 1.0), ("Hello!", 0.0)):
        said = Message(role=Role.ASSISTANT, text=text)
        rollout = Rollout(task=task.id, harness="single@h", ended=Ended.SUBMITTED, messages=(said,), turns=("c:0",))
        assert (await PatternGrader().grade(task, rollout)).value == value


def test_the_settings_of_the_gate_are_accepted_and_survive_the_way_to_the_workers(tmp_path):
    found = re.search(r"```toml\n([^`]*\[\[evaluate\.bars\]\].*?)```", GUIDE, re.DOTALL)
    assert found is not None
    (tmp_path / "ostinato.toml").write_text(found[1])
    settings = config.load(tmp_path / "ostinato.toml")
    assert [(bar.axis, bar.wanted) for bar in settings.evaluate.bars] == [
        ("score", 0.99),
        ("score", 0.3),
        ("format", 0.9),
        ("latency", 0.95),
    ]
    assert settings.evaluate.further_suites == ("tools.jsonl",)
    assert settings.evaluate.tasksets == (settings.evaluate.bars[1].taskset,) == ("repairs.jsonl",)
    config.save(settings, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == settings


def test_the_declared_metrics_are_taken_and_survive_the_way_to_the_workers(tmp_path):
    found = re.search(r"```toml\n([^`]*\[\[release\.metrics\]\].*?)```", GUIDE, re.DOTALL)
    assert found is not None
    (tmp_path / "ostinato.toml").write_text(found[1])
    settings = config.load(tmp_path / "ostinato.toml")
    declared = {metric.name: metric for metric in settings.release.metrics}
    assert [name for name, metric in declared.items() if metric.role == "goal"] == ["kept"]
    assert declared["latency_p99"].quantile == 0.99
    assert {"failed", "stopped", "dissatisfied_follow_up"} < declared.keys()
    config.save(settings, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == settings


def test_every_built_in_metric_and_fact_is_in_the_guide():
    section = GUIDE.partition("## Declare what a release is judged by")[2].partition("\n## ")[0]
    assert [name for name in (*BUILT_IN, *MEANINGS) if f"`{name}`" not in section] == []


def test_lines_of_the_status_are_quoted_as_they_are_printed():
    """A table's cell or inline code would fold their double spaces."""
    step = {"step": 12, "reward_mean": 0.21, "kl_k1": 0.0031, "ess": 0.97, "on_policy": 0.62}
    step |= {"tokens": 3412, "tokens_saved": 1200, "seconds": 24}
    harm = Harm(measure="acceptance against the control arm", loss=0.041, at_least=0.008, period=0)
    printed = {
        "it-is-slow.md": step_line(step),
        "it-does-not-ship.md": release_line("rolled_back", 3, f"guard: {harm}").plain,
    }
    for page, line in printed.items():
        quoted = re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "guide" / page).read_text(), re.DOTALL | re.MULTILINE)
        assert [line for block in quoted if line in block.splitlines()] == [line]
