"""Grades changes to a repository by tests that must newly pass, and tests that must still pass.

A fresh sandbox gets the task's files, the changes that may count, and the tests without their expected values (`sealing.py`). What the
tests saw is reported to this process, which knows what they should see, from the tests' source and from a rehearsal with the solution.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from ostinato.core.errors import BadConfig
from ostinato.core.sandboxing import ChangeKind
from ostinato.worlds.grading.filtering import CountedSources, FilteredChanges, filter_changes
from ostinato.worlds.grading.functions import read_data
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.grading.sandboxed_program import Apart
from ostinato.worlds.grading.solution_check import PytestGrading, Rehearsal, gradable, rehearse, run_suite
from ostinato.worlds.grading.test_report import TestHeard, Testimony, passes
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Split, Task

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

    Example: ``await PytestGrader(Apart(backend=backend, python=python)).grade(task, rollout)``
    """

    def __init__(self, apart: Apart) -> None:
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
        return _graded(asked, rehearsal, filtered, heard)

    async def _rehearsed(self, task: Task, asked: PytestGrading) -> Rehearsal:
        """A task's rehearsal, started by the first grading, shared by the others, and forgotten if it fails."""
        key = sha256(repr((task.id, task.spec, asked, sorted(task.grading.hidden.items()))).encode()).hexdigest()
        if key not in self._rehearsals:
            begun = asyncio.get_running_loop().create_task(rehearse(self._apart, task, asked))
            begun.add_done_callback(_heard)
            self._rehearsals[key] = begun
            while len(self._rehearsals) > _KNOWN:
                self._rehearsals.popitem(last=False)
        self._rehearsals.move_to_end(key)
        try:
            return await asyncio.shield(self._rehearsals[key])
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._rehearsals.pop(key, None)
            raise


def _heard(ended: asyncio.Task[Rehearsal]) -> None:
    """Retrieve the exception of a rehearsal that is no longer awaited because its waiters were cancelled."""
    if not ended.cancelled():
        ended.exception()


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
