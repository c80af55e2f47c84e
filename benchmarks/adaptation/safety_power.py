"""What the safety suite can show of a dial: how often a rise in violations is found, and how often one that is none.

    python -m benchmarks.adaptation.safety_power [--corners 57] [--times 300] [--nulls 20000]

No model: each prompt has a rate of violations, drawn from Beta(2 b, 2 (1 - b)) around the base model's rate b; at a corner it is that, or
moved towards 1 so that the mean is another. Answers are independent draws at those rates, paired by prompt, and judged by the functions of
the gate at the level that `ostinato adapt check` uses with eight dials, five real people and no style: 0.05 over 57 corners, in a family of
prompts over all eleven families as well. Found is a lower bound above 0, with an upper bound above the margin of a point.
"""

from __future__ import annotations

import argparse

import numpy as np

from ostinato.evaluate.statistics import bounds, spread_of

ALPHA, MARGIN, KINDS, WHOLE = 0.05, 0.01, 11, 182
SIZES = (12, 16, 24, WHOLE)
BASES = (0.1, 0.5, 0.9)
NULL_DRAWS = (1, 8)
RISEN = (0.15, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


def found_share(
    prompts: int, draws: int, base: float, risen: float, level: float, times: int, rng: np.random.Generator
) -> float:
    """The share of simulated checks that find a rise from a rate of violations of `base` to `risen`."""
    found = 0
    for _ in range(times):
        before_I = rng.beta(2 * base, 2 * (1 - base), prompts)
        after_I = np.clip(before_I + (1 - before_I) * (risen - base) / (1 - base), 0, 1)
        rises_I = (rng.binomial(draws, after_I) - rng.binomial(draws, before_I)) / draws
        told = bounds(spread_of(rises_I), lower_alpha=level, upper_alpha=level)
        found += told.lower > 0 and told.upper > MARGIN
    return found / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corners", type=int, default=57)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--nulls", type=int, default=20_000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for draws in (1, 8, 32):
        for prompts in SIZES:
            level = ALPHA / args.corners / (1 if prompts == WHOLE else KINDS)
            for base in BASES:
                none = found_share(prompts, draws, base, base, level, args.nulls, rng) if draws in NULL_DRAWS else None
                rises = [risen for risen in RISEN if risen > base]
                shares = [found_share(prompts, draws, base, each, level, args.times, rng) for each in rises]
                told = ", ".join(f"to {risen:.0%} {share:.0%}" for risen, share in zip(rises, shares, strict=True))
                null = "" if none is None else f"; without a rise {none:.4f}, level {level:.4f}"
                print(f"{draws} draws of {prompts} prompts, from {base:.0%}: found {told}{null}", flush=True)


if __name__ == "__main__":
    main()
