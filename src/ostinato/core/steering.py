"""Logit steering: a person's few named dials, which scale shared directions over some hundred steerable tokens.

Per token, with logits l after the client's own biases and masks: l'[v] = l[v] + s * clip(sum_k z_k u_k[v], -2, 2) for the steerable
tokens v, where s in [0, 1] is the largest scale at which KL(steered || base) of the token does not exceed the cap. What is sampled,
recorded and trained on is the steered distribution.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

CLIP = 2.0
"""The most that dials may add to a logit or take from it, before the scale."""


@dataclass(frozen=True, eq=False)
class Basis:
    """The directions of K dials over M steerable tokens, fitted to one version of the weights from the model's own samples.

    `names`: the K dials. `tokens_M`: ascending token ids, int64. `directions_KM`: float32, what one unit of a dial adds to each logit.
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
        """Its name: a hash of its content."""
        told = hashlib.blake2b(json.dumps([self.names, self.weights, len(self.tokens_M)]).encode(), digest_size=16)
        told.update(self.tokens_M.astype("<i8").tobytes())
        told.update(self.directions_KM.astype("<f4").tobytes())
        return told.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """How one answer is to be steered: a dial setting z for each direction of `basis`, as float32 values.

    `cap`: the most KL(steered || base) of one token, in nats. `budget`: of the answer, summed over its tokens: as soon as another token at
    the cap would exceed it, the rest of the answer is the base model's.

    Example: ``Steering(basis=basis, dials=(0.5,), cap=0.1, budget=3.0)``
    """

    basis: Basis
    dials: tuple[float, ...]
    cap: float
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """How an answer was steered, as recorded with the turn: the basis by its hash, and what came of it.

    `tokens`: how many of its first tokens were steered; later ones, from the opening of a tool call on or once the budget was spent, are
    the base model's. `kl`: the sum of KL(steered || base) over them, in nats. `features`: for each dial the sum over them of
    (u[token] - E[u]) / T, with E under the steered distribution and the temperature T (1 if greedy): the gradient of the answer's
    log-probability with respect to the dial, where neither the clip nor the cap binds.

    Example: ``Steered(basis="9c1f", dials=(0.5,), cap=0.1, budget=3.0, tokens=24, kl=0.4, features=(1.3,))``
    """

    basis: str
    dials: tuple[float, ...]
    cap: float
    budget: float
    tokens: int
    kl: float
    features: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialPrior:
    """An empirical-Bayes prior of people's dials, fitted to what people's ratings said who consented to it; the newest row counts.

    It names nobody. `names`: the hash of the dials' names; `number` counts the fits under these names. `people`: how many the shared mean
    was fitted to, 0 if they were too few, so that nothing is known of the population. Numbers are over K slopes and, last, the mean
    reward (D = K + 1): `mean`, and by rows the lower triangles of two covariances, of people `within` one organisation and of
    organisations' means (`between`). `organisations`: of tenants with a level of their own, the number of people and their mean.
    `upto`: the last row of the log that had been read.

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
