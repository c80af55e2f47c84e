"""The soak's faults: one at a time, at random. The examination undoes only those that would pass by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pysqlite3.dbapi2 as sqlite
from tests.examinations.soak.users import Told, flood
from tests.examinations.soak.weather import Weather

WORKERS = ("serve", "train", "release", "housekeeping")


def workers(supervisor: psutil.Process) -> dict[str, psutil.Process]:
    """The running worker processes, by name."""
    found: dict[str, psutil.Process] = {}
    for child in supervisor.children():
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        name = next((word for word in words if word in WORKERS), None)
        if name is not None and "ostinato.cli" in words:
            found[name] = child
    return found


def reward_process(trainer: psutil.Process) -> psutil.Process | None:
    """The trainer's reward process, if it is running."""
    for child in trainer.children():
        with contextlib.suppress(psutil.Error):
            if "ostinato.reward.child" in child.cmdline():
                return child
    return None


@dataclass
class Faults:
    """Injects the faults. `log` is the directory of the run's log, `mood` the file that the reward function reads."""

    supervisor: psutil.Process
    weather: Weather
    log: Path
    mood: Path
    url: str
    told: Told
    dice: random.Random
    key: str = ""
    done: Counter[str] = field(default_factory=Counter)

    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Every fault by name."""
        return {
            "kill -9": self.kill,
            "SIGSTOP": self.stop,
            "full disk": lambda: self._while(10.0, full=1),
            "slow disk": lambda: self._while(15.0, sync_us=300_000),
            "held lock": self.hold,
            "reward raises": lambda: self._mood("raise", 15.0),
            "reward hangs": lambda: self._mood("hang", 20.0),
            "reward is nonsense": lambda: self._mood("nonsense", 15.0),
            "orphans": lambda: flood(self.url, 5_000, self.told, self.key),
            "clock ahead": lambda: self._while(15.0, clock_ns=240 * 10**9),
            "clock behind": lambda: self._while(15.0, clock_ns=-240 * 10**9),
        }

    async def run(self, until: asyncio.Event, every_s: float) -> None:
        """Inject one fault after the other, with pauses in between. Each kind occurs before any occurs twice."""
        bag: list[str] = []
        while not until.is_set():
            if not bag:
                bag = list(self.kinds())
                self.dice.shuffle(bag)
            name = bag.pop()
            await self.kinds()[name]()
            self.done[name] += 1
            await asyncio.sleep(self.dice.uniform(0.5, 1.5) * every_s)

    async def kill(self) -> None:
        """Kill a random worker."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop a random worker with SIGSTOP; only its supervisor can recover it."""
        self._signal(signal.SIGSTOP)

    async def hold(self) -> None:
        """Hold the log's write lock from another process for eight seconds."""
        newest = max(self.log.glob("*.db"), key=lambda path: path.name)

        def held() -> None:
            connection = sqlite.connect(str(newest), timeout=5.0, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(8.0)
            connection.execute("ROLLBACK")
            connection.close()

        try:
            await asyncio.to_thread(held)
        except sqlite.OperationalError:
            self.done["held lock (not got)"] += 1

    def _signal(self, number: signal.Signals) -> None:
        running = workers(self.supervisor)
        if running:
            os.kill(running[self.dice.choice(sorted(running))].pid, number)

    async def _while(self, seconds: float, **weather: int) -> None:
        self.weather.set(**weather)
        await asyncio.sleep(seconds)
        self.weather.clear()

    async def _mood(self, mood: str, seconds: float) -> None:
        self.mood.write_text(mood)
        await asyncio.sleep(seconds)
        self.mood.write_text("fine")
