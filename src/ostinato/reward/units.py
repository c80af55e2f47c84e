"""Which turns go into the next batch, and for which there will be none: whole groups and episodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from ostinato.core.seams import Cursor
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger.entries import Matured, Unit


def newest_units(
    matured: Iterable[Matured],
    first_open: Callable[[Unit], Cursor | None],
    *,
    size: int,
    now: float,
    config: RewardConfig,
) -> list[Matured]:
    """At least `size` turns in whole units, in the order of the log; none while there are too few.

    A unit is a group or else an episode. It is ready when none of its turns waits for a reward; a group only after a while
    without new turns, since its members are not known in advance. An episode that goes on is parted: once its oldest
    decided turn has waited `episode_wait_s`, what was decided before its first open turn is ready. Never the other way round: a
    later part that was learned from first would have taught the baseline what the earlier part's actions led to.

    Where people are served faster than the trainer learns, a queue would make every batch stale; so the newest units are taken.
    """
    ready: list[list[Matured]] = []
    for unit, members in _units(matured).items():
        members.sort(key=lambda entry: entry.facts.seq)
        if part := _ready(unit, members, first_open(unit), now, config):
            ready.append(part)
    ready.sort(key=lambda part: part[-1].facts.seq, reverse=True)
    taken: list[Matured] = []
    for part in ready:
        taken += part
        if len(taken) >= size:
            return sorted(taken, key=lambda entry: entry.facts.seq)
    return []


def waited_in_vain(
    matured: Iterable[Matured], first_open: Callable[[Unit], Cursor | None], *, now: float, config: RewardConfig
) -> list[Matured]:
    """The units, of these turns, whose last reward was due `batch_wait_s` ago. To be asked about turns that no batch would take now.

    A unit of which a turn waits for its reward goes on waiting, which ends: see `longest_wait_s`.
    """
    found: list[Matured] = []
    for unit, members in _units(matured).items():
        last = max(entry.since for entry in members)
        if now - last >= config.batch_wait_s and first_open(unit) is None:
            found += members
    return found


def _units(matured: Iterable[Matured]) -> dict[Unit, list[Matured]]:
    units: dict[Unit, list[Matured]] = defaultdict(list)
    for entry in matured:
        units[entry.facts.unit].append(entry)
    return units


def _ready(
    unit: Unit, members: list[Matured], first_open: Cursor | None, now: float, config: RewardConfig
) -> list[Matured]:
    """The part of a unit that may be learned from now."""
    if unit[0] == "group":
        quiet = now - max(entry.facts.ended_at for entry in members) >= config.group_wait_s
        return members if first_open is None and quiet else []
    if first_open is not None:
        if now - members[0].facts.ended_at < config.episode_wait_s:
            return []
        members = [entry for entry in members if entry.facts.seq < first_open]
    return members[: config.episode_turns]
