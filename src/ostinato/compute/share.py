"""Which workers sample and which train, and how many make rollouts, so that sampling gets a set share of compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRules:
    """Sampling shall have `share` of the time of all workers, borrowed ones among them.

    Nothing moves for less than `slack` of a worker (hysteresis), and at most `moves` workers at once.

    Example: ``ShareRules(share=1 / 3)``
    """

    share: float = 1 / 3
    slack: float = 0.75
    moves: int = 4


def moved(rules: ShareRules, workers: int, sampling: int, borrowed: float, observed: float) -> int:
    """How many of `workers` go from training to sampling (negative: back), of which `sampling` sample now.

    Wanted are as many as give the share beside `borrowed` samplers, and more or less of them by what was lately (`observed`, a share)
    missed. To be asked between two optimizer steps only: so no step loses a worker, and who begins to sample begins with the newest
    version.

    Example: ``moved(ShareRules(share=0.5), workers=10, sampling=2, borrowed=0, observed=0.5) == 3``
    """
    whole = workers + borrowed
    wanted = rules.share * whole - borrowed + (rules.share - observed) * whole
    gap = min(float(workers), max(0.0, wanted)) - sampling
    if abs(gap) < rules.slack:
        return 0
    return max(-rules.moves, min(rules.moves, round(gap)))


def rollout_workers(rules: ShareRules, workers: int, least: int, most: int, observed: float) -> int:
    """How many rollout workers there should be, where there are `workers` and sampling had the share `observed` of all operations.

    Rollout workers come and go beside a trainer that stays, so operations of sampling are taken to grow with them, and those of training
    not to: wanted are as many as bring sampling's odds to those of the share. Where something else bounds sampling (what lies ready for the
    trainer, or the engine), they end at `most` or `least`.

    Example: ``rollout_workers(ShareRules(share=0.5), 2, 1, 8, observed=1 / 3) == 4``
    """
    seen = min(max(observed, 1e-3), 1 - 1e-3)
    wanted = max(1, workers) * (rules.share / (1 - rules.share)) / (seen / (1 - seen))
    gap = min(float(most), max(float(least), wanted)) - workers
    if abs(gap) < rules.slack and least <= workers <= most:
        return workers
    return min(most, max(least, workers + max(-rules.moves, min(rules.moves, round(gap)))))
