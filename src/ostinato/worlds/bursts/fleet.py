"""Inputs and result of a burst simulation: machines, the resources sandboxes request and use, and how starts behave. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Packing(StrEnum):
    """Policy that picks the machine for the next sandbox."""

    FIRST_FIT = "first-fit"  # the first machine with room for the request
    LEAST_LOADED = "least-loaded"  # the machine with the fewest sandboxes assigned to it
    PRESSURE = "pressure-aware"  # the machine with the lowest sum of actual use and queue of starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal clusters of equal machines, each cluster in a region of its own.

    `start_rate` is how many sandboxes one machine starts per second, `cluster_rate` how many one cluster's control plane places per second.

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
    """`sandboxes` requests within `over_s` seconds. All request the same resources; their actual use is log-normal with means `taken_*`
    and sigma `spread`.

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
    """The result of a simulation. `all_s` is when the last sandbox started, in seconds since the burst began; `p50_s` and `p99_s` are
    quantiles of the wait from request to start. `cores` and `memory` are the mean utilisation of the machines in use at the end.

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
    "one machine starts sandboxes one after another at its start rate; on a machine whose processors are asked for more than they have, "
    "starts take longer by that factor",
    "a cluster's control plane places at a bounded rate (above 500 a second and cluster was published for one such system)",
    "a start fails with the same probability everywhere and is tried again after a pause that doubles",
    "a sandbox takes what it takes from its start on and stays until the end; first-fit and least-loaded go by what is asked for, "
    "pressure-aware packing by what is really taken, and by the mean where it has not started yet, which it is taken to know",
    "where more memory is taken than a machine has, the sandbox that started last is killed and placed again",
    "when a region is lost, all that was placed there is placed again elsewhere once that is noticed",
    "no network, no image transfer and no other tenants are simulated",
)
