"""Runs a package's tests in fresh sandboxes: batches of jobs, and the baseline of the unchanged suite.

A sandbox's output is untrusted. The baseline is three runs that differ in order, processes and hash seed; a test is stable if it passes
in all of them.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.sandbox import SandboxSpec
from ostinato.core.seams import Backend

_DRIVER = Path(__file__).with_name("driver.py")
_ANSWER_BYTES = 64 << 20
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlace:
    """A build's sandbox backend and directories. `python` and `workdir` are paths inside a sandbox.

    Example: ``BuildPlace(backend=backend, python="/usr/bin/python3", workdir="/work", layers=Path("tasks.layers"), cache=Path("cache"))``
    """

    backend: Backend
    python: str
    workdir: str
    layers: Path
    cache: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteJob:
    """A test run over a source tree with some files replaced.

    `targets`: pytest's arguments. `tests`: the ids to run among those collected, None for all. More than `most_failing` failures end the
    job early. `seconds`: limit of CPU time. `covered`: record the functions that each test enters. `backwards`: reverse the order. Once all
    `tests` of a job have passed, later jobs of its `group` are skipped and get no answer.

    Example: ``SuiteJob(id="0", targets=("tests",), edits={"calc.py": "..."}, seconds=5.0)``
    """

    id: str
    targets: tuple[str, ...]
    tests: tuple[str, ...] | None = None
    edits: Mapping[str, str] = field(default_factory=dict[str, str])
    most_failing: int | None = None
    seconds: float = 60.0
    covered: bool = False
    backwards: bool = False
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """The outcome of a job.

    `ended`: test -> "passed", "failed", "skipped" or "none". `seconds`: test -> wall time. `ran`: test -> the functions it entered, as
    (path, first line), with "" for those before the first test. `code`: pytest's exit code, or None if pytest did not finish because it
    `stopped` (too many failures), `hung`, or was killed by a `signal`.

    Example: ``SuiteRun(ended={"test_calc.py::test_add": "passed"}, code=0, cpu=0.2)``
    """

    ended: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    uncollected: Mapping[str, str] = field(default_factory=dict[str, str])
    ran: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict[str, frozenset[tuple[str, int]]])
    code: int | None = None
    stopped: bool = False
    hung: bool = False
    signal: int = 0
    cpu: float = 0.0
    changed: tuple[str, ...] = ()

    @property
    def passed(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(test for test, ended in self.ended.items() if ended == "passed")

    @property
    def failed(self) -> frozenset[str]:
        """The tests that failed."""
        return frozenset(test for test, ended in self.ended.items() if ended == "failed")


def _decode_answer(line: bytes) -> dict[str, Any]:
    """Decode one line of the driver's output. Raises ValueError if it is malformed: a sandbox's output is untrusted."""
    try:
        inflate = zlib.decompressobj()
        answer = json.loads(inflate.decompress(base64.b64decode(line, validate=True), _ANSWER_BYTES))
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(answer, dict):
        raise ValueError("not a JSON object")
    return answer


def _seconds(value: Any) -> float:
    """Parse a finite, non-negative duration. Raises ValueError, TypeError or OverflowError."""
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} s")
    return seconds


def read_outcome(answer: Mapping[str, Any]) -> SuiteRun:
    """Parse one of the driver's answers. Raises one of `_MALFORMED`."""
    functions = [(str(path), int(line)) for path, line in answer["functions"]]
    return SuiteRun(
        ended={str(test): str(ended) for test, (ended, _) in answer["tests"].items()},
        seconds={str(test): _seconds(seconds) for test, (_, seconds) in answer["tests"].items()},
        uncollected={str(test): str(why) for test, why in answer["uncollected"].items()},
        ran={str(test): frozenset(functions[number] for number in ran) for test, ran in answer["ran"].items()},
        code=None if answer["code"] is None else int(answer["code"]),
        stopped=bool(answer["stopped"]),
        hung=bool(answer["hung"]),
        signal=int(answer["signal"]),
        cpu=_seconds(answer["cpu"]),
        changed=tuple(str(path) for path in answer["changed"]),
    )


class SuiteRuns:
    """Runs jobs over one source tree. `cpu`: CPU seconds used inside the sandboxes so far. `warm`: modules to import before forking."""

    def __init__(self, backend: Backend, spec: SandboxSpec, python: str, warm: Sequence[str]) -> None:
        self.backend = backend
        self.spec = spec
        self.python = python
        self.warm = list(warm)
        self.cpu = 0.0
        self._driver = _DRIVER.read_text()

    async def run(self, jobs: Sequence[SuiteJob], seed: int) -> list[SuiteRun | None]:
        """Run jobs in sequence in one fresh sandbox, with `seed` as the hash seed. A job without an answer gives None.

        Raises Unavailable if the sandbox gives no answer at all.
        """
        if not jobs:
            return []
        rows = [asdict(job) | {"id": str(number)} for number, job in enumerate(jobs)]
        stdin = json.dumps({"warm": self.warm, "jobs": rows}).encode()
        sandbox = await self.backend.start(self.spec)
        try:
            result = await sandbox.exec(
                [self.python, "-s", "-c", self._driver],
                stdin=stdin,
                env={**self.spec.env, "PYTHONHASHSEED": str(seed)},
                timeout=30.0 + sum(3 * job.seconds + 10 for job in jobs),
            )
        finally:
            await sandbox.stop()
        outcomes: dict[str, SuiteRun] = {}
        spent: float | None = None
        for line in result.stdout.split(b"\n"):
            try:
                answer = _decode_answer(line)
                if "id" in answer:
                    outcomes[str(answer["id"])] = read_outcome(answer)
                else:
                    spent = _seconds(answer["cpu"])
            except _MALFORMED:
                continue
        self.cpu += sum(each.cpu for each in outcomes.values()) if spent is None else spent
        if not outcomes:
            errors_tail = result.stderr[-400:].decode("utf-8", "replace")
            raise Unavailable(
                f"the tests' driver gave no answer (exit {result.code}, {result.killed_reason}): {errors_tail}"
            )
        return [outcomes.get(str(number)) for number in range(len(jobs))]


# ---------------------------------------------------------------- the baseline


_SUITE_SECONDS = 60.0
_OK, _SOME_FAILED = 0, 1  # pytest's exit codes; all others mean that the run itself failed
_GREEN_SHARE = 0.95
_FEWEST_TESTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GreenSuite:
    """The baseline: the stable tests, in the suite's order, with their durations and the functions they enter.

    `seconds` and `ran` are as in `SuiteRun`. `cpu`: CPU seconds of one run of the suite. `unstable`: the number of tests that passed in
    only some runs. `failing`: the number that never passed.

    Example: ``GreenSuite(stable=("test_a.py::test_a",), seconds={"test_a.py::test_a": 0.01}, ran={}, cpu=0.4, unstable=0, failing=0)``
    """

    stable: tuple[str, ...]
    seconds: Mapping[str, float]
    ran: Mapping[str, frozenset[tuple[str, int]]]
    cpu: float
    unstable: int
    failing: int

    def tests_of(self, path: str, line: int) -> tuple[str, ...]:
        """Return the stable tests that enter the function at this path and line; all of them if it ran before the first test."""
        where = (path, line)
        if where in self.ran.get("", frozenset()):
            return self.stable
        return tuple(test for test in self.stable if where in self.ran.get(test, frozenset()))

    def seconds_of(self, tests: Sequence[str]) -> float:
        """Return the wall time of these tests, in seconds."""
        return sum(self.seconds.get(test, 0.0) for test in tests)


def judge_runs(runs: Sequence[SuiteRun]) -> tuple[tuple[str, ...], int, int]:
    """Return (tests that passed in every run, number that passed in only some, number that never passed). Skipped tests do not count.

    A test whose name changes with the hash seed counts as passing in only some runs. Raises BadRequest unless at least 95% of the first
    run's tests pass in that run, and at least 10 tests and half of all tests pass in every run.
    """
    first = [test for test, ended in runs[0].ended.items() if ended in ("passed", "failed")]
    stable = tuple(test for test in first if all(test in run.passed for run in runs))
    some = len({test for run in runs for test in run.passed}) - len(stable)
    failing = len(set(first) - {test for run in runs for test in run.passed}) + len(runs[0].uncollected)
    whole = len(first) + len(runs[0].uncollected)
    if len(runs[0].passed) < _GREEN_SHARE * whole or len(stable) < max(_FEWEST_TESTS, whole // 2):
        why = next(iter(runs[0].uncollected.values()), "").strip().splitlines()[-1:]
        raise BadRequest(
            f"the suite is not green: of {whole} tests {len(stable)} pass each time, {some} sometimes, {failing} never"
            + (f" ({why[0][:160]})" if why else ""),
            field="package",
        )
    return stable, some, failing


async def _complete(runs: SuiteRuns, job: SuiteJob, seed: int) -> SuiteRun:
    """Run one job and return its outcome. Raises BadRequest unless pytest ran to the end."""
    (outcome,) = await runs.run([job], seed)
    if outcome is None or outcome.hung:
        raise BadRequest(
            f"the suite does not end within {_SUITE_SECONDS:.0f} s of CPU time ({job.id})", field="package"
        )
    if outcome.code not in (_OK, _SOME_FAILED):
        why = next(iter(outcome.uncollected.values()), "").strip()[-200:]
        raise BadRequest(
            f"pytest itself failed ({job.id}): exit {outcome.code}, signal {outcome.signal} {why}", field="package"
        )
    return outcome


async def run_baseline(runs: SuiteRuns, targets: Sequence[str]) -> GreenSuite:
    """Run the suite in order, in reverse, and file by file in separate processes, with hash seeds 0, 1 and 2; then trace function calls.

    Raises BadRequest, with the reason, if the suite is not green or cannot be run.
    """
    places = tuple(targets)
    first = await _complete(runs, SuiteJob(id="first run", targets=places, seconds=_SUITE_SECONDS), 0)
    judge_runs([first])
    backwards = SuiteJob(id="backwards", targets=places, seconds=_SUITE_SECONDS, backwards=True)
    second = await _complete(runs, backwards, 1)
    files = sorted({test.split("::")[0] for test in first.ended})
    alone = await runs.run([SuiteJob(id=each, targets=(each,), seconds=_SUITE_SECONDS) for each in files], 2)
    third = SuiteRun(
        ended={test: ended for each in alone if each is not None for test, ended in each.ended.items()},
        uncollected=first.uncollected,
    )
    stable, unstable, failing = judge_runs([first, second, third])
    traced = SuiteJob(id="watched", targets=places, tests=stable, seconds=4 * _SUITE_SECONDS, covered=True)
    trace = await _complete(runs, traced, 0)
    stable = tuple(test for test in stable if test in trace.passed)
    return GreenSuite(
        stable=stable, seconds=first.seconds, ran=trace.ran, cpu=first.cpu, unstable=unstable, failing=failing
    )
