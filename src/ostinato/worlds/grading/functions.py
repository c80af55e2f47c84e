"""Grades a function by its results on inputs that are drawn at grading time (property-based and differential testing).

Three sandboxes are isolated from each other. In the first, trusted source draws inputs and a reference computes their results. In the
second, the model's code gets the inputs and nothing else. In the third, if the task has (metamorphic) relations, trusted source checks
whether the results satisfy them. This process, outside of all three, compares results as JSON trees. The second sandbox holds nothing to
read, patch, forge or exit early from: no expected value, no test, no verdict. Only correct results pass.

Each of a grader's programs runs in a fresh sandbox without network, which is discarded afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.sandbox import Change, ChangeKind, ExecResult, SandboxSpec
from ostinato.core.seams import Backend
from ostinato.worlds.grading.filtering import CountedSources, FilteredChanges, filter_changes
from ostinato.worlds.grading.grade import Grade, last_answer
from ostinato.worlds.grading.test_report import lines_of, same
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

# ---------------------------------------------------------------- running a grader's program


_INSIDE = Path(__file__).with_name("inside")
_OUTPUT_BYTES = 8 << 20
_MOST_DIRECTORIES = 2048  # directories that a sandbox's files may lie in


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedPrograms:
    """Runs graders' programs, each in a fresh sandbox of `backend`. `python` is the interpreter's path inside a sandbox.

    Example: ``await IsolatedPrograms(backend=backend, python="/usr/bin/python3").run("answering", spec, stdin=job, timeout=10.0)``
    """

    backend: Backend
    python: str

    async def run(
        self, program: str, spec: SandboxSpec, *, stdin: bytes, timeout: float, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a program of `inside/` in a fresh sandbox of `spec`, without network and mounts, and with an output limit of at least 8 MiB.

        Background processes die with the sandbox before the output is read. If paths conflict (see `clashing`), nothing runs and the exit
        code is 126. Raises what `Backend.start` raises.
        """
        if (clash := clashing(spec)) is not None:
            stderr = f"{clash} would have to be a file and a directory".encode("utf-8", "replace")
            return ExecResult(code=126, stdout=b"", stderr=stderr, timed_out=False, killed_reason=None, seconds=0.0)
        limits = replace(spec.limits, output_bytes=max(spec.limits.output_bytes, _OUTPUT_BYTES))
        sandbox = await self.backend.start(replace(spec, hosts=(), mounts={}, limits=limits))
        try:
            argv = (self.python, "-s", "-B", "-c", _text(program))
            return await sandbox.exec(argv, stdin=stdin, env=env, timeout=timeout)
        finally:
            await asyncio.shield(sandbox.stop())


def clashing(spec: SandboxSpec) -> str | None:
    """Return a path that a sandbox of `spec` would have to hold both as a file and as a directory, in its files or layers; None if there is
    none.

    If the files lie in more than 2048 directories, one of these is returned.
    """
    parents = {parent for path in spec.files for parent in _parents(path)}
    if both := parents & set(spec.files):
        return min(both)
    if len(parents) > _MOST_DIRECTORIES:
        return min(parents)
    for layer in map(Path, spec.layers):
        for parent in sorted(parents):
            if (layer / parent).is_file():
                return parent
        for path in spec.files:
            if (layer / path).is_dir():
                return path
    return None


def _parents(path: str) -> Iterator[str]:
    at = path.rfind("/")
    while at > 0:
        yield path[:at]
        at = path.rfind("/", 0, at)


@cache
def _text(program: str) -> str:
    """Return a program's source, with that of `encoding` prepended."""
    return "".join((_INSIDE / f"{name}.py").read_text("utf-8") for name in ("encoding", program))


# ---------------------------------------------------------------- functions


D = TypeVar("D", bound=BaseModel)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class FunctionGrading(BaseModel, frozen=True, extra="forbid"):
    """The schema of a function task's `Grading.data`.

    Example: ``FunctionGrading(entry="solution.py:add", reference="def add(a, b): return a + b", draw="def draw(r): return r.random(), 1")``
    """

    entry: str = Field(pattern=r"^[\w./-]+\.py:\w+$", description="Location of the function, as path:name.")
    draw: str = Field(description="Python source: draw(random) -> a tuple of arguments.")
    reference: str = Field(default="", description="Python source of a correct function of the same name.")
    vary: str = Field(default="", description="Python source: vary(random, args) -> further tuples of arguments.")
    holds: str = Field(
        default="",
        description="Python source: holds(inputs, results) -> bool, for an input and the inputs that vary made from it.",
    )
    draws: int = Field(default=32, ge=1, le=4096, description="Number of inputs drawn.")
    relative: float = Field(
        default=0.0, ge=0.0, description="Tolerated relative difference of a number from the reference's."
    )
    absolute: float = Field(
        default=0.0, ge=0.0, description="Tolerated absolute difference of a number from the reference's."
    )
    sources: tuple[str, ...] = Field(
        default=(), description="Globs of further files that may count. Empty: only the function's file."
    )
    message: bool = Field(
        default=False,
        description="Read the function from the last code block of the last message instead of from a file.",
    )

    @model_validator(mode="after")
    def _decidable(self) -> FunctionGrading:
        if not self.reference and not self.holds:
            raise ValueError("needs a reference, or vary with holds: without either no answer is right or wrong")
        if bool(self.holds) != bool(self.vary):
            raise ValueError("vary and holds go together: holds checks the results for the inputs that vary made")
        return self

    @property
    def path(self) -> str:
        """The function's file."""
        return self.entry.partition(":")[0]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.entry.partition(":")[2]


class FunctionGrader:
    """Implements `Grader` for function tasks. Each grading draws its inputs with a fresh random seed."""

    def __init__(self, programs: IsolatedPrograms) -> None:
        self._programs = programs

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        grading = read_data(FunctionGrading, task)
        counted = CountedSources(sources=(grading.path, *grading.sources))
        filtered = filter_changes(_written(grading, rollout), counted)
        seed = secrets.randbits(64)
        drawn = await self._drawn(task, grading, seed)
        answers = await self._answers(task, grading, filtered, [line[0] for line in drawn])
        right = (
            sum(_is_right(line, answer, grading) for line, answer in zip(drawn, answers, strict=False))
            if grading.reference
            else len(answers)
        )
        parts = {"answers": right / len(drawn)}
        why = f"{right} of {len(drawn)} drawn inputs answered {'rightly' if grading.reference else 'at all'}"
        if grading.holds:
            held, groups = await self._relations(task, grading, drawn, answers)
            parts["relations"] = held / groups
            why += f", {held} of {groups} relations hold"
        whole = not filtered.suspects and all(part == 1.0 for part in parts.values())
        return Grade(value=float(whole), parts=parts, why=f"{why} (seed {seed})", cheated=filtered.suspects)

    async def _run(self, task: Task, spec: SandboxSpec, job: Mapping[str, Any]) -> ExecResult:
        """Run one job of `inside/answering.py` in a fresh sandbox."""
        return await self._programs.run(
            "answering", spec, stdin=json.dumps(job).encode(), timeout=task.grading.timeout_s
        )

    async def _drawn(self, task: Task, grading: FunctionGrading, seed: int) -> list[Any]:
        """Return the drawn inputs, with the reference's results if there is a reference."""
        job: dict[str, Any] = {"draw": grading.draw, "vary": grading.vary, "seed": seed, "count": grading.draws}
        if grading.reference:
            job |= {"source": grading.reference, "name": grading.name}
        result = await self._run(task, SandboxSpec(limits=task.spec.limits), job)
        drawn = lines_of(result.stdout)
        if result.code != 0 or len(drawn) < grading.draws or len(drawn) % grading.draws:
            said = result.stderr.decode("utf-8", "replace")[-300:]
            raise Unavailable(
                f"task {task.id!r}: its reference answered {len(drawn)} inputs and ended with {result.code}"
                f" ({result.killed_reason or 'by itself'}): {said}"
            )
        return drawn

    async def _answers(
        self, task: Task, grading: FunctionGrading, filtered: FilteredChanges, inputs: list[Any]
    ) -> list[Any]:
        """Return the results of the model's function, as far as it got through the inputs."""
        files = written_over(task.spec.files, filtered)
        if grading.path not in files and not task.spec.layers:
            return []
        job = {"module": grading.path.removesuffix(".py").replace("/", "."), "name": grading.name, "inputs": inputs}
        result = await self._run(task, replace(task.spec, files=files), job)
        lines = await asyncio.to_thread(lines_of, result.stdout)  # on a thread: the model's code may send millions
        return [line for line in lines[: len(inputs)] if isinstance(line, list) and len(line) == 3]

    async def _relations(
        self, task: Task, grading: FunctionGrading, drawn: list[Any], answers: list[Any]
    ) -> tuple[int, int]:
        """Return how many relations hold, and how many there are."""
        size = len(drawn) // grading.draws
        pairs = [[line[0], _returned(answer)] for line, answer in zip(drawn, answers, strict=False)]
        groups = [pairs[at : at + size] for at in range(0, len(pairs), size)]
        whole = [group for group in groups if len(group) == size and all(pair[1] is not _NOTHING for pair in group)]
        if not whole:
            return 0, grading.draws
        job = {"holds": grading.holds, "groups": whole}
        result = await self._run(task, SandboxSpec(limits=task.spec.limits), job)
        return sum(line is True for line in lines_of(result.stdout)), grading.draws


_NOTHING: Any = object()  # a sentinel, since None is a valid result


def _returned(answer: list[Any]) -> Any:
    outcome = answer[1]
    return outcome[1] if isinstance(outcome, list) and len(outcome) == 2 and outcome[0] == "returned" else _NOTHING


def _is_right(line: list[Any], answer: list[Any], grading: FunctionGrading) -> bool:
    """Return True if a result matches the reference's: the value returned or the error raised, and the arguments after the call."""
    try:
        if not same(answer[0], line[0]) or not same(answer[2], line[2]):
            return False
        kind, expected = line[1]
        if not isinstance(answer[1], list) or len(answer[1]) != 2 or answer[1][0] != kind:
            return False
        if kind == "raised":
            return isinstance(answer[1][1], list) and expected[0] in answer[1][1]
        return kind == "returned" and same(answer[1][1], expected, relative=grading.relative, absolute=grading.absolute)
    except RecursionError:
        return False


def _written(grading: FunctionGrading, rollout: Rollout) -> tuple[Change, ...]:
    """Return the rollout's changes, or the code in its last message as a change."""
    if not grading.message:
        return rollout.changes
    blocks = _FENCED.findall(last_answer(rollout))
    if not blocks:
        return ()
    return (Change(path=grading.path, kind=ChangeKind.WRITTEN, data=blocks[-1].encode("utf-8", "surrogatepass")),)


def written_over(files: Mapping[str, bytes], filtered: FilteredChanges) -> dict[str, bytes]:
    """Return a task's files with the counted changes applied."""
    after = dict(files)
    for change in filtered.kept:
        if change.kind is ChangeKind.DELETED:
            after.pop(change.path, None)
        else:
            after[change.path] = change.data
    return after


def read_data(model: type[D], task: Task) -> D:
    """Parse a task's `grading.data`. Raises BadConfig, naming the task, the field and the error."""
    try:
        return model.model_validate(dict(task.grading.data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "data"
        raise BadConfig(f"task {task.id!r}: grading.{where}: {first['msg']}") from error
