"""Runs a package's tests in fresh sandboxes: the jobs of one request, and the baseline of the unchanged suite.

What a sandbox prints is read as untrusted. The baseline is three runs in different ways; the tests that pass each time are kept.
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
    """A build's backend and directories. Inside a sandbox, `python` is the interpreter's path and `workdir` the files' directory.

    Example: ``BuildPlace(backend=backend, python="/usr/bin/python3", workdir="/work", layers=Path("tasks.layers"), cache=Path("cache"))``
    """

    backend: Backend
    python: str
    workdir: str
    layers: Path
    cache: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteJob:
    """Tests to run over a tree with some files replaced.

    `targets` are pytest's arguments; `tests` the ids to run among those collected, None for all. More than `most_failing` failures end
    the job early. `seconds` is CPU time. Once all `tests` of a job have passed, later jobs of its `group` are not run and get no answer.

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
    """The outcome of a job. `ended` is test -> "passed", "failed", "skipped" or "none"; `seconds` is test -> its wall time.

    `ran` is test -> the functions it entered, as (path, first line); "" stands for what ran before the first test. `code` is pytest's exit
    code, None if pytest did not finish: it `stopped` (too many failures), `hung`, or was killed by a `signal`.

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


def _unpacked(line: bytes) -> dict[str, Any]:
    """Decode one answer. Raises ValueError if it is malformed: a sandbox's output is untrusted."""
    try:
        inflate = zlib.decompressobj()
        answer = json.loads(inflate.decompress(base64.b64decode(line, validate=True), _ANSWER_BYTES))
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(answer, dict):
        raise ValueError("no object")
    return answer


def _seconds(given: Any) -> float:
    """A duration, which a budget can count. Raises ValueError, TypeError or OverflowError."""
    seconds = float(given)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} s")
    return seconds


def read_outcome(answer: Mapping[str, Any]) -> SuiteRun:
    """Read one of the driver's answers. Raises one of `_MALFORMED`."""
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
    """Runs jobs over one tree. `cpu` counts the CPU seconds used inside the sandboxes."""

    def __init__(self, backend: Backend, spec: SandboxSpec, python: str, warm: Sequence[str]) -> None:
        self.backend = backend
        self.spec = spec
        self.python = python
        self.warm = list(warm)
        self.cpu = 0.0
        self._driver = _DRIVER.read_text()

    async def run(self, jobs: Sequence[SuiteJob], seed: int) -> list[SuiteRun | None]:
        """Run jobs one after the other in one fresh sandbox, with `seed` as the hash seed. None for a job that got no answer.

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
        found: dict[str, SuiteRun] = {}
        spent: float | None = None
        for line in result.stdout.split(b"\n"):
            try:
                answer = _unpacked(line)
                if "id" in answer:
                    found[str(answer["id"])] = read_outcome(answer)
                else:
                    spent = _seconds(answer["cpu"])
            except _MALFORMED:
                continue
        self.cpu += sum(each.cpu for each in found.values()) if spent is None else spent
        if not found:
            told = result.stderr[-400:].decode("utf-8", "replace")
            raise Unavailable(f"the tests' driver gave no answer (exit {result.code}, {result.killed_reason}): {told}")
        return [found.get(str(number)) for number in range(len(jobs))]


# ---------------------------------------------------------------- the baseline


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

    def seconds_of(self, tests: Sequence[str]) -> float:
        """The wall time of these tests, in seconds."""
        return sum(self.seconds.get(test, 0.0) for test in tests)


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


async def _complete(runs: SuiteRuns, job: SuiteJob, seed: int) -> SuiteRun:
    """The outcome of one job. Raises BadRequest unless it ran to the end."""
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
    """Run the suite in order, backwards, and file by file in separate processes, under hash seeds 0, 1 and 2; then trace what it runs.

    Raises BadRequest, which says why, if the suite is not green or cannot be run.
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
    watched = SuiteJob(id="watched", targets=places, tests=stable, seconds=4 * _SUITE_SECONDS, covered=True)
    seen = await _complete(runs, watched, 0)
    stable = tuple(test for test in stable if test in seen.passed)
    return GreenSuite(
        stable=stable, seconds=first.seconds, ran=seen.ran, cpu=first.cpu, unstable=unstable, failing=failing
    )
