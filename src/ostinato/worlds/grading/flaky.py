"""Finds flaky tests by running them again under other hash seeds, so that nothing is graded by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.worlds.grading.sandboxed_program import Apart
from ostinato.worlds.grading.suites import PytestGrading, run_suite
from ostinato.worlds.grading.test_report import Testimony
from ostinato.worlds.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """The sorted ids of the tests that always passed, always failed, or did both.

    Example: ``Steadiness(passing=("t.py::test_a",), failing=(), flaky=("t.py::test_b",))``
    """

    passing: tuple[str, ...]
    failing: tuple[str, ...]
    flaky: tuple[str, ...]


async def steadiness_of(apart: Apart, task: Task, asked: PytestGrading, *, runs: int = 3) -> Steadiness:
    """Run the listed files with the solution in place, each time in a fresh sandbox under a hash seed drawn for it.

    Sandboxes are started one after the other. Raises Unavailable.
    """
    return compared([await run_suite(apart, task, asked, asked.solution, sealed=False) for _ in range(runs)])


def compared(runs: Sequence[Testimony]) -> Steadiness:
    """Compare runs. A test that is missing from a run, was skipped or did not end counts as failed in it."""
    ids = sorted({id for run in runs for id in (*run.collected, *run.tests)})
    passed = {id: [_passed(run, id) for run in runs] for id in ids}
    return Steadiness(
        passing=tuple(id for id in ids if all(passed[id])),
        failing=tuple(id for id in ids if not any(passed[id])),
        flaky=tuple(id for id in ids if any(passed[id]) and not all(passed[id])),
    )


def _passed(run: Testimony, id: str) -> bool:
    heard = run.tests.get(id)
    return heard is not None and heard.ended and not heard.failed and not heard.skipped
