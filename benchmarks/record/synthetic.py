"""The size of the log, and the start-up time of each of its readers.

    python -m benchmarks.record.synthetic --out DIRECTORY --turns 100000 1000000 10000000

For each size it makes a run in DIRECTORY whose log holds that many turns of synthetic traffic (`traffic.py`): the first segment is written
by the real writer, the other closed segments are copies of it (`copies.py`), and the newest, open segment is written by the writer again.
Then each reader that starts with the product is started in its own process (`starts.py`), from its saved folds. Results go to
benchmarks/results/log_size.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contender import RESULTS, ROOT
from benchmarks.record.copies import Offsets, Pattern, copy
from benchmarks.record.starts import READERS, Start, folded
from benchmarks.record.traffic import CALL_S, START, Draws, Shape, Traffic
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato.core.records import Row
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.segment_directory import LogDirectory

BULK = 64  # rows per append
NEWEST = 2_000  # turns that the open segment holds
BYTES_A_TURN = 1_500  # a generous estimate, for the check of free disk space
SEGMENT_ROWS = RecordConfig().segment_rows
PATIENT = RecordConfig(append_s=3600.0, segment_hours=1e6)  # the machine may be busy; the clock is the traffic's


async def write(log: SqlLog, shape: Shape, traffic: Traffic, turns: int, rows: int, progress: Progress) -> None:
    """Append traffic until it has `turns` turns or nearly fills a segment of `rows` rows, then wait for the pending appends."""
    task = progress.add_task("written", total=min(turns, rows // 4))
    block: list[Row] = []
    waiting: set[asyncio.Future[int]] = set()
    for call in traffic.calls(turns):
        block += call
        if len(block) >= BULK:
            waiting.add(asyncio.ensure_future(log.append(*block)))
            block = []
            progress.update(task, completed=traffic.turns)
        if len(waiting) >= 8:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        if traffic.rows >= rows - 3 * BULK - 4 * shape.batch - int(70 / CALL_S):
            break
    await asyncio.gather(*waiting)
    await log.append(*block)


async def made_pattern(out: Path, shape: Shape, progress: Progress) -> dict[str, float]:
    """Write the segment that the others are copies of, unless it exists. Returns figures on the writer's speed."""
    told = out / "pattern.json"
    if not told.exists():
        shutil.rmtree(out / "pattern", ignore_errors=True)
        draws = Draws(shape.seed)
        traffic, cpu, wall = Traffic(shape, draws), time.process_time(), time.perf_counter()
        with SqlLog.open(out / "pattern", lambda: traffic.now, PATIENT) as log:
            log.derive_text(draws.pieces.__getitem__)
            await write(log, shape, traffic, 1 << 62, SEGMENT_ROWS, progress)
            for rows in traffic.finish():
                await log.append(*rows)
        figures = {"writer's cpu us a turn, traffic included": (time.process_time() - cpu) / traffic.turns * 1e6}
        figures |= {"writer's turns a second of wall clock": traffic.turns / (time.perf_counter() - wall)}
        with SqlLog.open(
            out / "pattern", lambda: traffic.now, PATIENT.model_copy(update={"segment_rows": 1, "retain_days": 1e5})
        ) as log:
            await log.drop_old(traffic.now, 0)  # drops nothing, and closes the segment
        told.write_text(json.dumps(figures | {"span": traffic.now - START}))
    return json.loads(told.read_text())


def made_copies(out: Path, pattern: Pattern, span: float, count: int, progress: Progress) -> float:
    """Make the missing ones of `count` copies of the pattern. Returns CPU microseconds per turn, 0 if none were missing."""
    place, partial = LogDirectory(out / "segments"), LogDirectory(out / f"partial-{os.getpid()}")
    place.prepare()
    partial.prepare()
    cpu, made = time.process_time(), 0
    for index in progress.track(range(1, count + 1), description="segments"):
        offsets = offsets_of(pattern, span, index)
        path = place.segment(pattern.first + offsets.place)
        if not path.exists():
            copy(pattern, partial, offsets, index).replace(path)
            made += 1
    shutil.rmtree(partial.path)
    return (time.process_time() - cpu) / (made * pattern.turns) * 1e6 if made else 0.0


def offsets_of(pattern: Pattern, span: float, index: int) -> Offsets:
    return Offsets(index * pattern.rows, index * span, index * pattern.steps, index * pattern.numbers)


async def make(out: Path, turns: int, shape: Shape, progress: Progress) -> dict[str, float]:
    """Make the log of a run with this many turns: hard links to segments that all sizes share, and an open segment of its own."""
    run = out / str(turns)
    shutil.rmtree(run, ignore_errors=True)
    figures = await made_pattern(out, shape, progress)
    span, pattern = figures.pop("span"), Pattern(LogDirectory(out / "pattern").segment(1))
    copies = max(0, -(-(turns - NEWEST - pattern.turns) // pattern.turns))
    took = await asyncio.to_thread(made_copies, out, pattern, span, copies, progress)
    log_directory = LogDirectory(run / "log")
    log_directory.prepare()
    os.link(LogDirectory(out / "pattern").segment(1), log_directory.segment(1))
    for index in range(1, copies + 1):
        path = log_directory.segment(pattern.first + offsets_of(pattern, span, index).place)
        os.link(out / "segments" / path.name, path)
    after = offsets_of(pattern, span, copies + 1)
    newest = Traffic(shape, Draws(shape.seed + 1), START + after.seconds, after.number, after.step)
    newest.rows = after.place
    with SqlLog.open(run / "log", lambda: newest.now, PATIENT) as log:
        await write(log, shape, newest, NEWEST, after.place + SEGMENT_ROWS, progress)
        figures |= {"rows": float(log.newest()), "copies' cpu us a turn": took}
    return figures | {"turns": float((copies + 1) * pattern.turns + newest.turns), "segments": float(copies + 2)}


def size(directory: Path) -> int:
    """Bytes that a log's files occupy on disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def started(reader: str, run: Path) -> Start:
    """Start a reader in a process of its own, and return the cost that it reports."""
    command = [sys.executable, "-m", "benchmarks.record.starts", reader, str(run)]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Start(**json.loads(said.splitlines()[-1]))


async def measure(out: Path, turns: int, shape: Shape, fold_turns: int, readers: list[str]) -> dict[str, Any]:
    run = out / str(turns)
    made = run / "made.json"
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as progress:
        if not made.exists():
            figures = await make(out, turns, shape, progress)
            made.write_text(json.dumps(figures))
        figures = json.loads(made.read_text())
        figures["bytes a turn"] = size(run / "log") / figures["turns"]
        if not (run / "folded.json").exists():
            task = progress.add_task("folded", total=min(fold_turns, int(figures["turns"])))
            done = await folded(run, figures, fold_turns, lambda count: progress.update(task, completed=count))
            (run / "folded.json").write_text(json.dumps(done))
    figures |= json.loads((run / "folded.json").read_text())
    starts = {name: asdict(started(name, run)) for name in readers}
    return {"turns": turns, "figures": figures, "starts": starts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, nargs="+", default=[100_000])
    parser.add_argument(
        "--fold-turns", type=int, default=1_000_000, help="the newest turns that the kept folds are made of"
    )
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--save", type=Path, default=RESULTS / "log_size.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    missing = [turns for turns in args.turns if not (args.out / str(turns) / "made.json").exists()]
    free, wanted = shutil.disk_usage(args.out).free, sum(missing) * BYTES_A_TURN
    if free < 2 * wanted:
        raise SystemExit(f"{args.out} has {free / 1e9:.0f} GB free, and {2 * wanted / 1e9:.0f} GB are wanted")
    results = json.loads(args.save.read_text()) if args.save.exists() else {"shape": asdict(Shape()), "sizes": {}}
    for turns in args.turns:
        found = asyncio.run(measure(args.out, turns, Shape(), args.fold_turns, args.readers))
        starts = results["sizes"].get(str(turns), {}).get("starts", {}) | found["starts"]
        results["sizes"][str(turns)] = found | {"starts": starts}
        args.save.write_text(json.dumps(results, indent=1) + "\n")
        for name, value in found["figures"].items():
            print(f"{turns:>10,} {name:<44} {value:14,.1f}")
        for name, start in found["starts"].items():
            print(
                f"{turns:>10,} {name:<44} {start['seconds']:8.2f} s  {start['cpu_seconds']:8.2f} cpu s  {start['peak_mb']:6.0f} MB"
            )


if __name__ == "__main__":
    main()
