"""Auto on simulated users: the regret of finding the best arm, the detection of wrong propensities, and the coverage of intervals.

    python -m benchmarks.release.auto            # about ten minutes of one core
    python -m benchmarks.release.auto --quick    # does it run? writes nothing

The *regret* of a turn is the probability that the user likes the best fixed arm's answer minus that of the arm that was dealt, in
points (hundredths). Rewards reach the router 100 turns late, 50 turns at once. *Coverage* is the share of 1,000 runs in which the 95%
interval contained the changed router's true value. The truth is known because the users are simulated (`benchmarks/release/crowd.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from benchmarks.release.auto_coverage import (
    EVERY,
    LATE,
    LITTLE,
    LOSER,
    MUCH,
    NEW,
    QUALITIES,
    REWARDS,
    SETTINGS,
    USUAL,
    Fixed,
    coverage,
)
from benchmarks.release.crowd import RHO, Crowd, Feed, Served, traffic

from ostinato.release.auto.offpolicy import PropensityTest
from ostinato.release.auto.posterior import drawn
from ostinato.release.auto.router import Router

RESULT = RESULTS / "release_auto.json"
USERS = 2_000
CURVE = (250, 500, 1_000, 2_000, 5_000)


def learned(served: Iterable[Served], router: Router, *, clustered: bool = True) -> list[Served]:
    """All turns, after feeding the router each turn and, `LATE` turns later, its reward."""
    feed, all_turns = Feed(router, late=LATE, every=EVERY, clustered=clustered), list[Served]()
    for each in served:
        feed.take(each)
        all_turns.append(each)
    return all_turns


# ---------------------------------------------------------------- regret


def regrets(served: list[Served], qualities: Mapping[str, float]) -> np.ndarray:
    best = max(qualities, key=lambda arm: qualities[arm])
    return np.array([each.chances[best] - each.chances[each.arm] for each in served])


def regret_of(make: Callable[[], Router], runs: int, turns: int, *, clustered: bool = True) -> dict[str, Any]:
    """Mean regret per turn: up to each point of the curve, over all turns, and over the last tenth, with the spread over runs."""
    rows: list[np.ndarray] = []
    shares: list[float] = []
    for seed in range(runs):
        rng, router = np.random.default_rng([1, seed]), make()
        dealt = traffic(Crowd(USERS, rng), QUALITIES, router, turns, rng)
        served = list(dealt) if isinstance(router, Fixed) else learned(dealt, router, clustered=clustered)
        rows.append(regrets(served, QUALITIES))
        shares.append(float(np.mean([each.arm == "large" for each in served[-turns // 10 :]])))
    points_RT = 100 * np.array(rows)
    totals_R = points_RT.mean(axis=1)
    return {
        "points per turn": float(totals_R.mean()),
        "standard error": float(totals_R.std(ddof=1) / np.sqrt(runs)),
        "last tenth": float(points_RT[:, -turns // 10 :].mean()),
        "best arm's share of the last tenth": float(np.mean(shares)),
        "worst run": float(totals_R.max()),
        "curve": {str(t): float(points_RT[:, :t].mean()) for t in CURVE if t <= turns},
    }


def entering(runs: int, turns: int) -> dict[str, Any]:
    """A release that is better by five points joins arms that the router already knows: its share of turns, and the regret per turn."""
    after = {**QUALITIES, "canary": 0.65}
    shares: list[list[float]] = []
    lost: list[float] = []
    for seed in range(runs):
        rng = np.random.default_rng([2, seed])
        crowd, known = Crowd(USERS, rng), Router(list(QUALITIES), SETTINGS)
        learned(traffic(crowd, QUALITIES, known, turns, rng), known)
        router = Router(list(after), SETTINGS)
        router.restore(known.state())
        served = learned(traffic(crowd, after, router, turns, rng, start=turns), router)
        shares.append([float(np.mean([each.arm == "canary" for each in part])) for part in _parts(served, 5)])
        lost.append(100 * float(regrets(served, after).mean()))
    return {
        "canary's share by fifths": [float(share) for share in np.mean(shares, axis=0)],
        "points per turn": float(np.mean(lost)),
    }


def _parts(served: list[Served], parts: int) -> list[list[Served]]:
    size = len(served) // parts
    return [served[i * size : (i + 1) * size] for i in range(parts)]


def loud_user(runs: int) -> dict[str, float]:
    """The effect of one user's thousand upvotes on an arm's mean (in points) and on its share, among 1,000 users' 5,000 turns."""
    moved: list[tuple[float, float]] = []
    for seed in range(runs):
        rng, router = np.random.default_rng([3, seed]), Fixed({"a": 0.5, "b": 0.5})
        learned(traffic(Crowd(1_000, rng), {"a": 0.6, "b": 0.6}, router, 5_000, rng), router)
        quiet = Router(["a", "b"], SETTINGS)
        quiet.restore(router.state())
        for _ in range(1_000):
            router.measure("b", ("default", "loud"), "reward", 1.0)
        mean = 100 * (router.views()[1].utility.mean - quiet.views()[1].utility.mean)
        moved.append((mean, Router.odds(router, ["a", "b"])["b"] - quiet.odds(["a", "b"])["b"]))
    return {
        "mean moved, points": float(np.mean([mean for mean, _ in moved])),
        "most": float(max(mean for mean, _ in moved)),
        "share moved": float(np.mean([share for _, share in moved])),
        "most of a share": float(max(share for _, share in moved)),
    }


# ---------------------------------------------------------------- propensities

ODDS = {"small": 0.05, "live": 0.15, "large": 0.80}
FAULTS: dict[str, Mapping[str, float]] = {
    "right": ODDS,
    "drawn evenly": dict.fromkeys(ODDS, 1 / 3),
    "floor forgotten": {"small": 0.0, "live": 0.15, "large": 0.85},
    "odds of yesterday": {"small": 0.05, "live": 0.25, "large": 0.70},
    "two arms swapped": {"small": 0.15, "live": 0.05, "large": 0.80},
    "four points off": {"small": 0.05, "live": 0.11, "large": 0.84},
}


def caught(true: Mapping[str, float], runs: int, draws: int, alpha: float, seed: int) -> dict[str, Any]:
    """The share of runs in which an alarm was raised at any draw, and the median number of draws until then."""
    when: list[int] = []
    for run in range(runs):
        rng, test = np.random.default_rng([4, seed, run]), PropensityTest()
        for number, place in enumerate(rng.random(draws).tolist(), 1):
            test.add(drawn(true, place), ODDS)
            if number % 10 == 0 and test.wrong(alpha):  # the test keeps its worst value, so that no alarm is missed
                when.append(number)
                break
    return {"caught": len(when) / runs, "median draws": float(np.median(when)) if when else None}


# ---------------------------------------------------------------- the whole benchmark


SIZES = {"runs": 10, "turns": 5_000, "coverage runs": 1_000, "propensity runs": 100}
QUICK = {"runs": 2, "turns": 1_000, "coverage runs": 10, "propensity runs": 4}


def sections(runs: int, turns: int, many: int, draws: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures, section by section."""
    yield (
        "propensities",
        {
            name: caught(true, 5 * draws if name == "right" else draws, 2_000, _alpha(name), seed)
            for seed, (name, true) in enumerate(FAULTS.items())
        },
    )
    arms, even = list(QUALITIES), dict.fromkeys(QUALITIES, 1 / 3)
    yield (
        "regret",
        {
            "Auto": regret_of(lambda: Router(arms, SETTINGS), runs, turns),
            "Auto, every turn its own user": regret_of(lambda: Router(arms, SETTINGS), runs, turns, clustered=False),
            "even shares": regret_of(lambda: Fixed(even), runs, turns),
        },
    )
    yield "entering", entering(runs, turns)
    yield "loud user", loud_user(runs)

    yield from covered(many)


def covered(many: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the coverage figures so far after each new case."""
    few, found = max(1, many // 2), dict[str, Any]()
    for name, learns, size, kind, runs, wanted_XA in (
        *((f"learning router, {kind}", True, USUAL, kind, many, NEW) for kind in REWARDS),
        *((f"fixed odds, {kind}", False, USUAL, kind, many, NEW) for kind in REWARDS),
        ("learning, 100 users, 150 turns", True, LITTLE, "yes or no", few, NEW),
        ("learning, 1,000 users, 2,000 turns", True, MUCH, "yes or no", max(1, few // 2), NEW),
        ("learning, all to the worst arm", True, USUAL, "yes or no", few, LOSER),
    ):
        found[name] = coverage(learns, size, kind, runs, wanted_XA)
        yield "coverage", found


def _alpha(fault: str) -> float:
    return 0.05 if fault == "right" else 1e-3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--quick", action="store_true", help="a hundredth of it, nothing is written")
    quick = arguments.parse_args().quick
    began, sizes = machine(), QUICK if quick else SIZES
    figures: dict[str, Any] = {}
    for name, part in sections(*sizes.values()):
        figures[name] = part
        settings = {**sizes, "qualities": QUALITIES, "rewards late by": LATE, "users": USERS, "rho": RHO}
        SHOWN[name](part, sizes)
        if not quick:
            RESULT.write_text(json.dumps({"machine": began, "settings": settings, "figures": figures}, indent=1) + "\n")


def show_coverage(part: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    if len(part) == 1:
        print(
            f"\n95% intervals, {sizes['coverage runs']} runs (a half or a quarter of the last three), {USUAL[0]} users, {USUAL[1]} turns"
        )
        print(f"{'':<44}{'coverage':>10}{'below':>8}{'above':>8}{'bias':>8}{'half width':>12}{'turns':>8}")
    name = list(part)[-1]
    for estimator, row in part[name].items():
        sides = f"{row['all below']:>8.1%}{row['all above']:>8.1%}"
        numbers = f"{row['bias, points']:>8.2f}{row['half width, points']:>12.2f}{row['worth so many turns']:>8.0f}"
        print(f"{name + ', ' + estimator:<44}{row['coverage']:>10.1%}{sides}{numbers}", flush=True)


def show_propensities(part: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    print(f"\n{'propensities logged':<32}{'caught':>10}{'median draws':>14}   of 2,000; right: alpha 0.05, else 0.001")
    for name, row in part.items():
        print(f"{name:<32}{row['caught']:>10.1%}{row['median draws'] or '-':>14}", flush=True)


def show_regret(part: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    print(f"\nregret against the best fixed arm, points a turn; {sizes['runs']} runs, {USERS} users, rho {RHO}")
    marks = next(iter(part.values()))["curve"]
    print(f"{'':<32}{'all turns':>16}{'last tenth':>12}{'best share':>12}   up to " + "".join(f"{t:>8}" for t in marks))
    for name, row in part.items():
        total = f"{row['points per turn']:.2f} ± {1.96 * row['standard error']:.2f}"
        share = row["best arm's share of the last tenth"]
        curve = "".join(f"{value:>8.2f}" for value in row["curve"].values())
        print(f"{name:<32}{total:>16}{row['last tenth']:>12.2f}{share:>12.0%}         {curve}", flush=True)


def show_entering(part: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    fifths = " ".join(f"{share:.0%}" for share in part["canary's share by fifths"])
    print(f"\na release better by 5 points enters: its share by fifths of {sizes['turns']} turns: {fifths}", flush=True)


def show_loud(part: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    mean = f"{part['mean moved, points']:.2f} points (most {part['most']:.2f})"
    share = f"{100 * part['share moved']:.1f} points (most {100 * part['most of a share']:.1f})"
    print(f"\n1,000 upvotes of one user among 1,000 users: mean moved {mean}, share by {share}")


SHOWN: dict[str, Callable[[Mapping[str, Any], Mapping[str, int]], None]] = {
    "coverage": show_coverage,
    "propensities": show_propensities,
    "regret": show_regret,
    "entering": show_entering,
    "loud user": show_loud,
}


if __name__ == "__main__":
    main()
