"""Counts the turns by state anew from every row, independently of how the desk decides: it holds every id in memory."""

from collections import Counter
from dataclasses import dataclass

from ostinato.core.records import Batch, Holdback, Quarantine, Reward, Turn
from ostinato.core.seams import Log
from ostinato.reward.accounting import Accounting
from ostinato.reward.ledger import kind_of
from ostinato.reward.ledger_entries import needs_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount(Accounting):
    """`contradictions` names turns that were trained on twice, trained on and held back, trained on without a reward, both rewarded
    and quarantined, or rewarded although they get no reward; and turns with an outcome or reward that are not in the log.
    """

    contradictions: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """True if every turn is counted once and no row contradicts another."""
        return Accounting.balanced.fget(self) and not self.contradictions


async def recount(log: Log) -> Recount:
    served: dict[str, tuple[bool, float]] = {}
    trained: list[str] = []
    held: dict[str, str] = {}
    rewarded: list[str] = []
    quarantined: dict[str, str] = {}
    async for _, row in log.read(await log.horizon(), {Turn, Batch, Holdback, Reward, Quarantine}):
        match row:
            case Turn():
                served[row.id] = (needs_reward(row), row.ended_at)
            case Batch():
                trained.extend(row.turns)
            case Holdback():
                held[row.turn] = kind_of(row.reason)
            case Reward():
                rewarded.append(row.turn)
            case Quarantine():
                quarantined[row.turn] = kind_of(row.reason)
            case _:
                pass
    taken = set(trained)
    waiting = [turn for turn in served if turn not in held and turn not in taken]
    wrong = {
        "trained on twice": [turn for turn, times in Counter(trained).items() if times > 1],
        "trained on and held back": sorted(held.keys() & taken),
        "trained on without a reward": sorted(taken - set(rewarded)),
        "rewarded and quarantined": sorted(quarantined.keys() & set(rewarded)),
        "rewarded although it gets none": [turn for turn in rewarded if turn in served and not served[turn][0]],
        "not in the log": sorted((held.keys() | taken | set(rewarded)) - served.keys()),
    }
    return Recount(
        ingested=len(served),
        trained=len(trained),
        held=dict(sorted(Counter(held.values()).items())),
        waiting=len(waiting),
        rewarded=len(rewarded),
        quarantined=dict(sorted(Counter(quarantined.values()).items())),
        oldest_wait=min((served[turn][1] for turn in waiting), default=None),
        contradictions=tuple(f"{turn} is {what}" for what, turns in wrong.items() for turn in turns),
    )
