"""The sequence of releases: which version each share of users gets, trial after trial, and when live goes back to the best.

Pure: outcomes go in as time slots, decisions come out. It is the controller's logic without refs or a ledger, for the simulations in
`benchmarks.release`. The controller drives the same `Trial` and `IncumbentTest`, and keeps the state that is kept here in its ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, Field

from ostinato.release.metrics.config import DEFAULT_GOAL
from ostinato.release.pace import Traffic, ship_plan
from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import POOLED, TimeSlot
from ostinato.release.trial.incumbent_test import IncumbentTest, StandingConfig
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import Decision, NextAction

V = TypeVar("V")


class PathConfig(BaseModel, frozen=True, extra="forbid"):
    """How candidates are released to users."""

    trial: TrialConfig = Field(default=TrialConfig(), description="One candidate against live.")
    standing: StandingConfig = Field(default=StandingConfig(), description="Live against the best release.")
    cooldown_s: float = Field(
        default=6 * HOUR, ge=0.0, description="Seconds after a rollback before the next trial begins."
    )
    proving_s: float = Field(
        default=0.0,
        ge=0.0,
        description="Seconds after a release goes live before the next trial begins, while it is being proven better.",
    )
    rollbacks_a_day: int = Field(
        default=1, ge=0, description="Automatic rollbacks per day; beyond that a person decides."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSplit(Generic[V]):
    """Which users get which version: `standing` of all stay on `best`; of the others, `share` get `treated` and the rest `other`.

    Example: ``UserSplit(best=v3, standing=0.05, treated=v9, share=0.25, other=v8)``
    """

    best: V
    standing: float
    treated: V
    share: float
    other: V


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep(Generic[V]):
    """An event on the path. `what`: a trial's decision, "better", "return_to_best" or "best"; `version` is live after it.

    Example: ``PathStep(what="ship", version=v9, reason="not worse than 2.0 pp: +0.4 pp [-1.1, +1.9]", decision=Decision(...))``
    """

    what: str
    version: V
    reason: str
    decision: Decision | None = None


class ReleasePath(Generic[V]):
    """Live, the release before it, the best one, and the trial that is under way.

    Args:
        start: the version that is live, and the best known.
        active: users of an ordinary day.
        each: turns of one of them on such a day, and `good`: the share of good ones, for the plan of a trial's looks. None: no plan.
    """

    def __init__(
        self, config: PathConfig, start: V, *, active: float, each: float | None = None, good: float = 0.6
    ) -> None:
        self._config = config
        self._active = active
        self._each, self._good = each, good
        self.live = self.previous = self.best = start
        self.candidate: V | None = None
        self.trial: Trial | None = None
        self._began = 0.0
        self._quiet_until = 0.0
        self._rollbacks: list[float] = []
        self._standing = IncumbentTest(config.standing, most_turns_a_day=config.trial.most_turns_a_day)

    def ready(self, now: float) -> bool:
        """True if the next candidate may go on trial: none is on trial or still being proven, and no rollback was just made."""
        return self.candidate is None and now >= self._quiet_until

    def begin(self, candidate: V, now: float) -> None:
        """Put a candidate that passed the gate on trial. This ends the proving of the live version."""
        self.candidate, self.previous, self._began = candidate, self.live, now
        active = self._active * (1.0 - self._config.standing.share)
        config = self._config.trial
        turns = None if self._each is None else round(self._each * active)
        traffic = None if turns is None else Traffic(people=round(active), turns=turns, good=self._good)
        self.trial = Trial(config, active=active, plan=ship_plan(traffic, {DEFAULT_GOAL: config.margin}, config))

    def deal(self) -> UserSplit[V]:
        """Which users get which version from now on."""
        trial, standing = self.trial, self._config.standing.share
        if trial is None or trial.over:
            return UserSplit(best=self.best, standing=standing, treated=self.live, share=0.0, other=self.live)
        treated = self.live if self.candidate is None else self.candidate
        other = self.previous if trial.shipped else self.live
        return UserSplit(best=self.best, standing=standing, treated=treated, share=trial.share, other=other)

    def observe(self, trial: TimeSlot, standing: TimeSlot, now: float) -> list[PathStep[V]]:
        """A slot that ended at `now`, dealt as `deal` said: in `trial` the candidate's side (or the new release's) is treated,
        in `standing` everybody but the best release's users.
        """
        steps: list[PathStep[V]] = []
        if self.trial is not None and not self.trial.over:
            self.trial.add(trial, {DEFAULT_GOAL: {POOLED: trial}}, now - self._began)
            steps += self._follow(self.trial, now)
        return steps + self._stand(standing, now)

    def _follow(self, trial: Trial, now: float) -> list[PathStep[V]]:
        decision = trial.look(now - self._began)
        if decision.next is NextAction.SHIP:
            assert self.candidate is not None
            self.live, self.candidate = self.candidate, None
            self._standing.shipped(now)
            self._quiet_until = max(self._quiet_until, now + self._config.proving_s)
        elif decision.next is NextAction.BLOCK:
            self.candidate = None
        elif decision.next is NextAction.ROLL_BACK:
            return [self._go_back(self.previous, "roll_back", decision.reason, now, decision)]
        elif decision.next is NextAction.WAIT:
            return []
        return [PathStep(what=decision.next.value, version=self.live, reason=decision.reason, decision=decision)]

    def _stand(self, slot: TimeSlot, now: float) -> list[PathStep[V]]:
        standing = self._standing.add(slot, now)
        if self.live != self.best and standing.worse:
            why = f"worse than the best release: {100 * standing.effect.difference:+.1f} pp"
            return [self._go_back(self.best, "return_to_best", why, now, None)]
        if self.live != self.best and standing.better:
            self.best = self.live
            self._standing.restart(now)
            why = f"better than the best release: {100 * standing.gain.difference:+.1f} pp"
            return [PathStep(what="best", version=self.live, reason=why)]
        return []

    def _go_back(self, to: V, what: str, reason: str, now: float, decision: Decision | None) -> PathStep[V]:
        self.live = self.previous = to
        self.candidate = self.trial = None
        self._rollbacks = [at for at in self._rollbacks if at > now - 24 * HOUR] + [now]
        over = len(self._rollbacks) > self._config.rollbacks_a_day
        self._quiet_until = now + (24 * HOUR if over else self._config.cooldown_s)
        self._standing.restart(now)
        return PathStep(what=what, version=to, reason=reason, decision=decision)
