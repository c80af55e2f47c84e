"""How many answers people ask for, and how long they wait for the first token where more servers would help."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

_LATELY_S = 10.0
_LATE_SHARE = 0.1
_LATE_CALLS = 3  # fewer may be one long prompt
_LATE_USERS = 2  # whoever is alone keeps nothing off


class Waits:
    """Counts people's calls from when the engine is asked. `clock` gives seconds.

    Example::

        with waits.asked(answers=1, user="acme/u42") as first:
            first()  # the first token is here
        waits.delay_s()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[float, str]] = {}  # who has no first token: when they came
        self._lately: deque[tuple[float, float, str]] = deque()  # first tokens: when, after how long, whose
        self.answers = 0

    @contextmanager
    def asked(self, answers: int, user: str | None) -> Generator[Callable[[], None]]:
        """A person's call for so many answers; what it gives is to be called at the first token. `user` None: the call is counted, and
        its wait says nothing of the live slot's servers.
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
        """The seconds that a tenth of the calls of late waited at least, or wait already; 0 if nobody asked.

        Of a tenth that is fewer than three calls, or one user's alone, the next shorter waits are looked at too; 0 if there are none.
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
