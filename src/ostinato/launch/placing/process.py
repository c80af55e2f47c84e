"""One worker as a subprocess: how it is started, heard and stopped, and how it rotates its output file.

Once a second the worker looks at the size of the file that it writes to. A file that is too long is truncated in place, not renamed,
because every program that the worker started writes to the same open file: under another name it would be written on, unbounded and
unseen. No pipe lies between, so nothing blocks on a full disk or dies with a reader, and what a crash prints last is in the file.
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
"""Environment variable that holds the path of a supervised worker's output file."""
KEPT_BYTES = 16 << 20
LOOK_S = 1.0
_PART = 1 << 20
_LONGEST_LINE = 1 << 16


class Rotation(threading.Thread):
    """Keeps the output file at `most_bytes`, and the older part beside it at twice that, but for what is written in one second."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(name="rotation", daemon=True)
        self._path, self._most_bytes = path, most_bytes
        self._one = threading.Lock()  # the last look is the main thread's

    def run(self) -> None:
        """Look at the file every `LOOK_S` seconds until the process ends."""
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Rotate the file if it is too long. An error, such as a full disk, is left to the next look."""
        with self._one, contextlib.suppress(OSError):
            rotate(self._path, self._most_bytes)


def rotation(most_bytes: int) -> Rotation | None:
    """The rotation of this process's output; None for a worker that was started by hand, whose output is its caller's own."""
    named = os.environ.pop(OUTPUT, None)  # not for programs that the worker starts
    if not named:
        return None
    path = Path(named)
    try:
        own = os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return None
    return Rotation(path, most_bytes) if own and path.is_file() else None


def rotate(path: Path, most_bytes: int) -> bool:
    """If a file that others append to exceeds `most_bytes`, move its newest part to `older(path)` and empty it. True if so.

    A line that is written between the last read and the truncation is lost, as is what a burst writes faster than it is copied. On a disk
    without room for the copy, a file of more than twice `most_bytes` is emptied all the same. Raises OSError.
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
                at += max(0, head.find(b"\n"))  # the older part begins with a whole line, unless that is very long
                end = at + 2 * most_bytes
                while at < end and (part := os.pread(output.fileno(), min(_PART, end - at), at)):
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
"""Environment variables of a worker: workers share the cores, and no worker takes them all."""


class Child(Protocol):
    """A process as asyncio starts it. `returncode` is None while it runs, and minus the signal's number if one ended it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...


spawn: Callable[..., Awaitable[Child]] = asyncio.create_subprocess_exec
"""Starts a worker's process, with asyncio's arguments. `warm` and the tests fork it from a process that has imported its libraries."""
_TAIL = 4096  # bytes at the end of the output that are searched for a last line
_PIPE = 1 << 16


@dataclass(slots=True)
class WorkerProcess:
    """One subprocess and how to start it. `env` is added to the environment, `fds` are inherited; output goes to `log`. It starts in
    `directory`, or in this process's directory if None.

    `sign` is its last sign of life, received at `heard` on the loop's clock. `was_ready`: it has been ready at least once since the
    supervisor began.
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
        """Start the process in its own group, so that a Ctrl-C at the terminal reaches only the supervisor."""
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
                    env={**os.environ, **self.env, **self._own(theirs)},
                    pass_fds=(theirs, *self.fds),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.sign, self.heard, self._pipe, self._rest = None, loop.time(), ours, b""
        loop.add_reader(ours, self._listen)

    def _own(self, pulse: int) -> dict[str, str]:
        """The environment variables by which a worker knows its supervisor."""
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
        """Wait for the end; returns the exit code, or minus the signal number. By then all of its signs have been received."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        code = await self.process.wait()
        self._listen()
        self._deafen()
        return code

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, a grace period, then SIGKILL to the whole group. True if it ended by itself."""
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
        """SIGKILL to the whole group, which reaches a stopped process, too."""
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:  # it was forked just now, and has no group of its own yet
                    process.send_signal(signal.SIGKILL)
            await process.wait()

    def last_line(self) -> str:
        """The last line of this process's output, in case the process could not say why it ended."""
        before = older(self.log)  # its output was rotated just before its end
        with contextlib.suppress(OSError):
            if line := _last_line(self.log, self._output_from):
                return line
            return _last_line(before) if before.stat().st_mtime >= self._started_at else ""
        return ""

    def _listen(self) -> None:
        while self._pipe >= 0:
            try:
                part = os.read(self._pipe, _PIPE)
            except BlockingIOError:
                return
            if not part:
                self._deafen()
                return
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                if (sign := read_sign(line)) is not None:
                    self.heard = asyncio.get_running_loop().time()
                    self.was_ready |= sign.ready
                    if self.sign is None or self.sign.failed is None:  # a sign that says why it failed is kept
                        self.sign = sign

    def _deafen(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _last_line(path: Path, start: int = 0) -> str:
    """A file's last line that is not blank, after `start` bytes, unless it has been truncated since; "" if there is none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - _TAIL))
        lines = file.read(_TAIL).decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def own_command(*words: str) -> tuple[str, ...]:
    """The argv that runs this same installation's CLI."""
    return (sys.executable, "-m", "ostinato.cli", *words)
