"""A worker's heartbeat: one JSON line a second on a pipe to the supervisor. The last line gives the reason of a failure.

It is a pipe and not a file because a full disk must not make a healthy worker look dead. A line gives the worker's activity, its duration
and its time limit, so that neither an optimizer step of minutes is taken for a hang nor a hang for a step. It also gives the lag of the
event loop. The worker sends it from a thread. A worker that was started by hand has no supervisor and sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass

PULSE_FD = "OSTINATO_PULSE_FD"
"""Environment variable with the file descriptor of a worker's end of the pipe."""
LISTEN_FD = "OSTINATO_LISTEN_FD"
"""Environment variable with the file descriptor of the gateway's listening socket."""
PARENT = "OSTINATO_PARENT"
"""Environment variable with the supervisor's pid."""

MAX_TEXT_BYTES = {"doing": 400, "trouble": 1_000, "failed": 1_600}
"""Longest JSON of each text in bytes, so that a line stays within PIPE_BUF (4096 bytes) and is written atomically."""


SERVING = "serving on"
"""The serving worker's activity once the live weights are loaded, followed by its URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One heartbeat: a worker's report on itself.

    `doing`: its current activity, for `for_s` seconds so far and `limit_s` at most (None: no limit). `lag_s`: for how long its event loop
    has been blocked. `ready`: it has started and does its actual work. `trouble`: what it is retrying. `failed`: why it ends; `certain`: a
    restart cannot help; `outside`: the cause is outside the worker and may pass, such as a full disk.
    """

    doing: str
    for_s: float = 0.0
    limit_s: float | None = None
    lag_s: float = 0.0
    ready: bool = False
    trouble: str | None = None
    failed: str | None = None
    certain: bool = False
    outside: bool = False

    def line(self) -> bytes:
        texts = {
            key: _truncated(value, most)
            for key, most in MAX_TEXT_BYTES.items()
            if isinstance(value := getattr(self, key), str)
        }
        return json.dumps(asdict(self) | texts).encode() + b"\n"


def read_sign(line: bytes) -> Sign | None:
    """Parse a line from the pipe; None if it is invalid, e.g. the truncated line of a killed worker."""
    try:
        return Sign(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _truncated(text: str, most: int) -> str:
    """Return the text on one line, truncated so that its JSON has at most `most` bytes."""
    line = " ".join(text.split())
    while len(json.dumps(line)) > most:
        line = line[: len(line) * 3 // 4 - 3] + "..."
    return line


# ---------------------------------------------------------------- the worker's side


logger = logging.getLogger(__name__)
BEAT_S = 1.0
STALL_S = 3.0
"""Lag in seconds from which a blocked event loop is logged. It is probed once a heartbeat."""
_PR_SET_PDEATHSIG = 1
_LAST_LINE_TRIES = 20  # attempts to write the last line to a full pipe


class Heartbeat:
    """The worker's current activity. `ready`: it has started and does its actual work. `trouble` returns what it is retrying, or None.

    Example::

        with pulse.during("taking step 12", limit_s=3600):
            ...
    """

    def __init__(self) -> None:
        self.ready = False
        self.trouble: Callable[[], str | None] = lambda: None
        # one tuple, so that the other thread reads a consistent state
        self._now: tuple[str, float | None, float] = ("starting", None, time.monotonic())

    def begin(self, doing: str, limit_s: float | None = None) -> None:
        """Set the activity, which may take up to `limit_s` seconds from now."""
        self._now = (doing, limit_s, time.monotonic())

    @contextlib.contextmanager
    def during(self, doing: str, limit_s: float | None = None) -> Generator[None]:
        """Set the activity inside the block, then the previous one again, with its time limit counted anew."""
        before = self._now[:2]
        self.begin(doing, limit_s)
        try:
            yield
        finally:
            self.begin(*before)

    def sign(self, lag_s: float = 0.0) -> Sign:
        doing, limit_s, since = self._now
        try:
            trouble = self.trouble()
        except Exception as error:  # noqa: BLE001 (it may race with other threads; without a heartbeat the worker would be killed)
            trouble = f"its trouble cannot be read: {type(error).__name__}: {error}"
        return Sign(
            doing=doing,
            for_s=round(time.monotonic() - since, 1),
            limit_s=limit_s,
            lag_s=round(lag_s, 1),
            ready=self.ready,
            trouble=trouble,
        )


class Sender(threading.Thread):
    """The thread that sends heartbeats to the supervisor and calls `on_orphaned`, on this thread, once the supervisor is gone."""

    def __init__(
        self, pulse: Heartbeat, pipe: int, loop: asyncio.AbstractEventLoop, on_orphaned: Callable[[], None]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        os.set_blocking(pipe, False)
        os.set_inheritable(pipe, False)  # a subprocess of the worker must not keep it open
        self._pulse, self._pipe, self._loop, self._on_orphaned = pulse, pipe, loop, on_orphaned
        self._probed_at = time.monotonic()
        self._probe_pending = False
        self._dumped = False

    def run(self) -> None:
        """Send a line every `BEAT_S` seconds until the process ends or the supervisor is gone."""
        while True:
            if not self._probe_pending and not self._loop.is_closed():
                # counted from now: a process that was suspended before, e.g. in a frozen container, had no blocked loop
                self._probed_at, self._probe_pending = time.monotonic(), True
                with contextlib.suppress(RuntimeError):  # the loop was closed just now
                    self._loop.call_soon_threadsafe(self._probe_answered)
            lag_s = time.monotonic() - self._probed_at
            self._dump_if_stalled(lag_s)
            if not self._send(self._pulse.sign(lag_s).line()):
                self._on_orphaned()
                return
            time.sleep(BEAT_S)

    def _dump_if_stalled(self, lag_s: float) -> None:
        """Dump the stacks of all threads once whenever the event loop is blocked for `STALL_S`: the cause cannot be found afterwards."""
        if lag_s < STALL_S:
            self._dumped = False
        elif not self._dumped:
            self._dumped = True
            logger.warning(
                "the event loop has stood still for %.1f s; the stacks follow, each with its last call first", lag_s
            )
            with contextlib.suppress(OSError):  # the output's disk may be full
                faulthandler.dump_traceback()

    def last_words(self, sign: Sign) -> None:
        line = sign.line()
        for _ in range(_LAST_LINE_TRIES):
            with contextlib.suppress(OSError):
                if os.write(self._pipe, line) == len(line):
                    return
            time.sleep(0.05)

    def _probe_answered(self) -> None:
        self._probe_pending = False

    def _send(self, line: bytes) -> bool:
        """Write a line, or drop it if the pipe is full. Return False once nobody reads the pipe."""
        try:
            os.write(self._pipe, line)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def die_with_parent() -> None:
    """Have the kernel kill this process when its supervisor dies, even by kill -9 (PR_SET_PDEATHSIG).

    Where the kernel cannot do this, `Sender` notices the broken pipe. Does nothing without a supervisor.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:  # the parent died before the call above
        os._exit(1)


def supervisor_pipe() -> int | None:
    """Return the pipe to the supervisor; None for a worker that was started by hand."""
    named = os.environ.pop(PULSE_FD, None)  # subprocesses must not see it
    return int(named) if named is not None else None
