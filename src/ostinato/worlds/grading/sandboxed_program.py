"""Runs a program of the grader in a fresh sandbox without network, which is discarded afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ostinato.core.sandbox import ExecResult, SandboxSpec
from ostinato.core.seams import Backend

_INSIDE = Path(__file__).with_name("inside")
_OUTPUT_BYTES = 8 << 20
_DIRECTORIES = 2048  # the most directories that files may lie in


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Runs programs in isolation, on `backend`. `python` is the interpreter's path inside a sandbox.

    Example: ``await Apart(backend=backend, python="/usr/bin/python3").run("answering", spec, stdin=job, timeout=10.0)``
    """

    backend: Backend
    python: str

    async def run(
        self, program: str, spec: SandboxSpec, *, stdin: bytes, timeout: float, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a program of `inside/` in a fresh sandbox of `spec`, which gets no network and may output as much as a grader needs.

        Background processes die with the sandbox, before the output is read. If the files clash, nothing runs and the exit code is 126.
        Raises what `Backend.start` raises.
        """
        if (clash := clashing(spec)) is not None:
            said = f"{clash} would have to be a file and a directory".encode("utf-8", "replace")
            return ExecResult(code=126, stdout=b"", stderr=said, timed_out=False, killed_reason=None, seconds=0.0)
        limits = replace(spec.limits, output_bytes=max(spec.limits.output_bytes, _OUTPUT_BYTES))
        sandbox = await self.backend.start(replace(spec, hosts=(), limits=limits))
        try:
            argv = (self.python, "-s", "-B", "-c", _text(program))
            return await sandbox.exec(argv, stdin=stdin, env=env, timeout=timeout)
        finally:
            await asyncio.shield(sandbox.stop())


def clashing(spec: SandboxSpec) -> str | None:
    """A path that a sandbox of `spec` would have to hold both as a file and as a directory, among its files or in a layer.

    If the files lie in more than 2048 directories, it is one of those. None if nothing clashes.
    """
    parents = {parent for path in spec.files for parent in _parents(path)}
    if both := parents & set(spec.files):
        return min(both)
    if len(parents) > _DIRECTORIES:
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
    """A program's text, with `encoding` prepended."""
    return "".join((_INSIDE / f"{name}.py").read_text("utf-8") for name in ("encoding", program))
