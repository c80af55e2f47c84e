"""The wire protocol between host, zygote and boxes (defined in `native/sandbox.h`), and the host's connection to a box."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from ostinato.core.errors import SandboxRefused, Unavailable

START = struct.Struct("<10I3Q")
REQUEST = struct.Struct("<4IQ")
ANSWER = struct.Struct("<IIiIQ")
FILE = struct.Struct("<IIQ")
MAX_FDS = 250
_RESEND_S = 0.005  # pause before a message is sent again to a socket whose buffer was full
MAX_DEADLINE_FACTOR = 2
"""A program that waited for the processor gets more time, but never more than this many times its timeout in all."""
ENABLE = (
    "To allow it: user.max_user_namespaces > 0; kernel.unprivileged_userns_clone = 1 (Debian); "
    "kernel.apparmor_restrict_unprivileged_userns = 0 (Ubuntu); in a container, a seccomp and AppArmor profile that permits "
    "unshare and mount (docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined, plus --cap-add SYS_ADMIN as root)."
)


class Operation(IntEnum):
    """Kinds of messages: requests to pid 1 of a box, and, from 100 on, its reports of readiness and refusal."""

    EXEC = 1
    READ = 2
    WRITE = 3
    FREEZE = 4
    CLONES = 5
    DIFF = 6
    KILL = 7
    STOP = 8
    LISTEN = 9
    READY = 100
    REFUSED = 101


class StartFlag(IntFlag):
    """Options of a box's start. LAYER marks a message that attaches a layer instead of starting a box."""

    OWN_NET = 1
    PROC = 2
    OVERLAY = 4
    BLOB = 8
    LAYER = 32


class ExecFlag(IntFlag):
    """Options of a program's start. BODY: run Python source in a fork of the warm interpreter. LAST: the box ends with the program."""

    BODY = 1
    LAST = 2
    WITH_STDIN = 4


REASONS = (None, "timeout", "memory", "killed")


def refusal(step: str, error: str) -> SandboxRefused:
    """Return the error for an isolation step that the kernel refused."""
    return SandboxRefused(f"generated code cannot be isolated here: step '{step}' failed: {error}. {ENABLE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxReply:
    """An answer of pid 1. `code` is an errno, or a program's exit status (negative: its signal); the receiver must close `fds`.

    Example: ``BoxReply(operation=Operation.EXEC, code=0, reason=0, seconds=0.016, text="", fds=())``
    """

    operation: int
    code: int
    reason: int
    seconds: float
    text: str
    fds: tuple[int, ...]


def anonymous_file(data: bytes | memoryview, *, sealed: bool = False) -> int:
    """Return a memfd that holds `data`, positioned at its start. If `sealed`, nobody can change or resize it."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    if sealed:
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        )
    return fd


def _send_now(to: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    to.sendmsg([message], rights, socket.MSG_NOSIGNAL)


async def send(to: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send one message with file descriptors, waiting while the socket is full. Raises OSError if the other end is closed."""
    while True:
        try:
            return _send_now(to, message, fds)
        except BlockingIOError:
            # polled, since add_writer serves one task per socket and never fires once the socket is closed
            await asyncio.sleep(_RESEND_S)


async def readable(end: socket.socket) -> None:
    """Wait until a socket is readable. The caller must cancel the wait when it closes the socket: the event loop does not report that."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(end, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(end)


class BoxConnection:
    """The host's end of the socket to a box's pid 1. Messages may carry descriptors, and several requests may be pending at once.

    `ready` resolves to the READY message, or to SandboxRefused if the box could not start.
    """

    def __init__(self) -> None:
        self._socket, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._pending: dict[int, asyncio.Future[BoxReply]] = {}
        self._next = 1
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)
        self.ready: asyncio.Future[BoxReply] = self._loop.create_future()
        self.open = True

    def close_peer(self) -> None:
        """Close our copy of the box's end, after it was passed on."""
        self.peer.close()

    def _receive(self) -> None:
        try:
            data, rights, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, rights = b"", []
        if len(data) < ANSWER.size:
            self.close()
            return
        fds = array.array("i")
        for _, _, part in rights:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
        operation, number, code, reason, nanoseconds = ANSWER.unpack_from(data)
        text = data[ANSWER.size :].decode(errors="replace")
        answer = BoxReply(
            operation=operation, code=code, reason=reason, seconds=nanoseconds / 1e9, text=text, fds=tuple(fds)
        )
        future = self.ready if number == 0 else self._pending.pop(number, None)
        if operation == Operation.REFUSED and number == 0:
            self._fail(refusal(text, os.strerror(code)))
        elif future is not None and not future.done():
            future.set_result(answer)
        else:
            for fd in fds:
                os.close(fd)

    def ask(
        self,
        operation: Operation,
        text: bytes = b"",
        *,
        flags: int = 0,
        count: int = 0,
        timeout: float = 0.0,
        fds: Sequence[int] = (),
    ) -> tuple[int, asyncio.Future[BoxReply]]:
        """Send a request; return its number and a future of the answer. `timeout`: seconds. Raises Unavailable if the box is gone."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[BoxReply] = self._loop.create_future()
        message = REQUEST.pack(operation, number, flags, count, max(1, round(timeout * 1000))) + text
        try:
            if not self.open:
                raise BrokenPipeError
            _send_now(self._socket, message, fds)
        except OSError as error:
            raise Unavailable(
                f"the sandbox is gone or cannot be reached ({error.strerror or 'it was stopped'})"
            ) from error
        self._pending[number] = answer
        return number, answer

    def end(self, number: int) -> None:
        """Ask pid 1 to kill a program and all its descendants."""
        with contextlib.suppress(OSError):
            self._socket.sendmsg([REQUEST.pack(Operation.KILL, number, 0, 0, 0)])

    def _fail(self, error: Exception) -> None:
        for future in (self.ready, *self._pending.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved, in case nobody awaits it
        self._pending.clear()

    def close(self) -> None:
        """Close the connection, which makes the box end itself. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.peer.close()
        self._fail(Unavailable("the sandbox is gone: it was stopped, or killed for lack of memory"))
