"""pass@1 and best-of-k of each checkpoint, from rollouts of the same tasks.

The estimators are those of `evaluate.pass_at_k`: unbiased for every task, with tasks as clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, ItemScore, PassRates, Sharpening
from ostinato.evaluate.pass_at_k import pass_rates, sharpening


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAttempt:
    """One finished attempt of one checkpoint at one task, with its `value` in [0, 1].

    Example: ``ScoredAttempt(task="calc-1", family="repair", policy=v7, value=1.0)``
    """

    task: str
    family: str
    policy: PolicyVersion
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCoverage:
    """The coverage of one checkpoint.

    `rates` is None if no task was attempted k times; `short` counts the tasks attempted less often, which do not count. `change` is against
    the first checkpoint that has rates: None for that one, and if too few tasks are in common.

    Example: ``CheckpointCoverage(policy=v7, attempts=800, short=0, rates=rates, change=change)``
    """

    policy: PolicyVersion
    attempts: int
    short: int
    rates: PassRates | None
    change: Sharpening | None


def covered(attempts: Iterable[ScoredAttempt], k: int) -> tuple[CheckpointCoverage, ...]:
    """Return every checkpoint's rates, oldest first. Each interval is a 95% interval on its own."""
    by_policy: dict[PolicyVersion, list[ItemScore]] = {}
    draws: dict[tuple[PolicyVersion, str], int] = {}
    for each in attempts:
        at = draws.get((each.policy, each.task), 0)
        draws[each.policy, each.task] = at + 1
        by_policy.setdefault(each.policy, []).append(ItemScore(item=each.task, draw=at, score=each.value))
    rows: list[CheckpointCoverage] = []
    first: tuple[PolicyVersion, list[ItemScore]] | None = None
    for policy in sorted(by_policy):
        whole = [score for score in by_policy[policy] if draws[policy, score.item] >= k]
        tasks = {score.item for score in by_policy[policy]}
        change = (
            sharpening(whole, first[1], k, 0.95, against=Incumbent.ANCHOR, policy=first[0])
            if first is not None and whole
            else None
        )
        rows.append(
            CheckpointCoverage(
                policy=policy,
                attempts=len(by_policy[policy]),
                short=sum(draws[policy, task] < k for task in tasks),
                rates=pass_rates(whole, k) if whole else None,
                change=change,
            )
        )
        first = first or ((policy, whole) if whole else None)
    return tuple(rows)


def lost_coverage(rows: Sequence[CheckpointCoverage]) -> CheckpointCoverage | None:
    """Return the newest checkpoint with rates if it lost coverage since the first: pass@1 rose and best-of-k fell, both significantly."""
    newest = next((row for row in reversed(rows) if row.rates is not None), None)
    return newest if newest is not None and newest.change is not None and newest.change.narrowed else None
