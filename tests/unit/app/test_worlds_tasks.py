"""The demo's functions as tasks: the demo's split, prompts and stops, with the tests where the model cannot see them."""

import contextlib
from dataclasses import replace

import pytest

from ostinato.app.worlds import check_tasks, function_tasks
from ostinato.config import load as load_config
from ostinato.core.errors import BadConfig
from ostinato.demo.tasks import load as blanks
from ostinato.demo.tasks import split
from ostinato.worlds.tasks.task import Split
from ostinato.worlds.tasks.tasksets import load, save


def test_every_blank_is_a_task_and_whole_families_are_held_out(tmp_path):
    taskset = function_tasks()
    taught, held = split(blanks())
    assert [task.id for task in taskset.tasks] == [blank.id for blank in (*taught, *held)]
    families = {part: {task.family for task in taskset.tasks if task.split is part} for part in Split}
    assert families[Split.TRAIN] == {blank.family for blank in taught}
    assert families[Split.HELD_OUT] == {blank.family for blank in held}
    assert families[Split.TRAIN].isdisjoint(families[Split.HELD_OUT])
    save(taskset, tmp_path / "functions.jsonl")
    assert load(tmp_path / "functions.jsonl") == taskset


def test_a_task_asks_and_stops_as_the_demo_does():
    for task, blank in zip(function_tasks().tasks, [each for part in split(blanks()) for each in part], strict=True):
        asked = [{"role": message.role.value, "content": message.text} for message in task.messages]
        assert (asked, task.tokens, task.stop) == (
            list(blank.prompt.messages),
            blank.prompt.max_tokens,
            blank.prompt.stop,
        )
        assert task.grading.data == {"head": blank.head, "tests": blank.tests}
        assert "assert" not in "".join(message.text for message in task.messages)
        assert not task.spec.files


def test_a_memory_too_small_for_a_task_is_refused_before_anything_starts(tmp_path):
    task = replace(function_tasks().tasks[0], harness="tools", tokens=1500)
    for window, said in ((8192, None), (6144, "memory.window of 6144 tokens leaves")):
        config = load_config(None, [f"run.directory='{tmp_path}'", f"worlds.harness.tools.memory.window={window}"])
        with pytest.raises(BadConfig, match=said) if said else contextlib.nullcontext():
            check_tasks(config, [task])
