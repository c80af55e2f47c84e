"""Coverage of the intervals for a changed router's value, on logs of simulated users where the true value is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.release.crowd import Crowd, Feed, traffic

from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.offpolicy import LoggedTurns, PolicyValue, cross_fitted, doubly_robust, ips, snips
from ostinato.release.auto.router import Router

QUALITIES = {"small": 0.50, "live": 0.55, "large": 0.60}
LATE = 100  # turns until a reward is known
EVERY = 50  # turns between two reads of the log by the router
SETTINGS = RouterConfig(low=0.0, high=1.0)


class Fixed(Router):
    """Deals by odds that never change."""

    def __init__(self, odds: Mapping[str, float]) -> None:
        super().__init__(list(odds), SETTINGS)
        self._fixed = dict(odds)

    def odds(self, available: Iterable[str]) -> Mapping[str, float]:
        return self._fixed


CONTEXTS = 2  # short and long questions: each arm is better at one kind than at the other
TILT = {"small": (0.08, -0.08), "live": (0.0, 0.0), "large": (-0.06, 0.06)}
NEW = np.array([[0.6, 0.2, 0.2], [0.1, 0.2, 0.7]])  # the changed router's odds by context: small, live, large


USUAL, LITTLE, MUCH = (300, 500), (100, 150), (1_000, 2_000)  # users and turns of a log
FIXED = {"small": 0.2, "live": 0.3, "large": 0.5}
LOSER = np.array(
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
)  # all turns to the worst arm, to which a learning router deals hardly any


def liked(mean: float, rng: np.random.Generator) -> float:
    return float(rng.random() < mean)


def skewed(mean: float, rng: np.random.Generator) -> float:
    """Log-normal: the largest tenth of the rewards makes up four tenths of their sum."""
    return mean * float(np.exp(rng.normal() - 0.5))


def wild(mean: float, rng: np.random.Generator) -> float:
    """Student's t with three degrees of freedom, which has no third moment."""
    return mean + 0.4 * float(rng.standard_t(3))


@dataclass(frozen=True)
class Rewards:
    """How a turn's reward is drawn from its mean, and the range that the router is given."""

    of: Callable[[float, np.random.Generator], float]
    low: float
    high: float


REWARDS = {
    "yes or no": Rewards(liked, 0.0, 1.0),
    "log-normal": Rewards(skewed, 0.0, 4.0),
    "Student's t(3)": Rewards(wild, -2.0, 3.0),
}


@dataclass(frozen=True)
class Logged:
    """One run's log, and each turn's context."""

    turns: LoggedTurns
    contexts_N: np.ndarray


def log_of(router: Router, size: tuple[int, int], rewards: Rewards, rng: np.random.Generator) -> Logged:
    """Turns of new users, dealt by a router. A router that learns is fed these turns."""
    users, turns = size
    crowd, arms = Crowd(users, rng), list(QUALITIES)
    by_context = [{arm: crowd.chances(QUALITIES[arm] + TILT[arm][x]) for arm in arms} for x in range(CONTEXTS)]
    rows: list[tuple[int, int, float, int]] = []
    odds: list[list[float]] = []
    feed = Feed(router, late=LATE, every=EVERY)
    for each in traffic(crowd, QUALITIES, router, turns, rng):
        context = int(rng.random() < 0.5)
        reward = rewards.of(float(by_context[context][each.arm][each.user]), rng)
        rows.append((each.user, arms.index(each.arm), reward, context))
        odds.append([each.odds[arm] for arm in arms])
        if not isinstance(router, Fixed):
            feed.take(replace(each, liked=reward))
    users_N, arms_N, rewards_N, contexts_N = (np.array(column) for column in zip(*rows, strict=True))
    return Logged(LoggedTurns(users_N=users_N, arms_N=arms_N, odds_NA=np.array(odds), rewards_N=rewards_N), contexts_N)


def true_value(wanted_XA: np.ndarray) -> float:
    """The true value of a changed router, in expectation over users."""
    qualities_XA = np.array([[QUALITIES[arm] + TILT[arm][x] for arm in QUALITIES] for x in range(CONTEXTS)])
    return float((wanted_XA * qualities_XA).sum(axis=1).mean())


def estimates(log: Logged, wanted_XA: np.ndarray) -> dict[str, PolicyValue]:
    target_NA = wanted_XA[log.contexts_N]
    predicted_NA = cross_fitted(log.turns, log.contexts_N, arms=len(QUALITIES))
    return {
        "IPS": ips(log.turns, target_NA),
        "SNIPS": snips(log.turns, target_NA),
        "DR": doubly_robust(log.turns, target_NA, predicted_NA),
    }


def coverage(
    learns: bool, size: tuple[int, int], kind: str, runs: int, wanted_XA: np.ndarray = NEW
) -> dict[str, dict[str, float]]:
    """How often each estimator's interval contained the truth, and on which side the other intervals lay."""
    rewards, truth = REWARDS[kind], true_value(wanted_XA)
    config = SETTINGS.model_copy(update={"low": rewards.low, "high": rewards.high})
    found: list[dict[str, PolicyValue]] = []
    for run in range(runs):
        router = Router(list(QUALITIES), config) if learns else Fixed(FIXED)
        log = log_of(router, size, rewards, np.random.default_rng([5, size[1], run]))
        try:
            found.append(estimates(log, wanted_XA))
        except ValueError:  # the changed router would have chosen none of the turns, so there is no estimate
            continue
    return {name: _covered([run[name] for run in found], truth, runs) for name in ("IPS", "SNIPS", "DR")}


def _covered(values: list[PolicyValue], truth: float, runs: int) -> dict[str, float]:
    halves = [(value.upper - value.lower) / 2 for value in values]
    return {
        "coverage": float(np.mean([value.lower <= truth <= value.upper for value in values])),
        "all below": float(np.mean([value.upper < truth for value in values])),
        "all above": float(np.mean([value.lower > truth for value in values])),
        "bias, points": 100 * float(np.mean([value.mean for value in values]) - truth),
        "half width, points": 100 * float(np.median(halves)),
        "worth so many turns": float(np.median([value.turns for value in values])),
        "no estimate": 1.0 - len(values) / runs,
    }
