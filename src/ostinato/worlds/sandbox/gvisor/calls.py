"""What a host asks of pid 1 of a sandbox over its line: programs, files, changes."""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.errors import BadRequest, NotFound, StorageFull, TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ExecResult, SandboxSpec
from ostinato.worlds.sandbox.box import read_changes
from ostinato.worlds.sandbox.gvisor.line import Line
from ostinato.worlds.sandbox.starting import check_cwd, check_environment, inside_workdir, pack_program

_GRACE_S = 20.0  # beyond a program's own deadline, before the sandbox itself is ended
_OUT = (errno.EXDEV, errno.ELOOP, errno.EACCES)


class Calls(ABC):
    """What every sandbox with such a pid 1 answers alike. `env` is what its programs see beside their own variables."""

    def __init__(self, spec: SandboxSpec, line: Line, env: Mapping[str, str]) -> None:
        self.spec = spec
        self._line, self._env = line, dict(env)

    @abstractmethod
    async def _kill(self, why: str = "") -> None:
        """End the sandbox from outside."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        check_cwd(cwd)
        check_environment(env or {})
        count, text = pack_program(tuple(argv), {**self._env, **(env or {})}, cwd or "")
        cap = self.spec.limits.output_bytes
        told = {"do": "exec", "count": count, "text": len(text), "cap": cap, "timeout": timeout}
        number, ended = self._line.ask(told, text + stdin)
        try:
            async with asyncio.timeout(timeout + _GRACE_S):
                said, data = await ended
        except TimeoutError as error:
            await self._kill()
            raise Unavailable("the sandbox does not answer, and was ended") from error
        except asyncio.CancelledError:
            if self._line.open:
                self._line.ask({"do": "end", "of": number})
            raise
        if said["error"]:
            raise Unavailable(f"the sandbox could not start the program: {os.strerror(said['error'])}")
        reason = said["reason"]
        return ExecResult(
            code=-9 if reason == "output" else int(said["code"]),
            stdout=data[: said["out"]][:cap],
            stderr=data[said["out"] :][:cap],
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=float(said["seconds"]),
        )

    async def _asked(self, told: Mapping[str, Any], data: bytes = b"") -> tuple[int, bytes]:
        """One question about files: an error's number, and bytes. Raises Unavailable."""
        said, found = await self._line.answer(told, data, within=_GRACE_S)
        return int(said["error"]), found

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        name = inside_workdir(path, self.spec.workdir)
        error, data = await self._asked({"do": "read", "most": most}, os.fsencode(name))
        if error in _OUT:
            raise NotFound(f"path: {path!r} leads out of the working directory", field="path")
        if error:
            raise NotFound(f"path: {path!r} cannot be read: {os.strerror(error)}", field="path")
        if len(data) > most:
            raise TooLarge(f"path: {path!r} has more than {most} bytes", field="path")
        return data

    async def write(self, path: str, data: bytes) -> None:
        name = os.fsencode(inside_workdir(path, self.spec.workdir))
        full = StorageFull(f"the sandbox's {self.spec.limits.disk_mb} MiB do not hold {path!r} as well")
        if len(data) > self.spec.limits.disk_mb << 20:
            raise full
        error, _ = await self._asked({"do": "write", "text": len(name)}, name + data)
        if error in (errno.ENOSPC, errno.EDQUOT):
            raise full
        if error:
            raise BadRequest(f"path: {path!r} cannot be written: {os.strerror(error)}", field="path")

    async def diff(self) -> Sequence[Change]:
        error, data = await self._asked({"do": "diff"})
        if error:
            raise Unavailable(f"the sandbox's files could not be compared ({os.strerror(error)})")
        return await asyncio.to_thread(read_changes, data)
