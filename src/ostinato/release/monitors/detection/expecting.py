"""Chooses the reference arm, and gives the range that is expected of each rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from ostinato.core.records import Arm
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.detection.detector import Expected
from ostinato.release.monitors.detection.reference import ArmReference, FixedReference, Level

JUDGED = frozenset({Arm.LIVE.value, Arm.CANARY.value})
"""The arms whose release ships or has just shipped. Others hold an earlier release or an external model, which no pause would mend."""

ACCEPTED_DOUBT = 0.1
"""The uncertainty of an accepted shift, as a part of it. The deviation of the shifted rate is taken as at least half of the shift."""

BACK = 10
"""Sessions without a new silence after which an arm that was silent counts as heard again."""


class Role(StrEnum):
    """How a session is used: it is judged, it is learned from as the reference, or neither."""

    WATCHED = "watched"
    REFERENCE = "reference"
    UNUSED = "unused"


class Expecting:
    """The range expected of each rate, by group of sessions: a decile of activity, or everybody (None).

    `arm` is the reference arm, the first of `reference` in the settings that was seen and is not silent; None: the expected range is that
    of the live arm while it was learned. `stale`: the reference arm is silent, and nothing is expected.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._config = config
        self.arm: str | None = None
        self.stale = False
        self._silent_for = self._back = 0
        self._heard_at: dict[str, float] = {}
        self._arms: dict[str, ArmReference] = {}
        self._fixed: dict[str, FixedReference] = {}
        self._accepted: dict[str, float] = {}

    @property
    def blind(self) -> bool:
        """True while no arm serves as reference, though control once did. Other arms have people only while a release is proven, so
        waiting for one of them before shipping would never end.
        """
        return self.stale and Arm.CONTROL.value in self._heard_at

    def silent(self, arm: object, *, blind: bool) -> None:
        """Begin without a state, if the log says that this arm is silent; `blind`: control was heard before."""
        if isinstance(arm, str) and arm in self._config.reference:
            heard = {arm, Arm.CONTROL.value} if blind else {arm}
            self.arm, self.stale, self._heard_at = arm, True, dict.fromkeys(heard & {*self._config.reference}, 0.0)

    def uses(self, arm: str) -> bool:
        """True if turns on this arm are judged or may serve as reference."""
        return arm in JUDGED or arm in self._config.reference

    def see(self, arm: str, at: float) -> Role:
        """The role of a session on this arm that has ended."""
        ranks = self._config.reference
        if not self.uses(arm):
            return Role.UNUSED
        if arm not in ranks:
            self._silent_for += 1
            self._notice_silence(at)
            return Role.WATCHED
        self._heard_at[arm] = at
        if self.arm is None or ranks.index(arm) < ranks.index(self.arm) or (self.stale and arm != self.arm):
            self._hear(arm)
        if arm != self.arm:
            return Role.UNUSED
        self._silent_for, self._back = 0, min(self._back + 1, BACK)
        self.stale = self.stale and self._back < BACK
        return Role.REFERENCE

    def _hear(self, arm: str) -> None:
        self.arm, self._arms, self.stale, self._silent_for = arm, {}, False, 0

    def _notice_silence(self, at: float) -> None:
        if self.arm is None or self._silent_for <= self._config.stale_sessions:
            return
        # the number of sessions alone says little: anybody can send them
        speaking = [
            arm for arm in self._config.reference if at - self._heard_at.get(arm, -math.inf) <= self._config.stale_s
        ]
        if not speaking:
            self.stale, self._back = True, 0
        elif self.arm not in speaking:
            self._hear(speaking[0])

    def learn(self, rate: str, mean: float, decile: int | None) -> None:
        """Take in a session of the reference arm."""
        reference = self._arms.get(rate)
        if reference is None:
            reference = self._arms[rate] = ArmReference(level=Level(memory=self._config.reference_sessions))
        reference.observe(mean, decile)

    def expected(self, rate: str, arm: str, decile: int | None) -> Expected | None:
        """The range expected of a session of everybody (None) or of a decile; None while it is not known."""
        if self.arm is None:
            fixed = self._fixed.get(_key(rate, decile))
            found = None if fixed is None else fixed.expected()
        else:
            reference = self._arms.get(rate)
            found = None if reference is None or self.stale else reference.expected(decile)
        if found is None or not self._accepted:
            return found
        groups = {_key(rate, None), _key(rate, decile)}
        offset = sum(self._accepted.get(f"{arm}/{group}", 0.0) for group in groups)
        if not offset:
            return found
        doubt = abs(offset) * ACCEPTED_DOUBT
        return replace(
            found,
            low=_share(found.low + offset - doubt),
            high=_share(found.high + offset + doubt),
            deviation=max(found.deviation, abs(offset) / 2),
        )

    def learn_fixed(self, rate: str, mean: float, decile: int | None, at: float) -> None:
        """Take in a session of the live arm, which is learned from while there is no reference arm."""
        key = _key(rate, decile)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = FixedReference(short=Level(memory=self._config.reference_sessions))
        fixed.observe(mean, at, sessions=self._config.learn_sessions, seconds=self._config.learn_s)

    def accept(self, rate: str, arm: str, decile: int | None, gap: float) -> None:
        """From now on, expect `gap` more of a rate than the reference says; a gap of everybody applies to each decile too."""
        key = f"{arm}/{_key(rate, decile)}"
        self._accepted[key] = self._accepted.get(key, 0.0) + gap

    def shipped(self) -> None:
        """A release went live: drop the accepted gaps if the reference arm moves with releases, since it then shows them itself."""
        if self.arm not in (None, Arm.CONTROL.value):
            self._accepted.clear()

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "arm": self.arm,
            "stale": self.stale,
            "silent_for": self._silent_for,
            "back": self._back,
            "heard_at": self._heard_at,
            "arms": {rate: each.to_json() for rate, each in self._arms.items()},
            "fixed": {key: each.to_json() for key, each in self._fixed.items()},
            "accepted": self._accepted,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`; an arm that is no reference any more is forgotten.

        Raises LookupError, TypeError or ValueError for an invalid state.
        """
        self._fixed = {key: FixedReference.from_json(each) for key, each in state["fixed"].items()}
        self._accepted = {key: float(each) for key, each in state["accepted"].items()}
        if state["arm"] in self._config.reference:
            self.arm, self.stale = state["arm"], bool(state["stale"])
            self._silent_for, self._back = int(state["silent_for"]), int(state["back"])
            self._heard_at = {arm: float(at) for arm, at in state["heard_at"].items() if arm in self._config.reference}
            self._arms = {rate: ArmReference.from_json(each) for rate, each in state["arms"].items()}


def _key(rate: str, decile: int | None) -> str:
    return rate if decile is None else f"{rate}/{decile}"


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
