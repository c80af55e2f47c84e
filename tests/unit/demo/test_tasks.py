"""The shipped tasks: reproducible, solvable, not passable by luck, split by family."""

import itertools
import re

import pytest

from ostinato.core.errors import BadConfig
from ostinato.demo.tasks import FILE, build, load, messages, split, suite_items

TASKS = load()
NAME = re.compile(r"def (\w+)\((.*?)\):\n    \"\"\"(.+)\"\"\"\n")


def passes(task, body):
    space = {}
    try:
        exec(task.head + body, space)
        exec(task.tests, space)
    except Exception:  # noqa: BLE001 - any failure of a candidate is a failed test
        return False
    return True


def test_regenerating_gives_the_shipped_bytes():
    assert build().encode() == FILE.read_bytes()


def test_there_are_enough_of_them():
    assert len(TASKS) >= 420
    assert len({task.family for task in TASKS}) >= 24
    assert len({task.id for task in TASKS}) == len(TASKS)
    assert len({NAME.fullmatch(task.head)[1] for task in TASKS}) == len(TASKS)


def test_every_reference_passes_and_no_lazy_body_does():
    lazy = [
        "pass",
        "return None",
        "return True",
        "return False",
        "return 0",
        "return 1",
        "return ''",
        "return []",
        "return {}",
        "return set()",
    ]
    for task in TASKS:
        assert passes(task, task.solution), task.id
        arguments = NAME.fullmatch(task.head)[2].split(", ")
        for body in lazy + [f"return {name}" for name in arguments]:
            assert not passes(task, f"    {body}\n"), (task.id, body)


def solves(task, other):
    space = {}
    exec(other.head + other.solution + f"{NAME.fullmatch(task.head)[1]} = {NAME.fullmatch(other.head)[1]}\n", space)
    try:
        exec(task.tests, space)
    except Exception:  # noqa: BLE001 - see passes
        return False
    return True


def test_tasks_differ_in_behaviour():
    """Within a family no two tasks solve each other, and no two docstrings are the same."""
    docs = [NAME.fullmatch(task.head)[3].lower() for task in TASKS]
    assert len(set(docs)) == len(docs)
    for first, second in itertools.combinations(TASKS, 2):
        if first.family == second.family and first.head.count(", ") == second.head.count(", "):
            assert not (solves(first, second) and solves(second, first)), (first.id, second.id)


def test_split_keeps_families_whole():
    users, held = split(TASKS)
    assert len(users) + len(held) == len(TASKS)
    assert not {task.family for task in users} & {task.family for task in held}
    assert len(held) >= 100
    assert 0.15 <= len(held) / len(TASKS) <= 0.35
    assert split(list(reversed(TASKS)))[1] == list(reversed(held))


def test_suite_items_have_what_the_evaluation_needs():
    _, held = split(TASKS)
    items = suite_items(held)
    assert len(items) == len(held)
    for item, task in zip(items, held, strict=True):
        assert item["messages"] == messages(task)
        assert item["continue_final_message"] is True
        assert item["grader"] == "python_tests"
        assert item["sampling"]["temperature"] == 1.0
        assert len(item["sampling"]["stop"]) <= 16
        assert task.solution.strip() not in str(item["messages"])
        assert "assert" not in str(item["messages"])


def test_a_damaged_file_names_the_remedy(tmp_path):
    bad = tmp_path / "tasks.jsonl"
    bad.write_text('{"id": 1}\n')
    with pytest.raises(BadConfig, match="reinstall"):
        load(bad)
