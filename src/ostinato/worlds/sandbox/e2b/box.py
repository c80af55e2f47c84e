"""One sandbox on an E2B machine: requests to its pid 1, its ports, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence

from ostinato.core.errors import BadRequest, OstinatoError, Unavailable
from ostinato.core.sandboxing import SandboxSpec
from ostinato.worlds.sandbox.e2b.account import LIFE_S, Machine, MachineGone
from ostinato.worlds.sandbox.e2b.wire import Wire
from ostinato.worlds.sandbox.gvisor.calls import SandboxCalls
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection

_KEEP_S = LIFE_S / 5
_STOP_S = 10.0


class E2BBox(SandboxCalls):
    """A remote `Sandbox`, kept alive while it is open. Made by `E2BBoxes.start`."""

    def __init__(self, spec: SandboxSpec, machine: Machine, line: GvisorConnection, env: Mapping[str, str]) -> None:
        super().__init__(spec, line, env)
        self._machine = machine
        self.wire = Wire(machine, lambda why: line.close(Unavailable(why)))
        self.on_stop: list[Callable[[], object]] = []
        self._ports = tempfile.mkdtemp(prefix="ostinato-e2b-")
        self._place = os.open(self._ports, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._keeping = asyncio.create_task(self._keep())
        self._ended = False

    async def _keep(self) -> None:
        """Keep extending the machine's life, since it otherwise ends by itself."""
        while True:
            await asyncio.sleep(_KEEP_S)
            try:
                await self._machine.keep()
            except MachineGone as error:
                self._line.close(error)
                return
            except OstinatoError as error:
                logging.getLogger(__name__).warning("%s", error)

    async def fork(self, count: int) -> Sequence[E2BBox]:
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            'a living sandbox of E2B\'s cannot be copied; sandbox.backend = "namespaces" has forks, or start another from its diff'
        )

    async def listen(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise BadRequest(f"port: {port} must lie in 1 to 65535", field="port")
        if port in self.wire.ports:
            raise Unavailable(f"port {port} of the sandbox cannot be had: it is listened at already")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = f"/proc/self/fd/{self._place}/{port}"  # a socket's path has at most 107 bytes
        try:
            listener.bind(path)
            listener.listen(128)
            listener.setblocking(False)
            self.wire.listen(port, path)
            error, _ = await self._asked({"do": "listen", "port": port})
            if error:
                raise OSError(error, os.strerror(error))
        except OSError as error:
            self._forget(listener, port)
            raise Unavailable(f"port {port} of the sandbox cannot be had: {error.strerror}") from error
        except BaseException:
            self._forget(listener, port)
            raise
        return listener

    def _forget(self, listener: socket.socket, port: int) -> None:
        listener.close()
        self.wire.ports.pop(port, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._ports}/{port}")

    async def stop(self) -> None:
        await self._kill(Unavailable("the sandbox is gone"))
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()

    def _silent(self, why: str) -> Unavailable:
        """Not SandboxBroken, because the connection in between may be what fails."""
        return Unavailable(why)

    async def _kill(self, why: Unavailable) -> None:
        self._line.close(why)
        if self._ended:
            return
        self._ended = True
        self._keeping.cancel()
        self.wire.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._machine.kill()
        except (OstinatoError, TimeoutError) as error:
            logging.getLogger(__name__).warning(
                "sandbox %s may live for %s more seconds: %s", self._machine.name, LIFE_S, error
            )
        finally:
            await self.wire.left()
            os.close(self._place)
            shutil.rmtree(self._ports, ignore_errors=True)
