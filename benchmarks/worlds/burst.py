"""Simulates how long a burst of 100,000 sandboxes takes to be placed, with three placement strategies in one run.

    python -m benchmarks.worlds.burst             # some ten seconds

Cases: calm (more room than requested), tight (sandboxes take more memory than they request), lost (one of four regions is lost after
20 s). `seconds` is the time of the simulation itself.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from benchmarks.contender import RESULTS, machine

from ostinato.worlds.bursts import ASSUMPTIONS, Burst, Fleet, Packing, simulate

RESULT = RESULTS / "worlds_burst.json"
CASES = {
    "calm": (Fleet(), Burst()),
    "tight": (Fleet(), Burst(taken_gb=1.1)),
    "lost": (Fleet(nodes=300), Burst(lose_region_at=20.0)),
}


def main() -> None:
    rows = []
    for name, (fleet, burst) in CASES.items():
        for packing in Packing:
            began = time.perf_counter()
            placed = simulate(fleet, burst, packing, seed=0)
            rows.append({"case": name, "seconds": round(time.perf_counter() - began, 2), **asdict(placed)})
            print(json.dumps(rows[-1]))
    cases = {name: {"fleet": asdict(fleet), "burst": asdict(burst)} for name, (fleet, burst) in CASES.items()}
    RESULT.write_text(
        json.dumps({"machine": machine(), "assumptions": ASSUMPTIONS, "cases": cases, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
