"""A thread that sends events beside the program, in batches, and empties its queue at the program's end."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque

from ostinato_client.errors import NotAllowed, NotTaken
from ostinato_client.events import Event
from ostinato_client.sending import Sender

_LOG = logging.getLogger(__name__)
MOST_WAITING = 10_000
_BATCH = 500
_GATHER_S = 0.1
_DEADLINE_S = 60.0
_AT_EXIT_S = 5.0


_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Sends the events put into it. Events that the server refuses for good are logged and dropped.

    A forked process begins with an empty queue and a thread of its own: what waits is its parent's to send.
    """

    def __init__(self, sender: Sender, *, most: int = MOST_WAITING) -> None:
        self._sender = sender
        self._most = most
        self._closed = False
        self._deadline_s = _DEADLINE_S
        self.begin_anew()
        _ALL.add(self)

    def begin_anew(self) -> None:
        """Be as a new one, in a process that was just forked."""
        self._waiting: deque[Event] = deque()
        self._sending = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, event: Event) -> None:
        """Queue an event for sending. Raises NotTaken if too many wait, or after `close`."""
        with self._changed:
            if self._closed:
                raise NotTaken("this client is closed")
            if len(self._waiting) + self._sending >= self._most:
                raise NotTaken(f"{self._most} events wait for {self._sender.url}; it takes none or too few")
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ostinato-feedback", daemon=True)
                self._thread.start()
                atexit.register(self.close, _AT_EXIT_S)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; False if it still is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._sending, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Accept no more events and send the waiting ones; False if that took too long."""
        with self._changed:
            self._closed = True
            self._deadline_s = timeout_s
            self._changed.notify_all()
        done = self.flush(timeout_s)
        atexit.unregister(self.close)
        if not done:
            _LOG.error("%d feedback events were not sent", len(self._waiting) + self._sending)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                if not self._closed and len(self._waiting) < _BATCH:
                    self._changed.wait_for(lambda: self._closed or len(self._waiting) >= _BATCH, _GATHER_S)
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._sending = len(batch)
            left = self._send(batch)
            with self._changed:
                self._sending = 0
                self._waiting.extendleft(reversed(left))
                self._changed.notify_all()
                if left and self._closed:
                    return

    def _send(self, batch: list[Event]) -> list[Event]:
        """Send a batch; returns the events that have to be sent again."""
        try:
            self._sender.send(batch, self._deadline_s)
        except NotTaken as error:
            _LOG.warning("%s", error)
            return batch
        except NotAllowed as error:
            _LOG.error("%d feedback events were refused: %s", len(batch), error)
        except (ValueError, TypeError, RecursionError) as error:
            # refused, or no JSON: none may end the thread that sends all others
            if len(batch) > 1:  # one bad event must not take its neighbours with it
                return [left for event in batch for left in self._send([event])]
            _LOG.error("feedback event %s was refused: %s", batch[0].id, error)
        return []


def _renew() -> None:
    for each in list(_ALL):
        each.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
