"""The weight store's fault examination at every place: each fault with its number of cases and their outcomes.

    python -m tests.examinations.weight_faults.run [--parts damage network ...]

The rule for every case: the follower ends at the right hash, or refuses with an error that names the object and ends there once it
is restored; never a mixture, never a wrong byte, no manual step. Cases that break it are listed, and the exit status is 1. Prints the
table and writes results/weight_faults.json. About ten minutes; `tests/e2e/test_weight_faults.py` runs a selection of the cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.contender import machine
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tests.examinations.weight_faults.outcome import Case, problems

PARTS = ("publisher-kills", "follower-kills", "damage", "races", "transient", "full-disk", "clocks", "network")


def examine(part: str, directory: Path, progress: Progress) -> list[Case]:
    """Run one part in a process of its own."""
    bar = progress.add_task(part, total=None, cases=0)
    command = [sys.executable, "-W", "ignore", "-m", "tests.examinations.weight_faults", part, str(directory), "--wide"]
    found: list[Case] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(Case(**json.loads(line)))
            progress.update(bar, cases=len(found))
    if process.returncode:
        raise SystemExit(f"{part}: the examination itself ended with status {process.returncode}")
    progress.update(bar, total=1, completed=1)
    return found


def counted(part: str, cases: list[Case]) -> list[dict[str, Any]]:
    """One row for each fault, place and outcome."""
    rows = Counter((case.fault, case.where, "BROKEN" if case.problem else case.outcome) for case in cases)
    return [
        {"part": part, "fault": fault, "where": where, "outcome": outcome, "cases": count}
        for (fault, where, outcome), count in sorted(rows.items())
    ]


def report(rows: list[dict[str, Any]], broken: list[str]) -> None:
    table = Table("fault", "where", "cases", "outcome")
    for row in rows:
        table.add_row(row["fault"], row["where"], str(row["cases"]), row["outcome"])
    console = Console(width=160)
    console.print(table)
    console.print(f"{sum(row['cases'] for row in rows):,} cases, {len(broken)} in which the rule did not hold")
    for line in broken:
        console.print(line, markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "weight_faults.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    before, started = machine(), time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.fields[cases]} cases"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns) as progress:
        for part in args.parts:
            cases = examine(part, Path(scratch) / part, progress)
            rows += counted(part, cases)
            broken += problems(cases)
    report(rows, broken)
    result = {
        "machine": before,
        "seconds": round(time.perf_counter() - started, 1),
        "cases": sum(row["cases"] for row in rows),
        "broken": broken,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
