"""A worker's reports on itself while it lives: what it does now, since when, and that its event loop still comes round.

A thread sends a line a second to the supervisor. Without a supervisor, as for a worker that was started by hand, nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Generator

from ostinato.launch.placing.heartbeat import PULSE_FD, Sign

logger = logging.getLogger(__name__)
BEAT_S = 1.0
STILL_S = 3.0
"""From here on an event loop that does not come round is written down. It is asked once a beat."""
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
        """The sign of life as of now."""
        doing, limit_s, since = self._now
        return Sign(
            doing=doing,
            for_s=round(time.monotonic() - since, 1),
            limit_s=limit_s,
            lag_s=round(lag_s, 1),
            ready=self.ready,
            trouble=self.trouble(),
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
        self._round = time.monotonic()
        self._asked = False
        self._told = False

    def run(self) -> None:
        """Send a line every `BEAT_S` seconds until the process ends or the supervisor is gone."""
        while True:
            if not self._asked and not self._loop.is_closed():
                self._asked = True
                with contextlib.suppress(RuntimeError):  # it was closed just now
                    self._loop.call_soon_threadsafe(self._came_round)
            lag_s = time.monotonic() - self._round
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
        """Say why the worker ends."""
        line = sign.line()
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                if os.write(self._pipe, line) == len(line):
                    return
            time.sleep(0.05)

    def _came_round(self) -> None:
        self._round, self._asked = time.monotonic(), False

    def _send(self, line: bytes) -> bool:
        """Write a line. False once nobody reads the pipe. A line that does not fit into the pipe now is dropped."""
        try:
            os.write(self._pipe, line)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def supervised() -> int | None:
    """The pipe to the supervisor, or None for a worker that was started by hand."""
    named = os.environ.pop(PULSE_FD, None)  # not for programs that the worker starts
    return int(named) if named is not None else None
