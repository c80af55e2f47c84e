"""Which turns go into the next batch, and for which there will be none: whole groups and episodes. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ostinato.core.seams import Cursor
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger.entries import Matured, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A unit, or as much of an episode as may be learned from now, in the order of the log."""

    entries: Sequence[Matured]

    @property
    def tenant(self) -> str:
        """Whose turns they are."""
        return self.entries[0].facts.tenant

    @property
    def newest(self) -> Cursor:
        """The place in the log of the last turn."""
        return self.entries[-1].facts.seq


def ready_parts(
    matured: Iterable[Matured], first_open: Callable[[Unit], Cursor | None], *, now: float, config: RewardConfig
) -> list[Part]:
    """What may be learned from now.

    A unit is a group or else an episode. It is ready when none of its turns waits for a reward; a group only after a while
    without new turns, since its members are not known in advance. An episode that goes on is parted: once its oldest
    decided turn has waited `episode_wait_s`, what was decided before its first open turn is ready. Never the other way round: a
    later part that was learned from first would have taught the baseline what the earlier part's actions led to.
    """
    ready: list[Part] = []
    for unit, members in _units(matured).items():
        members.sort(key=lambda entry: entry.facts.seq)
        if part := _ready(unit, members, first_open(unit), now, config):
            ready.append(Part(entries=part))
    return ready


def dealt(parts: Iterable[Part], *, size: int, config: RewardConfig) -> list[Matured]:
    """At least `size` turns in whole parts, in the order of the log; none while there are too few.

    Where people are served faster than the trainer learns, a queue would make every batch stale; so the newest parts are taken.

    Tenants are dealt to in turn: next comes the part that leaves its tenant with the smallest share of the batch (max-min fair:
    Bertsekas & Gallager, Data Networks, 6.5.2). So a tenant gets more than another only while that one has no part left that would
    leave it with less, whether its turns come as a flood or as one call with many samples. A part that alone is more than
    `tenant_cap` of a batch comes after its tenant's others. A tenant that is alone gets all, the newest first.
    """
    queues: dict[str, deque[Part]] = defaultdict(deque)
    for part in sorted(parts, key=lambda part: part.newest, reverse=True):
        queues[part.tenant].append(part)
    if len(queues) > 1:
        most = config.tenant_cap * size
        queues = {
            name: deque(sorted(queue, key=lambda part: len(part.entries) > most)) for name, queue in queues.items()
        }
    had = Counter[str]()
    nexts = [_next(queue, 0) for queue in queues.values()]
    heapify(nexts)
    taken: list[Matured] = []
    while nexts and len(taken) < size:
        _, _, tenant = heappop(nexts)
        part = queues[tenant].popleft()
        taken += part.entries
        had[tenant] += len(part.entries)
        if queues[tenant]:
            heappush(nexts, _next(queues[tenant], had[tenant]))
    return sorted(taken, key=lambda entry: entry.facts.seq) if len(taken) >= size else []


def _next(queue: Sequence[Part], had: int) -> tuple[int, int, str]:
    """A tenant's next part as it is compared with others': what it leaves its tenant with, then the newest first."""
    return had + len(queue[0].entries), -queue[0].newest, queue[0].tenant


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
