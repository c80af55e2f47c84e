"""A surrogate for late truth: a turn's late reward, predicted from what is known early by an online ridge regression, tenant by tenant.

What a product really wants is often known a day later, and a policy that waits a day learns of weights that are long gone. So a turn is
learned from when its window closes, with the late reward that is expected given what was seen by then (the surrogate index: Athey, Chetty,
Imbens and Kang, 2019). The late reward itself, when it comes, teaches the regression and is compared with what was predicted before it was
seen (prequentially); it is never trained on. The gradient is that of the late reward if the early values screen off the answer: given them,
what was answered tells nothing more about the late reward (surrogacy), and live and control share one link (comparability). Whoever makes
early values that promise more than they keep is rewarded for it until the regression has seen it: a day later. Two alarms watch both.

Each of the two is meant to be false in at most one of a hundred weeks of a tenant (so together in at most two): an alarm is raised from the
state of every fourth hour alone, at a level of 0.01 / 42 a look (Bonferroni, so that it does not matter how the looks hang together).
People are few, and some come more often, so errors are those of clusters, and bounds are Student's, with the freedom that is left where
people differ (Bell and McCaffrey, 2002, Survey Methodology 28; Imbens and Kolesar, 2016, Rev. Econ. Stat. 98). The gap's residuals are
scaled for a person's share of the mean that they are measured from, and its variance is at least that of turns of strangers. The
correlation's error is a jackknife over people, without such a floor.

A fold: the rows alone decide. A tenant's link is learned from its own people alone, since another's feedback is not to be trusted with it.
Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Person, Reward, Signal
from ostinato.core.verdicts import LATE_REWARD
from ostinato.reward.alarms import LATE_FUNCTION, SURROGATE, SURROGATE_GAP, Alarms
from ostinato.reward.baseline import Floats
from ostinato.reward.config import DAY, SurrogateConfig
from ostinato.reward.functions import considered
from ostinato.reward.ledger_entries import Said, TurnFacts

MOST_VALUE = 10.0  # absolute values of signals beyond it count as it
ROWS = 50_000  # late rewards remembered of all tenants together
LEAST_PEOPLE, LEAST_PAIRS = 20, 50  # that an interval rests on, on each side
MANY = 1e9  # degrees of freedom at which Student's t is the normal
LOOK_S = 4 * 3600.0  # seconds between two looks at what may raise an alarm
FALSE_ALARM = 0.01  # the chance that one of a tenant's two alarms is to be false in a week, each by itself
_LOOK_LEVEL = FALSE_ALARM * LOOK_S / (7 * DAY)
SURE, GAP_SURE = NormalDist().inv_cdf(1 - _LOOK_LEVEL), NormalDist().inv_cdf(1 - _LOOK_LEVEL / 2)


def early_values(reward: Reward, ended_at: float, signals: Sequence[Signal], names: Sequence[str]) -> dict[str, float]:
    """What is known of a turn when its window closes, by name, zeros left out: the function's own value, whether all were silent, the
    logarithm of the seconds until somebody reacted, and of each signal in `names` whether it was there, and its last value.

    Example: ``{"reward": 0.75, "delay": 0.34, "has:lines_kept_5m": 1.0, "value:lines_kept_5m": 0.5}``
    """
    heard = considered(signals, reward.at)
    first = min((signal.received_at for signal in heard), default=ended_at)
    found = {"reward": reward.value, "silent": float(not heard), "delay": math.log1p(max(0.0, first - ended_at)) / 10.0}
    for name in names:
        values = [signal.value for signal in heard if signal.name == name]
        if values:
            found |= {f"has:{name}": 1.0, f"value:{name}": min(MOST_VALUE, max(-MOST_VALUE, values[-1]))}
    return {name: value for name, value in found.items() if value or name == "reward"}


# ---------------------------------------------------------------- what is remembered


@dataclass(slots=True, kw_only=True)
class AwaitedTruth:
    """A turn with a predicted reward, whose late reward is to come. `said`: about it so far; `cap`: whom it counts for."""

    seq: int
    turn: str
    person: Person
    cap: Person
    control: bool
    ended_at: float
    function: str
    early: dict[str, float]
    predicted: float
    said: list[Said] = field(default_factory=list[Said])


class TruthPair(NamedTuple):
    """What was known early of a turn, what was predicted then, and what came."""

    person: Person
    cap: Person
    control: bool
    function: str
    early: dict[str, float]
    predicted: float
    truth: float


_awaited: TypeAdapter[list[AwaitedTruth]] = TypeAdapter(list[AwaitedTruth])
_pairs: TypeAdapter[dict[str, list[TruthPair]]] = TypeAdapter(dict[str, list[TruthPair]])


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateQuality:
    """How well late rewards were predicted before they were known, over a tenant's newest `pairs` turns of `people`.

    `correlation`: of prediction and truth; None if all truths are equal. `error`: the standard error of its Fisher transform, people as
    clusters (jackknife). `gap`: predicted minus true in the mean, live's minus control's, and `gap_error` its standard error, at
    least a thousandth of the truths' standard deviation; both None with fewer than 20 people on a side. `freedom` and `gap_freedom`: the
    degrees of freedom of these errors: one less than the people, and fewer where some come more often.

    Example: ``SurrogateQuality(pairs=500, people=61, correlation=0.84, error=0.05, gap=0.01, gap_error=0.02)``
    """

    pairs: int
    people: int
    correlation: float | None
    error: float
    gap: float | None = None
    gap_error: float | None = None
    freedom: float = MANY
    gap_freedom: float = MANY

    def bounds(self, normal: float = 1.96) -> tuple[float, float] | None:
        """The correlation's interval, with this quantile of a normal as its level (1.96: 95%); None with too few people or turns."""
        if self.correlation is None or self.people < LEAST_PEOPLE or self.pairs < LEAST_PAIRS:
            return None
        middle, half = math.atanh(self.correlation), student(normal, self.freedom) * self.error
        return math.tanh(middle - half), math.tanh(middle + half)

    def gap_half(self, normal: float = 1.96) -> float | None:
        """Half of the gap's interval, at a level as in `bounds`; None where there is no gap."""
        return None if self.gap_error is None else student(normal, self.gap_freedom) * self.gap_error

    def figures(self) -> dict[str, float]:
        """What is known, with 95% intervals, by name: `pairs`, `people`, `correlation` and `gap`, with `_lower` and `_upper`."""
        found: dict[str, float] = {"pairs": self.pairs, "people": self.people}
        if self.correlation is not None:
            found["correlation"] = self.correlation
        if (bounds := self.bounds()) is not None:
            found |= {"correlation_lower": bounds[0], "correlation_upper": bounds[1]}
        if self.gap is not None and (half := self.gap_half()) is not None:
            found |= {"gap": self.gap, "gap_lower": self.gap - half, "gap_upper": self.gap + half}
        return found

    def in_words(self) -> str:
        """One line for a screen."""
        if self.correlation is None:
            return f"late rewards of {self.pairs} turns do not differ, so nothing is known of their predictions"
        figures, interval = self.figures(), "no interval yet"
        if "correlation_lower" in figures:
            interval = f"95% [{figures['correlation_lower']:.2f}, {figures['correlation_upper']:.2f}]"
        whose = f"{self.pairs} turns ({self.people} people)"
        line = f"late rewards of {whose} were predicted with correlation {self.correlation:.2f}, {interval}"
        if "gap" not in figures:
            return line
        between = f"{figures['gap']:+.3f} [{figures['gap_lower']:+.3f}, {figures['gap_upper']:+.3f}]"
        return f"{line}; predicted minus true, live minus control: {between}"


# ---------------------------------------------------------------- the surrogate


class Surrogate:
    """Predicts late rewards, waits for them, and learns from them. Rows in the order of the log.

    The weights of a tenant's regression solve (S + L) w = s + L w0 with S = sum f^age x x^T over the remembered rows, f = `forget`. w0 is
    the early reward itself, so without evidence nothing is changed; L is `ridge` times the mean square of a feature where it is not 0:
    it counts as that many turns, on any scale. Predictions stay within the truths seen and the early reward.

    Rows are kept, and not their sums: so whoever is forgotten is taken out to the last bit, and no person holds more than the share
    `user_cap` of a tenant's rows, or 2 / people if that is more.

    Args:
        config: what is remembered, and how it is fitted.
        user_cap: see above.
        most_wait_s: seconds after which a late reward is not awaited any more.
    """

    def __init__(self, config: SurrogateConfig, user_cap: float, most_wait_s: float) -> None:
        self._config, self._user_cap, self._most_wait_s = config, user_cap, most_wait_s
        named = (f"{kind}:{name}" for name in config.signals for kind in ("has", "value"))
        self._names = ("reward", "silent", "delay", *named)
        self.awaited: dict[str, AwaitedTruth] = {}
        # by tenant: turns that ended before were served while its feedback was lost
        self._deaf_until: dict[str, float] = {}
        self._at = 0.0  # the time of the newest row that the desk dated
        self._levels: Counter[str] = Counter()  # by tenant: one turn in 2 ** level is followed
        self._rows: dict[str, list[TruthPair]] = {}
        self._held: dict[str, Counter[Person]] = {}  # by tenant, how many of its rows are whose
        self._weights: dict[tuple[str, str], tuple[Floats, float, float]] = {}
        self._quality: dict[str, SurrogateQuality] = {}
        self._looked: dict[str, int] = {}  # by tenant, when its alarms were last looked at, in units of LOOK_S
        self._seen: dict[str, SurrogateQuality] = {}  # and what was seen then

    # ------------------------------------------------------------ predictions

    def predicted(self, tenant: str, reward: Reward, early: Mapping[str, float], most: float) -> Reward:
        """The reward with the late reward that is expected in place of the function's own value, of magnitude at most `most`."""
        function = f"{reward.function} -> {self._config.label}" if not reward.early else reward.function
        value, (weights_F, low, high) = early["reward"], self._fitted(tenant, function)
        expected = float(np.array(self._features(early)) @ weights_F)
        expected = min(max(high, value), max(min(low, value), expected))
        value = min(most, max(-most, expected))
        return replace(reward, value=value, function=function, early=tuple(early.items()))

    def _features(self, early: Mapping[str, float]) -> list[float]:
        return [1.0] + [early.get(name, 0.0) for name in self._names]

    def _fitted(self, tenant: str, function: str) -> tuple[Floats, float, float]:
        """A tenant's weights for values of this function, and the least and the largest truth seen."""
        if (tenant, function) not in self._weights:
            rows = [row for row in self._rows.get(tenant, ()) if row.function == function]
            prior_F = np.zeros(1 + len(self._names))
            prior_F[1] = 1.0
            if not rows:
                return prior_F, math.inf, -math.inf
            truths_R = np.array([row.truth for row in rows])
            features_RF = np.array([self._features(row.early) for row in rows])
            kept_R = self._config.forget ** np.arange(len(rows) - 1, -1, -1)
            squares_F = np.einsum("rf,rf->f", features_RF, features_RF)
            present_F = np.count_nonzero(features_RF, axis=0)
            ridge_F = self._config.ridge * np.where(present_F, squares_F / np.maximum(1, present_F), 1.0)
            moments_FF = np.einsum("r,rf,rg->fg", kept_R, features_RF, features_RF) + np.diag(ridge_F)
            targets_F = np.einsum("r,r,rf->f", kept_R, truths_R, features_RF) + ridge_F * prior_F
            weights_F = np.linalg.solve(moments_FF, targets_F).astype(np.float64, copy=False)
            self._weights[tenant, function] = weights_F, float(truths_R.min()), float(truths_R.max())
        return self._weights[tenant, function]

    # ------------------------------------------------------------ truths

    def expire(self, at: float) -> None:
        """Wait no longer for late rewards of turns that ended too long before `at`; within a hundredth of the wait that is done once.

        `at` is the desk's own time: a turn that another clock dates into the future ends nobody's wait.
        """
        step = self._most_wait_s / 100.0
        if at // step != self._at // step:
            self._drop_awaited(lambda each: each.ended_at + self._most_wait_s < at)
        self._at = at

    def follow(self, facts: TurnFacts, said: Sequence[Said], reward: Reward, *, control: bool) -> None:
        """Wait for the late reward of a turn, or of one in 2, 4, ... turns of a tenant where there are too many to wait for."""
        if facts.ended_at < self._deaf_until.get(facts.tenant, -math.inf):
            return
        if _place(facts.id) >= 0.5 ** self._levels[facts.tenant]:
            return
        self.awaited[facts.id] = AwaitedTruth(
            seq=facts.seq,
            turn=facts.id,
            person=facts.person,
            cap=facts.context.person,
            control=control,
            ended_at=facts.ended_at,
            function=reward.function,
            early=dict(reward.early),
            predicted=reward.value,
            said=list(said),
        )
        if len(self.awaited) > self._config.most_awaited:
            counts = Counter(each.person[0] for each in self.awaited.values())
            largest = min(counts, key=lambda tenant: (-counts[tenant], tenant))
            self._levels[largest] += 1
            self._drop_awaited(
                lambda each: each.person[0] == largest and _place(each.turn) >= 0.5 ** self._levels[largest]
            )

    def hear(self, tenant: str, turn: str, said: Said, most: int) -> None:
        """Take in a signal about a turn whose reward is decided; of one turn at most `most` count."""
        entry = self.awaited.get(turn)
        if entry is not None and entry.person[0] == tenant and len(entry.said) < most:
            entry.said.append(said)

    def learn(self, signal: Signal) -> bool:
        """Take in what became of a turn's late reward; False if it was not awaited, as in a log into which another one's is copied."""
        entry = self.awaited.get(signal.turn)
        if entry is None or entry.person[0] != signal.tenant:
            return False
        del self.awaited[signal.turn]
        if len(self.awaited) * 4 < self._config.most_awaited and self._levels[signal.tenant]:
            self._levels[signal.tenant] -= 1
        if signal.name != LATE_REWARD:
            return True
        self._look(signal.tenant, signal.received_at)
        rows = self._rows.setdefault(signal.tenant, [])
        rows.append(
            TruthPair(
                person=entry.person,
                cap=entry.cap,
                control=entry.control,
                function=entry.function,
                early=entry.early,
                predicted=entry.predicted,
                truth=signal.value,
            )
        )
        held = self._held.setdefault(signal.tenant, Counter())
        held[entry.cap] += 1
        if held[entry.cap] > max(self._user_cap, 2.0 / len(held)) * self._config.memory:
            self._drop_row(signal.tenant, next(i for i, row in enumerate(rows) if row.cap == entry.cap))
        elif len(rows) > self._config.memory:
            self._drop_row(signal.tenant, 0)
        self._changed(signal.tenant)
        if sum(map(len, self._rows.values())) > ROWS:
            largest = max(self._rows, key=lambda tenant: (len(self._rows[tenant]), tenant))
            self._drop_row(largest, 0)
            self._changed(largest)
        return True

    def outage(self, tenant: str, at: float) -> None:
        """The alarm about a tenant's lost feedback was raised or cleared: the silence of its turns so far is no late reward."""
        self._deaf_until[tenant] = at
        self._drop_awaited(lambda each: each.person[0] == tenant)

    def people(self) -> Iterator[Person]:
        """Whose turns are known or awaited, with repetitions."""
        yield from (each.person for each in self.awaited.values())
        yield from (row.person for rows in self._rows.values() for row in rows)

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Take out these people's turns, known and awaited."""
        self._drop_awaited(lambda each: gone(each.person))
        for tenant, rows in self._rows.items():
            self._rows[tenant] = [row for row in rows if not gone(row.person)]
            if len(self._rows[tenant]) < len(rows):
                self._seen.pop(tenant, None)  # the next look sees what is left
            self._held[tenant] = Counter(row.cap for row in self._rows[tenant])
            self._changed(tenant)

    def _drop_row(self, tenant: str, place: int) -> None:
        cap, held = self._rows[tenant].pop(place).cap, self._held[tenant]
        held[cap] -= 1
        if not held[cap]:
            del held[cap]

    def _drop_awaited(self, gone: Callable[[AwaitedTruth], bool]) -> None:
        self.awaited = {turn: each for turn, each in self.awaited.items() if not gone(each)}

    def _changed(self, tenant: str) -> None:
        self._weights = {key: fitted for key, fitted in self._weights.items() if key[0] != tenant}
        self._quality.pop(tenant, None)

    # ------------------------------------------------------------ quality

    def qualities(self) -> dict[str, SurrogateQuality]:
        """By tenant, how well late rewards were predicted; tenants of which none is known are left out."""
        for tenant, rows in self._rows.items():
            if rows and tenant not in self._quality:
                newest = [row for row in rows if row.function == rows[-1].function]
                self._quality[tenant] = _quality(newest[-max(LEAST_PAIRS, self._config.memory // 4) :])
        return dict(self._quality)

    def _look(self, tenant: str, at: float) -> None:
        """Note how well late rewards were predicted, at the first of them in each `LOOK_S`, which is not among them yet."""
        if self._rows.get(tenant) and self._looked.get(tenant) != at // LOOK_S:
            self._seen[tenant] = self.qualities()[tenant]
            self._looked[tenant] = int(at // LOOK_S)

    def due(self, alarms: Alarms, at: float) -> Iterator[Alarm]:
        """The rows about alarms that have to be written now."""
        standing = alarms.standing()
        yield from self._ended(alarms, at)
        if not self._config.truth_after_s:
            return
        least = self._config.least_correlation
        for tenant, each in self._seen.items():
            detail = {"pairs": each.pairs, "people": each.people, "correlation": each.correlation, "gap": each.gap}
            name, sure = SURROGATE + tenant, each.bounds(SURE)
            if name not in standing and sure is not None and sure[1] < least:
                why = (
                    f"{each.in_words()}, where reward.surrogate.least_correlation is {least:g}: what turns are learned from says too "
                    "little of their late rewards. Look at what sends the early signals, and name better ones in reward.surrogate.signals"
                )
                yield alarms.row(name, AlarmState.RAISED, why, at, detail)
            elif name in standing and each.correlation is not None and each.correlation >= least:
                yield alarms.row(name, AlarmState.CLEARED, each.in_words(), at, detail)
            name = SURROGATE_GAP + tenant
            sure_half, clear_half = each.gap_half(GAP_SURE), each.gap_half(GAP_SURE / 2)
            if each.gap is None or sure_half is None or clear_half is None:
                continue
            if name not in standing and abs(each.gap) > sure_half:
                why = (
                    f"{each.in_words()}: live's early signals promise {'more' if each.gap > 0 else 'less'} than control's do, so the model "
                    "is changing what they mean. Look at live's answers with a high reward and a low late_reward"
                )
                yield alarms.row(name, AlarmState.RAISED, why, at, detail)
            elif name in standing and abs(each.gap) <= clear_half:
                yield alarms.row(name, AlarmState.CLEARED, each.in_words(), at, detail)

    def _ended(self, alarms: Alarms, at: float) -> Iterator[Alarm]:
        """All-clears of the alarms that nothing is left to say of."""
        if not any(name.startswith((LATE_FUNCTION, SURROGATE, SURROGATE_GAP)) for name in alarms.standing()):
            return
        # what may raise an alarm ends it: the last look, and what is left where that was forgotten
        qualities = self.qualities() | self._seen
        known = {SURROGATE + tenant for tenant in qualities}
        known |= {SURROGATE_GAP + tenant for tenant, each in qualities.items() if each.gap is not None}
        for name in alarms.standing():
            if not self._config.truth_after_s and name.startswith((LATE_FUNCTION, SURROGATE, SURROGATE_GAP)):
                yield alarms.row(name, AlarmState.CLEARED, "reward.surrogate.truth_after_s is 0", at)
            elif name.startswith((SURROGATE, SURROGATE_GAP)) and name not in known:
                yield alarms.row(name, AlarmState.CLEARED, "too few late rewards are left to say so", at)

    # ------------------------------------------------------------ the snapshot

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "awaited": _awaited.dump_python(list(self.awaited.values()), mode="json"),
            "at": self._at,
            "deaf_until": self._deaf_until,
            "levels": +self._levels,
            "rows": _pairs.dump_python(self._rows, mode="json"),
            "looked": self._looked,
            "seen": {tenant: asdict(each) for tenant, each in self._seen.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self.awaited = {each.turn: each for each in _awaited.validate_python(state["awaited"])}
        self._at = float(state["at"])
        self._deaf_until = dict(state["deaf_until"])
        self._levels = Counter(state["levels"])
        self._rows = _pairs.validate_python(state["rows"])
        self._held = {tenant: Counter(row.cap for row in rows) for tenant, rows in self._rows.items()}
        self._weights, self._quality = {}, {}
        # snapshots from before there were looks have neither
        self._looked = dict(state.get("looked", {}))
        self._seen = {tenant: SurrogateQuality(**each) for tenant, each in state.get("seen", {}).items()}


def _place(turn: str) -> float:
    """Where a hash puts a turn in [0, 1)."""
    return int.from_bytes(blake2b(turn.encode(), digest_size=6).digest(), "big") / 2.0**48


def student(normal: float, freedom: float) -> float:
    """The value that Student's t exceeds with the chance with which a normal exceeds `normal` (Wallace, 1959, Ann. Math. Stat. 30)."""
    scaled = normal * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(scaled * scaled / freedom))


def _quality(rows: Sequence[TruthPair]) -> SurrogateQuality:
    people = {person: i for i, person in enumerate(dict.fromkeys(row.person for row in rows))}
    owner_R = np.array([people[row.person] for row in rows])
    predicted_R, truth_R = np.array([row.predicted for row in rows]), np.array([row.truth for row in rows])
    correlation, error, freedom = _correlation(predicted_R, truth_R, owner_R)
    control_R, gap, gap_error, gap_freedom = np.array([row.control for row in rows]), None, None, MANY
    live, control = (_clustered((predicted_R - truth_R)[side_R], owner_R[side_R]) for side_R in (~control_R, control_R))
    if min(live.people, control.people) >= LEAST_PEOPLE:
        gap, variance = live.mean - control.mean, live.variance + control.variance
        largest = max(float(np.abs(predicted_R).max()), float(np.abs(truth_R).max()))
        least_error = 1e-3 * float(truth_R.std()) + 1e-9 * largest  # of rounding errors nothing is to be said
        gap_error = max(math.sqrt(variance), least_error)
        if variance:
            parts = sum(side.variance**2 / side.freedom for side in (live, control))
            gap_freedom = variance**2 / parts  # Welch's
    return SurrogateQuality(
        pairs=len(rows),
        people=len(people),
        correlation=correlation,
        error=error,
        gap=gap,
        gap_error=gap_error,
        freedom=freedom,
        gap_freedom=gap_freedom,
    )


class _Side(NamedTuple):
    """A mean, its variance with people as clusters, that variance's degrees of freedom, and the number of people."""

    mean: float
    variance: float
    freedom: float
    people: int


def _freedom(values_R: Floats, owner_R: NDArray[np.int64]) -> float:
    """Degrees of freedom of the clustered variance of the mean of these values, whose mean is 0; at least 1.

    One less than Satterthwaite's number of people, where a person adds to the variance by what rows, and people, are seen to differ.
    """
    count_P = np.bincount(owner_R)
    rows, square = len(values_R), float((values_R**2).mean())
    pairs = float((count_P.astype(np.float64) ** 2).sum()) - rows
    sums_P = np.bincount(owner_R, weights=values_R)
    between = max(0.0, (float((sums_P**2).sum()) - rows * square) / pairs) if pairs else 0.0
    between = min(square, between)
    parts_P = count_P * (square - between) + count_P.astype(np.float64) ** 2 * between
    return max(1.0, float(parts_P.sum() ** 2 / (parts_P**2).sum()) - 1.0) if square else 1.0


def _clustered(values_R: Floats, owner_R: NDArray[np.int64]) -> _Side:
    if len(people := np.unique(owner_R)) < 2:
        return _Side(0.0, 0.0, 1.0, len(people))
    mean = float(values_R.mean())
    share_P = np.bincount(owner_R)[people] / len(values_R)
    sums_P = np.bincount(owner_R, weights=values_R - mean)[people]
    # a person's residuals are too small by their own part in the mean
    clustered = float((sums_P**2 / (1.0 - share_P)).sum()) / len(values_R) ** 2
    # few people may seem to differ less than turns of strangers would, which is chance (Angrist and Pischke, 2009, section 8.2)
    variance = max(clustered, float(values_R.var()) / (len(values_R) - 1))
    return _Side(mean, variance, _freedom(values_R - mean, owner_R), len(people))


def _correlation(predicted_R: Floats, truth_R: Floats, owner_R: NDArray[np.int64]) -> tuple[float | None, float, float]:
    """The correlation, 0 for predictions that are all equal and None for such truths; its error by leaving out each person; and that
    error's degrees of freedom.
    """
    if truth_R.min() == truth_R.max():  # the mean of equal numbers may differ from each in the last bit
        return None, 0.0, MANY
    p_R, t_R = predicted_R - predicted_R.mean(), truth_R - truth_R.mean()
    columns = (np.ones(len(p_R)), p_R, t_R, p_R * p_R, t_R * t_R, p_R * t_R)
    by_person_CP = np.stack([np.bincount(owner_R, weights=column) for column in columns])
    total_C = by_person_CP.sum(axis=1)

    def z(sums: Floats) -> Floats:
        n, p, t, pp, tt, pt = sums
        n = np.maximum(n, 1.0)
        square = np.maximum(0.0, pp - p * p / n) * np.maximum(0.0, tt - t * t / n)
        ratio = np.where(square > 1e-24, (pt - p * t / n) / np.sqrt(np.maximum(square, 1e-24)), 0.0)
        return np.arctanh(np.clip(ratio, -0.999999, 0.999999))

    without_P = z(total_C[:, None] - by_person_CP)
    count = len(without_P)
    error = math.sqrt((count - 1) / count * float(((without_P - without_P.mean()) ** 2).sum()))
    correlation = float(np.tanh(z(total_C)))
    scaled_p_R, scaled_t_R = p_R / (p_R.std() or 1.0), t_R / t_R.std()
    influence_R = scaled_p_R * scaled_t_R - correlation * (scaled_p_R**2 + scaled_t_R**2) / 2.0
    return correlation, error, _freedom(influence_R - influence_R.mean(), owner_R)
