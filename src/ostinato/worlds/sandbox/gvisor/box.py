"""One gVisor sandbox: programs, files, changes. The host's side; `inside/` is the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.sandboxing import SandboxSpec
from ostinato.worlds.sandbox.gvisor.calls import Calls
from ostinato.worlds.sandbox.gvisor.ground import NOBODY
from ostinato.worlds.sandbox.gvisor.line import Line

_STOP_S = 5.0
_WATCH_S = 1.0
_KERNEL_MB = 256  # what gVisor's kernel itself may take beyond as much as the programs may


class GVisorBox(Calls):
    """A `Sandbox` that gVisor is the kernel of. Made by `GVisorBoxes.start`."""

    def __init__(
        self, spec: SandboxSpec, line: Line, process: asyncio.subprocess.Process, place: Path, env: Mapping[str, str]
    ) -> None:
        super().__init__(spec, line, env)
        self._process, self._place = process, place
        self.on_stop: list[Callable[[], object]] = []
        watching = asyncio.create_task(self._watch())
        self.on_stop.append(watching.cancel)

    async def fork(self, count: int) -> Sequence[GVisorBox]:
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            'a living gVisor sandbox cannot be copied; sandbox.backend = "namespaces" has forks, or start another from its diff'
        )

    async def listen(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise BadRequest(f"port: {port} must lie in 1 to 65535", field="port")
        listener, path = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), self._place / "ports" / str(port)
        try:
            _bind(listener, path)
            error, _ = await self._asked({"do": "listen", "port": port})
            if error:
                path.unlink()
                raise OSError(error, os.strerror(error))
        except OSError as error:
            listener.close()
            raise Unavailable(f"port {port} of the sandbox cannot be had: {error.strerror}") from error
        except BaseException:
            listener.close()
            raise
        return listener

    async def stop(self) -> None:
        self._line.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill()
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()

    async def _watch(self) -> None:
        """End a sandbox whose kernel grows without end: no limit inside counts what programs make it remember, as empty files."""
        while self._line.open:
            await asyncio.sleep(_WATCH_S)
            most = self.spec.limits.memory_mb + _KERNEL_MB
            if (pid := self._pid()) and _anonymous_mb(pid) > most:
                await self._kill(f"the sandbox is gone: its kernel needed more than {most} MiB")

    def _pid(self) -> int:
        """Of gVisor's kernel; 0: it has none yet, or no more."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._place / "pid").read_text()) if self._process.returncode is None else 0
        return 0

    async def _kill(self, why: str = "") -> None:
        """End it from outside: gVisor's kernel itself, upon which runsc tidies up and ends."""
        self._line.close(why)
        if pid := self._pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _anonymous_mb(pid: int) -> int:
    """What a process holds beside files; what programs hold is a file to gVisor's kernel."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) >> 10
    return 0


def _bind(listener: socket.socket, path: Path) -> None:
    """Where the sandbox's helper, and nobody else, can connect to it. Raises OSError."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # a socket's path may have 107 bytes
    finally:
        os.close(directory)
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    path.chmod(0o600)
    listener.listen(128)
    listener.setblocking(False)
