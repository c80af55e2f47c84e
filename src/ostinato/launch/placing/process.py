"""One worker as a subprocess: its start, its heartbeats, its end, and the rotation of its output file.

Once a second the worker checks the size of its output file. A file that is too long is truncated in place, not renamed: the worker's own
subprocesses have the same file open and would go on writing to it under its new name, unbounded and unseen. There is no pipe between
worker and file, so no write blocks on a full disk or fails because a reader died, and the file holds the last words of a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Protocol

from ostinato.core.clock import wall_clock
from ostinato.core.files import older, private
from ostinato.launch.placing.heartbeat import PARENT, PULSE_FD, Sign, read_sign

# ---------------------------------------------------------------- its output file


OUTPUT = "OSTINATO_OUTPUT"
"""Environment variable with the path of a supervised worker's output file."""
KEPT_BYTES = 16 << 20
LOOK_S = 1.0
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16


class Rotation(threading.Thread):
    """The thread that keeps the output file at `most_bytes` and its older part at twice that, apart from the output of one second."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(name="rotation", daemon=True)
        self._path, self._most_bytes = path, most_bytes
        self._lock = threading.Lock()  # the main thread makes the last check

    def run(self) -> None:
        """Check the file every `LOOK_S` seconds until the process ends."""
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Rotate the file if it is too long. After an error, such as a full disk, the next check retries."""
        with self._lock, contextlib.suppress(OSError):
            rotate(self._path, self._most_bytes)


def rotation(most_bytes: int) -> Rotation | None:
    """Return the rotation of this process's output file; None for a worker that was started by hand."""
    named = os.environ.pop(OUTPUT, None)  # subprocesses must not see it
    if not named:
        return None
    path = Path(named)
    try:
        own = os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return None
    return Rotation(path, most_bytes) if own and path.is_file() else None


def rotate(path: Path, most_bytes: int) -> bool:
    """Copy the newest part of a file that exceeds `most_bytes` to `older(path)` and truncate the file. Return True if it was rotated.

    Other processes may append meanwhile: a line that is written between the last read and the truncation is lost, as is a burst that
    outruns the copy. If the disk has no room for the copy, a file of more than twice `most_bytes` is still truncated. Raises OSError.
    """
    with open(path, "r+b", buffering=0) as output:
        size = output.seek(0, os.SEEK_END)
        if size <= most_bytes:
            return False
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb", opener=private) as kept:
                at = size - most_bytes
                head = os.pread(output.fileno(), _LONGEST_LINE, at - 1) if at else b"\n"
                at += max(0, head.find(b"\n"))  # begin with a whole line, unless it is very long
                end = at + 2 * most_bytes
                while at < end and (part := os.pread(output.fileno(), min(_CHUNK_BYTES, end - at), at)):
                    kept.write(part)
                    at += len(part)
            partial.replace(older(path))
        except OSError:
            partial.unlink(missing_ok=True)
            if size <= 2 * most_bytes:
                raise
        output.truncate(0)
    return True


# ---------------------------------------------------------------- the process


THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of every worker, so that no worker takes all the cores."""


class Child(Protocol):
    """The part of `asyncio.subprocess.Process` that is used. `returncode` is None while it runs, and minus the number of a fatal signal."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...


spawn: Callable[..., Awaitable[Child]] = asyncio.create_subprocess_exec
"""Starts a worker's process, with asyncio's arguments. `warm` and the tests replace it to fork from a process with loaded libraries."""
_TAIL_BYTES = 4096  # bytes at the end of the output in which a last line is searched
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class WorkerProcess:
    """A `Worker` that is a subprocess of this one. `env` is added to the environment, `fds` are inherited, output is appended to `log`. It
    starts in `directory`; None: in this process's.

    `sign` is its last heartbeat, received at `heard` on the loop's clock. `was_ready`: it has been ready at least once since the supervisor
    started.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    fds: tuple[int, ...] = ()
    directory: Path | None = None
    process: Child | None = None
    sign: Sign | None = None
    heard: float = 0.0
    was_ready: bool = False
    _pipe: int = -1
    _rest: bytes = b""
    _output_from: int = 0
    _started_at: float = 0.0

    async def start(self) -> None:
        """Start the process in its own process group, so that Ctrl-C at the terminal reaches only the supervisor."""
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        ours, theirs = os.pipe()
        self._started_at = wall_clock()
        os.set_blocking(ours, False)
        try:
            with FileIO(self.log, "a", opener=private) as output:
                self._output_from = output.tell()
                self.process = await spawn(
                    *self.argv,
                    cwd=self.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **self.env, **self._supervision_env(theirs)},
                    pass_fds=(theirs, *self.fds),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.sign, self.heard, self._pipe, self._rest = None, loop.time(), ours, b""
        loop.add_reader(ours, self._read_signs)

    def _supervision_env(self, pulse: int) -> dict[str, str]:
        """Return the environment variables that connect a worker to its supervisor."""
        return {PARENT: str(os.getpid()), PULSE_FD: str(pulse), OUTPUT: str(self.log.absolute())}

    @property
    def running(self) -> bool:
        """True between its start and its end."""
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 before the first."""
        return self.process.pid if self.process is not None else 0

    @property
    def node(self) -> str:
        """Empty: it runs on this machine."""
        return ""

    async def ended(self) -> int:
        """Wait for the end and return the exit code, or minus the signal number. By then all heartbeats have been received."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        code = await self.process.wait()
        self._read_signs()
        self._close_pipe()
        return code

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM, and after `grace_s` seconds SIGKILL to the whole process group. Return True if it ended by itself."""
        process = self.process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        """Send SIGKILL to the whole process group, which also ends a process that is stopped (SIGSTOP)."""
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:  # just forked, it has no process group yet
                    process.send_signal(signal.SIGKILL)
            await process.wait()

    def last_line(self) -> str:
        """Return the last line of this process's output, for a process that could not report why it ended."""
        before = older(self.log)  # in case the output was rotated just before the end
        with contextlib.suppress(OSError):
            if line := _last_line(self.log, self._output_from):
                return line
            return _last_line(before) if before.stat().st_mtime >= self._started_at else ""
        return ""

    def _read_signs(self) -> None:
        while self._pipe >= 0:
            try:
                part = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return
            if not part:
                self._close_pipe()
                return
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                if (sign := read_sign(line)) is not None:
                    self.heard = asyncio.get_running_loop().time()
                    self.was_ready |= sign.ready
                    if self.sign is None or self.sign.failed is None:  # the reason of a failure is not overwritten
                        self.sign = sign

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _last_line(path: Path, start: int = 0) -> str:
    """Return a file's last non-blank line after `start` bytes (of the whole file, if it has been truncated since); "" if none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def own_command(*words: str) -> tuple[str, ...]:
    """Return the argv that runs the CLI of this same installation."""
    return (sys.executable, "-m", "ostinato.cli", *words)
