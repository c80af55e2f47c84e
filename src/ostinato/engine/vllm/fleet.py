"""Which server holds which version, for which slots: versions are brought to servers one after another, failing servers are set aside.

A server that was set aside is checked again at growing intervals, and gets its slots' weights before it gets any request.

The known state of one server: which slots it serves, which version it holds, and whether it can be asked. No IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.core.errors import Conflict, NotFetched, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.engine.vllm.server import ServerClient

# ---------------------------------------------------------------- a replica


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


class BusyLock:
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
    driving: BusyLock = field(default_factory=BusyLock)
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


# ---------------------------------------------------------------- the fleet


_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
_ASK_S = 10.0  # longest wait for a server to report what it serves; then it is asked again
_PAUSES = 1024
_AGAIN = 2  # times that a version is fetched again if its servers lose it before they load it


class NotStaged(Unavailable):
    """A server does not (or no longer) have the version that it was to load: it was restarted, or fetches another. It was left as it is."""


class VllmFleet:
    """The servers and the slots. `want`: slot -> how many servers its version is brought to, by default 1.

    `draining()` names the servers, by URL, that get no new requests. `lost` is called with a replica if it is unknown what the replica
    holds. `running()` counts the open samples of each replica. `admit` is called with a server that did not answer at the start, and its
    context, once it answers; it raises BadConfig if the server is not like the others.

    Example: ``await fleet.load("live", policy)``
    """

    def __init__(
        self,
        servers: Sequence[ServerClient],
        want: Mapping[str, int],
        draining: Callable[[], Collection[str]],
        running: Callable[[], Counter[Replica]],
        lost: Callable[[Replica], None],
        admit: Callable[[ServerClient, int], None],
    ) -> None:
        self.replicas = [
            Replica(server, absent=server.told is None, well=server.told is not None) for server in servers
        ]
        self.slots: dict[str, PolicyVersion] = {}
        self.swaps = 0
        self.pauses: list[float] = []
        self._want, self._draining, self._running, self._lost, self._admit = want, draining, running, lost, admit
        self._rolling = asyncio.Lock()  # one `load` at a time
        # servers change over one after another; it is not held during downloads or while waiting for them
        self._loading = asyncio.Lock()
        self._promised = dict[Replica, str]()  # replica -> the slot whose version it fetches, unless that failed
        self._unread = ""  # why it could not be read which servers drain

    def candidates(self, slot: str) -> list[Replica]:
        """The replicas that may get a slot's new requests. Raises Unavailable if there are none."""
        found = candidates(slot, self.replicas)
        if not found:
            urls = ", ".join(each.server.url for each in self.replicas if slot in each.slots)
            raise Unavailable(f"no vLLM server of {slot!r} can be asked now ({urls or 'none'}); try again in a moment.")
        return found

    def policy_of(self, replica: Replica, slot: str) -> PolicyVersion:
        """The version that makes a replica's tokens, with the slot's own number for it if the slot holds it."""
        own = self.slots.get(slot)
        assert replica.policy is not None, "nobody is sent to a server without a version"
        return own if own is not None and own.hash == replica.policy.hash else replica.policy

    async def load(self, slot: str, policy: PolicyVersion) -> tuple[float, list[Replica]]:
        """Bring a version to a slot's servers: each fetches it while it serves, then they change over one after another.

        Returns the longest pause and the replicas. A replica that cannot be reached is set aside and gets the version later. Raises as
        `VllmEngine.load`.
        """
        async with self._rolling:
            self._read_draining()
            found = chosen(slot, policy.hash, self.replicas, self._wanted(slot), self._running())
            if not found:
                raise Unavailable(
                    f"each of the {len(self.replicas)} vLLM servers holds another slot's version or drains; add one to engine.urls for "
                    f"{slot!r}"
                )
            try:
                for _ in range(_AGAIN):  # if every server lost what it had fetched, nothing has changed
                    with contextlib.suppress(NotStaged):
                        return await self._bring(slot, policy, found), found
                return await self._bring(slot, policy, found), found
            finally:
                self._promised.clear()

    async def fetch(self, replica: Replica, slot: str) -> None:
        """Have a server fetch a slot's version while it serves. A failed fetch is retried when the version is brought to the server."""
        async with replica.driving:
            policy = self.slots.get(slot)
            if policy is not None and not replica.ended_with(policy.hash):
                try:
                    await replica.server.driver.stage(policy)
                except Exception as error:  # noqa: BLE001 (whatever the server answers, the changeover must go on)
                    _LOG.warning("%s does not fetch %s yet: %r", replica.server.url, policy, error)

    def unload(self, slot: str) -> None:
        """Empty the slot: no server serves it any more; the servers keep their weights."""
        self.slots.pop(slot, None)
        for replica in self.replicas:
            replica.slots.discard(slot)

    async def keep(self) -> None:
        """Check on each server in its own task, until cancelled, so that a server that hangs keeps no other from its weights."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._keep(replica))

    # ---- a version comes

    async def _bring(self, slot: str, policy: PolicyVersion, found: Sequence[Replica]) -> float:
        without = [each for each in found if not each.holds(policy.hash)]
        self._promised.update(dict.fromkeys(without, slot))
        staged, failed = await self._staged(without, policy)
        async with self._loading:
            pause_s = await self._roll(slot, policy, found, staged, failed)
            for replica in without:
                if replica not in staged and replica.well and slot in replica.slots:
                    replica.set_aside()  # it could not fetch the version and has the old one
        return pause_s

    async def _roll(
        self,
        slot: str,
        policy: PolicyVersion,
        found: Sequence[Replica],
        staged: Collection[Replica],
        failed: OstinatoError | None,
    ) -> float:
        waiting = [each for each in staged if not each.holds(policy.hash)]
        waiting.sort(key=lambda replica: bool(replica.slots))  # free servers first: no request waits for them
        ready = [each for each in found if each.holds(policy.hash)]
        pause_s = 0.0
        while waiting:
            replica = waiting.pop(0)
            if not replica.may_stand_for(slot) or replica.slots - {slot}:
                continue  # it was lent or given back in the meantime

            def arrived(replica: Replica = replica) -> None:
                replica.stand_for(slot)
                if not waiting:  # the last server: from here on no request is answered by another version
                    self._moved(slot, policy, found)

            try:
                pause_s = max(pause_s, await self._swap(replica, policy, arrived))
            except OstinatoError as error:
                failed = error
                _LOG.error("%s", error)
            else:
                ready.append(replica)
        if failed is not None and not ready:
            raise failed
        for replica in ready:
            replica.stand_for(slot)
        self._moved(slot, policy, found)
        if len(ready) < self._wanted(slot):
            _LOG.warning("%s is served by %d of %d servers", slot, len(ready), self._wanted(slot))
        return pause_s

    def _moved(self, slot: str, policy: PolicyVersion, found: Sequence[Replica]) -> None:
        self.slots[slot] = policy
        for replica in self.replicas:
            if replica not in found and slot in replica.slots:
                replica.slots.discard(slot)
                replica.woken.set()  # it may have come back while the others fetched

    async def _staged(
        self, replicas: Sequence[Replica], policy: PolicyVersion
    ) -> tuple[list[Replica], OstinatoError | None]:
        """Have all replicas fetch and verify a version while they serve. Returns those that did, and the last error of the others.

        Those that cannot be reached are set aside. Raises Corrupt if one refuses; then none was changed.
        """
        alone = len(replicas) == 1
        results = await asyncio.gather(
            *(self._stage(each, policy, alone=alone) for each in replicas), return_exceptions=True
        )
        done = list[Replica]()
        lost: OstinatoError | None = None
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Unavailable):
                if not isinstance(result, NotFetched):
                    replica.set_aside()
                self._promised.pop(replica, None)
                lost = result
                _LOG.error("%s", result)
            elif result is not None:
                raise result
            else:
                done.append(replica)
        return done, lost

    async def _stage(self, replica: Replica, policy: PolicyVersion, *, alone: bool) -> None:
        if replica.absent:
            raise Unavailable(
                f"{replica.server.url} (engine.urls) has not answered since the start: start that server, or leave it out"
            )
        if not alone:
            await self._served(replica)  # a server that hangs must not hold up the others
        async with replica.driving:
            await replica.server.driver.stage(policy)

    async def _swap(self, replica: Replica, policy: PolicyVersion, loaded: Callable[[], object]) -> float:
        """Have a server load what it staged; returns the pause. `loaded` is called when no token of the old version can arrive any more.

        Raises NotStaged rather than wait for a download.
        """

        def arrived() -> None:
            replica.policy, replica.sure = policy, False  # until the driver reports success
            loaded()

        if replica.driving.busy:
            raise NotStaged(f"{replica.server.url} fetches something else than {policy}")
        replica.swapping = True
        try:
            async with replica.driving:
                if not await replica.server.driver.has_staged(policy):
                    raise NotStaged(
                        f"{replica.server.url} lost {policy} before it was to load it; was it started again?"
                    )
                swap = await replica.server.driver.swap(policy, arrived)
        except NotStaged:
            replica.woken.set()
            raise
        except BaseException as error:
            replica.sure = False  # the new weights may be loaded under the old label
            replica.set_aside()
            if isinstance(error, Conflict):
                self._lose(replica)
            raise
        finally:
            replica.swapping = False
        replica.well = replica.sure = True
        self.swaps += 1
        self.pauses = [*self.pauses, swap.pause_s][-_PAUSES:]
        return swap.pause_s

    def _lose(self, replica: Replica) -> None:
        """It is unknown what the replica holds: it serves no slot any more, and a slot that no other replica serves is emptied."""
        slots, replica.slots, replica.policy = replica.slots, set[str](), None
        for slot in slots:
            if not any(slot in each.slots for each in self.replicas):
                self.slots.pop(slot, None)
        self._lost(replica)

    # ---- looking after a server

    async def _keep(self, replica: Replica) -> None:
        """Check the server in a loop. A failure is logged once and retried."""
        said, missed = "", 0
        while True:
            if replica.well:
                with contextlib.suppress(TimeoutError):  # wait_for may lose a cancellation that comes with the event
                    async with asyncio.timeout(_LOOK_S):
                        await replica.woken.wait()
            replica.woken.clear()
            if not replica.well:
                await asyncio.sleep(replica.patience(_LOOK_S))
            try:
                self._read_draining()
                if replica.absent:
                    self._admit(replica.server, await replica.server.context(0.0))
                    replica.absent = False
                    _LOG.info("%s answers now", replica.server.url)
                await self._look(replica)
                said, missed = "", 0
            except Exception as error:  # noqa: BLE001 (whatever the server answers, the next check may find it well)
                known = isinstance(error, OstinatoError)
                words = str(error) if known else f"{replica.server.url}: {error!r}"
                if said != words:
                    _LOG.error("%s", words, exc_info=None if known else error)
                # a slow server may still answer its streams, and streams that hang are noticed on their own
                slow = isinstance(error.__cause__, TimeoutError)
                said, missed = words, missed + (not slow)
                if missed > 1 or not replica.well:
                    replica.set_aside()

    async def _look(self, replica: Replica) -> None:
        """Check that the server answers, then that it has the version of its slots, or of a slot that is short of servers."""
        self._leave_surplus(replica)
        held, seen = self._due(replica), replica.state
        if held is None and replica.well:
            return
        served = await self._served(replica)
        if not replica.well:
            await replica.server.check_health()
        if held is None:
            replica.well = replica.well or replica.state == seen  # unless it failed again in the meantime
            return
        slot, policy = held
        if replica.ended_with(policy.hash) and served == policy.hash:
            if (self._due(replica), replica.state) == (held, seen):
                replica.well = True
                replica.stand_for(slot)
            return
        known = replica.policy is None or replica.policy.hash == served
        if replica.well and not known and not replica.swapping and replica.state == seen:
            replica.set_aside()  # it was restarted, and would answer with other weights while it fetches
            return
        promised = self._promised.get(replica)
        if promised is not None and replica.may_stand_for(promised):
            await asyncio.sleep(_LOOK_S)  # it must fetch another version, and keep it until it loads it
            return
        await self._restore(replica, held, seen, served)

    async def _restore(
        self,
        replica: Replica,
        held: tuple[str, PolicyVersion],
        seen: tuple[PolicyVersion | None, bool, bool, int],
        served: str,
    ) -> None:
        """Have a server fetch and load the version of its slot, as long as the slot's version and the server's state stay as they were."""

        def stale() -> bool:
            return (self._due(replica), replica.state) != (held, seen)

        slot, policy = held
        async with replica.driving:
            if stale():
                return
            await replica.server.driver.stage(policy)
        async with self._loading:
            if stale():
                return
            if replica.loan is not None:
                _LOG.info("%s goes to %s (%s)", replica.server.url, slot, policy)
            else:
                why = f"serves {served}" if served != policy.hash else "did not end its last swap well"
                _LOG.warning("%s %s: it is given %s again", replica.server.url, why, policy)
            await self._swap(replica, policy, lambda: replica.stand_for(slot))

    def _due(self, replica: Replica) -> tuple[str, PolicyVersion] | None:
        """A slot, and its version that the server should serve; None if the server serves no slot and is not needed."""
        if replica.loan is not None:
            slot = replica.loan.slot
            if slot is None or slot not in self.slots or (replica.draining and slot not in replica.slots):
                return None
            return slot, self.slots[slot]
        for slot, policy in self.slots.items():
            if slot in replica.slots:
                return slot, policy
        if replica.slots or not replica.usable or replica in self._promised:
            return None
        short = (slot for slot in self.slots if len(self._usable(slot)) < self._wanted(slot))
        return next(((slot, self.slots[slot]) for slot in short), None)

    def _usable(self, slot: str) -> list[Replica]:
        return [each for each in self.replicas if slot in each.slots and each.usable and each.loan is None]

    def _wanted(self, slot: str) -> int:
        """How many servers of its own a slot wants now; those that it lent are not counted as missing."""
        away = sum(each.loan is not None and each.loan.home == slot for each in self.replicas)
        return max(1, self._want.get(slot, 1) - away)

    def _leave_surplus(self, replica: Replica) -> None:
        """Drop the slots that found enough other servers while this one was unusable."""
        if not replica.usable and replica.loan is None:
            replica.slots -= {
                slot for slot in replica.slots if len(self._usable(slot)) >= self._wanted(slot) and slot in self.slots
            }

    async def _served(self, replica: Replica) -> str:
        try:
            async with asyncio.timeout(_ASK_S):
                return await replica.server.driver.served()
        except TimeoutError as error:
            raise Unavailable(
                f"{replica.server.url} does not say what it serves; is the vLLM server healthy?"
            ) from error

    def _read_draining(self) -> None:
        """Note which servers drain. If that cannot be read, as from a file that another user wrote, those that drained go on doing so."""
        try:
            names = {url.rstrip("/") for url in self._draining()}
        except OSError as error:
            if str(error) != self._unread:
                _LOG.error("which servers drain cannot be read, and stays as it was: %s", error)
            self._unread = str(error)
            return
        self._unread = ""
        for replica in self.replicas:
            replica.draining = replica.server.url in names
