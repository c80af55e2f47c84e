"""The host's end of the line to pid 1 of a gVisor sandbox, and its requests: programs, files, changes. Also its ports.

The host serves ports of the sandbox's loopback: for each connection, a connected socket is passed into the sandbox. So no socket of the
host needs a name inside, and the sandbox can be forbidden to connect to any that happens to be visible there.
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
from ostinato.worlds.sandbox.gvisor.inside.line import CONNECTED, HEAD, MOST_OBJECT, REFUSED, Frame, pack
from ostinato.worlds.sandbox.spec_validation import check_port, check_read, check_written, inside_workdir, pack_program

_MOST_BYTES = 128 << 20  # of one answer; our pid 1 never sends more


class GvisorConnection:
    """Requests and answers, any number at once. `theirs` becomes the sandbox's descriptor 0; call `sent` once it has."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self.open = True
        self.at_end: Callable[[], Unavailable | None] = lambda: None
        """Called for the reason when the sandbox closed the line and we did not. Returns None if the reason is unknown."""
        self._why = Unavailable("the sandbox is gone")

    async def sent(self) -> None:
        """Close our copy of the sandbox's end and begin to listen."""
        self.theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._listening = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                first, second = HEAD.unpack(await reader.readexactly(HEAD.size))
                if first > MOST_OBJECT or second > _MOST_BYTES:
                    break
                told = json.loads(await reader.readexactly(first))
                waiting = self._waiting.pop(told["id"], None)
                data = await reader.readexactly(second)
                if waiting is not None and not waiting.done():
                    waiting.set_result((told, data))
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass
        finally:
            self.close(self.at_end() if self.open else None)

    def ask(self, told: Mapping[str, Any], data: bytes = b"") -> tuple[int, asyncio.Future[Frame]]:
        """Send a request. Returns its number and a future of the answer. Both raise Unavailable if the sandbox has ended."""
        if not self.open or self._writer is None:
            raise self._gone()
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write(pack({**told, "id": number}, data))
        return number, answer

    async def answer(self, told: Mapping[str, Any], data: bytes = b"", *, within: float) -> Frame:
        """Send a request and wait for the answer. Raises Unavailable."""
        number, answer = self.ask(told, data)
        try:
            async with asyncio.timeout(within):
                return await answer
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            self._waiting.pop(number, None)

    def _gone(self) -> Unavailable:
        return type(self._why)(str(self._why))

    def close(self, why: Unavailable | None = None) -> None:
        """Hang up, which ends the sandbox. Later and waiting requests raise `why`. Idempotent."""
        self._why = why or self._why
        self.open = False
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()
        with contextlib.suppress(OSError):
            self.theirs.close()
        if self._listening is not None and self._listening is not asyncio.current_task():
            self._listening.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._gone())
                waiting.exception()  # nobody may be waiting any more
        self._waiting.clear()


# ---------------------------------------------------------------- requests


_GRACE_S = 20.0  # beyond a program's own deadline, before the sandbox itself is ended
_DIFF_S = 60.0  # to compare all files


class SandboxCalls(ABC):
    """The calls that all sandboxes with such a pid 1 share. `env` is what its programs see beside their own variables."""

    called: ClassVar[str]
    """What an error calls such a sandbox."""

    def __init__(self, spec: SandboxSpec, line: GvisorConnection, env: Mapping[str, str]) -> None:
        self.spec = spec
        self._line, self._env = line, dict(env)
        self._ran = False  # a program was requested
        self.on_stop: list[Callable[[], object]] = []

    def _release(self) -> None:
        """Call what waits for the sandbox's end, once."""
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()

    @abstractmethod
    def _open_port(self, port: int) -> socket.socket:
        """A listener of the host's that a port of the sandbox is to reach. Raises OSError."""

    @abstractmethod
    def _close_port(self, port: int) -> None:
        """Accept no more connections to a port."""

    @abstractmethod
    async def _kill(self, why: Unavailable) -> None:
        """End the sandbox from outside. Pending and later requests raise `why`."""

    def _silent(self, why: str) -> Unavailable:
        """The error for a sandbox that does not answer: its programs broke it, since nothing else lies in between."""
        return SandboxBroken(why)

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """As `Sandbox.fork`, which such sandboxes do not have. Raises Unavailable."""
        if not self._line.open:
            raise Unavailable("the sandbox is gone")
        raise Unavailable(
            f'a living {self.called} cannot be copied; sandbox.backend = "namespaces" has forks, or start another from its diff'
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
        check_read(path, error)
        if len(data) > most:
            raise TooLarge(f"path: {path!r} has more than {most} bytes", field="path")
        return data

    async def write(self, path: str, data: bytes) -> None:
        name = os.fsencode(inside_workdir(path, self.spec.workdir))
        error = errno.ENOSPC
        if len(data) <= self.spec.limits.disk_mb << 20:
            error, _ = await self._asked({"do": "write", "text": len(name)}, name + data)
        check_written(path, error, self.spec.limits)

    async def listen(self, port: int) -> socket.socket:
        check_port(port)
        try:
            listener = self._open_port(port)
            try:
                error, _ = await self._asked({"do": "listen", "port": port})
                if error:
                    raise OSError(error, os.strerror(error))
            except BaseException:
                listener.close()
                self._close_port(port)
                raise
        except OSError as error:
            raise Unavailable(f"port {port} of the sandbox cannot be had: {error.strerror}") from error
        return listener

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
    """Have pid 1 build the sandbox. Returns its report, whose "error" is not 0 if a "step" failed, as it "told".

    Raises BadRequest if the files do not fit, Unavailable.
    """
    limits = spec.limits
    told = {
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
    said, _ = await line.answer(told | more, files, within=within)
    if said["error"] and said.get("step") == "write the files":
        raise BadRequest(f"files: they do not fit into the sandbox ({said.get('told')})", field="files")
    return said


def _killed(reason: str, begun: float) -> ExecResult:
    """The result of a program whose sandbox had to be ended because of it."""
    seconds = time.monotonic() - begun
    timed_out = reason == "timeout"
    return ExecResult(code=-9, stdout=b"", stderr=b"", timed_out=timed_out, killed_reason=reason, seconds=seconds)


# ---------------------------------------------------------------- ports


def listen_at(place: int, port: int) -> tuple[socket.socket, str]:
    """A listener for a port of the sandbox, and its path below the open directory `place`. Raises OSError."""
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
    """The host's end. `theirs` becomes the sandbox's descriptor 1; call `sent` once it has. `place` is private, for the sockets' names."""

    def __init__(self, place: Path) -> None:
        self._place = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._open: dict[int, Callable[[], None]] = {}

    def sent(self) -> None:
        """Close our copy of the sandbox's end."""
        self.theirs.close()

    def open(self, port: int) -> socket.socket:
        """Make a listener and send pid 1 a line for the port. Pid 1 must be told of the port before the next is opened.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        try:
            listener, name = listen_at(self._place, port)
            try:
                ours.setblocking(False)
                socket.send_fds(self._ours, [CONNECTED], [theirs.fileno()])
            except OSError:
                listener.close()
                os.unlink(name)  # for the next to listen there
                raise
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
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
        """Accept no more connections to a port. Idempotent."""
        if (close := self._open.pop(port, None)) is not None:
            close()

    def close(self) -> None:
        """Close all ports. Idempotent."""
        for port in list(self._open):
            self.close_port(port)
        for end in (self._ours, self.theirs):
            end.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1


def _connect(line: socket.socket, name: str) -> bool:
    """Answer the sandbox's request for one more connection. False once the sandbox is gone."""
    try:
        if not line.recv(1):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.setblocking(False)  # also refused if too many are waiting
            try:
                made.connect(name)
            except OSError:
                line.send(REFUSED)
            else:
                made.setblocking(True)  # the sandbox gets the socket in the mode it has here
                socket.send_fds(line, [CONNECTED], [made.fileno()])
    except BlockingIOError:
        return True  # there was no request after all
    except OSError:
        return False
    return True
