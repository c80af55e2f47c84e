"""Surrogate index: predict a turn's late reward from early features, with one online ridge regression per tenant.

What a product really wants is often known only a day later, and a policy that waited a day would learn about weights that are long gone.
So a turn is trained on when its window closes, with the late reward expected from what was observed by then (the surrogate index: Athey,
Chetty, Imbens and Kang, 2019). When the late reward itself arrives, it trains the regression and is compared with the prediction that was
made before it was known (prequential evaluation). The policy is never trained on it.

The gradient is that of the late reward under two assumptions. Surrogacy: given the early features, the answer says nothing more about the
late reward. Comparability: live and control share one regression. A policy that raises the early features without the late reward is
rewarded for it until the regression has seen that, a day later. Two alarms watch the two assumptions.

Each alarm is designed for a false-positive rate of at most 1% per tenant and week (so 2% together). It is evaluated every four hours, at a
level of 0.01 / 42 per evaluation (Bonferroni over the 42 evaluations of a week, valid under any dependence between them).
People are few and some contribute many turns, so standard errors are clustered by person, and intervals use Student's t with degrees of
freedom that account for unequal clusters (Bell and McCaffrey, 2002, Survey Methodology 28; Imbens and Kolesar, 2016, Rev. Econ. Stat. 98).
The gap's residuals are corrected for each person's share of the mean that they are measured from, and its variance is at least that of
independent turns. The correlation's error is a jackknife over people, without such a floor.

A pure fold: the rows alone determine the state. A tenant's regression is trained on its own people only, since another tenant's feedback
must not influence it.
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
from ostinato.reward.ledger_entries import SignalRef, TurnFacts

MOST_VALUE = 10.0  # signals are clipped to this absolute value
ROWS = 50_000  # most late rewards remembered, over all tenants
LEAST_PEOPLE, LEAST_PAIRS = 20, 50  # least numbers behind an interval; for the gap, least people on each side
INFINITE_DF = 1e9  # degrees of freedom at which Student's t is practically the normal distribution
EVALUATE_EVERY_S = 4 * 3600.0  # seconds between two evaluations of the alarms
FALSE_ALARM = 0.01  # intended false-positive rate of each of the two alarms, per tenant and week
_EVALUATION_LEVEL = FALSE_ALARM * EVALUATE_EVERY_S / (7 * DAY)
CORRELATION_Z, GAP_Z = NormalDist().inv_cdf(1 - _EVALUATION_LEVEL), NormalDist().inv_cdf(1 - _EVALUATION_LEVEL / 2)


def early_values(reward: Reward, ended_at: float, signals: Sequence[Signal], names: Sequence[str]) -> dict[str, float]:
    """Features known when a turn's window closes, as {name: value} without zeros: the function's own value, whether no signal arrived, the
    logarithm of the seconds until the first reaction, and for each signal in `names` whether it arrived and its last value.

    Example: ``{"reward": 0.75, "delay": 0.34, "has:lines_kept_5m": 1.0, "value:lines_kept_5m": 0.5}``
    """
    counted = considered(signals, reward.at)
    first = min((signal.received_at for signal in counted), default=ended_at)
    features = {
        "reward": reward.value,
        "silent": float(not counted),
        "delay": math.log1p(max(0.0, first - ended_at)) / 10.0,
    }
    for name in names:
        values = [signal.value for signal in counted if signal.name == name]
        if values:
            features |= {f"has:{name}": 1.0, f"value:{name}": min(MOST_VALUE, max(-MOST_VALUE, values[-1]))}
    return {name: value for name, value in features.items() if value or name == "reward"}


# ---------------------------------------------------------------- state


@dataclass(slots=True, kw_only=True)
class AwaitedTruth:
    """A turn whose reward was predicted and whose late reward has not arrived yet. `said`: the signals received so far; `cap`: the person
    whose influence limit it counts against.
    """

    seq: int
    turn: str
    person: Person
    cap: Person
    control: bool
    ended_at: float
    function: str
    early: dict[str, float]
    predicted: float
    said: list[SignalRef] = field(default_factory=list[SignalRef])


class TruthPair(NamedTuple):
    """A turn's early features and prediction, and the late reward that arrived."""

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

    `correlation`: between prediction and late reward; None if all late rewards are equal. `error`: the standard error of its Fisher
    transform, clustered by person (jackknife). `gap`: the mean of predicted minus true reward, live's minus control's. `gap_error`: its
    standard error, at least a thousandth of the late rewards' standard deviation. Both are None with fewer than 20 people on a side.
    `freedom` and `gap_freedom`: the degrees of freedom of these errors: the number of people minus one, or fewer if their numbers of turns
    are unequal.

    Example: ``SurrogateQuality(pairs=500, people=61, correlation=0.84, error=0.05, gap=0.01, gap_error=0.02)``
    """

    pairs: int
    people: int
    correlation: float | None
    error: float
    gap: float | None = None
    gap_error: float | None = None
    freedom: float = INFINITE_DF
    gap_freedom: float = INFINITE_DF

    def bounds(self, normal: float = 1.96) -> tuple[float, float] | None:
        """Return the correlation's interval, at the level of this normal quantile (1.96: 95%); None without a correlation, or with too few
        people or turns.
        """
        if self.correlation is None or self.people < LEAST_PEOPLE or self.pairs < LEAST_PAIRS:
            return None
        middle, half = math.atanh(self.correlation), student_quantile(normal, self.freedom) * self.error
        return math.tanh(middle - half), math.tanh(middle + half)

    def gap_half(self, normal: float = 1.96) -> float | None:
        """Return half the width of the gap's interval, at a level as in `bounds`; None if there is no gap."""
        return None if self.gap_error is None else student_quantile(normal, self.gap_freedom) * self.gap_error

    def figures(self) -> dict[str, float]:
        """Return the known figures with 95% intervals, by name: `pairs`, `people`, `correlation` and `gap`, with `_lower` and `_upper`."""
        figures: dict[str, float] = {"pairs": self.pairs, "people": self.people}
        if self.correlation is not None:
            figures["correlation"] = self.correlation
        if (bounds := self.bounds()) is not None:
            figures |= {"correlation_lower": bounds[0], "correlation_upper": bounds[1]}
        if self.gap is not None and (half := self.gap_half()) is not None:
            figures |= {"gap": self.gap, "gap_lower": self.gap - half, "gap_upper": self.gap + half}
        return figures

    def in_words(self) -> str:
        """Return a one-line summary."""
        if self.correlation is None:
            return f"the late rewards of {self.pairs} turns are all equal, so nothing is known about their predictions"
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
    """Predicts late rewards, waits for them, and is trained on them. Pass rows in the order of the log.

    The weights of a tenant's regression solve (S + L) w = s + L w0 with S = sum f^age x x^T over the remembered rows, f = `forget`. The
    prior w0 predicts the early reward itself, so without evidence nothing changes. L is `ridge` times the mean square of a feature where it
    is not 0, so the prior counts as that many turns on any scale. Predictions are clipped to the range of the late rewards seen and the
    early reward.

    Rows are kept rather than their sums, so that a person's erasure is exact to the last bit. No person holds more than the share
    `user_cap` of the `memory` rows of a tenant, or 2 / people if that is more.

    Args:
        config: what is remembered, and how it is fitted.
        user_cap: see above.
        most_wait_s: seconds after a turn's end until its late reward is no longer awaited.
    """

    def __init__(self, config: SurrogateConfig, user_cap: float, most_wait_s: float) -> None:
        self._config, self._user_cap, self._most_wait_s = config, user_cap, most_wait_s
        named = (f"{kind}:{name}" for name in config.signals for kind in ("has", "value"))
        self._names = ("reward", "silent", "delay", *named)
        self.awaited: dict[str, AwaitedTruth] = {}
        # by tenant: turns that ended before this time were served while feedback was lost
        self._feedback_lost_until: dict[str, float] = {}
        self._at = 0.0  # the desk's time at the newest row that it dated
        self._levels: Counter[str] = Counter()  # by tenant: one turn in 2 ** level is awaited
        self._rows: dict[str, list[TruthPair]] = {}
        self._rows_by_person: dict[str, Counter[Person]] = {}  # by tenant: number of rows per person
        self._weights: dict[tuple[str, str], tuple[Floats, float, float]] = {}
        self._quality: dict[str, SurrogateQuality] = {}
        # by tenant: when the alarms were last evaluated, in units of EVALUATE_EVERY_S
        self._evaluated_at: dict[str, int] = {}
        self._evaluated: dict[str, SurrogateQuality] = {}  # by tenant: the quality at that evaluation

    # ------------------------------------------------------------ predictions

    def predicted(self, tenant: str, reward: Reward, early: Mapping[str, float], most: float) -> Reward:
        """Replace the reward's value by the expected late reward, clipped to a magnitude of `most`."""
        function = f"{reward.function} -> {self._config.label}" if not reward.early else reward.function
        value, (weights_F, low, high) = early["reward"], self._fitted(tenant, function)
        expected = float(np.array(self._features(early)) @ weights_F)
        expected = min(max(high, value), max(min(low, value), expected))
        value = min(most, max(-most, expected))
        return replace(reward, value=value, function=function, early=tuple(early.items()))

    def _features(self, early: Mapping[str, float]) -> list[float]:
        return [1.0] + [early.get(name, 0.0) for name in self._names]

    def _fitted(self, tenant: str, function: str) -> tuple[Floats, float, float]:
        """Return a tenant's weights for rewards of this function, and the least and the largest late reward seen."""
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

    # ------------------------------------------------------------ late rewards

    def expire(self, at: float) -> None:
        """Stop waiting for late rewards of turns that ended more than `most_wait_s` before `at`; runs once per hundredth of that time.

        `at` is the desk's own time, so that a turn dated into the future by another clock ends no other turn's wait.
        """
        step = self._most_wait_s / 100.0
        if at // step != self._at // step:
            self._drop_awaited(lambda each: each.ended_at + self._most_wait_s < at)
        self._at = at

    def follow(self, facts: TurnFacts, said: Sequence[SignalRef], reward: Reward, *, control: bool) -> None:
        """Start waiting for a turn's late reward. If a tenant has too many such turns, only one in 2, 4, ... of them is awaited."""
        if facts.ended_at < self._feedback_lost_until.get(facts.tenant, -math.inf):
            return
        if _hash_fraction(facts.id) >= 0.5 ** self._levels[facts.tenant]:
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
                lambda each: each.person[0] == largest and _hash_fraction(each.turn) >= 0.5 ** self._levels[largest]
            )

    def hear(self, tenant: str, turn: str, said: SignalRef, most: int) -> None:
        """Take in a signal about a turn whose reward is decided; at most `most` signals of a turn count."""
        entry = self.awaited.get(turn)
        if entry is not None and entry.person[0] == tenant and len(entry.said) < most:
            entry.said.append(said)

    def learn(self, signal: Signal) -> bool:
        """Take in a late reward, or the reason for its absence. Return False if it was not awaited, as in a log copied from another one."""
        entry = self.awaited.get(signal.turn)
        if entry is None or entry.person[0] != signal.tenant:
            return False
        del self.awaited[signal.turn]
        if len(self.awaited) * 4 < self._config.most_awaited and self._levels[signal.tenant]:
            self._levels[signal.tenant] -= 1
        if signal.name != LATE_REWARD:
            return True
        self._evaluate(signal.tenant, signal.received_at)
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
        by_person = self._rows_by_person.setdefault(signal.tenant, Counter())
        by_person[entry.cap] += 1
        if by_person[entry.cap] > max(self._user_cap, 2.0 / len(by_person)) * self._config.memory:
            self._drop_row(signal.tenant, next(i for i, row in enumerate(rows) if row.cap == entry.cap))
        elif len(rows) > self._config.memory:
            self._drop_row(signal.tenant, 0)
        self._invalidate(signal.tenant)
        if sum(map(len, self._rows.values())) > ROWS:
            largest = max(self._rows, key=lambda tenant: (len(self._rows[tenant]), tenant))
            self._drop_row(largest, 0)
            self._invalidate(largest)
        return True

    def outage(self, tenant: str, at: float) -> None:
        """Stop awaiting a tenant's turns so far, after the alarm about its feedback was raised or cleared: their silence means nothing."""
        self._feedback_lost_until[tenant] = at
        self._drop_awaited(lambda each: each.person[0] == tenant)

    def people(self) -> Iterator[Person]:
        """Yield the people of remembered and awaited turns, with repetitions."""
        yield from (each.person for each in self.awaited.values())
        yield from (row.person for rows in self._rows.values() for row in rows)

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Remove these people's turns, remembered and awaited."""
        self._drop_awaited(lambda each: gone(each.person))
        for tenant, rows in self._rows.items():
            self._rows[tenant] = [row for row in rows if not gone(row.person)]
            if len(self._rows[tenant]) < len(rows):
                self._evaluated.pop(tenant, None)  # the next evaluation uses what is left
            self._rows_by_person[tenant] = Counter(row.cap for row in self._rows[tenant])
            self._invalidate(tenant)

    def _drop_row(self, tenant: str, place: int) -> None:
        cap, by_person = self._rows[tenant].pop(place).cap, self._rows_by_person[tenant]
        by_person[cap] -= 1
        if not by_person[cap]:
            del by_person[cap]

    def _drop_awaited(self, gone: Callable[[AwaitedTruth], bool]) -> None:
        self.awaited = {turn: each for turn, each in self.awaited.items() if not gone(each)}

    def _invalidate(self, tenant: str) -> None:
        self._weights = {key: fitted for key, fitted in self._weights.items() if key[0] != tenant}
        self._quality.pop(tenant, None)

    # ------------------------------------------------------------ quality

    def qualities(self) -> dict[str, SurrogateQuality]:
        """Return by tenant how well late rewards were predicted, without tenants that have none yet."""
        for tenant, rows in self._rows.items():
            if rows and tenant not in self._quality:
                newest = [row for row in rows if row.function == rows[-1].function]
                self._quality[tenant] = _quality(newest[-max(LEAST_PAIRS, self._config.memory // 4) :])
        return dict(self._quality)

    def _evaluate(self, tenant: str, at: float) -> None:
        """Evaluate the predictions at the first late reward of each `EVALUATE_EVERY_S`, before that late reward is added."""
        if self._rows.get(tenant) and self._evaluated_at.get(tenant) != at // EVALUATE_EVERY_S:
            self._evaluated[tenant] = self.qualities()[tenant]
            self._evaluated_at[tenant] = int(at // EVALUATE_EVERY_S)

    def due(self, alarms: Alarms, at: float) -> Iterator[Alarm]:
        """Yield the alarm rows that have to be written now."""
        standing = alarms.standing()
        yield from self._all_clears(alarms, at)
        if not self._config.truth_after_s:
            return
        least = self._config.least_correlation
        for tenant, each in self._evaluated.items():
            detail = {"pairs": each.pairs, "people": each.people, "correlation": each.correlation, "gap": each.gap}
            name, bounds = SURROGATE + tenant, each.bounds(CORRELATION_Z)
            if name not in standing and bounds is not None and bounds[1] < least:
                why = (
                    f"{each.in_words()}, where reward.surrogate.least_correlation is {least:g}: the early signals predict late "
                    "rewards poorly. Check what sends them, and name better ones in reward.surrogate.signals"
                )
                yield alarms.row(name, AlarmState.RAISED, why, at, detail)
            elif name in standing and each.correlation is not None and each.correlation >= least:
                yield alarms.row(name, AlarmState.CLEARED, each.in_words(), at, detail)
            name = SURROGATE_GAP + tenant
            raise_half, clear_half = each.gap_half(GAP_Z), each.gap_half(GAP_Z / 2)
            if each.gap is None or raise_half is None or clear_half is None:
                continue
            if name not in standing and abs(each.gap) > raise_half:
                why = (
                    f"{each.in_words()}: live's early signals promise {'more' if each.gap > 0 else 'less'} than control's do, so the model "
                    "is changing what they mean. Look at live's answers with a high reward and a low late_reward"
                )
                yield alarms.row(name, AlarmState.RAISED, why, at, detail)
            elif name in standing and abs(each.gap) <= clear_half:
                yield alarms.row(name, AlarmState.CLEARED, each.in_words(), at, detail)

    def _all_clears(self, alarms: Alarms, at: float) -> Iterator[Alarm]:
        """Yield the all-clears of alarms that are switched off or no longer have any data."""
        if not any(name.startswith((LATE_FUNCTION, SURROGATE, SURROGATE_GAP)) for name in alarms.standing()):
            return
        # an alarm is cleared from the data that may raise it: the last evaluation, or what an erasure left of it
        qualities = self.qualities() | self._evaluated
        known = {SURROGATE + tenant for tenant in qualities}
        known |= {SURROGATE_GAP + tenant for tenant, each in qualities.items() if each.gap is not None}
        for name in alarms.standing():
            if not self._config.truth_after_s and name.startswith((LATE_FUNCTION, SURROGATE, SURROGATE_GAP)):
                yield alarms.row(name, AlarmState.CLEARED, "reward.surrogate.truth_after_s is 0", at)
            elif name.startswith((SURROGATE, SURROGATE_GAP)) and name not in known:
                yield alarms.row(name, AlarmState.CLEARED, "too few late rewards are left to judge", at)

    # ------------------------------------------------------------ the snapshot

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "awaited": _awaited.dump_python(list(self.awaited.values()), mode="json"),
            "at": self._at,
            "deaf_until": self._feedback_lost_until,
            "levels": +self._levels,
            "rows": _pairs.dump_python(self._rows, mode="json"),
            "looked": self._evaluated_at,
            "seen": {tenant: asdict(each) for tenant, each in self._evaluated.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self.awaited = {each.turn: each for each in _awaited.validate_python(state["awaited"])}
        self._at = float(state["at"])
        self._feedback_lost_until = dict(state["deaf_until"])
        self._levels = Counter(state["levels"])
        self._rows = _pairs.validate_python(state["rows"])
        self._rows_by_person = {tenant: Counter(row.cap for row in rows) for tenant, rows in self._rows.items()}
        self._weights, self._quality = {}, {}
        # snapshots of versions without evaluation times have neither
        self._evaluated_at = dict(state.get("looked", {}))
        self._evaluated = {tenant: SurrogateQuality(**each) for tenant, each in state.get("seen", {}).items()}


def _hash_fraction(turn: str) -> float:
    """Return a turn's hash, scaled to [0, 1)."""
    return int.from_bytes(blake2b(turn.encode(), digest_size=6).digest(), "big") / 2.0**48


def student_quantile(normal: float, freedom: float) -> float:
    """Return the Student's t quantile with the tail probability of the normal quantile `normal` (Wallace, 1959, Ann. Math. Stat. 30)."""
    scaled = normal * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(scaled * scaled / freedom))


def _quality(rows: Sequence[TruthPair]) -> SurrogateQuality:
    people = {person: i for i, person in enumerate(dict.fromkeys(row.person for row in rows))}
    person_R = np.array([people[row.person] for row in rows])
    predicted_R, truth_R = np.array([row.predicted for row in rows]), np.array([row.truth for row in rows])
    correlation, error, freedom = _correlation(predicted_R, truth_R, person_R)
    control_R, gap, gap_error, gap_freedom = np.array([row.control for row in rows]), None, None, INFINITE_DF
    live, control = (
        _clustered((predicted_R - truth_R)[side_R], person_R[side_R]) for side_R in (~control_R, control_R)
    )
    if min(live.people, control.people) >= LEAST_PEOPLE:
        gap, variance = live.mean - control.mean, live.variance + control.variance
        largest = max(float(np.abs(predicted_R).max()), float(np.abs(truth_R).max()))
        least_error = 1e-3 * float(truth_R.std()) + 1e-9 * largest  # so that rounding errors never count as a gap
        gap_error = max(math.sqrt(variance), least_error)
        if variance:
            parts = sum(side.variance**2 / side.freedom for side in (live, control))
            gap_freedom = variance**2 / parts  # Welch-Satterthwaite
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


class _ClusteredMean(NamedTuple):
    """A mean, its variance clustered by person, the degrees of freedom of that variance, and the number of people."""

    mean: float
    variance: float
    freedom: float
    people: int


def _degrees_of_freedom(values_R: Floats, person_R: NDArray[np.int64]) -> float:
    """Return the degrees of freedom, at least 1, of the clustered variance of the mean of these values, which must be centred on 0.

    This is Satterthwaite's effective number of people minus one. Each person's contribution is estimated from the variances within and
    between people.
    """
    count_P = np.bincount(person_R)
    rows, square = len(values_R), float((values_R**2).mean())
    pairs = float((count_P.astype(np.float64) ** 2).sum()) - rows
    sums_P = np.bincount(person_R, weights=values_R)
    between = max(0.0, (float((sums_P**2).sum()) - rows * square) / pairs) if pairs else 0.0
    between = min(square, between)
    parts_P = count_P * (square - between) + count_P.astype(np.float64) ** 2 * between
    return max(1.0, float(parts_P.sum() ** 2 / (parts_P**2).sum()) - 1.0) if square else 1.0


def _clustered(values_R: Floats, person_R: NDArray[np.int64]) -> _ClusteredMean:
    if len(people := np.unique(person_R)) < 2:
        return _ClusteredMean(0.0, 0.0, 1.0, len(people))
    mean = float(values_R.mean())
    share_P = np.bincount(person_R)[people] / len(values_R)
    sums_P = np.bincount(person_R, weights=values_R - mean)[people]
    # correct for leverage: a person's own values pull the mean towards them, which makes their residuals too small
    clustered = float((sums_P**2 / (1.0 - share_P)).sum()) / len(values_R) ** 2
    # with few people, the clustered variance may fall below that of independent turns by chance (Angrist and Pischke, 2009, section 8.2)
    variance = max(clustered, float(values_R.var()) / (len(values_R) - 1))
    return _ClusteredMean(mean, variance, _degrees_of_freedom(values_R - mean, person_R), len(people))


def _correlation(
    predicted_R: Floats, truth_R: Floats, person_R: NDArray[np.int64]
) -> tuple[float | None, float, float]:
    """Return the correlation, 0 if all predictions are equal and None if all late rewards are; its jackknife error over people; and the
    degrees of freedom of that error.
    """
    if truth_R.min() == truth_R.max():  # not by the variance: the mean of equal numbers may be off in the last bit
        return None, 0.0, INFINITE_DF
    p_R, t_R = predicted_R - predicted_R.mean(), truth_R - truth_R.mean()
    columns = (np.ones(len(p_R)), p_R, t_R, p_R * p_R, t_R * t_R, p_R * t_R)
    by_person_CP = np.stack([np.bincount(person_R, weights=column) for column in columns])
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
    return correlation, error, _degrees_of_freedom(influence_R - influence_R.mean(), person_R)
