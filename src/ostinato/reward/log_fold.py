"""The turn ledger as a fold of the log, with snapshots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from ostinato.core.fold import FoldFollower, restore_fold
from ostinato.core.records import Arm, Batch, ConsentGiven, Row
from ostinato.core.seams import Cursor, Folds, Log
from ostinato.core.staleness import Lineage
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import KINDS, TurnLedger
from ostinato.reward.ledger_entries import TEACHING_ARMS, Gold, matured_turns, no_gold, open_turns, turn_facts

# ---------------------------------------------------------------- snapshots


FORMAT = "ledger@16"


def snapshot(ledger: TurnLedger) -> dict[str, Any]:
    """Return the whole state of a ledger."""
    return {
        "format": FORMAT,
        "start": ledger.start,
        "baseline": ledger.baseline.snapshot(),
        "teaching": ledger.teaching.snapshot(),
        "recent": ledger.recent.snapshot(),
        "propensity": ledger.propensity.snapshot(),
        "surrogate": ledger.surrogate.snapshot(),
        "passed_over": [[*person, episode] for person, episode in ledger.passed_over],
        "lineage": asdict(ledger.lineage),
        "last_step": ledger.last_step,
        "time": ledger.orphans.time,
        "open": open_turns.dump_python(list(ledger.open.values()), mode="json"),
        "matured": matured_turns.dump_python(list(ledger.matured.values()), mode="json"),
        "alone": turn_facts.dump_python(list(ledger.alone.values()), mode="json"),
        "touched": list(ledger.touched),
        "to_hold": ledger.to_hold,
        "doubted": matured_turns.dump_python(list(ledger.doubted.values()), mode="json"),
        "groups": [list(unit) for unit in ledger.groups],
        "refusing": [list(person) for person in ledger.refusing],
        "closed": [list(unit) for unit in ledger.closed],
        "rollout_turns": [[*unit, numbers] for unit, numbers in ledger.rollout_turns.items()],
        "settled": ledger.settled.snapshot(),
        "forgot": ledger.settled.forgot,
        "orphans": ledger.orphans.snapshot(),
        "alarms": ledger.alarms.snapshot(),
        "counts": ledger.counts,
        "held": ledger.held,
        "quarantined": ledger.quarantined,
    }


def restored(
    state: Mapping[str, Any], config: RewardConfig, gold: Gold = no_gold, arms: Collection[Arm] = TEACHING_ARMS
) -> TurnLedger | None:
    """Restore the ledger from a `snapshot`, with the current config; None for another version's snapshot.

    Raises AttributeError, LookupError, TypeError or ValueError if `state` is not a snapshot at all.
    """
    if state.get("format") != FORMAT:
        return None
    ledger = TurnLedger(config, int(state["start"]), gold, arms)
    ledger.baseline.restore(state["baseline"])
    ledger.teaching.restore(state["teaching"])
    ledger.recent.restore(state["recent"])
    ledger.propensity.restore(state["propensity"])
    ledger.surrogate.restore(state["surrogate"])
    ledger.passed_over = [((str(tenant), str(user)), str(name)) for tenant, user, name in state["passed_over"]]
    ledger.lineage = Lineage(**state["lineage"])
    ledger.last_step = int(state["last_step"])
    for entry in open_turns.validate_python(state["open"]):
        ledger.open[entry.facts.id] = entry
        ledger.watch(entry.facts)
    ledger.touched = dict.fromkeys(state["touched"])
    ledger.matured = {entry.facts.id: entry for entry in matured_turns.validate_python(state["matured"])}
    ledger.alone = OrderedDict((facts.id, facts) for facts in turn_facts.validate_python(state["alone"]))
    ledger.to_hold = dict(state["to_hold"])
    ledger.doubted = {entry.facts.id: entry for entry in matured_turns.validate_python(state["doubted"])}
    ledger.groups = OrderedDict(((kind, tenant, group), None) for kind, tenant, group in state["groups"])
    ledger.refusing = dict.fromkeys((str(tenant), str(user)) for tenant, user in state["refusing"])
    ledger.closed = dict.fromkeys((str(kind), str(tenant), str(group)) for kind, tenant, group in state["closed"])
    ledger.rollout_turns = {
        (kind, tenant, group): Counter(numbers) for kind, tenant, group, numbers in state["rollout_turns"]
    }
    ledger.settled.restore(state["settled"], forgot=bool(state["forgot"]))
    ledger.orphans.restore(state["orphans"], float(state["time"]), lambda said: (said[0], said[1], said[2], said[3]))
    ledger.alarms.restore(state["alarms"])
    ledger.counts, ledger.held = Counter(state["counts"]), Counter(state["held"])
    ledger.quarantined = Counter(state["quarantined"])
    return ledger


# ---------------------------------------------------------------- the fold


NAME = "desk"


class LedgerFold:
    """A ledger as a fold of the log.

    Args:
        config: how the log's rows are interpreted.
        plan: names the function and options under which open turns' `ask_at` was set. Under another plan all open turns are asked again.
        gold: the people whose turns are never learned from.
        arms: the arms whose turns may be learned from, except gold people's.
        log: the log that is folded; None: only snapshots are restored.
    """

    kinds = KINDS

    def __init__(
        self,
        config: RewardConfig,
        plan: str = "",
        gold: Gold = no_gold,
        arms: Collection[Arm] = TEACHING_ARMS,
        log: Log | None = None,
    ) -> None:
        self.ledger = TurnLedger(config, gold=gold, arms=arms)
        self._config, self._plan = config, plan
        self._gold, self._arms = gold, arms
        self._log = log

    async def begin(self, horizon: Cursor) -> Cursor:
        """Start after the rows that retention has dropped. Batches and consents are never dropped: step numbers continue after the last
        batch, and withdrawn consents stay withdrawn.
        """
        self.ledger = TurnLedger(self._config, horizon, self._gold, self._arms)
        if horizon and self._log is not None:
            async for seq, row in self._log.read(0, {Batch, ConsentGiven}):
                if seq > horizon:
                    break
                if isinstance(row, Batch):
                    self.ledger.count_step(row)
                else:
                    self.ledger.apply(seq, row)
        return horizon

    def apply(self, seq: Cursor, row: Row) -> None:
        """Take in one row. Raises Corrupt."""
        self.ledger.apply(seq, row)

    def state(self) -> dict[str, Any]:
        """Return the ledger's snapshot, and the plan that it was made under."""
        return {"ledger": snapshot(self.ledger), "plan": self._plan}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the fold from `state`. Returns False for another version's snapshot."""
        plan = str(state["plan"])
        ledger = restored(state["ledger"], self._config, self._gold, self._arms)
        if ledger is None:
            return False
        if plan != self._plan:
            ledger.touched |= dict.fromkeys(ledger.open)
        self.ledger = ledger
        return True


class LedgerFollower(FoldFollower[LedgerFold]):
    """Keeps a ledger up to date with the log, and saves it every `fold_rows` rows in `folds` (None: never). Arguments as `LedgerFold`."""

    def __init__(
        self,
        log: Log,
        config: RewardConfig,
        folds: Folds | None = None,
        plan: str = "",
        gold: Gold = no_gold,
        arms: Collection[Arm] = TEACHING_ARMS,
    ) -> None:
        fold = LedgerFold(config, plan, gold, arms, log)
        super().__init__(log, fold, name=NAME, folds=folds, every=config.fold_rows)

    @property
    def ledger(self) -> TurnLedger:
        """The ledger after the rows read so far."""
        return self.fold.ledger


async def needed_above(folds: Folds, config: RewardConfig, now: float) -> Cursor:
    """Return the place in the log above which a desk that starts from its snapshot needs every row; 0 if it has no usable snapshot.

    A turn that ended in the future, by a wrong clock, would wait until then, so it does not keep rows in the log. If it is gone
    when its time comes, its outcome says so. A turn whose late reward is no longer asked for does not keep rows either.
    """
    found = await folds.load(NAME)
    fold = LedgerFold(config)
    if found is None or not restore_fold(fold, found[1], NAME):
        return 0
    ledger = fold.ledger
    open_ = [entry for entry in ledger.open.values() if entry.facts.ended_at <= now]
    matured = [entry for entry in ledger.matured.values() if entry.facts.ended_at <= now]
    oldest = now - config.longest_wait_s if config.surrogate.truth_after_s else now
    awaited = [entry for entry in ledger.surrogate.awaited.values() if oldest < entry.ended_at <= now]
    said = [place for entry in (*open_, *awaited) for place, _, _, _ in entry.said]
    turns = [*(entry.facts.seq for entry in (*open_, *matured)), *(entry.seq for entry in awaited)]
    return min([found[0], *(place - 1 for place in (*said, *turns))])
