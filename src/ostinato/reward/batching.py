"""Batch selection: choose the turns of the next batch, in whole groups and episodes, and find the turns that no batch will take."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random

import numpy as np

from ostinato.core.records import Advantages
from ostinato.core.samples import EpisodeKey, LaterReturns, call_of
from ostinato.core.seams import Cursor
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import FLAT, TOO_LONG
from ostinato.reward.ledger_entries import Matured, Unit
from ostinato.reward.response_propensity import ResponsePropensity

# least number of parts in a batch that is cut short: one long conversation must not make a whole step
LEAST_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnablePart:
    """A unit, or the part of an episode that may be learned from now, in log order. `tokens`: see `costs`."""

    entries: Sequence[Matured]
    tokens: int

    @property
    def tenant(self) -> str:
        """The tenant of the turns."""
        return self.entries[0].facts.tenant

    @property
    def first(self) -> str:
        """The id of the first turn, which identifies the part."""
        return self.entries[0].facts.id

    @property
    def world(self) -> bool:
        """True if it is a group of a world's rollouts."""
        return self.entries[0].facts.unit[0] == "world"

    @property
    def newest(self) -> Cursor:
        """The place of the last turn in the log."""
        return self.entries[-1].facts.seq

    @property
    def flat(self) -> bool:
        """True if it is a group of a world's rollouts whose returns are all equal, so that its advantages would all be 0."""
        returns: defaultdict[str, float] = defaultdict(float)
        for entry in self.entries:
            returns[entry.facts.episode] += entry.value
        return self.world and len(set(returns.values())) == 1


def longest_part(config: RewardConfig, *, world: bool = False) -> int:
    """Return the most tokens that a part may have; no batch takes a longer one. A group of a world's rollouts may fill a batch, since it is
    not one person's feedback, and may exceed it if it is alone in it.
    """
    return max(config.batch_tokens, config.group_tokens) if world else config.batch_tokens // LEAST_PARTS


def costs(entries: Iterable[Matured]) -> Iterator[int]:
    """Yield upper bounds on the tokens that a trainer computes for the first, the first two, ... of these turns of one unit.

    Tokens shared with the parent, if it precedes the turn here, or with a turn of the same prompt are computed once: see
    `train.packing`.
    """
    total, known, prompts = 0, dict[str, int](), set[str]()
    for facts in (entry.facts for entry in entries):
        length, prompt = facts.context.length, facts.context.prompt
        before = 0 if facts.parent is None else known.get(facts.parent, 0)
        shared = length if prompt in prompts else before if before <= length else 0
        total += facts.tokens - shared
        known[facts.id] = facts.tokens
        prompts.add(prompt)
        yield total


def ready_parts(
    matured: Iterable[Matured],
    first_open: Callable[[Unit], Cursor | None],
    *,
    now: float,
    config: RewardConfig,
    closed: Container[Unit] = (),
) -> list[LearnablePart]:
    """Return the parts that may be learned from now, including too long ones: a group, or a single turn, beyond `longest_part`.

    A unit is a group or else an episode. It is ready when none of its turns waits for a reward. A group of rollouts must also be among
    the `closed` ones, and any other group must have had no new turn for a while, since its members are not known in advance. An episode
    that continues is split: once its oldest decided turn has waited `episode_wait_s`, the turns before its first open turn are ready. A
    later part never comes first: it would teach the baseline what the earlier part's actions led to. The returns after a part are included
    in its returns (`TurnLedger.later_returns`).
    """
    ready: list[LearnablePart] = []
    for unit, members in _units(matured).items():
        members.sort(key=lambda entry: entry.facts.seq)
        entries = _ready(unit, members, first_open(unit), now, config, closed)
        if entries:
            found, fit = list(costs(entries)), len(entries)
            if unit[0] == "episode":
                fit = _between_calls(members, max(1, bisect_right(found, longest_part(config))))
            ready.append(LearnablePart(entries=entries[:fit], tokens=found[fit - 1]))
    return ready


def _between_calls(members: Sequence[Matured], fit: int) -> int:
    """Return where to cut an episode: not between choices of one call, which do not follow each other, if a call is left before."""
    calls = [call_of(entry.facts.id) for entry in members[: fit + 1]]
    return next((i for i in range(fit, 0, -1) if i == len(members) or calls[i - 1] != calls[i]), fit)


def fair_deal(parts: Sequence[LearnablePart], *, size: int, config: RewardConfig, every: bool = False) -> list[Matured]:
    """Return at least `size` turns in whole parts, in log order; fewer if no more fit into `batch_tokens`; none if there are too few.
    `every`: all that fit instead of `size` turns.

    The newest parts are taken: where people are served faster than the trainer learns, a queue would make every batch stale.

    Tenants take turns: next comes the part that leaves its tenant with the smallest share of the batch, in turns or in
    tokens, whichever is larger (dominant resource fairness: Ghodsi et al., NSDI 2011). So a tenant gets more than another
    only while the other has no part left that would leave it with less. A flood of turns, one call with
    many samples, or long prompts gain nothing. A part that alone exceeds `tenant_cap` of a batch comes after its tenant's other parts. A
    tenant that is alone gets the whole batch, the newest parts first.
    """
    queues: dict[str, deque[LearnablePart]] = defaultdict(deque)
    for part in sorted(parts, key=lambda part: part.newest, reverse=True):
        queues[part.tenant].append(part)
    most = max(size, sum(len(part.entries) for part in parts)) if every else size
    share = _Share(most, config.batch_tokens)
    if len(queues) > 1:
        cap = config.tenant_cap
        queues = {name: deque(sorted(queue, key=lambda part: share.of(part) > cap)) for name, queue in queues.items()}
    nexts = [share.after(queue[0]) for queue in queues.values()]
    heapify(nexts)
    taken, left, cut = list[Matured](), config.batch_tokens, False
    while nexts and len(taken) < most:
        _, _, tenant = heappop(nexts)
        part = queues[tenant].popleft()
        if part.tokens <= left:
            taken += part.entries
            left -= part.tokens
            share.give(part)
        else:
            cut = True
        if queues[tenant]:
            heappush(nexts, share.after(queues[tenant][0]))
    return sorted(taken, key=lambda entry: entry.facts.seq) if cut or len(taken) >= size else []


NOISE_FLOOR = 0.1  # fraction of the mean noise added to each part's, so that weights stay bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTurns:
    """The turns of a batch, in log order. If more of people's turns were ready than it can hold, they were drawn: then also their weights
    by turn id, and the turns that were passed over.
    """

    entries: Sequence[Matured] = ()
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    passed: Sequence[Matured] = ()


def draw_batch(
    parts: Sequence[LearnablePart],
    fair: Container[str],
    *,
    noise: Callable[[LearnablePart], float],
    most: int,
    seed: str,
) -> ChosenTurns:
    """Draw a batch from more parts than it can hold, so that the gradient is unbiased for all of them and has a small variance.

    The variance of sum_i g_i / p_i over a draw with inclusion probabilities p_i and sum_i p_i tokens_i = `most` is least for
    p_i ~ |g_i| / sqrt(tokens_i) (Neyman 1934 for unequal costs; for rollouts PODS, arXiv:2504.13818). With |g_i| ~ |A_i| sqrt(tokens_i),
    `noise`, both are known before any forward pass, and p_i ~ |A_i| per token is a rate shared by long and short answers. A turn's weight
    is the inverse of its probability, times a factor that gives its tenant the weight of as many turns as it has in the batch. Each part
    gets one chance: a part that was passed over must not take part in another draw, or it would count twice.

    Args:
        parts: the ready parts.
        fair: the first turns' ids of the parts that a fair deal takes (`fair_deal`). A tenant gets as many tokens as there. A tenant whose
            parts are all in the deal keeps them, and one with none in it waits. If parts are too long for a draw, the deal itself is taken.
        noise: a part's share of the gradient's noise, sqrt(sum A^2 tokens) over its turns.
        most: the most tokens that the batch may have.
        seed: determines the draw.
    """
    tenants: dict[str, list[LearnablePart]] = defaultdict(list)
    for part in parts:
        tenants[part.tenant].append(part)
    given = {
        tenant: sum(part.tokens for part in theirs if part.first in fair)
        for tenant, theirs in tenants.items()
        if any(part.first in fair for part in theirs)
    }
    pool = [part for part in parts if part.tenant in given]
    chances = _fair_probabilities(pool, given, fair, {part.first: noise(part) for part in pool}, most)
    if not chances:
        taken = [entry for part in pool if part.first in fair for entry in part.entries]
        return ChosenTurns(entries=sorted(taken, key=lambda entry: entry.facts.seq))
    factors = {
        tenant: sum(chances[part.first] * len(part.entries) for part in tenants[tenant])
        / sum(len(part.entries) for part in tenants[tenant])
        for tenant in given
    }
    kept = _systematic_sample(sorted(pool, key=lambda part: (part.tokens, part.newest)), chances, Random(seed).random())
    weights = {
        entry.facts.id: factors[part.tenant] / chances[part.first]
        for part in pool
        if part.first in kept
        for entry in part.entries
    }
    entries = sorted((entry for part in pool for entry in part.entries), key=lambda entry: entry.facts.seq)
    return ChosenTurns(
        entries=[entry for entry in entries if entry.facts.id in weights],
        weights=weights,
        passed=[entry for entry in entries if entry.facts.id not in weights],
    )


def _fair_probabilities(
    pool: Sequence[LearnablePart],
    given: Mapping[str, int],
    fair: Container[str],
    noises: Mapping[str, float],
    most: int,
) -> dict[str, float]:
    """Return each part's inclusion probability, by its first turn: 1 for a tenant whose parts are all in the `fair` deal, otherwise by
    noise, for as many tokens as the tenant is `given`. A draw may exceed its expected tokens by the longest part that is not certain to be
    drawn, so room is left for that. Returns {} if this room would take half of the tokens drawn.
    """
    tenants: dict[str, list[LearnablePart]] = defaultdict(list)
    for part in pool:
        tenants[part.tenant].append(part)
    cut = {tenant for tenant, theirs in tenants.items() if any(part.first not in fair for part in theirs)}
    whole, spare = max(1, sum(given[tenant] for tenant in cut)), most - sum(given.values())
    chances, longest = {part.first: 1.0 for part in pool}, 0
    while (room := max(0, longest - spare)) < whole / 2:
        for tenant in cut:
            theirs = tenants[tenant]
            budget = given[tenant] * (1.0 - room / whole)
            found = _inclusion_probabilities(
                [noises[part.first] for part in theirs], [part.tokens for part in theirs], budget
            )
            chances |= {part.first: chance for part, chance in zip(theirs, found, strict=True)}
        doubtful = max((part.tokens for part in pool if chances[part.first] < 1.0), default=0)
        if doubtful <= longest:
            return chances
        longest = doubtful
    return {}


def _inclusion_probabilities(noises: Sequence[float], tokens: Sequence[int], budget: float) -> list[float]:
    """Return min(1, c noise / sqrt(tokens)) for each part, with c such that the expected number of tokens drawn is `budget`."""
    costs_N = np.array(tokens, dtype=np.float64)
    noises_N = np.array(noises)
    rates_N = (noises_N + (NOISE_FLOOR * noises_N.mean() or 1.0)) / np.sqrt(costs_N)
    low, high = 0.0, 1.0 / float(rates_N.min())
    for _ in range(100):  # bisection down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1.0, middle * rates_N) @ costs_N <= budget else (low, middle)
    return np.minimum(1.0, low * rates_N).tolist()


def _systematic_sample(parts: Sequence[LearnablePart], chances: Mapping[str, float], start: float) -> set[str]:
    """Draw parts by systematic sampling, each with its own inclusion probability (Madow 1949): one for every integer that start + the sum
    of the probabilities passes. Returns their first turns' ids. With parts sorted by tokens, the number of tokens drawn is within the
    longest part's of its expectation.
    """
    kept, at = set[str](), start
    for part in parts:
        chance = chances[part.first]
        after = at + chance
        if chance >= 1.0 or int(after) > int(at):
            kept.add(part.first)
        at = after if chance < 1.0 else at
    return kept


def relative_weights(
    entries: Iterable[Matured], drawn: Mapping[str, float], propensity: ResponsePropensity
) -> dict[str, float]:
    """Return each people's turn's weight: that in `drawn` (1 if missing) times that of its response propensity; {} if all are 1."""
    weights = {
        facts.id: drawn.get(facts.id, 1.0) * propensity.weight(facts.tenant, facts.sampled)
        for facts in (entry.facts for entry in entries)
        if not facts.world
    }
    return weights if any(weight != 1.0 for weight in weights.values()) else {}


def choose_groups(parts: Iterable[LearnablePart], *, groups: int, tokens: int, fewer: bool) -> list[Matured]:
    """Return the turns of `groups` groups of rollouts, the oldest first; fewer only if no more fit into `tokens`, or if `fewer` is true.

    The oldest rather than the newest are taken, since the process that makes them waits for the trainer: none is left over, and slow
    rollouts are not passed over for quick ones.
    """
    taken, left, count = list[Matured](), tokens, 0
    for part in sorted(parts, key=lambda part: part.entries[0].facts.seq):
        if count == groups or part.tokens > left:
            return taken
        taken += part.entries
        left -= part.tokens
        count += 1
    return taken if fewer or count == groups else []


class _Share:
    """Each tenant's share of a batch: of its turns or of its tokens, whichever is larger."""

    def __init__(self, turns: int, tokens: int) -> None:
        self._turns, self._tokens = turns, tokens
        self._had: dict[str, tuple[int, int]] = {}

    def of(self, part: LearnablePart, had: tuple[int, int] = (0, 0)) -> float:
        """Return the share of a part together with `had`, a number of turns and of tokens."""
        return max((had[0] + len(part.entries)) / self._turns, (had[1] + part.tokens) / self._tokens)

    def after(self, part: LearnablePart) -> tuple[float, Cursor, str]:
        """Return the sort key of a part: the share that it would leave its tenant with; among equals, the newest first."""
        return self.of(part, self._had.get(part.tenant, (0, 0))), -part.newest, part.tenant

    def give(self, part: LearnablePart) -> None:
        """Count a part that is taken."""
        turns, tokens = self._had.get(part.tenant, (0, 0))
        self._had[part.tenant] = (turns + len(part.entries), tokens + part.tokens)


def timed_out_turns(
    matured: Iterable[Matured], first_open: Callable[[Unit], Cursor | None], *, now: float, config: RewardConfig
) -> list[Matured]:
    """Return the turns of units whose last reward was due `batch_wait_s` ago or earlier. Pass only turns that no batch would take now.

    A unit with a turn that still waits for its reward keeps waiting: `longest_wait_s` bounds the wait for that reward.
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
    unit: Unit,
    members: list[Matured],
    first_open: Cursor | None,
    now: float,
    config: RewardConfig,
    closed: Container[Unit],
) -> list[Matured]:
    """Return the part of a unit that may be learned from now."""
    if unit[0] == "world":
        return members if first_open is None and unit in closed else []
    if unit[0] == "group":
        quiet = now - max(entry.facts.ended_at for entry in members) >= config.group_wait_s
        return members if first_open is None and quiet else []
    if first_open is not None:
        if now - members[0].facts.ended_at < config.episode_wait_s:
            return []
        members = [entry for entry in members if entry.facts.seq < first_open]
    return members[: config.episode_turns]


def returns_after_cuts(entries: Sequence[Matured], after: Mapping[EpisodeKey, LaterReturns]) -> tuple[Advantages, ...]:
    """Return `Batch.after`: the returns after each turn behind which an episode was cut, () for all others; () if none was cut."""
    last = {entry.episode: entry.facts.id for entry in entries}
    ends = {turn: tuple(after[key]) for key, turn in last.items() if key in after}
    return tuple(ends.get(entry.facts.id, ()) for entry in entries) if ends else ()


def rejection_reason(part: LearnablePart, config: RewardConfig) -> str | None:
    """Return why no batch takes this ready part; None if a batch may."""
    if part.flat and config.flat_groups == "hold_back":
        return f"{FLAT}: all {len({entry.facts.episode for entry in part.entries})} rollouts of the group are worth the same"
    most = longest_part(config, world=part.world)
    if part.tokens <= most:
        return None
    size = "reward.group_tokens" if part.world else "a quarter of reward.batch_tokens"
    return f"{TOO_LONG}: {part.tokens} tokens that must be learned from together, and the most is {most}, {size}"
