"""An hour of `ostinato up` on the tiny model with a hundred simulated users and random faults.

    python -m tests.examinations.soak.run [--minutes 60] [--users 100] [--rate 10] [--every 30] [--seed 0] [--attackers] [--directory DIR]

Faults: kill -9 and SIGSTOP of workers, a full disk, a slow one, a held write lock, a reward function that raises, hangs or answers
nonsense, floods of feedback about unknown turns, a wall clock that jumps four minutes ahead and behind. The log keeps ten minutes, so an
hour also exercises retention. Nothing is repaired by hand.

Passes if no acknowledged turn or signal is lost or duplicated, every turn finds its outcome once the users have left, and `up` runs
to the end and exits cleanly; and, for half an hour or more, if the resident memory of each process and the use of the
disk are flat over the last half (5% and 15%). Writes results/soak.json. Needs a C compiler.

`--attackers`: the attacks of `tests.examinations.siege` beside it, by another tenant with a key and by strangers; no answer to them may
be wrong, either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tests.examinations.siege.crew import UNDER_FAULTS, Crew, not_right, target
from tests.examinations.soak.faults import Faults, reward_process, workers
from tests.examinations.soak.users import SAMPLING, Told, messages, user
from tests.examinations.soak.weather import Weather

from ostinato.app.storage import Home, home, open_folds, open_log
from ostinato.config import Config, load, save
from ostinato.core.records import Signal, Turn
from ostinato.launch.commands.demo import ready
from ostinato.reward.accounting import account
from ostinato.testing.tiny import tiny_model

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parents[1] / "results" / "soak.json"
SETTLED_S = 180.0  # a younger process is still growing to its working size
KEYS = {"bolt": "sk-bolt-5d1c6a0b9f43", "acme": "sk-acme-90e7b2d4c815"}  # with attackers: the users' and theirs
LONG_MIN = 30.0  # minutes from which growth is judged
console = Console()


@dataclass(frozen=True)
class Sample:
    """A sample of the run: seconds since the start, resident bytes and age by process, bytes on the disk."""

    at: float
    resident: dict[str, int]
    ages: dict[str, float]
    disk: int


def configuration(directory: Path, *, keyed: bool) -> Config:
    """A configuration with everything small and quick, so that an hour holds many segments, versions and collections."""
    model, suite = tiny_model(directory / "model"), directory / "suite.jsonl"
    item = {"family": "letters", "sampling": SAMPLING, "grader": "pattern", "pattern": "^[a-z]"}
    suite.write_text("".join(json.dumps(item | {"id": f"i{n}", "messages": messages(n)}) + "\n" for n in range(40)))
    own = [f"run.directory='{directory / 'run'}'", f"model.source='{model}'", f"evaluate.suite='{suite}'"]
    own += [f"serve.api_keys={[f'{tenant}:{key}' for tenant, key in KEYS.items()]}"] if keyed else []
    return load(None, [*own, *SETTINGS])


SETTINGS = [
    "model.name='tiny'",
    "model.dtype='float32'",
    "model.numerics='fast'",  # a start takes seconds
    "listen.port=0",
    "serve.control_share=0.2",
    "record.retain_days=0.007",
    "record.segment_rows=5000",
    "record.segment_hours=0.03",
    "reward.function='tests.examinations.soak.reward:moody'",
    "reward.options={window=5.0}",
    "reward.max_staleness=12",
    "reward.batch_wait_s=60",
    "learn.batch=64",
    "learn.checkpoint_every=5",
    "learn.publish_every=2",
    "learn.max_lead=8",
    "train.compute='fp32'",
    "train.publish='fp32'",
    "train.learning_rate=2e-3",
    "train.turn_tokens=6",
    "evaluate.gate.margin=0.2",
    "evaluate.gate.total_margin=0.3",
    "evaluate.gate.candidates_per_week=1",
    "evaluate.gate.sealed_share=0.0",
    "evaluate.gate.first_draws=2",
    "release.outcomes.maturity_s=5.0",
    "follow.interval_s=0.5",
    "collect.keep=5",
    "collect.releases=3",
    "collect.grace_hours=0.05",
    "housekeeping.every_s=30",
    "housekeeping.log_mb=0.5",
]


async def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process that is told to end, and killed after a minute."""
    process.send_signal(signal.SIGTERM)
    try:
        return await asyncio.to_thread(process.wait, 60)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)


async def address(place: Home, process: subprocess.Popen[bytes], slots: tuple[str, ...] = ("live", "control")) -> str:
    """The gateway's URL, once it serves these slots."""
    seeking = asyncio.create_task(ready(place, slots))
    async with asyncio.timeout(600):
        while not seeking.done():
            if process.poll() is not None:
                raise SystemExit(f"`ostinato up` ended with status {process.returncode}")
            await asyncio.wait({seeking}, timeout=0.5)
    return await seeking


def bytes_below(directory: Path) -> int:
    """Bytes that a directory's files occupy on disk, so that sparse files count only their blocks."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def processes(supervisor: psutil.Process) -> dict[str, psutil.Process]:
    """Every process of the run, by name."""
    found = {"up": supervisor, **workers(supervisor)}
    with contextlib.suppress(KeyError, psutil.Error):
        if (child := reward_process(found["train"])) is not None:
            found["reward"] = child
    return found


async def watch(supervisor: psutil.Process, place: Home, until: asyncio.Event, seen: list[Sample]) -> None:
    """Take a sample every five seconds."""
    begun = time.monotonic()
    while not until.is_set():
        resident, ages = {}, {}
        for name, process in processes(supervisor).items():
            try:
                resident[name], ages[name] = process.memory_info().rss, time.time() - process.create_time()
            except psutil.Error:
                continue
        disk = await asyncio.to_thread(bytes_below, place.root)
        seen.append(Sample(time.monotonic() - begun, resident, ages, disk))
        await asyncio.sleep(5.0)


def growth(seen: list[Sample]) -> dict[str, float]:
    """Relative memory growth from the third to the last quarter, for each process old enough to have settled."""
    end = seen[-1].at
    found: dict[str, float] = {}
    for name in sorted({name for sample in seen for name in sample.resident}):
        sizes = [
            [s.resident[name] for s in seen if low * end <= s.at < high * end and s.ages.get(name, 0) > SETTLED_S]
            for low, high in ((0.5, 0.75), (0.75, 1.01))
        ]
        if all(sizes):
            found[name] = median(sizes[1]) / median(sizes[0]) - 1
    return found


def peaks(seen: list[Sample]) -> dict[str, list[int]]:
    """Each process's peak MiB in each quarter."""
    end = seen[-1].at + 1e-9
    names = sorted({name for sample in seen for name in sample.resident})
    return {
        name: [
            max(
                (s.resident[name] >> 20 for s in seen if name in s.resident and int(4 * s.at / end) == quarter),
                default=0,
            )
            for quarter in range(4)
        ]
        for name in names
    }


async def drained(config: Config, timeout_s: float) -> tuple[float, Any]:
    """Wait until no turn waits for its outcome. Returns the seconds this took (or the timeout), and the last count."""
    begun = time.monotonic()
    while True:
        with open_log(config) as log:
            found = await account(log, open_folds(config), config.reward)
        passed = time.monotonic() - begun
        if found.waiting == 0 or passed > timeout_s:
            return passed, found
        await asyncio.sleep(10.0)


class Auditor:
    """Reads the log as it grows and records its turns and signals, since retention may drop them later."""

    def __init__(self, config: Config) -> None:
        self._config, self._cursor = config, 0
        self.turns: dict[str, str] = {}
        self.signals: set[str] = set()
        self.doubled: Counter[str] = Counter()

    async def follow(self) -> None:
        """Read new rows until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(5.0)

    async def look(self) -> None:
        """Read the new rows."""
        with open_log(self._config) as log:
            async for cursor, row in log.read(self._cursor, {Turn, Signal}):
                self._cursor = cursor
                if isinstance(row, Turn):
                    self.doubled["turns"] += row.id in self.turns
                    self.turns[row.id] = row.text
                elif isinstance(row, Signal):
                    self.doubled["signals"] += row.id in self.signals
                    self.signals.add(row.id)

    def losses(self, told: Told) -> dict[str, int]:
        """Counts of acknowledged turns and signals that were never in the log, are there twice, or have another text."""
        return {
            "turns lost": sum(turn not in self.turns for turn in told.turns),
            "turns doubled": self.doubled["turns"],
            "turns with another text": sum(self.turns.get(turn, text) != text for turn, text in told.turns.items()),
            "signals lost": len(told.signals - self.signals),
            "signals doubled": self.doubled["signals"],
        }


async def soak(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    config, key = configuration(directory, keyed=args.attackers), KEYS["bolt"] if args.attackers else ""
    settings, mood, output = directory / "soak.json", directory / "mood", directory / "up.log"
    save(config, settings)
    mood.write_text("fine")
    weather = Weather(directory)
    environment = os.environ | weather.environment() | {"OSTINATO_MOOD": str(mood), "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    with output.open("wb") as file:
        process = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs yet)
            [sys.executable, "-m", "ostinato.cli", "up", "--config", str(settings)],
            env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
    place, told, until, seen, auditor = home(config), Told(), asyncio.Event(), list[Sample](), Auditor(config)
    crew = Crew(directory)
    try:
        url = await address(place, process)
        if args.attackers:
            crew.attack(await target(url, KEYS["acme"]))
        supervisor = psutil.Process(process.pid)
        faults = Faults(supervisor, weather, place.log, mood, url, told, random.Random(args.seed), key)
        pause_s = args.users / args.rate
        crowd = [asyncio.create_task(user(f"sim-{n}", url, told, until, pause_s, key)) for n in range(args.users)]
        watching = asyncio.create_task(watch(supervisor, place, until, seen))
        raging = asyncio.create_task(faults.run(until, args.every))
        auditing = asyncio.create_task(auditor.follow())
        ends = time.monotonic() + 60 * args.minutes
        while time.monotonic() < ends and process.poll() is None:
            await asyncio.sleep(min(60.0, max(0.1, ends - time.monotonic())))
            last = seen[-1] if seen else None
            sizes = {name: size >> 20 for name, size in last.resident.items()} if last else {}
            console.print(
                f"{(last.at if last else 0) / 60:5.1f} min: {len(told.turns)} turns, {len(told.signals)} signals, "
                f"{sum(faults.done.values())} faults, MiB {sizes}, disk {(last.disk if last else 0) >> 20} MiB, "
                f"refused {dict(told.refused)}",
                highlight=False,
                soft_wrap=True,
            )
        alive = process.poll() is None
        crew.stop()
        until.set()
        await asyncio.gather(*crowd, watching)
        raging.cancel()
        for task in (raging, auditing):
            if task.done() and not task.cancelled():
                task.result()  # raises errors of the examination itself
        weather.clear()
        mood.write_text("fine")
        seconds, counted = await drained(config, args.drain)
        auditing.cancel()
        await auditor.look()
    finally:
        crew.stop()
        status = await ended(process)
    return {
        "minutes": args.minutes,
        "users": args.users,
        "seed": args.seed,
        "attacks": {name: dict(counts) for name, counts in crew.tally().outcomes.items()},
        "wrong answers": crew.tally().wrong,
        "ran to the end": alive,
        "exit status": status,
        "acknowledged": {"turns": len(told.turns), "signals": len(told.signals)},
        "refused": dict(told.refused.most_common()),
        "faults": dict(sorted(faults.done.items())),
        "losses": auditor.losses(told),
        "drained after s": round(seconds, 1),
        "outcomes": asdict(counted),
        "balanced": counted.balanced,
        "memory growth, third to last quarter": growth(seen),
        "most resident MiB, by quarter": peaks(seen),
        "resident MiB at the end": {name: size >> 20 for name, size in seen[-1].resident.items()},
        "most MiB on the disk, by quarter": [_disk(seen, quarter) for quarter in range(4)],
        "MiB on the disk at the end": {
            path.name: bytes_below(path) >> 20 for path in place.root.iterdir() if path.is_dir()
        },
    }


def _disk(seen: list[Sample], quarter: int) -> float:
    return round(max(s.disk for s in seen if quarter <= 4 * s.at / (seen[-1].at + 1e-9) <= quarter + 1) / 2**20, 1)


def verdict(found: dict[str, Any]) -> list[str]:
    """The violated requirements."""
    wrong = [f"{what}: {count}" for what, count in found["losses"].items() if count]
    wrong += not_right(found["attacks"], UNDER_FAULTS) if found["attacks"] else []
    if not found["ran to the end"]:
        wrong.append("`ostinato up` ended before its time")
    if found["exit status"]:
        wrong.append(f"`ostinato up` ended with status {found['exit status']}")
    if found["outcomes"]["waiting"]:
        wrong.append(f"{found['outcomes']['waiting']} turns still wait for their outcome")
    if not found["balanced"]:
        wrong.append("the turns do not add up")
    if found["minutes"] >= LONG_MIN:
        growing = found["memory growth, third to last quarter"]
        wrong += [f"{name} grew by {share:.1%}" for name, share in growing.items() if share > 0.05]
        third, last = found["most MiB on the disk, by quarter"][2:]
        wrong += [f"the disk grew from {third} to {last} MiB"] if last > 1.15 * third else []
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0, help="turns that all users together ask for in a second")
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds of fine weather between two faults, on average"
    )
    parser.add_argument(
        "--drain", type=float, default=600.0, help="seconds that the last turns have to find their outcome"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackers", action="store_true", help="beside the attacks of tests.examinations.siege")
    parser.add_argument("--directory", type=Path, help="keep the run here (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        directory = args.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(soak(args, directory))
    found["problems"] = verdict(found)
    table = Table(show_header=False)
    for name, value in found.items():
        table.add_row(name, json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    console.print(table)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
