"""Turn accounting: the number of turns in each state, from the desk's own fold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.core.seams import Folds, Log
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.log_fold import LedgerFollower
from ostinato.reward.surrogate import SurrogateQuality


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCoverage:
    """A tenant's feedback: the usual share of turns with feedback, and the number of turns behind it.

    Example: ``TenantCoverage(usual=0.62, turns=4100, alarm=False)``
    """

    usual: float
    turns: int
    alarm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The number of turns in each state. `held` and `quarantined` map a reason, up to its first ": ", to a number of turns.

    `waiting` is counted independently of the others: turns whose reward or outcome is open. `oldest_wait` is the earliest
    `ended_at` among them (None if none waits). `rewarded` and `quarantined` count turns with a reward row or a quarantine row,
    whatever their outcome.

    The rest counts signals: `late` came after their turn's reward was decided, `retracted` took a signal back after its turn had
    been trained on, `foreign` were about another tenant's turn, `moot` about a turn that gets no reward, `excess` exceeded the
    limit per turn; `orphans` wait for a turn that is not in the log, `forgotten` waited in vain.

    `used`: the share of people's recent trainable turns that was trained on; None while too few were decided. `stale`: the share of
    rollouts' tokens that was too stale to be trained on, by the turn's number in the rollout; empty if none was. `surrogate`: by tenant,
    how well late rewards were predicted.

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
    used: float | None = None
    stale: Mapping[str, float] = field(default_factory=dict[str, float])
    coverage: Mapping[str, TenantCoverage] = field(default_factory=dict[str, TenantCoverage])
    surrogate: Mapping[str, SurrogateQuality] = field(default_factory=dict[str, SurrogateQuality])

    @property
    def balanced(self) -> bool:
        """True if every turn is counted once.

        Not detected: turns that wait forever (see `waiting` and `oldest_wait`), and a turn that was logged under two ids.
        """
        return self.ingested == self.trained + sum(self.held.values()) + self.waiting


async def account(log: Log, folds: Folds | None = None, config: RewardConfig | None = None) -> Accounting:
    """Compute the counts of the desk's fold, read on from its last snapshot, in memory that grows only with the open turns.

    Without a snapshot, and if the log's first rows were dropped, counting starts at the first remaining row. `config` is the desk's.
    """
    reading = LedgerFollower(log, config or RewardConfig(), folds)
    await reading.catch_up(saving=False)
    return of_ledger(reading.ledger)


def of_ledger(ledger: TurnLedger) -> Accounting:
    """Return the counts of a ledger."""
    counts, alarms = ledger.counts, ledger.alarms
    open_turns = [
        entry.facts for turn, entry in ledger.open.items() if entry.facts.hold is None and turn not in ledger.to_hold
    ]
    matured = [entry.facts for turn, entry in ledger.matured.items() if turn not in ledger.to_hold]
    ends = [facts.ended_at for facts in [*open_turns, *matured, *ledger.side_calls().values()]]
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
        used=alarms.use.share(ledger.learnable),
        stale=_stale_shares(counts),
        coverage={
            tenant: TenantCoverage(usual=each.usual, turns=each.turns, alarm=alarms.silenced(tenant))
            for tenant, each in alarms.coverages.items()
        },
        surrogate=ledger.surrogate.qualities(),
    )


def _stale_shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the share of rollouts' tokens that was too stale, by band of turn numbers; empty if none was."""
    mark = "tokens of turns "
    bands = {name.partition(mark)[2] for name in counts if mark in name}
    pairs = {band: (counts.get(f"stale {mark}{band}", 0), counts.get(f"taken {mark}{band}", 0)) for band in bands}
    found = {band: stale / (stale + taken) for band, (stale, taken) in pairs.items() if stale + taken}
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition("-")[0]))) if any(found.values()) else {}
