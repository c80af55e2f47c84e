"""Lends replicas of one slot to another slot for a while, each with that slot's version, and takes them back.

No request is ever answered by another slot's version: a replica changes over only when no request of the slot that it leaves is open there.
Requests of the lending slot are never cut off for this; requests of the borrowing slot are, if the replica is wanted back and they have not
ended in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ostinato.engine.vllm.fleet import Loan, Replica, VllmFleet

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingState:
    """How many of a slot's replicas serve it, are lent (or about to be), and are on their way back; and how many samples of the borrowing
    slot are open. `serving` and `returning` leave out failed and draining replicas.

    Example: ``LendingState(serving=2, lent=1, returning=0, open=8)``
    """

    serving: int
    lent: int
    returning: int
    open: int = 0


class Loans:
    """Lends replicas of slot `home` to slot `to`.

    Args:
        fleet: the servers; it brings versions to them.
        home, to: the slots.
        running: counts the open samples of each replica, of one slot or of all ("").
        cut: ends a replica's open requests so that none of their tokens can arrive any more; returns how many samples with tokens it cut.
        clock: seconds.

    Example::

        loans.lend(1)
        loans.give_back(1, end_s=10.0)
    """

    def __init__(
        self,
        fleet: VllmFleet,
        home: str,
        to: str,
        *,
        running: Callable[[str], Counter[Replica]],
        cut: Callable[[Replica], int],
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._home, self._to = fleet, home, to
        self._running, self._cut, self._clock = running, cut, clock
        self._ending: dict[Replica, asyncio.Task[None]] = {}
        self._since: dict[Replica, float] = {}
        self._seconds = 0.0
        self.cut_off = 0

    def standing(self) -> LendingState:
        """The current counts."""
        away = [(each.loan.stage, each.usable) for each in self._fleet.replicas if each.loan is not None]
        serving = sum(self._home in each.slots and each.usable for each in self._fleet.replicas)
        return LendingState(
            serving=serving,
            lent=sum(stage in ("leaving", "lent") for stage, _ in away),
            returning=sum(stage in ("ending", "back") and usable for stage, usable in away),
            open=self._running(self._to).total(),
        )

    @property
    def seconds(self) -> float:
        """Seconds that replicas were lent, summed over them."""
        now = self._clock()
        return self._seconds + sum(now - since for since in self._since.values())

    def lend(self, count: int) -> int:
        """Lend up to `count` replicas, the least loaded first; returns how many. At least one stays, and all shared with other slots do.

        Each gets no new requests, ends its open ones, and is then brought the other slot's version.
        """
        if self._to not in self._fleet.slots:
            return 0
        own = [each for each in self._fleet.replicas if self._home in each.slots and each.usable and not each.swapping]
        running = self._running("")
        free = sorted((each for each in own if each.slots == {self._home}), key=lambda each: running[each])
        going = free[: max(0, min(count, len(own) - 1))]
        for replica in going:
            replica.loan = Loan(home=self._home, to=self._to)
            replica.slots.clear()
            self._begin(replica, self._leave(replica))
        return len(going)

    def give_back(self, count: int, end_s: float) -> int:
        """Take up to `count` replicas back: first those that have not left yet, then the least loaded. Returns how many.

        Their open requests have `end_s` seconds to end and are then cut off.
        """
        running = self._running("")
        lent = [
            each for each in self._fleet.replicas if each.loan is not None and each.loan.stage in ("leaving", "lent")
        ]
        lent.sort(key=lambda each: (each.loan is not None and each.loan.stage == "lent", running[each]))
        for replica in lent[:count]:
            assert replica.loan is not None
            if replica.loan.stage == "leaving":  # it still holds its own version, so its open requests stay
                self._stop(replica)
                self._bring_back(replica)
            else:
                replica.loan.stage = "ending"
                replica.slots.discard(self._to)
                self._seconds += self._clock() - self._since.pop(replica)
                self._begin(replica, self._return(replica, end_s))
        return min(count, len(lent))

    def close(self) -> None:
        """Stop all changeovers in progress; replicas stay as they are."""
        for task in self._ending.values():
            task.cancel()

    # ---- within

    def _begin(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        task = self._ending[replica] = asyncio.create_task(work)
        task.add_done_callback(
            lambda done: self._ending.pop(replica, None) if self._ending.get(replica) is done else None
        )

    async def _leave(self, replica: Replica) -> None:
        await asyncio.gather(self._fleet.fetch(replica, self._to), self._ended(replica))
        assert replica.loan is not None
        replica.loan.stage = "lent"
        self._since[replica] = self._clock()
        replica.woken.set()

    async def _return(self, replica: Replica, end_s: float) -> None:
        await asyncio.gather(self._fleet.fetch(replica, self._home), self._ended_or_cut(replica, end_s))
        self._bring_back(replica)

    async def _ended_or_cut(self, replica: Replica, end_s: float) -> None:
        try:
            async with asyncio.timeout(end_s):
                await self._ended(replica)
        except TimeoutError:
            cut = self._cut(replica)
            self.cut_off += cut
            _LOG.info("%s is wanted back: %d samples are cut off", replica.server.url, cut)

    async def _ended(self, replica: Replica) -> None:
        while self._running("")[replica]:
            await asyncio.sleep(_LOOK_S)

    def _bring_back(self, replica: Replica) -> None:
        assert replica.loan is not None
        replica.loan.stage = "back"
        replica.woken.set()

    def _stop(self, replica: Replica) -> None:
        task = self._ending.pop(replica, None)
        if task is not None:
            task.cancel()
