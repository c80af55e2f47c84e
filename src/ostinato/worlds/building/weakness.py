"""Finds functions whose tests are too weak: they pass with a stub, or with the function deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.worlds.building.mutations.functions import Function
from ostinato.worlds.building.mutations.stubs import stubs
from ostinato.worlds.building.trying.runs import SuiteJob, SuiteRuns

_MARGIN_SECONDS = 1.0  # CPU time: a stub is either quick or hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A function to be written, and the tests that must then pass. They take `seconds` with the original function.

    `lazy` are tests that fail when the function does nothing, None if that run gave no failed test; `bare` are tests that pass without it.

    Example: ``Asked(function=function, tests=("test_a.py::test_b",), seconds=0.1, lazy=frozenset(), bare=frozenset())``
    """

    function: Function
    tests: tuple[str, ...]
    seconds: float
    lazy: frozenset[str] | None
    bare: frozenset[str]


async def passing_for_nothing(runs: SuiteRuns, sources: Mapping[str, str], asked: Sequence[Asked]) -> list[str]:
    """For each, a trivial stub that passes its tests, such as "return False"; "" if none was found."""
    found = ["nothing in its place" if each.bare.issuperset(each.tests) else "" for each in asked]
    jobs = [
        (at, returns, job)
        for at, each in enumerate(asked)
        if not found[at]
        for returns, job in _jobs(each, sources[each.function.path], str(at))
    ]
    outcomes = await runs.run([job for *_, job in jobs], 0)
    for (at, returns, job), outcome in zip(jobs, outcomes, strict=True):
        if outcome is not None and outcome.code is not None and outcome.passed.issuperset(job.tests or ()):
            found[at] = f"return {returns}"
    return found


def _jobs(asked: Asked, text: str, group: str) -> list[tuple[str, SuiteJob]]:
    """One job per stub. A job stops at its first failing test, and the group stops at the first stub that passes."""
    function, tests = asked.function, asked.tests
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    known = asked.lazy is None or not asked.lazy.isdisjoint(tests)  # doing nothing has been tried and does not pass
    jobs: list[tuple[str, SuiteJob]] = []
    for stub in stubs(function.block(text)):
        if known and stub.returns == "None":
            continue
        job = SuiteJob(
            id=f"{function.key} {stub.returns}", targets=tuple(files), tests=tests,
            edits={function.path: function.replaced(text, stub.block)}, most_failing=0,
            seconds=2 * asked.seconds + _MARGIN_SECONDS, group=group,
        )  # fmt: skip
        jobs.append((stub.returns, job))
    return jobs
