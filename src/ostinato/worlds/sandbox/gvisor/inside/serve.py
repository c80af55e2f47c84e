"""Pid 1 of a gVisor sandbox: builds it, runs programs, and reads and writes files for the host, until the host disconnects.

`main` expects the host's request socket as descriptor 0 and the port-forwarding socket as 1. Pid 1 has capabilities in gVisor's kernel but
none on the host. Programs run as another user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import signal
import socket
import stat
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from compare import DIRECTORY, write_changes
from kernel import StepError
from line import Unpacker, open_port, pack, receive_port_socket, request_socket, serve_port
from programs import ProgramRequest, Programs, act_as_owner
from rootfs import BASE, OWN, SandboxSettings, build, has_statx

FORK_LIMIT_S = 70  # a fork for file access is killed after this time; the host gives up earlier

# ---------------------------------------------------------------- single files of the workspace

# Links out of the workspace are refused, but a program could swap links after the check. So this runs as the programs' own user without
# privileges (`act_as_owner`), and a swapped link reaches only what the program itself can reach.


def _inside(path: str, workdir: str) -> str:
    """Return a path with its links resolved. Raises OSError if it lies outside the workspace."""
    resolved = os.path.realpath(path)
    if resolved != workdir and not resolved.startswith(f"{workdir}/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    return resolved


def read_file(workdir: str, name: str, most: int) -> bytes:
    """Return at most `most` + 1 bytes of a regular file. Raises OSError."""
    fd = os.open(_inside(f"{workdir}/{name}", workdir), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return file.read(most + 1)


def _parent(workdir: str, parts: list[str]) -> str:
    """Return a directory of the workspace, given its path's parts; create missing directories."""
    at = workdir
    for part in parts:
        at = f"{at}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(at, 0o755)
        at = _inside(at, workdir)
    return at


def replace_file(workdir: str, name: str, data: bytes) -> None:
    """Replace a file atomically, by a temporary file and a rename. Raises OSError."""
    *above, last = name.split("/")
    parent = _parent(workdir, above)
    target, partial = f"{parent}/{last}", f"{parent}/.{secrets.token_hex(8)}"
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        seen = os.lstat(target)
        if stat.S_ISDIR(seen.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        mode = stat.S_IMODE(seen.st_mode) & 0o777 if stat.S_ISREG(seen.st_mode) else mode
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, mode)
        os.rename(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


# ---------------------------------------------------------------- pid 1


def _wake(number: int, frame: Any) -> None:
    """Do nothing: a signal handler must exist for the signal to interrupt a wait."""


class SandboxServer(ABC):
    """Answers the host's requests. The first request builds the sandbox."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._inbox, self._outbox = line, Unpacker(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._programs: Programs | None = None
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, self._receive)
        ours, wake_end = socket.socketpair()
        for end in (ours, wake_end):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
        self._wakers = (ours, wake_end)
        self._selector.register(ours, selectors.EVENT_READ, lambda: ours.recv(4096))

    def run(self) -> NoReturn:
        """Serve until the host disconnects."""
        while True:
            wait = self._programs.poll() if self._programs else None
            for key, _ in self._selector.select(wait):
                key.data()

    def _receive(self) -> None:
        if self._outbox:
            self._send()
        part = b""
        try:
            part = self._line.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            os._exit(1)
        if not part:
            os._exit(0)
        for request, data in self._inbox.feed(part):
            self._do(request, data)

    def _answer(self, number: int, result: dict[str, Any], data: bytes = b"") -> None:
        self._outbox += pack({"id": number, "error": 0} | result, data)
        self._send()

    def _send(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                while self._outbox:
                    del self._outbox[: self._line.send(self._outbox)]
        except OSError:
            os._exit(1)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._line, events, self._receive)

    def _do(self, request: dict[str, Any], data: bytes) -> None:
        number = request["id"]
        try:
            if self._programs is None:
                self._build(request, data)
            else:
                self._serve(request, data, self._programs)
        except StepError as failed:
            self._answer(number, {"error": 1, "step": failed.report["step"], "told": failed.report["error"]})
        except OSError as failed:
            self._answer(number, {"error": failed.errno or errno.EIO})

    def _build(self, request: dict[str, Any], data: bytes) -> None:
        self._programs, report = self._build_sandbox(SandboxSettings.read(request), request, data)
        replace_with_null(2)
        self._answer(request["id"], report)

    @abstractmethod
    def _build_sandbox(
        self, settings: SandboxSettings, request: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        """Build the sandbox. Return its `Programs`, and the report for the host. Raises StepError."""

    def _serve(self, request: dict[str, Any], data: bytes, programs: Programs) -> None:
        number = request["id"]
        match request["do"]:
            case "exec":
                program = ProgramRequest.read(data, request["text"], request["count"])
                programs.start(number, program, request["cap"], request["timeout"])
            case "end":
                programs.kill_program(request["of"])
            case "read":
                self._read(number, os.fsdecode(data), request["most"], programs)
            case "write":
                name, content = os.fsdecode(data[: request["text"]]), data[request["text"] :]
                self._write(number, name, content, programs)
            case "diff":
                self._compare(number, programs)
            case "listen":
                self._listen(request["port"])
                self._answer(number, {})
            case _:
                self._answer(number, {"error": errno.ENOSYS})

    def _in_fork(self, number: int, programs: Programs, work: Callable[[int], None]) -> None:
        """Run `work` in a fork, and answer with the bytes it writes to its descriptor, or with the errno of its OSError."""
        out = os.memfd_create("found")
        pid = os.fork()
        if pid == 0:
            error = errno.EIO
            try:
                self._line.close()
                signal.set_wakeup_fd(-1)
                signal.alarm(FORK_LIMIT_S)
                work(out)
                error = 0
            except OSError as failed:
                error = failed.errno or error
            finally:
                os._exit(error)

        def ended(code: int) -> None:
            content = os.pread(out, os.fstat(out).st_size, 0) if code == 0 else b""
            os.close(out)
            self._answer(number, {"error": code if code >= 0 else errno.EIO}, content)

        programs.others[pid] = ended

    def _read(self, number: int, name: str, most: int, programs: Programs) -> None:
        def work(out: int) -> None:
            act_as_owner(programs.settings)
            with open(out, "wb") as file:
                file.write(read_file(programs.settings.workdir, name, most))

        self._in_fork(number, programs, work)

    def _write(self, number: int, name: str, content: bytes, programs: Programs) -> None:
        def work(out: int) -> None:
            act_as_owner(programs.settings)
            replace_file(programs.settings.workdir, name, content)

        self._in_fork(number, programs, work)

    def _compare(self, number: int, programs: Programs) -> None:
        """Compare the files with pid 1's privileges, since programs may have made files unreadable. It only reads, and follows no link."""

        def work(out: int) -> None:
            base, now, own = (os.open(path, DIRECTORY) for path in (BASE, programs.settings.workdir, f"{OWN}/up"))
            write_changes(out, base, now, [own])

        self._in_fork(number, programs, work)

    @abstractmethod
    def _listen(self, port: int) -> None:
        """Forward connections to a port of the loopback to the host. Raises OSError."""

    def _serve_port(self, port: int, reach: Callable[[], socket.socket | None], *ours: socket.socket) -> None:
        """Serve a port in a fork, which closes the sockets in `ours`."""
        with open_port(port) as listener:
            if os.fork() == 0:
                for each in (self._line, *ours):
                    each.close()
                signal.set_wakeup_fd(-1)
                serve_port(listener, reach)


class Kernel(SandboxServer):
    """Pid 1 under gVisor. `ports` is the socket over which the host passes each port's own socket."""

    def __init__(self, line: socket.socket, ports: socket.socket) -> None:
        super().__init__(line)
        self._ports = ports
        ports.setblocking(False)

    def _build_sandbox(
        self, settings: SandboxSettings, request: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        build(settings, data)
        return Programs(settings, self._selector, self._answer), {"statx": has_statx()}

    def _listen(self, port: int) -> None:
        with receive_port_socket(self._ports) as line:
            self._serve_port(port, lambda: request_socket(line), self._ports)


def replace_with_null(*places: int) -> None:
    """Replace descriptors that came from the host with /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for place in places:
        os.dup2(null, place)
    os.close(null)


def main() -> NoReturn:
    """Take over the sockets at descriptors 0 and 1, and serve."""
    line, ports = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(place)) for place in (0, 1))
    replace_with_null(0, 1)
    try:
        Kernel(line, ports).run()
    except BaseException:  # noqa: BLE001 - the host reads it if the sandbox did not start
        traceback.print_exc()
    finally:
        os._exit(1)
