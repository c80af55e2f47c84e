"""A ledger as JSON's types and back; the restored ledger makes bit for bit the same decisions. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from ostinato.core.lineage import Lineage
from ostinato.core.records import Arm
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger.entries import TEACHING_ARMS, Gold, matured_turns, nobody, open_turns
from ostinato.reward.ledger.ledger import TurnLedger

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
        "time": ledger.time,
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
    ledger.last_step, ledger.time = int(state["last_step"]), float(state["time"])
    for entry in open_turns.validate_python(state["open"]):
        ledger.open[entry.facts.id] = entry
        ledger.watch(entry.facts)
    ledger.touched = dict.fromkeys(state["touched"])
    ledger.matured = {entry.facts.id: entry for entry in matured_turns.validate_python(state["matured"])}
    ledger.to_hold = dict(state["to_hold"])
    ledger.groups = OrderedDict(((kind, tenant, group), None) for kind, tenant, group in state["groups"])
    ledger.closed = dict.fromkeys(state["closed"])
    ledger.settled.restore(state["settled"], forgot=bool(state["forgot"]))
    ledger.orphans.restore(state["orphans"])
    ledger.alarms.restore(state["alarms"])
    ledger.counts, ledger.held = Counter(state["counts"]), Counter(state["held"])
    ledger.quarantined = Counter(state["quarantined"])
    return ledger
