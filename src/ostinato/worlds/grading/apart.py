"""Running a program of ours in a sandbox of its own: started for it, thrown away after it, without any network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ostinato.core.sandboxing import ExecResult, SandboxSpec
from ostinato.core.seams import Backend

_INSIDE = Path(__file__).with_name("inside")
_OUTPUT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Where and with which Python programs run apart. `python` is the interpreter's path inside of a sandbox.

    Example: ``await Apart(backend=backend, python="/usr/bin/python3").run("answering", spec, stdin=job, timeout=10.0)``
    """

    backend: Backend
    python: str

    async def run(
        self, program: str, spec: SandboxSpec, *, stdin: bytes, timeout: float, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a program of `inside/` in a fresh sandbox of `spec`, which gets no network and may say as much as a grader needs.

        What runs in the background dies with the sandbox, before anybody looks at the output. Raises what `Backend.start` raises.
        """
        limits = replace(spec.limits, output_bytes=max(spec.limits.output_bytes, _OUTPUT_BYTES))
        sandbox = await self.backend.start(replace(spec, hosts=(), limits=limits))
        try:
            argv = (self.python, "-s", "-B", "-c", _text(program))
            return await sandbox.exec(argv, stdin=stdin, env=env, timeout=timeout)
        finally:
            await asyncio.shield(sandbox.stop())


@cache
def _text(program: str) -> str:
    """A program's text, with `encoding` before it."""
    return "".join((_INSIDE / f"{name}.py").read_text("utf-8") for name in ("encoding", program))
