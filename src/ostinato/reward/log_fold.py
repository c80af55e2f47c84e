"""Keeps the ledger up to date with the log: starts from its last snapshot, reads on from there, and saves it again regularly."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from ostinato.core.lineage import Lineage
from ostinato.core.records import Arm, identity
from ostinato.core.seams import Cursor, Folds, Log
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import KINDS, TurnLedger
from ostinato.reward.ledger_entries import TEACHING_ARMS, Gold, matured_turns, nobody, open_turns

# ---------------------------------------------------------------- the snapshot


FORMAT = "ledger@5"


def snapshot(ledger: TurnLedger) -> dict[str, Any]:
    """The whole state of a ledger."""
    return {
        "format": FORMAT,
        "start": ledger.start,
        "baseline": ledger.baseline.snapshot(),
        "teaching": ledger.teaching.snapshot(),
        "recent": ledger.recent.snapshot(),
        "lineage": asdict(ledger.lineage),
        "last_step": ledger.last_step,
        "time": ledger.orphans.time,
        "open": open_turns.dump_python(list(ledger.open.values()), mode="json"),
        "matured": matured_turns.dump_python(list(ledger.matured.values()), mode="json"),
        "touched": list(ledger.touched),
        "to_hold": ledger.to_hold,
        "groups": [list(unit) for unit in ledger.groups],
        "closed": [list(unit) for unit in ledger.closed],
        "settled": ledger.settled.snapshot(),
        "forgot": ledger.settled.forgot,
        "orphans": ledger.orphans.snapshot(),
        "alarms": ledger.alarms.snapshot(),
        "counts": ledger.counts,
        "held": ledger.held,
        "quarantined": ledger.quarantined,
    }


def restored(
    state: Mapping[str, Any], config: RewardConfig, gold: Gold = nobody, arms: Collection[Arm] = TEACHING_ARMS
) -> TurnLedger | None:
    """The ledger that `snapshot` was taken of, with the current config; None for another version's snapshot.

    Raises AttributeError, LookupError, TypeError or ValueError if `state` is not a snapshot at all.
    """
    if state.get("format") != FORMAT:
        return None
    ledger = TurnLedger(config, int(state["start"]), gold, arms)
    ledger.baseline.restore(state["baseline"])
    ledger.teaching.restore(state["teaching"])
    ledger.recent.restore(state["recent"])
    ledger.lineage = Lineage(**state["lineage"])
    ledger.last_step = int(state["last_step"])
    for entry in open_turns.validate_python(state["open"]):
        ledger.open[entry.facts.id] = entry
        ledger.watch(entry.facts)
    ledger.touched = dict.fromkeys(state["touched"])
    ledger.matured = {entry.facts.id: entry for entry in matured_turns.validate_python(state["matured"])}
    ledger.to_hold = dict(state["to_hold"])
    ledger.groups = OrderedDict(((kind, tenant, group), None) for kind, tenant, group in state["groups"])
    ledger.closed = dict.fromkeys(state["closed"])
    ledger.settled.restore(state["settled"], forgot=bool(state["forgot"]))
    ledger.orphans.restore(state["orphans"], float(state["time"]), lambda said: (said[0], said[1], said[2]))
    ledger.alarms.restore(state["alarms"])
    ledger.counts, ledger.held = Counter(state["counts"]), Counter(state["held"])
    ledger.quarantined = Counter(state["quarantined"])
    return ledger


# ---------------------------------------------------------------- the fold


NAME = "desk"


class LedgerFold:
    """A ledger and its position in the log.

    A snapshot is used only if the log still holds the row that it ended with and all rows after that. Another log, or one restored
    from a backup, is read anew from its first row.

    Args:
        log: the log to read.
        config: how its rows are interpreted.
        folds: where the ledger is saved; None: nowhere.
        plan: names the function and options that the open turns' next questions are planned for. Under another plan all are asked anew.
        gold: the people whose turns are never learned from.
        arms: the arms whose turns may be learned from, those people's excepted.
    """

    def __init__(
        self,
        log: Log,
        config: RewardConfig,
        folds: Folds | None = None,
        plan: str = "",
        gold: Gold = nobody,
        arms: Collection[Arm] = TEACHING_ARMS,
    ) -> None:
        self.ledger = TurnLedger(config, gold=gold, arms=arms)
        self._gold, self._arms = gold, arms
        self.cursor: Cursor = 0
        self._log = log
        self._folds = folds
        self._config = config
        self._plan = plan
        self._started = False
        self._last: list[Any] = []  # kind and identity of the row at the cursor
        self._unsaved = 0

    async def catch_up(self, *, saving: bool = True) -> None:
        """Read the new rows, and save every `fold_rows` rows. Raises Corrupt, StorageFull."""
        if not self._started:
            await self._start()
        async for seq, row in self._log.read(self.cursor, KINDS):
            self.ledger.apply(seq, row)
            self.cursor, self._last = seq, [type(row).__name__, *identity(row)]
            self._unsaved += 1
            if saving and self._unsaved >= self._config.fold_rows:
                await self.save()

    async def save(self) -> None:
        """Save the ledger. Raises StorageFull; the previous snapshot is kept then."""
        if self._folds is not None and self._unsaved:
            state = {"ledger": snapshot(self.ledger), "last": self._last, "plan": self._plan}
            await self._folds.save(NAME, self.cursor, state)
            self._unsaved = 0

    async def _start(self) -> None:
        horizon = await self._log.horizon()
        found = None if self._folds is None else await self._folds.load(NAME)
        if found is None or not await self._continues(*found, horizon) or not self._restore(*found):
            self.ledger, self.cursor = TurnLedger(self._config, horizon, self._gold, self._arms), horizon
        self._started = True

    async def _continues(self, cursor: Cursor, state: Mapping[str, Any], horizon: Cursor) -> bool:
        """True if the log continues where this snapshot ended."""
        if cursor <= horizon:
            return cursor == horizon
        found = await anext(aiter(self._log.read(cursor - 1, KINDS)), None)
        if found is None:
            return False
        seq, row = found
        return seq == cursor and [type(row).__name__, *identity(row)] == state.get("last")

    def _restore(self, cursor: Cursor, state: Mapping[str, Any]) -> bool:
        """Restore a snapshot. False if it is not of this version."""
        ledger = _parsed(state, self._config, self._gold, self._arms)
        if ledger is None:
            return False
        if state["plan"] != self._plan:
            ledger.touched |= dict.fromkeys(ledger.open)
        self.ledger, self.cursor, self._last = ledger, cursor, list(state["last"])
        return True


def _parsed(
    state: Mapping[str, Any], config: RewardConfig, gold: Gold = nobody, arms: Collection[Arm] = TEACHING_ARMS
) -> TurnLedger | None:
    """The ledger in a snapshot; None if it is not of this version or is incomplete."""
    if not isinstance(state.get("last"), list) or not isinstance(state.get("plan"), str):
        return None
    try:
        return restored(state["ledger"], config, gold, arms)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


async def needed_above(folds: Folds, config: RewardConfig, now: float) -> Cursor:
    """The place in the log above which a desk that starts from its snapshot needs every row; 0 if it has no usable snapshot.

    A turn that ended in the future, by a wrong clock, would wait until then, so it does not keep rows in the log. If it is gone
    when its time comes, its outcome says so.
    """
    found = await folds.load(NAME)
    ledger = None if found is None else _parsed(found[1], config)
    if found is None or ledger is None:
        return 0
    open_ = [entry for entry in ledger.open.values() if entry.facts.ended_at <= now]
    matured = [entry for entry in ledger.matured.values() if entry.facts.ended_at <= now]
    said = [place for entry in open_ for place, _, _ in entry.said]
    return min([found[0], *(place - 1 for place in said), *(entry.facts.seq - 1 for entry in (*open_, *matured))])
