"""The faults of network and hosts while people are served, one after the other, with the times at which each began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.examinations.hosts.lab import Lab
from tests.examinations.hosts.servers import PostgresHost
from tests.examinations.hosts.settings import Plan

ROUND_TRIP_S = (0.020, 0.050)
POSTGRES_S = 3.0
"""Seconds that Postgres is down after its kill -9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault; times are Unix seconds."""

    name: str
    began: float
    ended: float


@dataclass
class Storm:
    """Injects the faults. `boot(name)` restarts a host and its workers; `trains()` names the active trainer."""

    lab: Lab
    plan: Plan
    log: PostgresHost
    boot: Callable[[str], None]
    trains: Callable[[], str]
    alive: Callable[[], bool]
    events: list[Event] = field(default_factory=list[Event])

    def rage(self) -> None:
        """Inject all faults, spread over the time of traffic. Returns when the last is over."""
        began = time.monotonic()
        lease = self.plan.lease_s
        second = 1.0 if self.plan.tiny else 3.0  # a real model learns and swaps more slowly
        steps: list[tuple[float, Callable[[], None]]] = [
            (0.08, self.latency),
            (0.14, lambda: self.cut("gateway-2 cut off from Postgres", 20.0, ("gateway-2", "log"))),
            (0.30, lambda: self.cut_trainer(2.5 * lease + 5.0)),
            (0.46, lambda: self.cut("release worker cut off from Postgres", 2.5 * lease, ("release", "log"))),
            (0.56, lambda: self.cut("follower-1 cut off from the store", 15.0 * second, ("follower-1", "bucket"))),
            (0.68, self.kill_postgres),
            (0.76, lambda: self.kill_host("gateway-1", 8.0 * second)),
        ]
        for share, step in steps:
            while time.monotonic() < began + 60 * self.plan.minutes * share and self.alive():
                time.sleep(0.2)
            if not self.alive():
                return
            step()

    def latency(self) -> None:
        self.lab.round_trips(*ROUND_TRIP_S, seed=self.plan.seed)
        self._note("round trips of 20 to 50 ms from now on", time.time())

    def cut(self, name: str, seconds: float, *pairs: tuple[str, str]) -> None:
        began = time.time()
        self.lab.cut(name, *pairs)
        time.sleep(seconds)
        self.lab.heal(name)
        self._note(name, began)

    def cut_trainer(self, seconds: float) -> None:
        name = self.trains()
        self.cut(f"{name} cut off from Postgres", seconds, (name, "log"))

    def kill_postgres(self) -> None:
        began = time.time()
        self.log.kill()
        time.sleep(POSTGRES_S)
        self.log.start()
        self._note("Postgres killed with -9, and started again", began)

    def kill_host(self, name: str, seconds: float) -> None:
        began = time.time()
        self.lab[name].kill()
        time.sleep(seconds)
        self.boot(name)
        self._note(f"{name}'s host lost its power, and started again", began)

    def _note(self, name: str, began: float) -> None:
        self.events.append(Event(name=name, began=began, ended=time.time()))
        print(f"{time.strftime('%H:%M:%S')} {name}: {time.time() - began:.1f} s", flush=True)
