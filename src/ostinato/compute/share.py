"""Sets the number of rollout workers for a given share of sampling in all operations. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRules:
    """Sampling should get `share` of the time of all workers, including borrowed ones.

    Nothing moves for a gap of less than `slack` workers (hysteresis), and at most `moves` workers move at once.

    Example: ``ShareRules(share=1 / 3)``
    """

    share: float = 1 / 3
    slack: float = 0.75
    moves: int = 4


def rollout_workers(rules: ShareRules, workers: int, least: int, most: int, observed: float) -> int:
    """The number of rollout workers wanted, given `workers` now and sampling's share `observed` of all operations.

    The trainer stays while rollout workers come and go, so sampling's operations are assumed to grow with their number and training's not
    to. The target brings sampling's odds to those of the share. If something else limits sampling (the turns ready for the trainer, or the
    engine), the number ends at `most` or `least`.

    Example: ``rollout_workers(ShareRules(share=0.5), 2, 1, 8, observed=1 / 3) == 4``
    """
    seen = min(max(observed, 1e-3), 1 - 1e-3)
    wanted = max(1, workers) * (rules.share / (1 - rules.share)) / (seen / (1 - seen))
    gap = min(float(most), max(float(least), wanted)) - workers
    if abs(gap) < rules.slack and least <= workers <= most:
        return workers
    return min(most, max(least, workers + max(-rules.moves, min(rules.moves, round(gap)))))
