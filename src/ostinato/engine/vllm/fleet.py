"""The fleet of vLLM servers: rolling updates of their weights, health checks, and which server serves which slot.

`Replica` is the known state of one server, without IO: its slots, its version, its health. `VllmFleet` rolls a version out to servers one
after another. A server that fails is set aside, checked again with exponential back-off, and gets its slots' weights before any request.
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


_MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class Loan:
    """A loan of a replica from slot `home` to slot `to`. While it is "leaving" or "ending", the replica drains its open requests and serves
    no slot.

    Example: ``Loan(home="live", to="world").slot is None``
    """

    home: str
    to: str
    stage: Literal["leaving", "lent", "ending", "back"] = "leaving"

    @property
    def slot(self) -> str | None:
        """The only slot that the replica may serve now, if any."""
        return {"lent": self.to, "back": self.home}.get(self.stage)


class BusyLock:
    """An asyncio lock that reports whether it is held or waited for. Example: ``async with replica.driving: ...``"""

    def __init__(self) -> None:
        self._lock, self._drivers = asyncio.Lock(), 0

    @property
    def busy(self) -> bool:
        """Whether acquiring the lock now may have to wait."""
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
    """The state of one server. It serves `slots`, which all hold the same version: requests for them may go there.

    `policy`: the version that makes its tokens, None before the first. `sure`: its last weight swap succeeded. `well`: it is healthy;
    False: it was set aside, after `failures` failures in a row. `swapping`: it is loading a version. `draining`: it gets no new requests.
    `woken`: set to have it checked now. `driving`: held while the server is told to fetch or load, since it stages one version at a time.
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

    def may_serve(self, slot: str) -> bool:
        """Return whether it may serve the slot. A replica on loan may only serve the slot where it is now."""
        return self.loan is None or self.loan.slot == slot

    def serve(self, slot: str) -> None:
        """Add the slot to those that it serves, unless it was lent or returned in the meantime."""
        if self.may_serve(slot):
            self.slots.add(slot)
            if self.loan is not None and self.loan.stage == "back":
                self.loan = None

    @property
    def usable(self) -> bool:
        """Whether it can take new requests: it is healthy and not draining."""
        return self.well and not self.draining

    def last_loaded(self, hash: str) -> bool:
        """Return whether this is the version that it loaded last, and the load succeeded."""
        return self.sure and self.policy is not None and self.policy.hash == hash

    def holds(self, hash: str) -> bool:
        """Return whether it serves this version now, for at least one slot: an unused server may have been restarted unnoticed."""
        return bool(self.slots) and self.well and self.last_loaded(hash)

    @property
    def state(self) -> tuple[PolicyVersion | None, bool, bool, int]:
        """A snapshot for detecting concurrent changes of the replica."""
        return self.policy, self.sure, self.well, self.failures

    def set_aside(self) -> None:
        """Record a failure. The replica gets no new requests until a health check passes and its weights are in place."""
        self.well = False
        self.failures += 1
        self.woken.set()

    def backoff_s(self, base_s: float) -> float:
        """Return the seconds until its next health check: 0 after the first failure, then exponential back-off up to a minute."""
        return 0.0 if self.failures < 2 else min(_MAX_BACKOFF_S, base_s * 2.0 ** min(self.failures - 2, 10))


def candidates(slot: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas that may get new requests of the slot: the healthy ones that serve it.

    A replica that is loading a version is skipped if there is another; otherwise the request waits there. A draining replica is used only
    if no other one serves the slot.
    """
    well = [each for each in replicas if slot in each.slots and each.well and each.policy is not None]
    staying = [each for each in well if not each.draining]
    return [each for each in staying if not each.swapping] or staying or well


def choose_replicas(
    slot: str, hash: str, replicas: Sequence[Replica], want: int, running: Mapping[Replica, int]
) -> list[Replica]:
    """Choose up to `want` replicas to serve a version of a slot, the best first.

    Replicas that already serve the version for other slots come first, then the slot's own, then free ones by load; those that were set
    aside come last, and draining ones are excluded. In addition, all usable replicas that are lent to the slot, or returning to it, are
    included.
    """

    def rank(replica: Replica) -> tuple[bool, int, int] | None:
        if replica.draining or replica.loan is not None:
            return None
        if replica.slots - {slot}:
            return (False, 0, 0) if replica.holds(hash) else None
        return (not replica.well, 1 if replica.slots else 2, 0 if replica.slots else running[replica])

    ranked = [(key, at) for at, each in enumerate(replicas) if (key := rank(each)) is not None]
    lent = [each for each in replicas if each.loan is not None and each.loan.slot == slot]
    return [*(replicas[at] for _, at in sorted(ranked)[:want]), *(each for each in lent if each.usable)]


# ---------------------------------------------------------------- the fleet


_LOG = logging.getLogger(__name__)
_CHECK_S = 1.0  # interval of health checks
_REPORT_S = 10.0  # longest wait for a server to report its version; then it is asked again
_MAX_PAUSES = 1024
_REFETCHES = 2  # of a version that its servers lost before they loaded it


class NotStaged(Unavailable):
    """The server does not, or no longer, have the version to load: it was restarted, or fetches another one. Nothing was changed."""


class VllmFleet:
    """The servers and the slots that they serve. `want`: slot -> the number of servers for its version, by default 1.

    `draining()` returns the URLs of the servers that get no new requests. `running()` counts the open samples of each replica. `lost` is
    called with a replica whose weights are unknown. `admit` is called with a server that did not answer at the start, and its context
    length, once it answers; it raises BadConfig if the server differs from the others.

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
            Replica(server, absent=server.reported is None, well=server.reported is not None) for server in servers
        ]
        self.slots: dict[str, PolicyVersion] = {}
        self.swaps = 0
        self.pauses: list[float] = []
        self._want, self._draining, self._running, self._lost, self._admit = want, draining, running, lost, admit
        self._rolling = asyncio.Lock()  # one `load` at a time
        # one server swaps at a time; not held during downloads or while waiting for a server's report
        self._loading = asyncio.Lock()
        self._promised = dict[Replica, str]()  # replica -> the slot whose version it fetches, unless that failed
        self._draining_error = ""  # why the list of draining servers could not be read

    def candidates(self, slot: str) -> list[Replica]:
        """Return the replicas that may get a slot's new requests. Raises Unavailable if there are none."""
        usable = candidates(slot, self.replicas)
        if not usable:
            urls = ", ".join(each.server.url for each in self.replicas if slot in each.slots)
            raise Unavailable(f"no vLLM server of {slot!r} can be asked now ({urls or 'none'}); try again in a moment.")
        return usable

    def policy_of(self, replica: Replica, slot: str) -> PolicyVersion:
        """Return the version that makes a replica's tokens, under the slot's own number for it if the slot holds it."""
        own = self.slots.get(slot)
        assert replica.policy is not None, "no request is sent to a server without a version"
        return own if own is not None and own.hash == replica.policy.hash else replica.policy

    async def load(self, slot: str, policy: PolicyVersion) -> tuple[float, list[Replica]]:
        """Roll a version out to a slot's servers: all fetch it while they serve, then they swap one after another.

        Returns the longest pause in seconds, and the replicas. A replica that cannot be reached is set aside and gets the version later.
        Raises what `VllmEngine.load` raises.
        """
        async with self._rolling:
            self._read_draining()
            targets = choose_replicas(slot, policy.hash, self.replicas, self._wanted(slot), self._running())
            if not targets:
                raise Unavailable(
                    f"each of the {len(self.replicas)} vLLM servers holds another slot's version or drains; add one to engine.urls for "
                    f"{slot!r}"
                )
            try:
                for _ in range(_REFETCHES):  # NotStaged: every server lost what it had fetched, and nothing has changed
                    with contextlib.suppress(NotStaged):
                        return await self._bring(slot, policy, targets), targets
                return await self._bring(slot, policy, targets), targets
            finally:
                self._promised.clear()

    async def fetch(self, replica: Replica, slot: str) -> None:
        """Have a server fetch a slot's version while it serves. A failed fetch is retried when the server is to load the version."""
        async with replica.driving:
            policy = self.slots.get(slot)
            if policy is not None and not replica.last_loaded(policy.hash):
                try:
                    await replica.server.driver.stage(policy)
                except Exception as error:  # noqa: BLE001 (whatever the server answers, the changeover must go on)
                    _LOG.warning("%s does not fetch %s yet: %r", replica.server.url, policy, error)

    def unload(self, slot: str) -> None:
        """Empty the slot: no server serves it any more. The servers keep their weights."""
        self.slots.pop(slot, None)
        for replica in self.replicas:
            replica.slots.discard(slot)

    async def watch(self) -> None:
        """Monitor each server in a task of its own, until cancelled, so that a hanging server does not delay the weights of others."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._watch(replica))

    # ---- rolling update

    async def _bring(self, slot: str, policy: PolicyVersion, targets: Sequence[Replica]) -> float:
        without = [each for each in targets if not each.holds(policy.hash)]
        self._promised.update(dict.fromkeys(without, slot))
        staged, failed = await self._stage_all(without, policy)
        async with self._loading:
            pause_s = await self._roll(slot, policy, targets, staged, failed)
            for replica in without:
                if replica not in staged and replica.well and slot in replica.slots:
                    replica.set_aside()  # it could not fetch the version, and still holds the old one
        return pause_s

    async def _roll(
        self,
        slot: str,
        policy: PolicyVersion,
        targets: Sequence[Replica],
        staged: Collection[Replica],
        failed: OstinatoError | None,
    ) -> float:
        waiting = [each for each in staged if not each.holds(policy.hash)]
        waiting.sort(key=lambda replica: bool(replica.slots))  # free servers first: no request waits for them
        ready = [each for each in targets if each.holds(policy.hash)]
        pause_s = 0.0
        while waiting:
            replica = waiting.pop(0)
            if not replica.may_serve(slot) or replica.slots - {slot}:
                continue  # it was lent or returned in the meantime

            def arrived(replica: Replica = replica) -> None:
                replica.serve(slot)
                if not waiting:  # the last server: from here on no request is answered by another version
                    self._switch(slot, policy, targets)

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
            replica.serve(slot)
        self._switch(slot, policy, targets)
        if len(ready) < self._wanted(slot):
            _LOG.warning("%s is served by %d of %d servers", slot, len(ready), self._wanted(slot))
        return pause_s

    def _switch(self, slot: str, policy: PolicyVersion, targets: Sequence[Replica]) -> None:
        """Switch the slot to its new version, and take it away from all servers but the targets."""
        self.slots[slot] = policy
        for replica in self.replicas:
            if replica not in targets and slot in replica.slots:
                replica.slots.discard(slot)
                replica.woken.set()  # it may have come back while the others fetched

    async def _stage_all(
        self, replicas: Sequence[Replica], policy: PolicyVersion
    ) -> tuple[list[Replica], OstinatoError | None]:
        """Have all replicas fetch and verify a version while they serve. Returns those that succeeded, and the last error of the others.

        Replicas that cannot be reached are set aside. Raises Corrupt if one refuses the version; then nothing has changed.
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
            await self._served(replica)  # times out, so that a hanging server does not delay the others
        async with replica.driving:
            await replica.server.driver.stage(policy)

    async def _swap(self, replica: Replica, policy: PolicyVersion, loaded: Callable[[], object]) -> float:
        """Have a server load the version that it staged; return the pause in seconds.

        Calls `loaded` when no token of the old version can arrive any more. Raises NotStaged instead of waiting for a download.
        """

        def arrived() -> None:
            replica.policy, replica.sure = policy, False  # until the driver reports success
            loaded()

        if replica.driving.busy:
            raise NotStaged(f"{replica.server.url} fetches another version than {policy}")
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
        self.pauses = [*self.pauses, swap.pause_s][-_MAX_PAUSES:]
        return swap.pause_s

    def _lose(self, replica: Replica) -> None:
        """Give up a replica whose weights are unknown: it serves no slot any more, and slots without another replica are emptied."""
        slots, replica.slots, replica.policy = replica.slots, set[str](), None
        for slot in slots:
            if not any(slot in each.slots for each in self.replicas):
                self.slots.pop(slot, None)
        self._lost(replica)

    # ---- health checks

    async def _watch(self, replica: Replica) -> None:
        """Check the server in a loop. A failure is logged once and retried."""
        logged, missed = "", 0
        while True:
            if replica.well:
                # not wait_for, which may lose a cancellation that comes with the event
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await replica.woken.wait()
            replica.woken.clear()
            if not replica.well:
                await asyncio.sleep(replica.backoff_s(_CHECK_S))
            try:
                self._read_draining()
                if replica.absent:
                    self._admit(replica.server, await replica.server.context(0.0))
                    replica.absent = False
                    _LOG.info("%s answers now", replica.server.url)
                await self._check(replica)
                logged, missed = "", 0
            except Exception as error:  # noqa: BLE001 (whatever the server answers, the next check may find it well)
                known = isinstance(error, OstinatoError)
                message = str(error) if known else f"{replica.server.url}: {error!r}"
                if logged != message:
                    _LOG.error("%s", message, exc_info=None if known else error)
                # a timeout does not count: a slow server may still serve its streams, and hanging streams time out themselves
                slow = isinstance(error.__cause__, TimeoutError)
                logged, missed = message, missed + (not slow)
                if missed > 1 or not replica.well:
                    replica.set_aside()

    async def _check(self, replica: Replica) -> None:
        """Check that the server answers, and that it has the version of its slots, or of a slot that lacks servers; restore it if not."""
        self._leave_surplus(replica)
        due, seen = self._due(replica), replica.state
        if due is None and replica.well:
            return
        served = await self._served(replica)
        if not replica.well:
            await replica.server.check_health()
        if due is None:
            replica.well = replica.well or replica.state == seen  # unless it failed again in the meantime
            return
        slot, policy = due
        if replica.last_loaded(policy.hash) and served == policy.hash:
            if (self._due(replica), replica.state) == (due, seen):
                replica.well = True
                replica.serve(slot)
            return
        known = replica.policy is None or replica.policy.hash == served
        if replica.well and not known and not replica.swapping and replica.state == seen:
            replica.set_aside()  # it was restarted, and would answer with other weights until it has fetched its own
            return
        promised = self._promised.get(replica)
        if promised is not None and replica.may_serve(promised):
            # it is staging another version, which must not be replaced before it is loaded
            await asyncio.sleep(_CHECK_S)
            return
        await self._restore(replica, due, seen, served)

    async def _restore(
        self,
        replica: Replica,
        due: tuple[str, PolicyVersion],
        seen: tuple[PolicyVersion | None, bool, bool, int],
        served: str,
    ) -> None:
        """Have a server fetch and load its slot's version; stop if the slot's version or the server's state changes meanwhile."""

        def stale() -> bool:
            return (self._due(replica), replica.state) != (due, seen)

        slot, policy = due
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
                why = f"serves {served}" if served != policy.hash else "did not complete its last swap"
                _LOG.warning("%s %s: it loads %s again", replica.server.url, why, policy)
            await self._swap(replica, policy, lambda: replica.serve(slot))

    def _due(self, replica: Replica) -> tuple[str, PolicyVersion] | None:
        """Return the slot and version that the server should serve; None if it serves no slot and is not needed."""
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
        """Return how many servers of its own a slot wants now: less those that it lent, but at least 1."""
        away = sum(each.loan is not None and each.loan.home == slot for each in self.replicas)
        return max(1, self._want.get(slot, 1) - away)

    def _leave_surplus(self, replica: Replica) -> None:
        """Take from an unusable server the slots that have enough other servers by now."""
        if not replica.usable and replica.loan is None:
            replica.slots -= {
                slot for slot in replica.slots if len(self._usable(slot)) >= self._wanted(slot) and slot in self.slots
            }

    async def _served(self, replica: Replica) -> str:
        try:
            async with asyncio.timeout(_REPORT_S):
                return await replica.server.driver.served()
        except TimeoutError as error:
            raise Unavailable(
                f"{replica.server.url} does not say what it serves; is the vLLM server healthy?"
            ) from error

    def _read_draining(self) -> None:
        """Update which servers drain. If the list cannot be read (say, a file of another user), the servers keep their state."""
        try:
            names = {url.rstrip("/") for url in self._draining()}
        except OSError as error:
            if str(error) != self._draining_error:
                _LOG.error("the list of draining servers cannot be read, and stays as it was: %s", error)
            self._draining_error = str(error)
            return
        self._draining_error = ""
        for replica in self.replicas:
            replica.draining = replica.server.url in names
