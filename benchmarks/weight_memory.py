"""Peak memory of a publisher and of a follower, each in a process of its own, against one copy of the weights.

    python benchmarks/weight_chains.py --run runs/demo-0 --rates 1e-5    # makes the versions
    python benchmarks/weight_memory.py [--rate 1e-5] [--step 20]

*at rest* is resident memory before the call, *peak* the highest during it (VmHWM, reset before). The publisher is given weights that its
caller holds; between publications it keeps the last ones, which the caller has let go. The follower holds one version and fetches the
next one, or one that is far ahead; what it serves until then is *at rest*. Writes benchmarks/results/weight_memory.json.
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

from contender import RESULTS, machine
from weights import CHAINS

from ostinato.core.records import PolicyVersion, WeightArray, Weights
from ostinato.publish.follower import Follower, FollowerConfig
from ostinato.publish.publisher import Publisher, PublisherConfig
from ostinato.publish.store import DirectoryStore


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process, MB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """The next VmHWM counts from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


async def versions(source: Path) -> dict[int, PolicyVersion]:
    """The recorded versions by number."""
    log = await Follower(DirectoryStore(source)).log("live", limit=10_000)
    return {manifest.number: manifest.policy for manifest in log}


async def copied(source: Path, policy: PolicyVersion) -> Weights:
    """A version in arrays that nobody shares."""
    weights = await Follower(DirectoryStore(source)).fetch(policy)
    return {name: WeightArray(array.dtype, array.shape, array.data.copy()) for name, array in weights.items()}


async def publisher(source: Path, step: int, anchor: int) -> dict[str, float]:
    """Two publications; the second is measured. With `anchor` 1 it writes a full snapshot beside the delta."""
    chain = await versions(source)
    old, new = await copied(source, chain[step]), await copied(source, chain[step + 1])
    size = sum(array.data.nbytes for array in new.values()) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        ours = Publisher(DirectoryStore(Path(scratch)), PublisherConfig(anchor_every=anchor))
        first = await ours.publish(step, old, run="m", base=None)
        if anchor == 1:
            middle = {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in old.items()}
            middle["model.norm.weight"].data[0] ^= 1
            first = await ours.publish(step, middle, run="m", base=first.policy)
            del middle
        del old
        forget_peak()
        rest = resident("VmRSS")
        await ours.publish(step + 1, new, run="m", base=first.policy)
        return {"copy_mb": size, "rest_mb": rest, "peak_mb": resident("VmHWM")}


async def follower(source: Path, have: int, want: int) -> dict[str, float]:
    """Fetch `want` where `have` is held; have -1: from nothing."""
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
    "publisher, delta": lambda source, step: publisher(source, step, 25),
    "publisher, delta and full snapshot": lambda source, step: publisher(source, step, 1),
    "follower, next version": lambda source, step: follower(source, step, step + 1),
    "follower, five versions on": lambda source, step: follower(source, step, step + 5),
    "follower, from nothing": lambda source, step: follower(source, -1, step),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, default=CHAINS)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--case", choices=list(CASES), help="measure one, in this process")
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_memory.json")
    args = parser.parse_args()
    source = args.chains / f"{args.rate:g}"
    if args.case:
        print(json.dumps(asyncio.run(CASES[args.case](source, args.step))))
        return
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':<36}{'copy':>9}{'at rest':>10}{'peak':>10}{'extra':>10}{'copies':>9}")
    for case in CASES:
        words = [sys.executable, __file__, "--chains", str(args.chains), "--rate", str(args.rate)]
        done = subprocess.run([*words, "--step", str(args.step), "--case", case], capture_output=True, check=True)
        row = rows[case] = json.loads(done.stdout)
        extra = row["peak_mb"] - row["rest_mb"]
        print(
            f"{case:<36}{row['copy_mb']:>6.0f} MB{row['rest_mb']:>7.0f} MB{row['peak_mb']:>7.0f} MB{extra:>7.0f} MB"
            f"{extra / row['copy_mb']:>9.2f}"
        )
    args.out.write_text(json.dumps({"machine": machine(), "rate": args.rate, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
