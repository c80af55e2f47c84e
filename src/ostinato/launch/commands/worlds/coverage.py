"""`ostinato worlds coverage`: pass@1 and best-of-k of held-out tasks by checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.lines import lines_of
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemMean
from ostinato.evaluate.coverage import ScoredAttempt, covered, lost_coverage

HELD_OUT = "held_out"
_NONE = "\N{EN DASH}"


def show_coverage(rollouts: Path, k: int, console: Console, *, machine: bool) -> None:
    """Print a line per checkpoint. Raises NotFound, and BadRequest naming the line that is wrong."""
    if k < 2:
        raise BadRequest(f"-k {k}: the best of one try is the first; give 2 or more", field="k")
    rows = covered(read_attempts(rollouts), k)
    lost = lost_coverage(rows)
    if machine:
        said = {"k": k, "rows": [asdict(row) for row in rows], "lost": None if lost is None else str(lost.policy)}
        console.out(json.dumps(said), highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "rollouts", "tasks", "pass@1", f"best of {k}", "pass@1, change", f"best of {k}, change"):
        table.add_column(name)
    for row in rows:
        rates, change = row.rates, row.change
        tasks = f"{rates.first.items if rates else 0}" + (f" (and {row.short} with too few tries)" if row.short else "")
        figures = (_share(rates.first), _share(rates.best)) if rates else (_NONE, _NONE)
        moves = (_points(change.first), _points(change.best)) if change else (_NONE, _NONE)
        table.add_row(f"v{row.policy.number}", f"{row.attempts}", tasks, *figures, *moves)
    console.print(table)
    if lost is not None:
        told = f"v{lost.policy.number} has narrowed: pass@1 rose and the best of {k} fell; further training does not undo it"
        console.print(Text(told, "red"))


def read_attempts(path: Path, split: str = HELD_OUT) -> list[ScoredAttempt]:
    """The graded rollouts of a split that a single known checkpoint made. Raises NotFound, BadRequest."""
    try:
        lines = lines_of(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from error
    found: list[ScoredAttempt] = []
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:  # cut short by a kill or a full disk, or the empty line after such a line
            continue
        try:
            made: dict[str, Any] | None = row["policy"]
            alone = made == row.get("policy_last", made)
            if row["split"] == split and row["value"] is not None and made is not None and alone:
                policy = PolicyVersion(number=int(made["number"]), hash=str(made["hash"]))
                value = float(row["value"])
                if not 0.0 <= value <= 1.0:
                    raise ValueError(f"value {value:g} does not lie in [0, 1]")
                found.append(
                    ScoredAttempt(task=str(row["task"]), family=str(row["family"]), policy=policy, value=value)
                )
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"{path}, line {number} is not a finished rollout: {error!r}") from error
    return found


def _share(mean: ItemMean) -> str:
    return f"{100 * mean.mean:.1f}% [{100 * mean.lower:.1f}, {100 * mean.upper:.1f}]"


def _points(mean: ItemMean) -> str:
    return f"{100 * mean.mean:+.1f} pp [{100 * mean.lower:+.1f}, {100 * mean.upper:+.1f}]"
