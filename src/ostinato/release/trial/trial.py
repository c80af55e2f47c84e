"""One trial: a candidate on a growing share of users, then live beside a share that stays on the release before it.

It holds no clock and no refs: slots of outcomes go in, decisions come out. The same slots give the same decisions, so a restarted
worker that reads the log again is where it was, and nobody pays for having looked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ostinato.release.trial.balance import Balance
from ostinato.release.trial.config import Require, TrialConfig
from ostinato.release.trial.contrast import Contrast, Slot
from ostinato.release.trial.verdict import Decision, Next, Reading, read


class Trial:
    """From the first per cent of users until the next trial begins. Shares are of the users who take part: who is on another arm does not.

    Before it ships, the candidate's arm is compared with live; after that, live with those who stay behind. It is one comparison of
    the same two versions, and one error budget, all the way.

    Args:
        active: users of an ordinary day who take part; the first share reaches `first_people` of them.
        guardrails: other measures, by name, and the loss of each that is let pass; one that is worse ends the trial.
    """

    def __init__(
        self, config: TrialConfig, *, active: float, guardrails: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._config = config
        self._measures = 1 + len(guardrails)
        self._contrast = Contrast(config.most_turns_a_day)
        self._guardrails = {name: (Contrast(config.most_turns_a_day), loss) for name, loss in guardrails.items()}
        self._balance = Balance()
        self._seen_U: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.share = min(max(config.shares[0], config.first_people / max(active, 1.0)), config.shares[-1])
        self.require: Require = "no_loss"
        self.shipped = False
        self.over = False
        self.better = False

    def add(self, slot: Slot, guardrails: Mapping[str, Slot] = MappingProxyType({})) -> None:
        """What people did while the candidate's share was `share`: the goal, and the guardrails' own outcomes of the same time."""
        self._contrast.add(slot)
        for name, outcomes in guardrails.items():
            self._guardrails[name][0].add(outcomes)
        self._deal(slot)

    def look(self, elapsed_s: float) -> Decision:
        """What follows now, `elapsed_s` after the start. The share that it names is in force from here on."""
        reading = read(self._contrast.effect(), self._config, self._measures)
        decision = (
            self._void(reading)
            or self._broken()
            or (self._proving(reading, elapsed_s) if self.shipped else self._canary(reading, elapsed_s))
        )
        self.share = decision.share
        return decision

    def _canary(self, reading: Reading, elapsed_s: float) -> Decision:
        if reading.worse:
            return self._end(Next.BLOCK, f"worse: {_points(reading.effect.difference)}", reading)
        if reading.not_worse and (self.require == "no_loss" or self._better(reading, elapsed_s)):
            self.shipped = True
            found = self._held_to() if self.require == "no_loss" else "better (provisional)"
            why = f"{found}: {_interval(reading)}"
            return Decision(next=Next.SHIP, share=1.0 - self._config.holdback, reason=why, reading=reading)
        if elapsed_s >= self._config.limit_s:
            if reading.not_worse:
                return self._end(Next.BLOCK, f"not shown to be better: {_interval(reading)}", reading)
            return self._end(Next.BLOCK, f"not enough evidence: {_undecided(reading)}", reading)
        share = max([self.share, *(step for step in self._config.shares if self._bearable(step, reading))])
        if share > self.share:
            why = f"a loss of more than {_points(-reading.lower, sign=False)} is ruled out"
            return Decision(next=Next.RAMP, share=share, reason=why, reading=reading)
        return Decision(next=Next.WAIT, share=self.share, reason=f"undecided: {_undecided(reading)}", reading=reading)

    def _proving(self, reading: Reading, elapsed_s: float) -> Decision:
        if reading.worse:
            return self._end(Next.ROLL_BACK, f"worse: {_points(reading.effect.difference)}", reading)
        if self._better(reading, elapsed_s) and not self.better:
            self.better = True
            why = f"better (provisional): {_interval(reading)}"
            return Decision(next=Next.BETTER, share=self.share, reason=why, reading=reading)
        what = "better (provisional)" if self.better else self._held_to()
        return Decision(next=Next.WAIT, share=self.share, reason=f"{what}: {_interval(reading)}", reading=reading)

    def _better(self, reading: Reading, elapsed_s: float) -> bool:
        """What is new may please for a while: it takes more than evidence."""
        return reading.better and elapsed_s >= self._config.better_after_s

    def _held_to(self) -> str:
        return f"not worse than {_points(self._config.margin, sign=False)}"

    def _bearable(self, share: float, reading: Reading) -> bool:
        return reading.enough and share * max(-reading.lower, 0.0) <= self._config.risk

    def _void(self, reading: Reading) -> Decision | None:
        if self._balance.log_factor() < math.log(self._config.imbalance):
            return None
        why = "users were not dealt to the arms in the shares that were set: the comparison is void"
        return self._end(Next.ROLL_BACK if self.shipped else Next.BLOCK, why, reading)

    def _broken(self) -> Decision | None:
        for name, (contrast, loss) in self._guardrails.items():
            reading = read(contrast.effect(), self._config, self._measures, loss)
            if reading.worse:
                why = f"{name} worse: {_points(reading.effect.difference)}, more than {_points(loss, sign=False)}"
                return self._end(Next.ROLL_BACK if self.shipped else Next.BLOCK, why, reading)
        return None

    def _end(self, what: Next, reason: str, reading: Reading) -> Decision:
        self.over = True
        return Decision(next=what, share=0.0, reason=reason, reading=reading)

    def _deal(self, slot: Slot) -> None:
        """Count newcomers by arm, under the share that was in force in the slot."""
        if not len(slot.people_R):
            return
        more = int(slot.people_R.max()) + 1 - len(self._seen_U)
        if more > 0:
            self._seen_U = np.concatenate([self._seen_U, np.zeros(more + len(self._seen_U), dtype=np.bool_)])
        new_R = ~self._seen_U[slot.people_R]
        treated = int((new_R & slot.treated_R).sum())
        self._seen_U[slot.people_R] = True
        self._balance.add((treated, int(new_R.sum()) - treated), (self.share, 1.0 - self.share))


def _points(value: float, *, sign: bool = True) -> str:
    return f"{100 * value:+.1f} pp" if sign else f"{100 * value:.1f} pp"


def _interval(reading: Reading) -> str:
    return f"{_points(reading.effect.difference)} [{100 * reading.lower:+.1f}, {100 * reading.upper:+.1f}]"


def _undecided(reading: Reading) -> str:
    if not math.isfinite(reading.sees):
        return "nobody has said anything about it yet"
    return f"with {reading.effect.people:.0f} effective users this trial can see losses of {_points(reading.sees, sign=False)} or more"
