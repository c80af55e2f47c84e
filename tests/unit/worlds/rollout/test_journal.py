"""A journal that is written anew: whole at every instant, in use still where there is no room, and short after any number of groups."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.worlds.rollout import groups as module
from ostinato.worlds.rollout.groups import EventFile, Groups


class Killed(BaseException):
    """No handler of the code runs, as after a kill -9."""


def reopened(path, most_bytes=1 << 20) -> tuple[str, list[dict]]:
    journal, events = EventFile.open(path, most_bytes)
    journal.close()
    return journal.token, events


def of_one_group(n: int, task: str, size: int = 4, *, spent: bool = True) -> list[dict]:
    events = [{"kind": "drawn", "n": n, "task": task, "epoch": n // 10, "size": size}]
    for member in range(size):
        about = {"n": n, "member": member, "episode": f"w.{n}.{member}.0"}
        turns = [f"chatcmpl-{n}-{member}-{turn}:0" for turn in range(3)]
        events += [{"kind": "begun", **about}]
        events += [
            {"kind": "ended", **about, "last": True, "turns": turns, "grade": member % 2 + 0.0, "why": "submitted"}
        ]
    events.append({"kind": "told", "n": n})
    return [*events, {"kind": "spent", "n": n, "after": 7 * n}] if spent else events


def fold(events) -> Groups:
    groups = Groups([f"t{n}" for n in range(10)], token="w", epochs=0)
    for event in events:
        groups.apply(event)
    return groups


def written(path, groups: int = 6) -> EventFile:
    journal, _ = EventFile.open(path)
    for n in range(groups):
        for event in of_one_group(n, f"t{n % 10}", spent=n < groups - 2):
            journal.append(event)
    return journal


def lines_of_module(kill_at: int):
    """A tracer that kills before the `kill_at`th line that the module runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == kill_at:
                raise Killed
        return trace

    return trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # who is killed closes nothing
def test_killed_before_any_line_it_is_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    journal = written(path)
    journal.close()
    whole, (token, events) = path.read_bytes(), reopened(path)
    short = list(fold(events).events())
    old, new, outcomes = fold(events), fold(short), []
    assert vars(old) == vars(new)
    before = sys.gettrace()
    for kill_at in range(1, 200):
        path.write_bytes(whole)
        journal, _ = EventFile.open(path)
        sys.settrace(lines_of_module(kill_at))
        try:
            journal.rewrite(iter(short))
            done = True
        except Killed:
            done = False
        finally:
            sys.settrace(before)
            journal.close()
        found = reopened(path)
        assert found in ((token, events), (token, short))
        assert list(tmp_path.iterdir()) == [path], "what a kill left is cleared away"
        outcomes.append(found[1] == short)
        if done:
            break
    assert done
    assert outcomes == sorted(outcomes)
    assert 10 < outcomes.count(False) < len(outcomes) - 1, "there were kills before and after it was replaced"


_WORKER = """
import sys
from pathlib import Path
from ostinato.worlds.rollout.groups import EventFile
journal, events = EventFile.open(Path(sys.argv[1]), 2000)
n = max((event["n"] for event in events), default=-1)
print("up", flush=True)
while True:
    n += 1
    journal.append({"kind": "told", "n": n})
    print(n, flush=True)
    if journal.grown:
        journal.rewrite([{"kind": "told", "n": n}] * 3)
"""


def test_a_process_that_is_killed_loses_nothing_that_it_said(tmp_path):
    path, rewritten = tmp_path / "j", 0
    for round_ in range(6):
        with subprocess.Popen([sys.executable, "-c", _WORKER, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"up\n"
            said = [child.stdout.readline() for _ in range(200 + 37 * round_)]
            child.send_signal(signal.SIGKILL)
            said += child.stdout.read().splitlines()
        _, events = reopened(path)
        numbers = [event["n"] for event in events]
        assert numbers[-1] >= int(said[-1])
        assert numbers == sorted(numbers)
        rewritten += "lines" in json.loads(path.read_bytes().split(b"\n")[0])
    assert rewritten == 6


def test_it_is_on_disk_before_it_takes_the_place_and_the_place_is_on_disk_before_anything_follows(
    tmp_path, monkeypatch
):
    journal, done = written(tmp_path / "j"), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replaced"), replace(*paths)))
    assert journal.rewrite([{"kind": "told", "n": 1}])
    assert done == [str(tmp_path / "j.new"), "replaced", str(tmp_path)]
    journal.append({"kind": "told", "n": 2})
    journal.close()
    assert reopened(tmp_path / "j") == (journal.token, [{"kind": "told", "n": 1}, {"kind": "told", "n": 2}])


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_without_room_it_goes_on_as_it_was(fails, tmp_path, monkeypatch, caplog):
    journal = written(tmp_path / "j")
    journal._most = 100

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    before = (tmp_path / "j").read_bytes()
    assert not journal.rewrite([{"kind": "told", "n": 1}])
    assert "keeps growing" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / "j"]
    assert (tmp_path / "j").read_bytes() == before
    assert not journal.grown, "it is not tried again at once"
    monkeypatch.undo()
    while not journal.grown:
        journal.append({"kind": "told", "n": 1})
    assert journal.rewrite([{"kind": "told", "n": 5}])
    journal.close()
    assert reopened(tmp_path / "j") == (journal.token, [{"kind": "told", "n": 5}])


def test_a_directory_that_may_not_be_on_disk_ends_the_worker(tmp_path, monkeypatch):
    journal, fsync = written(tmp_path / "j"), os.fsync

    def fail(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(errno.EIO, "bad disk")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageFull, match="bad disk"):
        journal.rewrite([{"kind": "told", "n": 5}])
    journal.close()
    assert reopened(tmp_path / "j")[1] == [{"kind": "told", "n": 5}]


def test_what_it_was_begun_with_is_checked(tmp_path):
    path = tmp_path / "j"
    journal = written(path)
    journal.rewrite([{"kind": "told", "n": n} for n in range(5)])
    journal.close()
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    for bad in (
        good.replace(b'"n":3', b'"n":4'),
        b"".join(lines[:-1]),
        good[:-2],
        b"".join([lines[0], *lines[2:], lines[1]]),
    ):
        path.write_bytes(bad)
        with pytest.raises(Corrupt, match="not what was written"):
            EventFile.open(path)
        assert path.read_bytes() == bad, "nothing is cut off"


@pytest.mark.parametrize("line", [b'{"kind":"drawn","n":0}', b"[1]", b"3", b'{"kind":"opened","token":"w1"}\n[1]'])
def test_a_file_that_is_no_journal_is_named_and_left_alone(tmp_path, line):
    path = tmp_path / "j"
    path.write_bytes(line + b"\n")
    with pytest.raises(Corrupt, match="j, line"):
        EventFile.open(path)
    assert path.read_bytes() == line + b"\n"


def test_however_many_groups_there_were_it_stays_short(tmp_path):
    most, path = 20_000, tmp_path / "j"
    journal, events = EventFile.open(path, most)
    groups, whole, written_anew = fold(events), [], 0
    for n in range(3000):
        for event in of_one_group(n, f"t{n % 10}"):
            journal.append(event)
            groups.apply(event)
            whole.append(event)
            if journal.grown:
                written_anew += journal.rewrite(groups.events())
            assert path.stat().st_size <= most
    journal.close()
    assert written_anew > 50
    _, left = reopened(path, most)
    assert vars(fold(left)) == vars(fold(whole)) == vars(groups)
