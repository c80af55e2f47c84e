"""Logit steering: a few named dials per person, which scale shared directions over a few hundred steerable tokens.

Per token, with logits l after the client's own biases and masks: l'[v] = l[v] + s * clip(sum_k z_k u_k[v], -2, 2) for the steerable
tokens v, where s in [0, 1] is the largest scale at which KL(steered || base) of the token does not exceed the cap. The steered
distribution is the one that is sampled, recorded and trained on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIP = 2.0
"""The most that dials may change a logit, before the scale."""
_ROUNDING = 1e-6  # nats
_MARGIN = 1e-6  # distance of a static clip from its bound, for rounding errors of the bias

NO_STYLE = "none"
"""The arm without a style."""
MOST_SET = 3.0
"""The largest |value| that a dial may be set to by hand. For small values, one unit changes its attribute by one standard deviation."""


@dataclass(frozen=True, eq=False)
class Basis:
    """The directions of K dials over M steerable tokens, fitted to one version of the weights from the model's own samples.

    `names`: the K dials. `tokens_M`: ascending token ids, int64. `directions_KM`: float32, the change of each logit per unit of a dial.
    `weights`: the hash of the weights that it was fitted to.

    Example::

        Basis(names=("brief",), tokens_M=np.array([2, 7]), directions_KM=np.array([[1.0, -0.5]], np.float32), weights="3f")
    """

    names: tuple[str, ...]
    tokens_M: NDArray[np.int64]
    directions_KM: NDArray[np.float32]
    weights: str

    def __post_init__(self) -> None:
        tokens, directions = self.tokens_M, self.directions_KM
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError("a basis needs at least one dial, each with its own name")
        if (
            tokens.dtype != np.int64
            or tokens.ndim != 1
            or not len(tokens)
            or tokens[0] < 0
            or (np.diff(tokens) <= 0).any()
        ):
            raise ValueError("tokens_M must be ascending token ids, int64")
        if directions.dtype != np.float32 or directions.shape != (len(self.names), len(tokens)):
            raise ValueError(f"directions_KM must be float32 of shape {(len(self.names), len(tokens))}")
        if not np.isfinite(directions).all():
            raise ValueError("directions_KM must be finite")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Basis) and other.hash == self.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def hash(self) -> str:
        """The basis's identity: a hash of its content."""
        told = hashlib.blake2b(json.dumps([self.names, self.weights, len(self.tokens_M)]).encode(), digest_size=16)
        told.update(self.tokens_M.astype("<i8").tobytes())
        told.update(self.directions_KM.astype("<f4").tobytes())
        return told.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """How to steer one answer: a dial setting z for each direction of `basis`, as float32 values.

    `cap`: the most KL(steered || base) of one token, in nats. `budget`: the most over the answer, summed over its tokens. As soon as
    another token at the cap would exceed it, the rest of the answer is the base model's.

    Example: ``Steering(basis=basis, dials=(0.5,), cap=0.1, budget=3.0)``
    """

    basis: Basis
    dials: tuple[float, ...]
    cap: float
    budget: float


def static_clip(asked: Steering, tokens: int, divisor: float) -> float:
    """Return the most that a bias that is the same at all `tokens` tokens may change a logit without ever exceeding cap or budget.

    If all changes of logits over `divisor` (the temperature) are within a range of rho, KL(steered || base) <= rho^2 / 8: the KL divergence
    is the integral of t Var_t(change) over t in [0, 1], and a variance is at most rho^2 / 4 (Popoviciu 1935). Example: 0.447 for 0.1 nats.
    """
    nats = min(asked.cap, asked.budget / max(1, tokens))
    return min(CLIP, (1.0 - _MARGIN) * divisor * math.sqrt(2.0 * nats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """How an answer was steered, as recorded with the turn: the basis by its hash, and the measured effect.

    `tokens`: the number of steered tokens; tokens after the last of them, from the opening of a tool call or the end of the budget on, are
    the base model's. `gaps`: runs [start, stop) of tokens in between that are the base model's, because they are in fenced code.
    `kl`: the sum of KL(steered || base) over the steered tokens, in nats. `clip`: the most that dials could change a logit before the
    scale. With a static bias (`static_clip`) `kl` is an upper bound, and there are no features. `features`: for each dial the sum over the
    steered tokens of (u[token] - E[u]) / T, with E under the steered distribution and the temperature T (1 if greedy): the gradient of the
    answer's log-probability with respect to the dial, where neither the clip nor the cap binds.

    Example: ``Steered(basis="9c1f", dials=(0.5,), cap=0.1, budget=3.0, tokens=24, kl=0.4, features=(1.3,))``
    """

    basis: str
    dials: tuple[float, ...]
    cap: float
    budget: float
    tokens: int
    kl: float
    features: tuple[float, ...]
    gaps: tuple[tuple[int, int], ...] = ()
    clip: float = CLIP

    @property
    def end(self) -> int:
        """The position after the last steered token of the answer."""
        return self.tokens + sum(stop - start for start, stop in self.gaps)

    def fault(self, length: int) -> str:
        """Return what in the record cannot be true of an answer of `length` tokens; "" if nothing is wrong."""
        bounds = [*(place for gap in self.gaps for place in gap), self.end]
        if self.tokens < 0 or self.end > length or bounds[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            return f"{self.tokens} steered tokens with the gaps {self.gaps} do not fit an answer of {length}"
        if not (
            self.cap > 0.0
            and 0.0 < self.clip <= CLIP
            and all(map(math.isfinite, (self.cap, self.budget, self.kl, *self.dials, *self.features)))
        ):
            return f"its cap is not above 0, its clip not within 0 and {CLIP:g}, or a number is not finite"
        most = min(self.budget, self.tokens * self.cap)
        if not -_ROUNDING <= self.kl <= most + _ROUNDING:
            return f"{self.kl:g} nats in {self.tokens} tokens break its cap of {self.cap:g} or its budget of {self.budget:g}"
        return ""


# ---------------------------------------------------------------- settings and views of a person's dials


class SetBy(StrEnum):
    """Who set a person's dials."""

    PERSON = "person"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class DialSet:
    """A person's dials as set by hand: from now on each dial named here has this value as its prior mean, or, if None, its own prior again.
    No dials: all return to their priors. `dials` is None once the person was forgotten.

    Example: ``DialSet(id="d1", tenant="acme", user="ann", at=12.0, by=SetBy.PERSON, dials={"brief": 0.5, "lists": None})``
    """

    id: str
    tenant: str
    user: str
    at: float
    by: SetBy
    dials: Mapping[str, float | None] | None = None

    @property
    def person(self) -> tuple[str, str]:
        """The person whose dials they are."""
        return (self.tenant, self.user)


class NotSteered(StrEnum):
    """Why none of a person's answers are steered."""

    MODE = "mode"
    TENANT = "tenant"
    CONSENT = "consent"
    HOLDOUT = "holdout"
    BASIS = "basis"
    STYLES = "styles"
    TRIAL = "trial"

    @property
    def words(self) -> str:
        """The reason and its remedy, for people."""
        return _REASONS[self]


_REASONS = {
    NotSteered.MODE: "adapt.mode is 'off'; the operator sets it to 'dials'",
    NotSteered.TENANT: "the operator gives this tenant's people no dials (adapt.tenants)",
    NotSteered.CONSENT: "this person, or the operator, does not allow it; consent of 'adapt' or 'yes' does (/v1/consent, [privacy])",
    NotSteered.HOLDOUT: "this person is one of those with whom the others are compared (adapt.holdout); what they set is kept",
    NotSteered.BASIS: "no basis was fitted to the version that is live; the operator does it with `ostinato adapt fit`",
    NotSteered.STYLES: "no style is approved for the versions that answer this person, or they are on the control arm, which has none; the "
    "operator approves with `ostinato adapt approve`",
    NotSteered.TRIAL: "a release without a basis is compared with live; answers lean again once that has ended, or the operator has "
    "fitted it one (`ostinato adapt fit --version canary`)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DialView:
    """One dial of a person, in units of the dial: `value` is the posterior mean, `low` to `high` its 95% credible interval. `held`: the
    value set by hand, if any. `words`: the same for people.

    Example: ``DialView(name="lists", value=-0.6, low=-1.0, high=-0.2, held=None, words="fewer lists, sure")``
    """

    name: str
    value: float
    low: float
    high: float
    held: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleView:
    """One style of a person: `value` is the expected increase of a rating (0 to 1) with it rather than without a style, and `low` to `high`
    its 95% credible interval. `chance`: the probability that their next conversation gets it; None while it is not approved.

    Example: ``StyleView(name="concise", value=0.11, low=0.02, high=0.2, chance=0.84)``
    """

    name: str
    value: float
    low: float
    high: float
    chance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StylesView:
    """What is known about a person's styles, including "none". `held`: the style set by hand. `off`: why they are assigned none.

    Example: ``StylesView(styles=(), held=None, off=NotSteered.STYLES)``
    """

    styles: tuple[StyleView, ...]
    held: str | None
    off: NotSteered | None
    ratings: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types, numbers rounded to four digits."""
        listed = [
            {
                "name": each.name,
                "value": round(each.value, 4),
                "low": round(each.low, 4),
                "high": round(each.high, 4),
                "chance": None if each.chance is None else round(each.chance, 4),
            }
            for each in self.styles
        ]
        off = None if self.off is None else {"reason": self.off.value, "message": self.off.words}
        return {"active": self.off is None, "off": off, "set": self.held, "ratings": self.ratings, "styles": listed}


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonView:
    """What is known about a person's preferences. Answers are steered by `scale`, at most 1, times the dials' values, within the cap on KL.

    `ratings`: rated answers since the last return to the prior, at `reset_at` (Unix seconds). `resets`: the number of automatic returns.
    `strikes`: the number of returns caused by reported answers, which halve the cap. `nats`: the KL divergence spent by the person's
    answers since their first rating. `off`: why none of their answers are steered; None if they are. `styles`: None if there are none.

    Example: ``PersonView(dials=(), scale=1.0, off=NotSteered.BASIS)``
    """

    dials: tuple[DialView, ...]
    scale: float
    off: NotSteered | None
    ratings: int = 0
    nats: float = 0.0
    resets: int = 0
    strikes: int = 0
    reset_at: float | None = None
    styles: StylesView | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types, numbers rounded to four digits."""
        dials = [
            {
                "name": dial.name,
                "value": round(dial.value, 4),
                "low": round(dial.low, 4),
                "high": round(dial.high, 4),
                "set": None if dial.held is None else round(dial.held, 4),
                "words": dial.words,
            }
            for dial in self.dials
        ]
        return {
            "active": self.off is None,
            "off": None if self.off is None else {"reason": self.off.value, "message": self.off.words},
            "dials": dials,
            "most": MOST_SET,
            "scale": round(self.scale, 4),
            "ratings": self.ratings,
            "nats": round(self.nats, 4),
            "resets": self.resets,
            "strikes": self.strikes,
            "last_reset": self.reset_at,
            **({} if self.styles is None else {"style": self.styles.to_json()}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DialPrior:
    """An empirical-Bayes prior of people's dials, fitted to the ratings of people who consented to that; the newest row counts.

    It names nobody. `names`: the hash of the dials' names; `number` counts the fits. `people`: the number of people that the shared mean
    was fitted to, 0 if they were too few, so that nothing is known about the population. Vectors are over K slopes and, last, the mean
    reward (D = K + 1): `mean`, and by rows the lower triangles of two covariances, of people `within` one organisation and of
    organisations' means (`between`). `organisations`: for tenants with a level of their own, the number of people and their mean.
    `upto`: the last row of the log that had been read. `sigma`: with differential privacy, the noise multiplier of this release; `people`
    is then noisy too, and is the number that would tell as much without noise. 0: no noise, and no guarantee. Fits are numbered over all
    names, so if several gateways write at once, under whatever names, only the first spends from the privacy budget.

    Example::

        DialPrior(names="9c1f", number=3, people=412, mean=(0.1, 0.4), within=(0.003, 0.0, 0.02), between=(0.0, 0.0, 0.0),
                  organisations={"acme": (31.0, 0.2, 0.5)}, upto=8123, at=9.0)
    """

    names: str
    number: int
    people: int
    mean: tuple[float, ...]
    within: tuple[float, ...]
    between: tuple[float, ...]
    organisations: Mapping[str, tuple[float, ...]]
    upto: int
    at: float
    sigma: float = 0.0
