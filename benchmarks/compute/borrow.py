"""Simulates borrowed replicas over two weeks of traffic: with the guard, without lending, and with parts of the guard disabled.

    python -m benchmarks.compute.borrow [--seeds 5] [--trace FILE.csv]

Traffic is synthetic (`Diurnal`, whose settings are printed) or, with --trace, a CSV of `seconds,requests_per_second`. Prints a
table and writes benchmarks/results/borrow.json. Exits with 1 if lending under the guard makes a request late, or if sampling's share of the
compute is off by more than 2 points over six hours.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.compute.lending_simulation import (
    ASSUMED,
    Diurnal,
    Harvest,
    ServingFleet,
    read_traffic,
    simulate_lending,
    traffic_of,
)
from benchmarks.contender import RESULTS
from rich.console import Console
from rich.table import Table

from ostinato.compute.borrowing import GuardRules
from ostinato.compute.ledger import ShareRules

RESULT = RESULTS / "borrow.json"
STEP_S = 20.0
FOREVER = 1e18
GUARD = GuardRules()
APART = 0.02
CASES = {
    "nothing is lent": None,
    "lent under the guard": GUARD,
    "given back on delay alone": replace(GUARD, return_above=FOREVER),
    "never given back": replace(GUARD, return_above=FOREVER, guard_s=FOREVER),
}


def spread(found: list[Harvest], name: str, form: str) -> str:
    """The range of a field over the seeds, as text."""
    values = [getattr(each, name) for each in found]
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def main() -> int:
    """Simulate and print. Returns 1 if lending under the guard broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    fleet, rules, made = ServingFleet(), ShareRules(), Diurnal()
    if asked.trace:
        traces = [read_traffic(asked.trace.read_text(encoding="utf-8"), STEP_S)]
    else:
        traces = [traffic_of(made, STEP_S, seed) for seed in range(asked.seeds)]
    found = {
        name: [simulate_lending(fleet, guard, rules, trace, STEP_S) for trace in traces]
        for name, guard in CASES.items()
    }
    columns = (
        ("late steps", "violations", ",d"),
        ("late requests", "late", ".4%"),
        ("longest wait, s", "worst_delay_s", ",.2f"),
        ("harvested, replica-hours", "harvested_h", ",.0f"),
        ("idle, replica-hours", "idle_h", ",.0f"),
        ("given back", "preemptions", ",d"),
        ("at most in an hour", "most_preemptions_h", ",d"),
        ("workers moved", "moves", ",d"),
        ("sampling's share", "share", ".2%"),
        ("off by at most, 6 h", "apart", ".2%"),
    )
    table = Table("simulated", *(title for title, _, _ in columns), box=None, pad_edge=False)
    for name, each in found.items():
        table.add_row(name, *(spread(each, field, form) for _, field, form in columns))
    console = Console(width=220)
    console.print(table)
    rest = {
        "fleet": asdict(fleet),
        "rules": asdict(rules),
        "guard": asdict(GUARD),
        "step_s": STEP_S,
        "assumed": ASSUMED,
    }
    rest |= {"trace": str(asked.trace)} if asked.trace else {"traffic": asdict(made), "seeds": asked.seeds}
    for name, value in rest.items():
        console.print(f"{name}: {value}", highlight=False)
    said = {name: [asdict(each) for each in cases] for name, cases in found.items()}
    RESULT.write_text(json.dumps({**rest, "found": said}, indent=1) + "\n", encoding="utf-8")
    return int(any(each.violations or each.apart > APART for each in found["lent under the guard"]))


if __name__ == "__main__":
    raise SystemExit(main())
