"""Single runs of code that a model wrote, each in a sandbox of its own that a backend starts for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ostinato.core.sandboxing import ExecResult, Limits, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import python_inside


class IsolatingBackend(Protocol):
    """A backend that can hide processes from each other."""

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> Sandbox:
        """As `Backend.start`. With `alone`, there is no /proc."""
        ...


class RunsInBoxes:
    r"""The counterpart of `SingleRuns` for other backends, slower by the start of a sandbox and of an interpreter. The caller owns the
    backend. There is no /proc here either: through it, graded code could read its judge's input. `python` is an interpreter in the
    sandbox, or "" for this machine's own, which is shown there.

    Example::

        runs = RunsInBoxes(boxes, SandboxConfig())
        result = await runs.run("print(6 * 7)", timeout=2.0)   # result.stdout == b"42\n"
    """

    def __init__(self, backend: IsolatingBackend, config: SandboxConfig, *, python: str = "") -> None:
        self._backend = backend
        self._python = python or python_inside()
        self._limits = Limits(
            memory_mb=config.memory_mb,
            disk_mb=config.disk_mb,
            processes=config.processes,
            open_files=config.open_files,
            output_bytes=config.output_bytes,
        )

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        timeout: float,
    ) -> ExecResult:
        """Run Python source, or an argv with an absolute path, in a fresh sandbox, where `files` lie in the working directory.

        Raises BadRequest for a file name that leads out of it, SandboxRefused, Unavailable.
        """
        placed = dict(files or {})
        if isinstance(program, str):
            placed["main.py"] = program.encode("utf-8", "surrogatepass")
            program = [self._python, "main.py"]
        box = await self._backend.start(SandboxSpec(files=placed, limits=self._limits), alone=True)
        try:
            return await box.exec(program, stdin=stdin, timeout=timeout)
        finally:
            await box.stop()
