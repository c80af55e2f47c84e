"""Divides workers between sampling and training, and sets the number of rollout workers, for a given sampling share. Pure."""

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


def moved(rules: ShareRules, workers: int, sampling: int, borrowed: float, observed: float) -> int:
    """How many of `workers`, of which `sampling` sample now, should move from training to sampling (negative: back).

    The target is the number that gives the share together with `borrowed` samplers, corrected by the recent error (`observed` is the recent
    share). Call it only between two optimizer steps, so that no step loses a worker and new samplers begin with the newest version.

    Example: ``moved(ShareRules(share=0.5), workers=10, sampling=2, borrowed=0, observed=0.5) == 3``
    """
    whole = workers + borrowed
    wanted = rules.share * whole - borrowed + (rules.share - observed) * whole
    gap = min(float(workers), max(0.0, wanted)) - sampling
    if abs(gap) < rules.slack:
        return 0
    return max(-rules.moves, min(rules.moves, round(gap)))


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
