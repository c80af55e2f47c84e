"""Simulates a serving fleet, a trainer's workers and traffic, step by step: the same arguments give the same numbers.

Requests are modelled as a fluid: the excess over the replicas' capacity waits. A request's delay is the backlog divided by the capacity,
plus the mean wait of a queue with that many servers by Sakasegawa's approximation (Annals of the Institute of Statistical Mathematics 29,
1977). Traffic is synthetic, from stated parameters, or read from a user's trace.
"""

from __future__ import annotations

import csv
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.compute.borrowing import FleetView, GuardRules, lending
from ostinato.compute.ledger import ShareRules
from ostinato.core.errors import BadRequest
from ostinato.core.lines import lines_of

ASSUMED = (
    "traffic is a fluid; requests are alike, and a replica carries the same number of them at every load",
    "a lent replica samples with the version that it serves; given back, it serves again after `return_s`, and its rollouts are cut off",
    "lent replicas and the trainer's own workers sample equally fast; a worker that moves does nothing for `switch_s`",
    "workers move between optimizer steps only; an outage takes replicas that serve, and its end brings them back at once",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFleet:
    """Replicas that each carry `carries` requests a second, `slots` at once; `slo_s` is the longest delay that users are promised.

    From `outage_at_s` on, for `outage_s`, the share `outage` of the replicas is lost. `workers` belong to training and its own sampling.

    Example: ``ServingFleet(replicas=40)``
    """

    replicas: int = 40
    carries: float = 5.0
    slots: int = 64
    slo_s: float = 2.0
    return_s: float = 60.0
    outage: float = 0.15
    outage_at_s: float = 8 * 86_400.0 + 12 * 3600.0
    outage_s: float = 7200.0
    workers: int = 48
    step_s: float = 600.0
    switch_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """The result of a simulation.

    `violations` counts the steps in which requests waited longer than promised, `late` is the share of such requests. Hours are
    replica-hours. `share` is sampling's share of all compute, `apart` its largest deviation from the target over any `WINDOW_S`.
    """

    violations: int
    late: float
    worst_delay_s: float
    harvested_h: float
    idle_h: float
    preemptions: int
    most_preemptions_h: int
    moves: int
    share: float
    apart: float


WINDOW_S = 6 * 3600.0
_MEMORY_S = 3600.0  # time constant of the average share that the rules are given


def mean_wait(servers: float, load: float, service_s: float) -> float:
    """Mean seconds in a queue with c servers and a load below 1 (Sakasegawa): load^(sqrt(2(c+1)) - 1) / (c (1 - load)) * service."""
    return load ** (np.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - load)) * service_s


class _Run:
    def __init__(self, fleet: ServingFleet, guard: GuardRules | None, rules: ShareRules, step_s: float) -> None:
        self.fleet, self.guard, self.rules, self.step_s = fleet, guard, rules, step_s
        self.lent = 0
        self.returning: deque[tuple[float, int]] = deque()
        self.backlog = self.delay = 0.0
        self.since = -1e18
        self.lately: deque[tuple[float, float]] = deque()  # (time, rate), rates falling: the first is the highest
        self.sampling = round(rules.share * fleet.workers)
        self.observed = rules.share
        self.moving: list[tuple[float, int]] = []
        self.moves = 0
        self.back_at: list[tuple[float, int]] = []

    def serve(self, now: float, rate: float) -> float:
        """One step of serving. Returns the unused serving capacity in replicas."""
        fleet = self.fleet
        while self.returning and self.returning[0][0] <= now:
            self.returning.popleft()
        coming = sum(count for _, count in self.returning)
        out = fleet.outage_at_s <= now < fleet.outage_at_s + fleet.outage_s
        lost = round(fleet.outage * fleet.replicas) if out else 0
        serving = max(1, fleet.replicas - lost - self.lent - coming)
        capacity = serving * fleet.carries
        self.backlog = max(0.0, self.backlog + (rate - capacity) * self.step_s)
        load = min(rate / capacity, 0.999)
        self.delay = self.backlog / capacity + mean_wait(serving * fleet.slots, load, fleet.slots / fleet.carries)
        while self.lately and self.lately[-1][1] <= rate:
            self.lately.pop()
        self.lately.append((now, rate))
        if self.guard is not None:
            self._lend(now, rate, serving, coming)
        return max(0.0, serving - rate / fleet.carries)

    def _lend(self, now: float, rate: float, serving: int, coming: int) -> None:
        assert self.guard is not None
        while self.lately[0][0] < now - self.guard.window_s:
            self.lately.popleft()
        share = self.rules.share
        seen = FleetView(
            serving=serving,
            returning=coming,
            lent=self.lent,
            rate=rate,
            highest=self.lately[0][1],
            delay_s=self.delay,
            carries=self.fleet.carries,
            since_s=now - self.since,
        )
        change = lending(self.guard, seen, int(share / (1 - share) * self.fleet.workers))
        self.lent += change
        if change < 0:
            self.since = now
            self.returning.append((now + self.fleet.return_s, -change))
            self.back_at.append((now, -change))

    def train(self, now: float) -> tuple[float, float]:
        """One step of the workers. Returns how many sample, including lent replicas, and how many train."""
        fleet = self.fleet
        self.moving = [each for each in self.moving if each[0] > now]
        if now % fleet.step_s < self.step_s:
            change = moved(self.rules, fleet.workers, self.sampling, self.lent, self.observed)
            if change:
                self.sampling += change
                self.moves += abs(change)
                self.moving.append((now + fleet.switch_s, change))
        sampling = self.sampling - sum(change for _, change in self.moving if change > 0) + self.lent
        training = fleet.workers - self.sampling + sum(change for _, change in self.moving if change < 0)
        blend = self.step_s / _MEMORY_S
        self.observed += blend * (sampling / max(1, sampling + training) - self.observed)
        return float(sampling), float(training)


def simulate_lending(
    fleet: ServingFleet, guard: GuardRules | None, rules: ShareRules, rate_T: NDArray[np.float64], step_s: float
) -> Harvest:
    """Run the traffic `rate_T`: requests a second, a value for each step [T]. `guard` None: nothing is lent.

    Raises BadRequest for a fleet without replicas or workers, or a share outside of 0 to 1.
    """
    if min(fleet.replicas, fleet.workers) < 1 or not 0 < rules.share < 1:
        raise BadRequest("a fleet has at least one replica and one worker, and a share lies between 0 and 1")
    run = _Run(fleet, guard, rules, step_s)
    delay_T, lent_T, free_T, sampling_T, training_T = (np.zeros(len(rate_T)) for _ in range(5))
    for at, rate in enumerate(rate_T.tolist()):
        now = at * step_s
        free_T[at] = run.serve(now, rate)
        delay_T[at], lent_T[at] = run.delay, run.lent
        sampling_T[at], training_T[at] = run.train(now)
    late_T = delay_T > fleet.slo_s
    hours = np.zeros(int(len(rate_T) * step_s // 3600) + 1, dtype=int)
    for now, count in run.back_at:
        hours[int(now // 3600)] += count
    width = max(1, min(len(rate_T), round(WINDOW_S / step_s)))
    window_T = np.convolve(sampling_T, np.ones(width), "valid")
    whole_T = np.convolve(sampling_T + training_T, np.ones(width), "valid")
    return Harvest(
        violations=int(late_T.sum()),
        late=float(rate_T[late_T].sum() / rate_T.sum()) if rate_T.sum() else 0.0,
        worst_delay_s=float(delay_T.max()),
        harvested_h=float(lent_T.sum() * step_s / 3600),
        idle_h=float(free_T.sum() * step_s / 3600),
        preemptions=int(sum(count for _, count in run.back_at)),
        most_preemptions_h=int(hours.max()),
        moves=run.moves,
        share=float(sampling_T.sum() / (sampling_T + training_T).sum()),
        apart=float(np.abs(window_T / whole_T - rules.share).max()),
    )


# ---------------------------------------------------------------- Traffic


DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """Synthetic traffic: a daily wave with weekends, noise and bursts.

    The wave lies between `night` and 1 times `peak` requests a second, on weekends `weekend` times that. The rate wanders (log-normal,
    `noise`, over minutes). There are `bursts` bursts a day, log-uniform between 1.1 and `burst` times the rate, which rise within `rise_s`
    and fade over `fade_s`.

    Example: ``traffic_of(Diurnal(days=2), step_s=20.0, seed=0)``
    """

    days: int = 14
    peak: float = 100.0
    night: float = 0.15
    weekend: float = 0.6
    noise: float = 0.05
    bursts: float = 3.0
    burst: float = 1.5
    rise_s: float = 120.0
    fade_s: float = 900.0


def traffic_of(made: Diurnal, step_s: float, seed: int) -> NDArray[np.float64]:
    """Requests a second, one value for each step [T]. The same seed gives the same traffic."""
    rng = np.random.default_rng(seed)
    time_T = np.arange(round(made.days * DAY_S / step_s)) * step_s
    wave_T = 0.5 - 0.5 * np.cos(2 * np.pi * (time_T / DAY_S - 2 / 24))  # the minimum is at 2 a.m.
    rate_T = made.peak * (made.night + (1 - made.night) * wave_T)
    rate_T *= np.where((time_T // DAY_S) % 7 >= 5, made.weekend, 1.0)
    minutes = rng.normal(size=len(time_T))
    keep = np.exp(-step_s / 300.0)
    wander_T, last = np.empty(len(time_T)), 0.0
    for at, shock in enumerate(minutes.tolist()):
        last = keep * last + np.sqrt(1 - keep**2) * shock
        wander_T[at] = last
    rate_T *= np.exp(made.noise * wander_T)
    for start in np.sort(rng.random(rng.poisson(made.bursts * made.days))) * made.days * DAY_S:
        height = np.exp(rng.uniform(np.log(1.1), np.log(made.burst))) - 1
        since_T = time_T - start
        shape_T = np.clip(since_T / made.rise_s, 0, 1) * np.exp(-np.clip(since_T - made.rise_s, 0, None) / made.fade_s)
        rate_T *= 1 + height * shape_T
    return rate_T


def read_traffic(text: str, step_s: float) -> NDArray[np.float64]:
    r"""Read a trace from CSV with the header `seconds,requests_per_second`. Each rate holds until the next line's time, the last rate for
    as long as the one before.

    Raises BadRequest, which names the line, for a value that is not a number, a time that does not increase, or a negative rate.

    Example: ``read_traffic("seconds,requests_per_second\n0,5\n60,7\n", 20.0)`` has three times 5 and three times 7
    """
    rows = list(csv.reader(lines_of(text)))
    if not rows or [name.strip() for name in rows[0]] != ["seconds", "requests_per_second"]:
        raise BadRequest("line 1: the header is to be seconds,requests_per_second", field="seconds")
    times: list[float] = []
    rates: list[float] = []
    for number, row in enumerate(rows[1:], 2):
        try:
            time, rate = (float(value) for value in row)
        except ValueError:
            raise BadRequest(f"line {number}: two numbers are wanted, not {','.join(row)!r}", field="seconds") from None
        if not 0 <= rate < 1e12:
            raise BadRequest(f"line {number}: {rate} is no rate", field="requests_per_second")
        if not (times[-1] if times else -1e12) < time < 1e12:
            raise BadRequest(
                f"line {number}: {time} does not come after {times[-1] if times else 'any'}", field="seconds"
            )
        times.append(time)
        rates.append(rate)
    if len(times) < 2:
        raise BadRequest("a trace has at least two lines", field="seconds")
    time_T = np.arange(times[0], 2 * times[-1] - times[-2], step_s)
    return np.array(rates)[np.searchsorted(times, time_T, side="right") - 1]


# ---------------------------------------------------------------- Moving workers


def moved(rules: ShareRules, workers: int, sampling: int, borrowed: float, observed: float) -> int:
    """How many of `workers`, of which `sampling` sample now, should move from training to sampling (negative: back).

    The target is the number that gives the share together with `borrowed` samplers, corrected by the recent error (`observed` is the recent
    share). Call it only between two optimizer steps, so that no step loses a worker and new samplers begin with the newest version.

    Example: ``moved(ShareRules(share=0.5), workers=10, sampling=2, borrowed=0, observed=0.5) == 3``
    """
    whole = workers + borrowed
    wanted = rules.share * whole - borrowed + (rules.share - observed) * whole
    gap = min(float(workers), max(0.0, wanted)) - sampling
    if abs(gap) < rules.slack:
        return 0
    return max(-rules.moves, min(rules.moves, round(gap)))
