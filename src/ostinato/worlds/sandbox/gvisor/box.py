"""The host's side of one gVisor sandbox: programs, files, changes. The sandbox's side is `inside/`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ostinato.core.errors import BadRequest, SandboxBroken, Unavailable
from ostinato.core.sandboxing import SandboxSpec
from ostinato.worlds.sandbox.gvisor.calls import SandboxCalls
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection
from ostinato.worlds.sandbox.gvisor.ports import Ports

PANIC = "panic"
"""The file of a box in which Go's runtime reports why gVisor's kernel crashed."""

_REPORT = 1 << 16  # characters of a report that are read
_FAULT = re.compile(r"^(panic|fatal error|SIG[A-Z]+): .*", re.MULTILINE)
_SHORTAGE = re.compile(
    r"out of memory|cannot allocate|newosproc|create new OS thread|pthread_create|too many open files"
)
_STOP_S = 5.0
_WATCH_S = 1.0
_KERNEL_MB = 256  # what gVisor's kernel itself may use beyond the programs' own limit


class GVisorBox(SandboxCalls):
    """A `Sandbox` whose kernel is gVisor. Made by `GVisorBoxes.start`."""

    def __init__(
        self,
        spec: SandboxSpec,
        line: GvisorConnection,
        ports: Ports,
        process: asyncio.subprocess.Process,
        place: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(spec, line, env)
        self._ports, self._process, self._place = ports, process, place
        self.on_stop: list[Callable[[], object]] = []
        self._kernel: tuple[int, int] | None = None  # gVisor's own process: its pid and its pidfd
        line.at_end = self._fault
        watching = asyncio.create_task(self._watch())
        self.on_stop += [watching.cancel, self._let_go]

    async def fork(self, count: int) -> Sequence[GVisorBox]:
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            'a living gVisor sandbox cannot be copied; sandbox.backend = "namespaces" has forks, or start another from its diff'
        )

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
        """End a sandbox whose kernel grows without end: no limit inside counts the kernel's own state, such as that for empty files."""
        while self._line.open:
            await asyncio.sleep(_WATCH_S)
            most = self.spec.limits.memory_mb + _KERNEL_MB
            if (kernel := self._found()) and _anonymous_mb(kernel[0]) > most:
                await self._kill(SandboxBroken(f"the sandbox is gone: its kernel needed more than {most} MiB"))

    def _fault(self) -> SandboxBroken | None:
        """Why the sandbox's kernel crashed, if it did so after a program was started: then the programs' own system calls caused it.

        Go's runtime writes the report, to a file that nothing inside can write to. A kernel that was killed from outside leaves no
        report, and one about a lack of memory or threads is this machine's fault. Both give None.
        """
        report = ""
        with contextlib.suppress(OSError), (self._place / PANIC).open(errors="replace") as file:
            report = file.read(_REPORT)
        found = _FAULT.search(report)
        if not self._ran or found is None or _SHORTAGE.search(report):
            return None
        return SandboxBroken(
            f"the sandbox is gone: its kernel met a fault while it served the programs ({found[0][:200]})"
        )

    def _found(self) -> tuple[int, int] | None:
        """The pid and pidfd of gVisor's kernel, or None before it has started and after it has ended."""
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
        """End the sandbox from outside: kill gVisor's kernel, after which runsc cleans up and exits."""
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


def _anonymous_mb(pid: int) -> int:
    """Anonymous memory of a process in MiB. The programs' memory is not in it, since gVisor's kernel keeps that in a file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) >> 10
    return 0
