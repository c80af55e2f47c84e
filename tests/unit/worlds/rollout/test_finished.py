"""The record of a finished rollout: it says what happened, comes back as it was, and nothing in a file is believed unchecked."""

import difflib
import json
from dataclasses import asdict, replace

import pytest

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import PolicyVersion
from ostinato.core.sandbox import Change, ChangeKind, SandboxSpec
from ostinato.launch.commands.worlds.run import read_attempts
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.rollout.attempt import FinishedRollout, original_of
from ostinato.worlds.rollout.finished import MOST_DIFF, Finished, read_finished, shown_changes
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset

V3, V5 = PolicyVersion(number=3, hash="cc"), PolicyVersion(number=5, hash="ee")
TASK = Task(
    id="calc-1",
    family="repair",
    messages=(Message(role=Role.USER, text="Mend calc.py."),),
    spec=SandboxSpec(files={"calc.py": b"def add(a, b):\n    return a - b\n", "old.txt": b"gone\n"}),
    grading=Grading(grader="pytest"),
    split=Split.HELD_OUT,
)
CHANGES = (
    Change(path="calc.py", kind=ChangeKind.WRITTEN, data=b"def add(a, b):\n    return a + b\n"),
    Change(path="old.txt", kind=ChangeKind.DELETED),
    Change(path="new.txt", kind=ChangeKind.WRITTEN, data=b"no line's end"),
    Change(path="a.bin", kind=ChangeKind.WRITTEN, data=b"\xff\x00"),
    Change(path="here", kind=ChangeKind.LINK, data=b"/etc/passwd"),
)
ROLLOUT = Rollout(
    task="calc-1",
    harness="tools@9f2c",
    ended=Ended.SUBMITTED,
    messages=(),
    turns=("a:0", "b:0"),
    changes=CHANGES,
    effort={"tokens": 40.0},
)
GRADE = Grade(value=0.5, parts={"fail_to_pass": 0.5}, why="1 of 2 tests pass")


def a_record(rollout=ROLLOUT, grade=GRADE, policies=(V5, V3), task=TASK, **more) -> Finished:
    tried = FinishedRollout(task=task, episode="w.0.1.0", rollout=rollout, grade=grade, policies=policies)
    return tried.record(Taskset(name="repairs", hash="9f", tasks=(task,)), lambda: 9.0, **more)


def test_it_says_what_happened_and_comes_back_as_it_was():
    record = a_record(group="w.0", member=1)
    assert (record.policy, record.policy_last) == (V3, V5), "oldest and newest, in whatever order they were told"
    assert (record.value, record.solved, record.why) == (0.5, False, "1 of 2 tests pass")
    assert (record.task, record.family, record.split, record.harness) == ("calc-1", "repair", "held_out", "tools@9f2c")
    assert Finished.read(record.line()) == record
    assert set(json.loads(record.line())) == set(asdict(record))
    alone = a_record(policies=())
    assert (alone.policy, alone.group, alone.member) == (None, None, None)
    assert Finished.read(alone.line()) == alone


def test_what_was_not_graded_has_no_value_and_what_was_cheated_for_is_worth_nothing():
    torn = replace(ROLLOUT, ended=Ended.FAILED, detail={"why": "the sandbox was gone"})
    record = a_record(torn, None)
    assert (record.value, record.solved, record.why, record.ended) == (None, False, "the sandbox was gone", "failed")
    cheated = a_record(grade=Grade(value=1.0, cheated=("patched the judge",), parts={"odd": float("nan")}))
    assert (cheated.value, cheated.solved, cheated.cheated) == (0.0, False, ("patched the judge",))
    assert Finished.read(cheated.line()) == cheated, "what is no number does not spoil the line"


def test_changes_are_shown_against_what_the_task_put_there():
    by_path = {change.path: change.diff for change in a_record().changes}
    assert by_path["calc.py"].splitlines()[-2:] == ["-    return a - b", "+    return a + b"]
    assert "-gone" in by_path["old.txt"]
    assert "+++ /dev/null" in by_path["old.txt"]
    assert by_path["new.txt"].startswith("--- /dev/null\n+++ new.txt\n")
    assert "+no line's end\n\\ No newline" in by_path["new.txt"]
    assert by_path["a.bin"] is None
    assert by_path["here"] == "-> /etc/passwd"


def test_long_changes_are_cut_with_a_note_and_so_are_many():
    long = Change(path="long", kind=ChangeKind.WRITTEN, data=b"x\n" * MOST_DIFF)
    many = [Change(path=f"{n}", kind=ChangeKind.WRITTEN, data=b"x") for n in range(1000)]
    shown = shown_changes([long, *many], lambda path: None)
    assert "characters left out here" in shown[0].diff
    assert sum(len(each.diff) for each in shown) < MOST_DIFF + 100 * len(shown)
    assert len(shown) < 300
    assert shown[-1].diff == f"[... {1001 - len(shown) + 1} paths left out here ...]"
    endless = Change(path="b", kind=ChangeKind.WRITTEN, data=b"y\n" * 5000)
    (each,) = shown_changes([endless], lambda path: b"x\n" * 5000)
    assert "too long to compare" in each.diff


def test_nothing_is_compared_that_there_is_no_room_to_show(monkeypatch):
    """The worker's loop waits for it: half a second of processor for 2000 lines of which every other one changed."""
    compare, compared = difflib.unified_diff, []
    monkeypatch.setattr(difflib, "unified_diff", lambda *given: compared.append(given) or compare(*given))
    many = [Change(path=f"{n}", kind=ChangeKind.WRITTEN, data=b"x\n" * 2000) for n in range(100)]
    shown = shown_changes(many, lambda path: None)
    assert len(compared) < 10
    assert [each.path for each in shown] == [each.path for each in many]
    assert shown[-1].diff == "[... left out here ...]"


def test_what_a_task_put_there_is_never_looked_for_elsewhere(tmp_path):
    below, above = tmp_path / "below", tmp_path / "above"
    for layer in (below, above):
        layer.mkdir()
    (tmp_path / "secret").write_text("secret")
    (below / "a").write_text("below")
    (above / "a").write_text("above")
    (below / "b").write_text("b")
    (above / "out").symlink_to(tmp_path / "secret")
    (above / "round").symlink_to(above / "round")
    spec = SandboxSpec(layers=(str(below), str(above)), files={"c": b"c"})
    found = {path: original_of(spec, path) for path in ("a", "b", "c", "out", "round", "../secret", "none", ".", "\0")}
    assert found == dict.fromkeys(found) | {"a": b"above", "b": b"b", "c": b"c"}


BROKEN = (
    {"value": 2.0},
    {"value": True},
    {"value": float("nan")},
    {"value": 10**400},
    {"at": "now"},
    {"split": "secret"},
    {"ended": "soon"},
    {"turns": "a:0"},
    {"turns": [1]},
    {"member": 1.5},
    {"policy": {"number": "3", "hash": "cc"}},
    {"policy": []},
    {"parts": {"a": "1"}},
    {"changes": [{"path": "a"}]},
    {"changes": {}},
    {"solved": 1},
    {"task": None},
)


@pytest.mark.parametrize("change", BROKEN, ids=str)
def test_a_line_that_is_none_is_refused_counted_and_passed_over(change):
    row = json.loads(a_record().line())
    line = json.dumps(row | change)
    with pytest.raises(BadRequest):
        Finished.read(line)
    found, bad = read_finished(
        [a_record().line(), line, "", a_record().line()[:90], "[" * 100_000, "7", a_record().line()]
    )
    assert (found, bad) == ([a_record()] * 2, 4)


def test_each_field_is_needed():
    row = json.loads(a_record().line())
    for name in row:
        with pytest.raises(BadRequest):
            Finished.read(json.dumps({key: value for key, value in row.items() if key != name}))


def test_coverage_reads_it_and_counts_only_what_one_checkpoint_made_alone(tmp_path):
    rows = [
        a_record(policies=(V3,)),
        a_record(policies=(V3, V5)),
        a_record(policies=()),
        a_record(grade=None, policies=(V3,)),
        a_record(task=replace(TASK, split=Split.TRAIN), policies=(V3,)),
    ]
    file = tmp_path / "finished.jsonl"
    file.write_text("".join(row.line() + "\n" for row in rows) + "\n" + rows[0].line()[:80] + "\n")
    (attempt,) = read_attempts(file)
    assert (attempt.task, attempt.family, attempt.policy, attempt.value) == ("calc-1", "repair", V3, 0.5)
