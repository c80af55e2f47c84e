"""Turn ledger: the state of every turn, as a deterministic fold of the log that a restart reproduces exactly.

A turn has two separate results. Its *reward* is how good it was by people's feedback. Its *outcome* is what became of it: trained on, or
held back for a recorded reason. Every turn that was served to a person and ended by the policy gets a reward row, or a quarantine
row with the reason why it has none. This includes the control arm, because releases are judged by it; a turn that was cut short or sampled
by an evaluation gets neither. Every turn gets exactly one outcome, and until then it is waiting.

Nothing here reads a clock or the log: the rows alone determine the state. Only the open turns are held in memory; of the others, as many
ids as the config allows.
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
    DecidedTurns,
    Fate,
    Gold,
    Matured,
    OpenTurn,
    PeopleWithTurns,
    Rollout,
    SignalRef,
    TurnFacts,
    Unit,
    count_reason,
    matured_turns,
    needs_reward,
    no_gold,
    signal_ref_bytes,
)
from ostinato.reward.recent_shares import RecentShares, masses_of, scales_of
from ostinato.reward.response_propensity import ResponsePropensity
from ostinato.reward.surrogate import Surrogate

# ---------------------------------------------------------------- baseline updates


class BaselineUpdates:
    """Trains the baseline in the order of the log.

    Turns that have a reward but were held back train it too. Stale turns, and those that fitted into no batch, are as informative about
    expected rewards as turns that were trained on, and with a slow trainer they are most of the feedback. Turns whose rewards did not
    differ show the level of rewards: a baseline that saw only batches with contrast would expect too little once all turns are praised.

    The baseline never learns what an action led to before that action itself has been learned from. So a turn held back while an earlier
    turn of its episode is undecided is skipped, and where an episode continues after a part, the baseline's own prediction stands for the
    rest (bootstrapping). With 0 it would expect too little of every session; with the true rest, it would know how the next part ends.

    `undecided` gives, by unit, the place of the first undecided turn in the log. `after` is `TurnLedger.later_returns`.
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
        self._pending: list[Matured] = []
        self._pending_at: float | None = None  # the time of their rows, which they share
        # the place of the last of these rows: what they teach must not depend on when they are processed
        self._pending_upto: Cursor = 0

    def batch(self, entries: Sequence[Matured], after: Mapping[EpisodeKey, LaterReturns]) -> None:
        """Train on the turns of a batch, oldest first. `after`: the returns after them that the batch's row records."""
        self.catch_up()
        self._observe(entries, after)

    def begin(self, row: Holdback) -> None:
        """Prepare for a holdback row: train on the turns held back before, unless this row was written together with theirs."""
        if self._pending_at != row.at:
            self.catch_up()
            self._pending_at = row.at

    def held(self, seq: Cursor, entry: Matured) -> None:
        """Add a turn that the row at `seq` holds back."""
        self._pending.append(entry)
        self._pending_upto = seq

    def catch_up(self) -> None:
        """Train on the turns that were held back last. Call before using the baseline."""
        entries, self._pending, self._pending_at = self._pending, [], None
        first = self._undecided() if entries else {}
        decided = [entry for entry in entries if entry.facts.seq <= first.get(entry.facts.unit, entry.facts.seq)]
        self._observe(decided, self._after(decided, self._pending_upto))

    def forget(self, gone: Callable[[Person], bool]) -> None:
        """Drop these people's turns that the baseline has not been trained on yet."""
        self._pending = [entry for entry in self._pending if not gone(entry.facts.person)]

    def snapshot(self) -> dict[str, Any]:
        """Return the turns that the baseline has not been trained on yet, as JSON types."""
        return {
            "held": matured_turns.dump_python(self._pending, mode="json"),
            "at": self._pending_at,
            "upto": self._pending_upto,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self._pending = matured_turns.validate_python(state["held"])
        self._pending_at = None if state["at"] is None else float(state["at"])
        self._pending_upto = int(state["upto"])

    def _observe(self, entries: Sequence[Matured], after: Mapping[EpisodeKey, LaterReturns]) -> None:
        reached = returns_of(entries, self._discount, {key: later.unknown for key, later in after.items()})
        for entry in entries:
            found = reached[entry.facts.id]
            self._baseline.observe(entry.facts.context, found.total, entry.facts.sampled, found.outcomes)


def returns_of(
    entries: Sequence[Matured], discount: float, after: Mapping[EpisodeKey, LaterReturns]
) -> dict[str, TurnReturn]:
    """Compute the return of each turn, by id, from these turns, oldest first, and from the returns `after` them."""
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
STALE, STALE_TURN = "stale", "stale_turn"  # stale_turn: a single turn of a rollout that continues without it
TEACHING = frozenset({NO_SIGNAL, TOO_FEW, TOO_LONG, UNTAKEN, PASSED_OVER, STALE})  # holdbacks that train the baseline
UNDELIVERED, GONE = "undelivered", "gone"  # quarantines of turns on which nobody can have given feedback
GROUPS = 10_000  # most groups with an outcome that are remembered, so that late members are recognised
LATE_GROUP = "late_group"
GOLD, HELD_OUT, WITHDRAWN, SECRET = "gold", "held_out", "consent:withdrawn", "secret"
CONTROL = f"arm:{Arm.CONTROL}"
FORGOTTEN, SIDE = "forgotten", f"purpose:{Purpose.SIDE}"
_MOST_ALONE = 10_000  # most turns held back alone that are remembered; behind one, its session's return is unknown


def kind_of(reason: str) -> str:
    """Return the kind under which a reason is counted. Example: ``kind_of("no_signal: all 4 rewards are 0") == "no_signal"``"""
    return reason.partition(": ")[0]


class TurnLedger:
    """The open turns and the baseline after the rows seen so far. Call `apply` with rows in the order of the log.

    `start` is the place in the log after which the fold began; above 0, rows may be about turns that it never saw. The turns of `gold`
    people get a reward and are held back as ``gold``, those of an arm not in `arms` as ``arm:<x>``. A process that only reads a desk's rows
    needs neither argument.
    """

    def __init__(
        self,
        config: RewardConfig,
        start: Cursor = 0,
        gold: Gold = no_gold,
        arms: Collection[Arm] = TEACHING_ARMS,
    ) -> None:
        self.config = config
        self.start = start
        self._gold, self._arms = gold, arms
        self.baseline = Baseline(config.baseline)
        self.teaching = BaselineUpdates(self.baseline, config.discount, self._undecided, self.later_returns)
        self.recent = RecentShares(config.user_steps)
        self.propensity = ResponsePropensity(config.propensity_cap)
        self.surrogate = Surrogate(config.surrogate, config.user_cap, config.longest_wait_s)
        self.passed_over: list[tuple[Person, str]] = []  # by the next batch, which was drawn from more turns
        self.lineage = Lineage()
        self.last_step = 0
        self.last_batch: Batch | None = None  # None also after a start from a snapshot, which holds only its step
        self.open: dict[str, OpenTurn] = {}  # reward due, not yet in the log
        self.touched: dict[str, None] = {}  # open turns with new rows since they were last asked about
        self.matured: dict[str, Matured] = {}  # reward known, outcome open
        self.to_hold: dict[str, str] = {}  # turn -> reason: outcome due, not yet in the log
        self.doubted: dict[str, Matured] = {}  # turns in `to_hold` with a reward: a batch may have taken them
        self.groups: OrderedDict[Unit, None] = OrderedDict()
        self.closed: dict[Unit, None] = {}  # groups whose rollouts have all ended, and which have no outcome yet
        self.alone: OrderedDict[str, TurnFacts] = OrderedDict()  # turns held back without the rest of their sessions
        self.refusing: dict[Person, None] = {}  # people who have withdrawn consent to learning from their turns
        self._people = PeopleWithTurns(lambda: [*(each.person for each in self._waiting()), *self.surrogate.people()])
        self.settled = DecidedTurns(config.remember)
        self.orphans = PendingSignals[SignalRef](
            most=config.max_orphans, seconds=config.orphan_s, most_bytes=config.orphan_bytes, size=signal_ref_bytes
        )
        self.alarms = Alarms(config.coverage, start)
        self.counts: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self.rollout_turns: dict[Unit, Counter[str]] = {}  # turns so far by episode, for groups without an outcome
        self._open_in: dict[Unit, dict[Cursor, str]] = {}  # trainable open turns, by unit and place in the log

    def apply(self, seq: Cursor, row: Row) -> None:
        """Take in one row. Raises Corrupt if the log contradicts itself: it trains on a turn twice, or on one without a reward."""
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
                self._consent_given(row)
            case Forgotten():
                self._forget(row)
            case _:
                pass

    def _alarm(self, row: Alarm) -> None:
        self.alarms.apply(row)
        if row.name.startswith(COVERAGE):
            self.surrogate.outage(row.name.removeprefix(COVERAGE), row.at)

    def count_step(self, batch: Batch) -> None:
        """Take in only the number of a step and the version that it started from, not its turns."""
        if batch.base is not None:
            self.lineage = Lineage(first=batch.step, base=batch.base.number)
        self.last_batch, self.last_step = batch, batch.step

    def first_open(self, unit: Unit) -> Cursor | None:
        """Return the place in the log of a unit's first trainable turn that waits for its reward; None if there is none."""
        return next(iter(self._open_in.get(unit, ())), None)

    def later_returns(self, entries: Sequence[Matured], upto: Cursor | None = None) -> dict[EpisodeKey, LaterReturns]:
        """Return what follows these turns (oldest first) in episodes that continue: the return of the decided turns that
        follow, and the baseline's prediction at the first turn whose reward is not known. A turn that was held back alone, for lack of
        consent or as secret, counts as such a turn: nothing may be learned from it, but its session did not end there. Turns beyond `upto`
        are left out; None: none is. Other choices of an episode's last call here do not follow it. Groups are never cut.
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
        """Return the return at the first of `rest`, or, if there is none, at `first`: the next turn whose reward is not known, if any."""
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
        """Return the baseline's prediction for a turn and those that follow, clipped to the largest reward of one turn."""
        most = self.config.max_abs
        total, outcome = self.baseline.predict(facts.context), self.baseline.predict_outcome(facts.context)
        total, outcome = min(most, max(-most, total)), min(most, max(-most, outcome))
        return LaterReturns(expected=total - outcome, expected_outcome=outcome).unknown

    def rollout_ends(self) -> dict[Rollout, Cursor]:
        """Return the place of the last turn of each world rollout that has turns without an outcome."""
        ends: dict[Rollout, Cursor] = {}
        for facts in [entry.facts for entry in (*self.matured.values(), *self.open.values())]:
            if facts.unit[0] == "world":
                ends[facts.unit, facts.episode] = max(facts.seq, ends.get((facts.unit, facts.episode), 0))
        return ends

    @property
    def learnable(self) -> int:
        """The number of people's turns that may still be trained on."""
        open_ = sum(len(places) for unit, places in self._open_in.items() if unit[0] != "world")
        return open_ + sum(not entry.facts.world for entry in self.matured.values())

    def _undecided(self) -> dict[Unit, Cursor]:
        """Return, by unit, the place in the log of the first turn that may still be learned from."""
        first = {unit: min(places) for unit, places in self._open_in.items()}
        for entry in self.matured.values():
            unit, place = entry.facts.unit, entry.facts.seq
            first[unit] = min(place, first.get(unit, place))
        return first

    def watch(self, facts: TurnFacts) -> None:
        """Register an open trainable turn in its unit."""
        if facts.hold is None:
            self._open_in.setdefault(facts.unit, {})[facts.seq] = facts.id

    # ------------------------------------------------------------ turns and signals about them

    def _turn(self, seq: Cursor, turn: Turn) -> None:
        self.orphans.advance(turn.ended_at)
        self.counts["ingested"] += 1
        if turn.window is not None and turn.window.begins_with is not None:
            self._compaction(turn.window.begins_with, turn)
        facts = self._admitted(TurnFacts.of(seq, turn, self.config, self._arms))
        if facts.hold is not None:
            self.to_hold[turn.id] = facts.hold
            self._hold_alone(facts, facts.hold)
        said, most = self.orphans.claim(turn.tenant, turn.id), self.config.max_signals
        if needs_reward(turn):
            self.counts["excess"] += len(said[most:])
            received = turn.finish is Finish.LEFT  # its client received the part before it disconnected
            self.open[turn.id] = OpenTurn(facts=facts, said=said[:most], delivered=received)
            self._people.add(facts.person)
            self.touched[turn.id] = None
            self.watch(facts)
        else:
            self.counts["moot"] += len(said)
            self.settled.put(turn.id, turn.tenant, Fate.MOOT)

    def _admitted(self, facts: TurnFacts) -> TurnFacts:
        """Return the facts of a new turn, with `hold` set if earlier rows say why it will not be learned from."""
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
        if len(self.rollout_turns) > GROUPS:  # drop the group that has waited longest for an outcome
            del self.rollout_turns[next(iter(self.rollout_turns))]
        return replace(facts, number=numbers[facts.episode])

    def _compaction(self, turn_id: str, later: Turn) -> None:
        """Treat a side call as a compaction, and learn from it as such, once a window of its episode begins with it."""
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
            self._open_in[entry.facts.unit] = dict(sorted(places.items()))  # it may be older than known turns

    def side_calls(self) -> dict[str, TurnFacts]:
        """Return the side calls whose holdback waits until their reward is due, since a window may still begin with one."""
        return {turn: self.open[turn].facts for turn, why in self.to_hold.items() if why == SIDE and turn in self.open}

    def _hold_alone(self, facts: TurnFacts | None, reason: str) -> None:
        """Remember a turn that was held back while its session continues."""
        alone = reason in (SECRET, FORGOTTEN) or reason.startswith("consent:")
        if alone and facts is not None and facts.unit[0] == "episode":
            self.alone[facts.id] = facts
            if len(self.alone) > _MOST_ALONE:
                self.alone.popitem(last=False)

    def _waiting(self) -> list[TurnFacts]:
        """Return the turns whose reward or outcome is open."""
        return [each.facts for each in (*self.open.values(), *self.matured.values(), *self.doubted.values())]

    def _consent_given(self, row: ConsentGiven) -> None:
        """Record a choice of consent. If it is withdrawn, hold back all of the person's turns that were not learned from yet."""
        if row.level is Consent.YES:
            self.refusing.pop(row.person, None)
            return
        self.refusing[row.person] = None
        if row.person not in self._people:
            return
        self.surrogate.forget(lambda person: person == row.person)
        for facts in self._waiting():
            waits = facts.hold is None or self.to_hold.get(facts.id) == SIDE
            if waits and not facts.world and facts.person == row.person:
                self.to_hold[facts.id] = WITHDRAWN

    def _forget(self, row: Forgotten) -> None:
        """Drop what is kept under a person's name, and hold back their turns that were not learned from yet. Credit already given stays, as
        does their choice of consent. From now on the other people are compared, and share batches, without them.
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
        for facts in self._waiting():
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
            self._signal_without_open_turn(seq, signal)
        elif signal.tenant != entry.facts.tenant:
            self.counts["foreign"] += 1
        elif len(entry.said) >= self.config.max_signals:
            self.counts["excess"] += 1
        else:
            entry.said.append((seq, signal.id, signal.retracts, signal.name))
            self.touched[signal.turn] = None
            self._close(entry.facts.unit, signal)

    def _close(self, unit: Unit, signal: Signal) -> None:
        """Close a group whose rollouts have all ended: its turns without a verdict are asked about for the last time."""
        if unit[0] != "world" or signal.name != CLOSED or signal.source is not Source.CODE:
            return
        if unit not in self.groups:
            self.closed[unit] = None
            if len(self.closed) > GROUPS:  # drop the longest without an outcome: its turns may all be lost
                del self.closed[next(iter(self.closed))]
        self.touched |= dict.fromkeys(self._open_in.get(unit, {}).values())

    def _signal_without_open_turn(self, seq: Cursor, signal: Signal) -> None:
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
        """Count a signal that came after its turn was decided. If it retracts a signal on which the reward of a turn not yet trained on
        is based, the turn is held back.
        """
        self.counts["late"] += 1
        self.counts["retracted"] += trained and retracts is not None
        if matured is not None and retracts in matured.signals:
            self.to_hold[matured.facts.id] = "retracted"

    # ------------------------------------------------------------ rewards, quarantines, holdbacks and batches

    def _decided(self, seq: Cursor, row: Reward | Quarantine) -> None:
        """Take in a reward or quarantine. The first row about a turn decides; later ones, from another desk, are ignored."""
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
            if facts.hold is None and facts.id not in self.to_hold:  # others' silence must not change the weights
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
        # bounded, because the function chooses `at`
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
        return self._beyond_bound(row), matured

    def _follow(self, entry: OpenTurn, row: Reward) -> None:
        """Start waiting for a turn's late reward, unless its feedback must not train anything or is lost."""
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

    def _beyond_bound(self, reward: Reward) -> str | None:
        """Return why a reward that was written under a wider bound is not learned from; None if it is within the current bound."""
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
        self.teaching.catch_up()  # while turns behind the held-back ones are here, as a desk does for credit
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
        """Remove and return the entry of a turn that a batch takes; None for a turn from before this fold. Raises Corrupt."""
        if entry := self.matured.pop(turn_id, None) or self.doubted.pop(turn_id, None):
            return entry
        known = self.settled.get(turn_id)
        if turn_id in self.open or known is not None or not (self.start or self.settled.forgot):
            state = "without a reward" if known is None else known[1].value
            raise Corrupt(f"the log's batch {batch.step} holds turn {turn_id}, which is {state}; restore the log")
        return None

    def _close_group(self, facts: TurnFacts) -> None:
        """Close the turn's group: members that come later are too late."""
        if facts.group is not None:
            self.groups[facts.unit] = None
            self.rollout_turns.pop(facts.unit, None)
            self.closed.pop(facts.unit, None)
            if len(self.groups) > GROUPS:
                self.groups.popitem(last=False)

    def _count_tokens(self, what: str, facts: TurnFacts) -> None:
        """Count the sampled tokens of a rollout's turn by the band of its turn number: 1 to 4, 5 to 16, 17 to 64, ..."""
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
    """Return True if a turn comes after a call of the same episode, and not beyond `upto`."""
    return end.seq < facts.seq and call_of(facts.id) != call_of(end.id) and (upto is None or facts.seq <= upto)
