"""Influence: each person's and each tenant's share of what the last optimizer steps learned.

The caps of `reward.credit` bound the share of one batch; they do not show a person who is near the cap in batch after batch. What a batch
learns from a person is the sum over their turns of |advantage| over tokens, weighted as in the loss and the caps: all of people's turns
alike, or, in batches of earlier versions, an episode's turns sharing one weight; a simulated world's turns in full.

Rewards and batches name turns, while monitors are about people: `TurnOwners` maps a turn to its person.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.notices import Alarm, AlarmState, Forgotten
from ostinato.core.records import Arm, Batch, Person, Purpose, Turn
from ostinato.release.monitors.active_alarms import ACCEPTED
from ostinato.release.monitors.config import MonitorsConfig

# ---------------------------------------------------------------- owners of turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The person who was served a turn, the turn's episode, and whether live or control served it.

    `auto`: it was routed by Auto, not at random. `task`: its purpose is a task, not a subagent's call, a compaction or a side call.

    Example: ``Owner(person=("default", "ann"), episode="e1", live=True)``
    """

    person: Person
    episode: str
    live: bool
    control: bool = False
    auto: bool = False
    task: bool = True


class TurnOwners:
    """The owners of the newest `most` turns.

    Example: ``owners.see(turn); owners.get(turn.id)``
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def see(self, turn: Turn) -> None:
        """Record a turn's owner. Beyond `most` turns, the oldest is dropped."""
        self._owners[turn.id] = Owner(
            person=turn.person,
            episode=turn.episode,
            live=turn.arm is Arm.LIVE,
            control=turn.arm is Arm.CONTROL,
            auto=turn.auto is not None,
            task=turn.purpose is Purpose.TASK,
        )
        if len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def get(self, turn: str) -> Owner | None:
        """Return a turn's owner; None if it is not kept."""
        return self._owners.get(turn)

    def forget(self, row: Forgotten) -> None:
        """Drop a person's turns: rewards and batches that name them then belong to nobody."""
        self._owners = OrderedDict(
            (turn, owner) for turn, owner in self._owners.items() if not row.covers(owner.person)
        )

    def snapshot(self) -> list[list[Any]]:
        """Return the owners as JSON types, oldest first."""
        return [
            [turn, *owner.person, owner.episode, owner.live, owner.control, owner.auto, owner.task]
            for turn, owner in self._owners.items()
        ]

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._owners = OrderedDict(
            (
                str(turn),
                Owner(
                    person=(str(tenant), str(user)),
                    episode=str(episode),
                    live=bool(live),
                    control=bool(control),
                    auto=bool(auto),
                    task=bool(task),
                ),
            )
            for turn, tenant, user, episode, live, control, auto, task in rows
        )


BY_PERSON, BY_TENANT = "influence:person", "influence:tenant"
"""The names of the alarms."""

FAIR_SHARES = 4.0  # multiple of an equal share up to which no alarm is raised among few people
BACK = 0.75  # fraction of the level below which an alarm is cleared
EXAMPLES = 20
_FORGOTTEN = 1e-6  # shares below this are dropped


class Shares:
    """Exponentially weighted shares by name over `memory` steps; plain means until there were that many steps.

    Example: ``shares.observe({"acme": 0.7, "other": 0.3})``
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.steps = 0
        self.by_name: dict[str, float] = {}

    def observe(self, shares: Mapping[str, float]) -> None:
        """Add the shares of a step."""
        self.steps = min(self.steps + 1, self._memory)
        part = 1.0 / self.steps
        names = self.by_name.keys() | shares.keys()
        found = {name: (1.0 - part) * self.by_name.get(name, 0.0) + part * shares.get(name, 0.0) for name in names}
        self.by_name = {name: share for name, share in found.items() if share >= _FORGOTTEN}

    def largest(self) -> tuple[str, float]:
        """Return the name with the largest share, and that share; ("", 0.0) before `memory` steps."""
        if self.steps < self._memory or not self.by_name:
            return "", 0.0
        # ties are broken by name, so that every reader of the same rows gets the same result
        return max(self.by_name.items(), key=lambda pair: (pair[1], pair[0]))

    def level(self, most: float) -> float:
        """Return the share above which an alarm is raised."""
        return max(most, FAIR_SHARES / max(1, len(self.by_name)))


class InfluenceWatch:
    """The monitor of influence: batches in, alarms out. An alarm names turns behind the largest share, but never the person."""

    def __init__(self, config: MonitorsConfig) -> None:
        self._most = {BY_PERSON: config.influence_user, BY_TENANT: config.influence_tenant}
        self._shares = {name: Shares(config.influence_steps) for name in self._most}
        self._stands: dict[str, bool] = {}
        self._accepted: dict[str, float] = {}
        self._most_turns = config.most_turns
        self._simulated: dict[str, None] = {}  # turns of simulated rollouts that no batch has used yet, oldest first

    @property
    def standing(self) -> list[str]:
        """The names of the raised alarms."""
        return [name for name, stands in self._stands.items() if stands]

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state: the alarms raised in the log are raised."""
        self._stands = {name: alarms[name].state is AlarmState.RAISED for name in self._most if name in alarms}

    def turn(self, row: Turn) -> None:
        """Record a simulated rollout's turn; those of people are among the owners."""
        if row.arm is Arm.WORLD:
            self._simulated[row.id] = None
            if len(self._simulated) > self._most_turns:
                del self._simulated[next(iter(self._simulated))]

    def batch(self, row: Batch, owners: TurnOwners) -> Iterator[Alarm]:
        """Process a step's batch. Turns whose owner is not kept belong to nobody, but count in the total."""
        masses = _masses(row, owners, self._simulated)
        for turn in row.turns:
            self._simulated.pop(turn, None)
        total = math.fsum(mass for _, mass in masses.values())
        if total <= 0.0:
            return
        for name, shares in self._shares.items():
            found: dict[str, float] = {}
            for person, mass in masses.values():
                if person is not None:
                    key = _key(name, person)
                    found[key] = found.get(key, 0.0) + mass / total
            shares.observe(found)
            yield from self._judge(name, row, masses)

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of the share: only a larger one raises the alarm again."""
        if row.name in self._most and row.detail.get(ACCEPTED) is True:
            self._stands[row.name] = False
            self._accepted[row.name] = self._shares[row.name].largest()[1] / BACK

    def forget(self, row: Forgotten) -> None:
        """Drop a person's share, or those of a tenant's people."""
        begin = _key(BY_PERSON, (row.tenant, row.user or ""))
        shares = self._shares[BY_PERSON]
        shares.by_name = {
            who: share
            for who, share in shares.by_name.items()
            if not (who.startswith(begin) if row.user is None else who == begin)
        }

    def _judge(self, name: str, row: Batch, masses: Mapping[str, tuple[Person | None, float]]) -> Iterator[Alarm]:
        shares = self._shares[name]
        who, share = shares.largest()
        level = max(shares.level(self._most[name]), self._accepted.get(name, 0.0))
        stands, what = self._stands.get(name, False), name.partition(":")[2]
        if not stands and share > level:
            turns = [turn for turn, (person, _) in masses.items() if person is not None and _key(name, person) == who]
            reason = (
                f"one {what} of {len(shares.by_name)} gave {share:.1%} of what the last {shares.steps} steps learned, where "
                f"at most {level:.1%} is expected: look at these turns before you trust them"
            )
            detail = {"share": share, "level": level, "step": row.step, "turns": turns[-EXAMPLES:], "pauses": True}
            self._stands[name] = True
            yield Alarm(id="", name=name, state=AlarmState.RAISED, reason=reason, at=row.at, detail=detail)
        elif stands and shares.steps and share <= BACK * level:
            self._stands[name] = False
            reason = f"no {what} gives more than {share:.1%} of what is learned"
            yield Alarm(id="", name=name, state=AlarmState.CLEARED, reason=reason, at=row.at)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        shares = {name: [each.steps, each.by_name] for name, each in self._shares.items()}
        return {
            "shares": shares,
            "stands": self._stands,
            "accepted": self._accepted,
            "simulated": list(self._simulated),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises AttributeError, LookupError, TypeError or ValueError for an invalid state."""
        for name, each in self._shares.items():
            steps, by_name = state["shares"][name]
            each.steps, each.by_name = int(steps), {str(who): float(share) for who, share in by_name.items()}
        self._stands = {str(name): bool(stands) for name, stands in state["stands"].items()}
        self._accepted = {str(name): float(share) for name, share in state["accepted"].items()}
        self._simulated = {str(turn): None for turn in state["simulated"]}


def _masses(row: Batch, owners: TurnOwners, simulated: Container[str]) -> dict[str, tuple[Person | None, float]]:
    """Return each turn's person and its mass in the batch, in arbitrary units."""
    found = {turn: owners.get(turn) for turn in row.turns}
    sizes = Counter((owner.person[0], owner.episode) for owner in found.values() if owner is not None)
    masses: dict[str, tuple[Person | None, float]] = {}
    equal = len(sizes) / sizes.total() if row.even and sizes else 1.0
    weights = row.weights or (equal,) * len(row.turns)
    for turn, advantages, weight in zip(row.turns, row.credits, weights, strict=True):
        owner = found[turn]
        mass = (1.0 if turn in simulated else weight) * math.fsum(map(abs, advantages))
        if owner is None:
            masses[turn] = None, mass
        else:
            masses[turn] = owner.person, mass if row.even else mass / sizes[owner.person[0], owner.episode]
    return masses


def _key(name: str, person: Person) -> str:
    """Return the key of a share: a tenant, or a person prefixed with the length of the tenant's name, so that no two people share a key."""
    tenant, user = person
    return tenant if name == BY_TENANT else f"{len(tenant)} {tenant} {user}"
