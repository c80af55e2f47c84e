"""Pid 1 of a gVisor sandbox: builds it, starts and ends programs, reads and writes files for the host, until the host hangs up.

`main` has the line to the host as descriptor 0 and the line for ports as 1. It has capabilities in gVisor's kernel, but none
on the host. Programs run as another user.
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
from line import Unpacker, asked_for, open_port, pack, serve_port, take_line
from programs import ProgramRequest, Programs, act_as_owner
from rootfs import BASE, OWN, SandboxSettings, build, has_statx

APART_S = 70  # until a fork for files is killed; the host gives up earlier

# ---------------------------------------------------------------- single files of the workspace

# No link leads out of it, unless a program swaps links meanwhile. So this runs as the programs' own user without privileges
# (`act_as_owner`), and a swapped link reaches only what the program itself can.


def _inside(path: str, workdir: str) -> str:
    """A path with its links resolved. Raises OSError if it lies outside the workspace."""
    found = os.path.realpath(path)
    if found != workdir and not found.startswith(f"{workdir}/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    return found


def read_file(workdir: str, name: str, most: int) -> bytes:
    """At most `most` + 1 bytes of a regular file. Raises OSError."""
    fd = os.open(_inside(f"{workdir}/{name}", workdir), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return file.read(most + 1)


def _parent(workdir: str, parts: list[str]) -> str:
    """The parent directory of a path, with missing directories created."""
    at = workdir
    for part in parts:
        at = f"{at}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(at, 0o755)
        at = _inside(at, workdir)
    return at


def replace_file(workdir: str, name: str, data: bytes) -> None:
    """Replace a file atomically: written beside it, then renamed over it, so that nobody sees half of it. Raises OSError."""
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
    """A signal handler that does nothing: the signal alone ends a wait."""


class SandboxServer(ABC):
    """Answers the host. The first message builds the sandbox."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._inbox, self._outbox = line, Unpacker(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._programs: Programs | None = None
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, self._hear)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._wakers = (ours, theirs)
        self._selector.register(ours, selectors.EVENT_READ, lambda: ours.recv(4096))

    def run(self) -> NoReturn:
        """Serve until the host hangs up."""
        while True:
            wait = self._programs.look() if self._programs else None
            for key, _ in self._selector.select(wait):
                key.data()

    def _hear(self) -> None:
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
        for told, data in self._inbox.feed(part):
            self._do(told, data)

    def _say(self, number: int, told: dict[str, Any], data: bytes = b"") -> None:
        self._outbox += pack({"id": number, "error": 0} | told, data)
        self._send()

    def _send(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                while self._outbox:
                    del self._outbox[: self._line.send(self._outbox)]
        except OSError:
            os._exit(1)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._line, events, self._hear)

    def _do(self, told: dict[str, Any], data: bytes) -> None:
        number = told["id"]
        try:
            if self._programs is None:
                self._build(told, data)
            else:
                self._serve(told, data, self._programs)
        except StepError as failed:
            self._say(number, {"error": 1, "step": failed.report["step"], "told": failed.report["error"]})
        except OSError as failed:
            self._say(number, {"error": failed.errno or errno.EIO})

    def _build(self, told: dict[str, Any], data: bytes) -> None:
        self._programs, said = self._prepared(SandboxSettings.read(told), told, data)
        let_go(2)
        self._say(told["id"], said)

    @abstractmethod
    def _prepared(
        self, settings: SandboxSettings, told: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        """Build the sandbox. Returns what runs its programs, and what to report to the host. Raises StepError."""

    def _serve(self, told: dict[str, Any], data: bytes, programs: Programs) -> None:
        number = told["id"]
        match told["do"]:
            case "exec":
                wanted = ProgramRequest.read(data, told["text"], told["count"])
                programs.start(number, wanted, told["cap"], told["timeout"])
            case "end":
                programs.end_by_number(told["of"])
            case "read":
                self._read(number, os.fsdecode(data), told["most"], programs)
            case "write":
                name, content = os.fsdecode(data[: told["text"]]), data[told["text"] :]
                self._write(number, name, content, programs)
            case "diff":
                self._compare(number, programs)
            case "listen":
                self._listen(told["port"])
                self._say(number, {})
            case _:
                self._say(number, {"error": errno.ENOSYS})

    def _apart(self, number: int, programs: Programs, work: Callable[[int], None]) -> None:
        """Run `work` in a fork, and answer with what it writes to its descriptor, or with the number of its OSError."""
        out = os.memfd_create("found")
        pid = os.fork()
        if pid == 0:
            error = errno.EIO
            try:
                self._line.close()
                signal.set_wakeup_fd(-1)
                signal.alarm(APART_S)
                work(out)
                error = 0
            except OSError as failed:
                error = failed.errno or error
            finally:
                os._exit(error)

        def ended(code: int) -> None:
            found = os.pread(out, os.fstat(out).st_size, 0) if code == 0 else b""
            os.close(out)
            self._say(number, {"error": code if code >= 0 else errno.EIO}, found)

        programs.others[pid] = ended

    def _read(self, number: int, name: str, most: int, programs: Programs) -> None:
        def work(out: int) -> None:
            act_as_owner(programs.settings)
            with open(out, "wb") as found:
                found.write(read_file(programs.settings.workdir, name, most))

        self._apart(number, programs, work)

    def _write(self, number: int, name: str, content: bytes, programs: Programs) -> None:
        def work(out: int) -> None:
            act_as_owner(programs.settings)
            replace_file(programs.settings.workdir, name, content)

        self._apart(number, programs, work)

    def _compare(self, number: int, programs: Programs) -> None:
        """Compare the files with pid 1's rights, since programs may have removed their own. This only reads, and follows no link."""

        def work(out: int) -> None:
            base, now, own = (os.open(path, DIRECTORY) for path in (BASE, programs.settings.workdir, f"{OWN}/up"))
            write_changes(out, base, now, [own])

        self._apart(number, programs, work)

    @abstractmethod
    def _listen(self, port: int) -> None:
        """From now on, connections to a port of the loopback reach the host. Raises OSError."""

    def _serve_port(self, port: int, reach: Callable[[], socket.socket | None], *ours: socket.socket) -> None:
        """Serve a port in a fork, which closes the sockets in `ours`."""
        with open_port(port) as listener:
            if os.fork() == 0:
                for each in (self._line, *ours):
                    each.close()
                signal.set_wakeup_fd(-1)
                serve_port(listener, reach)


class Kernel(SandboxServer):
    """Pid 1 under gVisor. `ports` is the host's line for ports."""

    def __init__(self, line: socket.socket, ports: socket.socket) -> None:
        super().__init__(line)
        self._ports = ports
        ports.setblocking(False)

    def _prepared(
        self, settings: SandboxSettings, told: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        build(settings, data)
        return Programs(settings, self._selector, self._say), {"statx": has_statx()}

    def _listen(self, port: int) -> None:
        with take_line(self._ports) as line:
            self._serve_port(port, lambda: asked_for(line), self._ports)


def let_go(*places: int) -> None:
    """Replace descriptors that came from the host with /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for place in places:
        os.dup2(null, place)
    os.close(null)


def main() -> NoReturn:
    """Take over the lines at descriptors 0 and 1, and serve."""
    line, ports = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(place)) for place in (0, 1))
    let_go(0, 1)
    try:
        Kernel(line, ports).run()
    except BaseException:  # noqa: BLE001 - the host reads it if the sandbox did not start
        traceback.print_exc()
    finally:
        os._exit(1)
