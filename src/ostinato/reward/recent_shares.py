"""Each person's share of the batches of recent steps, and the resulting limit on their share of the next batch.

A cap on one batch does not bound the influence of a person who stays just below it in batch after batch: of a thousand people, ten with
fifty times the others' traffic are a third of every batch. Over many batches, each person may have at most an equal share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ostinato.core.records import Arm, Person, Turn
from ostinato.reward.baseline import counted_as
from ostinato.reward.config import RewardConfig

# ---------------------------------------------------------------- caps


FAIR_SHARES = 2.0
ROUNDING = 1e-12


def capped(masses: Mapping[Person, float], *, user_cap: float, tenant_cap: float) -> dict[Person, float]:
    """Return, for each person with any mass, the factor in (0, 1] that keeps all shares of the sum within the caps.

    A person keeps at most the share max(user_cap, 2 / persons): the cap in a batch of many, twice an equal share in a small one,
    no cap for one or two. A tenant keeps at most max(tenant_cap, 2 / tenants), or more if the other tenants' persons, each at their
    cap, could not fill the rest. A person or tenant over the cap is scaled down as a whole, and nobody is scaled up: of all such
    solutions this one takes least away.

    Both caps are shares of the mass M left after capping: M is the largest solution of M = f(M), where f(M) is the sum of the
    masses cut at user_share * M and then, per tenant, at tenant_share * M. f is concave and piecewise linear, so Newton's
    method from above reaches M exactly.

    Example: ``capped({("t", "a"): 7.0, ("t", "b"): 1.0, ("t", "c"): 1.0, ("t", "d"): 1.0}, user_cap=0.1, tenant_cap=0.5)`` brings
    a down to 3.0, half of the new sum.
    """
    tenants: dict[str, list[float]] = {}
    for (tenant, _), mass in masses.items():
        if mass > 0.0:
            tenants.setdefault(tenant, []).append(mass)
    if not tenants:
        return {}
    user_share = min(1.0, max(user_cap, FAIR_SHARES / sum(map(len, tenants.values()))))
    tenant_share = max(tenant_cap, FAIR_SHARES / len(tenants), _least_tenant_share(tenants, user_share))
    level = _level(tenants, user_share, tenant_share)
    user_most, tenant_most = user_share * level, tenant_share * level
    kept = {tenant: sum(min(mass, user_most) for mass in theirs) for tenant, theirs in tenants.items()}
    return {
        person: _factor(user_most, mass) * _factor(tenant_most, kept[person[0]])
        for person, mass in masses.items()
        if mass > 0.0
    }


def _factor(most: float, mass: float) -> float:
    return 1.0 if mass <= most else most / mass


def _least_tenant_share(tenants: Mapping[str, list[float]], user_share: float) -> float:
    """Return the smallest cap on tenants under which tenants with so few users can still fill a batch."""
    rest = 1.0
    smallest_first = sorted(user_share * len(theirs) for theirs in tenants.values())
    for index, most in enumerate(smallest_first):
        equal = rest / (len(smallest_first) - index)
        if most >= equal:
            return equal * (1.0 + ROUNDING)
        rest -= most
    return 1.0


def _level(tenants: Mapping[str, list[float]], user_share: float, tenant_share: float) -> float:
    """Return the largest M with f(M) = M. See `capped`."""
    level = sum(sum(theirs) for theirs in tenants.values())
    while True:
        fixed, slope = 0.0, 0.0  # f(M) = fixed + slope * M near the current M
        for theirs in tenants.values():
            below = sum(mass for mass in theirs if mass <= user_share * level)
            over = user_share * sum(mass > user_share * level for mass in theirs)
            if below + over * level > tenant_share * level:
                slope += tenant_share
            else:
                fixed, slope = fixed + below, slope + over
        if fixed + slope * level >= level * (1.0 - ROUNDING):
            return level
        level = fixed / (1.0 - slope)


# ---------------------------------------------------------------- recent steps


NEW_PERSON_STEPS = 10.0  # a new person may have this many steps' equal shares at once
# fraction of an equal share for a person who had more than one: the excess must shrink, but nobody may be silenced
EXCESS_SHARE = 0.5
_FORGOTTEN = 1e-6  # smaller shares are dropped


class RecentShares:
    """Exponentially weighted shares by person over the last `memory` steps; plain means until there were that many steps. With a
    memory of 0 nothing is remembered and everything is allowed.

    A share is the mass kept of a person, divided by the batch's mass *before* the cuts; so is the share that `_allowed` returns. With
    shares of the mass left after the cuts, every cut would raise everybody's share: people below the level would be cut because of
    it, and people beyond it would get more than the level.

    A new person may have ten steps' equal shares at once, or one episode, and the rest over the following steps, so coming late gains
    nothing.

    Example: ``recent.observe({("t", "ann"): 3.0, ("t", "bob"): 1.0}, {("t", "ann"): 0.5, ("t", "bob"): 1.0})``
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._steps = 0
        self._shares: dict[Person, float] = {}
        # for people in `_shares` who came late: the share that they can no longer catch up on
        self._missed: dict[Person, float] = {}
        self._level = math.inf

    @property
    def level(self) -> float:
        """The equal share, which a person may have in the long run; infinite before the first step."""
        return self._level

    def share(self, person: Person) -> float:
        """Return a person's share of the recent steps."""
        return self._shares.get(person, 0.0)

    def observe(self, masses: Mapping[Person, float], scales: Mapping[Person, float] | None = None) -> None:
        """Add a step: each person's mass (`masses_of`), and the factor by which each was cut (`scales_of`; None: nobody was cut)."""
        total = math.fsum(masses.values())
        if total <= 0.0 or not self._memory:
            return
        self._steps = min(self._steps + 1, self._memory)
        part = 1.0 / self._steps
        missed = {person: (1.0 - part) * share for person, share in self._missed.items()}
        missed_by_new = self._missed_by_new(self._steps, total)
        kept = {person: (1.0 - part) * share for person, share in self._shares.items()}
        for person, mass in masses.items():
            scale = 1.0 if scales is None else scales.get(person, 0.0)
            kept[person] = kept.get(person, 0.0) + part * scale * mass / total
            if person not in self._shares:
                missed[person] = missed_by_new
        self._shares = {person: share for person, share in kept.items() if share >= _FORGOTTEN}
        self._missed = {
            person: share for person, share in missed.items() if share >= _FORGOTTEN and person in self._shares
        }
        self._level = equal_share(self._shares)

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Drop these people's shares. The others' limits are computed among those who are left."""
        if any(map(gone, self._shares)):
            self._shares = {person: share for person, share in self._shares.items() if not gone(person)}
            self._missed = {person: share for person, share in self._missed.items() if not gone(person)}
            self._level = equal_share(self._shares)

    def cut(self, masses: Mapping[Person, float]) -> dict[Person, float]:
        """Return each person's mass in the next batch after the cut, in episodes: at most what brings them to the level, or half an equal
        share for people beyond it. In the first batch, with no other information on the traffic, it is at most two equal shares of it.
        """
        total = math.fsum(masses.values())
        if not self._memory:
            return dict(masses)
        if not self._steps:
            most = FAIR_SHARES * equal_share(masses) * total
            return {person: min(mass, most) for person, mass in masses.items()}
        return {person: min(mass, self._allowed(person, total) * total) for person, mass in masses.items()}

    def _allowed(self, person: Person, total: float) -> float:
        """Return the share of the next batch, of `total` episodes, that a person may have."""
        steps = min(self._steps + 1, self._memory)  # as `observe` will count them
        if person in self._shares:
            counted = (1.0 - 1.0 / steps) * (self._shares[person] + self._missed.get(person, 0.0))
        else:
            counted = self._missed_by_new(steps, total)
        return max(EXCESS_SHARE * self._level, (self._level - counted) * steps)

    def _missed_by_new(self, steps: int, total: float) -> float:
        """Return the share that a new person has missed, when `steps` steps are remembered, in a batch of `total` episodes."""
        if math.isinf(self._level):
            return 0.0
        return max(0.0, self._level - max(NEW_PERSON_STEPS * self._level, 1.0 / total) / steps)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        shares = [[*person, share, self._missed.get(person, 0.0)] for person, share in self._shares.items()]
        return {"steps": self._steps, "shares": shares}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self._steps = int(state["steps"])
        rows = [
            ((str(tenant), str(user)), float(share), float(missed)) for tenant, user, share, missed in state["shares"]
        ]
        self._shares = {person: share for person, share, _ in rows}
        self._missed = {person: missed for person, _, missed in rows if missed}
        self._level = equal_share(self._shares)


def equal_share(masses: Mapping[Person, float]) -> float:
    """Return 1 / n with n the effective number of people, ``(sum m)^2 / sum m^2``; infinite if there is nobody.

    Invented users have too little mass to change it. With a plain count they would shrink everybody else's share.

    Example: ``equal_share({ann: 1.0, bob: 1.0}) == 0.5``
    """
    whole = math.fsum(masses.values())
    return math.fsum(mass * mass for mass in masses.values()) / whole**2 if whole else math.inf


def turn_weights(episodes: Sequence[Hashable], *, even: bool) -> list[float]:
    """Return the weight of each turn in a batch, given its episode; they sum to the number of episodes. `even`: all are equal. Otherwise
    the turns of an episode share a weight of 1.

    With a weight of 1 / T, where the policy decides how many turns T there are, each turn of a failure is penalised less the longer it is,
    and the policy learns to fail slowly: sum_t A_t grad log pi(y_t) / T is the gradient of no expected return.

    Example: ``turn_weights(["e1", "e1", "e2"], even=True) == [2 / 3] * 3``, and ``[0.5, 0.5, 1.0]`` otherwise
    """
    sizes = Counter(episodes)
    if even:
        return [len(sizes) / len(episodes) for _ in episodes]
    return [1.0 / sizes[episode] for episode in episodes]


def masses_of(turns: Sequence[tuple[Person, str]], *, even: bool) -> dict[Person, float]:
    """Return the total weight of each person's turns in a batch, given each turn's person and episode; see `turn_weights`. If a batch was
    drawn from more turns, pass all of those: the weights of drawn turns depend on their rewards, and a cap on these would introduce a bias.

    Example: ``masses_of([(ann, "e1"), (ann, "e1"), (ann, "e2"), (bob, "e3")], even=True) == {ann: 2.25, bob: 0.75}``
    """
    masses: dict[Person, float] = {}
    weights = turn_weights([(person[0], episode) for person, episode in turns], even=even)
    for (person, _), weight in zip(turns, weights, strict=True):
        masses[person] = masses.get(person, 0.0) + weight
    return masses


def scales_of(masses: Mapping[Person, float], recent: RecentShares, config: RewardConfig) -> dict[Person, float]:
    """Return the factor in (0, 1] by which each person's part of a batch is scaled: first by `RecentShares.cut`, then by the caps."""
    kept = recent.cut(masses)
    scales = capped(kept, user_cap=config.user_cap, tenant_cap=config.tenant_cap)
    return {person: scale * kept[person] / masses[person] for person, scale in scales.items()}


def turn_scales(
    turns: Iterable[Turn], masses: Mapping[Person, float], recent: RecentShares, config: RewardConfig
) -> dict[str, float]:
    """Return, for each turn of a batch, in order, its person's scale factor (`scales_of`); 1 for a world's turn."""
    scales = scales_of(masses, recent, config)
    return {
        turn.id: 1.0 if turn.arm is Arm.WORLD else scales.get(counted_as(turn, config.users), 1.0) for turn in turns
    }
