"""Deals the event loop's time evenly among those who ask: tenants, and addresses where no key is known.

Deficit round robin (Shreedhar and Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995) over the steps of
coroutines, in processor time. A round is about one turn of the event loop. Whoever has used up its part of a round goes on in the next,
and nobody else waits for more than everybody's parts and the step that is running. Nobody is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, Generic, TypeVar

QUANTUM_S = 0.001
_MOST_OWED = 20  # rounds, however long a step was
_MOST = 100  # steps of an owner that go on in one round
_RECENT_S = 5.0  # for so long somebody who asked before may ask again
_LEARNED = 0.2  # weight of the newest step in what an owner's steps take

T = TypeVar("T")
R = TypeVar("R")


# ---------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Account(Generic[T]):
    """What is left to an owner of this round, in seconds, negative for what it owes; what a step of its takes; and its steps that wait."""

    left: float
    step_s: float = 0.0
    waiting: deque[T] = field(default_factory=deque[T])
    back: list[T] = field(
        default_factory=list[T]
    )  # steps that were to go on in this round, but others had used up the part


class LoopRounds(Generic[T]):
    """Who may go on in this round. Pure arithmetic; it keeps nothing of an owner that owes nothing and waits for nothing.

    Example::

        rounds = LoopRounds(0.001)
        rounds.charge("acme", 0.003)
        rounds.may_go("acme")  # False: two rounds are owed
        rounds.wait("acme", step)
        rounds.begin()  # [], twice, and then [step]
    """

    def __init__(self, quantum_s: float) -> None:
        self._quantum_s = quantum_s
        self._accounts: dict[str, _Account[T]] = {}

    @property
    def open(self) -> bool:
        """True if a further round changes anything."""
        return bool(self._accounts)

    def __len__(self) -> int:
        """The number of owners of whom something is kept."""
        return len(self._accounts)

    def may_go(self, owner: str, *, alone: bool = False) -> bool:
        """True if a step of this owner may begin now, so that none of its others is passed over. `alone`: nobody else wants a part."""
        account = self._accounts.get(owner)
        return account is None or ((alone or account.left > 0) and not account.waiting and not account.back)

    def has_left(self, owner: str) -> bool:
        """True if something is left to the owner of this round: a step that goes on in it may begin."""
        account = self._accounts.get(owner)
        return account is None or account.left > 0

    def charge(self, owner: str, seconds: float) -> None:
        """Note what a step of this owner took."""
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account(self._quantum_s)
        account.left = max(account.left - seconds, -_MOST_OWED * self._quantum_s)
        account.step_s += _LEARNED * (seconds - account.step_s)

    def wait(self, owner: str, step: T, *, again: bool = False) -> None:
        """Queue a step of an owner that must not go behind its others; `again`: behind those only that went on and found nothing left."""
        account = self._accounts[owner]
        (account.back if again else account.waiting).append(step)

    def begin(self) -> list[T]:
        """Begin the next round. Returns the steps that go on in it: of each owner as many as its part allows by what its steps take."""
        going: list[T] = []
        for owner, account in list(self._accounts.items()):
            account.left = min(self._quantum_s, account.left + self._quantum_s)
            account.waiting.extendleft(reversed(account.back))
            account.back.clear()
            if account.left >= self._quantum_s and not account.waiting:
                del self._accounts[owner]
            expected = account.left
            while expected > 0 and account.waiting:
                going.append(account.waiting.popleft())
                expected -= max(account.step_s, self._quantum_s / _MOST)
        return going


# ---------------------------------------------------------------- the event loop


class FairLoop:
    """Runs coroutines of many owners on one event loop, each step when its owner's turn has come. Alone an owner waits for nothing.

    Args:
        quantum_s: processor time of an owner in a round, beyond which its next steps wait for the next one.
        clock: this thread's processor time, in seconds.

    Example: ``await FairLoop().run("acme", handle(request))``
    """

    def __init__(self, quantum_s: float = QUANTUM_S, clock: Callable[[], float] = time.thread_time) -> None:
        self._rounds: LoopRounds[asyncio.Future[None]] = LoopRounds(quantum_s)
        self._clock = clock
        self._next: asyncio.Handle | None = None
        self._seen: OrderedDict[str, float] = OrderedDict()  # the two owners seen last, and when

    @coroutine
    def run(self, owner: str, work: Coroutine[Any, Any, R]) -> Generator[Any, None, R]:
        """The result of `work`, whose steps are charged to `owner`. Raises what it raises; a cancellation reaches it, too."""
        error: BaseException | None = None
        while True:
            alone = self._alone(owner)
            if not self._rounds.may_go(owner, alone=alone):
                try:
                    yield from self._turn(owner)
                    while not self._rounds.has_left(owner):
                        yield from self._turn(owner, again=True)
                except GeneratorExit:
                    work.close()
                    raise
                except BaseException as raised:  # noqa: BLE001 (it is raised where the work waits)
                    error = raised
            began = 0.0 if alone else self._clock()  # which takes some microseconds
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                error = None
                if not alone:
                    self._charge(owner, self._clock() - began)
            try:
                yield awaited
            except GeneratorExit:
                work.close()
                raise
            except BaseException as raised:  # noqa: BLE001 (likewise)
                error = raised

    def _alone(self, owner: str) -> bool:
        """True if nobody else was seen lately. The owner is seen herewith."""
        now = asyncio.get_running_loop().time()
        self._seen[owner] = now
        self._seen.move_to_end(owner)
        if len(self._seen) > 2:
            self._seen.popitem(last=False)
        return all(name == owner or now - at > _RECENT_S for name, at in self._seen.items())

    def _turn(self, owner: str, *, again: bool = False) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rounds.wait(owner, turn, again=again)
        return turn

    def _charge(self, owner: str, seconds: float) -> None:
        self._rounds.charge(owner, seconds)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        for turn in self._rounds.begin():
            if not turn.done():  # whoever waited may have left
                turn.set_result(None)
        self._next = asyncio.get_running_loop().call_soon(self._begin) if self._rounds.open else None
