"""Where every turn stands, counted in two ways: as the desk's own fold has it, and afresh from every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.core.records import Batch, Holdback, Quarantine, Reward, Turn
from ostinato.core.seams import Folds, Log
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger.entries import needs_reward
from ostinato.reward.ledger.ledger import TurnLedger, kind_of
from ostinato.reward.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCoverage:
    """A tenant's feedback: the share of turns that something is usually said about, and how many turns that rests on.

    Example: ``TenantCoverage(usual=0.62, turns=4100, alarm=False)``
    """

    usual: float
    turns: int
    alarm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where every turn stands. `held` and `quarantined` map a reason, up to its first ": ", to a number of turns.

    `waiting` is a count of its own: turns whose reward or outcome is open, of which `oldest_wait` is the longest served (its
    `ended_at`; None if none waits). `rewarded` and `quarantined` count turns with a reward row, or with a row that says why not,
    whatever their outcome.

    The rest is about signals: `late` came after their turn's reward was decided, `retracted` took one back after its turn had
    been trained on, `foreign` were about another tenant's turn, `moot` about a turn that gets no reward, `excess` beyond those
    that count for one turn; `orphans` wait for a turn that is not in the log, `forgotten` waited in vain.

    Example: ``Accounting(ingested=5, trained=2, held={"arm:control": 1, "finish:abort": 1}, waiting=1, rewarded=4)``
    """

    ingested: int
    trained: int
    held: Mapping[str, int]
    waiting: int
    rewarded: int
    quarantined: Mapping[str, int] = field(default_factory=dict[str, int])
    oldest_wait: float | None = None
    late: int = 0
    retracted: int = 0
    foreign: int = 0
    moot: int = 0
    excess: int = 0
    orphans: int = 0
    forgotten: int = 0
    alarms: tuple[str, ...] = ()
    coverage: Mapping[str, TenantCoverage] = field(default_factory=dict[str, TenantCoverage])
    contradictions: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """Every turn is counted once, and no row contradicts another.

        Not seen: turns that wait and wait (look at `waiting` and `oldest_wait`), and a turn that was logged twice under two ids.
        """
        return self.ingested == self.trained + sum(self.held.values()) + self.waiting and not self.contradictions


async def account(log: Log, folds: Folds | None = None, config: RewardConfig | None = None) -> Accounting:
    """As the desk's fold has it: read on from its last saving, in memory that grows with the open turns only.

    After a start without a saving from a log whose first rows were dropped, it counts from there. `config` is the desk's.
    """
    reading = Reading(log, config or RewardConfig(), folds)
    await reading.catch_up(saving=False)
    return of_ledger(reading.ledger)


def of_ledger(ledger: TurnLedger) -> Accounting:
    """What a ledger adds up to."""
    counts, alarms = ledger.counts, ledger.alarms
    open_turns = [entry.facts for entry in ledger.open.values() if entry.facts.hold is None]
    matured = [entry.facts for turn, entry in ledger.matured.items() if turn not in ledger.to_hold]
    ends = [facts.ended_at for facts in [*open_turns, *matured]]
    return Accounting(
        ingested=counts["ingested"],
        trained=counts["trained"],
        held=dict(sorted(ledger.held.items())),
        waiting=len(open_turns) + len(matured) + len(ledger.to_hold),
        rewarded=counts["rewarded"],
        quarantined=dict(sorted(ledger.quarantined.items())),
        oldest_wait=min(ends, default=None),
        late=counts["late"],
        retracted=counts["retracted"],
        foreign=counts["foreign"],
        moot=counts["moot"],
        excess=counts["excess"],
        orphans=ledger.orphans.count,
        forgotten=ledger.orphans.expired + ledger.orphans.dropped,
        alarms=tuple(alarms.standing()),
        coverage={
            tenant: TenantCoverage(usual=each.usual, turns=each.turns, alarm=alarms.silenced(tenant))
            for tenant, each in alarms.coverages.items()
        },
    )


async def recount(log: Log) -> Accounting:
    """Every row afresh, by sets of ids that know nothing of how the desk decides. For tests: it holds every id in memory.

    `contradictions` names turns that were trained on twice, or held back and trained on, or that got both a reward and a
    quarantine, or a reward although nobody was to be asked; and outcomes of turns that are not in the log.
    """
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
    return Accounting(
        ingested=len(served),
        trained=len(trained),
        held=dict(sorted(Counter(held.values()).items())),
        waiting=len(waiting),
        rewarded=len(rewarded),
        quarantined=dict(sorted(Counter(quarantined.values()).items())),
        oldest_wait=min((served[turn][1] for turn in waiting), default=None),
        contradictions=tuple(f"{turn} is {what}" for what, turns in wrong.items() for turn in turns),
    )
