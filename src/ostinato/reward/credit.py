"""Rewards -> advantages: a learned baseline, batch-wide normalisation, a cap per user. Pure.

One rollout per prompt and no groups: A_i = (r_i - b(x_i, user_i)) / RMS of the batch's residuals. Any b that does not depend on
what was sampled leaves the policy gradient unbiased (Williams 1992, section 6); a good one lowers its variance. Dividing by the
root mean square rather than by the standard deviation keeps the sign of a lone reward: one turn with reward +1 gets +1, not 0.
Global rather than per-prompt normalisation follows REINFORCE++ (arXiv:2501.03262).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import NoSignal
from ostinato.core.records import Turn
from ostinato.reward.config import BaselineConfig

LEAST_RMS = 1e-8
FAIR_SHARES = 2.0
DAY = 86_400.0
FEATURES = 6

Floats = NDArray[np.float64]


class Deviations:
    """How far each key's rewards lie from the overall mean of their time, shrunk: sum(r - overall) / (n + k).

    Added to the overall mean this is the shrunk mean (sum(r) + k * overall) / (n + k), and it stays right when all rewards rise
    because the policy learns.
    """

    def __init__(self, shrinkage: float, max_keys: int) -> None:
        self._shrinkage = shrinkage
        self._max_keys = max_keys
        self._sums: dict[str, tuple[float, float]] = {}

    def get(self, key: str) -> float:
        """The key's deviation; 0 for an unknown key."""
        total, count = self._sums.get(key, (0.0, 0.0))
        return total / (count + self._shrinkage)

    def add(self, key: str, difference: float) -> None:
        """Count one observation; the key that was longest unseen makes room."""
        total, count = self._sums.pop(key, (0.0, 0.0))
        self._sums[key] = (total + difference, count + 1.0)
        if len(self._sums) > self._max_keys:
            del self._sums[next(iter(self._sums))]

    def snapshot(self) -> list[list[Any]]:
        """[key, sum, count] in order of last use."""
        return [[key, *pair] for key, pair in self._sums.items()]

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        """The inverse of `snapshot`."""
        self._sums = {str(key): (float(total), float(count)) for key, total, count in rows}


class Baseline:
    r"""b(x, user): an online ridge regression on cheap features of the prompt, pulled towards the user's shrunk mean.

    Features x: 1, log prompt length, the user's and the prompt's shrunk deviation, hour of the day (two). Nothing that was sampled
    enters: a baseline may depend on the state, not on the action. The weights solve (ridge * I + S) w = s + ridge * w0 with
    S = sum g^age x x\ :sup:`T` and s = sum g^age x r, g = `forget`: recursive least squares with exponential forgetting (Haykin,
    Adaptive Filter Theory, ch. 10). w0 makes the prediction the overall mean plus the user's deviation, so that little evidence
    gives the user's shrunk mean, and none gives 0.

    Deterministic: the same observations in the same order give the same predictions, also across `snapshot` and `restore`.
    """

    def __init__(self, config: BaselineConfig | None = None) -> None:
        self._config = config or BaselineConfig()
        self._users = Deviations(self._config.shrinkage, self._config.max_keys)
        self._prompts = Deviations(self._config.shrinkage, self._config.max_keys)
        self._total = 0.0
        self._count = 0.0
        self._moments_FF: Floats = np.zeros((FEATURES, FEATURES))
        self._targets_F: Floats = np.zeros(FEATURES)
        self._weights_F: Floats | None = None

    def predict(self, turn: Turn) -> float:
        """The reward expected of this turn before anything is sampled. Call for a whole batch before observing any of it."""
        return float(self._features(turn) @ self._solved())

    def observe(self, turn: Turn, reward: float) -> None:
        """Learn from one rewarded turn."""
        features_F = self._features(turn)
        forget = self._config.forget
        self._moments_FF = forget * self._moments_FF + np.outer(features_F, features_F)
        self._targets_F = forget * self._targets_F + features_F * reward
        self._weights_F = None
        self._total = forget * self._total + reward
        self._count = forget * self._count + 1.0
        difference = reward - self._total / self._count
        self._users.add(turn.user, difference)
        self._prompts.add(_prompt_key(turn), difference)

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as JSON's types."""
        return {
            "total": self._total,
            "count": self._count,
            "moments": self._moments_FF.tolist(),
            "targets": self._targets_F.tolist(),
            "users": self._users.snapshot(),
            "prompts": self._prompts.snapshot(),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], config: BaselineConfig | None = None) -> Self:
        """The baseline that `snapshot` was taken of."""
        baseline = cls(config)
        baseline._total = float(snapshot["total"])
        baseline._count = float(snapshot["count"])
        baseline._moments_FF = np.array(snapshot["moments"], dtype=np.float64)
        baseline._targets_F = np.array(snapshot["targets"], dtype=np.float64)
        baseline._users.restore(snapshot["users"])
        baseline._prompts.restore(snapshot["prompts"])
        return baseline

    def _features(self, turn: Turn) -> Floats:
        user = self._users.get(turn.user)
        prompt = self._prompts.get(_prompt_key(turn))
        hour = 2.0 * math.pi * (turn.started_at % DAY) / DAY
        length = (math.log1p(len(turn.prompt_ids)) - 5.0) / 2.0  # centred on 150 tokens
        return np.array([1.0, length, user, prompt, math.sin(hour), math.cos(hour)])

    def _solved(self) -> Floats:
        if self._weights_F is None:
            ridge = self._config.ridge
            overall = self._total / self._count if self._count else 0.0
            towards_F = self._targets_F + ridge * np.array([overall, 0.0, 1.0, 0.0, 0.0, 0.0])
            penalised_FF = self._moments_FF + ridge * np.eye(FEATURES)
            self._weights_F = np.linalg.solve(penalised_FF, towards_F).astype(np.float64, copy=False)
        return self._weights_F


def credit(
    rewards: Sequence[float], baseline_values: Sequence[float], users: Sequence[str], *, cap: float
) -> list[float]:
    """Advantages of one batch, each turn's in the order given: normalised residuals with capped users.

    No user keeps more than the share max(cap, 2 / U) of the batch's sum of |A|, U being the users with a nonzero advantage: `cap`
    in a batch of many users, twice an equal share in a small one, no cap for one or two. A user over the cap is scaled down as a
    whole, so that signs and proportions within the user stay; nobody is scaled up.

    Raises:
        NoSignal: the batch is empty, two or more turns all have the same reward, or the baseline already explains every reward.
        ValueError: lengths differ or a number is not finite.

    Example: ``credit([1.0], [0.0], ["ann"], cap=0.1) == [1.0]``; ``credit([0.75, 0.75], ...)`` raises NoSignal.
    """
    if not len(rewards) == len(baseline_values) == len(users):
        raise ValueError("rewards, baseline_values and users must have one entry per turn")
    if not rewards:
        raise NoSignal("the batch is empty")
    rewards_N = np.asarray(rewards, dtype=np.float64)
    residuals_N = rewards_N - np.asarray(baseline_values, dtype=np.float64)
    if not np.isfinite(residuals_N).all():
        raise ValueError("a reward or baseline value is not finite")
    if len(rewards) >= 2 and bool((rewards_N == rewards_N[0]).all()):
        raise NoSignal(f"all {len(rewards)} rewards are {rewards[0]:g}: nothing tells a good turn from a bad one")
    rms = math.sqrt(float(np.mean(residuals_N**2)))
    if rms < LEAST_RMS:
        raise NoSignal(f"the baseline explains every reward: RMS of the residuals {rms:.1e} is below {LEAST_RMS:g}")
    advantages_N = residuals_N / rms
    scale = user_scales(advantages_N.tolist(), users, cap=cap)
    return [float(advantage) * scale.get(user, 1.0) for advantage, user in zip(advantages_N, users, strict=True)]


def user_scales(advantages: Sequence[float], users: Sequence[str], *, cap: float) -> dict[str, float]:
    """For each user with any credit, the factor in (0, 1] that makes no share exceed max(cap, 2 / users). See `credit`."""
    totals: dict[str, float] = defaultdict(float)
    for advantage, user in zip(advantages, users, strict=True):
        if advantage != 0.0:
            totals[user] += abs(advantage)
    share = min(1.0, max(cap, FAIR_SHARES / len(totals)))
    falling = sorted(totals.values(), reverse=True)
    rest = sum(falling)
    level = rest
    for capped, largest in enumerate(falling):
        # With the `capped` largest users brought down to a common level, that level is `share` of the new sum.
        room = 1.0 - capped * share
        level = share * rest / room
        if largest <= level or room <= share:
            break
        rest -= largest
    return {user: min(1.0, level / total) for user, total in totals.items()}


def _prompt_key(turn: Turn) -> str:
    ids = np.asarray(turn.prompt_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(ids, digest_size=12).hexdigest()
