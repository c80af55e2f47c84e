"""The learned baseline b(x, user): the expected return of a turn, known before anything is sampled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import Person, Turn
from ostinato.reward.config import DAY, BaselineConfig, Users

FEATURES = 6
LARGEST_RETURN = 1e100  # returns are clipped here, so that their squares are finite numbers
MAX_LENGTH_RATIO = 4.0  # cap on an answer's length, as a multiple of the mean, so that no single answer dominates

Floats = NDArray[np.float64]


def counted_as(turn: Turn, users: Users) -> Person:
    """Return the person that a turn counts for: its user; if only verified users count, a tenant's unverified users share one person.

    Example: ``counted_as(turn, "verified") == ("acme", "")`` for an unverified user of acme.
    """
    return turn.person if users == "declared" or turn.verified else (turn.tenant, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineInputs:
    """The baseline's inputs, all known before the turn's first token was sampled. `prompt` is a hash of the prompt's ids.

    Example: ``BaselineInputs(person=("default", "ann"), prompt="5f0c...", length=120, started_at=9.0)``
    """

    person: Person
    prompt: str
    length: int
    started_at: float


def context_of(turn: Turn, users: Users = "declared") -> BaselineInputs:
    """Return the baseline's inputs for a turn."""
    ids = np.asarray(turn.prompt_ids, dtype="<i4").tobytes()
    return BaselineInputs(
        person=counted_as(turn, users),
        prompt=hashlib.blake2b(ids, digest_size=12).hexdigest(),
        length=len(turn.prompt_ids),
        started_at=turn.started_at,
    )


class Deviations:
    """Shrunk mean deviation of each key's rewards from those expected at their time: sum(w (r - expected)) / (sum(w) + k).

    A key is a tenant and one of its users or prompts, so nothing is learned about one tenant from another's turns. Added to the
    overall mean, the deviation is a shrunk mean, and it stays right when all rewards rise because the policy learns. Both sums are
    multiplied by `forget` with each turn of the key, since people change, and so do the policy's answers to a prompt.
    """

    def __init__(self, shrinkage: float, forget: float, max_keys: int) -> None:
        self._shrinkage = shrinkage
        self._forget = forget
        self._max_keys = max_keys
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}

    def get(self, key: tuple[str, str]) -> float:
        """Return the key's deviation; 0 for an unknown key."""
        total, count = self._sums.get(key, (0.0, 0.0))
        return total / (count + self._shrinkage)

    def evidence(self, key: tuple[str, str]) -> float:
        """Return the evidence behind the key's deviation, in turns, including the pseudo-count."""
        return self._sums.get(key, (0.0, 0.0))[1] + self._shrinkage

    def add(self, key: tuple[str, str], difference: float, weight: float) -> None:
        """Add one observation; beyond `max_keys` the least recently seen key is evicted."""
        total, count = self._sums.pop(key, (0.0, 0.0))
        self._sums[key] = (self._forget * total + weight * difference, self._forget * count + weight)
        if len(self._sums) > self._max_keys:
            del self._sums[next(iter(self._sums))]

    def drop(self, gone: Callable[[tuple[str, str]], bool]) -> None:
        """Drop these keys."""
        self._sums = {key: sums for key, sums in self._sums.items() if not gone(key)}

    def snapshot(self) -> list[list[Any]]:
        """Return rows [tenant, name, sum, count] in order of last use."""
        return [[*key, *pair] for key, pair in self._sums.items()]

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        """Restore the state from a `snapshot`."""
        self._sums = {(str(tenant), str(name)): (float(total), float(count)) for tenant, name, total, count in rows}


class Baseline:
    r"""b(x, user): an online weighted ridge regression on cheap prompt features; its prior is the user's and the prompt's shrunk means.

    Features x: 1, log prompt length, the user's and the prompt's shrunk deviation, hour of the day (two). Nothing that was sampled
    enters: a baseline may depend on the state, not on the action. The weights solve (ridge * I + S) w = s + ridge * w0 with
    S = sum g^age h x x\ :sup:`T` and s = sum g^age h x r, g = `forget`: recursive least squares with exponential forgetting (Haykin,
    Adaptive Filter Theory, ch. 10). The prior w0 predicts the overall mean plus the user's and the prompt's deviation, each of which is
    the part not explained by the other; without evidence the prediction is 0.

    h weights the evidence. The variance of the gradient sum_t (r - b) grad log pi is least at b(x) = E[r |grad log pi|^2 | x] /
    E[|grad log pi|^2 | x] and not at E[r | x] (Weaver and Tao, UAI 2001; Greensmith, Bartlett and Baxter, JMLR 5, 2004), and the gradient
    grows with the answer's tokens: h = (tokens / mean tokens) ** `length_exponent`. These are the tokens of past answers, so b stays
    a function of the state and the gradient unbiased.

    Deterministic: the same observations in the same order give the same predictions, also across `snapshot` and `restore`.
    """

    def __init__(self, config: BaselineConfig | None = None) -> None:
        self._config = config = config or BaselineConfig()
        self._users = Deviations(config.shrinkage, config.forget_key, config.max_keys)
        self._prompts = Deviations(config.shrinkage, config.forget_key, config.max_keys)
        self._total = 0.0
        self._count = 0.0
        self._tokens = 0.0
        self._turns = 0.0
        self._moments_FF: Floats = np.zeros((FEATURES, FEATURES))
        self._targets_F: Floats = np.zeros(FEATURES)
        self._outcomes_F: Floats = np.zeros(FEATURES)
        self._weights_F: Floats | None = None

    def predict(self, context: BaselineInputs) -> float:
        """Return the expected return in this context. Call it for a whole batch before observing any of the batch."""
        return float(self._features(context) @ self._solved())

    def predict_outcome(self, context: BaselineInputs) -> float:
        """Return the part of `predict` that comes from outcomes of the episode; 0.0 before the first outcome."""
        if not self._outcomes_F.any():
            return 0.0
        overall_F = np.zeros(FEATURES)
        overall_F[0] = self._outcomes_F[0] / self._count  # the feature is 1
        ridge = self._config.ridge
        weights_F = np.linalg.solve(self._moments_FF + ridge * np.eye(FEATURES), self._outcomes_F + ridge * overall_F)
        return float(self._features(context) @ weights_F)

    def evidence(self, context: BaselineInputs) -> float:
        """Return how many turns of the same prompt the prediction is worth."""
        return self._prompts.evidence((context.person[0], context.prompt))

    def observe(self, context: BaselineInputs, value: float, tokens: int, outcome: float = 0.0) -> None:
        """Learn from the return of a turn with that many sampled tokens; `outcome` is the part of it about the whole episode. Values are
        clipped to a magnitude of `LARGEST_RETURN`.
        """
        value, outcome = (
            min(LARGEST_RETURN, max(-LARGEST_RETURN, value)),
            min(LARGEST_RETURN, max(-LARGEST_RETURN, outcome)),
        )
        features_F = self._features(context)
        forget, weight = self._config.forget, self._weight(tokens)
        self._moments_FF = forget * self._moments_FF + weight * np.outer(features_F, features_F)
        self._targets_F = forget * self._targets_F + weight * features_F * value
        self._outcomes_F = forget * self._outcomes_F + weight * features_F * outcome
        self._weights_F = None
        self._total = forget * self._total + weight * value
        self._count = forget * self._count + weight
        difference = value - self._total / self._count
        prompt = (context.person[0], context.prompt)
        of_user, of_prompt = self._users.get(context.person), self._prompts.get(prompt)
        self._users.add(context.person, difference - of_prompt, weight)
        self._prompts.add(prompt, difference - of_user, weight)

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Drop these people's deviations. What the shared sums learned from them stays, as do the hashes of prompts, which name nobody."""
        self._users.drop(gone)

    def weight_of(self, tokens: int) -> float:
        """Return the number of turns that an answer of that many tokens counts for (h, above); 1 before the first."""
        if not self._turns:
            return 1.0
        return min(MAX_LENGTH_RATIO, max(1, tokens) * self._turns / self._tokens) ** self._config.length_exponent

    def _weight(self, tokens: int) -> float:
        """Count an answer's tokens, and return the weight of its evidence."""
        self._tokens = self._config.forget * self._tokens + max(1, tokens)
        self._turns = self._config.forget * self._turns + 1.0
        return self.weight_of(tokens)

    def snapshot(self) -> dict[str, Any]:
        """Return everything learned, as JSON types."""
        return {
            "total": self._total,
            "count": self._count,
            "tokens": self._tokens,
            "turns": self._turns,
            "moments": self._moments_FF.tolist(),
            "targets": self._targets_F.tolist(),
            "outcomes": self._outcomes_F.tolist(),
            "users": self._users.snapshot(),
            "prompts": self._prompts.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self._total = float(snapshot["total"])
        self._count = float(snapshot["count"])
        self._tokens = float(snapshot["tokens"])
        self._turns = float(snapshot["turns"])
        self._moments_FF = np.array(snapshot["moments"], dtype=np.float64)
        self._targets_F = np.array(snapshot["targets"], dtype=np.float64)
        self._outcomes_F = np.array(snapshot["outcomes"], dtype=np.float64)
        self._weights_F = None
        self._users.restore(snapshot["users"])
        self._prompts.restore(snapshot["prompts"])

    def _features(self, context: BaselineInputs) -> Floats:
        user = self._users.get(context.person)
        prompt = self._prompts.get((context.person[0], context.prompt))
        hour = 2.0 * math.pi * (context.started_at % DAY) / DAY
        length = (math.log1p(context.length) - 5.0) / 2.0  # centred on 150 tokens
        return np.array([1.0, length, user, prompt, math.sin(hour), math.cos(hour)])

    def _solved(self) -> Floats:
        if self._weights_F is None:
            ridge = self._config.ridge
            overall = self._total / self._count if self._count else 0.0
            towards_F = self._targets_F + ridge * np.array([overall, 0.0, 1.0, 1.0, 0.0, 0.0])
            penalised_FF = self._moments_FF + ridge * np.eye(FEATURES)
            self._weights_F = np.linalg.solve(penalised_FF, towards_F).astype(np.float64, copy=False)
        return self._weights_F
