"""The cost of a chain of versions, including full snapshots and squashed deltas: bytes stored, and bytes that a follower reads.

    python -m benchmarks.weights.chains --run runs/demo-0 --rates 1e-6 --steps 52    # makes the versions
    python -m benchmarks.weights.amortised [--rate 1e-6] [--versions 50]

The recorded versions are published again, with the publisher's defaults, into a fresh store. *stored* counts every byte that was
written: deltas, squashed deltas, full snapshots, manifests. *read* counts the bytes read by a follower that takes every version, with
and without the first full snapshot. Prints a table and writes benchmarks/results/weight_amortised.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from benchmarks.weights.codec import CHAINS
from rich.progress import track

from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore


async def republish(source: Path, target: Path, versions: int) -> dict[str, Any]:
    """Publish again the start and the `versions` versions after it, and follow them."""
    recorded, store = Follower(DirectoryStore(source)), DirectoryStore(target)
    chain = sorted((m.policy for m in await recorded.log("live", limit=10_000)), key=lambda policy: policy.number)
    if len(chain) <= versions:
        raise SystemExit(f"{source} has {len(chain) - 1} versions after the first; {versions} are needed")
    publisher, follower, base = VersionPublisher(store), Follower(DirectoryStore(target)), None
    rows: list[dict[str, Any]] = []
    for policy in track(chain[: versions + 1], description="publishing"):
        weights = await recorded.fetch(policy)
        done = await publisher.publish(policy.number, weights, run="again", base=base, ref="live")
        base = done.policy
        started = time.perf_counter()
        await follower.fetch(done.policy)
        rows.append(
            {
                "number": policy.number,
                "full_bytes": done.full_bytes,
                "bytes": done.bytes,
                "stored": done.stored,
                "reason": done.reason,
                "publish_s": done.seconds,
                "follow_s": time.perf_counter() - started,
            }
        )
    cold = time.perf_counter()
    await Follower(DirectoryStore(target)).fetch(chain[versions])
    return {"rows": rows, "cold_s": time.perf_counter() - cold}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, default=CHAINS)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_amortised.json")
    args = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(republish(args.chains / f"{args.rate:g}", Path(scratch), args.versions))
    first, later = found["rows"][0], found["rows"][1:]
    full = sum(row["full_bytes"] for row in later)
    stored, read = sum(row["stored"] for row in later), sum(row["bytes"] for row in later)
    print(
        f"{len(later)} versions after the first, learning rate {args.rate:g}, {first['full_bytes'] / 1e6:.0f} MB each"
    )
    print(f"full snapshots at {[row['number'] for row in found['rows'] if row['reason']]}")
    start = first["full_bytes"]
    for words, weights, moved in (
        ("stored after the first", full, stored),
        ("stored with the first", full + start, stored + first["stored"]),
        ("read by one that follows", full, read),
        ("read by one that starts too", full + start, read + first["bytes"]),
    ):
        print(f"{words:<28}{moved / 1e6:9.1f} MB  {weights / moved:7.1f}x")
    for name in ("publish_s", "follow_s"):
        values = [row[name] for row in later]
        print(
            f"{name:<10} median {np.median(values):.2f} s, 90% {np.quantile(values, 0.9):.2f} s, longest {max(values):.2f} s"
        )
    print(f"a cold start at the last version takes {found['cold_s']:.2f} s")
    args.out.write_text(json.dumps({"machine": before, "rate": args.rate, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
