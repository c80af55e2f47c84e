"""The host's connection to pid 1 of a gVisor or E2B sandbox: requests for programs, files and changes, and port forwarding.

The host serves ports of the sandbox's loopback: for each connection it passes a connected socket into the sandbox. So no socket of the host
needs a path inside, and the sandbox can be forbidden to connect to any that happens to be visible there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ostinato.core.errors import BadRequest, SandboxBroken, TooLarge, Unavailable
from ostinato.core.sandbox import Change, ExecResult, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.sandbox.backend import read_changes
from ostinato.worlds.sandbox.gvisor.inside.line import CONNECTED, HEAD, MAX_OBJECT, REFUSED, Frame, pack
from ostinato.worlds.sandbox.spec_validation import check_port, check_read, check_written, inside_workdir, pack_program

_MAX_BYTES = 128 << 20  # largest payload of an answer; our pid 1 never sends more


class GvisorConnection:
    """The socket to a sandbox's pid 1, with any number of pending requests.

    Pass `peer` to the sandbox as descriptor 0, then call `start_reading`.
    """

    def __init__(self) -> None:
        self._ours, self.peer = socket.socketpair()
        self._ours.setblocking(False)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self.open = True
        self.at_end: Callable[[], Unavailable | None] = lambda: None
        """Called when the sandbox closed the connection, for the reason; returns None if it is unknown."""
        self._why = Unavailable("the sandbox is gone")

    async def start_reading(self) -> None:
        """Close our copy of the sandbox's end and start reading answers."""
        self.peer.close()
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._reader_task = asyncio.create_task(self._read_answers(reader))

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                first, second = HEAD.unpack(await reader.readexactly(HEAD.size))
                if first > MAX_OBJECT or second > _MAX_BYTES:
                    break
                reply = json.loads(await reader.readexactly(first))
                future = self._pending.pop(reply["id"], None)
                data = await reader.readexactly(second)
                if future is not None and not future.done():
                    future.set_result((reply, data))
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close(self.at_end() if self.open else None)

    def ask(self, request: Mapping[str, Any], data: bytes = b"") -> tuple[int, asyncio.Future[Frame]]:
        """Send a request; return its number and a future of the answer. Both raise Unavailable if the sandbox has ended."""
        if not self.open or self._writer is None:
            raise self._gone()
        number = next(self._numbers)
        self._pending[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write(pack({**request, "id": number}, data))
        return number, answer

    async def answer(self, request: Mapping[str, Any], data: bytes = b"", *, within: float) -> Frame:
        """Send a request and return the answer. Raises Unavailable, also after `within` seconds."""
        number, answer = self.ask(request, data)
        try:
            async with asyncio.timeout(within):
                return await answer
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            self._pending.pop(number, None)

    def _gone(self) -> Unavailable:
        return type(self._why)(str(self._why))

    def close(self, why: Unavailable | None = None) -> None:
        """Close the connection, which ends the sandbox. Pending and later requests raise `why`. Idempotent."""
        self._why = why or self._why
        self.open = False
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()
        with contextlib.suppress(OSError):
            self.peer.close()
        if self._reader_task is not None and self._reader_task is not asyncio.current_task():
            self._reader_task.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._gone())
                future.exception()  # marks it as retrieved, in case nobody awaits it
        self._pending.clear()


# ---------------------------------------------------------------- requests


_GRACE_S = 20.0  # a sandbox that has not answered this long after a program's deadline is killed
_DIFF_S = 60.0  # time limit for comparing all files


class SandboxCalls(ABC):
    """The `Sandbox` methods shared by gVisor and E2B sandboxes. `env`: variables of all programs, which a call can override."""

    called: ClassVar[str]
    """The noun for such a sandbox in error messages."""

    def __init__(self, spec: SandboxSpec, line: GvisorConnection, env: Mapping[str, str]) -> None:
        self.spec = spec
        self._line, self._env = line, dict(env)
        self._ran = False  # whether a program was ever requested
        self.on_stop: list[Callable[[], object]] = []

    def _release(self) -> None:
        """Call the `on_stop` callbacks, once."""
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()

    @abstractmethod
    def _open_port(self, port: int) -> socket.socket:
        """Return a listening socket on the host, to which connections to a port of the sandbox are forwarded. Raises OSError."""

    @abstractmethod
    def _close_port(self, port: int) -> None:
        """Stop forwarding connections to a port."""

    @abstractmethod
    async def _kill(self, why: Unavailable) -> None:
        """Kill the sandbox. Pending and later requests raise `why`."""

    def _silent(self, why: str) -> Unavailable:
        """Return the error for a sandbox that does not answer: its programs broke it, as there is no network in between."""
        return SandboxBroken(why)

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """Raise Unavailable: these sandboxes do not support `Sandbox.fork`."""
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            f'a running {self.called} cannot be forked; use sandbox.backend = "namespaces", or start another sandbox from its diff'
        )

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        count, text = pack_program(tuple(argv), {**self._env, **(env or {})}, cwd)
        cap = self.spec.limits.output_bytes
        request = {"do": "exec", "count": count, "text": len(text), "cap": cap, "timeout": timeout}
        begun, self._ran = time.monotonic(), True
        number, ended = self._line.ask(request, text + stdin)
        try:
            async with asyncio.timeout(timeout + _GRACE_S):
                reply, data = await ended
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
        if reply["error"]:
            raise Unavailable(f"the sandbox could not start the program: {os.strerror(reply['error'])}")
        reason = reply["reason"]
        return ExecResult(
            code=-9 if reason == "output" else int(reply["code"]),
            stdout=data[: reply["out"]][:cap],
            stderr=data[reply["out"] :][:cap],
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=float(reply["seconds"]),
        )

    async def _request(
        self, request: Mapping[str, Any], data: bytes = b"", *, within: float = _GRACE_S
    ) -> tuple[int, bytes]:
        """Send a request that runs no program. Return an errno (0 is success) and the payload. Raises Unavailable."""
        reply, payload = await self._line.answer(request, data, within=within)
        return int(reply["error"]), payload

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        name = inside_workdir(path, self.spec.workdir)
        error, data = await self._request({"do": "read", "most": most}, os.fsencode(name))
        check_read(path, error)
        if len(data) > most:
            raise TooLarge(f"path: {path!r} has more than {most} bytes", field="path")
        return data

    async def write(self, path: str, data: bytes) -> None:
        name = os.fsencode(inside_workdir(path, self.spec.workdir))
        error = errno.ENOSPC
        if len(data) <= self.spec.limits.disk_mb << 20:
            error, _ = await self._request({"do": "write", "text": len(name)}, name + data)
        check_written(path, error, self.spec.limits)

    async def listen(self, port: int) -> socket.socket:
        check_port(port)
        try:
            listener = self._open_port(port)
            try:
                error, _ = await self._request({"do": "listen", "port": port})
                if error:
                    raise OSError(error, os.strerror(error))
            except BaseException:
                listener.close()
                self._close_port(port)
                raise
        except OSError as error:
            raise Unavailable(f"port {port} of the sandbox cannot be opened: {error.strerror}") from error
        return listener

    async def diff(self) -> Sequence[Change]:
        """As `Sandbox.diff`. If the files cannot be compared, the programs are to blame: kill the sandbox and raise SandboxBroken."""
        try:
            error, data = await self._request({"do": "diff"}, within=_DIFF_S)
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


async def build_sandbox(
    spec: SandboxSpec,
    line: GvisorConnection,
    files: bytes = b"",
    *,
    owner: int,
    alone: bool,
    filter: str = "",
    within: float,
    **more: Any,
) -> dict[str, Any]:
    """Have pid 1 build the sandbox, and return its report.

    If a step failed, "error" is not 0, "step" names the step and "told" gives the reason. Raises BadRequest if the files do not fit,
    Unavailable.
    """
    limits = spec.limits
    request = {
        "workdir": spec.workdir,
        "layers": len(spec.layers),
        "owner": owner,
        "memory": limits.memory_mb << 20,
        "disk": limits.disk_mb << 20,
        "processes": limits.processes,
        "open_files": limits.open_files,
        "alone": alone,
        "filter": filter,
    }
    reply, _ = await line.answer(request | more, files, within=within)
    if reply["error"] and reply.get("step") == "write the files":
        raise BadRequest(f"files: they do not fit into the sandbox ({reply.get('told')})", field="files")
    return reply


def _killed(reason: str, begun: float) -> ExecResult:
    """Return the result of a program that broke its sandbox."""
    seconds = time.monotonic() - begun
    timed_out = reason == "timeout"
    return ExecResult(code=-9, stdout=b"", stderr=b"", timed_out=timed_out, killed_reason=reason, seconds=seconds)


# ---------------------------------------------------------------- ports


def listen_at(place: int, port: int) -> tuple[socket.socket, str]:
    """Return a Unix listener for a port of the sandbox, and its path below the open directory `place`. Raises OSError."""
    path = f"/proc/self/fd/{place}/{port}"  # a socket's path has at most 107 bytes
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener, path


class Ports:
    """The host's end of a sandbox's port forwarding.

    Pass `peer` to the sandbox as descriptor 1, then call `close_peer`. `place` is a private directory for the listeners' sockets.
    """

    def __init__(self, place: Path) -> None:
        self._place = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._ours, self.peer = socket.socketpair()
        self._ours.setblocking(False)
        self._open: dict[int, Callable[[], None]] = {}

    def close_peer(self) -> None:
        """Close our copy of the sandbox's end, after it was passed on."""
        self.peer.close()

    def open(self, port: int) -> socket.socket:
        """Create a listener and pass pid 1 a socket for the port's connection requests.

        The caller must send pid 1 the `listen` request before it opens the next port. Raises OSError.
        """
        ours, peer = socket.socketpair()
        try:
            listener, name = listen_at(self._place, port)
            try:
                ours.setblocking(False)
                socket.send_fds(self._ours, [CONNECTED], [peer.fileno()])
            except OSError:
                listener.close()
                os.unlink(name)  # so that a later `open` can use the port
                raise
        except OSError:
            ours.close()
            raise
        finally:
            peer.close()
        loop = asyncio.get_running_loop()

        def close() -> None:
            loop.remove_reader(ours)
            ours.close()
            with contextlib.suppress(OSError):
                os.unlink(name)

        loop.add_reader(ours, lambda: _connect(ours, name) or self.close_port(port))
        self._open[port] = close
        return listener

    def close_port(self, port: int) -> None:
        """Stop forwarding connections to a port. Idempotent."""
        if (close := self._open.pop(port, None)) is not None:
            close()

    def close(self) -> None:
        """Close all ports. Idempotent."""
        for port in list(self._open):
            self.close_port(port)
        for end in (self._ours, self.peer):
            end.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1


def _connect(line: socket.socket, name: str) -> bool:
    """Answer the sandbox's request for one more connection. Return False once the sandbox is gone."""
    try:
        if not line.recv(1):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)  # so that a full backlog refuses the connection instead of blocking
            try:
                connection.connect(name)
            except OSError:
                line.send(REFUSED)
            else:
                connection.setblocking(True)  # the sandbox gets the socket in the mode it has here
                socket.send_fds(line, [CONNECTED], [connection.fileno()])
    except BlockingIOError:
        return True  # a spurious wake-up
    except OSError:
        return False
    return True
