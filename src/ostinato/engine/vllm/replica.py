"""What is known of one server: for which slots it stands, which version it holds, and whether it can be asked. No IO."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.core.records import PolicyVersion
from ostinato.engine.vllm.server import ServerClient

_LONGEST_S = 60.0


@dataclass(slots=True)
class Loan:
    """A replica of slot `home` is lent to slot `to`. While it is "leaving" or "ending", what is open there comes to its end, and it stands
    for nobody.

    Example: ``Loan(home="live", to="world").slot is None``
    """

    home: str
    to: str
    stage: Literal["leaving", "lent", "ending", "back"] = "leaving"

    @property
    def slot(self) -> str | None:
        """The one slot that it may stand for now."""
        return {"lent": self.to, "back": self.home}.get(self.stage)


class Driving:
    """A lock that knows whether anybody holds it or waits for it. Example: ``async with replica.driving: ...``"""

    def __init__(self) -> None:
        self._lock, self._drivers = asyncio.Lock(), 0

    @property
    def busy(self) -> bool:
        """Whether who takes it now may have to wait."""
        return self._drivers > 0

    async def __aenter__(self) -> None:
        self._drivers += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._drivers -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self._drivers -= 1
        self._lock.release()


@dataclass(eq=False, slots=True)
class Replica:
    """One server. It stands for `slots`, which hold the same version: requests for them may go there.

    `policy`: what its tokens are made by, None before the first. `sure`: the last change of weights ended well. `well`: it may be asked;
    otherwise it was set aside, after `failures` in a row. `swapping`: it is being given a version. `draining`: it gets nothing new.
    `woken`: there is something to look at. `driving` is held by who has it fetch or load: it stages one version at a time.
    `loan`: it is lent, or on its way.

    Example: ``Replica(ServerClient("http://10.0.0.5:8000", driver, silence_s=300.0))``
    """

    server: ServerClient
    slots: set[str] = field(default_factory=set[str])
    policy: PolicyVersion | None = None
    sure: bool = False
    well: bool = True
    swapping: bool = False
    draining: bool = False
    failures: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    driving: Driving = field(default_factory=Driving)
    loan: Loan | None = None

    def may_stand_for(self, slot: str) -> bool:
        """Whether it is the slot's to use: of a replica that is lent, only where it is now."""
        return self.loan is None or self.loan.slot == slot

    def stand_for(self, slot: str) -> None:
        """Requests for the slot may go there from now on, unless it was lent or given back meanwhile."""
        if self.may_stand_for(slot):
            self.slots.add(slot)
            if self.loan is not None and self.loan.stage == "back":
                self.loan = None

    @property
    def usable(self) -> bool:
        """It can be counted on for what is new."""
        return self.well and not self.draining

    def ended_with(self, hash: str) -> bool:
        """Whether this was the last version that it was given, and that ended well."""
        return self.sure and self.policy is not None and self.policy.hash == hash

    def holds(self, hash: str) -> bool:
        """Whether it serves this version now, and for somebody: one that nobody uses may have been started again unseen."""
        return bool(self.slots) and self.well and self.ended_with(hash)

    @property
    def state(self) -> tuple[PolicyVersion | None, bool, bool, int]:
        """Differs once something happened to it."""
        return self.policy, self.sure, self.well, self.failures

    def set_aside(self) -> None:
        """It failed: nothing new goes there until a look finds it well and its weights in place."""
        self.well = False
        self.failures += 1
        self.woken.set()

    def patience(self, look_s: float) -> float:
        """Seconds until it is looked at again: at once after its first failure, then later and later."""
        return 0.0 if self.failures < 2 else min(_LONGEST_S, look_s * 2.0 ** min(self.failures - 2, 10))


def candidates(slot: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Who may be asked something new: those that stand for the slot and are well.

    One that is being given a version is passed over while there is another; alone it is asked, and the request waits there. One that
    drains is asked only while nobody else stands for the slot.
    """
    well = [each for each in replicas if slot in each.slots and each.well and each.policy is not None]
    staying = [each for each in well if not each.draining]
    return [each for each in staying if not each.swapping] or staying or well


def chosen(
    slot: str, hash: str, replicas: Sequence[Replica], want: int, running: Mapping[Replica, int]
) -> list[Replica]:
    """The at most `want` replicas that a version of a slot should be served by, the best first.

    Those that serve it for other slots already, then the slot's own, then free ones, where least is open first; those that are set
    aside come last, and those that drain never. Beside them all that are lent to the slot, or on their way back to it.
    """

    def rank(replica: Replica) -> tuple[bool, int, int] | None:
        if replica.draining or replica.loan is not None:
            return None
        if replica.slots - {slot}:
            return (False, 0, 0) if replica.holds(hash) else None
        return (not replica.well, 1 if replica.slots else 2, 0 if replica.slots else running[replica])

    ranked = [(found, at) for at, each in enumerate(replicas) if (found := rank(each)) is not None]
    lent = [each for each in replicas if each.loan is not None and each.loan.slot == slot]
    return [*(replicas[at] for _, at in sorted(ranked)[:want]), *(each for each in lent if each.usable)]
