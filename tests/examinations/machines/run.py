"""Runs `doctor`, `up` and a short demo in every environment that this machine can imitate, and prints the table.

python -m tests.examinations.machines.run --only container --only closed-home
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.examinations.machines.checks import CHECKS, Unmet
from tests.examinations.machines.environments import ENVIRONMENTS, Environment, Place

from ostinato.testing.tiny import tiny_model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "machines.json"
HELD, NAMED, FAILED, LEFT_OUT = "held", "named", "FAILED", "not tried"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one check in one environment. `named`: it must be refused or said, and was. `line`: the refusal, or the first error."""

    environment: str
    check: str
    result: str
    seconds: float
    line: str


def tried(environment: Environment, top: Path, console: Console, only: tuple[str, ...] = ()) -> list[Outcome]:
    """Make the environment's checks, each in a place of its own."""
    if why := environment.missing():
        return [Outcome(environment=environment.name, check="all", result=LEFT_OUT, seconds=0.0, line=why)]
    found = list[Outcome]()
    for check in environment.checks:
        if only and check not in only:
            continue
        began = time.monotonic()
        try:
            line = CHECKS[check](environment, placed(environment, top / environment.name / check))
            result = NAMED if line else HELD
        except (Unmet, OSError) as error:
            result, line = FAILED, str(error)
        seconds = round(time.monotonic() - began, 1)
        found.append(
            Outcome(environment=environment.name, check=check, result=result, seconds=seconds, line=line[:300])
        )
        console.print(
            f"{environment.name:14} {check:7} {result:6} {seconds:6.1f} s  {line[:120]}", markup=False, highlight=False
        )
    return found


def placed(environment: Environment, top: Path) -> Place:
    """A new place for one check: its working directory and a model that every user can read."""
    working = top / environment.folder
    (working / "home").mkdir(parents=True)
    place = Place(top=top, place=working, model=tiny_model(top / "tiny"))
    for each in (top.parent.parent, top.parent, top):
        each.chmod(0o755)
    environment.prepare(place)
    return place


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print the table."""
    table = Table(
        title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", title_justify="left"
    )
    for column in ("environment", "check", "result", "seconds", "said"):
        table.add_column(column, overflow="fold")
    for each in outcomes:
        table.add_row(each.environment, each.check, each.result, f"{each.seconds:.1f}", each.line[:160])
    console.print(table, markup=False)


def write(outcomes: list[Outcome], path: Path) -> None:
    """Write the outcomes so far as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps([asdict(each) for each in outcomes], indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="an environment's name; may be repeated")
    parser.add_argument(
        "--check", action="append", default=[], choices=sorted(CHECKS), help="only this check; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the environments and end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file for the outcomes (JSON)")
    asked, console = parser.parse_args(), Console()
    if asked.list:
        for each in ENVIRONMENTS:
            console.print(
                f"{each.name:14} {each.about}  {each.missing()}", markup=False, highlight=False, soft_wrap=True
            )
        return
    if unknown := set(asked.only) - {each.name for each in ENVIRONMENTS}:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; --list shows them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that commands in progress are ended
    outcomes = list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="machines-", ignore_cleanup_errors=True) as top:
        for each in ENVIRONMENTS:
            if not asked.only or each.name in asked.only:
                outcomes += tried(each, Path(top), console, tuple(asked.check))
                write(outcomes, asked.out)  # what was tried is kept if the rest is interrupted
    show(outcomes, console)
    sys.exit(any(each.result == FAILED for each in outcomes))


if __name__ == "__main__":
    main()
