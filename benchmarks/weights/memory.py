"""Peak memory of a publisher and of a follower, each in its own process, relative to one copy of the weights.

    python -m benchmarks.weights.chains --run runs/demo-0 --rates 1e-5    # makes the versions
    python -m benchmarks.weights.memory [--rate 1e-5] [--step 20] [--times 10]

*at rest* is resident memory before the call, and *peak* the highest during it (VmHWM, reset before). The publisher gets weights that its
caller holds. It keeps the previous weights, the base of the delta, in a file as the trainer's publisher does, or in memory; then they
count as *extra*, because the caller has released them. The follower holds one version and fetches the next, or one that is further ahead;
the version held counts as *at rest*. So does the compiled code that a process loads with its first delta (about 65 MB, once), because a
small delta is encoded and decoded first. Writes benchmarks/results/weight_memory.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.contender import RESULTS, machine
from benchmarks.weights.codec import CHAINS
from benchmarks.weights.links_trainer import warm

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import WeightArray, Weights
from ostinato.model.cpu import trim_heap
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process, MB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """Reset VmHWM, after returning free heap pages to the system so that their reuse cannot hide new allocations."""
    gc.collect()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")


async def versions(source: Path) -> dict[int, PolicyVersion]:
    """The recorded versions by number."""
    log = await Follower(DirectoryStore(source)).log("live", limit=10_000)
    return {manifest.number: manifest.policy for manifest in log}


async def copied(source: Path, policy: PolicyVersion) -> Weights:
    """A version in arrays of its own."""
    weights = await Follower(DirectoryStore(source)).fetch(policy)
    return {name: WeightArray(array.dtype, array.shape, array.data.copy()) for name, array in weights.items()}


async def widened(source: Path, target: Path, step: int, times: int) -> None:
    """Publish the versions that the cases need for a model `times` as large: `times` copies of every tensor, under new names."""
    chain, base = await versions(source), None
    follower, ours = Follower(DirectoryStore(source)), VersionPublisher(DirectoryStore(target))
    for number in range(step, step + 6):
        once = await follower.fetch(chain[number])
        many = {f"copy{i}.{name}": array for i in range(times) for name, array in once.items()}
        base = (await ours.publish(number, many, run="m", base=base, ref="live")).policy


async def publisher(source: Path, step: int, *, anchor: int, disk: bool) -> dict[str, float]:
    """Publish versions and measure the last publication. With `anchor` 1 it writes a full snapshot beside the delta."""
    chain = await versions(source)
    old, new = await copied(source, chain[step]), await copied(source, chain[step + 1])
    size = sum(array.data.nbytes for array in new.values()) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        store = DirectoryStore(Path(scratch, "store"))
        ours = VersionPublisher(store, PublisherConfig(anchor_every=anchor, scratch=Path(scratch) if disk else None))
        first = await ours.publish(step, old, run="m", base=None)
        if anchor == 1:
            middle = {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in old.items()}
            next(iter(middle.values())).data[0] ^= 1
            first = await ours.publish(step, middle, run="m", base=first.policy)
            del middle
        del old
        forget_peak()
        rest = resident("VmRSS") - (0 if disk else size)
        await ours.publish(step + 1, new, run="m", base=first.policy)
        return {"copy_mb": size, "rest_mb": rest, "peak_mb": resident("VmHWM")}


async def follower(source: Path, have: int, want: int) -> dict[str, float]:
    """Fetch `want` while holding `have`, or holding nothing if `have` is -1."""
    chain = await versions(source)
    ours = Follower(DirectoryStore(source), FollowerConfig(keep=1))
    if have >= 0:
        await ours.fetch(chain[have])
    forget_peak()
    rest = resident("VmRSS")
    weights = await ours.fetch(chain[want])
    size = sum(array.data.nbytes for array in weights.values()) / 1e6
    return {"copy_mb": size, "rest_mb": rest, "peak_mb": resident("VmHWM")}


CASES = {
    "publisher, delta": lambda source, step: publisher(source, step, anchor=25, disk=True),
    "publisher, delta and full snapshot": lambda source, step: publisher(source, step, anchor=1, disk=True),
    "the same, base in memory": lambda source, step: publisher(source, step, anchor=1, disk=False),
    "follower, next version": lambda source, step: follower(source, step, step + 1),
    "follower, five versions on": lambda source, step: follower(source, step, step + 5),
    "follower, from nothing": lambda source, step: follower(source, -1, step),
}


def measure(source: Path, step: int) -> dict[str, dict[str, float]]:
    """Run every case in a process of its own, and print a table."""
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':<36}{'copy':>9}{'at rest':>10}{'peak':>10}{'extra':>10}{'copies':>9}")
    for case in CASES:
        row = rows[case] = json.loads(child("--source", str(source), "--step", str(step), "--case", case))
        extra = row["peak_mb"] - row["rest_mb"]
        print(
            f"{case:<36}{row['copy_mb']:>6.0f} MB{row['rest_mb']:>7.0f} MB{row['peak_mb']:>7.0f} MB{extra:>7.0f} MB"
            f"{extra / row['copy_mb']:>9.2f}"
        )
    return rows


def child(*words: str) -> str:
    """Run this script with these arguments. Returns its output."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.weights.memory", *words], stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, default=CHAINS)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--times", type=int, default=1, help="a model this many times as large")
    parser.add_argument("--source", type=Path, help="measure one case, in this process, on the versions here")
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--widen", type=Path, help="only write the versions of the larger model, to here")
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_memory.json")
    args = parser.parse_args()
    recorded = args.chains / f"{args.rate:g}"
    if args.case:
        asyncio.run(warm())
        print(json.dumps(asyncio.run(CASES[args.case](args.source, args.step))))
        return
    if args.widen:
        asyncio.run(widened(recorded, args.widen, args.step, args.times))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = recorded
        if args.times > 1:
            source = Path(scratch)
            same = ("--chains", str(args.chains), "--rate", str(args.rate), "--step", str(args.step))
            child(*same, "--times", str(args.times), "--widen", scratch)
        rows = measure(source, args.step)
    found = {"machine": machine(), "rate": args.rate, "times": args.times, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
