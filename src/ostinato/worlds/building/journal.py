"""Records a package's attempts on disk as they are made, so that a killed build resumes where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.worlds.building.attempts import Attempt
from ostinato.worlds.building.filters import ChangeFate, Noticed
from ostinato.worlds.building.trying.baseline import GreenSuite
from ostinato.worlds.building.wording import TaskKind


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    row: dict[str, Any] = {
        "function": attempt.function, "kind": attempt.kind.value, "detail": attempt.detail, "fate": attempt.fate.value,
    }  # fmt: skip
    if attempt.fate is ChangeFate.VALID:
        row |= {"block": attempt.block, "fail": attempt.noticed.fail_to_pass, "pass": attempt.noticed.pass_to_pass}
    return row


def _attempt_of(row: Mapping[str, Any]) -> Attempt:
    return Attempt(
        function=row["function"],
        kind=TaskKind(row["kind"]),
        detail=row["detail"],
        block=row.get("block", ""),
        fate=ChangeFate(row["fate"]),
        noticed=Noticed(fail_to_pass=tuple(row.get("fail", ())), pass_to_pass=tuple(row.get("pass", ()))),
    )


@dataclass(slots=True)
class JournalContent:
    """The journal's content: the functions that are done, every attempt, and the CPU seconds spent on all of it.

    Example: ``JournalContent(done={"calc.py::add"}, attempts=[attempt], cpu=1.5)``
    """

    done: set[str] = field(default_factory=set[str])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    cpu: float = 0.0


class BuildJournal:
    """One package's journal: `suite.json` and `tried.jsonl` in a directory of their own.

    Example: ``journal = BuildJournal(Path("builds/tabulate-0.10.0-3fa2")); journal.add(functions, attempts, cpu=2.0)``
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def suite(self) -> GreenSuite | None:
        """The recorded suite, or None if none is recorded."""
        try:
            row = json.loads((self.directory / "suite.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        functions = [(path, line) for path, line in row["functions"]]
        return GreenSuite(
            stable=tuple(row["stable"]),
            seconds=row["seconds"],
            ran={test: frozenset(functions[number] for number in ran) for test, ran in row["ran"].items()},
            cpu=row["cpu"],
            unstable=row["unstable"],
            failing=row["failing"],
        )

    def keep_suite(self, suite: GreenSuite) -> None:
        """Record the suite; the file is written atomically."""
        numbers: dict[tuple[str, int], int] = {}
        ran = {
            test: [numbers.setdefault(each, len(numbers)) for each in sorted(ran)] for test, ran in suite.ran.items()
        }
        row = {
            "stable": suite.stable, "seconds": dict(suite.seconds), "ran": ran, "functions": list(numbers), "cpu": suite.cpu,
            "unstable": suite.unstable, "failing": suite.failing,
        }  # fmt: skip
        half = self.directory / ".suite.part"
        half.write_text(json.dumps(row))
        os.replace(half, self.directory / "suite.json")

    def tried(self) -> JournalContent:
        """Everything tried so far. A truncated last line is ignored, so its functions are tried again."""
        found = JournalContent()
        try:
            lines = (self.directory / "tried.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                row = json.loads(line)
                attempts = [_attempt_of(each) for each in row["attempts"]]
            except (ValueError, KeyError):
                continue
            found.done |= set(row["functions"])
            found.attempts += attempts
            found.cpu += row["cpu"]
        return found

    def add(self, functions: Sequence[str], attempts: Sequence[Attempt], cpu: float) -> None:
        """Append one batch: the functions that are now done, the attempts, and the CPU seconds they took."""
        row = {
            "functions": list(functions),
            "attempts": [_attempt_row(each) for each in attempts],
            "cpu": round(cpu, 3),
        }
        with (self.directory / "tried.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the line before it may have been cut off
            file.flush()
            os.fsync(file.fileno())
