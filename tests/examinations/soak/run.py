"""An hour of `ostinato up` on the tiny model, a hundred simulated users, and whatever can go wrong, at random.

    python -m tests.examinations.soak.run [--minutes 60] [--users 100] [--every 12] [--seed 0] [--directory DIR]

Faults: kill -9 and SIGSTOP of workers, a full disk, a slow one, a held write lock, a reward function that raises, hangs or answers
nonsense, floods of feedback about nothing, a wall clock that jumps an hour ahead and behind. Nobody repairs anything. Passes if no
acknowledged turn or signal is lost or doubled, every turn finds its outcome once the users have left, the resident memory of each
process is flat within 5% over the last half, and what lies on the disk stays bounded. Writes results/soak.json. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
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

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table
from tests.examinations.soak.faults import Faults, workers
from tests.examinations.soak.users import SAMPLING, Told, messages, user
from tests.examinations.soak.weather import Weather

from ostinato.app.storage import Home, home, open_log
from ostinato.config import Config, load, save
from ostinato.core.records import Signal, Turn
from ostinato.reward.ledger import account
from ostinato.testing.tiny import tiny_model

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parents[1] / "results" / "soak.json"
SETTLED_S = 60.0  # a process younger than this is still growing to its size
console = Console()


@dataclass(frozen=True)
class Sample:
    """A look at the run: seconds since the start, resident bytes by process (with its age), bytes on the disk."""

    at: float
    resident: dict[str, int]
    ages: dict[str, float]
    disk: int


def configuration(directory: Path) -> Config:
    """Everything small and quick, so that an hour holds many segments, versions and collections."""
    model, suite = tiny_model(directory / "model"), directory / "suite.jsonl"
    item = {"family": "letters", "sampling": SAMPLING, "grader": "pattern", "pattern": "^[a-z]"}
    suite.write_text("".join(json.dumps(item | {"id": f"i{n}", "messages": messages(n)}) + "\n" for n in range(40)))
    return load(
        None,
        [f"run.directory='{directory / 'run'}'", f"model.source='{model}'", f"evaluate.suite='{suite}'", *SETTINGS],
    )


SETTINGS = [
    "model.dtype='float32'",
    "listen.port=0",
    "serve.control_share=0.2",
    "reward.function='tests.examinations.soak.reward:moody'",
    "reward.options={window=5.0}",
    "reward.max_staleness=12",
    "learn.batch=64",
    "learn.checkpoint_every=5",
    "learn.publish_every=2",
    "learn.max_lead=8",
    "train.compute='fp32'",
    "train.publish='fp32'",
    "train.learning_rate=2e-3",
    "train.turn_tokens=6",
    "evaluate.gate.margin=0.2",
    "release.outcomes.maturity_s=5.0",
    "follow.interval_s=0.5",
]


async def address(place: Home, process: subprocess.Popen[bytes]) -> str:
    """The gateway's URL, once it serves."""
    async with asyncio.timeout(300), aiohttp.ClientSession() as session:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"`ostinato up` ended with status {process.returncode}")
            if place.address.exists():
                url = place.address.read_text().strip().splitlines()[0]
                try:
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            return url
                except aiohttp.ClientError:
                    pass
            await asyncio.sleep(0.5)


def bytes_below(directory: Path) -> int:
    """What lies in a directory, sparse files by what they take."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


async def watch(supervisor: psutil.Process, place: Home, until: asyncio.Event, seen: list[Sample]) -> None:
    """A sample every five seconds."""
    begun = time.monotonic()
    while not until.is_set():
        resident, ages = {}, {}
        for name, process in {"up": supervisor, **workers(supervisor)}.items():
            try:
                resident[name], ages[name] = process.memory_info().rss, time.time() - process.create_time()
            except psutil.Error:
                continue
        disk = await asyncio.to_thread(bytes_below, place.root)
        seen.append(Sample(time.monotonic() - begun, resident, ages, disk))
        await asyncio.sleep(5.0)


def growth(seen: list[Sample]) -> dict[str, float]:
    """By process, how much larger it is in the last quarter than in the third one, of those that had settled."""
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


async def drained(config: Config, timeout_s: float) -> tuple[float, Any]:
    """Wait until no turn waits for its outcome. Returns the seconds that took (or the timeout), and the last count."""
    begun = time.monotonic()
    while True:
        with open_log(config) as log:
            found = await account(log)
        passed = time.monotonic() - begun
        if found.waiting == 0 or passed > timeout_s:
            return passed, found
        await asyncio.sleep(10.0)


async def losses(config: Config, told: Told) -> dict[str, int]:
    """What was acknowledged and is not in the log, is there twice, or says something else."""
    turns: Counter[str] = Counter()
    signals: Counter[str] = Counter()
    other = 0
    with open_log(config) as log:
        async for _, row in log.read(0, {Turn, Signal}):
            if isinstance(row, Turn):
                turns[row.id] += 1
                other += told.turns.get(row.id, row.text) != row.text
            elif isinstance(row, Signal):
                signals[row.id] += 1
    return {
        "turns lost": sum(turns[turn] == 0 for turn in told.turns),
        "turns doubled": sum(count > 1 for count in turns.values()),
        "turns with another text": other,
        "signals lost": sum(signals[event] == 0 for event in told.signals),
        "signals doubled": sum(count > 1 for count in signals.values()),
    }


async def soak(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    config = configuration(directory)
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
    place, told, until, seen = home(config), Told(), asyncio.Event(), list[Sample]()
    try:
        url = await address(place, process)
        supervisor = psutil.Process(process.pid)
        faults = Faults(supervisor, weather, place.log, mood, url, told, random.Random(args.seed))
        pause_s = args.users / args.rate
        crowd = [asyncio.create_task(user(f"sim-{n}", url, told, until, pause_s)) for n in range(args.users)]
        watching = asyncio.create_task(watch(supervisor, place, until, seen))
        raging = asyncio.create_task(faults.run(until, args.every))
        ends = time.monotonic() + 60 * args.minutes
        while time.monotonic() < ends and process.poll() is None:
            await asyncio.sleep(min(60.0, max(0.1, ends - time.monotonic())))
            last = seen[-1] if seen else None
            sizes = {name: size >> 20 for name, size in last.resident.items()} if last else {}
            console.print(
                f"{(last.at if last else 0) / 60:5.1f} min: {len(told.turns)} turns, {len(told.signals)} signals, "
                f"{sum(faults.done.values())} faults, MiB {sizes}, disk {(last.disk if last else 0) >> 20} MiB",
                highlight=False,
            )
        alive = process.poll() is None
        until.set()
        await asyncio.gather(*crowd, watching)
        raging.cancel()
        weather.clear()
        mood.write_text("fine")
        seconds, counted = await drained(config, args.drain)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()
            status = await asyncio.to_thread(process.wait)
    return {
        "minutes": args.minutes,
        "users": args.users,
        "seed": args.seed,
        "ran to the end": alive,
        "exit status": status,
        "acknowledged": {"turns": len(told.turns), "signals": len(told.signals)},
        "refused": dict(told.refused.most_common()),
        "faults": dict(sorted(faults.done.items())),
        "losses": await losses(config, told),
        "drained after s": round(seconds, 1),
        "outcomes": asdict(counted) | {"held": dict(counted.held)},
        "memory growth, third to last quarter": growth(seen),
        "resident MiB at the end": {name: size >> 20 for name, size in seen[-1].resident.items()},
        "disk MiB": {"half": _disk(seen, 0.5), "most": max(s.disk for s in seen) >> 20, "end": _disk(seen, 1.0)},
    }


def _disk(seen: list[Sample], share: float) -> int:
    return max(s.disk for s in seen if s.at <= share * seen[-1].at) >> 20


def verdict(found: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    wrong = [f"{what}: {count}" for what, count in found["losses"].items() if count]
    if not found["ran to the end"]:
        wrong.append("`ostinato up` ended before its time")
    if found["outcomes"]["waiting"]:
        wrong.append(f"{found['outcomes']['waiting']} turns still wait for their outcome")
    growing = found["memory growth, third to last quarter"]
    wrong += [f"{name} grew by {share:.1%}" for name, share in growing.items() if share > 0.05]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rate", type=float, default=25.0, help="turns that all users together ask for in a second")
    parser.add_argument(
        "--every", type=float, default=12.0, help="seconds of fine weather between two faults, on average"
    )
    parser.add_argument(
        "--drain", type=float, default=600.0, help="seconds that the last turns have to find their outcome"
    )
    parser.add_argument("--seed", type=int, default=0)
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
