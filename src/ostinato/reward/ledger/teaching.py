"""Teaches the baseline from the log: the returns of turns that were trained on, or would have been had their rewards differed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.records import Holdback
from ostinato.reward.credit.baseline import Baseline
from ostinato.reward.credit.episodes import returns
from ostinato.reward.ledger.entries import Matured, matured_turns


class Teaching:
    """Teaches the baseline in the order of the log.

    Turns that were held back together because their rewards did not differ teach it too: they show the level of rewards. A baseline
    that saw only batches with contrast would expect too little once all turns are praised, and measure the next batch against that.
    """

    def __init__(self, baseline: Baseline, discount: float) -> None:
        self._baseline = baseline
        self._discount = discount
        self._flat: list[Matured] = []
        self._flat_name: tuple[float, str] | None = None  # the time and reason that its rows share

    def batch(self, entries: Sequence[Matured]) -> None:
        """Learn from the turns of a batch, oldest first."""
        self.catch_up()
        self._observe(entries)

    def flat(self, row: Holdback, entry: Matured) -> None:
        """Add one of the turns that were held back together."""
        if self._flat_name != (row.at, row.reason):
            self.catch_up()
            self._flat_name = (row.at, row.reason)
        self._flat.append(entry)

    def catch_up(self) -> None:
        """Learn from the turns that were held back last. Call before using the baseline."""
        entries, self._flat, self._flat_name = self._flat, [], None
        self._observe(entries)

    def snapshot(self) -> dict[str, Any]:
        """The turns that the baseline has not learned from yet, as JSON's types."""
        return {"flat": matured_turns.dump_python(self._flat, mode="json"), "name": self._flat_name}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._flat = matured_turns.validate_python(state["flat"])
        self._flat_name = None if state["name"] is None else (float(state["name"][0]), str(state["name"][1]))

    def _observe(self, entries: Sequence[Matured]) -> None:
        episodes: dict[tuple[str, str], list[Matured]] = defaultdict(list)
        for entry in entries:
            episodes[entry.facts.tenant, entry.facts.episode].append(entry)
        reached = {
            entry.facts.id: value
            for members in episodes.values()
            for entry, value in zip(members, returns([member.value for member in members], self._discount), strict=True)
        }
        for entry in entries:
            self._baseline.observe(entry.facts.context, reached[entry.facts.id])
