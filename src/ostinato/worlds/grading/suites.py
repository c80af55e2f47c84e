"""Grades changes to a repository by tests that must newly pass, and tests that must still pass.

A fresh sandbox gets the task's files, the changes that may count, and the tests without their expected values (`hidden_values.py`). What
the tests saw is reported to this process, which knows what they should see, from the tests' source and from a rehearsal: once per task, the
sealed tests run with the solution in place and none of a model's code in the sandbox. Claims that a sealed test cannot express (say, that a
value of one of the package's own classes equals a literal) are found there, and are left as the test states them.
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


_TRIES = 5
_PLAIN = 3  # the most runs of the unsealed tests: one failure on a busy machine does not make a task faulty
_LONGER = 4  # times its own deadline: the longest that a task's tests may take with the solution
_FAULTY = 0.1  # the largest share of the pass-to-pass tests that may be left out because they fail with the solution


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
    """What is needed to grade a task. `ids` maps a test's id to its id once expected values are removed from its parameters.

    `ungradable`: listed tests that do not pass with the solution when sealed. `solution` is None for a canary. `seconds`: the deadline that
    sufficed for the solution and holds for answers; None: the task's own.

    Example: ``Rehearsal(ids={"t.py::test[1-2]": "t.py::test[1-None]"}, open_places={}, solution={...}, ungradable=())``
    """

    ids: Mapping[str, str]
    open_places: Mapping[str, frozenset[Place]] = field(default_factory=dict[str, frozenset[Place]])
    solution: Mapping[str, TestHeard] | None = None
    ungradable: tuple[str, ...] = ()
    seconds: float | None = None


async def rehearse(apart: IsolatedPrograms, task: Task, asked: PytestGrading) -> Rehearsal:
    """Run the tests unsealed, then sealed until what they show is stable, each time under another hash seed.

    Raises BadConfig if fail-to-pass tests, or many pass-to-pass tests, do not pass with the solution (a few of the latter are left out),
    if they do not end in time, or if what they show does not become stable. Raises Unavailable if nothing is collected.
    """
    if not asked.solution:
        plain = await run_suite(apart, task, asked, {})
        return Rehearsal(ids={id: id for id in _collected(plain, task, asked)})
    plain, seconds = await _solved(apart, task, asked, task.grading.timeout_s)
    every = (*asked.fail_to_pass, *asked.pass_to_pass)
    broken = _broken(every, plain)
    for _ in range(_PLAIN - 1):
        if not broken:
            break
        plain, seconds = await _solved(apart, task, asked, seconds)
        broken &= _broken(every, plain)
    _collected(plain, task, asked)
    if broken & set(asked.fail_to_pass) or len(broken) > _FAULTY * len(asked.pass_to_pass):
        raise BadConfig(
            f"task {task.id!r}: grading.solution: {len(broken)} listed tests do not pass with it, as {min(broken)!r}"
        )
    listed = [id for id in every if id not in broken]
    opened: dict[str, set[Place]] = {path: set() for path in asked.files}
    before: Testimony | None = None
    for _ in range(_TRIES):
        shown, seconds = await _solved(apart, task, asked, seconds, opened)
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
    raise BadConfig(f"task {task.id!r}: what its tests see with the solution does not settle in {_TRIES} runs")


def _collected(plain: Testimony, task: Task, asked: PytestGrading) -> Sequence[str]:
    if not plain.collected:
        files = ", ".join(asked.files)
        raise Unavailable(
            f"task {task.id!r}: pytest collected nothing from {files} with the solution in place; {plain.errors}"
        )
    return plain.collected


async def _solved(
    apart: IsolatedPrograms,
    task: Task,
    asked: PytestGrading,
    seconds: float,
    open_places: Mapping[str, Collection[Place]] | None = None,
) -> tuple[Testimony, float]:
    """Run the tests with the solution in place. Returns what they reported and the deadline that sufficed, in seconds.

    The deadline is doubled from `seconds` to at most four times the task's own: a busy machine does not make a task faulty. Raises
    BadConfig if they do not end even then.
    """
    most = _LONGER * task.grading.timeout_s
    while seconds <= most:
        heard = await run_suite(apart, task, asked, asked.solution, open_places=open_places, seconds=seconds)
        if not heard.timed_out:
            return heard, seconds
        seconds *= 2
    raise BadConfig(
        f"task {task.id!r}: grading.timeout_s is {task.grading.timeout_s:g}, and its tests do not end within "
        f"{most:g} s with the solution in place: raise it"
    )


def _broken(listed: Sequence[str], plain: Testimony) -> set[str]:
    return {id for id in listed if id not in plain.tests or plain.tests[id].failed or not plain.tests[id].ended}


def _unsealable(tests: Collection[TestHeard], before: Testimony | None) -> set[tuple[str, Place]]:
    """Claims that do not hold although the solution is in place, or that show something else than in the run before."""
    found: set[tuple[str, Place]] = set()
    for heard in tests:
        earlier = before.tests.get(heard.id) if before is not None else None
        faulty = {
            where
            for where, site, shown, again in heard.beside(earlier)
            if not holds(site, shown, shown if earlier is None else again)
        }
        if heard.failed and not faulty:  # code after a claim needed something that sealing removed
            faulty = {where for where, _, _ in heard.saw}
        found |= faulty
    return found


def _agrees(heard: TestHeard, before: Testimony) -> bool:
    earlier = before.tests.get(heard.id)
    return earlier is not None and passes(heard, earlier) and passes(earlier, heard)


async def run_suite(
    apart: IsolatedPrograms,
    task: Task,
    asked: PytestGrading,
    changes: Mapping[str, str | None],
    *,
    open_places: Mapping[str, Collection[Place]] | None = None,
    seconds: float | None = None,
) -> Testimony:
    """Run the listed test files once in a fresh sandbox, with `changes` written over the task's files (None: deleted).

    `open_places` is test file -> the claims that are left open while it is sealed; None: the tests run as they are. The deadline is
    `seconds`, or the task's own if that is None.
    """
    drawn = random.Random(secrets.randbits(128))
    witness = f"_{drawn.getrandbits(64):016x}"
    written = {path: text.encode("utf-8", "surrogateescape") for path, text in changes.items() if text is not None}
    kept = {path: data for path, data in task.spec.files.items() if path not in changes}
    files = kept | written | dict(task.grading.hidden)
    sites: dict[str, tuple[str, Site]] = {}
    if open_places is not None:
        for path in asked.files:
            tests = seal(
                _source(task, path),
                witness=witness,
                drawn=drawn,
                open_places=open_places.get(path, ()),
                names=bool(asked.solution),
            )
            files[path] = tests.text.encode()
            sites |= {key: (path, site) for key, site in tests.sites.items()}
    job = {
        "witness": witness,
        "paths": asked.files,
        "path": asked.path,
        "deleted": [path for path, text in changes.items() if text is None],
        "fresh": [*changes, *asked.files],
    }
    result = await apart.run(
        "witnessing",
        replace(task.spec, files=files),
        stdin=json.dumps(job).encode(),
        timeout=task.grading.timeout_s if seconds is None else seconds,
        env={"PYTHONHASHSEED": str(drawn.randrange(1, 1 << 32))},
    )
    ended = f"it ended with {result.code} ({result.killed_reason or 'by itself'}): "
    errors = ended + result.stderr.decode("utf-8", "replace")[-300:]
    testimony = await asyncio.to_thread(read_testimony, result.stdout, sites)  # millions of lines, if its sender wants
    return replace(testimony, errors=errors, timed_out=result.timed_out)


def _source(task: Task, path: str) -> str:
    """A test file's text, from the hidden files, the task's files, or its layers, the last of which lies on top."""
    for files in (task.grading.hidden, task.spec.files):
        if path in files:
            return files[path].decode("utf-8")
    for layer in reversed(task.spec.layers):
        place = Path(layer, path)
        if place.is_file() and not place.is_symlink():
            return place.read_text("utf-8")
    raise BadConfig(f"task {task.id!r}: grading: there is no test file {path!r}, hidden or in the task's world")


def gradable(ids: Sequence[str], rehearsal: Rehearsal) -> list[str]:
    """The listed tests that can be graded."""
    left_out = set(rehearsal.ungradable)
    return [id for id in ids if id not in left_out]


# ---------------------------------------------------------------- the grader


_KNOWN = 4096  # rehearsals that are cached


def read_suite(task: Task) -> PytestGrading:
    """Parse a repository task's `grading.data`. Raises BadConfig."""
    asked = read_data(PytestGrading, task)
    if not asked.solution and task.split is not Split.CANARY:
        raise BadConfig(
            f"task {task.id!r}: grading.solution: only a canary has none; it says what the tests ought to see"
        )
    return asked


class PytestGrader:
    """Implements `Grader` for repository tasks.

    The first grading of a task rehearses it, which takes three or more runs of its tests. Later gradings take one run each.
    """

    def __init__(self, apart: IsolatedPrograms) -> None:
        self._apart = apart
        self._rehearsals: OrderedDict[str, asyncio.Task[Rehearsal]] = OrderedDict()

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        asked = read_suite(task)
        rehearsal = await self._rehearsed(task, asked)
        filtered = filter_changes(
            rollout.changes,
            CountedSources(sources=asked.sources, roots=asked.path, tests=(*asked.files, *task.grading.hidden)),
        )
        heard = await run_suite(
            self._apart, task, asked, _texts(filtered), open_places=rehearsal.open_places, seconds=rehearsal.seconds
        )
        return await asyncio.to_thread(_graded, asked, rehearsal, filtered, heard)  # it may search many messages

    async def _rehearsed(self, task: Task, asked: PytestGrading) -> Rehearsal:
        """A task's rehearsal, started by the first grading, shared by the others, and forgotten if it fails."""
        key = sha256(repr((task.id, task.spec, asked, sorted(task.grading.hidden.items()))).encode()).hexdigest()
        if key not in self._rehearsals:

            def forget(ended: asyncio.Task[Rehearsal]) -> None:
                if ended.cancelled() or ended.exception() is not None:  # also if its waiters were cancelled
                    self._rehearsals.pop(key, None)

            self._rehearsals[key] = asyncio.create_task(rehearse(self._apart, task, asked))
            self._rehearsals[key].add_done_callback(forget)
            while len(self._rehearsals) > _KNOWN:
                self._rehearsals.popitem(last=False)
        self._rehearsals.move_to_end(key)
        return await asyncio.shield(self._rehearsals[key])


def _texts(filtered: FilteredChanges) -> Mapping[str, str | None]:
    """Path -> text of the changes that count; None: deleted."""
    return {
        change.path: None if change.kind is ChangeKind.DELETED else change.data.decode("utf-8", "surrogateescape")
        for change in filtered.kept
    }


def _graded(asked: PytestGrading, rehearsal: Rehearsal, filtered: FilteredChanges, heard: Testimony) -> Grade:
    """The grade of a run: 1 if every test that can be graded passes and nothing looks like cheating."""
    parts: dict[str, float] = {}
    said: list[str] = []
    cheated = [*filtered.suspects]
    if heard.forged:
        cheated.append(f"{heard.forged} forged lines of testimony")
    for name, listed in (("fail_to_pass", asked.fail_to_pass), ("pass_to_pass", asked.pass_to_pass)):
        ids = gradable(listed, rehearsal)
        passed = sum(_passes(id, rehearsal, heard) for id in ids)
        parts[name] = passed / len(ids) if ids else float(not listed)
        said.append(f"{passed} of {len(ids)} {name}")
    parts["sealed"] = _share_sealed(gradable(asked.fail_to_pass, rehearsal), rehearsal)
    if rehearsal.ungradable:
        said.append(f"{len(rehearsal.ungradable)} listed tests cannot be graded")
    whole = parts["fail_to_pass"] == 1.0 and parts["pass_to_pass"] == 1.0 and not cheated
    return Grade(value=float(whole), parts=parts, why=", ".join(said), cheated=tuple(cheated))


def _passes(id: str, rehearsal: Rehearsal, heard: Testimony) -> bool:
    sealed_id = rehearsal.ids.get(id, id)
    test = heard.tests.get(sealed_id)
    if test is None or sealed_id not in heard.collected:
        return False
    return passes(test, rehearsal.solution[sealed_id] if rehearsal.solution is not None else None)


def _share_sealed(ids: Sequence[str], rehearsal: Rehearsal) -> float:
    """The share of tests that can only pass with a value that the sandbox does not hold."""
    if rehearsal.solution is None or not ids:
        return 0.0
    tests: list[TestHeard] = [rehearsal.solution[rehearsal.ids[id]] for id in ids]
    return sum(test.sealed for test in tests) / len(tests)
