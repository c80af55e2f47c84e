"""Bayesian linear regression of a person's ratings on their answers' score features; its posterior mean sets the dials. Pure.

An answer's features are the gradient of its log-probability with respect to the dials (`core.steering.Steered`), so the slope of the reward
on them is the natural policy gradient. Each later rated answer multiplies the weight of the earlier ones by `decay`: silence erases
nothing.

A person's evidence is a function of the *set* of rated answers, in the order of the answers and not of the ratings' arrival. To make that
possible, the newest rated answers are kept one by one, as many as fit into a kilobyte (`window`), and only older ones as sums. A rating of
an answer older than those kept is ignored.

To decide whether the CUSUM returns a person to the prior, the equations must be solved for each answer; the sums need no solution. So the
CUSUM's outcome is packed with the state, and the sums over all answers are added up again on reading, with the same bits and no solution.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Halves = NDArray[np.float16]

MOST_DIALS = 16
MOST_BYTES = 1024
"""The largest size of a packed state."""

_FORMAT = 3  # of a packed state
_HEAD = struct.Struct("<BBBBBHHIffQQQ16s")  # see `PersonState.pack`
# the CUSUM after all ratings, its returns to the prior since the settled ones, and the answer of the last return
_OUTCOME = struct.Struct("<fBB")
_RATED = 8 + 1  # bytes of a rated answer's place and number of signals, without its features and signals
_SIGNAL = struct.Struct("<Ie")
_SIGNALS = 4  # signals about one answer that are kept
_CRC = 4
_PRIVATE = 1 << 7  # a flag in the byte of the number of strikes
_FEATURE_LIMIT = 1000.0  # |feature| is clipped to this
_STEP = 2.0**-16  # predictions are rounded to multiples of this, so that the last bits of a solution decide nothing
_UNRATED = 0.5  # assumed rating of an unrated answer with a violation
_SET_DEVIATION = 0.05  # prior standard deviation of a dial that the person set, in units of the dial


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The settings of the regression.

    `decay`: the factor on an answer's weight for each later rated answer. `noise`: the variance of a reward around its prediction.
    `strength`: the weight of the KL penalty; a dial is at most its slope divided by it.

    A one-sided CUSUM of predicted minus observed reward, less `drift` at each rating, returns a person to the prior once it exceeds
    `limit`. While predictions are right on average, or too low, that happens at most once in exp(8 drift limit) ratings (317 by default),
    whatever the ratings' distribution: exp(8 drift (missed - drift)) then has a mean of at most 1 (Hoeffding's lemma), which makes the
    CUSUM an e-detector.

    Example: ``Regression(decay=1.0)``
    """

    decay: float = 0.99
    noise: float = 0.22
    drift: float = 0.2
    limit: float = 3.6
    strength: float = 0.05

    def __post_init__(self) -> None:
        for name, value, most in (
            ("decay", self.decay, 1.0),
            ("noise", self.noise, math.inf),
            ("strength", self.strength, math.inf),
        ):
            if not 0.0 < value <= most:
                raise ValueError(f"{name} is {value:g}; set more than 0 and at most {most:g}")


@dataclass(frozen=True, eq=False)
class Prior:
    """The belief about a person before any rating: a Gaussian over K slopes and, last, the mean reward (D = K + 1).

    Raises ValueError for a covariance that is not positive definite.

    Example: ``Prior.of(np.zeros(8), 0.003 * np.eye(8))``
    """

    mean_D: Floats
    covariance_DD: Floats

    def __post_init__(self) -> None:
        size = len(self.mean_D)
        if self.mean_D.ndim != 1 or self.covariance_DD.shape != (size, size):
            raise ValueError(f"a prior over {size} numbers needs a covariance of shape {(size, size)}")
        try:
            np.linalg.cholesky(self.covariance_DD)
        except np.linalg.LinAlgError:
            raise ValueError("the prior's covariance is not positive definite") from None

    @classmethod
    def of(cls, slopes_K: Floats, covariance_KK: Floats, *, reward: float = 0.5, variance: float = 0.02) -> Prior:
        """Build a prior from the slopes' distribution, and the mean and variance of people's mean rewards."""
        dials = len(slopes_K)
        covariance_DD = np.zeros((dials + 1, dials + 1))
        covariance_DD[:dials, :dials] = covariance_KK
        covariance_DD[dials, dials] = variance
        return cls(np.append(slopes_K, reward).astype(np.float64), covariance_DD)

    def only(self, kept: Sequence[int]) -> Prior:
        """Return the prior of some dials, by number."""
        places = [*kept, len(self.mean_D) - 1]
        return Prior(self.mean_D[places], self.covariance_DD[np.ix_(places, places)])

    def held(self, dials: Mapping[int, float], strength: float) -> Prior:
        """Return the prior with some dials, by number, set by the person, with so little variance that only many ratings move them."""
        if not dials:
            return self
        mean_D, covariance_DD = self.mean_D.copy(), self.covariance_DD.copy()
        for dial, setting in dials.items():
            mean_D[dial] = setting * strength
            covariance_DD[dial, :] = covariance_DD[:, dial] = 0.0
            covariance_DD[dial, dial] = (_SET_DEVIATION * strength) ** 2
        return Prior(mean_D, covariance_DD)

    @cached_property
    def precision_DD(self) -> Floats:
        """The inverse of the covariance."""
        return np.asarray(np.linalg.inv(self.covariance_DD), np.float64)

    @cached_property
    def shift_D(self) -> Floats:
        """The precision times the mean."""
        return self.precision_DD @ self.mean_D


def violation(cost: float) -> float:
    """Return the reward of a signal that reports a violation: below 0, unlike a rating. `cost`: what it subtracts from the rating."""
    return -1.0 - cost


@dataclass(frozen=True, slots=True, eq=False)
class Rated:
    """A rated answer: its place among the person's answers, its features, and each signal's hash (32 bits) and reward in [0, 1].

    The reward of a retracted signal is NaN: it stays, so that the signal does not count if it comes after its retraction. That of a
    violation is `violation(cost)`.
    """

    place: int
    features_K: Halves
    signals: tuple[tuple[int, float], ...]

    @property
    def reward(self) -> float | None:
        """The mean of its ratings (0.5 without one), less the cost of its costliest violation; None if all signals were retracted."""
        return _reward(reward for _, reward in self.signals)

    @property
    def violates(self) -> bool:
        """True if a violation was reported and not retracted."""
        return any(reward < 0.0 for _, reward in self.signals)


class _Packed(Sequence[Rated]):
    """Rated answers inside a packed state. Dials need only their sums, so answers become objects only when they are accessed.

    `counts`: each answer's number of signals; `signals`: the signals of all answers, packed.
    """

    def __init__(self, places: tuple[int, ...], counts: bytes, features_NK: Halves, signals: bytes) -> None:
        self._places, self._counts, self._features_NK, self._signals = places, counts, features_NK, signals

    def rewards(self) -> list[float | None]:
        """Return each answer's `Rated.reward`."""
        each = _SIGNAL.iter_unpack(self._signals)
        return [_reward(reward for _, reward in islice(each, count)) for count in self._counts]

    @cached_property
    def _rated(self) -> tuple[Rated, ...]:
        each = _SIGNAL.iter_unpack(self._signals)
        told = zip(self._places, self._features_NK, self._counts, strict=True)
        return tuple(Rated(place, features_K, tuple(islice(each, count))) for place, features_K, count in told)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Rated: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Rated, ...]: ...

    def __getitem__(self, index: int | slice) -> Rated | tuple[Rated, ...]:
        return self._rated[index]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The evidence of ratings alone, without the prior: the precision and the shift that they add to it.

    `ratings`: the number since the last return to the prior. `resets`: the returns by the CUSUM. `reset_at`: the place (of an answer) of
    the last return, by hand or by the CUSUM.
    """

    precision_DD: Singles
    shift_D: Singles
    ratings: int = 0
    cusum: float = 0.0
    resets: int = 0
    reset_at: int = 0

    @classmethod
    def none(cls, dials: int) -> Evidence:
        """Return the evidence of no ratings."""
        return cls(np.zeros((dials + 1, dials + 1), np.float32), np.zeros(dials + 1, np.float32))

    def then(self, rated: Rated, prior: Prior, regression: Regression) -> Evidence:
        """Return the evidence with one more rated answer, later than all before it."""
        reward = rated.reward
        if reward is None:
            return self
        row_D = np.append(rated.features_K, 1).astype(np.float64)
        mean_D = np.linalg.solve(prior.precision_DD + self.precision_DD, prior.shift_D + self.shift_D)
        missed = round((float((mean_D * row_D).sum()) - reward) / _STEP) * _STEP
        cusum = max(0.0, self.cusum + missed - regression.drift)
        before = self
        if cusum > regression.limit:
            none = Evidence.none(len(row_D) - 1)
            before = replace(none, resets=self.resets + 1, reset_at=rated.place)
            cusum = 0.0
        return before.added(np.append(row_D, reward)[None], regression, cusum=float(np.float32(cusum)))

    def added(self, told_NE: Floats, regression: Regression, *, cusum: float) -> Evidence:
        """Return the evidence with N more rated answers in order, none of which returns the person to the prior.

        Each row of `told_NE` is an answer's features, 1 and its reward. `cusum`: the CUSUM after them. All operations are element-wise and
        rounded to float32 after each answer, so that adding all at once gives the same bits as adding one by one.
        """
        size = told_NE.shape[1] - 1
        # each answer's addition to the precision and, in the last column, to the shift
        terms_NDE = told_NE[:, :size, None] * told_NE[:, None, :]
        terms_NDE /= regression.noise
        sum_DE, rounded_DE = np.empty((size, size + 1)), np.empty((size, size + 1), np.float32)
        rounded_DE[:, :size], rounded_DE[:, size] = self.precision_DD, self.shift_D
        for term_DE in terms_NDE:
            sum_DE[...] = rounded_DE
            sum_DE *= regression.decay
            sum_DE += term_DE
            rounded_DE[...] = sum_DE
        precision_DD, shift_D = rounded_DE[:, :size].copy(), rounded_DE[:, size].copy()
        return Evidence(precision_DD, shift_D, self.ratings + len(told_NE), cusum, self.resets, self.reset_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonPosterior:
    """The current belief about a person: mean and covariance of the K slopes and, last, of the mean reward."""

    mean_D: Floats
    covariance_DD: Floats

    def dials(self, fisher_KK: Floats, *, tokens: float, nats: float, strength: float) -> tuple[float, ...]:
        """Return the dial settings as float32 values: the slopes over `strength`, or less if the KL divergence would exceed the cap.

        The cap is `nats` per token for an answer of `tokens` tokens, by the quadratic estimate. The estimate is no bound: the engine
        enforces the cap on each token. `fisher_KK`: the covariance of an answer's features.
        """
        scale = self.scale(fisher_KK, tokens=tokens, nats=nats, strength=strength)
        return tuple(float(dial) for dial in (self.mean_D[:-1] * scale).astype(np.float32))

    def scale(self, fisher_KK: Floats, *, tokens: float, nats: float, strength: float) -> float:
        """Return the factor by which `dials` multiplies the slopes."""
        slopes_K = self.mean_D[:-1]
        squared = float(slopes_K @ fisher_KK @ slopes_K)
        return min(1.0 / strength, math.sqrt(2.0 * nats * tokens / squared)) if squared > 0.0 else 1.0 / strength


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PersonState:
    """What is kept about a person: sums over the rated answers up to the place `settled_at`, and the later ones one by one, by place.

    Attributes:
        names: the hash of the dials' names (`names_hash`). Directions are fitted anew to each release, and mean the same under the same
            names.
        settled: the sums.
        recent: the later answers.
        held: dials that the person set, by number.
        strikes: how often violations returned the person to the prior.
        reported: violations of answers that are no longer kept since dials were cleared or reset by hand, which must hide none.
        nats: the KL divergence that the person's answers have spent.
        cursor: the last row of the log that was applied.
        private: some ratings are about answers that only the person's own dials may learn from (`Consent.ADAPT`).
        latest: the evidence with all ratings, if it has been computed (`ready`).

    Example::

        state = PersonState.new(names_hash(basis.names), 8).rate(812, turn.steered.features, signal, 1.0, prior, regression)
        state.posterior(prior, regression).mean_D
    """

    names: str
    settled: Evidence
    settled_at: int = 0
    recent: Sequence[Rated] = ()
    held: tuple[tuple[int, float], ...] = ()
    strikes: int = 0
    reported: int = 0
    nats: float = 0.0
    cursor: int = 0
    private: bool = False
    latest: Evidence | None = field(default=None, repr=False)

    @classmethod
    def new(cls, names: str, dials: int) -> PersonState:
        """Return the state of a person who has rated nothing. Raises ValueError for more than 16 dials."""
        if not 1 <= dials <= MOST_DIALS:
            raise ValueError(f"{dials} dials; a person has 1 to {MOST_DIALS}")
        return cls(names=names, settled=Evidence.none(dials))

    @property
    def dials(self) -> int:
        """The number of dials."""
        return len(self.settled.shift_D) - 1

    def rate(
        self,
        place: int,
        features: Sequence[float],
        signal: int,
        reward: float | None,
        prior: Prior,
        regression: Regression,
    ) -> PersonState:
        """Return the state with a signal, by its hash, about the answer at `place`.

        `reward`: in [0, 1], or a `violation`; None retracts the signal, even one that comes later. Returns the same object if nothing
        changes: the signal was applied before, the answer has four others, or the answer is older than those kept one by one.
        """
        if place <= self.settled_at:
            return self
        at = bisect_left(self.recent, place, key=_place)
        known = self.recent[at] if at < len(self.recent) and self.recent[at].place == place else None
        told = dict(known.signals) if known is not None else {}
        if told.get(signal, 0.0) != told.get(signal, 0.0) or (signal in told and reward is not None):
            return self  # it was retracted, or is repeated
        if signal not in told and len(told) == _SIGNALS:
            return self
        told[signal] = math.nan if reward is None else float(np.float16(reward))
        features_K = np.clip(np.asarray(features, np.float64), -_FEATURE_LIMIT, _FEATURE_LIMIT).astype(np.float16)
        rated = Rated(place, features_K if known is None else known.features_K, tuple(sorted(told.items())))
        prior = self.prior(prior, regression)
        newest = known is None and at == len(self.recent)
        latest = self.evidence(prior, regression).then(rated, prior, regression) if newest else None
        recent = (*self.recent[:at], rated, *self.recent[at + (known is not None) :])
        settled, settled_at = self.settled, self.settled_at
        if len(recent) > window(self.dials):
            settled, settled_at, recent = settled.then(recent[0], prior, regression), recent[0].place, recent[1:]
        state = replace(self, settled=settled, settled_at=settled_at, recent=recent, latest=latest)
        return state.ready(prior, regression)

    def hold(self, dials: Mapping[int, float], prior: Prior, regression: Regression) -> PersonState:
        """Return the state with dials that the person sets, by number; those set before stay."""
        held = tuple(sorted({**dict(self.held), **{k: float(np.float32(z)) for k, z in dials.items()}}.items()))
        state = replace(self, held=held, latest=None)
        return state.ready(state.prior(prior, regression), regression)

    def spend(self, nats: float) -> PersonState:
        """Return the state with the KL divergence of one more answer, in nats."""
        return replace(self, nats=float(np.float32(self.nats + nats)))

    def clear(self, dials: Collection[int], place: int, prior: Prior, regression: Regression) -> PersonState:
        """Return the state with these dials, by number, back at the prior: not held, and without what ratings said about them.

        What ratings said about the other dials stays. Later ratings of answers up to `place` are ignored.
        """
        evidence = self.evidence(self.prior(prior, regression), regression)
        precision_DD, shift_D, cleared = evidence.precision_DD.copy(), evidence.shift_D.copy(), list(dials)
        precision_DD[cleared, :] = precision_DD[:, cleared] = shift_D[cleared] = 0.0
        settled = replace(evidence, precision_DD=precision_DD, shift_D=shift_D)
        held = tuple(each for each in self.held if each[0] not in dials)
        settled_at, reported = max(place, self._newest), self._violations()
        state = replace(
            self, settled=settled, settled_at=settled_at, recent=(), held=held, reported=reported, latest=None
        )
        return state.ready(state.prior(prior, regression), regression)

    def reset(self, place: int) -> PersonState:
        """Return the state back at the prior: no rating so far counts, nor a later rating of answers up to `place`, and no dial is held.

        Strikes stay, and so do violations that have not led to a strike yet. Later ratings may be learned from by others again (`private`).
        """
        known = self.settled if self.latest is None else self.latest
        place = max(place, self._newest)
        none = replace(Evidence.none(self.dials), resets=known.resets, reset_at=place)
        return replace(
            self,
            settled=none,
            settled_at=place,
            recent=(),
            held=(),
            reported=self._violations(),
            private=False,
            latest=none,
        )

    def barred(self) -> PersonState | None:
        """Return what is kept of a person who no longer allows dials: strikes and violations without a strike yet. None without either."""
        reported = self._violations()
        if not self.strikes and not reported:
            return None
        return PersonState(
            names=self.names,
            settled=Evidence.none(self.dials),
            settled_at=self._newest,
            strikes=self.strikes,
            reported=reported,
        )

    def struck(self, most: int) -> PersonState:
        """Return the state back at the prior with one more strike, if at least `most` answers have violations; 0: never.

        The answers that count are those kept one by one, and those that were until dials were cleared or reset by hand.
        """
        if not most or not self.recent or self._violations() < most:
            return self
        return replace(self.reset(self.recent[-1].place), strikes=min(self.strikes + 1, _PRIVATE - 1), reported=0)

    @property
    def _newest(self) -> int:
        """The place of the newest answer that was applied."""
        return self.recent[-1].place if self.recent else self.settled_at

    def _violations(self) -> int:
        return min(255, self.reported + sum(rated.violates for rated in self.recent))

    # ------------------------------------------------------------ posterior

    def prior(self, prior: Prior, regression: Regression) -> Prior:
        """Return the prior with the dials that the person set."""
        return prior.held(dict(self.held), regression.strength)

    def evidence(self, prior: Prior, regression: Regression) -> Evidence:
        """Return the evidence of all ratings, given the person's own prior (`prior`)."""
        if self.latest is not None:
            return self.latest
        evidence = self.settled
        for rated in self.recent:
            evidence = evidence.then(rated, prior, regression)
        return evidence

    def ready(self, prior: Prior, regression: Regression) -> PersonState:
        """Return the state with the evidence computed, given the person's own prior."""
        return self if self.latest is not None else replace(self, latest=self.evidence(prior, regression))

    def posterior(self, prior: Prior, regression: Regression) -> PersonPosterior:
        """Return the posterior of the person, given everybody's prior; their evidence stays as it is (`ready`)."""
        prior = self.prior(prior, regression)
        evidence = self.evidence(prior, regression)
        covariance_DD = np.asarray(np.linalg.inv(prior.precision_DD + evidence.precision_DD), np.float64)
        return PersonPosterior(mean_D=covariance_DD @ (prior.shift_D + evidence.shift_D), covariance_DD=covariance_DD)

    # ------------------------------------------------------------ serialisation

    def pack(self) -> bytes:
        """Serialise the state into at most `MOST_BYTES` bytes.

        Layout: head, outcome of the recent ratings, lower triangle and shift (float32), dials set (float32), recent ratings, CRC-32. Raises
        ValueError for a state with recent ratings that is not `ready`.
        """
        if self.latest is None and self.recent:
            raise ValueError("a state is packed with the evidence of its recent ratings; call `ready` first")
        dials, evidence = self.dials, self.settled
        latest = evidence if self.latest is None else self.latest
        returns = latest.resets - evidence.resets
        last = bisect_left(self.recent, latest.reset_at, key=_place) if returns else 0
        head = _HEAD.pack(
            _FORMAT, dials, len(self.recent), self.strikes | self.private * _PRIVATE, self.reported,
            sum(1 << dial for dial, _ in self.held), evidence.resets & 0xFFFF,
            evidence.ratings, evidence.cusum, self.nats, self.settled_at, evidence.reset_at, self.cursor,
            bytes.fromhex(self.names),
        )  # fmt: skip
        features = np.array([rated.features_K for rated in self.recent], "<f2")
        parts = [
            head,
            _OUTCOME.pack(latest.cusum, returns, last),
            evidence.precision_DD.ravel()[_lower(dials + 1)].astype("<f4").tobytes(),
            evidence.shift_D.astype("<f4").tobytes(),
            np.array([setting for _, setting in self.held], "<f4").tobytes(),
            struct.pack(f"<{len(self.recent)}Q", *(rated.place for rated in self.recent)),
            bytes(len(rated.signals) for rated in self.recent),
            features.tobytes(),
            *(_SIGNAL.pack(*each) for rated in self.recent for each in rated.signals),
        ]
        packed = b"".join(parts)
        return packed + zlib.crc32(packed).to_bytes(_CRC, "little")

    @classmethod
    def unpack(cls, data: bytes, regression: Regression) -> PersonState:
        """Parse what `pack` returned, `ready` if `regression` is that of its ratings. Raises Corrupt for damaged bytes or other formats."""
        packed = checked(data, _FORMAT)
        try:
            return cls._read(packed, regression)
        except (struct.error, ValueError) as error:
            raise Corrupt(f"a person's state and its counts disagree: {error}") from error

    @classmethod
    def _read(cls, packed: bytes, regression: Regression) -> PersonState:
        """Parse bytes without their CRC-32. Raises struct.error and ValueError if they are not as long as their counts say."""
        last_cusum, returns, last = _OUTCOME.unpack_from(packed, _HEAD.size)
        fields, count, at = unpacked_head(packed, _OUTCOME.size)
        before: Evidence = fields["settled"]
        size = len(before.shift_D)
        dials = size - 1
        places = struct.unpack_from(f"<{count}Q", packed, at)
        features_NK = np.frombuffer(packed, "<f2", count * dials, at + 9 * count).astype(np.float16)
        features_NK = features_NK.reshape(count, dials)
        counts, signals = packed[at + 8 * count : at + 9 * count], packed[at + (_RATED + 2 * dials) * count :]
        if len(signals) != _SIGNAL.size * sum(counts) or last >= (max(1, count) if returns else 1):
            raise ValueError(f"{count} answers, {sum(counts)} signals in {len(signals)} bytes, last return {last}")
        recent = _Packed(places, counts, features_NK, signals)
        if returns:
            before = replace(Evidence.none(dials), resets=before.resets + returns, reset_at=places[last])
        rewards = recent.rewards()
        rated = [number for number in range(last, count) if rewards[number] is not None]
        told_NE = np.empty((len(rated), size + 1))
        told_NE[:, :dials], told_NE[:, dials] = features_NK[rated], 1.0
        told_NE[:, size] = [rewards[number] for number in rated]
        latest = before.added(told_NE, regression, cusum=last_cusum)
        return cls(**fields, recent=recent if count else (), latest=latest)


def unpacked_head(packed: bytes, outcome: int) -> tuple[dict[str, Any], int, int]:
    """Return the fields of a packed state that do not depend on recent ratings, the number of these, and the offset at which they begin.

    `outcome`: the number of bytes between the head and the settled evidence. Raises struct.error and ValueError for too few bytes.
    """
    _, dials, count, flags, reported, mask, resets, ratings, cusum, nats, settled_at, reset_at, cursor, names = (
        _HEAD.unpack_from(packed)
    )
    numbers = [dial for dial in range(dials) if mask >> dial & 1]
    at, size = _HEAD.size + outcome, dials + 1
    triangle = size * (size + 1) // 2
    told = np.frombuffer(packed, "<f4", triangle + size + len(numbers), at).astype(np.float32)
    fields = {
        "names": names.hex(),
        "settled": Evidence(told[_square(size)], told[triangle : triangle + size], ratings, cusum, resets, reset_at),
        "settled_at": settled_at,
        "held": tuple(zip(numbers, told[triangle + size :].tolist(), strict=True)),
        "strikes": flags & (_PRIVATE - 1),
        "reported": reported,
        "nats": nats,
        "cursor": cursor,
        "private": bool(flags & _PRIVATE),
    }
    return fields, count, at + 4 * len(told)


def checked(data: bytes, format: int) -> bytes:
    """Return a packed state without its CRC-32. Raises Corrupt for damaged bytes and another format."""
    packed, crc = data[:-_CRC], data[-_CRC:]
    if len(data) <= _HEAD.size or zlib.crc32(packed).to_bytes(_CRC, "little") != crc or packed[0] != format:
        raise Corrupt("a person's state is damaged or of another version; it is folded from the log anew")
    return packed


def names_hash(names: Sequence[str]) -> str:
    """Return the hash of the dials' names in their order: 32 hexadecimal digits."""
    return hashlib.blake2b("\0".join(names).encode(), digest_size=16).hexdigest()


def window(dials: int) -> int:
    """Return how many rated answers are kept one by one: as many, with four signals each, as fit into `MOST_BYTES` with everything else."""
    size = dials + 1
    fixed = _HEAD.size + _OUTCOME.size + 4 * (size * (size + 1) // 2 + size + dials) + _CRC
    return (MOST_BYTES - fixed) // (_RATED + 2 * dials + _SIGNALS * _SIGNAL.size)


def _reward(told: Iterable[float]) -> float | None:
    """Return the reward of an answer with these signals (`Rated.reward`)."""
    known, ratings, total, cost = False, 0, 0.0, 0.0
    for reward in told:
        if reward >= 0.0:
            known, ratings, total = True, ratings + 1, total + reward
        elif reward < 0.0:
            known, cost = True, max(cost, -1.0 - reward)
    return (total / ratings if ratings else _UNRATED) - cost if known else None


def _place(rated: Rated) -> int:
    return rated.place


@cache
def _lower(size: int) -> NDArray[np.int64]:
    """Return the indices of the lower triangle in a flattened square matrix, row by row."""
    rows, columns = np.tril_indices(size)
    return np.asarray(rows * size + columns, np.int64)


@cache
def _square(size: int) -> NDArray[np.int64]:
    """Return the index of each number of a symmetric matrix in its lower triangle."""
    found_DD = np.zeros((size, size), np.int64)
    found_DD[np.tril_indices(size)] = np.arange(size * (size + 1) // 2)
    return np.maximum(found_DD, found_DD.T)
