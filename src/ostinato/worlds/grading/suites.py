"""Grades changes to a repository as SWE-bench does: by tests that must newly pass (fail-to-pass) and tests that must still pass
(pass-to-pass).

A fresh sandbox gets the task's files, the changes that may count, and the tests without their expected values (`hidden_values.py`). The
tests report the values that they saw to this process, which knows the expected ones from the tests' source and from a rehearsal: once per
task, the sealed tests run with the reference solution in place and without any code of the model. The rehearsal also finds claims that
cannot be sealed (for example that an instance of one of the package's own classes equals a literal); these stay as the test states them.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.sandbox import ChangeKind
from ostinato.worlds.grading.filtering import CountedSources, FilteredChanges, filter_changes
from ostinato.worlds.grading.functions import IsolatedPrograms, read_data
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.grading.hidden_values import Place, Site, seal
from ostinato.worlds.grading.test_report import TestHeard, Testimony, holds, passes, read_testimony
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Split, Task

# ---------------------------------------------------------------- the rehearsal with the solution


_SEALED_RUNS = 5  # at most, until the reported values are stable
_UNSEALED_RUNS = 3  # at most: one failure on a busy machine does not make a task faulty
_DEADLINE_FACTOR = 4  # the solution's tests may take this many times the task's own deadline
_MOST_FAILING = 0.1  # the largest share of the pass-to-pass tests that may fail with the solution, and are left out


class PytestGrading(BaseModel, frozen=True, extra="forbid"):
    """The schema of a repository task's `Grading.data`.

    Example: ``PytestGrading(fail_to_pass=("test_calc.py::test_add",), solution={"calc.py": "def add(a, b): return a + b"})``
    """

    fail_to_pass: tuple[str, ...] = Field(
        min_length=1, description="Ids of tests that fail before the solution and pass after it."
    )
    pass_to_pass: tuple[str, ...] = Field(
        default=(), description="Ids of tests that pass both before and after the solution."
    )
    solution: Mapping[str, str | None] = Field(
        default={},
        description="Path -> text of each file that the solution changes. None instead of a text: the file is deleted. Only a canary has "
        "no solution.",
    )
    sources: tuple[str, ...] = Field(
        default=("**/*.py",), description="Globs of the files in which a rollout's changes may count."
    )
    path: tuple[str, ...] = Field(
        default=(".",), description="Import roots below the working directory, in search order."
    )

    @property
    def files(self) -> tuple[str, ...]:
        """The test files that the lists name."""
        return tuple(sorted({id.partition("::")[0] for id in (*self.fail_to_pass, *self.pass_to_pass)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found out about a task's tests.

    `ids`: test id -> its id in the sealed file, whose parameters lack expected values; `open_places`: test file -> claims that are not
    sealed; `solution`: the reports of the solution's tests, None for a canary; `ungradable`: listed tests that do not pass with the
    solution when sealed; `seconds`: the deadline that sufficed for the solution, used for rollouts too (None: the task's own).

    Example: ``Rehearsal(ids={"t.py::test[1-2]": "t.py::test[1-None]"}, open_places={}, solution={...}, ungradable=())``
    """

    ids: Mapping[str, str]
    open_places: Mapping[str, frozenset[Place]] = field(default_factory=dict[str, frozenset[Place]])
    solution: Mapping[str, TestHeard] | None = None
    ungradable: tuple[str, ...] = ()
    seconds: float | None = None


async def rehearse(programs: IsolatedPrograms, task: Task, grading: PytestGrading) -> Rehearsal:
    """Run the tests with the solution: unsealed, then sealed until the reported values are stable, each time under another hash seed.

    Without a solution (a canary), run the unsealed tests once, to learn their ids.

    Raises BadConfig if a fail-to-pass test or more than a tenth of the pass-to-pass tests fail with the solution (fewer are left out), if
    the tests do not end in time, or if the reported values do not become stable. Raises Unavailable if pytest collects nothing.
    """
    if not grading.solution:
        plain = await run_suite(programs, task, grading, {})
        return Rehearsal(ids={id: id for id in _collected(plain, task, grading)})
    plain, seconds = await _run_with_solution(programs, task, grading, task.grading.timeout_s)
    every = (*grading.fail_to_pass, *grading.pass_to_pass)
    broken = _failing(every, plain)
    for _ in range(_UNSEALED_RUNS - 1):
        if not broken:
            break
        plain, seconds = await _run_with_solution(programs, task, grading, seconds)
        broken &= _failing(every, plain)
    _collected(plain, task, grading)
    if broken & set(grading.fail_to_pass) or len(broken) > _MOST_FAILING * len(grading.pass_to_pass):
        raise BadConfig(
            f"task {task.id!r}: grading.solution: {len(broken)} listed tests do not pass with it, such as {min(broken)!r}"
        )
    listed = [id for id in every if id not in broken]
    opened: dict[str, set[Place]] = {path: set() for path in grading.files}
    before: Testimony | None = None
    for _ in range(_SEALED_RUNS):
        shown, seconds = await _run_with_solution(programs, task, grading, seconds, opened)
        ids = dict(zip(plain.collected, shown.collected, strict=False))
        found = _unsealable([shown.tests[ids[id]] for id in listed if ids.get(id) in shown.tests], before)
        if before is not None and not found:
            gradable = {id for id in listed if ids.get(id) in shown.tests and _agrees(shown.tests[ids[id]], before)}
            return Rehearsal(
                ids=ids,
                open_places={path: frozenset(places) for path, places in opened.items()},
                solution=shown.tests,
                ungradable=tuple(id for id in every if id not in gradable),
                seconds=seconds,
            )
        for path, place in found:
            opened[path].add(place)
        before = None if found else shown
    raise BadConfig(
        f"task {task.id!r}: the values that its tests see with the solution are not stable after {_SEALED_RUNS} runs; "
        "remove what is random from the tests or the code"
    )


def _collected(plain: Testimony, task: Task, grading: PytestGrading) -> Sequence[str]:
    if not plain.collected:
        files = ", ".join(grading.files)
        raise Unavailable(
            f"task {task.id!r}: pytest collected nothing from {files} with the solution in place; {plain.errors}"
        )
    return plain.collected


async def _run_with_solution(
    programs: IsolatedPrograms,
    task: Task,
    grading: PytestGrading,
    seconds: float,
    open_places: Mapping[str, Collection[Place]] | None = None,
) -> tuple[Testimony, float]:
    """Run the tests with the solution in place. Returns what they reported, and the deadline that sufficed, in seconds.

    The deadline is doubled from `seconds` to at most four times the task's own, because a busy machine does not make a task faulty. Raises
    BadConfig if the tests do not end even then.
    """
    most = _DEADLINE_FACTOR * task.grading.timeout_s
    while seconds <= most:
        heard = await run_suite(programs, task, grading, grading.solution, open_places=open_places, seconds=seconds)
        if not heard.timed_out:
            return heard, seconds
        seconds *= 2
    raise BadConfig(
        f"task {task.id!r}: grading.timeout_s is {task.grading.timeout_s:g}, and its tests do not end within "
        f"{most:g} s with the solution in place: raise it"
    )


def _failing(listed: Sequence[str], plain: Testimony) -> set[str]:
    return {id for id in listed if id not in plain.tests or plain.tests[id].failed or not plain.tests[id].ended}


def _unsealable(tests: Collection[TestHeard], before: Testimony | None) -> set[tuple[str, Place]]:
    """Return the claims that do not hold with the solution in place, or whose values differ from those of the run before."""
    unsealable: set[tuple[str, Place]] = set()
    for heard in tests:
        earlier = before.tests.get(heard.id) if before is not None else None
        faulty = {
            where
            for where, site, shown, again in heard.beside(earlier)
            if not holds(site, shown, shown if earlier is None else again)
        }
        if heard.failed and not faulty:  # the test's code needed something that sealing removed
            faulty = {where for where, _, _ in heard.saw}
        unsealable |= faulty
    return unsealable


def _agrees(heard: TestHeard, before: Testimony) -> bool:
    earlier = before.tests.get(heard.id)
    return earlier is not None and passes(heard, earlier) and passes(earlier, heard)


async def run_suite(
    programs: IsolatedPrograms,
    task: Task,
    grading: PytestGrading,
    changes: Mapping[str, str | None],
    *,
    open_places: Mapping[str, Collection[Place]] | None = None,
    seconds: float | None = None,
) -> Testimony:
    """Run the listed test files once in a fresh sandbox, with `changes` written over the task's files (None: deleted).

    `open_places`: test file -> claims that are not sealed; None: the tests run unsealed. `seconds`: the deadline; None: the task's own.
    """
    drawn = random.Random(secrets.randbits(128))
    witness = f"_{drawn.getrandbits(64):016x}"
    written = {path: text.encode("utf-8", "surrogateescape") for path, text in changes.items() if text is not None}
    kept = {path: data for path, data in task.spec.files.items() if path not in changes}
    files = kept | written | dict(task.grading.hidden)
    sites: dict[str, tuple[str, Site]] = {}
    if open_places is not None:
        for path in grading.files:
            tests = seal(
                _source(task, path),
                witness=witness,
                drawn=drawn,
                open_places=open_places.get(path, ()),
                names=bool(grading.solution),
            )
            files[path] = tests.text.encode()
            sites |= {key: (path, site) for key, site in tests.sites.items()}
    job = {
        "witness": witness,
        "paths": grading.files,
        "path": grading.path,
        "deleted": [path for path, text in changes.items() if text is None],
        "fresh": [*changes, *grading.files],
    }
    result = await programs.run(
        "witnessing",
        replace(task.spec, files=files),
        stdin=json.dumps(job).encode(),
        timeout=task.grading.timeout_s if seconds is None else seconds,
        env={"PYTHONHASHSEED": str(drawn.randrange(1, 1 << 32))},
    )
    ended = f"it ended with {result.code} ({result.killed_reason or 'by itself'}): "
    errors = ended + result.stderr.decode("utf-8", "replace")[-300:]
    # on a thread, because there may be millions of lines
    testimony = await asyncio.to_thread(read_testimony, result.stdout, sites)
    return replace(testimony, errors=errors, timed_out=result.timed_out)


def _source(task: Task, path: str) -> str:
    """Return a test file's text, from the hidden files, the task's files, or the topmost layer that has it."""
    for files in (task.grading.hidden, task.spec.files):
        if path in files:
            return files[path].decode("utf-8")
    for layer in reversed(task.spec.layers):
        place = Path(layer, path)
        if place.is_file() and not place.is_symlink():
            return place.read_text("utf-8")
    raise BadConfig(
        f"task {task.id!r}: grading: there is no test file {path!r}, neither hidden nor in the task's files"
    )


def gradable(ids: Sequence[str], rehearsal: Rehearsal) -> list[str]:
    """Return the listed tests that can be graded."""
    left_out = set(rehearsal.ungradable)
    return [id for id in ids if id not in left_out]


# ---------------------------------------------------------------- the grader


_CACHED_REHEARSALS = 4096


def read_suite(task: Task) -> PytestGrading:
    """Parse a repository task's `grading.data`. Raises BadConfig."""
    grading = read_data(PytestGrading, task)
    if not grading.solution and task.split is not Split.CANARY:
        raise BadConfig(
            f"task {task.id!r}: grading.solution is missing; only a canary may lack it, since it shows what the tests should see"
        )
    return grading


class PytestGrader:
    """Implements `Grader` for repository tasks.

    The first grading of a task rehearses it, in three or more runs of its tests. Later gradings take one run each.
    """

    def __init__(self, programs: IsolatedPrograms) -> None:
        self._programs = programs
        self._rehearsals: OrderedDict[str, asyncio.Task[Rehearsal]] = OrderedDict()

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        grading = read_suite(task)
        rehearsal = await self._rehearsed(task, grading)
        filtered = filter_changes(
            rollout.changes,
            CountedSources(sources=grading.sources, roots=grading.path, tests=(*grading.files, *task.grading.hidden)),
        )
        heard = await run_suite(
            self._programs,
            task,
            grading,
            _texts(filtered),
            open_places=rehearsal.open_places,
            seconds=rehearsal.seconds,
        )
        # on a thread, because pattern searches may be slow
        return await asyncio.to_thread(_graded, grading, rehearsal, filtered, heard)

    async def _rehearsed(self, task: Task, grading: PytestGrading) -> Rehearsal:
        """Return a task's rehearsal: started by the first grading, shared by concurrent and later ones, and forgotten if it fails."""
        key = sha256(repr((task.id, task.spec, grading, sorted(task.grading.hidden.items()))).encode()).hexdigest()
        if key not in self._rehearsals:

            def forget(ended: asyncio.Task[Rehearsal]) -> None:
                # `exception` marks the error as retrieved, in case all waiters were cancelled
                if ended.cancelled() or ended.exception() is not None:
                    self._rehearsals.pop(key, None)

            self._rehearsals[key] = asyncio.create_task(rehearse(self._programs, task, grading))
            self._rehearsals[key].add_done_callback(forget)
            while len(self._rehearsals) > _CACHED_REHEARSALS:
                self._rehearsals.popitem(last=False)
        self._rehearsals.move_to_end(key)
        return await asyncio.shield(self._rehearsals[key])


def _texts(filtered: FilteredChanges) -> Mapping[str, str | None]:
    """Return the counted changes as path -> text (None: deleted)."""
    return {
        change.path: None if change.kind is ChangeKind.DELETED else change.data.decode("utf-8", "surrogateescape")
        for change in filtered.kept
    }


def _graded(grading: PytestGrading, rehearsal: Rehearsal, filtered: FilteredChanges, heard: Testimony) -> Grade:
    """Return the grade of a run: 1 if every gradable test passes and nothing looks like cheating."""
    parts: dict[str, float] = {}
    why: list[str] = []
    cheated = [*filtered.suspects]
    if heard.forged:
        cheated.append(f"{heard.forged} forged lines of testimony")
    for name, listed in (("fail_to_pass", grading.fail_to_pass), ("pass_to_pass", grading.pass_to_pass)):
        ids = gradable(listed, rehearsal)
        passed = sum(_passes(id, rehearsal, heard) for id in ids)
        parts[name] = passed / len(ids) if ids else float(not listed)
        why.append(f"{passed} of {len(ids)} {name}")
    parts["sealed"] = _share_sealed(gradable(grading.fail_to_pass, rehearsal), rehearsal)
    if rehearsal.ungradable:
        why.append(f"{len(rehearsal.ungradable)} listed tests cannot be graded")
    whole = parts["fail_to_pass"] == 1.0 and parts["pass_to_pass"] == 1.0 and not cheated
    return Grade(value=float(whole), parts=parts, why=", ".join(why), cheated=tuple(cheated))


def _passes(id: str, rehearsal: Rehearsal, heard: Testimony) -> bool:
    sealed_id = rehearsal.ids.get(id, id)
    test = heard.tests.get(sealed_id)
    if test is None or sealed_id not in heard.collected:
        return False
    return passes(test, rehearsal.solution[sealed_id] if rehearsal.solution is not None else None)


def _share_sealed(ids: Sequence[str], rehearsal: Rehearsal) -> float:
    """Return the share of tests that can only pass by computing a value that the sandbox does not hold."""
    if rehearsal.solution is None or not ids:
        return 0.0
    tests: list[TestHeard] = [rehearsal.solution[rehearsal.ids[id]] for id in ids]
    return sum(test.sealed for test in tests) / len(tests)
