"""Candidate against live on one suite: the `Evals` seam. Remembers scores, so no (version, item, draw) is sampled twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ostinato.core.errors import Corrupt
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore, Report
from ostinato.evaluate.gate import GateConfig, Match, decide
from ostinato.evaluate.suites import Item, Suite

KEPT_VERSIONS = 64
"""Scores of older versions are forgotten; the ledger has them."""


class Runner(Protocol):
    """What produces scores: `runner.SuiteRunner`, or a fake."""

    suite: Suite

    async def run(
        self, slot: str, policy: PolicyVersion, draws: range, items: Sequence[Item] | None = None
    ) -> list[ItemScore]:
        """Scores of every item for each draw."""
        ...


class Evaluation:
    """One look of the gate per call of `run`; an EXTEND verdict is followed up by calling it again.

    `evidence` and `restore` carry the scores through the ledger, so that a restarted worker goes on where the killed one was.
    """

    def __init__(
        self, runner: Runner, gate: GateConfig, *, candidate_slot: str = "candidate", live_slot: str = "live"
    ) -> None:
        self._runner = runner
        self._gate = gate
        self._slots = candidate_slot, live_slot
        self._scores: dict[str, dict[tuple[str, int], float]] = {}

    async def run(self, candidate: PolicyVersion, *, against: PolicyVersion) -> Report:
        """Sample both up to the next look, as far as draws are missing, and judge on equal draws.

        Raises:
            Unavailable, Conflict: the gateway could not serve the versions (see `SuiteRunner.run`).
        """
        suite = self._runner.suite
        match = Match(suite=suite.name, suite_hash=suite.hash, candidate=candidate, live=against)
        draws = self._gate.next_draws(min(self._held(candidate), self._held(against)))
        for slot, policy in zip(self._slots, (candidate, against), strict=True):
            held = self._held(policy)
            if held < draws:
                self._keep(policy.hash, await self._runner.run(slot, policy, range(held, draws)))
        return decide(self._first(candidate, draws), self._first(against, draws), self._gate, match)

    def evidence(self, *policies: PolicyVersion) -> dict[str, Any]:
        """The scores held of these versions, JSON-ready: per version one list per item (suite order), one number per draw.

        Example: ``{"suite_hash": "9f", "scores": {"a1...": [[1.0, 0.0], [1.0, 1.0]]}}``
        """
        items = self._runner.suite.items
        scores = {
            policy.hash: [
                [self._scores[policy.hash][item.id, draw] for draw in range(self._held(policy))] for item in items
            ]
            for policy in policies
            if self._held(policy)
        }
        return {"suite_hash": self._runner.suite.hash, "scores": scores}

    def restore(self, evidence: Mapping[str, Any]) -> None:
        """Take back what `evidence` gave; evidence of another suite is ignored.

        Raises:
            Corrupt: the lists do not fit the suite.
        """
        suite = self._runner.suite
        if evidence.get("suite_hash") != suite.hash:
            return
        for content_hash, rows in evidence["scores"].items():
            if len(rows) != len(suite.items):
                raise Corrupt(f"ledger evidence of {content_hash} has {len(rows)} items, the suite {len(suite.items)}")
            pairs = (
                ItemScore(item=item.id, draw=draw, score=float(score))
                for item, row in zip(suite.items, rows, strict=True)
                for draw, score in enumerate(row)
            )
            self._keep(content_hash, pairs)

    def scores(self, policy: PolicyVersion) -> list[ItemScore]:
        """All scores held of one version."""
        return self._first(policy, self._held(policy))

    def _keep(self, content_hash: str, scores: Iterable[ItemScore]) -> None:
        # moved to the end: the oldest goes first
        known = self._scores[content_hash] = self._scores.pop(content_hash, {})
        for score in scores:
            known.setdefault((score.item, score.draw), score.score)
        while len(self._scores) > KEPT_VERSIONS:
            del self._scores[next(iter(self._scores))]

    def _held(self, policy: PolicyVersion) -> int:
        """Draws that every item has."""
        return len(self._scores.get(policy.hash, {})) // len(self._runner.suite.items)

    def _first(self, policy: PolicyVersion, draws: int) -> list[ItemScore]:
        known = self._scores.get(policy.hash, {})
        return [ItemScore(item=item, draw=draw, score=score) for (item, draw), score in known.items() if draw < draws]
