"""A worker's heartbeat: one line a second on a pipe to the supervisor, the last one with the reason if it fails.

It is a pipe and not a file because a full disk must not make a healthy worker look dead. A line says what the worker does, for how long
and how long it may, so that an optimizer step of minutes is not taken for a hang, nor a hang for a step; and that its event loop still
comes round. The worker sends it from a thread. Without a supervisor, as for a worker that was started by hand, nothing is sent.
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
"""Environment variable that holds a worker's file descriptor of the pipe."""
LISTEN_FD = "OSTINATO_LISTEN_FD"
"""Environment variable that holds the file descriptor of the gateway's listening socket."""
PARENT = "OSTINATO_PARENT"
"""Environment variable that holds the supervisor's pid."""

LONGEST = {"doing": 400, "trouble": 1_000, "failed": 1_600}
"""The most bytes of each text as sent, so that a line stays below the size that a pipe writes atomically (4096 bytes)."""


SERVING = "serving on"
"""How the serving worker's activity begins once the live weights are loaded; its URL follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A worker's report on itself.

    `for_s`: how long it has been doing this. `limit_s`: the longest this may take; None: no limit. `lag_s`: how long its event loop has
    not come round. `ready`: it is doing its actual work. `trouble`: what it is retrying. `failed`: why it ends; `certain`: a restart
    cannot help; `outside`: the cause lies outside the worker and passes, as a full disk does.
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
            key: _cut(value, most) for key, most in LONGEST.items() if isinstance(value := getattr(self, key), str)
        }
        return json.dumps(asdict(self) | texts).encode() + b"\n"


def read_sign(line: bytes) -> Sign | None:
    """Parse a line as sent; None if it is invalid, such as half a line of a killed worker."""
    try:
        return Sign(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _cut(text: str, most: int) -> str:
    """The text on one line, cut to at most `most` bytes as JSON."""
    line = " ".join(text.split())
    while len(json.dumps(line)) > most:
        line = line[: len(line) * 3 // 4 - 3] + "..."
    return line


# ---------------------------------------------------------------- the worker's side


logger = logging.getLogger(__name__)
BEAT_S = 1.0
STILL_S = 3.0
"""From here on an event loop that does not come round is written down. It is asked once a beat."""
_PR_SET_PDEATHSIG = 1
_TRIES = 20  # attempts to write the last line to a pipe that is full


class Heartbeat:
    """The worker's current activity. `ready`: it is doing its actual work. `trouble` returns what it is retrying, or None.

    Example::

        with pulse.during("taking step 12", limit_s=3600):
            ...
    """

    def __init__(self) -> None:
        self.ready = False
        self.trouble: Callable[[], str | None] = lambda: None
        # a single tuple, because two threads use it
        self._now: tuple[str, float | None, float] = ("starting", None, time.monotonic())

    def begin(self, doing: str, limit_s: float | None = None) -> None:
        """From now on the worker does this, for at most `limit_s` seconds."""
        self._now = (doing, limit_s, time.monotonic())

    @contextlib.contextmanager
    def during(self, doing: str, limit_s: float | None = None) -> Generator[None]:
        """The worker does this inside the block; afterwards it does again what it did before, timed from then on."""
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
        except Exception as error:  # noqa: BLE001 (it reads what other threads change; a worker without a heartbeat would be killed)
            trouble = f"its trouble cannot be told: {type(error).__name__}: {error}"
        return Sign(
            doing=doing,
            for_s=round(time.monotonic() - since, 1),
            limit_s=limit_s,
            lag_s=round(lag_s, 1),
            ready=self.ready,
            trouble=trouble,
        )


class Sender(threading.Thread):
    """Sends the pulse to the supervisor, and notices when that is gone.

    `on_orphaned` is called on this thread once nobody listens any more.
    """

    def __init__(
        self, pulse: Heartbeat, pipe: int, loop: asyncio.AbstractEventLoop, on_orphaned: Callable[[], None]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        os.set_blocking(pipe, False)
        os.set_inheritable(pipe, False)  # a program that the worker starts must not hold it open
        self._pulse, self._pipe, self._loop, self._on_orphaned = pulse, pipe, loop, on_orphaned
        self._asked_at = time.monotonic()
        self._asked = False
        self._told = False

    def run(self) -> None:
        """Send a line every `BEAT_S` seconds until the process ends or the supervisor is gone."""
        while True:
            if not self._asked and not self._loop.is_closed():
                # it lags from now on: if the whole process stood still before, as in a frozen container, the loop did not
                self._asked_at, self._asked = time.monotonic(), True
                with contextlib.suppress(RuntimeError):  # it was closed just now
                    self._loop.call_soon_threadsafe(self._came_round)
            lag_s = time.monotonic() - self._asked_at
            self._watch(lag_s)
            if not self._send(self._pulse.sign(lag_s).line()):
                self._on_orphaned()
                return
            time.sleep(BEAT_S)

    def _watch(self, lag_s: float) -> None:
        """Write down what all threads do while the event loop stands still, once for each time: nobody can tell afterwards."""
        if lag_s < STILL_S:
            self._told = False
        elif not self._told:
            self._told = True
            logger.warning(
                "the event loop has stood still for %.1f s; the stacks follow, each with its last call first", lag_s
            )
            with contextlib.suppress(OSError):  # the disk that the output goes to may be full
                faulthandler.dump_traceback()

    def last_words(self, sign: Sign) -> None:
        line = sign.line()
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                if os.write(self._pipe, line) == len(line):
                    return
            time.sleep(0.05)

    def _came_round(self) -> None:
        self._asked = False

    def _send(self, line: bytes) -> bool:
        """Write a line. False once nobody reads the pipe. A line that does not fit into the pipe now is dropped."""
        try:
            os.write(self._pipe, line)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def die_with_parent() -> None:
    """Have the kernel kill this process when the supervisor that started it dies, kill -9 included.

    Where the kernel cannot do this, the worker notices that its pipe to the supervisor breaks (`Sender`). Without a supervisor nothing
    happens.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:  # the parent died before the call above
        os._exit(1)


def supervised() -> int | None:
    """The pipe to the supervisor, or None for a worker that was started by hand."""
    named = os.environ.pop(PULSE_FD, None)  # not for programs that the worker starts
    return int(named) if named is not None else None
