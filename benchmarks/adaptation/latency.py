"""What a person's dials add to a request and to a feedback, with many people in the cache of states.

    python -m benchmarks.adaptation.latency [--people 1000000] [--quick]

*Cold* is a person whose state is not in memory: one read of the cache on disk, the state and its evidence; *warm* one whose state is. Both
include the choice of the dials and `Steering`. *Feedback* is one rating of a warm person, without the log's own append. The first two are
told by the clock (`p50`, `p99`) and in processor time of the thread, which other work disturbs less (`cpu_p50`, `cpu_p99`). One thread, no
key per person unless `--keys`: with it the values of so many people lie under keys of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.learner import PersonState, Regression, names_hash, window
from ostinato.adapt.prior import flat_prior
from ostinato.core.records import Person, Signal, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.record.config import Encrypt
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.person_cache import SqlPersonCache
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

DIALS, TENANT = 8, "acme"
BASIS = Basis(
    names=tuple(f"dial {number}" for number in range(DIALS)),
    tokens_M=np.arange(384),
    directions_KM=np.ones((DIALS, 384), np.float32),
    weights="0" * 64,
)

CONFIG = AdaptConfig(mode="dials", users="declared", holdout=0.0)


def full_state() -> PersonState:
    """A state with as many single ratings as fit."""
    rng, prior, state = np.random.default_rng(0), flat_prior(DIALS), PersonState.new(names_hash(BASIS.names), DIALS)
    for place in range(1, 2 * window(DIALS)):
        state = state.rate(place, rng.normal(size=DIALS).tolist(), 1, float(rng.random() < 0.5), prior, Regression())
    return state


def timed(act: Callable[[int], object], numbers: Sequence[int]) -> dict[str, float]:
    """Microseconds at the median and the 99th percentile, by the clock and of the thread's processor time."""
    found = list[tuple[int, int]]()
    for number in numbers:
        begun, worked = time.perf_counter_ns(), time.thread_time_ns()
        act(number)
        found.append((time.perf_counter_ns() - begun, time.thread_time_ns() - worked))
    percentiles = np.percentile(np.array(found) / 1e3, [50, 99], axis=0).tolist()
    names = (("p50", "cpu_p50"), ("p99", "cpu_p99"))
    return {
        name: value for told, row in zip(names, percentiles, strict=True) for name, value in zip(told, row, strict=True)
    }


async def measure(people: int, calls: int, directory: Path, *, keys: bool) -> dict[str, object]:
    """Fill a cache, and time what a request and a feedback take."""
    ring = KeyRing(directory / "keys.db", None, time.monotonic) if keys else None
    cache = SqlPersonCache(directory / "people.sqlite", ring, Encrypt.USER if keys else Encrypt.NONE, most=2 * people)
    log = MemoryLog()

    await log.append(SteeringBasis.of(BASIS, at=1.0))
    adaptation = DialAdaptation(log, cache, CONFIG)
    await adaptation.follow()
    packed, begun = full_state().pack(), time.perf_counter()
    for start in range(0, people, 20_000):
        crowd = [(TENANT, f"user {number}") for number in range(start, min(people, start + 20_000))]
        if ring is not None:
            ring.numbers(Scope(*person) for person in crowd)
        cache.write(0, "", {person: (1, cache.key(person), packed) for person in crowd})
    filled = time.perf_counter() - begun
    cache.close()  # its write-ahead log is empty then
    size = sum(path.stat().st_size for path in directory.glob("people.sqlite*")) / people
    cache = SqlPersonCache(directory / "people.sqlite", ring, Encrypt.USER if keys else Encrypt.NONE, most=2 * people)
    adaptation = DialAdaptation(log, cache, CONFIG)
    await adaptation.follow()
    rng = np.random.default_rng(1)
    asked = rng.permutation(people)[:calls].tolist()

    def steer(number: int) -> None:
        assert adaptation.steering((TENANT, f"user {number}"), weights=BASIS.weights, verified=True) is not None

    fold = adaptation.fold
    assert fold is not None
    found: dict[str, object] = {"people": people, "bytes": size, "fill_s": filled, "cold": timed(steer, asked)}
    few = asked[: min(calls, 2000)]
    timed(steer, few)
    found["warm"] = timed(steer, few)
    signals: list[Signal] = []
    for number in few:
        person: Person = (TENANT, f"user {number}")
        features = tuple(rng.normal(size=DIALS).tolist())
        steered = Steered(
            basis=BASIS.hash, dials=(0.0,) * DIALS, cap=0.1, budget=3.0, tokens=24, kl=0.4, features=features
        )
        turn = replace(a_turn(f"{number}:0", user=person[1]), tenant=TENANT, steered=steered)
        signals.append(replace(a_signal(turn), tenant=TENANT))
        await log.append(turn)
    await fold.catch_up()
    for signal in signals:
        await log.append(signal)
    begun = time.perf_counter()
    await fold.catch_up()
    found["feedback_mean"] = (time.perf_counter() - begun) / len(few) * 1e6
    begun = time.perf_counter()
    await fold.save()
    found["save_mean"] = (time.perf_counter() - begun) / len(few) * 1e6
    cache.close()
    return found


def main() -> None:
    """Print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--keys", action="store_true", help="under a key per person")
    parser.add_argument("--quick", action="store_true", help="20,000 people, 4,000 calls")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptation_latency.json")
    args = parser.parse_args()
    people, calls = (20_000, 4_000) if args.quick else (args.people, args.calls)
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(people, calls, Path(directory), keys=args.keys))
    for name, value in found.items():
        told = (
            "  ".join(f"{key} {each:.1f} us" for key, each in value.items())
            if isinstance(value, dict)
            else f"{value:.1f}"
        )
        print(f"{name:<16}{told}")
    args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
