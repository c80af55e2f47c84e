"""What differential privacy of the shared prior costs new people, and whether a published prior tells who was in it.

    python -m benchmarks.adaptation.membership [--quick]

The world and the learner are those of `benchmarks.adaptation.learning`. A prior is released once from so many people with 30 ratings each,
with the noise of `adapt.privacy` at an epsilon (and delta 1e-6) or without noise; *gap closed* is that of other people who begin with it.

*Membership*: half of the people of a pool are in the release. The attacker sees the noised sums, from which the prior is computed, and
knows the mean and covariance of people's contributions, the noise, and each suspect's own contribution; the test is the likelihood ratio
of Gaussians, the best that is linear. *AUC* is the probability that a member scores above a non-member: over everybody, and for a planted
person whose contribution is as long as the clip allows and rare, whose AUC by the mechanism alone is at most Phi(1 / (sigma sqrt 2)).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
from benchmarks.adaptation.learning import DIALS, World, course
from benchmarks.contender import RESULTS

from ostinato.adapt.learner import Floats, Prior, Regression
from ostinato.adapt.prior import fit_prior, flat_prior
from ostinato.adapt.privacy import GRID, Grid, contribution, gaussian_sigma, noised, prior_of

CLIP, DELTA = 0.3, 1e-6
EPSILONS = (None, 8.0, 2.0, 0.5)


def sigma_of(epsilon: float | None) -> float:
    """The noise multiplier of one release; 0 without privacy."""
    return 0.0 if epsilon is None else gaussian_sigma(epsilon, DELTA)


def membership(pool_NP: Grid, people: int, sigma: float, *, trials: int, seed: int = 0) -> tuple[float, float]:
    """The AUC of the likelihood ratio over a pool's people, of whom `people` are in each release, and that for a planted person."""
    rng = np.random.default_rng(seed)
    told_NP = pool_NP[:, :-1] / GRID  # the count is public in this attack
    mean_P = told_NP.mean(0)
    noise = sigma * math.sqrt(2)
    covariance_PP = people * np.cov(told_NP.T) + (noise**2 + 1e-9) * np.eye(len(mean_P))
    suspects_NP = told_NP - mean_P
    weights_NP = np.linalg.solve(covariance_PP, suspects_NP.T).T
    half_N = 0.5 * (weights_NP * suspects_NP).sum(1)
    planted_P = np.zeros(len(mean_P))
    planted_P[0], planted_P[DIALS] = -1.0, math.sqrt(15) / 4  # the largest that counts, and unlike others
    planted_weights_P = np.linalg.solve(covariance_PP, planted_P)
    found, planted = list[float](), list[float]()
    for _ in range(trials):
        inside = np.zeros(len(told_NP), bool)
        inside[rng.choice(len(told_NP), people, replace=False)] = True
        shown_P = told_NP[inside].sum(0) - people * mean_P + noise * rng.normal(size=len(mean_P))
        score_N = weights_NP @ shown_P - half_N
        found.append(auc(score_N[inside], score_N[~inside]))
        planted.append(float(planted_weights_P @ shown_P))
    without = np.array(planted)
    return float(np.mean(found)), auc(without + planted_weights_P @ planted_P, without)


def auc(inside_N: Floats, outside_N: Floats) -> float:
    """The probability that one of the first scores above one of the second (Mann-Whitney); equal scores count half."""
    outside_N = np.sort(outside_N)
    below_N = (np.searchsorted(outside_N, inside_N, "left") + np.searchsorted(outside_N, inside_N, "right")) / 2
    return float(below_N.mean() / len(outside_N))


def gap_closed(world: World, priors: Sequence[Prior], wishes_NK: Floats, at: Sequence[int]) -> dict[str, float]:
    """The share of the gap to the oracle's dials that people close after so many ratings, averaged over priors."""
    frozen, oracle = (
        each.mean() for each in (world.acceptance(wishes_NK, np.zeros_like(wishes_NK)), world.oracle(wishes_NK))
    )
    came = [course(world, wishes_NK, prior, Regression(), at=at).acceptance for prior in priors]
    return {str(n): float((np.mean([each[n] for each in came]) - frozen) / (oracle - frozen)) for n in at}


def main() -> None:
    """Print both tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="priors from 100 and 500 people, 32 others who begin with them"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptation_membership.json")
    args = parser.parse_args()
    sizes, count, repeats, trials = ((100, 500), 32, 1, 100) if args.quick else ((100, 1000, 10_000), 192, 3, 400)
    world, rows = World(3), list[dict[str, object]]()
    evidence = world.rated(max(sizes[-1], 2 * sizes[-2]), 1, 30)
    pool_NP = np.stack([contribution(each, CLIP) for each in evidence])
    norm_N = np.linalg.norm(pool_NP[:, :DIALS] / GRID, axis=1)
    print(f"slopes' norm: median {CLIP * np.median(norm_N):.3f}, clipped at {CLIP}: {np.mean(norm_N > 0.999):.1%}")
    wishes_NK = world.people(count, 901)
    for people in sizes:
        em = gap_closed(world, [fit_prior(evidence[:people], flat_prior(DIALS))], wishes_NK, (0, 5, 20))
        print(f"{people} people, EM without privacy: " + " ".join(f"{n}: {share:+.0%}" for n, share in em.items()))
        rows.append({"people": people, "epsilon": "em", "gap": em})
        for epsilon in EPSILONS:
            sigma, gauss = sigma_of(epsilon), random.Random(people).gauss
            total_P = pool_NP[:people].sum(0)
            priors = [prior_of(noised(total_P, sigma, gauss), CLIP)[0] for _ in range(repeats)]
            gap = gap_closed(world, priors[: 1 if epsilon is None else repeats], wishes_NK, (0, 5, 20))
            row: dict[str, object] = {"people": people, "epsilon": epsilon, "sigma": sigma, "gap": gap}
            told = " ".join(f"{n}: {share:+.0%}" for n, share in gap.items())
            if 2 * people <= len(pool_NP):
                row["auc"], row["planted"] = membership(pool_NP[: 2 * people], people, sigma, trials=trials)
                most = NormalDist().cdf(1 / (sigma * math.sqrt(2))) if sigma else 1.0
                told += f"; AUC {row['auc']:.3f}, planted person {row['planted']:.3f} (at most {most:.3f})"
            rows.append(row)
            print(f"{people} people, epsilon {epsilon}, sigma {sigma:.2f}: gap closed {told}", flush=True)
    args.out.write_text(json.dumps({"clip": CLIP, "delta": DELTA, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
