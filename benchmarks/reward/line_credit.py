"""The value of line-by-line credit: how many answers an estimate of the gradient takes, on simulated answers whose lines survive or not.

An answer has m lines; each is drawn from three variants, and a variant decides how likely its line is to survive. In the world `apart`
lines survive independently; in `linked` each of the first lines is lost with a chance of 1/2, too, if the line before it is lost (a removed
line takes the next one along). The objective is the expected share of lines that survive. "cosine" is that of the estimate from 144
answers with the exact gradient, the mean over seeds. "times" is how many times as many answers the credit of whole answers needs for
the cosine that line-by-line credit has from 144 (interpolated; ">64" if 64 times are too few). "own alone" credits each line with its own
fate only, "reward-to-go" with the sum of all later ones, "ours" as `reward.line_credit`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS
from numpy.typing import NDArray

from ostinato.core.records import LineValues
from ostinato.reward.line_credit import discounted

LINES, ANSWERS, VARIANTS, TIMES = (4, 9, 16, 32), 144, 3, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
TAKEN_ALONG = 0.5
Floats = NDArray[np.float64]


def ours(lines: int) -> Floats:
    """The weights of each line's fate (columns) in each line's credit (rows), read off the product's own function."""
    weights = np.zeros((lines, lines))
    for own in range(lines):
        runs = tuple((line, line, float(line == own + 1)) for line in range(1, lines + 1))
        for line, value in discounted(LineValues(call=0, argument="", lines=lines, runs=runs)).items():
            weights[line - 1, own] = value
    return weights


def credits_of(lines: int) -> dict[str, Floats]:
    """The weights of each way of giving credit."""
    return {
        "whole answer": np.full((lines, lines), 1.0 / lines),
        "reward-to-go": np.triu(np.ones((lines, lines))),
        "own alone": np.eye(lines),
        "ours": ours(lines),
    }


class Answers:
    """Simulated answers of so many lines, with the exact gradient of the share that survives."""

    def __init__(self, lines: int, seed: int, *, linked: bool) -> None:
        self._rng = np.random.default_rng(seed)
        self._odds_LK = self._rng.dirichlet(np.ones(VARIANTS), lines)
        self._stays_LK = self._rng.uniform(0.1, 0.9, (lines, VARIANTS))
        self._along = TAKEN_ALONG if linked else 0.0
        chance_L = (self._odds_LK * self._stays_LK).sum(1)
        slope_LK = self._odds_LK * (self._stays_LK - chance_L[:, None])
        # P(line l stands) = chance of its own x (1 - along x P(the line before is lost))
        stands_L, factor_L = np.zeros(lines), np.ones(lines)
        for at in range(lines):
            factor_L[at] = 1.0 - self._along * (1.0 - stands_L[at - 1]) if at else 1.0
            stands_L[at] = chance_L[at] * factor_L[at]
        reach_L = np.zeros(lines)  # how much the sum of this line and the later ones changes with this line's standing
        for at in range(lines - 1, -1, -1):
            reach_L[at] = 1.0 + (chance_L[at + 1] * self._along * reach_L[at + 1] if at + 1 < lines else 0.0)
        self.exact_LK = slope_LK * (factor_L * reach_L)[:, None]

    def cosine(self, answers: int, weights_LL: Floats) -> float:
        """Of an estimate from so many answers, with the batch's mean as baseline."""
        lines = len(self._odds_LK)
        drawn_NL = (self._rng.random((answers, lines, 1)) > self._odds_LK.cumsum(1)).sum(2).clip(max=VARIANTS - 1)
        kept_NL = self._rng.random((answers, lines)) < self._stays_LK[np.arange(lines), drawn_NL]
        for at in range(1, lines):
            taken_N = ~kept_NL[:, at - 1] & (self._rng.random(answers) < self._along)
            kept_NL[:, at] &= ~taken_N
        credit_NL = kept_NL @ weights_LL.T
        credit_NL = credit_NL - credit_NL.mean(0)
        found_LK = np.stack([((drawn_NL == k) * credit_NL).sum(0) for k in range(VARIANTS)], axis=1)
        found_LK -= credit_NL.sum(0)[:, None] * self._odds_LK
        return float((found_LK * self.exact_LK).sum() / np.linalg.norm(found_LK) / np.linalg.norm(self.exact_LK))


def measure(lines: int, seeds: int, *, linked: bool) -> dict[str, float]:
    """The cosine of each credit, and how many times as many answers the whole answer's credit needs for the cosine of ours."""
    worlds = [Answers(lines, seed, linked=linked) for seed in range(seeds)]

    def mean(answers: int, weights: Floats) -> float:
        return float(np.mean([world.cosine(answers, weights) for world in worlds]))

    found = {name: mean(ANSWERS, weights) for name, weights in credits_of(lines).items()}
    reached = [mean(times * ANSWERS, credits_of(lines)["whole answer"]) for times in TIMES]
    enough = found["ours"] <= max(reached)
    found["times"] = float(np.interp(found["ours"], np.maximum.accumulate(reached), TIMES)) if enough else float("inf")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "line_credit.json")
    args = parser.parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for world in ("apart", "linked"):
        found[world] = {lines: measure(lines, args.seeds, linked=world == "linked") for lines in LINES}
        for lines, row in found[world].items():
            print(f"{world:<8}{lines:>3} lines  " + "  ".join(f"{name} {value:.3f}" for name, value in row.items()))
    args.out.write_text(json.dumps({"seeds": args.seeds, "answers": ANSWERS, "worlds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
