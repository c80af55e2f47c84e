"""Values of turns: a linear value head (critic) on the model's hidden states, and generalised advantage estimation (GAE) over turns.

Data flow: samples with the credit that the log records -> the hidden state at the end of each turn's prompt, under the weights before the
step -> the head's prediction for each turn -> the samples with the remaining credit -> the step -> training of the head on them.

The recorded credit of a turn is its return minus the baseline, b(x, user) for people and the group's mean in worlds, in units of
its RMS. The head predicts that from the state, so V = b + head; a head without evidence predicts 0, and V is b.

A_t = e_t - (1 - lambda) sum_{k >= 1} lambda^(k-1) e_{t+k} with e_t = G_t - V(s_t), over the turns of an episode in their order, whatever
window each began in. That is GAE (Schulman et al., arXiv:1506.02438) with discount 1, written without rewards: with delta_t = (G_t -
G_{t+1}) + V(s_{t+1}) - V(s_t) it is sum_k lambda^k delta_{t+k}. So it suits ratings, which are discounted, as well as outcomes, which are
not.

Bias: none at lambda = 1, where V is a baseline that was learned from earlier batches and does not depend on the answer (except through the
scale below). Below 1 it is that of the head: a later turn's V stands in for its return, so errors of V are credited to the turns before. An
episode that was cut and continues is bootstrapped: its earlier turns get V at its last turn in place of the unknown rest, and the last turn
gets nothing for it. If groups without contrast are held back (`reward.flat_groups`), the others are selected by their outcomes: at a
state with the value v beyond the group's mean, the gradient is then multiplied by 1 + v (P(all others succeed) - P(all others fail)).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import Arm
from ostinato.core.samples import EpisodeKey, Sample, call_of

Floats = NDArray[np.float64]

MOST_FEATURES = 256
"""Larger hidden states are projected to this many features."""
FORGET = 0.95  # decay of earlier steps' evidence per step, as for AdamW's second moment: the policy changes as fast
RIDGE = 10.0  # pseudo-count, in turns
MAX_LENGTH_RATIO = 4.0  # cap on an answer's length, as a multiple of the mean
LENGTH_EXPONENT = 1.5  # exponent of an answer's length, for the same reason as `reward.baseline.length_exponent`
MAX_VALUE = 3.0  # cap on values, as a multiple of the credit's RMS, whatever a prompt does to the state
MAX_RESCALING = 4.0  # cap on rescaling, so that the remaining noise of a batch that values explain is not blown up


class ValueHead:
    """A linear head by weighted ridge regression (recursive least squares with forgetting), with an estimate of how far to trust it.

    `trust` is the factor, from 0 to 1, that would have minimised the squared error of its predictions of earlier batches, each made before
    the head was trained on that batch. So an uninformed head has no effect.

    The same batches in the same order give the same bits on one kind of CPU with one BLAS thread, as in workers, also across `state` and
    `restore`.
    """

    def __init__(self, features: int) -> None:
        self._moments_FF: Floats = np.zeros((features, features))
        self._targets_F: Floats = np.zeros(features)
        self._agreed = self._squares = 0.0
        self._weights_F: Floats | None = None

    @property
    def trust(self) -> float:
        """See above; 0 before there is a prediction to evaluate."""
        return min(1.0, max(0.0, self._agreed / self._squares)) if self._squares else 0.0

    def predict(self, features_NF: Floats) -> Floats:
        """Return the values of the states beyond the baseline [N], without regard to `trust`; 0 before the first batch."""
        return np.einsum("nf,f->n", features_NF, self._solved())

    def learn(self, features_NF: Floats, targets_N: Floats, weights_N: Floats) -> None:
        """Evaluate the predictions of a batch, then learn from it. `weights_N`: the number of turns that each counts for.

        The batch's mean is subtracted from the targets: the baseline learns it from the same returns, and V would contain it twice.
        """
        targets_N = targets_N - np.average(targets_N, weights=weights_N)
        predicted_N = self.predict(features_NF)
        self._agreed = FORGET * self._agreed + float(np.sum(weights_N * targets_N * predicted_N))
        self._squares = FORGET * self._squares + float(np.sum(weights_N * predicted_N**2))
        self._moments_FF = FORGET * self._moments_FF + np.einsum("n,nf,ng->fg", weights_N, features_NF, features_NF)
        self._targets_F = FORGET * self._targets_F + np.einsum("n,nf->f", weights_N * targets_N, features_NF)
        self._weights_F = None

    def _solved(self) -> Floats:
        if self._weights_F is None:
            penalised_FF = self._moments_FF + RIDGE * np.eye(len(self._targets_F))
            self._weights_F = np.linalg.solve(penalised_FF, self._targets_F).astype(np.float64, copy=False)
        return self._weights_F

    def state(self) -> Floats:
        """Return everything learned, as one array."""
        return np.concatenate([[self._agreed, self._squares], self._targets_F, self._moments_FF.ravel()])

    def restore(self, state: Floats) -> None:
        """Restore the state from `state`."""
        features = len(self._targets_F)
        self._agreed, self._squares = state[:2].tolist()
        self._targets_F = state[2 : 2 + features].copy()
        self._moments_FF = state[2 + features :].reshape(features, features).copy()
        self._weights_F = None


def features_of(states_ND: NDArray[np.float32]) -> Floats:
    """Return a head's inputs: the states normalised to mean 0 and variance 1, projected by random signs if they are large.

    The signs are always the same, because numpy's bit generators are stable (NEP 19), so a head's state keeps its meaning.
    """
    states = states_ND.astype(np.float64)
    states -= states.mean(1, keepdims=True)
    states /= np.sqrt((states**2).mean(1, keepdims=True) + 1e-12)
    width = states.shape[1]
    if width > MOST_FEATURES:
        words = np.random.PCG64(0).random_raw(-(-MOST_FEATURES * width // 64)).astype("<u8")
        bits = np.unpackbits(words.view(np.uint8), count=MOST_FEATURES * width).reshape(width, MOST_FEATURES)
        states = np.einsum("nd,df->nf", states, (2.0 * bits - 1.0) / math.sqrt(width))
    return states


def gae_over_turns(calls: Sequence[str], residuals: Sequence[float], trace: float) -> list[float]:
    """Return the advantage of each turn of an episode, in order: its residual, less (1 - `trace`) times the trace of those that follow.

    The choices of one call do not follow each other: each is followed by the next call, and the previous call by their mean.

    Example: ``gae_over_turns(["a", "b"], [1.0, 0.5], 0.0) == [0.5, 0.5]``
    """
    later, found = 0.0, list[float]()
    for _, choices in groupby(zip(reversed(calls), reversed(residuals), strict=True), key=lambda pair: pair[0]):
        values = [value for _, value in choices]
        found += [value - (1 - trace) * later for value in values]
        later = math.fsum(values) / len(values) + trace * later
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValuedTurns:
    """The samples of a step with the credit that remains beyond values, the heads' training data for after the step, and metrics:
    `value_explained`, the share of the recorded credit's square explained by values computed before training on it; `value_trust`.
    """

    samples: list[Sample]
    lessons: Mapping[bool, tuple[Floats, Floats, Floats]]
    metrics: dict[str, float]


class TurnValues:
    """Values of people's turns and of worlds' turns, with one head each, since their credit has different units.

    Args:
        trace: GAE's lambda per turn, from 0 to 1. At 1 the credit is a turn's return minus its value.

    Example::

        values = TurnValues(1.0)
        valued = values.credit(samples, states_ND)  # the step learns from `valued.samples`
        values.learn(valued)  # after the step
    """

    def __init__(self, trace: float) -> None:
        self._trace = trace
        self._heads: dict[bool, ValueHead] = {}

    def credit(
        self, samples: Sequence[Sample], states_ND: NDArray[np.float32], going_on: Collection[EpisodeKey] = ()
    ) -> ValuedTurns:
        """Return the samples with the credit that remains beyond values, in order. Nothing is learned yet.

        A turn without credit gets none. People's advantages keep their RMS; each person's are scaled as the recorded ones (`Sample.scale`).
        Differences between the tokens of a turn stay. While the heads have learned nothing and `trace` is 1, everything is as
        recorded, to the bit.

        Args:
            samples: turns that the policy sampled, in log order.
            states_ND: the hidden state at the end of each one's prompt.
            going_on: the episodes that were cut before anything was known about the rest.
        """
        features_NF = features_of(states_ND)
        found, lessons, squares = list(samples), dict[bool, tuple[Floats, Floats, Floats]](), np.zeros(2)
        trusts: list[float] = []
        for world in (False, True):
            chosen = [i for i, each in enumerate(samples) if _of_world(each) is world and any(each.advantages)]
            if not chosen:
                continue
            some = [samples[i] for i in chosen]
            weights_N = np.array([each.weight for each in some])
            targets_N = np.array([math.fsum(each.advantages) / len(each.advantages) / each.scale for each in some])
            unit = math.sqrt(float(np.average(targets_N**2, weights=weights_N)))
            if not (unit and math.isfinite(unit)):  # the step refuses values that are not finite
                continue
            targets_N /= unit
            head = self._heads.setdefault(world, ValueHead(features_NF.shape[1]))
            values_N = np.clip(head.trust * head.predict(features_NF[chosen]), -MAX_VALUE, MAX_VALUE)
            trusts += [head.trust] * len(chosen)
            squares += [np.sum(weights_N * (targets_N - values_N) ** 2), np.sum(weights_N * targets_N**2)]
            if values_N.any() or self._trace < 1:
                left_N = self._gae_advantages(some, targets_N, values_N, going_on)
                rms = math.sqrt(float(np.average(left_N**2, weights=weights_N)))
                factor = 1.0 if world else min(MAX_RESCALING, 1 / max(rms, 1e-8))
                for i, each, value in zip(chosen, some, left_N.tolist(), strict=True):
                    found[i] = _with_credit(each, value * unit * each.scale, factor)
            known = [n for n, each in enumerate(some) if _episode(each) not in going_on]
            counts_N = weights_N * _length_weights(some) * np.array([each.scale for each in some])
            lessons[world] = features_NF[chosen][known], targets_N[known], counts_N[known]
        metrics = {"value_explained": float(1 - squares[0] / squares[1])} if squares[1] else {}
        return ValuedTurns(
            samples=found,
            lessons=lessons,
            metrics=metrics | {"value_trust": math.fsum(trusts) / len(trusts)} if trusts else metrics,
        )

    def learn(self, valued: ValuedTurns) -> None:
        """Train the heads on the returns of a completed step."""
        for world, lesson in valued.lessons.items():
            if len(lesson[1]):
                self._heads[world].learn(*lesson)

    def _gae_advantages(
        self, samples: Sequence[Sample], targets_N: Floats, values_N: Floats, going_on: Collection[EpisodeKey]
    ) -> Floats:
        """Return each turn's advantage beyond its value, over the turns of its episode."""
        left_N = targets_N - values_N
        episodes: defaultdict[EpisodeKey, list[int]] = defaultdict(list)
        for n, each in enumerate(samples):
            episodes[_episode(each)].append(n)
        for key, places in episodes.items():
            if key in going_on:
                left_N[places] += values_N[places[-1]]
            calls = [call_of(samples[n].turn.id) for n in places]
            left_N[places] = gae_over_turns(calls, left_N[places].tolist(), self._trace)
        return left_N

    def state(self) -> NDArray[np.uint8]:
        """Return the state for a checkpoint."""
        parts = [np.concatenate([[float(world)], head.state()]) for world, head in sorted(self._heads.items())]
        return np.concatenate([[float(len(parts))], *parts]).astype("<f8").view(np.uint8)

    def restore(self, state: NDArray[Any] | None) -> None:
        """Restore the state from `state`; None: nothing was learned, as in checkpoints of trainers without values."""
        self._heads = {}
        if state is None:
            return
        count, *rest = np.array(state).view("<f8").tolist()
        for part in np.array(rest).reshape(int(count), -1) if count else ():
            # a head has 1 + 2 + F + F^2 numbers
            features = (math.isqrt(4 * (len(part) - 3) + 1) - 1) // 2
            self._heads[bool(part[0])] = head = ValueHead(features)
            head.restore(part[1:])


def _of_world(sample: Sample) -> bool:
    return sample.turn.arm is Arm.WORLD


def _episode(sample: Sample) -> EpisodeKey:
    return sample.turn.tenant, sample.turn.episode


def _length_weights(samples: Sequence[Sample]) -> Floats:
    """Return the number of turns that each counts for in a head, by the tokens that it sampled."""
    tokens_N = np.array([len(each.advantages) for each in samples], np.float64)
    return np.minimum(MAX_LENGTH_RATIO, tokens_N / tokens_N.mean()) ** LENGTH_EXPONENT


def _with_credit(sample: Sample, value: float, factor: float) -> Sample:
    """Return the sample with `value` as the mean of its tokens' advantages, all of them times `factor`."""
    mean = math.fsum(sample.advantages) / len(sample.advantages)
    return replace(sample, advantages=tuple(factor * (each - mean + value) for each in sample.advantages))
