"""Lends replicas of one slot to another slot for a while, and takes them back.

A replica on loan serves the borrowing slot's version. No request is ever answered by another slot's version: a replica changes over only
when it has no open request of the slot that it leaves. This never cuts off requests of the lending slot. It does cut off requests of the
borrowing slot that do not end in time when the replica is recalled.
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
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingState:
    """The state of a slot's loans: how many replicas serve it, are lent (or about to be), and are returning.

    `serving` and `returning` exclude failed and draining replicas. `open`: the number of open samples of the borrowing slot.

    Example: ``LendingState(serving=2, lent=1, returning=0, open=8)``
    """

    serving: int
    lent: int
    returning: int
    open: int = 0


class Loans:
    """Lends replicas of slot `home` to slot `to`.

    Args:
        fleet: the servers; it loads versions onto them.
        home, to: the lending and the borrowing slot.
        running: counts the open samples of each replica, of one slot or of all ("").
        cut: aborts a replica's open requests, so that no further token of them arrives; returns how many samples with tokens it cut off.
        clock: monotonic seconds.

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
        """Return the current counts."""
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
        """Seconds of lending, summed over replicas."""
        now = self._clock()
        return self._seconds + sum(now - since for since in self._since.values())

    def lend(self, count: int) -> int:
        """Lend up to `count` replicas, the least loaded first; return how many. At least one stays, and so do all that other slots share.

        Each replica gets no new requests, finishes its open ones, and then loads the other slot's version.
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
        """Recall up to `count` replicas: first those that have not changed over yet, then the least loaded. Returns how many.

        Their open requests have `end_s` seconds to finish and are then cut off.
        """
        running = self._running("")
        lent = [
            each for each in self._fleet.replicas if each.loan is not None and each.loan.stage in ("leaving", "lent")
        ]
        lent.sort(key=lambda each: (each.loan is not None and each.loan.stage == "lent", running[each]))
        for replica in lent[:count]:
            assert replica.loan is not None
            if replica.loan.stage == "leaving":  # it still holds its own version, so its open requests continue
                self._stop(replica)
                self._bring_back(replica)
            else:
                replica.loan.stage = "ending"
                replica.slots.discard(self._to)
                self._seconds += self._clock() - self._since.pop(replica)
                self._begin(replica, self._return(replica, end_s))
        return min(count, len(lent))

    def close(self) -> None:
        """Cancel all changeovers in progress; replicas stay as they are."""
        for task in self._ending.values():
            task.cancel()

    # ---- changeovers

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
            _LOG.info("%s is recalled: %d samples are cut off", replica.server.url, cut)

    async def _ended(self, replica: Replica) -> None:
        while self._running("")[replica]:
            await asyncio.sleep(_POLL_S)

    def _bring_back(self, replica: Replica) -> None:
        assert replica.loan is not None
        replica.loan.stage = "back"
        replica.woken.set()

    def _stop(self, replica: Replica) -> None:
        task = self._ending.pop(replica, None)
        if task is not None:
            task.cancel()
