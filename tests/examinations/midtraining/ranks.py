"""The rank correlation of losses and rewards, with its uncertainty over tasks and seeds. Pure functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Floats = NDArray[np.float64]
DRAWS = 10_000


def rank_correlations(losses_C: Floats, rewards_DC: Floats) -> Floats:
    """[D]: Spearman's correlation of minus the losses with each row of rewards; 1 if the order is the same, 0 if a row is constant."""
    x_C, y_DC = rankdata(-losses_C), rankdata(rewards_DC, axis=1)
    x_C, y_DC = x_C - x_C.mean(), y_DC - y_DC.mean(1, keepdims=True)
    size_D = np.sqrt((x_C**2).sum() * (y_DC**2).sum(1))
    return np.divide(y_DC @ x_C, size_D, out=np.zeros(len(y_DC)), where=size_D > 0)


def resampled(rewards_CSF: Floats, draws: int = DRAWS) -> Floats:
    """[draws, C]: mean rewards of C models under bootstrap draws of seeds and families, the same ones for all models."""
    _, seeds, families = rewards_CSF.shape
    chance = np.random.default_rng(0)
    of_seeds = chance.multinomial(seeds, np.full(seeds, 1 / seeds), draws) / seeds
    of_families = chance.multinomial(families, np.full(families, 1 / families), draws) / families
    return np.einsum("csf,ds,df->dc", rewards_CSF, of_seeds, of_families)


def ranked(losses_C: Floats, rewards_CSF: Floats) -> dict[str, object]:
    """Mean rewards and the rank correlation, each with a 95% percentile interval over bootstrap draws of seeds and families.

    `in_order`: the share of draws in which losses and rewards have exactly the same order. With three models one order in six is
    right by chance alone, whatever the intervals say.
    """
    drawn_DC = resampled(rewards_CSF)
    means_C = rewards_CSF.mean((1, 2))
    rho_D = rank_correlations(losses_C, drawn_DC)
    lower_C, upper_C = np.quantile(drawn_DC, (0.025, 0.975), axis=0)
    return {
        "rewards": [
            {"mean": float(mean), "lower": float(lower), "upper": float(upper)}
            for mean, lower, upper in zip(means_C, lower_C, upper_C, strict=True)
        ],
        "rank_correlation": float(rank_correlations(losses_C, means_C[None])[0]),
        "lower": float(np.quantile(rho_D, 0.025)),
        "upper": float(np.quantile(rho_D, 0.975)),
        "in_order": float((rho_D > 1 - 1e-9).mean()),
    }
