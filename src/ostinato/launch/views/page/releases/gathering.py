"""Gathers the evidence for one release from its sources, within bounds. The slow parts are cached for a minute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ostinato.app.storage import Run
from ostinato.core.errors import Unavailable
from ostinato.core.records import PolicyVersion, ReleaseEvent, Turn
from ostinato.core.seams import Clock, Cursor
from ostinato.launch.views.page.queries import Questions
from ostinato.launch.views.page.releases.dealt import dealt, stretches
from ostinato.launch.views.page.releases.lines import last_report, trial_looks
from ostinato.launch.views.page.releases.sent import sent_between
from ostinato.launch.views.page.releases.shifts import shifts
from ostinato.record.rowlog import RowLog
from ostinato.web.page.releases.evidence import RateShift, ReleaseEvidence, SamePrompt, TrialRules
from ostinato.web.page.sources import LedgerEvent, TooWide
from ostinato.web.page.threads import Ask
from ostinato.weights.version.chain import Manifests

T = TypeVar("T")

FRESH_S = 60.0
"""How long the evidence from turns and weights is cached."""
TURNS = 200
"""How many of a version's newest turns are used to judge its behaviour."""
RATED = 2_000
ASKED = 80
"""Turns of the gate that are searched for prompts given to both versions."""
EXAMPLES = 3
_MOST_KEPT = 64
_MADE = frozenset({"evaluated", "canary", "ramped", "looked", "shipped", "better", "confirmed", "faded", "blocked"})


class Gathering:
    """Gathers evidence for one run. `pieces` gives the bytes of a token."""

    def __init__(
        self, run: Run, log: RowLog, questions: Questions, pieces: Callable[[int], bytes], clock: Clock, ask: Ask
    ) -> None:
        self._answered = ask
        self._run, self._log, self._questions, self._pieces, self._clock = run, log, questions, pieces, clock
        self._manifests = Manifests(run.store)
        self._kept: dict[tuple[str, str], tuple[float, ReleaseEvidence]] = {}

    async def evidence(
        self, policy: PolicyVersion, events: Sequence[LedgerEvent], rows: Mapping[str, ReleaseEvent]
    ) -> ReleaseEvidence:
        """The evidence for and against a version. `rows` are the ledger rows of those `events` that the log still has."""
        against = compared_with(policy, events)
        comparisons, bars = last_report(rows.values())
        slow = ReleaseEvidence() if against is None else await self._slow(policy, against)
        parts = stretches(events, rows, policy.hash)
        config = self._run.config.release
        rules = TrialRules(
            margin=config.trial.margin,
            alpha=config.trial.ship_alpha,
            better_odds=config.trial.better_evidence,
            void_odds=config.trial.imbalance,
        )
        trial = trial_looks(rows.values(), policy.hash)
        return ReleaseEvidence(
            against=against,
            comparisons=comparisons,
            bars=bars,
            trial=trial,
            rules=rules if config.canary or trial else None,
            dealt=await self._ask(lambda: dealt(self._questions, parts, policy.hash), None),
            rates=slow.rates,
            steps=slow.steps,
            turns=slow.turns,
            weights=slow.weights,
            examples=slow.examples,
            gate_alpha=self._run.config.evaluate.gate.alpha,
        )

    # ------------------------------------------------------------ slow parts

    async def _slow(self, policy: PolicyVersion, against: PolicyVersion) -> ReleaseEvidence:
        key, now = (policy.hash, against.hash), self._clock()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < FRESH_S:
            return kept[1]
        horizon = await self._log.horizon()
        turns = await self._ask(lambda: self._learned(against.number, policy.number, horizon), None)
        found = ReleaseEvidence(
            rates=await self._rates(policy, against),
            steps=policy.number - against.number if policy.number > against.number else None,
            turns=turns,
            weights=await sent_between(self._manifests, against, policy),
            examples=await self._examples(policy, against),
        )
        self._kept[key] = (now, found)
        while len(self._kept) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return found

    async def _rates(self, policy: PolicyVersion, against: PolicyVersion) -> tuple[RateShift, ...]:
        names = await self._ask(lambda: [self._users(each.number) for each in (against, policy)], [[], []])
        rated = await self._ask(lambda: [self._rated(each.number) for each in (against, policy)], [[], []])
        before, after = [
            _made_by(await self._find(each), version) for each, version in zip(names, (against, policy), strict=True)
        ]
        off = self._run.config.release.monitors.off
        return await self._answered(lambda: shifts(before, after, rated[0], rated[1], off))

    async def _examples(self, policy: PolicyVersion, against: PolicyVersion) -> tuple[SamePrompt, ...]:
        mine, theirs = await self._ask(lambda: self._suite(policy.number, against.number), ([], []))
        after, before = _made_by(await self._find(mine), policy), _made_by(await self._find(theirs), against)
        return tuple(
            SamePrompt(
                prompt=tuple(map(self._pieces, one.prompt_ids)),
                before=other.text,
                after=one.text,
                turn_before=other.id,
                turn_after=one.id,
            )
            for other, one in same_prompts(before, after)
        )

    # ------------------------------------------------------------ questions to the index

    def _learned(self, since: int, upto: int, horizon: Cursor) -> int | None:
        """Turns trained on between one version and the other (a version's number is its step). None while older turns are not read."""
        with self._questions.open() as db:
            low = db.execute("SELECT value FROM state WHERE name = 'low'").fetchone()
            if low is None or low[0] > horizon:
                return None
            sql = "SELECT count(*) FROM turns WHERE step > ? AND step <= ?"
            return int(db.execute(sql, (since, upto)).fetchone()[0])

    def _users(self, number: int) -> list[str]:
        with self._questions.open() as db:
            sql = (
                "SELECT id FROM turns INDEXED BY turns_by_version WHERE version = ? AND arm IN ('live', 'canary', 'previous') "
                f"ORDER BY seq DESC LIMIT {TURNS}"
            )
            return [id for (id,) in db.execute(sql, (number,))]

    def _rated(self, number: int) -> list[tuple[str, str, float]]:
        with self._questions.open() as db:
            sql = (
                "SELECT tenant, user, value FROM turns INDEXED BY turns_by_version WHERE version = ? AND value IS NOT NULL AND "
                f"arm IN ('live', 'canary', 'previous') ORDER BY seq DESC LIMIT {RATED}"
            )
            return db.execute(sql, (number,)).fetchall()

    def _suite(self, mine: int, theirs: int) -> tuple[list[str], list[str]]:
        """The gate's turns of one version, and the other version's from the same look on."""
        with self._questions.open() as db:
            sql = f"SELECT seq, id FROM turns WHERE version = ? AND arm = 'eval' ORDER BY seq DESC LIMIT {ASKED}"
            found = db.execute(sql, (mine,)).fetchall()
            if not found:
                return [], []
            sql = f"SELECT id FROM turns WHERE version = ? AND arm = 'eval' AND seq >= ? ORDER BY seq LIMIT {2 * ASKED}"
            other = db.execute(sql, (theirs, found[-1][0])).fetchall()
        return [id for _, id in found], [id for (id,) in other]

    async def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The index's answer, or `otherwise` if it takes too long or cannot be read, so that the rest can still be shown."""
        try:
            return await self._answered(question)
        except (TooWide, Unavailable):
            return otherwise

    async def _find(self, names: Iterable[str]) -> list[Turn]:
        identities = [(name,) for name in names]
        return await self._log.find(Turn, identities) if identities else []


def compared_with(policy: PolicyVersion, events: Iterable[LedgerEvent]) -> PolicyVersion | None:
    """The version that this one was last judged against or replaced; None for the first release."""
    newest = sorted(events, key=lambda event: -event.seq)
    found = (event.previous for event in newest if event.policy == policy and event.action in _MADE)
    return next((each for each in found if each is not None and each != policy), None)


def same_prompts(before: Iterable[Turn], after: Iterable[Turn], most: int = EXAMPLES) -> list[tuple[Turn, Turn]]:
    """Pairs of turns with the same prompt, drawn by the prompt's hash: at random, but the same at every look."""
    theirs: dict[tuple[int, ...], Turn] = {}
    for turn in before:
        theirs.setdefault(tuple(turn.prompt_ids), turn)
    found: dict[str, tuple[Turn, Turn]] = {}
    for turn in after:
        other = theirs.get(tuple(turn.prompt_ids))
        if other is not None and not (turn.redacted or other.redacted):
            drawn = hashlib.sha256(repr(tuple(turn.prompt_ids)).encode()).hexdigest()
            found.setdefault(drawn, (other, turn))
    return [found[drawn] for drawn in sorted(found)[:most]]


def _made_by(turns: Iterable[Turn], policy: PolicyVersion) -> list[Turn]:
    """Turns that this version alone made. After training went back, one number may name two versions."""
    return [turn for turn in turns if {span.policy for span in turn.spans} == {policy}]
