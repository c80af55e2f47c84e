"""The results of a measurement, from the records of its rollouts: pass@1 and best-of-k with intervals, by split and family."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemMean, ItemScore, PassRates
from ostinato.evaluate.pass_at_k import pass_rates
from ostinato.launch.views.plain import plain
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.tasks.task import Split

MOST_FAMILIES = 12
_NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedTasks:
    """Results for one kind of tasks. `family` "": all of the split. `first` is over tasks with a graded try, `best` over tasks with k of
    them; None: there is no such task. `value` is the mean value of the tries, with tasks as clusters.

    Example: ``SolvedTasks(split=Split.HELD_OUT, family="", tries=800, first=first, best=best, value=value)``
    """

    split: Split
    family: str
    tries: int
    first: ItemMean | None
    best: ItemMean | None
    value: ItemMean | None


def solved(records: Sequence[Finished], k: int, confidence: float = 0.95) -> list[SolvedTasks]:
    """A row for each split, followed by a row for each of its families if there are 2 to `MOST_FAMILIES`."""
    rows: list[SolvedTasks] = []
    for split in Split:
        theirs = [record for record in records if record.split is split]
        if not theirs:
            continue
        rows.append(_row(theirs, split, "", k, confidence))
        families = sorted({record.family for record in theirs})
        if 1 < len(families) <= MOST_FAMILIES:
            rows += [
                _row([each for each in theirs if each.family == family], split, family, k, confidence)
                for family in families
            ]
    return rows


def answered_by(records: Iterable[Finished]) -> Counter[tuple[PolicyVersion | None, PolicyVersion | None]]:
    """How many rollouts each pair of oldest and newest weights made."""
    return Counter((record.policy, record.policy_last) for record in records)


def _row(records: Sequence[Finished], split: Split, family: str, k: int, confidence: float) -> SolvedTasks:
    graded: dict[str, list[Finished]] = defaultdict(list)
    for record in records:
        if record.value is not None:
            graded[record.task].append(record)
    whole = {task: theirs for task, theirs in graded.items() if len(theirs) >= k}

    def rates(of: dict[str, list[Finished]], k: int, *, worth: bool = False) -> PassRates | None:
        scores = [
            ItemScore(item=task, draw=draw, score=(record.value or 0.0) if worth else float(record.solved))
            for task, theirs in of.items()
            for draw, record in enumerate(theirs)
        ]
        return pass_rates(scores, k, confidence) if scores else None

    first, best, value = rates(graded, 1), rates(whole, k), rates(graded, 1, worth=True)
    return SolvedTasks(
        split=split,
        family=family,
        tries=sum(map(len, graded.values())),
        first=first and first.first,
        best=best and best.best,
        value=value and value.first,
    )


def figures_json(records: Sequence[Finished], k: int, policy: PolicyVersion, *, whole: bool) -> dict[str, Any]:
    """All figures, as JSON's types. `whole`: the measurement was not stopped early."""
    answered = [
        {"policy": None if first is None else asdict(first), "policy_last": None if last is None else asdict(last)}
        | {"rollouts": count}
        for (first, last), count in answered_by(records).items()
    ]
    return {
        "asked_for": asdict(policy),
        "answered_by": answered,
        "k": k,
        "whole": whole,
        "rows": [asdict(row) for row in solved(records, k)],
        "ended": Counter(record.ended.value for record in records),
        "ungraded": sum(record.value is None for record in records),
        "cheated": [[record.task, record.episode, list(record.cheated)] for record in records if record.cheated],
    }


def show_figures(records: Sequence[Finished], k: int, policy: PolicyVersion, console: Console) -> None:
    """Print the same figures for people. Rollouts that were not made by `policy` alone are pointed out, not left out."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("split", "family", "tasks", "tries", "pass@1", *([f"best of {k}"] if k > 1 else []), "value"):
        table.add_column(name, justify="right" if name in ("tasks", "tries") else "left")
    for row in solved(records, k):
        figures = [_share(row.first), *([_share(row.best)] if k > 1 else []), _share(row.value)]
        tasks = str(row.first.items if row.first else 0)
        table.add_row(row.split.value, Text(plain(row.family) or "all"), tasks, str(row.tries), *figures)
    console.print(table)
    for (first, last), count in sorted(answered_by(records).items(), key=str):
        made = "unnamed weights" if first is None else f"{first}" if first == last else f"{first} to {last}"
        other = first != policy or last != policy
        console.print(Text(f"answered by {made}: {count} rollouts", "yellow" if other else ""))
    ended = Counter(record.ended.value for record in records)
    console.print(Text("ended: " + ", ".join(f"{how} {count}" for how, count in ended.most_common())))
    for why, count in Counter(record.why for record in records if record.value is None).most_common(5):
        console.print(Text(f"not graded, {count}: {plain(why)}", "yellow"))
    for record in records:
        if record.cheated:
            what = "; ".join(record.cheated)
            console.print(Text(f"cheated: {plain(record.task)} ({plain(record.episode)}): {plain(what)}", "red"))


def _share(mean: ItemMean | None) -> str:
    return _NONE if mean is None else f"{100 * mean.mean:.1f}% [{100 * mean.lower:.1f}, {100 * mean.upper:.1f}]"
