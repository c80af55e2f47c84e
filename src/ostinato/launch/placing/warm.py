"""Fork server (zygote): starts workers as forks of a warm process (`warm_process`) that has imported their libraries once.

A forked worker is this process's child, with its own session, environment, files and exit code, as if it had been spawned. Whatever cannot
be forked is spawned as usual: other programs, workers whose environment differs, and all workers on systems without such forks.
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
from collections.abc import Callable, Generator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from ostinato.launch.placing import process, warm_process
from ostinato.launch.placing.heartbeat import LISTEN_FD, PARENT, PULSE_FD
from ostinato.launch.placing.process import OUTPUT, THREADS, Child
from ostinato.launch.placing.warm_process import ARGV_ROOM, GO, LIBRARIES, MOST_BYTES, MOST_FILES, READY

NO_FORKS = "OSTINATO_NO_FORKS"
"""Environment variable that, if set, disables forking: every worker is spawned."""
PER_WORKER = {PARENT, PULSE_FD, LISTEN_FD, OUTPUT, NO_FORKS}
"""Environment variables in which forked workers may differ, since no import reads them."""
_IMPORTS_S, _FORK_S = 300.0, 20.0  # timeouts
_PR_SET_CHILD_SUBREAPER = 36
_UNKNOWN = 255
"""Exit code of a process that was reaped by somebody else; the same as asyncio's."""
_LOG = logging.getLogger(__name__)


def possible() -> bool:
    """Return True if workers can be forked here and this process can wait for them."""
    if sys.platform != "linux" or os.environ.get(NO_FORKS) or process.spawn is not asyncio.create_subprocess_exec:
        return False
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited from a parent; children could not be waited for
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        _adopt(False)
    except (OSError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def forked_workers(say: Callable[[str], None]) -> Generator[None]:
    """Fork this process's workers inside the block, if that is possible. A nested block has no effect.

    `say` is called with the reason if forking is given up.
    """
    if not possible():
        yield
        return
    warm, before = WarmProcess(say=say), process.spawn
    process.spawn = warm.spawn
    try:
        yield
    finally:
        process.spawn = before
        warm.close()


class WarmProcess:
    """The supervisor's side of the fork server. It is started at once and imports `libraries`. `close` ends it, but no worker.

    `say` is called with the reason if forking is given up.
    """

    def __init__(self, libraries: Sequence[str] = LIBRARIES, say: Callable[[str], None] = _LOG.warning) -> None:
        self._libraries, self._say, self._lock = libraries, say, asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._patience_s, self._followed = _IMPORTS_S, False
        self._start()

    @property
    def pid(self) -> int:
        """The fork server's process id; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """End the fork server. The workers live on."""
        self._ready = False
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def spawn(
        self,
        *argv: str,
        cwd: Path | None,
        stdout: FileIO,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **others: Any,
    ) -> Child:
        """As `asyncio.create_subprocess_exec` with a supervisor's arguments. The first calls wait for the imports. Raises OSError."""
        if argv[:2] == (sys.executable, "-m"):
            asked = {"words": argv[2:], "cwd": str(cwd or os.getcwd()), "env": dict(env), "fds": list(pass_fds)}
            request, files = json.dumps(asked).encode(), [stdout.fileno(), stdout.fileno(), *pass_fds]
            async with self._lock:
                self._follow_environment()
                fits = (
                    len(request) < MOST_BYTES and len(files) < MOST_FILES and _seen_by_imports(env) == self._environment
                )
                if fits and await self._warm() and (forked := await self._fork(request, files)) is not None:
                    return forked
        return await asyncio.create_subprocess_exec(*argv, cwd=cwd, stdout=stdout, env=env, pass_fds=pass_fds, **others)

    def _start(self) -> None:
        self._ready, self._environment = False, _seen_by_imports(os.environ | THREADS)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs, contextlib.suppress(OSError):  # without a fork server workers are spawned
            self._process = subprocess.Popen(
                [sys.executable, "-m", warm_process.__name__, str(theirs.fileno()), *self._libraries, " " * ARGV_ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | THREADS | {PARENT: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C at the terminal is for the supervisor only
            )

    def _restart(self) -> None:
        self.close()
        self._start()

    def _follow_environment(self) -> None:
        """Restart the fork server if this process's environment has changed since, e.g. for a read-only home directory; only once."""
        now = _seen_by_imports(os.environ | THREADS)
        if self._process is None or now == self._environment:
            return
        if not self._followed:
            self._followed = True
            self._restart()
            return
        names = {name for name, _ in now.items() ^ self._environment.items()}
        self._give_up(f"the environment changes again and again ({', '.join(sorted(names))})")

    async def _warm(self) -> bool:
        """Return True if it can fork now. First starts wait for the imports; restarts do not, since people may be waiting."""
        if not self._ready and self._process is not None:
            try:
                async with asyncio.timeout(self._patience_s):
                    reply = await asyncio.get_running_loop().sock_recv(self._socket, MOST_BYTES)
            except TimeoutError:
                if self._patience_s:
                    self._give_up("their imports took too long")
                return False
            except OSError:  # it died before it had read its command line
                reply = b""
            if not reply and await asyncio.to_thread(self._process.wait) < 0:  # killed, e.g. for lack of memory
                self._patience_s = 0.0
                self._restart()
                return False
            if reply != READY:
                self._give_up(reply.decode() or "their imports failed")
                return False
            self._ready, self._patience_s = True, 0.0
        return self._ready

    def _give_up(self, why: str) -> None:
        self.close()
        with contextlib.suppress(OSError):  # the output's disk may be full
            self._say(f"workers are started anew, not forked: {why}")

    async def _fork(self, request: bytes, files: Sequence[int]) -> ForkedWorker | None:
        """Have a worker forked. Return None if the fork server is dead or stuck, and start a new one for later workers.

        Also returns None, and gives forking up, if the system does not make the worker this process's child. A forked worker waits for a go
        signal, so none runs that this process does not know of. Raises OSError.
        """
        waits, go = os.pipe()
        pid = 0
        try:
            _adopt(True)
            pid = await self._ask(request, [*files, waits])
            if pid < 0:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if pid > 0 and not _is_child(pid):
                self._give_up("the system does not give them to their supervisor")
            elif pid > 0:
                try:  # before the go signal: if no more files can be opened, the worker must not run
                    worker = ForkedWorker(pid)
                except OSError:
                    asyncio.get_running_loop().run_in_executor(None, os.waitpid, pid, 0)  # it ends once `go` is closed
                    raise
                os.write(go, GO)
                return worker
        finally:
            os.close(waits)
            os.close(go)
            _adopt(False)
            if pid == 0:
                self._restart()  # also after a cancellation, since the reply to this request would be taken for the next one's
        return None

    async def _ask(self, request: bytes, files: Sequence[int]) -> int:
        """Request a fork. Return the worker's pid, -1 if the system has no room for a process, or 0 if no reply came."""
        try:
            socket.send_fds(self._socket, [request], list(files))
            async with asyncio.timeout(_FORK_S):
                return int(await asyncio.get_running_loop().sock_recv(self._socket, 32) or b"0")
        except OSError:  # a timeout, too
            return 0


class ForkedWorker:
    """A forked worker as a `Child`. `returncode` is None while it runs."""

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


def _seen_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that imports may read. It must be the same in a forked worker."""
    return {name: value for name, value in environment.items() if name not in PER_WORKER}


def _adopt(orphans: bool) -> None:
    """Make this process the reaper of its orphaned descendants (PR_SET_CHILD_SUBREAPER), or stop that. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
