"""Gathers the evidence for one release from its sources, within bounds. The slow parts are cached for a minute."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.app.storage import Run
from ostinato.core.errors import Corrupt, NotFound, Unavailable
from ostinato.core.records import Arm, Person, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.seams import Clock, Cursor
from ostinato.evaluate.statistics import clustered_difference
from ostinato.launch.views.page.queries import IndexQueries
from ostinato.launch.views.page.releases.lines import last_report, trial_looks
from ostinato.record.rowlog import RowLog
from ostinato.release.monitors.rates import BUILT_IN, Rate, Shift, measured
from ostinato.release.monitors.turn_text import take_apart
from ostinato.release.trial.trial import ArmBalance
from ostinato.web.page.releases.evidence import (
    Dealt,
    LayerChange,
    RateShift,
    ReleaseEvidence,
    SamePrompt,
    TrialRules,
    WeightChange,
)
from ostinato.web.page.sources import LedgerEvent, TooWide
from ostinato.web.page.threads import Ask
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.compare import TensorChange
from ostinato.weights.version.manifest import Manifest

# ---------------------------------------------------------------- shifts in behaviour


ACCEPTED = "accepted"
_TOGETHER = 0.05
Tally = dict[Person, tuple[float, int]]
Rated = Sequence[tuple[str, str, float]]
"""Tenant, user and reward of turns that have one."""


def shifts(
    before: Iterable[Turn], after: Iterable[Turn], rated_before: Rated, rated_after: Rated, off: Iterable[str] = ()
) -> tuple[RateShift, ...]:
    """Each rate with a value for some turn on either side; first the share of rated turns that people accepted.

    The bounds hold for all rates together at 95% (Bonferroni). The operator's own rates are left out, because only the release worker
    may run their code.
    """
    rates = {name: rate for name, rate in BUILT_IN.items() if name not in set(off)}
    sides = [_tallies(rates.values(), turns) for turns in (before, after)]
    for side, rated in zip(sides, (rated_before, rated_after), strict=True):
        side[ACCEPTED] = _accepted(rated)
    names = [name for name in (ACCEPTED, *rates) if sides[0].get(name) or sides[1].get(name)]
    confidence = 1.0 - _TOGETHER / max(1, len(names))
    return tuple(
        _shift(name, rates.get(name), sides[0].get(name, {}), sides[1].get(name, {}), confidence) for name in names
    )


def _tallies(rates: Iterable[Rate], turns: Iterable[Turn]) -> dict[str, Tally]:
    found: defaultdict[str, Tally] = defaultdict(dict)
    watched = tuple(rates)
    for turn in turns:
        if turn.redacted:
            continue
        values, _ = measured(watched, take_apart(turn))
        for name, value in values.items():
            _count(found[name], (turn.tenant, turn.user), value)
    return dict(found)


def _accepted(rated: Rated) -> Tally:
    tally: Tally = {}
    for tenant, user, value in rated:
        _count(tally, (tenant, user), float(value > 0))
    return tally


def _count(tally: Tally, person: Person, value: float) -> None:
    total, number = tally.get(person, (0.0, 0))
    tally[person] = (total + value, number + 1)


def _shift(name: str, rate: Rate | None, before: Tally, after: Tally, confidence: float) -> RateShift:
    lower = upper = None
    if min(len(before), len(after)) >= 2:
        bounds = clustered_difference(after, before, confidence)
        lower, upper = bounds.lower, bounds.upper
    way = None if lower is None or upper is None else Shift.UP if lower > 0 else Shift.DOWN if upper < 0 else None
    return RateShift(
        name=name,
        means="rated turns with a reward above 0" if rate is None else rate.means,
        before=_mean(before),
        after=_mean(after),
        lower=lower,
        upper=upper,
        turns_before=_turns(before),
        turns_after=_turns(after),
        people=len(before.keys() | after.keys()),
        harmful=way is not None and way in ({Shift.DOWN} if rate is None else rate.harmful),
    )


def _mean(tally: Mapping[Person, tuple[float, int]]) -> float | None:
    turns = _turns(tally)
    return sum(total for total, _ in tally.values()) / turns if turns else None


def _turns(tally: Mapping[Person, tuple[float, int]]) -> int:
    return sum(number for _, number in tally.values())


# ---------------------------------------------------------------- sizes of deltas


MOST_VERSIONS = 32
"""Manifests read for one answer, at most."""


async def sent_between(manifests: Manifests, since: PolicyVersion, policy: PolicyVersion) -> WeightChange | None:
    """The deltas that lead from one version to the other; None if the manifests do not connect them within `MOST_VERSIONS`."""
    try:
        chain = await _chain(manifests, since, policy)
    except (NotFound, Corrupt):
        return None
    if not chain:
        return None
    whole = any(manifest.kind == "full" for manifest in chain)
    return WeightChange(
        since=since,
        versions=len(chain),
        bytes=sum(manifest.payload_bytes for manifest in chain),
        full_bytes=chain[0].full_bytes,
        layers=() if whole else _layers(chain),
    )


async def _chain(manifests: Manifests, since: PolicyVersion, policy: PolicyVersion) -> list[Manifest]:
    found: list[Manifest] = []
    _, manifest = await manifests.at(policy.hash)
    while manifest.root != since.hash:
        if manifest.parent is None or manifest.number <= since.number or len(found) == MOST_VERSIONS:
            return []
        found.append(manifest)
        _, manifest = await manifests.at(manifest.parent)
    return found


def _layers(chain: list[Manifest]) -> tuple[LayerChange, ...]:
    took: defaultdict[str, int] = defaultdict(int)
    for manifest in chain:
        for tensor in manifest.tensors:
            took[tensor.name] += sum(chunk.length for chunk in tensor.chunks)
    found: list[LayerChange] = []
    for tensor in chain[0].tensors:
        place = TensorChange(name=tensor.name, elements=tensor.nbytes, changed=took[tensor.name], moved=None)
        found.append(LayerChange(kind=place.kind, layer=place.layer, share=min(1.0, place.share)))
    return tuple(found)


# ---------------------------------------------------------------- balance of the arms


MOST_TURNS = 30_000
"""At most so many turns of a trial are read: the first ones, which have the most newcomers. The test may stop anywhere."""
_MOST_ODDS = 700.0  # the logarithm of a number that a float can still hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From `start` in the log on, `share` of the users get the candidate. `shipped`: it is live, and the others keep the old version."""

    start: Cursor
    share: float
    shipped: bool


def stretches(events: Iterable[LedgerEvent], rows: Mapping[str, ReleaseEvent], root: str) -> list[Stretch]:
    """The shares of a version's newest trial, in order; empty if it had no trial."""
    found: list[Stretch] = []
    for event in sorted(events, key=lambda event: event.seq):
        row = rows.get(event.id)
        share = None if row is None else row.detail.get("share")
        if event.policy.hash != root or not isinstance(share, int | float):
            continue
        if event.action == "canary":
            found = []
        found.append(Stretch(start=event.seq, share=float(share), shipped=event.action == "shipped"))
    return found if found and not found[0].shipped else []


def dealt(questions: IndexQueries, parts: Sequence[Stretch], root: str) -> Dealt | None:
    """The people of a trial; None if there was no trial, nobody came, or its first turns are not in the index yet.

    Raises TooWide, Unavailable.
    """
    if not parts:
        return None
    with questions.open() as db:
        low = db.execute("SELECT value FROM state WHERE name = 'low'").fetchone()
        if low is None or low[0] > parts[0].start:
            return None
        end = db.execute(
            "SELECT min(seq) FROM events WHERE seq > ?1 AND (action IN ('canary', 'rolled_back') OR "
            "(action = 'shipped' AND hash != ?2) OR (action = 'blocked' AND hash = ?2))",
            (parts[0].start, root),
        ).fetchone()[0]
        # until the candidate's weights are loaded everybody gets live, and nobody is dealt
        answered = db.execute(
            "SELECT min(seq) FROM turns WHERE seq > ? AND arm = 'canary'", (parts[0].start,)
        ).fetchone()[0]
        since = parts[0].start if parts[0].shipped or answered is None else answered - 1
        rows = db.execute(
            "SELECT arm, min(seq), count(*) FROM (SELECT tenant, user, arm, seq FROM turns WHERE seq > ? AND seq < ? AND dealt AND "
            f"arm IN ('canary', 'live', 'previous') ORDER BY seq LIMIT {MOST_TURNS}) GROUP BY tenant, user",
            (since, (1 << 62) if end is None else end),
        ).fetchall()
    return counted([(arm, seq) for arm, seq, _ in rows], parts, sum(turns for _, _, turns in rows)) if rows else None


def counted(newcomers: Sequence[tuple[str, Cursor]], parts: Sequence[Stretch], turns: int) -> Dealt:
    """Arm and cursor of each person's first turn -> how many people came to each side."""
    starts = [part.start for part in parts]
    came: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for arm, seq in newcomers:
        part = max(0, bisect_right(starts, seq) - 1)
        theirs = Arm.LIVE if parts[part].shipped else Arm.CANARY
        came[part][arm != theirs] += 1
    balance, expected = ArmBalance(), 0.0
    for part, (candidate, others) in sorted(came.items()):
        share = parts[part].share
        balance.add((candidate, others), (share, 1.0 - share))
        expected += share * (candidate + others)
    return Dealt(
        candidate=sum(each[0] for each in came.values()),
        others=sum(each[1] for each in came.values()),
        expected=expected,
        odds=math.exp(min(balance.log_factor(), _MOST_ODDS)),
        turns=turns,
        whole=turns < MOST_TURNS,
    )


# ---------------------------------------------------------------- the evidence


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
        self, run: Run, log: RowLog, questions: IndexQueries, pieces: Callable[[int], bytes], clock: Clock, ask: Ask
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
