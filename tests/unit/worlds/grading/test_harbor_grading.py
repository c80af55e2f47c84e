"""Harbor's folders are graded by their own test.sh, which runs on the outcome in a fresh sandbox."""

import shutil
from dataclasses import replace

import pytest

from ostinato.app.worlds import check_grading, open_graders
from ostinato.core.errors import BadConfig
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.grading.harbor import HarborGrader, _graded
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.sandbox import Boxes, SandboxConfig
from ostinato.worlds.tasks.harbor import load_harbor

RIGHT = b"def add(a, b):\n    return a + b\n"
TRIES = "python3 -c 'import calc; assert calc.add(1, 2) == 3'"


def folder(path, script, **more):
    files = {
        "task.toml": '[task]\nname = "x/calc"\n[verifier.env]\nLEVEL = "2"\n[environment]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Mend calc.py.\n",
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY calc.py old.txt ./\n",
        "environment/calc.py": "def add(a, b):\n    return a - b\n",
        "environment/old.txt": "old\n",
        "tests/test.sh": script,
        "tests/data/wanted.txt": "3\n",
    } | more
    for name, text in files.items():
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (task,) = load_harbor(path).tasks
    return task


def outcome(*changes):
    return Rollout(task="x/calc", harness="tools", ended=Ended.SUBMITTED, messages=(), turns=(), changes=changes)


def written(path, data, **more):
    return Change(path=path, kind=ChangeKind.WRITTEN, data=data, **more)


async def graded(task, *changes):
    boxes = Boxes(SandboxConfig())
    try:
        return await HarborGrader(boxes).grade(task, outcome(*changes))
    finally:
        await boxes.close()


@pytest.mark.skipif(shutil.which("bash") is None, reason="Harbor's scripts run in bash")
@pytest.mark.parametrize(
    ("script", "right", "wrong"),
    [
        (f"{TRIES} && echo 1 > /logs/verifier/reward.txt\n", 1.0, 0.0),
        (f"if {TRIES}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n", 1.0, 0.0),
        (f'set -e\n{TRIES}\necho \'{{"reward": 0.75, "style": 0.5}}\' > /logs/verifier/reward.json\n', 0.75, 0.0),
        (f"{TRIES} && cat /tests/data/wanted.txt > /logs/verifier/reward.txt\n", 1.0, 0.0),
        (
            f"cd /app && {TRIES} && test $LEVEL = 2 && mkdir -p /logs/verifier && echo 0.5 > /logs/verifier/reward.txt\n",
            0.5,
            0.0,
        ),
    ],
)
async def test_the_script_s_reward_is_the_grade(tmp_path, script, right, wrong):
    task = folder(tmp_path / "calc", script)
    check_grading(task)
    assert (await graded(task, written("calc.py", RIGHT))).value == right
    grade = await graded(task)
    assert (grade.value, "AssertionError" in grade.why or "says 0" in grade.why) == (wrong, True)


async def test_all_changes_are_there_and_the_tests_cannot_be_changed(tmp_path):
    script = (
        "test ! -e old.txt && ./run.sh && test $(readlink link) = calc.py && ! touch /tests/test.sh && ! touch /tests/new && "
        "echo 1 > /logs/verifier/reward.txt\n"
    )
    changes = [
        Change(path="old.txt", kind=ChangeKind.DELETED),
        written("run.sh", b"#!/bin/sh\nexit 0\n", executable=True),
        Change(path="link", kind=ChangeKind.LINK, data=b"calc.py"),
        written("tests/test.sh", b"echo 1 > /logs/verifier/reward.txt\n"),
    ]
    grade = await graded(folder(tmp_path / "calc", script), *changes)
    assert grade.value == 1.0, grade.why


async def test_a_script_that_hangs_or_writes_nothing_is_no_success(tmp_path):
    hasty = '[environment]\nnetwork_mode = "no-network"\n[verifier]\ntimeout_sec = 1.0\n'
    slow = folder(tmp_path / "slow", "sleep 60\n", **{"task.toml": hasty})
    assert "timeout" in (await graded(slow)).why
    assert (await graded(folder(tmp_path / "mute", "exit 0\n"))).why == "tests/test.sh wrote no reward: it ended with 0"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " 0.25 ", 0.25),
        ("reward.txt", "7", 1.0),
        ("reward.txt", "-1", 0.0),
        ("reward.txt", "nan", 0.0),
        ("reward.txt", "inf", 0.0),
        ("reward.txt", "", 0.0),
        ("reward.txt", "yes", 0.0),
        ("reward.json", '{"a": 1, "b": 0}', 0.5),
        ("reward.json", "0.5", 0.5),
        ("reward.json", '{"reward": "x"}', 0.0),
        ("reward.json", '{"reward": NaN}', 0.0),
        ("reward.json", "[1]", 0.0),
        ("reward.json", "{}", 0.0),
        ("reward.json", "[" * 100_000, 0.0),
    ],
)
def test_a_reward_file_is_read_with_care(name, text, value):
    assert _graded(name, text).value == value


async def test_an_outcome_larger_than_the_task_s_disk_is_graded_as_far_as_it_fits(tmp_path):
    """An agent's sandbox may be larger than the task's, in which it is graded."""
    task = folder(tmp_path / "calc", f"{TRIES} && echo 1 > /logs/verifier/reward.txt\n")
    task = replace(task, spec=replace(task.spec, limits=replace(task.spec.limits, disk_mb=2)))
    large = [written(f"junk{n}", b"x" * (1 << 20)) for n in range(4)]
    assert (await graded(task, written("calc.py", RIGHT), *large)).value == 1.0


def test_a_number_beyond_floats_is_no_reward():
    assert _graded("reward.json", f'{{"reward": 1{"0" * 400}}}').value == 0.0
    assert _graded("reward.json", f"1{'0' * 400}").value == 0.0


def test_a_task_of_harbor_s_without_its_script_is_refused_by_name(tmp_path):
    task = folder(tmp_path / "calc", "exit 0\n")
    object.__setattr__(task.grading, "hidden", {})
    with pytest.raises(BadConfig, match=r"tests/test\.sh is missing"):
        check_grading(task)


async def test_the_graders_of_worlds_know_harbor_s(tmp_path):
    boxes = Boxes(SandboxConfig())
    try:
        task = folder(tmp_path / "calc", f"{TRIES} && echo 1 > /logs/verifier/reward.txt\n")
        grade = await open_graders(boxes, None, "python3").grade(task, outcome(written("calc.py", RIGHT)))
        assert grade.solved
    finally:
        await boxes.close()
