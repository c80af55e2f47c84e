"""Tasksets as what candidates are measured on: which tasks count, under which name and hash, and what is refused before anything runs."""

import json

import pytest

from ostinato.app.evaluation import check_suite, open_evaluation, open_suites
from ostinato.app.worlds import WORLD_GRADERS, open_graders
from ostinato.app.worlds_evaluation import world_suite
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.evaluate.rollouts import RolloutRunner
from ostinato.evaluate.runner import SuiteRunner

SMALL = ("evaluate.gate.margin=0.99", "evaluate.gate.total_margin=0.99")


def write(path, count=90, **changes):
    rows = [
        {
            "id": f"{split}{n}",
            "family": "letters",
            "split": split,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"say {n}"}],
            "grading": {"grader": "pattern", "data": {"pattern": "x"}},
        }
        | changes
        for split, many in (("train", 2), ("held_out", count), ("canary", 1))
        for n in range(many)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(tmp_path, *more):
    item = {
        "id": "a",
        "family": "f",
        "messages": [{"role": "user", "content": "x"}],
        "grader": "pattern",
        "pattern": "x",
    }
    (tmp_path / "suite.jsonl").write_text(json.dumps(item) + "\n")
    where = (f"evaluate.suite='{tmp_path / 'suite.jsonl'}'", f"run.directory='{tmp_path / 'run'}'")
    return load(None, [*where, *SMALL, *more])


def test_only_held_out_tasks_count_and_the_hash_stands_for_all_that_decides(tmp_path):
    file = str(write(tmp_path / "letters.jsonl"))
    found = world_suite(file, settings(tmp_path))
    assert found.suite.name == "world letters"
    assert (
        [item.id for item in found.suite.items]
        == [task.id for task in found.tasks.tasks]
        == [f"held_out{n}" for n in range(90)]
    )
    assert [message.role for message in found.suite.items[0].messages] == ["system", "user"]
    assert not found.runs_code
    assert world_suite(file, settings(tmp_path)).suite == found.suite
    others = [
        world_suite(file, settings(tmp_path, "worlds.temperature=0.5")),
        world_suite(file, settings(tmp_path, "evaluate.items=80")),
        world_suite(str(write(tmp_path / "letters.jsonl", tokens=9)), settings(tmp_path)),
        world_suite(str(write(tmp_path / "letters.jsonl", harness="tools")), settings(tmp_path)),
        world_suite(
            str(write(tmp_path / "letters.jsonl", harness="tools")),
            settings(tmp_path, "worlds.harness.tools.output_chars=900"),
        ),
    ]
    hashes = {found.suite.hash, *(other.suite.hash for other in others)}
    assert len(hashes) == 6
    assert len(others[1].suite.items) == 80
    assert others[3].runs_code


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"split": "train"}, "no task has the split 'held_out'"),
        ({"harness": "bard"}, "task 'held_out0': there is no harness 'bard'; there are "),
        (
            {"grading": {"grader": "vibes"}},
            "task 'held_out0', field 'grading.grader': there is no grader 'vibes'; there are function",
        ),
    ],
)
async def test_what_nobody_can_try_or_grade_is_told_before_anything_starts(tmp_path, changes, told):
    file = write(tmp_path / "letters.jsonl", **changes)
    if changes.get("split"):  # ids would stand twice
        file.write_text(file.read_text().splitlines()[0] + "\n")
    config = settings(tmp_path, f"evaluate.bars=[{{taskset='{file}', at_least=0.2}}]")
    with pytest.raises(BadConfig, match=told):
        await check_suite(config)


async def test_a_bar_may_speak_of_a_taskset_beside_suites_or_of_one_that_is_compared(tmp_path):
    letters, others = write(tmp_path / "letters.jsonl"), write(tmp_path / "others.jsonl")
    bars = f"evaluate.bars=[{{taskset='{letters}', at_least=0.9}}, {{taskset='{others}', at_least=0.9}}, {{at_least=0.01}}]"
    config = settings(tmp_path, bars, f"evaluate.tasksets=['{others}']")
    await check_suite(config)
    found = open_suites(config)
    assert [suite.name for suite in found.compared] == ["suite", "world others"]
    assert [suite.name for suite in found.aside] == ["world letters"]
    assert [bar.suite for bar in found.bars] == ["world letters", "world others", "suite"]
    assert set(found.worlds) == {"world letters", "world others"}
    evaluation = open_evaluation(config, "http://127.0.0.1:9")
    kinds = [type(runner) for runner in (*evaluation._runners, *evaluation._aside)]
    assert kinds == [SuiteRunner, RolloutRunner, RolloutRunner]
    with pytest.raises(BadConfig, match=r"suite 'world letters': with 90 items .* or lower the bar"):
        await check_suite(settings(tmp_path, bars.replace("0.9}, {taskset", "0.99}, {taskset")))


def test_a_bar_of_two_things_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="a suite or of a taskset; leave one out"):
        settings(tmp_path, "evaluate.bars=[{taskset='a', suite='b', at_least=0.5}]")


def test_tasks_may_name_the_graders_that_there_are():
    known = open_graders(None, None, "python3")._graders
    assert sorted(known) == sorted(WORLD_GRADERS)
