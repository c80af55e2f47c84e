"""Runs a package's unchanged suite three times in different ways and keeps the tests that pass each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.core.errors import BadRequest
from ostinato.worlds.building.trying.runs import SuiteJob, SuiteRun, SuiteRuns

_SUITE_SECONDS = 60.0
_OK, _SOME_FAILED = 0, 1  # pytest's exit codes; the others mean that the run itself went wrong
_GREEN = 0.95
_FEWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GreenSuite:
    """The stable tests, in the suite's order, with their durations and the functions they enter.

    `seconds` is test -> wall time; `ran` is test -> the functions it entered, as (path, first line), "" for what ran before the first test.
    `cpu` is the CPU time of one run of the suite. `unstable` counts the tests that passed in only some runs, `failing` those in none.

    Example: ``GreenSuite(stable=("test_a.py::test_a",), seconds={"test_a.py::test_a": 0.01}, ran={}, cpu=0.4, unstable=0, failing=0)``
    """

    stable: tuple[str, ...]
    seconds: Mapping[str, float]
    ran: Mapping[str, frozenset[tuple[str, int]]]
    cpu: float
    unstable: int
    failing: int

    def tests_of(self, path: str, line: int) -> tuple[str, ...]:
        """The stable tests that enter the function; all of them if it ran before the first test."""
        where = (path, line)
        if where in self.ran.get("", frozenset()):
            return self.stable
        return tuple(test for test in self.stable if where in self.ran.get(test, frozenset()))


def judge_runs(runs: Sequence[SuiteRun]) -> tuple[tuple[str, ...], int, int]:
    """The tests that passed in every run, the number that passed in only some, and the number that never passed (skipped tests left out).

    A test whose name changes with the hash seed counts as passing in only some runs. Raises BadRequest unless at least 95% of the first
    run's tests pass in that run, and at least 10 tests and half of all tests pass in every run.
    """
    first = [test for test, ended in runs[0].ended.items() if ended in ("passed", "failed")]
    stable = tuple(test for test in first if all(test in run.passed for run in runs))
    some = len({test for run in runs for test in run.passed}) - len(stable)
    failing = len(set(first) - {test for run in runs for test in run.passed}) + len(runs[0].uncollected)
    whole = len(first) + len(runs[0].uncollected)
    if len(runs[0].passed) < _GREEN * whole or len(stable) < max(_FEWEST, whole // 2):
        why = next(iter(runs[0].uncollected.values()), "").strip().splitlines()[-1:]
        raise BadRequest(
            f"the suite is not green: of {whole} tests {len(stable)} pass each time, {some} sometimes, {failing} never"
            + (f" ({why[0][:160]})" if why else ""),
            field="package",
        )
    return stable, some, failing


def _complete(outcome: SuiteRun | None, what: str) -> SuiteRun:
    """The outcome, if the run completed. Raises BadRequest otherwise."""
    if outcome is None or outcome.hung:
        raise BadRequest(f"the suite does not end within {_SUITE_SECONDS:.0f} s of CPU time ({what})", field="package")
    if outcome.code not in (_OK, _SOME_FAILED):
        why = next(iter(outcome.uncollected.values()), "").strip()[-200:]
        raise BadRequest(
            f"pytest itself failed ({what}): exit {outcome.code}, signal {outcome.signal} {why}", field="package"
        )
    return outcome


async def run_baseline(runs: SuiteRuns, targets: Sequence[str]) -> GreenSuite:
    """Run the suite in order, backwards, and file by file in separate processes, under hash seeds 0, 1 and 2; then trace what it runs.

    Raises:
        BadRequest: the suite is not green or cannot be run; the message says why.
    """
    places = tuple(targets)
    (first,) = await runs.run([SuiteJob(id="order", targets=places, seconds=_SUITE_SECONDS)], 0)
    first = _complete(first, "first run")
    judge_runs([first])
    (second,) = await runs.run([SuiteJob(id="back", targets=places, seconds=_SUITE_SECONDS, backwards=True)], 1)
    second = _complete(second, "backwards")
    files = sorted({test.split("::")[0] for test in first.ended})
    alone = await runs.run([SuiteJob(id=each, targets=(each,), seconds=_SUITE_SECONDS) for each in files], 2)
    third = SuiteRun(
        ended={test: ended for each in alone if each is not None for test, ended in each.ended.items()},
        uncollected=first.uncollected,
    )
    stable, unstable, failing = judge_runs([first, second, third])
    watched = SuiteJob(id="watch", targets=places, tests=stable, seconds=4 * _SUITE_SECONDS, covered=True)
    (seen,) = await runs.run([watched], 0)
    seen = _complete(seen, "watched")
    stable = tuple(test for test in stable if test in seen.passed)
    return GreenSuite(
        stable=stable, seconds=first.seconds, ran=seen.ran, cpu=first.cpu, unstable=unstable, failing=failing
    )
