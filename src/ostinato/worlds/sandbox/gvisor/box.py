"""One gVisor sandbox: programs, files, changes. The host's side; `inside/` is the other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadRequest, NotFound, SandboxBroken, StorageFull, TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ExecResult, SandboxSpec
from ostinato.worlds.sandbox.box import read_changes
from ostinato.worlds.sandbox.gvisor.line import Line
from ostinato.worlds.sandbox.gvisor.ports import Ports
from ostinato.worlds.sandbox.starting import check_cwd, check_environment, inside_workdir, pack_program

_GRACE_S = 20.0  # beyond a program's own deadline, before the sandbox itself is ended
_DIFF_S = 60.0  # for a look at all files
_STOP_S = 5.0
_WATCH_S = 1.0
_KERNEL_MB = 256  # what gVisor's kernel itself may take beyond as much as the programs may
_OUT = (errno.EXDEV, errno.ELOOP, errno.EACCES)


class GVisorBox:
    """A `Sandbox` that gVisor is the kernel of. Made by `GVisorBoxes.start`."""

    def __init__(
        self,
        spec: SandboxSpec,
        line: Line,
        ports: Ports,
        process: asyncio.subprocess.Process,
        place: Path,
        env: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self._line, self._ports, self._process, self._place, self._env = line, ports, process, place, dict(env)
        self.on_stop: list[Callable[[], object]] = []
        self._kernel: tuple[int, int] | None = (
            None  # gVisor's own process: its number, a descriptor that stands for it alone
        )
        watching = asyncio.create_task(self._watch())
        self.on_stop += [watching.cancel, self._let_go]

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
        begun = time.monotonic()
        number, ended = self._line.ask(told, text + stdin)
        try:
            async with asyncio.timeout(timeout + _GRACE_S):
                said, data = await ended
        except TimeoutError:
            await self._kill(SandboxBroken("the sandbox is gone: it did not answer, and was ended"))
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
        """One question about files: an error's number, and bytes. Raises Unavailable."""
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

    async def fork(self, count: int) -> Sequence[GVisorBox]:
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            'a living gVisor sandbox cannot be copied; sandbox.backend = "namespaces" has forks, or start another from its diff'
        )

    async def diff(self) -> Sequence[Change]:
        """As `Sandbox.diff` says. Files that cannot be compared are the programs' own, so the sandbox is ended: SandboxBroken."""
        try:
            error, data = await self._asked({"do": "diff"}, within=_DIFF_S)
            told = os.strerror(error)
        except SandboxBroken:
            raise
        except Unavailable:
            if not self._line.open:
                raise
            error, data, told = errno.ETIMEDOUT, b"", f"not in {_DIFF_S:g} s"
        if error:
            await self._kill(SandboxBroken(f"the sandbox is gone: its files could not be compared ({told})"))
            raise SandboxBroken(f"the sandbox's files could not be compared ({told})")
        return await asyncio.to_thread(read_changes, data)

    async def listen(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise BadRequest(f"port: {port} must lie in 1 to 65535", field="port")
        try:
            listener = self._ports.open(port)
            try:
                error, _ = await self._asked({"do": "listen", "port": port})
                if error:
                    raise OSError(error, os.strerror(error))
            except BaseException:
                listener.close()
                self._ports.close_port(port)
                raise
        except OSError as error:
            raise Unavailable(f"port {port} of the sandbox cannot be had: {error.strerror}") from error
        return listener

    async def stop(self) -> None:
        self._line.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill(Unavailable("the sandbox is gone"))
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()

    async def _watch(self) -> None:
        """End a sandbox whose kernel grows without end: no limit inside counts what programs make it remember, as empty files."""
        while self._line.open:
            await asyncio.sleep(_WATCH_S)
            most = self.spec.limits.memory_mb + _KERNEL_MB
            if (kernel := self._found()) and _anonymous_mb(kernel[0]) > most:
                await self._kill(SandboxBroken(f"the sandbox is gone: its kernel needed more than {most} MiB"))

    def _found(self) -> tuple[int, int] | None:
        """GVisor's kernel; None: there is none yet, or no more."""
        if self._process.returncode is not None:
            return None
        if self._kernel is None:
            with contextlib.suppress(OSError, ValueError):
                pid = int((self._place / "pid").read_text())
                self._kernel = pid, os.pidfd_open(pid)
        return self._kernel

    def _let_go(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            os.close(kernel[1])

    async def _kill(self, why: Unavailable) -> None:
        """End it from outside: gVisor's kernel itself, upon which runsc tidies up and ends."""
        self._line.close(why)
        if kernel := self._found():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(kernel[1], signal.SIGKILL)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _killed(reason: str, begun: float) -> ExecResult:
    """What is said of a program whose sandbox had to be ended because of it."""
    seconds = time.monotonic() - begun
    timed_out = reason == "timeout"
    return ExecResult(code=-9, stdout=b"", stderr=b"", timed_out=timed_out, killed_reason=reason, seconds=seconds)


def _anonymous_mb(pid: int) -> int:
    """What a process holds beside files; what programs hold is a file to gVisor's kernel."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) >> 10
    return 0
