"""Discrete-event simulation of a burst of sandbox starts on a fleet. Deterministic: the same arguments give the same numbers.

Each machine has a queue of sandbox starts, and each cluster's control plane is a queue in front of its machines. Heaps make the cost of a
placement logarithmic in the number of machines.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest

# ---------------------------------------------------------------- the fleet


class Packing(StrEnum):
    """Policy that picks the machine for the next sandbox."""

    FIRST_FIT = "first-fit"  # the first machine with room for the request
    LEAST_LOADED = "least-loaded"  # the machine with the fewest sandboxes assigned to it
    PRESSURE = "pressure-aware"  # the machine with the lowest sum of actual use and queue of starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Identical clusters of identical machines. Each cluster is in a region of its own.

    `start_rate`: sandboxes that one machine starts per second; `cluster_rate`: sandboxes that one cluster's control plane places per
    second.

    Example: ``Fleet(clusters=4, nodes=250)``
    """

    clusters: int = 4
    nodes: int = 250
    cores: float = 32.0
    memory_gb: float = 128.0
    start_rate: float = 100.0
    cluster_rate: float = 500.0
    price_per_hour: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """A burst of `sandboxes` requests, spread uniformly over `over_s` seconds. All request the same resources (`asked_*`); their actual use
    is log-normal with means `taken_*` and sigma `spread`.

    Example: ``Burst(sandboxes=100_000, lose_region_at=20.0)``
    """

    sandboxes: int = 100_000
    over_s: float = 0.0
    asked_cores: float = 0.25
    asked_gb: float = 1.0
    taken_cores: float = 0.15
    taken_gb: float = 0.6
    spread: float = 0.7
    start_s: float = 0.05
    failure: float = 0.01
    retry_s: float = 1.0
    lose_region_at: float | None = None
    notice_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstResult:
    """The result of a simulation. `all_s`: when the last sandbox started, in seconds since the burst began; `p50_s`, `p99_s`: quantiles of
    the delay from request to start; `cores`, `memory`: mean utilisation, at the end, of the machines in use.

    Example: ``BurstResult(packing=Packing.FIRST_FIT, placed=100_000, unplaced=0, all_s=50.1, p50_s=25.0, p99_s=49.6, failed=1010, killed=0,
    lost=0, machines=782, cores=0.6, memory=0.6, cost=16.3)``
    """

    packing: Packing
    placed: int
    unplaced: int
    all_s: float
    p50_s: float
    p99_s: float
    failed: int
    killed: int
    lost: int
    machines: int
    cores: float
    memory: float
    cost: float


ASSUMPTIONS = (
    "a machine starts sandboxes one after another at its start rate; on a machine with overcommitted cores, starts are slower by the "
    "overcommitment factor",
    "a cluster's control plane places sandboxes at a bounded rate (over 500 per second and cluster was published for one such system)",
    "a start fails with the same probability everywhere and is retried after a pause that doubles with each failure",
    "a sandbox uses constant resources from its start to the end of the simulation; first-fit and least-loaded packing see requested "
    "resources; pressure-aware packing sees actual use and, for sandboxes that have not started, assumes the mean, which it knows",
    "where a machine runs out of memory, the sandbox that started last is killed and placed again",
    "when a region is lost, its sandboxes are placed again elsewhere once the loss is noticed",
    "no network, no image transfer and no other tenants are simulated",
)


# ---------------------------------------------------------------- the simulation


Floats = NDArray[np.float64]

_REQUEST, _STARTED, _REGION_LOST = 0, 1, 2  # kinds of events
_MEMORY_SHARE = 0.9
"""Share of a machine's memory that pressure-aware packing fills."""
_MOST_TRIES = 12
_NO_ROOM_RETRY_S = 1.0
"""Pause before a request for which no machine had room is retried."""


@dataclass(slots=True)
class _Machine:
    cluster: int
    cores: float = 0.0
    gb: float = 0.0
    promised: float = 0.0
    free_at: float = 0.0
    here: int = 0
    coming: int = 0
    version: int = 0


class _Simulation:
    def __init__(self, fleet: Fleet, burst: Burst, packing: Packing, seed: int) -> None:
        self.fleet, self.burst, self.packing = fleet, burst, packing
        rng, n = np.random.default_rng(seed), burst.sandboxes
        sigma = burst.spread
        self.cores_N = burst.taken_cores * np.exp(sigma * rng.normal(size=n) - sigma**2 / 2)
        self.gb_N = burst.taken_gb * np.exp(sigma * rng.normal(size=n) - sigma**2 / 2)
        self.asked_N = np.sort(rng.random(n)) * burst.over_s
        self.rng = rng
        self.machines = [_Machine(cluster=at % fleet.clusters) for at in range(fleet.clusters * fleet.nodes)]
        self.plane_free = [0.0] * fleet.clusters
        self.dead: set[int] = set()
        self.where: list[int] = [-1] * n
        self.epoch = [0] * n
        self.tries = [0] * n
        self.began: Floats = np.full(n, np.nan)
        self.heap: list[tuple[float, int, int]] = []
        self.events: list[tuple[float, int, int, int, int]] = []
        self.order = 0
        self.failed = self.killed = self.lost = self.unplaced = 0
        self.noise: list[float] = []
        for at in range(len(self.machines)):
            self._offer(at)

    # ------------------------------------------------------------ choosing

    def _fits(self, machine: _Machine) -> bool:
        if machine.cluster in self.dead:
            return False
        if self.packing is Packing.PRESSURE:
            coming = machine.coming * self.burst.taken_gb
            return machine.gb + coming + self.burst.taken_gb <= _MEMORY_SHARE * self.fleet.memory_gb
        asked = max(self.burst.asked_cores / self.fleet.cores, self.burst.asked_gb / self.fleet.memory_gb)
        return (machine.promised + 1) * asked <= 1.0

    def _priority(self, at: int, machine: _Machine) -> float:
        if self.packing is Packing.FIRST_FIT:
            return float(at)
        if self.packing is Packing.LEAST_LOADED:
            return machine.promised
        cores = (machine.cores + machine.coming * self.burst.taken_cores) / self.fleet.cores
        gb = (machine.gb + machine.coming * self.burst.taken_gb) / self.fleet.memory_gb
        queue = max(machine.free_at, self.plane_free[machine.cluster]) / 60.0
        return max(cores, gb) + queue

    def _offer(self, at: int) -> None:
        """Push a machine onto the heap with its current priority. Its earlier entries become stale."""
        machine = self.machines[at]
        machine.version += 1
        if self._fits(machine):
            heapq.heappush(self.heap, (self._priority(at, machine), at, machine.version))

    def _choose(self) -> int | None:
        while self.heap:
            _, at, version = self.heap[0]
            if self.machines[at].version == version and self._fits(self.machines[at]):
                return at
            heapq.heappop(self.heap)
        return None

    # ------------------------------------------------------------ events

    def _schedule(self, when: float, kind: int, who: int, epoch: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, kind, who, epoch))

    def _place(self, now: float, who: int) -> None:
        at = self._choose()
        if at is None:
            self._retry(now + _NO_ROOM_RETRY_S, who)
            return
        machine, burst = self.machines[at], self.burst
        cluster = machine.cluster
        self.plane_free[cluster] = max(now, self.plane_free[cluster]) + 1.0 / self.fleet.cluster_rate
        slow = max(1.0, machine.cores / self.fleet.cores)
        begin = max(self.plane_free[cluster], machine.free_at)
        machine.free_at = begin + slow / self.fleet.start_rate
        machine.promised += 1
        machine.coming += 1
        self.where[who] = at
        self.epoch[who] += 1
        self._schedule(begin + slow * burst.start_s * (0.5 + self._uniform()), _STARTED, who, self.epoch[who])
        self._offer(at)

    def _uniform(self) -> float:
        if not self.noise:
            self.noise = self.rng.random(4096).tolist()
        return self.noise.pop()

    def _started(self, now: float, who: int) -> None:
        at = self.where[who]
        machine = self.machines[at]
        machine.coming -= 1
        if self._uniform() < self.burst.failure:
            self.failed += 1
            self._requeue(now, who, self.burst.retry_s * 2.0 ** min(self.tries[who], 6))
            self._offer(at)
            return
        machine.cores += float(self.cores_N[who])
        machine.gb += float(self.gb_N[who])
        if machine.gb > self.fleet.memory_gb:
            self.killed += 1
            machine.cores -= float(self.cores_N[who])
            machine.gb -= float(self.gb_N[who])
            self._requeue(now, who, self.burst.retry_s)
        else:
            machine.here += 1
            self.began[who] = now
        self._offer(at)

    def _requeue(self, now: float, who: int, pause_s: float) -> None:
        self.machines[self.where[who]].promised -= 1
        self.where[who] = -1
        self.epoch[who] += 1
        self._retry(now + pause_s, who)

    def _retry(self, when: float, who: int) -> None:
        self.tries[who] += 1
        if self.tries[who] > _MOST_TRIES:
            self.unplaced += 1
        else:
            self._schedule(when, _REQUEST, who)

    def _region_lost(self, now: float) -> None:
        self.dead.add(0)
        for who, at in enumerate(self.where):
            if at >= 0 and self.machines[at].cluster == 0:
                self.lost += 1
                self.began[who] = np.nan
                self.where[who] = -1
                self.epoch[who] += 1
                self._schedule(now + self.burst.notice_s, _REQUEST, who)
        for at, machine in enumerate(self.machines):
            if machine.cluster == 0:
                self.machines[at] = _Machine(cluster=0, version=machine.version + 1)

    def run(self) -> BurstResult:
        for who, when in enumerate(self.asked_N.tolist()):
            self._schedule(when, _REQUEST, who)
        if self.burst.lose_region_at is not None:
            self._schedule(self.burst.lose_region_at, _REGION_LOST, -1)
        while self.events:
            now, _, kind, who, epoch = heapq.heappop(self.events)
            if kind == _REQUEST:
                self._place(now, who)
            elif kind == _REGION_LOST:
                self._region_lost(now)
            elif epoch == self.epoch[who]:
                self._started(now, who)
        return self._result()

    def _result(self) -> BurstResult:
        placed_N = np.isfinite(self.began)
        waits_N = (self.began - self.asked_N)[placed_N]
        used = [machine for machine in self.machines if machine.here]
        last = float(self.began[placed_N].max(initial=0.0))
        p50, p99 = (float(np.quantile(waits_N, q)) if len(waits_N) else 0.0 for q in (0.5, 0.99))
        machines = max(1, len(used))
        return BurstResult(
            packing=self.packing,
            placed=int(placed_N.sum()),
            unplaced=self.unplaced,
            all_s=last,
            p50_s=p50,
            p99_s=p99,
            failed=self.failed,
            killed=self.killed,
            lost=self.lost,
            machines=len(used),
            cores=sum(machine.cores for machine in used) / (machines * self.fleet.cores),
            memory=sum(machine.gb for machine in used) / (machines * self.fleet.memory_gb),
            cost=len(used) * self.fleet.price_per_hour * last / 3600.0,
        )


def simulate(fleet: Fleet, burst: Burst, packing: Packing, seed: int = 0) -> BurstResult:
    """Simulate a burst. With the same seed, every packing policy gets the same sandboxes. Raises BadRequest if there is no machine or no
    sandbox.
    """
    if min(fleet.clusters, fleet.nodes, burst.sandboxes) < 1:
        raise BadRequest("a burst needs at least one cluster, one machine and one sandbox")
    return _Simulation(fleet, burst, packing, seed).run()
