"""What other shares would have earned, from the turns that Auto dealt: the estimates that come before a changed router is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import Finish, Person, Pick, Reward, Turn
from ostinato.core.seams import Log
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.offpolicy import LoggedTurns, PolicyValue, cross_fitted, doubly_robust, earned, ips, snips

_FEW = 0.01  # below this share of the turns the estimates lean on hardly anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The mean utility per turn under other shares, estimated three ways, beside what was `earned` under those that were.

    `turns` have a reward, or failed. `advice` says what speaks against believing it, "" if nothing does.

    Example: ``Prospect(shares={"live": 1.0}, turns=4000, earned=PolicyValue(...), ips=..., snips=..., dr=..., advice="")``
    """

    shares: Mapping[str, float]
    turns: int
    earned: PolicyValue
    ips: PolicyValue
    snips: PolicyValue
    dr: PolicyValue
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rated:
    person: Person
    pick: Pick
    utility: float


async def prospect(log: Log, shares: Mapping[str, float], config: RouterConfig) -> Prospect:
    """What `shares` would have earned per turn, of every turn in the log that Auto dealt and whose reward is known.

    Where an arm could not be had, its share goes to the others in proportion, as it would have. An answer that failed counts as the least
    reward. What an answer whose cost is not known cost is taken as nothing. An arm is what it was, whatever weights it had then.
    One look at the log: the intervals do not hold for whoever looks until they like what they see.

    Raises:
        BadConfig: shares that are negative, do not sum to 1, or name an arm that was never there.
        NotFound: fewer than two users' turns.
    """
    if any(share < 0.0 for share in shares.values()) or abs(sum(shares.values()) - 1.0) > 1e-6:
        raise BadConfig(f"the shares {dict(shares)} must be at least 0 and sum to 1")
    rated = await _rated(log, config)
    if len({each.person for each in rated}) < 2:
        raise NotFound("Auto has dealt no turns of two users whose reward is known; an estimate needs them")
    arms = sorted({arm for each in rated for arm in each.pick.odds})
    if unknown := sorted(shares.keys() - set(arms)):
        raise BadConfig(f"there was never an arm {unknown[0]!r}: nothing is known of it; the log has {', '.join(arms)}")
    return _estimated(rated, arms, shares)


async def _rated(log: Log, config: RouterConfig) -> list[_Rated]:
    waiting: dict[str, tuple[Person, Pick, float]] = {}
    rated: list[_Rated] = []
    slowness = config.weights.get("seconds", 0.0)
    async for _, row in log.read(await log.horizon(), {Turn, Reward}):
        if isinstance(row, Turn) and row.auto is not None:
            known = row.verified or config.users == "declared"
            seconds = min(config.longest_s, max(0.0, row.ended_at - row.started_at))
            spent = slowness * seconds - config.price * (row.auto.cost or 0.0)
            person = row.person if known else (row.tenant, "")
            if row.finish == Finish.ERROR:
                utility = config.weights.get("reward", 0.0) * config.low + spent
                rated.append(_Rated(person=person, pick=row.auto, utility=utility))
            else:
                waiting[row.id] = (person, row.auto, spent)
        elif isinstance(row, Reward) and row.turn in waiting:
            person, pick, spent = waiting.pop(row.turn)
            reward = min(config.high, max(config.low, row.value))
            utility = config.weights.get("reward", 0.0) * reward + spent
            rated.append(_Rated(person=person, pick=pick, utility=utility))
    return rated


def _estimated(rated: Sequence[_Rated], arms: Sequence[str], shares: Mapping[str, float]) -> Prospect:
    people = {person: number for number, person in enumerate(dict.fromkeys(each.person for each in rated))}
    odds_NA = np.array([[each.pick.odds.get(arm, 0.0) for arm in arms] for each in rated])
    logged = LoggedTurns(
        users_N=np.array([people[each.person] for each in rated]),
        arms_N=np.array([arms.index(each.pick.arm) for each in rated]),
        odds_NA=odds_NA,
        rewards_N=np.array([each.utility for each in rated]),
    )
    wanted_NA = np.where(odds_NA > 0.0, np.array([shares.get(arm, 0.0) for arm in arms]), 0.0)
    total_N1 = wanted_NA.sum(axis=1, keepdims=True)
    target_NA = np.where(total_N1 > 0.0, wanted_NA / np.where(total_N1 > 0.0, total_N1, 1.0), odds_NA)
    predicted_NA = cross_fitted(logged, np.zeros(len(rated), dtype=np.int64), len(arms))
    value = snips(logged, target_NA)
    few = value.turns < _FEW * len(rated)
    return Prospect(
        shares=dict(shares),
        turns=len(rated),
        earned=earned(logged),
        ips=ips(logged, target_NA),
        snips=value,
        dr=doubly_robust(logged, target_NA, predicted_NA),
        advice=f"these turns say no more of it than {value.turns:.0f} turns of its own would" if few else "",
    )
