"""Gathers the evidence for one release from its sources, in bounded time. The slow parts are cached for a minute.

Also reads the details of a ledger event: looks of the gate, looks at users, and the rest cut to a readable size. Another version may have
written the event: incomplete details are left out and never raise an error.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.notices import Alarm
from ostinato.core.records import Arm, Person, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.report import BarResult, Comparison, Incumbent
from ostinato.core.seams import Clock, Cursor
from ostinato.evaluate.statistics import clustered_difference
from ostinato.record.rowlog import RowLog
from ostinato.release.config import ReleaseConfig
from ostinato.release.metrics.metric import metrics_of
from ostinato.release.monitors.rates import BUILT_IN, Rate, Shift, measured
from ostinato.release.monitors.turn_text import take_apart
from ostinato.release.trial.trial import ArmBalance
from ostinato.run_directory import Run
from ostinato.status import releases
from ostinato.status.index_queries import IndexQueries, Threads
from ostinato.status.log_index import finite, mapping
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.compare import TensorChange
from ostinato.weights.version.manifest import Manifest

# ---------------------------------------------------------------- details of ledger events


_MAX_DEPTH, _MAX_CHARACTERS, _MAX_ENTRIES = 6, 400, 60
_RAW = frozenset({"evidence", "salt"})
"""Details left out: individual scores, which only a restarted controller needs, and the salt by which users are assigned to arms."""


_FIGURES = ("difference", "lower", "upper", "margin", "power")


def gate_looks(events: Iterable[ReleaseEvent]) -> tuple[releases.GateLook, ...]:
    """Return the gate's looks among `events` (oldest first). An incomplete report, written by another version, is left out."""
    evaluated = [event for event in events if event.action == "evaluated"]
    found = [_look(event, event.previous, mapping(event.detail.get("report"))) for event in evaluated if event.previous]
    return tuple(look for look in found if look)


def _look(event: ReleaseEvent, against: PolicyVersion, report: Mapping[str, Any]) -> releases.GateLook | None:
    try:
        figures = {name: float(report[name]) for name in _FIGURES}
        return releases.GateLook(
            at=event.at,
            against=against,
            suite=str(report["suite"]),
            items=int(report["items"]),
            draws=int(report["draws"]),
            candidate=float(report["candidate_mean"]),
            live=float(report["live_mean"]),
            verdict=str(report["verdict"]),
            **figures,
        )
    except (KeyError, TypeError, ValueError):
        return None


def last_report(events: Iterable[ReleaseEvent]) -> tuple[tuple[Comparison, ...], tuple[BarResult, ...]]:
    """Return the comparisons of the gate's newest look, and the quality bars that it judged. `events`: oldest first."""
    evaluated = [event for event in events if event.action == "evaluated"]
    if not evaluated:
        return (), ()
    report = mapping(evaluated[-1].detail.get("report"))
    comparisons = [_comparison(mapping(each)) for each in _list(report.get("comparisons"))]
    bars = [_bar(mapping(each)) for each in _list(report.get("bars"))]
    return tuple(each for each in comparisons if each), tuple(each for each in bars if each)


def _comparison(told: Mapping[str, Any]) -> Comparison | None:
    try:
        policy = PolicyVersion(number=int(told["policy"]["number"]), hash=str(told["policy"]["hash"]))
        known = {each.name: told[each.name] for each in fields(Comparison) if each.name not in ("policy", "against")}
        return Comparison(**known, policy=policy, against=Incumbent(told["against"]))
    except (KeyError, TypeError, ValueError):
        return None


def _bar(told: Mapping[str, Any]) -> BarResult | None:
    try:
        return BarResult(**{each.name: told[each.name] for each in fields(BarResult)})
    except (KeyError, TypeError):
        return None


GOAL = "share of good turns"
"""The metric of a reading that names none."""


def trial_looks(events: Iterable[ReleaseEvent], root: str) -> tuple[releases.TrialLook, ...]:
    """Return the looks at users who tried this version, in the order of `events`. A rollback is about the version that it took back."""
    found: list[releases.TrialLook] = []
    lasting = ""
    for event in events:
        reading = mapping(event.detail.get("reading"))
        about = event.previous if event.action == "rolled_back" else event.policy
        if not reading or about is None or about.hash != root:
            continue
        lasting = event.action if event.action in _LASTING else lasting
        found.append(_trial_look(event, reading, lasting))
    return tuple(found)


def _trial_look(event: ReleaseEvent, reading: Mapping[str, Any], lasting: str) -> releases.TrialLook:
    effect = mapping(reading.get("effect"))
    measured = finite(effect.get("variance")) is not None
    goal = releases.MeasureLook(
        name=str(reading.get("metric", GOAL))[:_MAX_CHARACTERS],
        role="goal",
        difference=finite(effect.get("difference")) if measured else None,
        lower=finite(reading.get("lower")),
        upper=finite(reading.get("upper")),
        people=finite(effect.get("people")),
    )
    measures = _measures(mapping(reading.get("metrics")))
    harmed = any(each.role == "guardrail" and each.finding == "worse" for each in measures)
    return releases.TrialLook(
        at=event.at,
        action=event.action,
        share=finite(event.detail.get("share")),
        goal=goal,
        turns=finite(effect.get("turns")) or 0.0,
        sees=finite(reading.get("sees")),
        finding="worse" if harmed else _finding(reading, lasting),
        reason=event.reason,
        measures=measures,
    )


_LASTING = {"better": "better", "confirmed": "better, confirmed", "faded": "better at first"}
"""The finding that holds from each ledger action on. A reading's odds alone are not enough: a new version may please for a day."""


def _finding(reading: Mapping[str, Any], lasting: str) -> str:
    """Return the trial's conclusion. `lasting`: the last such action about candidate and predecessor; "" if none."""
    if not reading.get("enough"):
        return "too few people"
    if reading.get("worse"):
        return "worse"
    if lasting:
        return _LASTING[lasting]
    return "not worse" if reading.get("not_worse") else "undecided"


def _measures(told: Mapping[str, Any]) -> tuple[releases.MeasureLook, ...]:
    found: list[releases.MeasureLook] = []
    for name, each in list(told.items())[:_MAX_ENTRIES]:
        one = mapping(each)
        effect = mapping(one.get("effect")) or one
        found.append(
            releases.MeasureLook(
                name=name[:_MAX_CHARACTERS],
                role=str(one.get("role", ""))[:_MAX_CHARACTERS],
                difference=finite(effect.get("difference", effect.get("estimate"))),
                lower=finite(one.get("lower")),
                upper=finite(one.get("upper")),
                people=finite(effect.get("people", effect.get("n"))),
                better="lower" if one.get("direction") == "lower" else "higher",
                finding=_finding(one, "better" if one.get("better") else "") if one else "",
            )
        )
    return tuple(found)


def _list(value: object) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def carried(event: ReleaseEvent | Alarm) -> Mapping[str, Any]:
    """Return a row's details without raw scores, cut in depth, length and number of entries to what a page can show."""
    return {str(name): _cut(value, 1) for name, value in list(event.detail.items())[:_MAX_ENTRIES] if name not in _RAW}


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).items())
        if depth >= _MAX_DEPTH:
            return f"{len(items)} entries"
        kept = {
            str(name)[:_MAX_CHARACTERS]: _cut(each, depth + 1)
            for name, each in items[:_MAX_ENTRIES]
            if name not in _RAW
        }
        return kept if len(items) <= _MAX_ENTRIES else {**kept, "…": f"{len(items) - _MAX_ENTRIES} more"}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        listed = list(cast("Sequence[Any]", value))
        if depth >= _MAX_DEPTH:
            return f"{len(listed)} entries"
        kept_items = [_cut(each, depth + 1) for each in listed[:_MAX_ENTRIES]]
        return kept_items if len(listed) <= _MAX_ENTRIES else [*kept_items, f"… {len(listed) - _MAX_ENTRIES} more"]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"


# ---------------------------------------------------------------- shifts of behaviour rates


ACCEPTED = "accepted"
_FAMILYWISE_ALPHA = 0.05
Tally = dict[Person, tuple[float, int]]
Rated = Sequence[tuple[str, str, float]]
"""(tenant, user, reward) of rated turns."""


def shifts(
    before: Iterable[Turn], after: Iterable[Turn], rated_before: Rated, rated_after: Rated, off: Iterable[str] = ()
) -> tuple[releases.RateShift, ...]:
    """Return each rate that has a value for some turn on either side; first the share of rated turns that people accepted.

    The bounds hold for all rates together at 95% (Bonferroni). The operator's own rates are left out, because only the release worker may
    run their code.
    """
    rates = {name: rate for name, rate in BUILT_IN.items() if name not in set(off)}
    sides = [_tallies(rates.values(), turns) for turns in (before, after)]
    for side, rated in zip(sides, (rated_before, rated_after), strict=True):
        side[ACCEPTED] = _accepted(rated)
    names = [name for name in (ACCEPTED, *rates) if sides[0].get(name) or sides[1].get(name)]
    confidence = 1.0 - _FAMILYWISE_ALPHA / max(1, len(names))
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


def _shift(name: str, rate: Rate | None, before: Tally, after: Tally, confidence: float) -> releases.RateShift:
    lower = upper = None
    if min(len(before), len(after)) >= 2:
        bounds = clustered_difference(after, before, confidence)
        lower, upper = bounds.lower, bounds.upper
    way = None if lower is None or upper is None else Shift.UP if lower > 0 else Shift.DOWN if upper < 0 else None
    return releases.RateShift(
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
"""At most this many manifests are read for one answer."""


async def sent_between(
    manifests: Manifests, since: PolicyVersion, policy: PolicyVersion
) -> releases.WeightChange | None:
    """Return the deltas that lead from one version to the other; None unless at most `MOST_VERSIONS` of them connect the two."""
    try:
        chain = await _chain(manifests, since, policy)
    except (NotFound, Corrupt):
        return None
    if not chain:
        return None
    whole = any(manifest.kind == "full" for manifest in chain)
    return releases.WeightChange(
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


def _layers(chain: list[Manifest]) -> tuple[releases.LayerChange, ...]:
    took: defaultdict[str, int] = defaultdict(int)
    for manifest in chain:
        for tensor in manifest.tensors:
            took[tensor.name] += sum(chunk.length for chunk in tensor.chunks)
    found: list[releases.LayerChange] = []
    for tensor in chain[0].tensors:
        place = TensorChange(name=tensor.name, elements=tensor.nbytes, changed=took[tensor.name], moved=None)
        found.append(releases.LayerChange(kind=place.kind, layer=place.layer, share=min(1.0, place.share)))
    return tuple(found)


# ---------------------------------------------------------------- sample ratio of the arms


MOST_TURNS = 30_000
"""At most this many turns of a trial are read: the first ones, which have the most newcomers. The test is valid wherever it stops."""
_MAX_LOG_ODDS = 700.0  # exp() of more overflows a float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From `start` in the log on, `share` of the users get the candidate. `shipped`: it is live, and the others keep the old version."""

    start: Cursor
    share: float
    shipped: bool


def stretches(events: Iterable[releases.LedgerEvent], rows: Mapping[str, ReleaseEvent], root: str) -> list[Stretch]:
    """Return the stretches of a version's newest trial, in order; empty if it had none."""
    found: list[Stretch] = []
    for event in sorted(events, key=lambda event: event.seq):
        row = rows.get(event.id)
        share = None if row is None else row.detail.get("share")
        if event.void or event.policy.hash != root or not isinstance(share, int | float):
            continue
        if event.action == "canary":
            found = []
        found.append(Stretch(start=event.seq, share=float(share), shipped=event.action == "shipped"))
    return found if found and not found[0].shipped else []


def dealt(questions: IndexQueries, parts: Sequence[Stretch], root: str) -> releases.Dealt | None:
    """Return the people of a trial; None if there was no trial, nobody came, or its first turns are not in the index yet.

    Raises TooWide, Unavailable.
    """
    if not parts:
        return None
    with questions.open() as db:
        if not _reaches(db, parts[0].start):
            return None
        end = db.execute(
            "SELECT min(seq) FROM events WHERE seq > ?1 AND NOT void AND (action IN ('canary', 'rolled_back') OR "
            "(action = 'shipped' AND hash != ?2) OR (action = 'blocked' AND hash = ?2))",
            (parts[0].start, root),
        ).fetchone()[0]
        # until the candidate's weights are loaded everybody gets live, and nobody is assigned
        first = "SELECT min(seq) FROM turns WHERE seq > ? AND arm = 'canary'"
        answered = db.execute(first, (parts[0].start,)).fetchone()[0]
        since = parts[0].start if parts[0].shipped or answered is None else answered - 1
        rows = db.execute(
            "SELECT arm, min(seq), count(*) FROM (SELECT tenant, user, arm, seq FROM turns WHERE seq > ? AND seq < ? AND dealt AND "
            f"NOT auto AND arm IN ('canary', 'live', 'previous') ORDER BY seq LIMIT {MOST_TURNS}) GROUP BY tenant, user",
            (since, (1 << 62) if end is None else end),
        ).fetchall()
    return counted([(arm, seq) for arm, seq, _ in rows], parts, sum(turns for _, _, turns in rows)) if rows else None


def _reaches(db: Any, place: Cursor) -> bool:
    """Return True if the index has the log's turns from this cursor on."""
    low = db.execute("SELECT value FROM state WHERE name = 'low'").fetchone()
    return low is not None and low[0] <= place


def counted(newcomers: Sequence[tuple[str, Cursor]], parts: Sequence[Stretch], turns: int) -> releases.Dealt:
    """Count how many people came to each side. `newcomers`: (arm, cursor) of each person's first turn."""
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
    return releases.Dealt(
        candidate=sum(each[0] for each in came.values()),
        others=sum(each[1] for each in came.values()),
        expected=expected,
        odds=math.exp(min(balance.log_factor(), _MAX_LOG_ODDS)),
        turns=turns,
        whole=turns < MOST_TURNS,
    )


# ---------------------------------------------------------------- gathering the evidence


FRESH_S = 60.0
"""How long the evidence from turns and weights is cached."""
TURNS = 200
"""How many of a version's newest turns its behaviour is measured on."""
RATED = 2_000
ASKED = 80
"""How many turns of the gate are searched for prompts that both versions answered."""
EXAMPLES = 3
_MAX_CACHED = 64
_OF_PEOPLE = (
    "FROM turns INDEXED BY turns_by_version WHERE version = ? AND NOT auto AND arm IN ('live', 'canary', 'previous')"
)
_MADE = frozenset({"evaluated", "canary", "ramped", "looked", "shipped", "better", "confirmed", "faded", "blocked"})


class EvidenceReader:
    """Gathers the evidence for releases of one run. `pieces` returns the bytes of a token."""

    def __init__(
        self,
        run: Run,
        log: RowLog,
        questions: IndexQueries,
        pieces: Callable[[int], bytes],
        clock: Clock,
        threads: Threads,
    ) -> None:
        self._threads = threads
        self._run, self._log, self._questions, self._pieces, self._clock = run, log, questions, pieces, clock
        self._manifests = Manifests(run.store)
        self._kept: dict[tuple[str, str], tuple[float, releases.ReleaseEvidence]] = {}

    async def evidence(
        self, policy: PolicyVersion, events: Sequence[releases.LedgerEvent], rows: Mapping[str, ReleaseEvent]
    ) -> releases.ReleaseEvidence:
        """Return the evidence for and against a version. `rows`: the ledger rows of `events` that the log still has, oldest first."""
        against = compared_with(policy, events)
        comparisons, bars = last_report(rows.values())
        slow = releases.ReleaseEvidence() if against is None else await self._slow(policy, against)
        parts = stretches(events, rows, policy.hash)
        config = self._run.config.release
        limits, trial = config.trial, trial_looks(rows.values(), policy.hash)
        rules = releases.TrialRules(margin=_allowed(config, trial), alpha=limits.ship_alpha, void_odds=limits.imbalance)
        return replace(
            slow,
            against=against,
            comparisons=comparisons,
            bars=bars,
            trial=trial,
            rules=rules if config.canary or trial else None,
            dealt=await self._threads.ask_index(lambda: dealt(self._questions, parts, policy.hash), None),
            gate_alpha=self._run.config.evaluate.gate.alpha,
        )

    # ------------------------------------------------------------ slow parts

    async def _slow(self, policy: PolicyVersion, against: PolicyVersion) -> releases.ReleaseEvidence:
        key, now = (policy.hash, against.hash), self._clock()
        kept = self._kept.get(key)
        if kept is not None and 0.0 <= now - kept[0] < FRESH_S:
            return kept[1]
        horizon = await self._log.horizon()
        learned = await self._threads.ask_index(lambda: self._learned(against.number, policy.number, horizon), None)
        found = releases.ReleaseEvidence(
            rates=await self._rates(policy, against),
            steps=None if learned is None else learned[0],
            turns=None if learned is None else learned[1],
            weights=await sent_between(self._manifests, against, policy),
            examples=await self._examples(policy, against),
        )
        self._kept[key] = (now, found)
        while len(self._kept) > _MAX_CACHED:
            self._kept.pop(next(iter(self._kept)))
        return found

    async def _rates(self, policy: PolicyVersion, against: PolicyVersion) -> tuple[releases.RateShift, ...]:
        both, ask = (against, policy), self._threads.ask_index
        names = await ask(lambda: [self._users(each.number) for each in both], [[], []])
        rated = await ask(lambda: [self._rated(each.number) for each in both], [[], []])
        before, after = [_made_by(await self._find(each), made) for each, made in zip(names, both, strict=True)]
        off = self._run.config.release.monitors.off
        return await self._threads.ask(lambda: shifts(before, after, rated[0], rated[1], off))

    async def _examples(self, policy: PolicyVersion, against: PolicyVersion) -> tuple[releases.SamePrompt, ...]:
        mine, theirs = await self._threads.ask_index(lambda: self._suite(policy.number, against.number), ([], []))
        after, before = _made_by(await self._find(mine), policy), _made_by(await self._find(theirs), against)
        return tuple(
            releases.SamePrompt(
                prompt=tuple(map(self._pieces, one.prompt_ids)),
                before=other.text,
                after=one.text,
                turn_before=other.id,
                turn_after=one.id,
            )
            for other, one in same_prompts(before, after)
        )

    # ------------------------------------------------------------ queries on the index

    def _learned(self, since: int, upto: int, horizon: Cursor) -> tuple[int, int] | None:
        """Return how many steps and turns lie between two versions (a version's number is its step), without training that was undone.

        None if `upto` is not after `since`, or while the index lacks old rows.
        """
        with self._questions.open() as db:
            if not _reaches(db, horizon) or upto <= since:
                return None
            # a return to an earlier version is a training step only if it has turns; one that replaces unrepeatable steps has none
            sql = "SELECT first, base, EXISTS (SELECT 1 FROM turns WHERE step = first) FROM returns WHERE first <= ?"
            returns = db.execute(sql, (upto,)).fetchall()
            gone = "SELECT 1 FROM returns WHERE base < step AND step < first AND first <= ?2"
            sql = f"SELECT count(*) FROM turns WHERE step > ?1 AND step <= ?2 AND NOT EXISTS ({gone})"
            turns = int(db.execute(sql, (since, upto)).fetchone()[0])
        steps = set(range(since + 1, upto + 1)).difference(
            *(range(base + 1, first if taught else first + 1) for first, base, taught in returns)
        )
        return len(steps), turns

    def _users(self, number: int) -> list[str]:
        found = self._questions.rows(f"SELECT id {_OF_PEOPLE} ORDER BY seq DESC LIMIT {TURNS}", number)
        return [id for (id,) in found]

    def _rated(self, number: int) -> list[tuple[str, str, float]]:
        sql = f"SELECT tenant, user, value {_OF_PEOPLE} AND value IS NOT NULL ORDER BY seq DESC LIMIT {RATED}"
        return self._questions.rows(sql, number)

    def _suite(self, mine: int, theirs: int) -> tuple[list[str], list[str]]:
        """Return the ids of the gate's turns of one version, and those of the other version since the same look."""
        with self._questions.open() as db:
            sql = f"SELECT seq, id FROM turns WHERE version = ? AND arm = 'eval' ORDER BY seq DESC LIMIT {ASKED}"
            found = db.execute(sql, (mine,)).fetchall()
            if not found:
                return [], []
            sql = f"SELECT id FROM turns WHERE version = ? AND arm = 'eval' AND seq >= ? ORDER BY seq LIMIT {2 * ASKED}"
            other = db.execute(sql, (theirs, found[-1][0])).fetchall()
        return [id for _, id in found], [id for (id,) in other]

    async def _find(self, names: Iterable[str]) -> list[Turn]:
        identities = [(name,) for name in names]
        return await self._log.find(Turn, identities) if identities else []


def _allowed(config: ReleaseConfig, looks: Sequence[releases.TrialLook]) -> float:
    """Return the loss, as a share, that the measure of the last look may show: its own tolerance, or the trial's margin."""
    own = {metric.name: metric.allowed for metric in metrics_of(config.metrics, config.trial.margin)}
    return own.get(looks[-1].goal.name, config.trial.margin) if looks else config.trial.margin


def compared_with(policy: PolicyVersion, events: Iterable[releases.LedgerEvent]) -> PolicyVersion | None:
    """Return the version against which this one was last judged, or which it replaced; None for the first release."""
    newest = sorted(events, key=lambda event: -event.seq)
    found = (event.previous for event in newest if event.policy == policy and event.action in _MADE)
    return next((each for each in found if each is not None and each != policy), None)


def same_prompts(before: Iterable[Turn], after: Iterable[Turn]) -> list[tuple[Turn, Turn]]:
    """Return pairs of turns with the same prompt, in the order of a hash of the prompt: random, but stable between looks."""
    theirs: dict[tuple[int, ...], Turn] = {}
    for turn in before:
        theirs.setdefault(tuple(turn.prompt_ids), turn)
    found: dict[str, tuple[Turn, Turn]] = {}
    for turn in after:
        other = theirs.get(tuple(turn.prompt_ids))
        if other is not None and not (turn.redacted or other.redacted):
            drawn = hashlib.sha256(repr(tuple(turn.prompt_ids)).encode()).hexdigest()
            found.setdefault(drawn, (other, turn))
    return [found[drawn] for drawn in sorted(found)[:EXAMPLES]]


def _made_by(turns: Iterable[Turn], policy: PolicyVersion) -> list[Turn]:
    """Return the turns that this version alone sampled. After training went back, one number may stand for two versions."""
    return [turn for turn in turns if {span.policy for span in turn.spans} == {policy}]
