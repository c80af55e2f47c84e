"""The release path's real classes in a simulated product: which candidates are stopped, how soon, and which get past.

    python -m benchmarks.release.path                       # every cell, an hour of an idle core by estimate
    python -m benchmarks.release.path --resume              # go on where a run was cut
    python -m benchmarks.release.path --resume --only 1k aa # cells whose name holds both words
    python -m benchmarks.release.path.table                 # the figures beside what is aimed at

`benchmarks/release/path/cells.py` defines the cells. Ostinato's rule is compared with others (`rivals.py`) on the same users.
The result is written after each cell, so that an interrupted run keeps its finished cells.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contender import RESULTS, machine
from benchmarks.release.path.cells import Cell, cells, figures, histories, settings_of
from benchmarks.release.path.rules import History
from benchmarks.release.path.shares import shares_found
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RESULT = RESULTS / "release_path.json"
FIRST_SEED = 1_000
Map = Callable[[Callable[[int], list[History]], Iterable[int]], Iterable[list[History]]]


class Sheet:
    """The result, cell by cell, in a file that is written atomically."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        kept = json.loads(path.read_text(encoding="utf-8")) if resume and path.exists() else {}
        self._shares: list[dict[str, Any]] = kept.get("shares", [])
        self._cells: dict[str, dict[str, Any]] = {_key(each): each for each in kept.get("cells", [])}

    def lacks(self, cell: Cell) -> bool:
        """True unless the file has this cell with the same settings and at least as many runs."""
        kept = self._cells.get(_key(_entry(cell)))
        return kept is None or kept["cell"]["runs"] < cell.runs or kept["settings"] != _entry(cell)["settings"]

    def lacks_shares(self) -> bool:
        """True if the test of the shares has not been run."""
        return not self._shares

    def put(self, cell: Cell, found: dict[str, Any]) -> None:
        """Write a cell's figures."""
        entry = _entry(cell) | {"machine": machine(), "figures": found}
        self._cells[_key(entry)] = entry
        self._write()

    def put_shares(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows of the test of the shares."""
        self._shares = rows
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".part")
        whole = {"machine": machine(), "shares": self._shares, "cells": list(self._cells.values())}
        beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)


def _entry(cell: Cell) -> dict[str, Any]:
    settings = settings_of(cell).model_dump(mode="json") if cell.rule == "ostinato" else None
    return {"cell": asdict(cell), "settings": settings}


def _key(entry: dict[str, Any]) -> str:
    return str(Cell(**entry["cell"]))


@contextmanager
def workers(processes: int) -> Iterator[Map]:
    """A map over `processes` worker processes; with one it runs in this process."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes) as pool:
        yield pool.map


def main() -> None:
    """Run the requested cells that the file lacks, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="run cells whose name holds each of these words")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many runs of each cell")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep what the file has, run the cells that it lacks")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the figures go")
    asked = parser.parse_args()
    sheet = Sheet(asked.out, resume=asked.resume)
    chosen = [cell for cell in cells(asked.scale) if all(word in str(cell).split() for word in asked.only)]
    chosen = [cell for cell in chosen if sheet.lacks(cell)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with workers(asked.processes) as over, Progress(*columns) as progress:
        if not asked.only and sheet.lacks_shares():
            sheet.put_shares(shares_found(1_000))
        task = progress.add_task("runs", total=sum(cell.runs for cell in chosen))
        for cell in chosen:
            begun = time.monotonic()
            progress.update(task, description=str(cell))
            runs: list[list[History]] = []
            for run in over(partial(histories, cell), range(FIRST_SEED, FIRST_SEED + cell.runs)):
                runs.append(run)
                progress.advance(task)
            found, seconds = figures(cell, runs), time.monotonic() - begun
            sheet.put(cell, found)
            shown = " ".join(f"{key}={value:.3g}" for key, value in found.items() if value is not None)
            progress.console.print(
                f"{cell} ({cell.runs} runs, {seconds:.0f} s): {shown}", highlight=False, soft_wrap=True
            )


if __name__ == "__main__":
    main()
