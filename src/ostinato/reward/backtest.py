"""Backtest of a reward function: the rewards that it would have given the turns of a log, compared with those recorded. Writes nothing.

The function is called when the reward desk would have called it, with the signals received by then: once the answer was delivered, at each
signal, and at the times that it returned as `Pending`. So the backtest shows if a function that does not wait for its window decides before
people reacted. Rules of the desk beyond one turn, such as holding back silent turns while feedback fails to arrive (`coverage`), are not
repeated.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato.core.errors import BadConfig
from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import Arm, Delivered, Finish, NoReward, Pending, Quarantine, Reward, Row, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.core.verdicts import LATE, late_id
from ostinato.reward.baseline import Floats
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import of_world
from ostinato.reward.ledger import GOLD, UNDELIVERED, kind_of
from ostinato.reward.ledger_entries import TEACHING_ARMS, Gold, needs_reward, no_gold, untrainable
from ostinato.reward.protocol import Answer, Asker, Failure, RewardRequest, Unloadable
from ostinato.reward.runners import LOSS_REASONS

CHUNK = 100  # turns per round of questions
# lost processes after which nothing more is asked, so that a function that always hangs does not take hours
MOST_LOST = 5
_MOST_EARLY = 100_000  # most signals that are kept until their turns are read
WAITING, GIVEN_UP = "waiting", "given_up"

# ---------------------------------------------------------------- the turns of a log


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """A turn's reward, or why it has none: `reason` is "" with a value, "waiting" while the window is open, else a quarantine's reason.

    Example: ``RewardOutcome(reason="no_reward:silence")``
    """

    value: float | None = None
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class PastTurn:
    """A turn that was served to a person, with its signals. `hold`: why it is never learned from, None if it may be.

    `delivered_at` is in Unix seconds, None if no delivery is on record. `recorded` is what the reward desk decided, None if nothing yet;
    if a late reward was predicted, the function's own value.
    """

    seq: Cursor
    id: str
    tenant: str
    user: str
    ended_at: float
    hold: str | None
    redacted: bool
    delivered_at: float | None = None
    signals: list[Signal] = field(default_factory=list[Signal])
    recorded: RewardOutcome | None = None


async def past_turns(
    log: Log,
    config: RewardConfig,
    *,
    since: float,
    limit: int,
    gold: Gold = no_gold,
    arms: Collection[Arm] = TEACHING_ARMS,
) -> list[PastTurn]:
    """Return the newest `limit` turns (0: all) that people were served and that ended at `since` (Unix seconds) or later, oldest first.

    Rollouts in simulated worlds are left out, since programs decide their rewards, and so are turns that need no reward.
    """
    horizon, count = await log.horizon(), limit
    while True:
        start = max(horizon, await log.before_last(count, Turn)) if count else horizon
        found = await _read(log, config, start, since, gold, arms)
        if not limit or start <= horizon or len(found) >= limit:
            return list(found.values())[-limit:]
        count *= 4  # evaluations and rollouts are turns too, so read further back


async def _read(
    log: Log, config: RewardConfig, start: Cursor, since: float, gold: Gold, arms: Collection[Arm]
) -> dict[str, PastTurn]:
    found: dict[str, PastTurn] = {}
    early = PendingSignals[Signal](most=_MOST_EARLY, seconds=config.orphan_s)  # received before their turn was written
    async for seq, row in log.read(start, {Turn, Delivered, Signal, Reward, Quarantine}):
        early.advance(_time_of(row))
        match row:
            case Turn() if needs_reward(row) and not of_world(row) and row.ended_at >= since:
                hold = untrainable(row, config.min_temperature, config.purposes, arms)
                found[row.id] = past = PastTurn(
                    seq=seq,
                    id=row.id,
                    tenant=row.tenant,
                    user=row.user,
                    ended_at=row.ended_at,
                    hold=hold or (GOLD if gold(row.tenant, row.user) else None),
                    redacted=row.redacted,
                    delivered_at=row.ended_at if row.finish is Finish.LEFT else None,  # its client got this part
                )
                past.signals += early.claim(row.tenant, row.id)
            case Delivered():
                for turn in row.turns:
                    if turn in found and found[turn].delivered_at is None:
                        found[turn].delivered_at = row.at
            case Signal():
                _collect_signal(found, early, row)
            case Reward() if row.turn in found and found[row.turn].recorded is None:
                value = dict(row.early).get("reward", row.value)  # if predicted, the function's own value
                found[row.turn].recorded = RewardOutcome(value=value)
            case Quarantine() if row.turn in found and found[row.turn].recorded is None:
                found[row.turn].recorded = RewardOutcome(reason=row.reason)
            case _:
                pass
    return found


def _time_of(row: Row) -> float:
    """Return the time to which a row advances the desk's pending signals (Unix seconds); 0 if it does not, as in `TurnLedger`."""
    match row:
        case Turn():
            return row.ended_at
        case Signal():
            return row.received_at
        case Delivered() | Quarantine():
            return row.at
        case _:
            return 0.0


def _collect_signal(found: Mapping[str, PastTurn], early: PendingSignals[Signal], row: Signal) -> None:
    if row.name in LATE and row.id == late_id(row.turn):
        return  # written by the desk itself, which never passes it to a function
    if row.turn not in found:
        early.add(row.tenant, row.turn, row)
    elif row.tenant == found[row.turn].tenant:
        found[row.turn].signals.append(row)


# ---------------------------------------------------------------- calling the function again


async def backtest(
    log: Log,
    past: Sequence[PastTurn],
    asker: Asker,
    config: RewardConfig,
    now: float,
    on_turns: Callable[[int], None] = lambda _: None,
) -> dict[str, RewardOutcome]:
    """Return what a reward function would have decided about each turn by `now` (Unix seconds).

    `on_turns` is called with the number of turns in each chunk that is done.

    A failure of the function affects only its turn, until it has cost `MOST_LOST` processes; the remaining turns are then
    `given_up`. Raises BadConfig if the function cannot be loaded at the start.
    """
    await asker.open()
    decided: dict[str, RewardOutcome] = {}
    lost = 0
    for start in range(0, len(past), CHUNK):
        chunk = past[start : start + CHUNK]
        turns = {turn.id: turn for turn in await log.find(Turn, [(each.id,) for each in chunk])}
        decided |= {each.id: RewardOutcome(reason="gone") for each in chunk if each.id not in turns}
        due = {each.id: max(each.ended_at, each.delivered_at or 0.0) for each in chunk if each.id in turns}
        known = {each.id: each for each in chunk}
        while due and lost < MOST_LOST:
            asked = [_question(known[id], turns[id], at, config) for id, at in due.items()]
            try:
                answers = await asker.ask(asked)
            except (Unloadable, BadConfig):
                lost = MOST_LOST
                break
            for question, answer in zip(asked, answers, strict=True):
                if answer is None:
                    continue  # asked again
                lost += isinstance(answer, Failure) and answer.reason.startswith(LOSS_REASONS)
                found = _decide(known[question.turn.id], question.now, answer, config, now)
                if isinstance(found, RewardOutcome):
                    decided[question.turn.id] = found
                    del due[question.turn.id]
                else:
                    due[question.turn.id] = found
        decided |= {id: RewardOutcome(reason=GIVEN_UP) for id in due}
        on_turns(len(chunk))
    return decided


def _question(past: PastTurn, turn: Turn, at: float, config: RewardConfig) -> RewardRequest:
    heard = [signal for signal in past.signals if signal.received_at <= at]
    return RewardRequest(turn=turn, signals=tuple(heard[: config.max_signals]), now=at)


def _decide(past: PastTurn, at: float, answer: Answer, config: RewardConfig, now: float) -> RewardOutcome | float:
    """Return the outcome of an answer given at `at`, or the time at which to ask again (Unix seconds)."""
    if isinstance(answer, Failure):
        return RewardOutcome(reason=answer.reason)
    news = min((signal.received_at for signal in past.signals if signal.received_at > at), default=math.inf)
    if isinstance(answer, Pending):
        last = past.ended_at + config.longest_wait_s
        if at >= last:
            return RewardOutcome(reason="pending: reward.longest_wait_s is over")
        again = min(answer.until, news, last)
        return again if again <= now else RewardOutcome(reason=WAITING)
    if past.delivered_at is None and not any(signal.received_at <= at for signal in past.signals):
        known_by = past.ended_at + config.delivery_s
        if news <= min(known_by, now):
            return news
        return RewardOutcome(reason=UNDELIVERED if known_by <= now else WAITING)
    if isinstance(answer, NoReward):
        return RewardOutcome(reason=f"no_reward:{answer.reason}")
    return RewardOutcome(value=answer.value)


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanOfRewards:
    """A mean with its 95% interval, clustered by person, since the turns of one person are not independent. NaN if there is none.

    Example: ``MeanOfRewards(turns=812, people=40, mean=0.31, lower=0.25, upper=0.37)``
    """

    turns: int
    people: int
    mean: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTurns:
    """The turns on which a reward function failed in one way.

    Example: ``FailedTurns(reason="reward_failed: KeyError: 'x'", turns=3, example="a:0")``
    """

    reason: str
    turns: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSide:
    """The rewards given by one function. `values` are sorted; `without` counts the reasons of turns that got no reward.

    `learnable`: turns with a reward that may be learned from. `spread` is the standard deviation of their rewards; at 0 nothing is learned.
    """

    function: str
    mean: MeanOfRewards
    values: tuple[float, ...]
    without: Mapping[str, int]
    failed: tuple[FailedTurns, ...]
    learnable: int
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFor:
    """The mean change of the rewards of a tenant's or a user's turns, in units of the reward. `who` is a name or a key."""

    who: str
    turns: int
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTurn:
    """A turn whose reward changes, with its signals.

    Example: ``ChangedTurn(turn="a:0", who="ann", signals=("undone=1",), old=0.75, new=-1.0)``
    """

    turn: str
    who: str
    signals: tuple[str, ...]
    old: float
    new: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComparison:
    """Two reward functions on the same turns. Changes are computed over turns that both reward.

    `turns` were served to people; `may_teach` of them may be learned from, whatever their reward. `correlation` is Pearson's, NaN if one
    side is constant or no turn has both rewards: advantages are normalised, so at 1 both teach the same. For `flipped` turns the reward's
    sign changes.
    """

    turns: int
    may_teach: int
    old: RewardSide
    new: RewardSide
    change: MeanOfRewards
    correlation: float
    flipped: int
    gained: int
    lost: int
    tenants: tuple[ChangeFor, ...]
    users: tuple[ChangeFor, ...]
    examples: tuple[ChangedTurn, ...]


def compare(
    past: Sequence[PastTurn],
    old: tuple[str, Mapping[str, RewardOutcome]],
    new: tuple[str, Mapping[str, RewardOutcome]],
    *,
    examples: int,
    name_of: Callable[[PastTurn], str] = lambda past: past.user,
    rows: int = 5,
) -> RewardComparison:
    """Compare two functions, each given as its name and its outcomes by turn.

    `rows`: the number of tenants and of users that are listed, those with the largest total change.
    """
    before, after = old[1], new[1]
    both: list[tuple[PastTurn, float, float]] = []
    gained = lost = 0
    for each in past:
        one, other = before[each.id].value, after[each.id].value
        gained += one is None and other is not None
        lost += one is not None and other is None
        if one is not None and other is not None:
            both.append((each, one, other))
    changes = np.array([other - one for _, one, other in both])
    pairs = np.array([(one, other) for _, one, other in both]).reshape(-1, 2)
    flat = not both or not np.ptp(pairs, axis=0).all()  # a standard deviation may be 1e-17 for equal values
    largest = sorted((each for each in both if each[1] != each[2]), key=lambda each: -abs(each[2] - each[1]))
    return RewardComparison(
        turns=len(past),
        may_teach=sum(each.hold is None for each in past),
        old=_side(past, *old),
        new=_side(past, *new),
        change=_mean([each for each, _, _ in both], changes),
        correlation=math.nan if flat else float(np.corrcoef(pairs.T)[0, 1]),
        flipped=sum(one * other < 0 for _, one, other in both),
        gained=gained,
        lost=lost,
        tenants=_changes((each.tenant, change) for (each, _, _), change in zip(both, changes, strict=True))[:rows],
        users=_changes((name_of(each), change) for (each, _, _), change in zip(both, changes, strict=True))[:rows],
        examples=tuple(
            ChangedTurn(
                turn=each.id,
                who=name_of(each),
                signals=tuple(f"{signal.name}={signal.value:g}" for signal in each.signals),
                old=one,
                new=other,
            )
            for each, one, other in largest[:examples]
        ),
    )


def _side(past: Sequence[PastTurn], function: str, outcomes: Mapping[str, RewardOutcome]) -> RewardSide:
    rewarded = [(each, value) for each in past if (value := outcomes[each.id].value) is not None]
    values = np.array([value for _, value in rewarded])
    teaching = [value for each, value in rewarded if each.hold is None]
    without = Counter(kind_of(outcomes[each.id].reason) for each in past if outcomes[each.id].value is None)
    failed: dict[str, list[str]] = {}
    for each in past:
        if outcomes[each.id].reason.startswith("reward_"):
            failed.setdefault(outcomes[each.id].reason, []).append(each.id)
    return RewardSide(
        function=function,
        mean=_mean([each for each, _ in rewarded], values),
        values=tuple(sorted(values.tolist())),
        without=dict(without.most_common()),
        failed=tuple(
            FailedTurns(reason=reason, turns=len(ids), example=ids[0])
            for reason, ids in sorted(failed.items(), key=lambda item: -len(item[1]))
        ),
        learnable=len(teaching),
        spread=float(np.std(teaching)) if len(set(teaching)) > 1 else 0.0,
    )


def _mean(past: Sequence[PastTurn], values_N: Floats) -> MeanOfRewards:
    """Return the mean over turns, with a cluster-robust (sandwich) standard error by person and Student's t quantile."""
    people = {person: place for place, person in enumerate(dict.fromkeys((each.tenant, each.user) for each in past))}
    if not people:
        return MeanOfRewards(turns=0, people=0, mean=math.nan, lower=math.nan, upper=math.nan)
    mean, count = float(values_N.mean()), len(people)
    sums = np.bincount([people[each.tenant, each.user] for each in past], values_N - mean, count)
    half = math.nan
    if count > 1:
        from scipy import special  # imported here, since it takes a quarter of a second

        error = math.sqrt(float(sums @ sums) * count / (count - 1)) / len(past)
        half = float(special.stdtrit(count - 1, 0.975)) * error
    return MeanOfRewards(turns=len(past), people=count, mean=mean, lower=mean - half, upper=mean + half)


def _changes(changes: Iterable[tuple[str, float]]) -> tuple[ChangeFor, ...]:
    """Return those with a change, the largest total first: the sum is what moves the model, the mean is what one person experiences."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for who, change in changes:
        by_name[who].append(change)
    found = sorted(by_name.items(), key=lambda item: (-abs(math.fsum(item[1])), item[0]))
    return tuple(
        ChangeFor(who=who, turns=len(each), change=math.fsum(each) / len(each)) for who, each in found if any(each)
    )
