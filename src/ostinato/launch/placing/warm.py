"""Starts workers as forks of a warm process (`warm_process`) that has imported what they import, so that this is waited for once.

A forked worker is this process's child, with its own session, environment, files and exit code, like one that was started. What cannot be
forked is started as ever: any other program, a worker whose environment differs, and everything where the system has no such forks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from io import FileIO
from pathlib import Path

from ostinato.launch.placing import process, warm_process
from ostinato.launch.placing.heartbeat import LISTEN_FD, PARENT, PULSE_FD
from ostinato.launch.placing.process import OUTPUT, THREADS, Child
from ostinato.launch.placing.warm_process import LIBRARIES, MOST_BYTES, MOST_FILES, READY, ROOM

OFF = "OSTINATO_NO_FORKS"
"""Environment variable that, if set, has every worker started anew."""
OWN = {PARENT, PULSE_FD, LISTEN_FD, OUTPUT, OFF}
"""Environment variables in which workers may differ: no import reads them."""
_IMPORTS_S, _FORK_S = 300.0, 20.0  # how long these may take
_PR_SET_CHILD_SUBREAPER = 36
_UNKNOWN = 255
"""The exit code of a process whose end the system told somebody else, as asyncio has it."""
_LOG = logging.getLogger(__name__)


def possible() -> bool:
    """True where workers can be forked and this process may be told of their end."""
    if sys.platform != "linux" or os.environ.get(OFF) or process.spawn is not asyncio.create_subprocess_exec:
        return False
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # as a parent may leave it; the system then tells no end
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        _adopt(False)
    except (OSError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def forked_workers() -> Generator[None]:
    """Inside the block this process's workers are forked, where that is possible. Inside another such block it changes nothing."""
    if not possible():
        yield
        return
    warm, before = WarmProcess(), process.spawn
    process.spawn = warm.spawn
    try:
        yield
    finally:
        process.spawn = before
        warm.close()


class WarmProcess:
    """The process and what is asked of it. It starts to import `libraries` at once. `close` ends it, and no worker."""

    def __init__(self, libraries: Sequence[str] = LIBRARIES) -> None:
        self._libraries, self._one = libraries, asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._start()

    @property
    def pid(self) -> int:
        """Its process id; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process. Its workers stay."""
        self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def spawn(
        self,
        *argv: str,
        cwd: Path | None,
        stdin: int,
        stdout: FileIO,
        stderr: int,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> Child:
        """As `asyncio.create_subprocess_exec` with a supervisor's arguments. At the first call it waits for the imports. Raises OSError."""
        if argv[:2] == (sys.executable, "-m") and _shared(env) == self._environment:
            asked = {"words": argv[2:], "cwd": str(cwd or os.getcwd()), "env": dict(env), "fds": list(pass_fds)}
            request, files = json.dumps(asked).encode(), [stdout.fileno(), stdout.fileno(), *pass_fds]
            async with self._one:
                fits = len(request) < MOST_BYTES and len(files) <= MOST_FILES
                if fits and await self._warm() and (forked := self._fork(request, files)) is not None:
                    return forked
        return await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=pass_fds,
            start_new_session=start_new_session,
        )

    def _start(self) -> None:
        self._ready, self._environment = False, _shared(os.environ | THREADS)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # without it workers are started as ever
            self._process = subprocess.Popen(
                [sys.executable, "-m", warm_process.__name__, str(theirs.fileno()), *self._libraries, " " * ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | THREADS | {PARENT: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor
            )

    async def _warm(self) -> bool:
        """Wait until it can fork. False if it never can."""
        if not self._ready and self._process is not None and not self._given_up:
            said = b"their imports took too long"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IMPORTS_S):
                    await _readable(self._line)
                said = self._line.recv(MOST_BYTES) or b"their imports failed"
            self._ready = said == READY
            if not self._ready:
                self._give_up(said.decode())
        return self._ready

    def _give_up(self, why: str) -> None:
        _LOG.info("workers are started anew, not forked: %s", why)
        self._given_up, self._ready = True, False
        self.close()

    def _fork(self, request: bytes, files: Sequence[int]) -> ForkedWorker | None:
        """Have a worker forked. None if the process has died: another one is then begun, for later workers. Raises OSError."""
        self._line.settimeout(_FORK_S)
        _adopt(True)
        try:
            try:
                socket.send_fds(self._line, [request], list(files))
            except OSError:
                self.close()
                self._start()
                return None
            pid = int(self._line.recv(MOST_BYTES) or b"0")  # empty if it died just now
        except OSError:
            pid = 0
        finally:
            _adopt(False)
        if pid < 0:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if pid == 0 or not _is_child(pid):  # perhaps it runs: it ends by itself, as nobody listens to it
            self._give_up("the system does not give them to their supervisor" if pid else "a fork failed")
            raise OSError(errno.ECHILD, os.strerror(errno.ECHILD))
        return ForkedWorker(pid)


class ForkedWorker:
    """A forked worker, with what its supervisor uses of asyncio's processes. `returncode` is None while it runs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._pidfd, self._ended = os.pidfd_open(pid), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.returncode = _UNKNOWN
        self._ended.set()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """What imports may read of an environment, which must be the same for a fork."""
    return {name: value for name, value in environment.items() if name not in OWN}


def _adopt(orphans: bool) -> None:
    """Have the kernel give this process the orphans among its descendants, or no longer. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


async def _readable(line: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(line, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(line)
