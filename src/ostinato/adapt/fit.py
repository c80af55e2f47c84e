"""Fits a basis of dials: directions in logit space for named attributes, from the model's own answers, without any person's data.

The derivative of an attribute's expectation with respect to a logit direction is its covariance with the answer's score features (the
score-function identity: Williams 1992). So the attribute, within answers to one prompt, is regressed on these features by ridge regression
over half of the prompts. The other half measures how much of the attribute the direction explains, and sets the unit. Then the halves swap
roles, and the direction is the mean of both (two-fold cross-fitting).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadConfig
from ostinato.core.steering import Basis

Floats = NDArray[np.float64]
Attribute = Callable[[str, bool], float]
"""Measures an answer, given its text and whether the model ended it itself."""

TOKENS = 384
"""The number of likeliest tokens that a basis covers."""
_LEAST_R2 = 0.02  # an attribute gets a dial only if its direction explains this share of it on the other prompts, in both halves
_RIDGE = 0.1  # ridge penalty per answer, with features of unit variance
_OUTLIER = 3.0  # standard deviations to which attributes are clipped
_SMALLEST = 0.02  # added to a feature's standard deviation, so that tokens that hardly ever occur get no weight
_WORD, _LIST = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?"), re.compile(r"(^|\n)\s*(\d+[.)]|[-*•])\s")
_READER = frozenset({"you", "your", "yours", "you're", "you'll", "you've", "yourself"})
_WRITER = frozenset({"i", "i'm", "i'd", "i'll", "i've", "me", "my", "mine"})


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _share(of: Collection[str]) -> Attribute:
    def measure(text: str, ended: bool) -> float:
        del ended
        words = _words(text)
        return sum(word in of for word in words) / max(1, len(words))

    return measure


def _word_length(text: str, ended: bool) -> float:
    del ended
    words = _words(text)
    return sum(map(len, words)) / max(1, len(words))


ATTRIBUTES: Mapping[str, Attribute] = {
    "brief": lambda text, ended: float(ended),
    "lists": lambda text, ended: float(bool(_LIST.search(text))),
    "exclaims": lambda text, ended: float("!" in text),
    "speaks_to_reader": _share(_READER),
    "commas": lambda text, ended: text.count(",") / max(1, len(_words(text))),
    "first_person": _share(_WRITER),
    "bold": lambda text, ended: float("**" in text),
    "long_words": _word_length,
}
"""The built-in dials."""

_THINGS = (
    *("photosynthesis", "inflation", "the water cycle", "a compiler", "black holes", "democracy", "vaccines", "jazz"),
    *("recycling", "the French Revolution", "volcanoes", "a database index", "meditation", "earthquakes"),
    *("coral reefs", "encryption", "bread baking", "tides", "the immune system", "solar panels", "chess openings"),
    "the stock market",
)
_GOALS = (
    *("sleep better", "learn a language", "save money", "write a good email", "start running", "plan a trip"),
    *("prepare for an interview", "grow tomatoes", "read more books", "organise my desk", "make new friends"),
    *("cook rice", "fix a flat tire", "improve my memory", "stay calm at work", "choose a laptop", "give a speech"),
    *("train a puppy", "learn to swim", "back up my photos", "study for an exam", "clean a keyboard"),
)
PROMPTS: tuple[str, ...] = (
    *(f"What is {thing}?" if i % 2 else f"Tell me about {thing}." for i, thing in enumerate(_THINGS)),
    *(f"How can I {goal}?" if i % 2 else f"Give me advice: I want to {goal}." for i, goal in enumerate(_GOALS)),
)
"""The prompts that the model is asked if the operator gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBasis:
    """A basis, and how well each attribute can be steered.

    `explained`: by attribute, the share of its variance within a prompt (R^2) that its direction explained on prompts it was not fitted to.
    Attributes below 2% in either half have no dial. `measured`: each attribute's value for each answer.

    Example: ``FittedBasis(basis=basis, explained={"brief": 0.5, "bold": 0.0})``
    """

    basis: Basis
    explained: Mapping[str, float]
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])


def steerable(mass_V: NDArray[np.floating], reserved: Collection[int], count: int = TOKENS) -> NDArray[np.int64]:
    """Return the `count` likeliest tokens by mean probability, ascending, without reserved ones: control tokens and the markup of calls."""
    mass_V = np.array(mass_V, np.float64)
    mass_V[list(reserved)] = 0.0
    order = np.argsort(-mass_V, kind="stable")[:count]
    return np.sort(order[mass_V[order] > 0.0]).astype(np.int64)


def fit_basis(
    features_NM: NDArray[np.floating],
    measured: Mapping[str, Sequence[float]],
    prompts_N: Sequence[int],
    tokens_M: NDArray[np.int64],
    weights: str,
    names: Sequence[str] | None = None,
) -> FittedBasis:
    """Fit the directions of the attributes that can be steered.

    Args:
        features_NM: each answer's score features, the sum over its tokens of 1[token = v] - p(v), for the steerable tokens.
        measured: by attribute, its value for each answer.
        prompts_N: the number of each answer's prompt, from 0. Directions fitted to odd prompts are tested on even ones, and vice versa.
        tokens_M: the steerable tokens.
        weights: the hash of the weights that answered.
        names: the dials to make; a dial that explains too little does nothing. None: the dials that explain enough.

    Returns:
        Directions of which one unit changes the attribute by one standard deviation (within a prompt), for small dials.

    Raises BadConfig if no attribute can be steered.
    """
    prompts = np.asarray(prompts_N)
    features_NM = _centred(features_NM.astype(np.float64), prompts)
    halves = [_Half.of(features_NM, prompts % 2 == parity) for parity in (0, 1)]
    explained: dict[str, float] = {}
    directions: dict[str, NDArray[np.float32]] = {}
    for name, values in measured.items():
        found_N = _centred(np.asarray(values, np.float64)[:, None], prompts)[:, 0]
        deviation = float(found_N.std())
        explained[name] = 0.0
        if not deviation:
            continue
        found_N = np.clip(found_N / deviation, -_OUTLIER, _OUTLIER)
        units_M, shares = zip(*(_fit_half(half, features_NM, found_N) for half in halves), strict=True)
        explained[name] = float(np.mean(shares))
        if min(shares) >= _LEAST_R2:  # with less explained, the unit found in that half is mostly noise
            directions[name] = np.mean(units_M, 0).astype(np.float32)
    if not directions:
        raise BadConfig(
            f"no attribute can be steered: each of {', '.join(explained)} is explained by less than {_LEAST_R2:.0%} on other "
            "prompts; give more answers to each prompt"
        )
    none_M = np.zeros(len(tokens_M), np.float32)
    dials = {name: directions.get(name, none_M) for name in (directions if names is None else names)}
    basis = Basis(tuple(dials), tokens_M, np.stack(list(dials.values())), weights)
    return FittedBasis(basis=basis, explained=explained, measured=measured)


@dataclass(frozen=True, slots=True)
class _Half:
    """One half of the cross-fit: a mask [N] of the answers fitted to, the scale of their features, and the regularised Gram matrix."""

    fitted_N: NDArray[np.bool_]
    scale_M: Floats
    gram_MM: Floats

    @classmethod
    def of(cls, features_NM: Floats, fitted_N: NDArray[np.bool_]) -> _Half:
        scale_M: Floats = features_NM[fitted_N].std(0) + _SMALLEST
        scaled_NM = features_NM[fitted_N] / scale_M
        return cls(fitted_N, scale_M, scaled_NM.T @ scaled_NM + _RIDGE * len(scaled_NM) * np.eye(len(scale_M)))


def _fit_half(half: _Half, features_NM: Floats, found_N: Floats) -> tuple[Floats, float]:
    """Fit a direction to one half and test it on the other. Return the direction and the share explained there (R^2).

    The direction is scaled so that a unit changes the attribute by 1 in the other half. One that does not work there is 0 and explains 0.
    """
    fitted_N = half.fitted_N
    shared_M: Floats = (features_NM[fitted_N] / half.scale_M).T @ found_N[fitted_N]
    direction_M: Floats = np.asarray(np.linalg.solve(half.gram_MM, shared_M) / half.scale_M, np.float64)
    shown_N, told_N = found_N[~fitted_N], features_NM[~fitted_N] @ direction_M
    slope = float(shown_N @ told_N) / max(1, len(told_N))  # the covariance: what a unit of this direction changes
    spread = float((told_N @ told_N) * (shown_N @ shown_N)) / max(1, len(told_N)) ** 2
    if slope <= 0 or not spread:
        return np.zeros_like(direction_M), 0.0
    return direction_M / slope, slope**2 / spread


def _centred(values_ND: Floats, prompts_N: NDArray[np.integer]) -> Floats:
    """Return differences from the mean of the answers to the same prompt."""
    count = int(prompts_N.max()) + 1
    sums_PD = np.zeros((count, values_ND.shape[1]))
    np.add.at(sums_PD, prompts_N, values_ND)
    return values_ND - (sums_PD / np.maximum(np.bincount(prompts_N, minlength=count), 1)[:, None])[prompts_N]
