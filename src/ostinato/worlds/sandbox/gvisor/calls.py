"""The host's requests to pid 1 of a sandbox over its line: programs, files, changes."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.errors import BadRequest, NotFound, SandboxBroken, StorageFull, TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ExecResult, SandboxSpec
from ostinato.worlds.sandbox.box import read_changes
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection
from ostinato.worlds.sandbox.spec_validation import check_cwd, check_environment, inside_workdir, pack_program

_GRACE_S = 20.0  # beyond a program's own deadline, before the sandbox itself is ended
_DIFF_S = 60.0  # to compare all files
_OUT = (errno.EXDEV, errno.ELOOP, errno.EACCES)


class SandboxCalls(ABC):
    """The calls that all sandboxes with such a pid 1 share. `env` is what its programs see beside their own variables."""

    def __init__(self, spec: SandboxSpec, line: GvisorConnection, env: Mapping[str, str]) -> None:
        self.spec = spec
        self._line, self._env = line, dict(env)
        self._ran = False  # a program was requested

    @abstractmethod
    async def _kill(self, why: Unavailable) -> None:
        """End the sandbox from outside. Pending and later requests raise `why`."""

    def _silent(self, why: str) -> Unavailable:
        """The error for a sandbox that does not answer: its programs broke it, since nothing else lies in between."""
        return SandboxBroken(why)

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
        begun, self._ran = time.monotonic(), True
        number, ended = self._line.ask(told, text + stdin)
        try:
            async with asyncio.timeout(timeout + _GRACE_S):
                said, data = await ended
        except TimeoutError as error:
            gone = self._silent("the sandbox is gone: it did not answer, and was ended")
            await self._kill(gone)
            if not isinstance(gone, SandboxBroken):
                raise gone from error
            return _killed("timeout", begun)
        except SandboxBroken:
            return _killed("memory", begun)
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

    async def _asked(
        self, told: Mapping[str, Any], data: bytes = b"", *, within: float = _GRACE_S
    ) -> tuple[int, bytes]:
        """Send a request that runs no program. Returns an error number and bytes. Raises Unavailable."""
        said, found = await self._line.answer(told, data, within=within)
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
        """As `Sandbox.diff`. If the files cannot be compared, the programs are to blame: the sandbox is ended, with SandboxBroken."""
        try:
            error, data = await self._asked({"do": "diff"}, within=_DIFF_S)
            gone: Unavailable = SandboxBroken(f"the sandbox's files could not be compared ({os.strerror(error)})")
        except SandboxBroken:
            raise
        except Unavailable:
            if not self._line.open:
                raise
            error, data = errno.ETIMEDOUT, b""
            gone = self._silent(f"the sandbox's files could not be compared (not in {_DIFF_S:g} s)")
        if error:
            await self._kill(gone)
            raise gone
        return await asyncio.to_thread(read_changes, data)


def _killed(reason: str, begun: float) -> ExecResult:
    """The result of a program whose sandbox had to be ended because of it."""
    seconds = time.monotonic() - begun
    timed_out = reason == "timeout"
    return ExecResult(code=-9, stdout=b"", stderr=b"", timed_out=timed_out, killed_reason=reason, seconds=seconds)
