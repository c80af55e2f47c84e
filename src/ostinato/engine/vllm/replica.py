"""The known state of one server: which slots it serves, which version it holds, and whether it can be asked. No IO."""

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
    """A replica of slot `home` is lent to slot `to`. While it is "leaving" or "ending", its open requests come to their end, and it serves
    no slot.

    Example: ``Loan(home="live", to="world").slot is None``
    """

    home: str
    to: str
    stage: Literal["leaving", "lent", "ending", "back"] = "leaving"

    @property
    def slot(self) -> str | None:
        """The only slot that it may serve now, if any."""
        return {"lent": self.to, "back": self.home}.get(self.stage)


class Driving:
    """A lock that knows whether it is held or waited for. Example: ``async with replica.driving: ...``"""

    def __init__(self) -> None:
        self._lock, self._drivers = asyncio.Lock(), 0

    @property
    def busy(self) -> bool:
        """Whether acquiring it now may have to wait."""
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
    """One server. It serves `slots`, which hold the same version: requests for them may go there.

    `policy`: the version that makes its tokens, None before the first. `sure`: the last change of weights succeeded. `well`: it may be
    asked; otherwise it was set aside, after `failures` in a row. `swapping`: it is loading a version. `draining`: it gets no new requests.
    `woken`: it should be checked now. `driving` is held while it is made to fetch or load: it stages one version at a time.
    `loan`: it is lent, or changing over. `absent`: it has not answered since the start.

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
    absent: bool = False

    def may_stand_for(self, slot: str) -> bool:
        """Whether the slot may use it. A replica on loan may be used only by the slot where it is now."""
        return self.loan is None or self.loan.slot == slot

    def stand_for(self, slot: str) -> None:
        """Let it serve the slot from now on, unless it was lent or given back in the meantime."""
        if self.may_stand_for(slot):
            self.slots.add(slot)
            if self.loan is not None and self.loan.stage == "back":
                self.loan = None

    @property
    def usable(self) -> bool:
        """Whether it can take new work: it is well and not draining."""
        return self.well and not self.draining

    def ended_with(self, hash: str) -> bool:
        """Whether this is the last version that it loaded, and the load succeeded."""
        return self.sure and self.policy is not None and self.policy.hash == hash

    def holds(self, hash: str) -> bool:
        """Whether it serves this version now, for at least one slot: a server that no slot uses may have been restarted unnoticed."""
        return bool(self.slots) and self.well and self.ended_with(hash)

    @property
    def state(self) -> tuple[PolicyVersion | None, bool, bool, int]:
        """A snapshot that changes when something happens to the replica."""
        return self.policy, self.sure, self.well, self.failures

    def set_aside(self) -> None:
        """Record a failure: it gets no new requests until a check finds it well and its weights in place."""
        self.well = False
        self.failures += 1
        self.woken.set()

    def patience(self, look_s: float) -> float:
        """Seconds until it is checked again: at once after its first failure, then with exponential back-off up to a minute."""
        return 0.0 if self.failures < 2 else min(_LONGEST_S, look_s * 2.0 ** min(self.failures - 2, 10))


def candidates(slot: str, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas that may get new requests: those that serve the slot and are well.

    A replica that is loading a version is passed over while there is another; if it is the only one it is asked, and the request waits
    there. A draining replica is asked only while no other serves the slot.
    """
    well = [each for each in replicas if slot in each.slots and each.well and each.policy is not None]
    staying = [each for each in well if not each.draining]
    return [each for each in staying if not each.swapping] or staying or well


def chosen(
    slot: str, hash: str, replicas: Sequence[Replica], want: int, running: Mapping[Replica, int]
) -> list[Replica]:
    """The at most `want` replicas that should serve a version of a slot, the best first.

    Replicas that already serve it for other slots come first, then the slot's own, then free ones, the least loaded first; those that were
    set aside come last, and draining ones are left out. All usable replicas that are lent to the slot, or on their way back to it, are
    returned in addition.
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
