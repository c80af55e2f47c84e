"""How soon people of opposite wishes are dealt the style that pleases them, and whether the recorded odds give unbiased values.

    python -m benchmarks.adaptation.styles [--people 96] [--looks 60]

No model: four arms, and people of two camps. With no style somebody accepts an answer with probability 0.5; the one camp accepts 0.75 of
the answers in the style `concise` and 0.35 of those in `warm`, the other the opposite, and `steps` pleases neither; each person differs
from their camp by 0.07 (standard deviation) for each arm. Each conversation is one rated answer, dealt with the odds of that moment.

*Gap closed* is (expected acceptance under the odds - that without any style) / (acceptance under each person's own best arm - that without
any style). The product's own classes deal and learn: turns and ratings go through a log and the fold of states; the fitted prior is that of
60 others with 30 ratings each. `same for all` is the best single arm for everybody.

*Values*: in many small runs (30 people, 40 conversations) the odds on the turns say what each arm would have given all people (IPS
with h = 1, SNIPS), and by how much more than none (`release.auto.offpolicy.difference`); *plain* is the mean of the turns that had the arm.
The planted truth is the mean of people's acceptance probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS
from numpy.typing import NDArray

from ostinato.adapt.config import AdaptConfig, StylesConfig
from ostinato.adapt.learner import PersonState, Regression, names_hash
from ostinato.adapt.prior import flat_prior
from ostinato.adapt.styles import StyleAdaptation, styles_of, thompson_odds
from ostinato.core.records import Person
from ostinato.core.steering import NO_STYLE
from ostinato.record.config import Encrypt
from ostinato.record.person_cache import SqlPersonCache
from ostinato.release.auto.offpolicy import LoggedTurns, difference
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

Floats = NDArray[np.float64]

AT = (0, 5, 20, 100)
CONFIG = AdaptConfig(
    users="declared",
    holdout=0.0,
    prior_people=20,
    styles=StylesConfig(prompts={"concise": "a", "warm": "b", "steps": "c"}),
)
ARMS = (NO_STYLE, *(style.arm for style in styles_of(CONFIG)))
_CAMP = np.array([[0.5, 0.75, 0.35, 0.5], [0.5, 0.35, 0.75, 0.5]])
_EFFECT = 2.5  # `adapt.styles`'


def wishes(people: int, rng: np.random.Generator) -> Floats:
    """Each person's probability of accepting an answer in each arm, shape [people, arms]."""
    camps_P = np.arange(people) % 2
    return np.clip(_CAMP[camps_P] + 0.07 * rng.standard_normal((people, len(ARMS))), 0.05, 0.95)


class Product:
    """People in a log, and the product's dealing to them."""

    def __init__(self, directory: Path, seed: int, config: AdaptConfig = CONFIG) -> None:
        self._log, self._rng, self._number = MemoryLog(), np.random.default_rng(seed), 0
        cache = SqlPersonCache(directory / "styles.sqlite", None, Encrypt.NONE, most=100_000)
        self.dealer = StyleAdaptation(
            self._log, cache, config, clock=lambda: 1e6 + self._number, chance=lambda: float(self._rng.random())
        )

    async def rate(self, people: list[Person], accepts_PA: Floats) -> None:
        """Everybody has a conversation of one answer, and rates it."""
        for person, accepts_A in zip(people, accepts_PA, strict=True):
            self._number += 1
            pick = self.dealer.deal(person, ARMS[1:])
            assert pick is not None
            turn = replace(a_turn(f"t{self._number}:0", user=person[1], ended_at=100.0 + self._number), style=pick)
            accepted = float(self._rng.random() < accepts_A[ARMS.index(pick.arm)])
            await self._log.append(turn, a_signal(turn, "accepted", at=turn.ended_at + 0.5, id=turn.id, value=accepted))
        await self.dealer.follow()

    async def closed(self, people: list[Person], accepts_PA: Floats) -> float:
        """The share of the gap that is closed now."""
        odds_PA = np.array([[*self.dealer.odds(person, ARMS).values()] for person in people])
        none_P, best_P = accepts_PA[:, 0], accepts_PA.max(1)
        return float((np.sum(odds_PA * accepts_PA, axis=1) - none_P).mean() / (best_P - none_P).mean())


async def curve(people: int, seed: int, others: int) -> dict[str, float]:
    """The gap closed after so many ratings of each person; with `others` first, the prior is fitted to them."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as directory:
        product, found = Product(Path(directory), seed), dict[str, float]()
        await product.dealer.follow()
        if others:
            before = [("default", f"before {number}") for number in range(others)]
            before_PA = wishes(others, rng)
            for _ in range(30):
                await product.rate(before, before_PA)
            assert await product.dealer.refit()
            await product.dealer.follow()
        new, accepts_PA = [("default", f"u{number}") for number in range(people)], wishes(people, rng)
        for number in range(AT[-1] + 1):
            if number in AT:
                found[str(number)] = await product.closed(new, accepts_PA)
            await product.rate(new, accepts_PA)
        single = accepts_PA.mean(0).max() - accepts_PA[:, 0].mean()
        found["same for all"] = float(single / (accepts_PA.max(1) - accepts_PA[:, 0]).mean())
    return found


def run(seed: int, people: int = 30, turns: int = 40) -> tuple[LoggedTurns, Floats]:
    """A small run by the learner itself, and people's wishes."""
    rng, regression, prior = np.random.default_rng(seed), Regression(), flat_prior(len(ARMS))
    accepts_PA, rows = wishes(people, rng), list[tuple[int, int, Floats, float]]()
    for person in range(people):
        state = PersonState.new(names_hash(ARMS), len(ARMS))
        for place in range(1, turns + 1):
            told = state.posterior(prior, regression)
            odds_A = thompson_odds(
                _EFFECT * told.mean_D[:-1], _EFFECT**2 * told.covariance_DD[:-1, :-1], CONFIG.styles.floor
            )
            arm = int(rng.choice(len(ARMS), p=odds_A / odds_A.sum()))
            reward = float(rng.random() < accepts_PA[person, arm])
            features = tuple(_EFFECT * (each == arm) for each in range(len(ARMS)))
            state = state.rate(place, features, place, reward, prior, regression)
            rows.append((person, arm, odds_A, reward))
    users, arms, odds, rewards = zip(*rows, strict=True)
    logged = LoggedTurns(
        users_N=np.array(users), arms_N=np.array(arms), odds_NA=np.array(odds), rewards_N=np.array(rewards)
    )
    return logged, accepts_PA


def values(looks: int) -> dict[str, dict[str, float]]:
    """Over many runs, by arm: how far estimates lie from the planted truth, and how often the difference's interval holds it."""
    errors: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for seed in range(looks):
        logged, accepts_PA = run(seed)
        truth_A = accepts_PA.mean(0)
        for arm, name in enumerate(ARMS):
            weights_N = (logged.arms_N == arm) / logged.propensities_N
            ips = float((weights_N * logged.rewards_N).mean())
            snips = float(weights_N @ logged.rewards_N / weights_N.sum())
            plain = float(logged.rewards_N[logged.arms_N == arm].mean())
            held, gain = 1.0, 0.0
            if arm:
                found = difference(logged, arm, 0)
                gain = found.mean - (truth_A[arm] - truth_A[0])
                held = float(found.lower <= truth_A[arm] - truth_A[0] <= found.upper)
            errors[name].append([ips - truth_A[arm], snips - truth_A[arm], plain - truth_A[arm], gain, held])
    told: dict[str, dict[str, float]] = {}
    for name, rows in errors.items():
        rows_RV = np.array(rows)
        mean_V, error_V = rows_RV.mean(0), rows_RV.std(0, ddof=1) / np.sqrt(looks)
        told[name.partition("@")[0]] = {
            **{f"{what} bias": float(mean_V[k]) for k, what in enumerate(("ips", "snips", "plain", "gain"))},
            **{f"{what} error": float(error_V[k]) for k, what in enumerate(("ips", "snips", "plain", "gain"))},
            "gain covered": float(mean_V[4]),
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=96)
    parser.add_argument("--looks", type=int, default=60, help="runs whose recorded odds are used for values")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptation_styles.json")
    args = parser.parse_args()
    curves = {
        name: asyncio.run(curve(args.people, args.seed, others)) for name, others in (("flat", 0), ("fitted", 60))
    }
    told = {"people": args.people, "looks": args.looks, "seed": args.seed, "gap": curves, "values": values(args.looks)}
    args.out.write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
