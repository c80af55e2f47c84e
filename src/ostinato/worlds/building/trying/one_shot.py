"""Sandboxes for one program each, over `SingleRuns`: every run gets fresh files. Building keeps no state, so that is enough."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.core.errors import TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ExecResult, Isolation, SandboxSpec
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns

ONE_SHOT_WORKDIR = "/tmp"
_MOST_BYTES = 24 << 20  # of files: a run's request carries them as JSON text, up to twice as long, and may have 64 MiB


class OneShotBackend:
    """A backend for programs that do not depend on each other. The files always lie in /tmp, and the backend's own limits apply.

    Example: ``sandbox = await OneShotBackend().start(SandboxSpec(files={"a.py": b"print(1)"}, workdir="/tmp"))``
    """

    def __init__(self, memory_mb: int = 4096, disk_mb: int = 512) -> None:
        self.runs = SingleRuns(
            SandboxConfig(
                memory_mb=memory_mb, disk_mb=disk_mb, processes=64, open_files=256, output_bytes=64 << 20, concurrency=1
            )
        )

    async def isolation(self) -> Isolation:
        await self.runs.check()
        return Isolation(kind="namespaces", forks=False, counts_memory=False, missing=("a limit on memory as a whole",))

    async def start(self, spec: SandboxSpec) -> OneShotSandbox:
        files: dict[str, bytes] = {}
        for layer in spec.layers:
            for path in Path(layer).rglob("*"):
                if path.is_file() and not path.is_symlink():
                    files[path.relative_to(layer).as_posix()] = path.read_bytes()
        size = sum(map(len, files.values()))
        if size > _MOST_BYTES:
            raise TooLarge(
                f"layers: {size >> 20} MiB of files, {_MOST_BYTES >> 20} fit into a sandbox for one program",
                field="layers",
            )
        return OneShotSandbox(self.runs, {**files, **spec.files})

    async def close(self) -> None:
        self.runs.close()


class OneShotSandbox:
    """The files that each program starts with. Nothing that a program writes is kept for the next."""

    def __init__(self, runs: SingleRuns, files: Mapping[str, bytes]) -> None:
        self.runs = runs
        self.files = dict(files)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        return await self.runs.run(["/usr/bin/env", *variables, *argv], files=self.files, stdin=stdin, timeout=timeout)

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        raise Unavailable("a sandbox for one program keeps no files; print what is wanted")

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def fork(self, count: int) -> Sequence[OneShotSandbox]:
        return [OneShotSandbox(self.runs, self.files) for _ in range(count)]

    async def diff(self) -> Sequence[Change]:
        raise Unavailable("a sandbox for one program keeps no files, so there is nothing to compare")

    async def listen(self, port: int) -> socket.socket:
        raise Unavailable("a sandbox for one program has no ports")

    async def stop(self) -> None:
        self.files = {}
