"""How much of what dials can do for a person is learned from how many ratings, by the product's learner, on simulated people.

    python -m benchmarks.adaptation.learning [--people 192] [--quick] [--ablations]

A simulated model draws 24 tokens an answer; 64 of its tokens are steerable, by 8 dials. Each dial has an attribute of answers that it
moves, and that other things move as well. A person accepts an answer with probability sigmoid(1.5 w . attributes), w drawn around a mean
that people share. *Gap closed* is (acceptance - frozen) / (oracle - frozen); the oracle's dials are the regression of a person's true
probabilities on 20,000 frozen answers, at the best of eight scales. All methods get the same random numbers, and each token's exact KL
is capped.

`population` is the prior's mean for everybody, `flat` a prior of the same width without its mean, `gradient` REINFORCE on the dials with a
running mean of the rewards as baseline. Adversaries: `random` accepts by coin flips, `one-sided` accepts what raises the sum of the
features, `wrong` always says the opposite, `inverted` wishes the opposite from the 50th rating on. `late` is honest: half of the signals
come up to ten answers later, and half are sent wrong at first and retracted.

Two organisations of opposite wishes beside five others go through the gateway's classes: their log is folded, the prior is fitted to it and
written to it (`adapt.prior`), and new people come, with `prior = "own"` and with "shared".

`--ablations`: 64 new people after 120 others with 30 ratings each, all through the gateway's classes, as they are and with one thing off
at a time: the prior, the features (each rating has those of another person's answer), forgetting (`adapt.decay = 1`), the reset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS
from numpy.typing import NDArray

from ostinato.adapt.config import AdaptConfig, TenantAdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.learner import Evidence, Floats, PersonState, Prior, Regression
from ostinato.adapt.prior import fit_prior, flat_prior
from ostinato.core.records import Person, Row, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.record.config import Encrypt
from ostinato.record.person_cache import SqlPersonCache
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

DIALS, STEERABLE, TOKENS, QUESTIONS = 8, 64, 24, 36
CAP, NATS, CLIP = 0.1, 0.1, 2.0
AT = (0, 5, 20, 100)
_NAMES = "00" * 16


@dataclass(frozen=True)
class Answers:
    """N answers: features, attributes, and of the KL the largest of a token and the sum."""

    features_NK: Floats
    attributes_NK: Floats
    worst_N: Floats
    nats_N: Floats


class World:
    """The simulated model, its dials and people."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits_QTV = 1.5 * rng.normal(size=(QUESTIONS, TOKENS, STEERABLE))
        weights_QTV = np.exp(logits_QTV)
        rest_QT = 0.5 * weights_QTV.sum(-1)  # two thirds of the probability are steerable
        self._base_QTV = weights_QTV / (weights_QTV.sum(-1) + rest_QT)[..., None]
        self.directions_KV = rng.normal(size=(DIALS, STEERABLE)) * (rng.random((DIALS, STEERABLE)) < 0.3)
        self._counts_KV = self.directions_KV + 0.8 * rng.normal(size=(DIALS, STEERABLE))
        self._mean_K, self._deviation_K = np.zeros(DIALS), np.ones(DIALS)
        self._loadings = rng.normal(size=(DIALS, 3)) / np.sqrt(3)
        self._shared_K = rng.normal(size=DIALS) * 0.35
        frozen = self.answer(np.zeros((20_000, DIALS)), np.random.default_rng(seed + 1))
        self._mean_K, self._deviation_K = frozen.attributes_NK.mean(0), frozen.attributes_NK.std(0)
        self.frozen = replace(frozen, attributes_NK=self._standard(frozen.attributes_NK))
        self.fisher_KK = np.cov(frozen.features_NK.T)

    def _standard(self, attributes_NK: Floats) -> Floats:
        return np.clip((attributes_NK - self._mean_K) / self._deviation_K, -3, 3)

    def people(self, count: int, seed: int, mean_K: Floats | None = None) -> Floats:
        """The wishes (count, K) of so many people."""
        rng = np.random.default_rng(seed)
        shared = self._shared_K if mean_K is None else mean_K
        wishes = shared + 0.55 * rng.normal(size=(count, 3)) @ self._loadings.T + 0.45 * rng.normal(size=(count, DIALS))
        return wishes * 2.0 / np.sqrt(DIALS)

    def answer(self, dials_NK: Floats, rng: np.random.Generator) -> Answers:
        """One answer each, to a question drawn at random."""
        count = len(dials_NK)
        question_N, drawn_NT = rng.integers(0, QUESTIONS, count), rng.random((count, TOKENS))
        features, attributes = np.empty((count, DIALS)), np.empty((count, DIALS))
        worst, nats = np.zeros(count), np.zeros(count)
        for start in range(0, count, 256):
            part = slice(start, min(count, start + 256))
            base_NTV = self._base_QTV[question_N[part]]
            shift_NV = np.clip(dials_NK[part] @ self.directions_KV, -CLIP, CLIP)
            scale_NT = self._scale(base_NTV, shift_NV)
            raised_NTV = base_NTV * np.exp(scale_NT[..., None] * shift_NV[:, None])
            total_NT = 1 + (raised_NTV - base_NTV).sum(-1)
            steered_NTV = raised_NTV / total_NT[..., None]
            kl_NT = (steered_NTV * shift_NV[:, None]).sum(-1) * scale_NT - np.log(total_NT)
            worst[part], nats[part] = kl_NT.max(1), kl_NT.sum(1)
            token_NT = (steered_NTV.cumsum(-1) < drawn_NT[part, :, None]).sum(-1)  # STEERABLE: one of the others
            hit_NVT = (token_NT[:, None] == np.arange(STEERABLE)[:, None]).astype(float)
            counts_NV = hit_NVT.sum(-1)
            features[part] = (counts_NV - steered_NTV.sum(1)) @ self.directions_KV.T
            attributes[part] = counts_NV @ self._counts_KV.T
        told = self._standard(attributes) if self._mean_K.any() else attributes
        return Answers(features, told, worst, nats)

    @staticmethod
    def _scale(base_NTV: Floats, shift_NV: Floats) -> Floats:
        """Each token's largest scale with a KL within the cap, by bisection."""

        def kl(scale: Floats, base: Floats, shift: Floats) -> Floats:
            raised = base * np.exp(scale[:, None] * shift)
            total = 1 + (raised - base).sum(-1)
            return scale * (raised * shift).sum(-1) / total - np.log(total)

        shape = base_NTV.shape[:2]
        base, shift = base_NTV.reshape(-1, STEERABLE), np.repeat(shift_NV, shape[1], 0)
        low = np.ones(len(base))
        over = kl(low, base, shift) > CAP
        if over.any():
            base, shift = base[over], shift[over]
            least, most = np.zeros(len(base)), np.ones(len(base))
            for _ in range(12):
                middle = (least + most) / 2
                big = kl(middle, base, shift) > CAP
                least, most = np.where(big, least, middle), np.where(big, middle, most)
            low[over] = least
        return low.reshape(shape)

    def accepts(self, wishes_NK: Floats, answers: Answers) -> Floats:
        """The probability with which each person accepts their answer."""
        return 1 / (1 + np.exp(-1.5 * (wishes_NK * answers.attributes_NK).sum(1)))

    def acceptance(self, wishes_NK: Floats, dials_NK: Floats, repeats: int = 12) -> Floats:
        """Each person's mean acceptance at these dials."""
        rng = np.random.default_rng(99)
        return np.mean([self.accepts(wishes_NK, self.answer(dials_NK, rng)) for _ in range(repeats)], axis=0)

    def oracle(self, wishes_NK: Floats) -> Floats:
        """Each person's acceptance at the best scale along their true slopes."""
        chance_NA = 1 / (1 + np.exp(-1.5 * wishes_NK @ self.frozen.attributes_NK.T))
        features_AK = self.frozen.features_NK
        slopes_NK = np.linalg.solve(
            features_AK.T @ features_AK, features_AK.T @ (chance_NA - chance_NA.mean(1, keepdims=True)).T
        ).T
        squared_N = np.einsum("ni,ij,nj->n", slopes_NK, self.fisher_KK, slopes_NK)
        unit_NK = slopes_NK * np.sqrt(2 * NATS * TOKENS / squared_N)[:, None]
        return np.max(
            [self.acceptance(wishes_NK, scale * unit_NK) for scale in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)], axis=0
        )

    def dials(self, states: Sequence[PersonState], prior: Prior, regression: Regression) -> Floats:
        """Everybody's dials (N, K)."""
        told = [state.posterior(prior, regression) for state in states]
        asked = {"tokens": TOKENS, "nats": NATS, "strength": regression.strength}
        return np.array([each.dials(self.fisher_KK, **asked) for each in told])

    def rated(self, count: int, seed: int, ratings: int, wishes_NK: Floats | None = None) -> list[Evidence]:
        """What `ratings` ratings each of frozen answers say about other people: what a prior is fitted to."""
        wishes = self.people(count, seed) if wishes_NK is None else wishes_NK
        rng, flat, regression = np.random.default_rng(seed), flat_prior(DIALS), Regression(decay=1.0, limit=np.inf)
        found = [Evidence.none(DIALS)] * count
        states = [PersonState.new(_NAMES, DIALS) for _ in found]
        for turn in range(ratings):
            answers = self.answer(np.zeros((count, DIALS)), rng)
            liked = rng.random(count) < self.accepts(wishes, answers)
            states = [
                state.rate(turn + 1, row, turn, float(like), flat, regression)
                for state, row, like in zip(states, answers.features_NK, liked, strict=True)
            ]
        return [state.evidence(flat, regression) for state in states]


@dataclass(frozen=True)
class Course:
    """What came of a method: acceptance after so many ratings, the last dials, the largest KL of a token, the share of people who were
    returned to the prior, and by the 50th rating already."""

    acceptance: dict[int, Floats]
    dials_NK: Floats
    worst: float
    reset: float
    reset_early: float


Arrival = tuple[int, int, int, Floats, int, float | None]
"""When a signal comes, the person's number, the answer's place and features, the signal's number, and its reward; None retracts it."""


def _liked(world: World, wishes_NK: Floats, answers: Answers, drawn_N: Floats, feedback: str) -> NDArray[np.bool_]:
    """What people say of their answers."""
    if feedback == "one-sided":
        return answers.features_NK.sum(1) > 0
    if feedback == "random":
        return drawn_N < 0.5
    liked_N = drawn_N < world.accepts(wishes_NK, answers)
    return ~liked_N if feedback == "wrong" else liked_N


def _signals(
    turn: int, features_NK: Floats, liked_N: NDArray[np.bool_], rng: np.random.Generator, *, late: bool
) -> list[Arrival]:
    """What comes of a round of answers, now or later."""
    found: list[Arrival] = []
    for number, (row, like) in enumerate(zip(features_NK, liked_N, strict=True)):
        due = turn + (int(rng.integers(1, 11)) if late and rng.random() < 0.5 else 0)
        if late and rng.random() < 0.5:
            found.append((turn, number, turn + 1, row, 1000 + turn, float(not like)))
            found.append((due, number, turn + 1, row, 1000 + turn, None))
        found.append((due, number, turn + 1, row, turn, float(like)))
    return found


def course(
    world: World,
    wishes_NK: Floats,
    prior: Prior,
    regression: Regression,
    *,
    feedback: str = "honest",
    at: Sequence[int] = AT,
) -> Course:
    """The product's learner over as many ratings as the last of `at`. As in a gateway, states are folded with the flat prior."""
    rng, count = np.random.default_rng(7), len(wishes_NK)
    states = [PersonState.new(_NAMES, DIALS) for _ in range(count)]
    found, worst, early, flat = dict[int, Floats](), 0.0, 0.0, flat_prior(DIALS)
    delays, waiting = np.random.default_rng(8), list[Arrival]()
    for turn in range(max(at) + 1):
        wishes = -wishes_NK if feedback == "inverted" and turn >= 50 else wishes_NK
        dials = world.dials(states, prior, regression)
        if turn in at:
            found[turn] = world.acceptance(wishes, dials)
        answers = world.answer(dials, rng)
        worst = max(worst, float(answers.worst_N.max()))
        liked = _liked(world, wishes, answers, rng.random(count), feedback)
        if turn == 50:
            early = float(np.mean([state.evidence(flat, regression).resets > 0 for state in states]))
        if turn < max(at):
            waiting += _signals(turn, answers.features_NK, liked, delays, late=feedback == "late")
            for _, number, place, row, signal, reward in (each for each in waiting if each[0] <= turn):
                states[number] = states[number].rate(place, row.tolist(), signal, reward, flat, regression)
            waiting = [each for each in waiting if each[0] > turn]
    reset = float(np.mean([state.evidence(flat, regression).resets > 0 for state in states]))
    return Course(found, dials, worst, reset, early)


def gradient_course(world: World, wishes_NK: Floats, step: float, at: Sequence[int] = AT) -> dict[int, Floats]:
    """REINFORCE on the dials from zero."""
    rng, count = np.random.default_rng(7), len(wishes_NK)
    dials, mean_N, found = np.zeros((count, DIALS)), np.full(count, 0.5), dict[int, Floats]()
    for turn in range(max(at) + 1):
        if turn in at:
            found[turn] = world.acceptance(wishes_NK, dials)
        answers = world.answer(dials, rng)
        reward_N = (rng.random(count) < world.accepts(wishes_NK, answers)).astype(float)
        mean_N = 0.9 * mean_N + 0.1 * reward_N
        dials = dials + step * (reward_N - mean_N)[:, None] * answers.features_NK
        squared_N = np.einsum("ni,ij,nj->n", dials, world.fisher_KK, dials)
        dials = dials * np.minimum(1, np.sqrt(2 * NATS * TOKENS / np.maximum(squared_N, 1e-12)))[:, None]
    return found


def same_width(prior: Prior) -> Prior:
    """A prior without the slopes' mean, as wide as the slopes' second moments."""
    slopes = prior.mean_D[:-1]
    wide = (np.trace(prior.covariance_DD[:-1, :-1]) + slopes @ slopes) / DIALS
    return Prior.of(np.zeros(DIALS), wide * np.eye(DIALS))


def _table(world: World, count: int, others: int) -> dict[str, dict[str, float]]:
    wishes = world.people(count, 901)
    prior = fit_prior(world.rated(others, 1, 30), flat_prior(DIALS))
    frozen, oracle = world.acceptance(wishes, np.zeros((count, DIALS))), world.oracle(wishes)
    print(
        f"{count} people; acceptance frozen {frozen.mean():.3f}, oracle {oracle.mean():.3f}; prior from {others} others"
    )
    regression, rows = Regression(), dict[str, dict[str, float]]()

    def row(name: str, found: dict[int, Floats], frozen: Floats, oracle: Floats, **more: float) -> None:
        gap = {str(at): float((each - frozen).mean() / (oracle - frozen).mean()) for at, each in found.items()}
        worse = float(np.mean(found[max(found)] < frozen - 0.05))
        rows[name] = {**gap, "worse": worse, **more}
        told = "  ".join(f"{at}: {each:+.0%}" for at, each in gap.items())
        print(
            f"{name:<28}{told}  worse by > 5 points: {worse:.0%}  " + "  ".join(f"{k} {v:.3g}" for k, v in more.items())
        )

    start = [PersonState.new(_NAMES, DIALS)] * count
    row("population", {0: world.acceptance(wishes, world.dials(start, prior, regression))}, frozen, oracle)
    for name, with_prior, how in (
        ("ours", prior, regression),
        ("ours, decay 1", prior, Regression(decay=1.0)),
        ("ours, no reset", prior, Regression(limit=np.inf)),
        ("flat", same_width(prior), regression),
    ):
        came = course(world, wishes, with_prior, how)
        row(name, came.acceptance, frozen, oracle, token=came.worst, reset=came.reset)
    for step in (0.02, 0.1):
        row(f"gradient, step {step:g}", gradient_course(world, wishes, step), frozen, oracle)
    for feedback in ("random", "one-sided", "wrong", "late"):
        came = course(world, wishes, prior, regression, feedback=feedback)
        row(f"feedback {feedback}", came.acceptance, frozen, oracle, token=came.worst, reset=came.reset)
    frozen, oracle = world.acceptance(-wishes, np.zeros((count, DIALS))), world.oracle(-wishes)
    for name, how in (("inverted", regression), ("inverted, no reset", Regression(limit=np.inf))):
        came = course(world, wishes, prior, how, feedback="inverted", at=(50, 60, 70, 80, 90, 100, 120))
        row(name, came.acceptance, frozen, oracle, reset=came.reset, by_50=came.reset_early)
    for level in ("own", "shared"):
        for tenant, (wishes, found) in asyncio.run(organisations(world, level, count)).items():
            frozen, oracle = world.acceptance(wishes, np.zeros((count, DIALS))), world.oracle(wishes)
            row(f"organisation {tenant}, {level} prior", found, frozen, oracle)
    return rows


class Product:
    """The gateway's dials over a log in memory, whose answers are the simulated model's."""

    def __init__(self, world: World, config: AdaptConfig, directory: str, *, shuffled: bool = False) -> None:
        """`shuffled`: the features recorded with an answer are those of another one of the same round."""
        self._world, self._at, self._rng, self._shuffled = world, 1000.0, np.random.default_rng(8), shuffled
        tokens_M = np.arange(STEERABLE)
        names = tuple(f"dial {number}" for number in range(DIALS))
        self._basis = Basis(names, tokens_M, world.directions_KV.astype(np.float32), "0" * 64)
        self.log = MemoryLog()
        cache = SqlPersonCache(Path(directory) / "people.sqlite", None, Encrypt.NONE, most=100_000)
        self.adaptation = DialAdaptation(self.log, cache, config, clock=lambda: self._at)

    async def start(self) -> None:
        """Write the basis and read it."""
        await self.log.append(SteeringBasis.of(self._basis, at=1.0))
        await self.adaptation.follow()

    def dials(self, people: Sequence[Person]) -> Floats:
        """Everybody's dials (N, K), as their next answers would be steered."""
        asked = [self.adaptation.steering(person, weights=self._basis.weights, verified=True) for person in people]
        return np.array([steering.dials for steering in asked if steering is not None])

    async def rate(self, people: Sequence[Person], wishes_NK: Floats) -> None:
        """An answer to each of them, and what they say of it."""
        self._at += 10.0
        dials_NK = self.dials(people)
        answers = self._world.answer(dials_NK, self._rng)
        liked_N = self._rng.random(len(people)) < self._world.accepts(wishes_NK, answers)
        features_NK = np.roll(answers.features_NK, 1, axis=0) if self._shuffled else answers.features_NK
        rows = list[Row]()
        for number, (tenant, user) in enumerate(people):
            steered = Steered(
                basis=self._basis.hash,
                dials=tuple(dials_NK[number].tolist()),
                cap=CAP,
                budget=3.0,
                tokens=TOKENS,
                kl=float(answers.nats_N[number]),
                features=tuple(features_NK[number].tolist()),
            )
            turn = a_turn(f"{tenant} {user} {self._at:g}:0", user=user, ended_at=self._at)
            turn = replace(turn, tenant=tenant, steered=steered)
            rows += [turn, replace(a_signal(turn, id=turn.id, value=float(liked_N[number])), tenant=tenant)]
        await self.log.append(*rows)
        await self.adaptation.follow()


async def organisations(
    world: World,
    level: str,
    count: int,
    *,
    others: int = 40,
    rated: int = 20,
    ratings: int = 30,
    at: Sequence[int] = (0, 5, 20),
) -> dict[str, tuple[Floats, dict[int, Floats]]]:
    """Of two organisations, the wishes of `count` new people each, and their acceptance after so many ratings.

    Before them came `rated` people of each of the two, and `others` people of each of five other tenants, with `ratings` ratings each.
    """
    own = 0.8 * np.random.default_rng(5).normal(size=DIALS)
    planted = {"A": own, "B": -own}
    tenants = {tenant: TenantAdaptConfig.model_validate({"prior": level}) for tenant in planted}
    config = AdaptConfig(mode="dials", holdout=0.0, tenants=tenants)
    with tempfile.TemporaryDirectory() as directory:
        product = Product(world, config, directory)
        await product.start()
        past = [(tenant, f"past {k}") for tenant in planted for k in range(rated)]
        wishes = [world.people(rated, 61, mean_K) for mean_K in planted.values()]
        past += [(f"other {tenant}", f"past {k}") for tenant in range(5) for k in range(others)]
        wishes += [world.people(5 * others, 63)]
        for _ in range(ratings):
            await product.rate(past, np.concatenate(wishes))
        assert await product.adaptation.refit()
        await product.adaptation.follow()
        found = dict[str, tuple[Floats, dict[int, Floats]]]()
        for tenant, mean_K in planted.items():
            new, wishes_NK, came = (
                [(tenant, f"new {k}") for k in range(count)],
                world.people(count, 62, mean_K),
                dict[int, Floats](),
            )
            for turn in range(max(at) + 1):
                if turn in at:
                    came[turn] = world.acceptance(wishes_NK, product.dials(new))
                if turn < max(at):
                    await product.rate(new, wishes_NK)
            found[tenant] = wishes_NK, came
        await product.adaptation.close()
    return found


ABLATIONS: dict[str, tuple[dict[str, object], bool]] = {
    "as it is": ({}, False),
    "prior off": ({"prior": "flat"}, False),
    "features off": ({}, True),
    "forgetting off": ({"decay": 1.0}, False),
    "reset off": ({"reset": {"limit": 1e9}}, False),
}
"""What is set, and whether features are another answer's."""


async def ablated(
    world: World,
    settings: dict[str, object],
    wishes_NK: Floats,
    *,
    shuffled: bool = False,
    others: int = 120,
    ratings: int = 30,
    at: Sequence[int] = AT,
) -> tuple[dict[int, Floats], int]:
    """New people's acceptance after so many ratings each, and how many returns to the prior there were of theirs, by the gateway's classes.
    Before them `others` people came, with `ratings` ratings each.
    """
    config = AdaptConfig.model_validate({"mode": "dials", "holdout": 0.0, "prior_people": 20, **settings})
    with tempfile.TemporaryDirectory() as directory:
        product, found = Product(world, config, directory, shuffled=shuffled), dict[int, Floats]()
        await product.start()
        for _ in range(ratings if config.prior == "fitted" else 0):
            await product.rate([("past", f"{k}") for k in range(others)], world.people(others, 63))
        if config.prior == "fitted":
            assert await product.adaptation.refit()
            await product.adaptation.follow()
        new = [("new", f"{k}") for k in range(len(wishes_NK))]
        for turn in range(max(at) + 1):
            if turn in at:
                found[turn] = world.acceptance(wishes_NK, product.dials(new))
            if turn < max(at):
                await product.rate(new, wishes_NK)
        fold = product.adaptation.fold
        assert fold is not None
        states = [fold.state(person) for person in new]
        await product.adaptation.close()
    return found, sum((state.latest or state.settled).resets for state in states if state is not None)


def _ablations(world: World, count: int) -> dict[str, dict[str, float]]:
    """Share of the gap closed, with half the width of its 95% interval over people (of the mean, the gap held)."""
    wishes = world.people(count, 901)
    frozen, oracle = world.acceptance(wishes, np.zeros((count, DIALS))), world.oracle(wishes)
    gap, rows = float((oracle - frozen).mean()), dict[str, dict[str, float]]()
    print(f"{count} people; acceptance frozen {frozen.mean():.3f}, oracle {oracle.mean():.3f}")
    for name, (settings, shuffled) in ABLATIONS.items():
        came, resets = asyncio.run(ablated(world, settings, wishes, shuffled=shuffled))
        told = {at: ((each - frozen) / gap) for at, each in came.items()}
        rows[name] = {str(at): float(each.mean()) for at, each in told.items()}
        rows[name] |= {f"{at} +-": 1.96 * float(each.std(ddof=1)) / count**0.5 for at, each in told.items()}
        rows[name] |= {"worse": float(np.mean(came[max(came)] < frozen - 0.05)), "resets": resets}
        shown = "  ".join(f"{at}: {rows[name][str(at)]:+.0%} +- {rows[name][f'{at} +-']:.0%}" for at in came)
        print(f"{name:<16}{shown}  worse by > 5 points: {rows[name]['worse']:.0%}  resets {resets}", flush=True)
    return rows


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=192)
    parser.add_argument("--others", type=int, default=500, help="people whose ratings the prior is fitted to")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 people, and a prior from 100 others")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptation_learning.json")
    parser.add_argument("--ablations", action="store_true", help="of 64 people alone; the file keeps the other rows")
    args = parser.parse_args()
    people, others = (32, 100) if args.quick else (args.people, args.others)
    told = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.ablations:
        told["ablations"] = _ablations(World(args.seed), 64)
    else:
        told |= {
            "people": people,
            "others": others,
            "seed": args.seed,
            "rows": _table(World(args.seed), people, others),
        }
    args.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
