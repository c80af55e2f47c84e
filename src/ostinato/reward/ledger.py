"""What the log says about every turn: a fold over its rows, in order, that a restart repeats exactly.

Two things are kept apart. A turn's *reward* is what people thought of it. Its *outcome* is what became of it: trained on, or
held back for a recorded reason. Every turn that was served to a person and ended by the policy gets a reward row, or a quarantine
row that says why not. This includes the control arm, because releases are judged by it; a turn that was cut short or drawn by an
evaluation gets neither. Every turn gets exactly one outcome, and until then it is waiting.

Nothing here reads a clock or the log: the rows alone decide. Only the open turns are held in memory, and of the others as many ids
as the config allows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.core.errors import Corrupt
from ostinato.core.notices import Alarm, Forgotten
from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    Delivered,
    Finish,
    Holdback,
    Person,
    Purpose,
    Quarantine,
    Reward,
    RewardReach,
    Row,
    Signal,
    Source,
    Turn,
)
from ostinato.core.samples import EpisodeKey, LaterReturns, call_of
from ostinato.core.seams import Cursor
from ostinato.core.staleness import Lineage
from ostinato.core.verdicts import CLOSED, LATE, LATE_REWARD, LATE_REWARD_FAILED, late_id
from ostinato.reward.alarms import COVERAGE, FAILURES, LATE_FUNCTION, REMEDIES, Alarms
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import EpisodeReturns, TurnReturn, episode_returns
from ostinato.reward.ledger_entries import (
    TEACHING_ARMS,
    Fate,
    Gold,
    Matured,
    OpenTurn,
    PeopleWithTurns,
    Rollout,
    Said,
    Settled,
    TurnFacts,
    Unit,
    count_reason,
    matured_turns,
    needs_reward,
    nobody,
    said_bytes,
)
from ostinato.reward.recent_shares import RecentShares, masses_of, scales_of
from ostinato.reward.response_propensity import ResponsePropensity
from ostinato.reward.surrogate import Surrogate

# ---------------------------------------------------------------- baseline updates


class Teaching:
    """Teaches the baseline in the order of the log.

    Turns with a reward that were held back teach it too: stale ones, and those that found no batch, say what to expect as well as those
    that were trained on, and where a trainer is slow they are most of what people say. Turns whose rewards did not differ show the level
    of rewards: a baseline that saw only batches with contrast would expect too little once all turns are praised.

    Nobody is taught by what an action led to before that action has been learned from: a turn that was held back while an earlier one of
    its episode is undecided does not teach, and of what came after a part of an episode the baseline is taught what it expected itself.
    Taught 0, it would expect too little of every session; taught what is known, it would already expect how the next part ends.
    `undecided` gives, by unit, the place in the log of the first such turn; `after`, what came of episodes that go on behind these turns,
    up to a place in the log.
    """

    def __init__(
        self,
        baseline: Baseline,
        discount: float,
        undecided: Callable[[], Mapping[Unit, Cursor]],
        after: Callable[[Sequence[Matured], Cursor], Mapping[EpisodeKey, LaterReturns]],
    ) -> None:
        self._baseline = baseline
        self._discount = discount
        self._undecided, self._after = undecided, after
        self._held: list[Matured] = []
        self._held_at: float | None = None  # the time that their rows share
        # the place of the last of these rows: what they teach must not depend on when they are learned from
        self._held_upto: Cursor = 0

    def batch(self, entries: Sequence[Matured], after: Mapping[EpisodeKey, LaterReturns]) -> None:
        """Learn from the turns of a batch, oldest first, with what its row says that came `after` them."""
        self.catch_up()
        self._observe(entries, after)

    def begin(self, row: Holdback) -> None:
        """Before a row is taken in: learn from the turns that were held back before, unless this one is held back together with them."""
        if self._held_at != row.at:
            self.catch_up()
            self._held_at = row.at

    def held(self, seq: Cursor, entry: Matured) -> None:
        """Add one of the turns that are held back together, by the row at `seq`."""
        self._held.append(entry)
        self._held_upto = seq

    def catch_up(self) -> None:
        """Learn from the turns that were held back last. Call before using the baseline."""
        entries, self._held, self._held_at = self._held, [], None
        first = self._undecided() if entries else {}
        decided = [entry for entry in entries if entry.facts.seq <= first.get(entry.facts.unit, entry.facts.seq)]
        self._observe(decided, self._after(decided, self._held_upto))

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Drop what waits to be learned from of these people."""
        self._held = [entry for entry in self._held if not gone(entry.facts.person)]

    def snapshot(self) -> dict[str, Any]:
        """The turns that the baseline has not learned from yet, as JSON's types."""
        return {
            "held": matured_turns.dump_python(self._held, mode="json"),
            "at": self._held_at,
            "upto": self._held_upto,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._held = matured_turns.validate_python(state["held"])
        self._held_at = None if state["at"] is None else float(state["at"])
        self._held_upto = int(state["upto"])

    def _observe(self, entries: Sequence[Matured], after: Mapping[EpisodeKey, LaterReturns]) -> None:
        reached = returns_of(entries, self._discount, {key: later.unknown for key, later in after.items()})
        for entry in entries:
            found = reached[entry.facts.id]
            self._baseline.observe(entry.facts.context, found.total, entry.facts.sampled, found.outcomes)


def returns_of(
    entries: Sequence[Matured], discount: float, after: Mapping[EpisodeKey, LaterReturns]
) -> dict[str, TurnReturn]:
    """The return of each turn, by id, within these turns, oldest first, and what came `after` them."""
    episodes: dict[EpisodeKey, list[Matured]] = defaultdict(list)
    for entry in entries:
        episodes[entry.episode].append(entry)
    return {
        entry.facts.id: value
        for key, members in episodes.items()
        for entry, value in zip(members, _returns(members, discount, after.get(key)).turns, strict=True)
    }


def _returns(members: Sequence[Matured], discount: float, after: LaterReturns | None) -> EpisodeReturns:
    return episode_returns(
        [member.facts.id for member in members],
        [(member.value, *member.lines) for member in members],
        discount,
        outcomes={member.facts.id for member in members if member.reach is RewardReach.EPISODE},
        after=after,
    )


# ---------------------------------------------------------------- the ledger


KINDS: set[type] = {Turn, Delivered, Signal, Reward, Quarantine, Holdback, Batch, Alarm, ConsentGiven, Forgotten}
NO_SIGNAL, TOO_FEW, TOO_LONG, UNTAKEN, FLAT = "no_signal", "too_few", "too_long", "untaken", "flat"
PASSED_OVER = "passed_over"
WHOLE = frozenset({NO_SIGNAL, TOO_FEW, TOO_LONG, UNTAKEN, FLAT, PASSED_OVER})  # holdbacks of whole units
STALE, STALE_TURN = "stale", "stale_turn"  # the latter: of a rollout that goes on without it
TEACHING = frozenset({NO_SIGNAL, TOO_FEW, TOO_LONG, UNTAKEN, PASSED_OVER, STALE})  # held back, they teach the baseline
UNDELIVERED, GONE = "undelivered", "gone"  # quarantines of turns about which nobody can have said anything
GROUPS = 10_000  # groups with an outcome that are remembered, so that none is split
LATE_GROUP = "late_group"
GOLD, HELD_OUT, WITHDRAWN, SECRET = "gold", "held_out", "consent:withdrawn", "secret"
CONTROL = f"arm:{Arm.CONTROL}"
FORGOTTEN, SIDE = "forgotten", f"purpose:{Purpose.SIDE}"
_ALONE = 10_000  # turns held back alone that are remembered, with what their sessions came to unknown from there on


def kind_of(reason: str) -> str:
    """The kind under which a reason is counted. Example: ``kind_of("no_signal: all 4 rewards are 0") == "no_signal"``"""
    return reason.partition(": ")[0]


class TurnLedger:
    """The open turns and the baseline after the rows seen so far. `apply` rows in the order of the log.

    `start` is the place in the log that the fold began after; above 0, rows may be about turns that it never saw. The turns of `gold`
    people get a reward and are held back as ``gold``, those of another arm than `arms` as ``arm:<x>``. A mere reader of a desk's rows
    need not know either.
    """

    def __init__(
        self,
        config: RewardConfig,
        start: Cursor = 0,
        gold: Gold = nobody,
        arms: Collection[Arm] = TEACHING_ARMS,
    ) -> None:
        self.config = config
        self.start = start
        self._gold, self._arms = gold, arms
        self.baseline = Baseline(config.baseline)
        self.teaching = Teaching(self.baseline, config.discount, self._undecided, self.later_returns)
        self.recent = RecentShares(config.user_steps)
        self.propensity = ResponsePropensity(config.propensity_cap)
        self.surrogate = Surrogate(config.surrogate, config.user_cap, config.longest_wait_s)
        self.passed_over: list[tuple[Person, str]] = []  # by the next batch, which was drawn from more turns
        self.lineage = Lineage()
        self.last_step = 0
        self.last_batch: Batch | None = None  # None also after a start from a snapshot, where only its step is known
        self.open: dict[str, OpenTurn] = {}  # reward due, not yet in the log
        self.touched: dict[str, None] = {}  # open turns with news since they were last asked about
        self.matured: dict[str, Matured] = {}  # reward known, outcome open
        self.to_hold: dict[str, str] = {}  # turn -> reason: outcome due, not yet in the log
        self.doubted: dict[str, Matured] = {}  # of these, with a reward: a batch may have taken them
        self.groups: OrderedDict[Unit, None] = OrderedDict()
        self.closed: dict[Unit, None] = {}  # groups whose rollouts have all ended, and which have no outcome yet
        self.alone: OrderedDict[str, TurnFacts] = OrderedDict()  # turns held back without the rest of their sessions
        self.refusing: dict[Person, None] = {}  # people who do not want their turns to be learned from any more
        self._people = PeopleWithTurns(lambda: [*(each.person for each in self._kept()), *self.surrogate.people()])
        self.settled = Settled(config.remember)
        self.orphans = PendingSignals[Said](
            most=config.max_orphans, seconds=config.orphan_s, most_bytes=config.orphan_bytes, size=said_bytes
        )
        self.alarms = Alarms(config.coverage, start)
        self.counts: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self.rollout_turns: dict[Unit, Counter[str]] = {}  # so far, by episode, of the groups without an outcome
        self._open_in: dict[Unit, dict[Cursor, str]] = {}  # trainable open turns

    def apply(self, seq: Cursor, row: Row) -> None:
        """Take in one row. Raises Corrupt if the log contradicts itself: a turn trained on twice, or without a reward."""
        match row:
            case Turn():
                self._turn(seq, row)
            case Delivered():
                self._delivered(row)
            case Signal():
                self._signal(seq, row)
            case Reward() | Quarantine():
                self._decided(seq, row)
            case Holdback():
                self._holdback(seq, row)
            case Batch():
                self._batch(row)
            case Alarm():
                self._alarm(row)
            case ConsentGiven():
                self._chosen(row)
            case Forgotten():
                self._forget(row)
            case _:
                pass

    def _alarm(self, row: Alarm) -> None:
        self.alarms.apply(row)
        if row.name.startswith(COVERAGE):
            self.surrogate.outage(row.name.removeprefix(COVERAGE), row.at)

    def count_step(self, batch: Batch) -> None:
        """Take in the number of a step and the version that it started from, and nothing of its turns."""
        if batch.base is not None:
            self.lineage = Lineage(first=batch.step, base=batch.base.number)
        self.last_batch, self.last_step = batch, batch.step

    def first_open(self, unit: Unit) -> Cursor | None:
        """The place in the log of a unit's first turn that waits for its reward and may be learned from; None if none does."""
        return next(iter(self._open_in.get(unit, ())), None)

    def later_returns(self, entries: Sequence[Matured], upto: Cursor | None = None) -> dict[EpisodeKey, LaterReturns]:
        """What came of the episodes that go on behind these turns, given oldest first: the return of the turns behind that are decided, and
        of the first whose reward is not known what the baseline expects. A turn that was held back alone, by its consent or as secret,
        counts as one whose reward is not known: nothing may be learned from it, but its session did not end there. Turns beyond `upto`
        are left out; None: none is.

        Other choices of an episode's last call here do not follow it. Groups are never cut.
        """
        last = {entry.facts.unit: entry for entry in entries if entry.facts.unit[0] == "episode"}
        rest: dict[Unit, list[Matured]] = {unit: [] for unit in last}
        for entry in self.matured.values() if last else ():
            if (end := last.get(entry.facts.unit)) is not None and _follows(entry.facts, end.facts, upto):
                rest[entry.facts.unit].append(entry)
        alone: dict[Unit, list[TurnFacts]] = {unit: [] for unit in last}
        for facts in self.alone.values() if last else ():
            if facts.unit in alone:
                alone[facts.unit].append(facts)
        found: dict[EpisodeKey, LaterReturns] = {}
        for unit, end in last.items():
            behind = [*(self.open[turn].facts for turn in self._open_in.get(unit, {}).values()), *alone[unit]]
            waiting = [facts for facts in behind if _follows(facts, end.facts, upto)]
            first = min(waiting, key=lambda facts: facts.seq, default=None)
            decided = sorted(rest[unit], key=lambda entry: entry.facts.seq)
            if first is not None:
                decided = [entry for entry in decided if entry.facts.seq < first.seq]
            if decided or first:
                found[end.episode] = self._later_return(decided, first)
        return found

    def _later_return(self, rest: Sequence[Matured], first: TurnFacts | None) -> LaterReturns:
        """The return at the first of `rest`, or of `first`, the turn behind these whose reward is not known, if there is any."""
        discount = self.config.discount
        unknown = LaterReturns() if first is None else self._expected(first)
        if not rest:
            return unknown
        known = _returns(rest, discount, None).first
        expected = self._expected(rest[0].facts)
        return (_returns(rest, discount, unknown).first if first else known)._replace(
            decided=known.total, expected=expected.expected, expected_outcome=expected.expected_outcome
        )

    def _expected(self, facts: TurnFacts) -> LaterReturns:
        """What the baseline expects of a turn and those that follow it, no more than the largest reward of one."""
        most = self.config.max_abs
        total, outcome = self.baseline.predict(facts.context), self.baseline.predict_outcome(facts.context)
        total, outcome = min(most, max(-most, total)), min(most, max(-most, outcome))
        return LaterReturns(expected=total - outcome, expected_outcome=outcome).unknown

    def rollout_ends(self) -> dict[Rollout, Cursor]:
        """The place of the last turn of each rollout of a world that has turns without an outcome."""
        ends: dict[Rollout, Cursor] = {}
        for facts in [entry.facts for entry in (*self.matured.values(), *self.open.values())]:
            if facts.unit[0] == "world":
                ends[facts.unit, facts.episode] = max(facts.seq, ends.get((facts.unit, facts.episode), 0))
        return ends

    @property
    def learnable(self) -> int:
        """The number of people's turns that may yet be trained on."""
        open_ = sum(len(places) for unit, places in self._open_in.items() if unit[0] != "world")
        return open_ + sum(not entry.facts.world for entry in self.matured.values())

    def _undecided(self) -> dict[Unit, Cursor]:
        """By unit, the place in the log of the first turn that may yet be learned from."""
        first = {unit: min(places) for unit, places in self._open_in.items()}
        for entry in self.matured.values():
            unit, place = entry.facts.unit, entry.facts.seq
            first[unit] = min(place, first.get(unit, place))
        return first

    def watch(self, facts: TurnFacts) -> None:
        """Count an open turn into its unit."""
        if facts.hold is None:
            self._open_in.setdefault(facts.unit, {})[facts.seq] = facts.id

    # ------------------------------------------------------------ turns and what is said about them

    def _turn(self, seq: Cursor, turn: Turn) -> None:
        self.orphans.advance(turn.ended_at)
        self.counts["ingested"] += 1
        if turn.window is not None and turn.window.begins_with is not None:
            self._summary(turn.window.begins_with, turn)
        facts = self._admitted(TurnFacts.of(seq, turn, self.config, self._arms))
        if facts.hold is not None:
            self.to_hold[turn.id] = facts.hold
            self._hold_alone(facts, facts.hold)
        said, most = self.orphans.claim(turn.tenant, turn.id), self.config.max_signals
        if needs_reward(turn):
            self.counts["excess"] += len(said[most:])
            received = turn.finish is Finish.LEFT  # as much of it as its client took
            self.open[turn.id] = OpenTurn(facts=facts, said=said[:most], delivered=received)
            self._people.add(facts.person)
            self.touched[turn.id] = None
            self.watch(facts)
        else:
            self.counts["moot"] += len(said)
            self.settled.put(turn.id, turn.tenant, Fate.MOOT)

    def _admitted(self, facts: TurnFacts) -> TurnFacts:
        """The facts of a turn that came; `hold` is set if earlier rows say why it will not be learned from."""
        if facts.hold is not None:
            return facts
        if facts.unit in self.groups or facts.unit in self.closed:
            return replace(facts, hold=LATE_GROUP)
        if not facts.world and facts.person in self.refusing:
            return replace(facts, hold=WITHDRAWN)
        if self._gold(facts.tenant, facts.user):
            return replace(facts, hold=GOLD)
        if facts.unit[0] != "world":
            return facts
        numbers = self.rollout_turns.setdefault(facts.unit, Counter())
        numbers[facts.episode] += 1
        if len(self.rollout_turns) > GROUPS:  # the longest without an outcome
            del self.rollout_turns[next(iter(self.rollout_turns))]
        return replace(facts, number=numbers[facts.episode])

    def _summary(self, turn_id: str, later: Turn) -> None:
        """A side call with which a window of its episode begins was a compaction, and is learned from as such."""
        entry = self.open.get(turn_id)
        if entry is None or self.to_hold.get(turn_id) != SIDE:
            return
        if (entry.facts.tenant, entry.facts.episode) != (later.tenant, later.episode):
            return
        del self.to_hold[turn_id]
        taken = Purpose.COMPACTION in self.config.purposes
        hold = None if taken else f"purpose:{Purpose.COMPACTION}"
        entry.facts = self._admitted(replace(entry.facts, hold=hold))
        if entry.facts.hold is not None:
            self.to_hold[turn_id] = entry.facts.hold
            self._hold_alone(entry.facts, entry.facts.hold)
        self.watch(entry.facts)
        if (places := self._open_in.get(entry.facts.unit)) is not None:
            self._open_in[entry.facts.unit] = dict(sorted(places.items()))  # it is older than others that are known

    def side_calls(self) -> dict[str, TurnFacts]:
        """Side calls that are not held back before their reward is due, since a window may yet begin with one."""
        return {turn: self.open[turn].facts for turn, why in self.to_hold.items() if why == SIDE and turn in self.open}

    def _hold_alone(self, facts: TurnFacts | None, reason: str) -> None:
        """Remember a turn that its session goes on without."""
        alone = reason in (SECRET, FORGOTTEN) or reason.startswith("consent:")
        if alone and facts is not None and facts.unit[0] == "episode":
            self.alone[facts.id] = facts
            if len(self.alone) > _ALONE:
                self.alone.popitem(last=False)

    def _kept(self) -> list[TurnFacts]:
        """The turns whose reward or outcome is open."""
        return [each.facts for each in (*self.open.values(), *self.matured.values(), *self.doubted.values())]

    def _chosen(self, row: ConsentGiven) -> None:
        """Hold back all that was not learned from yet of a person who takes the consent back."""
        if row.level is Consent.YES:
            self.refusing.pop(row.person, None)
            return
        self.refusing[row.person] = None
        if row.person not in self._people:
            return
        self.surrogate.forget(lambda person: person == row.person)
        for facts in self._kept():
            waits = facts.hold is None or self.to_hold.get(facts.id) == SIDE
            if waits and not facts.world and facts.person == row.person:
                self.to_hold[facts.id] = WITHDRAWN

    def _forget(self, row: Forgotten) -> None:
        """Drop what is kept under somebody's name, and hold back all that was not learned from yet. Credit that was given stays; from now
        on the others are compared, and share batches, without them. Their choice of consent outlives it.
        """
        self.baseline.forget(row.covers)
        self.teaching.forget(row.covers)
        self.recent.forget(row.covers)
        self.surrogate.forget(row.covers)
        self.alone = OrderedDict(
            (turn, facts.unnamed() if row.covers(facts.person) else facts) for turn, facts in self.alone.items()
        )
        self.passed_over = [
            (((person[0], "") if row.covers(person) else person), episode) for person, episode in self.passed_over
        ]
        for facts in self._kept():
            if facts.world or not row.covers(facts.person):
                continue
            if facts.hold is None or self.to_hold.get(facts.id) == SIDE:
                self.to_hold[facts.id] = FORGOTTEN
            if facts.id in self.open:
                self.open[facts.id].facts = replace(facts.unnamed(), hold=facts.hold and FORGOTTEN)
            else:
                rewarded = self.matured if facts.id in self.matured else self.doubted
                rewarded[facts.id] = replace(rewarded[facts.id], facts=facts.unnamed())

    def _delivered(self, row: Delivered) -> None:
        self.orphans.advance(row.at)
        for turn_id in row.turns:
            entry = self.open.get(turn_id)
            if entry is not None and not entry.delivered:
                entry.delivered = True
                self.touched[turn_id] = None

    def _signal(self, seq: Cursor, signal: Signal) -> None:
        self.orphans.advance(signal.received_at)
        if signal.name in LATE and signal.source is Source.CODE and signal.id == late_id(signal.turn):
            awaited = self.surrogate.learn(signal)
            if awaited and signal.name == LATE_REWARD_FAILED:
                why = f"{signal.turn}: its late reward (reward.surrogate); the trainer's log says why"
                self.alarms.failed(why, LATE_FUNCTION)
            elif awaited and signal.name == LATE_REWARD:
                self.alarms.answered(LATE_FUNCTION)
            return
        entry = self.open.get(signal.turn)
        if entry is None:
            self._signal_about_no_open_turn(seq, signal)
        elif signal.tenant != entry.facts.tenant:
            self.counts["foreign"] += 1
        elif len(entry.said) >= self.config.max_signals:
            self.counts["excess"] += 1
        else:
            entry.said.append((seq, signal.id, signal.retracts, signal.name))
            self.touched[signal.turn] = None
            self._close(entry.facts.unit, signal)

    def _close(self, unit: Unit, signal: Signal) -> None:
        """When all rollouts of a group have ended, those of its turns that still have no verdict are asked about for the last time."""
        if unit[0] != "world" or signal.name != CLOSED or signal.source is not Source.CODE:
            return
        if unit not in self.groups:
            self.closed[unit] = None
            if len(self.closed) > GROUPS:  # the longest without an outcome: its turns may all be lost
                del self.closed[next(iter(self.closed))]
        self.touched |= dict.fromkeys(self._open_in.get(unit, {}).values())

    def _signal_about_no_open_turn(self, seq: Cursor, signal: Signal) -> None:
        said = (seq, signal.id, signal.retracts, signal.name)
        self.surrogate.hear(signal.tenant, signal.turn, said, self.config.max_signals)
        matured = self.matured.get(signal.turn)
        known = (matured.facts.tenant, Fate.DECIDED) if matured else self.settled.get(signal.turn)
        if known is None:
            self.orphans.add(signal.tenant, signal.turn, said)
        elif known[0] != signal.tenant:
            self.counts["foreign"] += 1
        elif known[1] is Fate.MOOT:
            self.counts["moot"] += 1
        elif matured is not None and signal.name == CLOSED:
            self._close(matured.facts.unit, signal)
        else:
            self._late(matured, signal.retracts, trained=known[1] is Fate.TRAINED)

    def _late(self, matured: Matured | None, retracts: str | None, *, trained: bool = False) -> None:
        """Count a signal that came after its turn was decided. If it retracts a signal that the reward of a turn not yet trained on
        rests on, the turn is held back.
        """
        self.counts["late"] += 1
        self.counts["retracted"] += trained and retracts is not None
        if matured is not None and retracts in matured.signals:
            self.to_hold[matured.facts.id] = "retracted"

    # ------------------------------------------------------------ what was decided

    def _decided(self, seq: Cursor, row: Reward | Quarantine) -> None:
        """The first row about a turn decides; a later one, from another desk, is ignored."""
        entry = self.open.pop(row.turn, None)
        self.touched.pop(row.turn, None)
        if entry is None:
            return
        facts, upto = entry.facts, row.upto or seq
        heard = any(said[0] <= upto for said in entry.said)
        names = {name for place, _, retracts, name in entry.said if place <= upto and retracts is None}
        self._forget_open(facts)
        self.settled.put(facts.id, facts.tenant, Fate.DECIDED)
        hold, matured = (
            self._rewarded(row, facts, heard) if isinstance(row, Reward) else (self._quarantined(row, facts), None)
        )
        if kind_of(hold or "") not in (UNDELIVERED, GONE) and not facts.world:
            self.alarms.decided(facts.tenant, heard=heard, names=names)
            if facts.hold is None and facts.id not in self.to_hold:  # others' silence must not weigh turns that teach
                self.propensity.see(facts.tenant, facts.sampled, row)
        learnable = facts.hold is None and hold is None
        if facts.hold is None and hold is not None:
            self.to_hold[facts.id] = hold
        if matured is not None and (learnable or facts.id in self.to_hold):
            (self.matured if learnable else self.doubted)[facts.id] = matured
        if isinstance(row, Reward) and row.early and hold is None:
            self._follow(entry, row)
        for _, _, retracts, _ in (said for said in entry.said if said[0] > upto):
            self._late(self.matured.get(facts.id), retracts)

    def _rewarded(self, row: Reward, facts: TurnFacts, heard: bool) -> tuple[str | None, Matured]:
        self.counts["rewarded"] += 1
        self.alarms.answered()
        # bounded, whatever `at` says
        since = min(max(row.at, facts.ended_at), facts.ended_at + self.config.longest_wait_s)
        matured = Matured(
            facts=facts,
            value=row.value,
            silent=not heard,
            signals=row.signals,
            since=since,
            lines=row.line_mean,
            spread=row.line_variance,
            reach=row.reach,
        )
        return self._unbelievable(row), matured

    def _follow(self, entry: OpenTurn, row: Reward) -> None:
        """Wait for a turn's late reward, unless its feedback must not teach or is lost: predictions are learned from."""
        facts, control = entry.facts, entry.facts.hold == CONTROL
        silent = (
            facts.person in self.refusing or self._gold(facts.tenant, facts.user) or self.alarms.silenced(facts.tenant)
        )
        if not silent and (control or (facts.hold is None and facts.id not in self.to_hold)):
            self.surrogate.follow(facts, entry.said, row, control=control)

    def _quarantined(self, row: Quarantine, facts: TurnFacts) -> str:
        self.orphans.advance(row.at)
        self.surrogate.expire(row.at)
        count_reason(self.quarantined, kind_of(row.reason))
        if row.reason.startswith(FAILURES):
            self.alarms.failed(f"{facts.id}: {row.reason}")
        return row.reason

    def _unbelievable(self, reward: Reward) -> str | None:
        """Why a reward that was written under a wider bound is not learned from; None if it is within the present bound."""
        if abs(reward.value) <= self.config.max_abs:
            return None
        return f"reward_nonsense: {reward.value:g} is beyond reward.max_abs"

    def _holdback(self, seq: Cursor, row: Holdback) -> None:
        self.orphans.advance(row.at)
        self.surrogate.expire(row.at)
        if teaches := row.reason.partition(":")[0] in TEACHING:
            self.teaching.begin(row)
        doubted, due = self.doubted.pop(row.turn, None), self.to_hold.pop(row.turn, None)
        matured = self.matured.pop(row.turn, None) or (doubted if teaches else None)  # earlier settings let it teach
        entry = self.open.get(row.turn)
        if entry is not None and entry.facts.hold is None:
            self._forget_open(entry.facts)
            entry.facts = replace(entry.facts, hold=row.reason)
            due = row.reason
        if matured is None and due is None:
            return  # about a turn from before this fold
        count_reason(self.held, kind_of(row.reason))
        decided = matured or entry
        self._hold_alone(decided and decided.facts, row.reason)
        if decided is not None and not decided.facts.world and (cause := row.reason.partition(":")[0]) in REMEDIES:
            self.alarms.use.see(cause)
        if matured is not None:
            self.settled.put(row.turn, matured.facts.tenant, Fate.HELD)
            if row.reason.startswith(f"{STALE_TURN}:"):
                self._count_tokens("stale", matured.facts)
            elif kind_of(row.reason) in WHOLE or (matured.facts.world and row.reason != GONE):
                self._close_group(matured.facts)
            if teaches and not matured.facts.world:
                self.teaching.held(seq, matured)
            if kind_of(row.reason) == PASSED_OVER:
                self.passed_over.append(matured.facts.source)

    def _batch(self, batch: Batch) -> None:
        self.orphans.advance(batch.at)
        self.surrogate.expire(batch.at)
        self.teaching.catch_up()  # while what follows the turns that were held back is still here, as a desk does before it gives credit
        taken = [self._taken(batch, turn_id) for turn_id in batch.turns]
        taught = [entry for entry in taken if entry is not None]
        people = [entry for entry in taught if not entry.facts.world]
        behind = dict(zip(batch.turns, batch.after, strict=bool(batch.after)))
        after = {entry.episode: LaterReturns(*values) for entry in people if (values := behind.get(entry.facts.id))}
        self.teaching.batch(people, after)
        drawn_from = [entry.facts.source for entry in people] + self.passed_over
        self.passed_over = []
        masses = masses_of(drawn_from, even=batch.even)
        self.recent.observe(masses, scales_of(masses, self.recent, self.config))
        for entry in taught:
            self.counts["trained"] += 1
            if entry.facts.world:
                self._count_tokens("taken", entry.facts)
            else:
                self.alarms.use.see("trained")
            self.to_hold.pop(entry.facts.id, None)
            self.settled.put(entry.facts.id, entry.facts.tenant, Fate.TRAINED)
            self._close_group(entry.facts)
        self.count_step(batch)

    def _taken(self, batch: Batch, turn_id: str) -> Matured | None:
        """The entry of a turn that a batch takes; None for a turn from before this fold. Raises Corrupt."""
        if entry := self.matured.pop(turn_id, None) or self.doubted.pop(turn_id, None):
            return entry
        known = self.settled.get(turn_id)
        if turn_id in self.open or known is not None or not (self.start or self.settled.forgot):
            state = "without a reward" if known is None else known[1].value
            raise Corrupt(f"the log's batch {batch.step} holds turn {turn_id}, which is {state}; restore the log")
        return None

    def _close_group(self, facts: TurnFacts) -> None:
        """Close the turn's group: members that are still to come are too late."""
        if facts.group is not None:
            self.groups[facts.unit] = None
            self.rollout_turns.pop(facts.unit, None)
            self.closed.pop(facts.unit, None)
            if len(self.groups) > GROUPS:
                self.groups.popitem(last=False)

    def _count_tokens(self, what: str, facts: TurnFacts) -> None:
        """Count the sampled tokens of a rollout's turn by the band of its number: 1 to 4, 5 to 16, 17 to 64, ..."""
        high = 4
        while facts.number > high:
            high *= 4
        self.counts[f"{what} tokens of turns {high // 4 + 1 if high > 4 else 1}-{high}"] += facts.sampled

    def _forget_open(self, facts: TurnFacts) -> None:
        places = self._open_in.get(facts.unit)
        if places is not None:
            places.pop(facts.seq, None)
            if not places:
                del self._open_in[facts.unit]


def _follows(facts: TurnFacts, end: TurnFacts, upto: Cursor | None) -> bool:
    """True if a turn of an episode comes after a call of it, and not beyond `upto`."""
    return end.seq < facts.seq and call_of(facts.id) != call_of(end.id) and (upto is None or facts.seq <= upto)
