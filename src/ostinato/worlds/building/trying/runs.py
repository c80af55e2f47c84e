"""The host side of running tests: sends jobs to a fresh sandbox in one request and reads its output as untrusted."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.core.errors import Unavailable
from ostinato.core.sandboxing import SandboxSpec
from ostinato.core.seams import Backend

_DRIVER = Path(__file__).with_name("driver.py")
_ANSWER_BYTES = 64 << 20
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


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
    options: tuple[str, ...] = ()
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
    """Runs jobs over one tree. `cpu` counts the CPU seconds used inside the sandboxes.

    Example: ``outcomes = await SuiteRuns(backend, spec, "/usr/bin/python3", ("pytest",)).run([job], seed=0)``
    """

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
        rows = [
            {
                "id": str(number), "edits": dict(job.edits), "targets": list(job.targets), "options": list(job.options),
                "tests": None if job.tests is None else list(job.tests), "most_failing": job.most_failing, "seconds": job.seconds,
                "covered": job.covered, "backwards": job.backwards, "group": job.group,
            }
            for number, job in enumerate(jobs)
        ]  # fmt: skip
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
