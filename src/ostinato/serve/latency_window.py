"""How many answers people request, and how long they wait for the first token in calls that more servers would speed up."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

_LATELY_S = 10.0
_LATE_SHARE = 0.1
_LATE_CALLS = 3  # fewer late calls may be due to a single long prompt
_LATE_USERS = 2  # waits of a single user are no reason to return servers


class LatencyWindow:
    """Tracks people's calls from the moment the engine is asked. `clock` gives seconds.

    Example::

        with waits.asked(answers=1, user="acme/u42") as first:
            first()  # the first token is here
        waits.delay_s()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[float, str]] = {}  # calls without a first token: start time and user
        self._lately: deque[tuple[float, float, str]] = deque()  # first tokens: time, wait and user
        self.answers = 0

    @contextmanager
    def asked(self, answers: int, user: str | None) -> Generator[Callable[[], None]]:
        """A person's call for so many answers; the yielded function must be called at the first token. With `user` None the call is only
        counted, because its wait says nothing about the live slot's servers.
        """
        self.answers += answers
        if user is None:
            yield lambda: None
            return
        number, came = next(self._numbers), self._clock()
        self._waiting[number] = came, user

        def first() -> None:
            now = self._clock()
            if self._waiting.pop(number, None) is not None:
                self._forget(now)
                self._lately.append((now, now - came, user))

        try:
            yield first
        finally:
            self._waiting.pop(number, None)

    def delay_s(self) -> float:
        """The wait, in seconds, that the slowest tenth of recent calls (those still waiting included) reached or exceeded; 0 without calls.

        If that tenth is fewer than three calls, or all of one user, it is extended by the next shorter waits; 0 if there are none.
        """
        now = self._clock()
        self._forget(now)
        found = [(wait, user) for _, wait, user in self._lately]
        found += [(now - came, user) for came, user in self._waiting.values()]
        found.sort(reverse=True)
        late = max(_LATE_CALLS, len(found) - int((1 - _LATE_SHARE) * len(found) - 1e-9))
        users = set[str]()
        for count, (wait, user) in enumerate(found, 1):
            users.add(user)
            if count >= late and len(users) >= _LATE_USERS:
                return wait
        return 0.0

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - _LATELY_S:
            self._lately.popleft()
