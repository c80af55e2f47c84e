"""Everybody's states: a fold of the log's steered turns and of the signals about them, with a cache that may be lost.

A state depends only on the log's rows up to a position and on the rules, so two gateways that have read equally far have the same bits, and
so has one that was killed or lost its cache. It represents the person's own ratings alone: it is folded with the rules' fixed prior,
returns to the prior included, so that nobody else's ratings change it. A posterior is computed with the newest prior that the log holds up
to the same position (`population`). Erasing a person takes effect at the next access to their state: their key is gone, and what was stored
under it, in memory too, is no longer used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

import numpy as np

from ostinato.adapt.learner import Evidence, Floats, PersonState, Prior, Regression, names_hash, violation
from ostinato.adapt.older_states import OLDER_FORMAT, older_state
from ostinato.adapt.prior import Population
from ostinato.adapt.safety import ViolationConstraint, ViolationRules
from ostinato.core.arm_assignment import could_lean, holdout_place
from ostinato.core.errors import Corrupt
from ostinato.core.notices import Forgotten
from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import Consent, ConsentGiven, Identity, Person, Row, Signal, SteeringBasis, Turn, identity
from ostinato.core.seams import Cursor, Log, PersonCache, PersonValue
from ostinato.core.steering import MOST_SET, DialPrior, DialSet

_LOG = logging.getLogger(__name__)

# version of the fold: raise it with every change that gives other states for the same rows, or packs them in another way
_RULES = 8
_OLDER_RULES = 7  # version with which states of `older_states` were folded
_STATES = 10_000  # states in memory
_ANSWERS = 50_000  # answers whose features are in memory
# signals that come before their turn: most in all, seconds kept, most per turn
_EARLY, _EARLY_S, _EARLY_EACH = 10_000, 3600.0, 8
# pseudo-answers that the moments begin with, and their number of tokens; their features have variance 1
_PSEUDO_ANSWERS, _PSEUDO_TOKENS = 20.0, 20.0
_DECAY = 0.999  # decay factor of the moments per answer
_FEATURE_LIMIT = 1000.0  # |feature| is clipped to this
_CHOICES = 1 << 12  # number of choices of one call that have distinct places

_VIOLATED = 0.5  # least value of a signal that reports a violation

_UNSAVED = 5_000  # most states in memory that are not in the cache yet

KINDS: Collection[type] = frozenset({SteeringBasis, Turn, Signal, ConsentGiven, DialSet, Forgotten, DialPrior})


class PlacedLog(Log, Protocol):
    """A log that can tell the position of a row."""

    async def places(self, kind: type[Row], identities: Sequence[Identity]) -> list[Cursor]:
        """Return the sequence numbers of the rows of one kind with these identities; unknown ones are left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """What determines a state besides the log's rows.

    `names`: the dials. `signals`: the reward that each signal stands for at the value 1; one of value v counts as v reward + (1 - v)(1 -
    reward). `violations`: signals that cost reward instead. `prior`: the prior by which returns to it are decided. `without`: the tenants
    whose people have no states.
    """

    names: tuple[str, ...]
    signals: Mapping[str, float]
    regression: Regression
    prior: Prior
    without: frozenset[str] = frozenset()
    violations: ViolationRules = field(default_factory=ViolationRules)

    @property
    def hash(self) -> str:
        """A hash of all rules."""
        return self._hash(_RULES)

    @property
    def older_hash(self) -> str:
        """The hash under which an earlier version kept states of the same settings."""
        return self._hash(_OLDER_RULES)

    def _hash(self, folding: int) -> str:
        told = blake2b(digest_size=16)
        signals, without = sorted(self.signals.items()), sorted(self.without)
        violating = sorted(self.violations.signals), repr(replace(self.violations, signals=frozenset()))
        told.update(json.dumps([folding, self.names, signals, without, repr(self.regression), violating]).encode())
        told.update(self.prior.mean_D.tobytes() + self.prior.covariance_DD.tobytes())
        return told.hexdigest()


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that was steered or might have been: its person, their key at that time, and its place among their answers.

    `features`: None if it was not steered, () if it was but its ratings teach nothing. `private`: only the person's own dials may learn
    from it. `leans`: its side of the constraint on violations, None if it counts on neither.
    """

    person: Person
    key: int | None
    place: int
    features: tuple[float, ...] | None
    leans: bool | None
    private: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """A state in memory, and the key under which it was stored when it was read or made."""

    key: int | None
    state: PersonState


class FeatureMoments:
    """Moments of answers' features: their mean outer product and the mean number of steered tokens, over about the last thousand."""

    def __init__(self, dials: int) -> None:
        self._weight, self._tokens = _PSEUDO_ANSWERS, _PSEUDO_ANSWERS * _PSEUDO_TOKENS
        self._outer_KK: Floats = _PSEUDO_ANSWERS * np.eye(dials)

    @property
    def fisher_KK(self) -> Floats:
        """The mean outer product of the features, whose mean is 0."""
        return self._outer_KK / self._weight

    @property
    def tokens(self) -> float:
        """The mean number of tokens."""
        return self._tokens / self._weight

    def add(self, features: Sequence[float], tokens: int) -> None:
        """Add an answer."""
        row_K = np.clip(np.asarray(features, np.float64), -_FEATURE_LIMIT, _FEATURE_LIMIT)
        self._weight = _DECAY * self._weight + 1.0
        self._tokens = _DECAY * self._tokens + tokens
        self._outer_KK = _DECAY * self._outer_KK + np.outer(row_K, row_K)

    def state(self) -> list[Any]:
        """Return the whole state as JSON types."""
        return [self._weight, self._tokens, self._outer_KK.tolist()]

    def restore(self, state: list[Any]) -> None:
        """Restore what `state` returned."""
        self._weight, self._tokens, self._outer_KK = state[0], state[1], np.array(state[2], np.float64)


class StateFold:
    """Follows the log and keeps people's states.

    A state begins with a person's first rating, or when they set a dial. Dials are identified by name: an answer under another basis
    informs the dials that both have.

    Example::

        fold = StateFold(log, cache, rules)
        await fold.start()
        await fold.catch_up()
        fold.state(("acme", "ann"))
        await fold.save()
    """

    def __init__(self, log: PlacedLog, cache: PersonCache, rules: StateRules) -> None:
        self.cursor: Cursor = 0
        self._log, self._cache, self._rules = log, cache, rules
        self._names = names_hash(rules.names)
        self._states = OrderedDict[Person, _Entry]()
        self._dirty, self._writing = dict[Person, _Entry](), dict[Person, _Entry]()
        self._saved: Cursor = -1  # the position of the last write
        self._gone = set[Person]()  # people whose values must be dropped from the cache
        self._refusing = set[Person]()  # people who allow no dials now
        self._private = set[Person]()  # people who allow only their own dials to learn from them now
        self._tenants = set[str]()  # tenants of steered turns
        self.population = Population.flat(len(rules.names))  # the newest prior, parsed
        self.prior_row: DialPrior | None = None  # the newest prior's row
        self.priors = list[tuple[float, float]]()  # the time and noise multiplier of each prior, of any dials
        self.numbered = 0  # the newest prior's number
        self._last: list[Any] = []  # kind and identity of the row at the cursor
        self.resets = 0  # returns of all people to the prior by the CUSUM since the first row
        self._answers = OrderedDict[str, _Answer | None]()  # by turn; None for a turn that was not steered
        self._bases: dict[str, tuple[str, ...]] = {}  # the dials' names by the hash of the basis
        self._fitted = set[str]()  # the weights, by hash, of which a basis is known
        self._early = PendingSignals[tuple[int, float | None]](most=_EARLY, seconds=_EARLY_S, most_each=_EARLY_EACH)
        self.moments = FeatureMoments(len(rules.names))
        # by tenant, so that reports of one tenant cost another's people nothing
        self._constraints = dict[str, ViolationConstraint]()
        self._reading, self._saving = asyncio.Lock(), asyncio.Lock()

    async def start(self) -> None:
        """Continue where the cache ends, or begin with the log's first row. Raises StorageFull, Unavailable.

        States of an earlier version are folded anew if the log is whole, and taken over if it was truncated, as they then exist nowhere
        else.
        """
        older = self._rules.older_hash if await self._log.horizon() else None
        self.cursor, note = await asyncio.to_thread(self._cache.begin, self._rules.hash, older)
        state: dict[str, Any] = json.loads(note) if note else {}
        if self.cursor and not await self._continues(state.get("last", [])):
            _LOG.warning("People's states were made from another log, or a newer copy of it; they are folded again.")
            await asyncio.to_thread(self._cache.begin, "")
            self.cursor, note = await asyncio.to_thread(self._cache.begin, self._rules.hash)
            state = {}
        if state:
            self._last = state["last"]
            self._early.restore(state, state["time"], tuple)
            self.moments.restore(state["moments"])
            for tenant, told in state["constraints"].items():
                self.constraint(tenant).restore(told)
            self._bases = {basis: tuple(names) for basis, names in state["bases"].items()}
            self._fitted = set(state["fitted"])
            self.resets = state["resets"]
            self._tenants = set(state["tenants"])
        # the log keeps these rows for ever; they are not in the cache, whose note must name nobody
        async for seq, row in self._log.read(0, {ConsentGiven, DialPrior}):
            if seq <= self.cursor and isinstance(row, ConsentGiven):
                self._note_consent(row)  # the cache dropped the state when it came to a refusal
            elif seq <= self.cursor and isinstance(row, DialPrior):
                self._take_prior(row)

    async def _continues(self, last: list[Any]) -> bool:
        """Return true if the log continues where the cache ended."""
        if self.cursor <= await self._log.horizon():
            return True
        found = await anext(aiter(self._log.read(self.cursor - 1, set(KINDS))), None)
        return found is not None and found[0] == self.cursor and _named(found[1]) == last

    async def catch_up(self) -> None:
        """Apply the log's new rows. Raises Corrupt, Unavailable; StorageFull once too many states wait to be saved."""
        async with self._reading:
            async for seq, row in self._log.read(self.cursor, set(KINDS)):
                if len(self._dirty) >= _UNSAVED:
                    await self.save()
                if isinstance(row, SteeringBasis):
                    self._bases[row.hash] = row.names
                    self._fitted.add(row.weights)
                elif isinstance(row, Turn):
                    self._take_turn(seq, row)
                elif isinstance(row, Signal):
                    await self._take_signal(seq, row)
                elif isinstance(row, ConsentGiven):
                    self._take_consent(seq, row)
                elif isinstance(row, DialSet):
                    self._take_dials(seq, row)
                elif isinstance(row, DialPrior):
                    self._take_prior(row)
                elif isinstance(row, Forgotten):
                    self._forget(row)
                self.cursor, self._last = seq, _named(row)

    async def save(self) -> None:
        """Write what is new, and the position up to which it was folded, in one transaction.

        Raises StorageFull, Unavailable; nothing is lost then.
        """
        # shielded: a cancellation must not abandon a write that runs on its thread
        await asyncio.shield(asyncio.ensure_future(self._save()))

    async def _save(self) -> None:
        async with self._saving:
            if self.cursor == self._saved and not self._gone:
                return
            cursor, batch, gone = self.cursor, self._dirty, self._gone
            note = json.dumps(
                {
                    **self._early.snapshot(),
                    "time": self._early.time,
                    "last": self._last,
                    "resets": self.resets,
                    "tenants": sorted(self._tenants),
                    "moments": self.moments.state(),
                    "bases": self._bases,
                    "fitted": sorted(self._fitted),
                    "constraints": {tenant: each.state() for tenant, each in self._constraints.items()},
                }
            )
            told: dict[Person, PersonValue | None] = dict.fromkeys(gone)
            for person, entry in batch.items():
                told[person] = (entry.state.cursor, entry.key, entry.state.pack())
            self._dirty, self._gone, self._writing = {}, set(), batch
            try:
                await asyncio.to_thread(self._cache.write, cursor, note, told)
            except BaseException:
                # after any error: a later write would advance the position, and these states would be lost
                self._dirty, self._gone = {**batch, **self._dirty}, gone | self._gone
                raise
            finally:
                self._writing = {}
            self._saved = cursor

    def state(self, person: Person) -> PersonState | None:
        """Return a person's state; None before the first rating, and once the person was forgotten. Raises Unavailable."""
        key = self._cache.key(person)
        entry = self._states.get(person) or self._dirty.get(person) or self._writing.get(person)
        if entry is not None and entry.key != key:  # the person was forgotten
            for known in (self._states, self._dirty):
                known.pop(person, None)
            self._gone.add(person)
            entry = None
        if person in self._refusing:
            return None
        if entry is None and person not in self._gone:
            entry = self._loaded(person, key)
        if entry is None:
            return None
        self._remember(person, entry)
        return entry.state

    def state_or_new(self, person: Person) -> PersonState:
        """As `state`, but with an empty state instead of None."""
        return self.state(person) or PersonState.new(self._names, len(self._rules.names))

    def constraint(self, tenant: str) -> ViolationConstraint:
        """Return the constraint that sets what violations cost the people of a tenant."""
        return self._constraints.setdefault(tenant, ViolationConstraint(self._rules.violations))

    def newest(self, most: int) -> list[tuple[Person, PersonState]]:
        """Return the states in memory that were used last, at most `most`."""
        found = ((who, entry) for who, entry in reversed(self._states.items()) if entry.key == self._cache.key(who))
        return [(who, entry.state) for who, entry in islice(found, most)]

    @property
    def tenants(self) -> Sequence[str]:
        """The tenants of people with states, sorted."""
        return sorted(self._tenants)

    async def evidence(self, tenant: str, most: int) -> list[Evidence]:
        """Return the evidence of the `most` people of a tenant who rated last, in the order of their last ratings.

        Only people count who allow everything to be learned from (`Consent.YES`), now and with each rated answer. Saves first. Raises
        StorageFull, Unavailable.
        """
        await self.save()
        private = [person for person in self._private if person[0] == tenant]

        def read() -> list[Evidence]:
            found = list[Evidence]()
            for packed in self._cache.newest(tenant, most, private):
                try:
                    state = self._unpacked(packed)
                except Corrupt:
                    continue  # the person starts over with their next rating
                if state.names == self._names and not state.private:
                    found.append(state.evidence(self._rules.prior, self._rules.regression))
            return found

        return await asyncio.to_thread(read)

    # ------------------------------------------------------------ rows

    def _take_consent(self, seq: Cursor, choice: ConsentGiven) -> None:
        """Drop the state of a person who no longer allows dials; if they allow them again, they start over.

        What was reported about their answers stays, as otherwise anybody could erase a strike by withdrawing consent for a moment.
        """
        person = choice.person
        refused = person in self._refusing
        state = None if refused else self.state(person)
        self._note_consent(choice)
        if person not in self._refusing or refused:
            return
        kept = None if state is None else state.barred()
        for known in (self._states, self._dirty):
            known.pop(person, None)
        if kept is None:
            self._gone.add(person)
        else:
            self._put(person, self._cache.key(person), replace(kept, cursor=seq))

    def _note_consent(self, choice: ConsentGiven) -> None:
        (self._private.add if choice.level is Consent.ADAPT else self._private.discard)(choice.person)
        allows = choice.level in (Consent.ADAPT, Consent.YES)
        (self._refusing.discard if allows else self._refusing.add)(choice.person)

    def _take_dials(self, seq: Cursor, row: DialSet) -> None:
        """Set, clear or reset a person's dials, unless the person was forgotten since or allows none.

        Answers that are in the log by now count as earlier than this row, whatever the clocks of other gateways say.
        """
        rules, person = self._rules, row.person
        if row.dials is None or person in self._refusing or row.tenant in rules.without:
            return
        known = {number: row.dials[name] for number, name in enumerate(rules.names) if name in row.dials}
        if row.dials and not known:  # of another basis
            return
        state = self.state_or_new(person)
        place = _place_at(max(0.0, min(row.at, self._early.time)), _CHOICES - 1)
        prior = rules.prior
        cleared = [number for number, value in known.items() if value is None]
        told = {number: value for number, value in known.items() if value is not None and math.isfinite(value)}
        if not row.dials:
            state = state.reset(place)
        if cleared:
            state = state.clear(cleared, place, prior, rules.regression)
        if told:
            limited = {number: min(MOST_SET, max(-MOST_SET, value)) for number, value in told.items()}
            state = state.hold(limited, prior, rules.regression)
        self._put(person, self._cache.key(person), replace(state, cursor=seq))

    def _take_prior(self, row: DialPrior) -> None:
        """Make this the prior in force, from its position in the log on, if it is of these dials. Other priors have spent privacy, too."""
        self.priors.append((row.at, row.sigma))
        self.numbered = max(self.numbered, row.number)
        if row.names != self._names:
            return
        try:
            self.population, self.prior_row = Population.read(row, len(self._rules.names)), row
        except ValueError as error:
            _LOG.warning("A prior in the log is not used: %s", error)

    def _forget(self, row: Forgotten) -> None:
        """Drop what memory holds of a forgotten person, and their value from the cache."""
        for known in (self._states, self._dirty):
            for person in [person for person in known if row.covers(person)]:
                del known[person]
                self._gone.add(person)
        if row.user is not None:
            self._gone.add((row.tenant, row.user))
        who = None if row.user is None else self._cache.pseudonym((row.tenant, row.user))
        if row.tenant in self._constraints:
            self._constraints[row.tenant].forget(who)
        for turn, answer in self._answers.items():
            if answer is not None and row.covers(answer.person):
                self._answers[turn] = None

    def _take_turn(self, seq: Cursor, turn: Turn) -> None:
        self._early.advance(turn.ended_at)
        answer = self._note(turn)
        early = self._early.claim(turn.tenant, turn.id)
        if answer is None:
            return
        if answer.leans is not None:
            self.constraint(turn.tenant).answer(self._cache.pseudonym(turn.person), leans=answer.leans)
        if answer.features is not None:
            self._tenants.add(turn.tenant)
        if turn.steered is not None and answer.features is not None:
            if answer.features:
                self.moments.add(answer.features, turn.steered.tokens)
            state = self.state(answer.person)
            if state is not None:
                self._put(answer.person, answer.key, state.spend(turn.steered.kl))
        for signal, reward in early:
            self._apply_signal(seq, answer, turn.id, signal, reward)

    async def _take_signal(self, seq: Cursor, signal: Signal) -> None:
        self._early.advance(signal.received_at)
        if signal.retracts is None and signal.name not in self._rules.signals and not self._violates(signal):
            return
        told = _hashed(signal.retracts or signal.id), self._reward(signal)
        if signal.turn not in self._answers and min(await self._log.places(Turn, [(signal.turn,)]), default=seq) < seq:
            for turn in await self._log.find(Turn, [(signal.turn,)]):
                self._note(turn)
        if signal.turn not in self._answers:
            self._early.add(signal.tenant, signal.turn, told)
            return
        answer = self._answers[signal.turn]
        if answer is not None and answer.person[0] == signal.tenant:
            self._apply_signal(seq, answer, signal.turn, *told)

    def _apply_signal(self, seq: Cursor, answer: _Answer, turn: str, signal: int, reward: float | None) -> None:
        """Apply a signal about a known answer."""
        rates = reward is not None and reward >= 0.0
        if answer.leans is not None and not rates:
            violates = reward is not None
            who, constraint = self._cache.pseudonym(answer.person), self.constraint(answer.person[0])
            constraint.tell(who, _hashed(turn), signal, leans=answer.leans, violates=violates)
        if answer.features or (answer.features is not None and not rates):
            self._rate(seq, answer, signal, reward)

    def _violates(self, signal: Signal) -> bool:
        return signal.name in self._rules.violations.signals and signal.value >= _VIOLATED

    def _reward(self, signal: Signal) -> float | None:
        """Return the reward in [0, 1] that a signal stands for, a `violation` with its current cost, or None for a retraction."""
        if signal.retracts is not None:
            return None
        if self._violates(signal):
            return violation(self.constraint(signal.tenant).multiplier)
        value, reward = min(1.0, max(0.0, signal.value)), self._rules.signals[signal.name]
        return value * reward + (1.0 - value) * (1.0 - reward)

    def _rate(self, seq: Cursor, answer: _Answer, signal: int, reward: float | None) -> None:
        if self._cache.key(answer.person) != answer.key or answer.person in self._refusing:
            return  # the person was forgotten since, or allows no dials now
        state = self.state_or_new(answer.person)
        features = answer.features or (0.0,) * len(self._rules.names)
        rated = state.rate(answer.place, features, signal, reward, self._rules.prior, self._rules.regression)
        if rated is not state:
            rated = rated.struck(self._rules.violations.strikes)
            self.resets += _resets(rated) - _resets(state)
            private = rated.private or answer.private
            self._put(answer.person, answer.key, replace(rated, cursor=seq, private=private))

    def _note(self, turn: Turn) -> _Answer | None:
        """Record a turn of the log. Return its answer, if it counts for anything."""
        features, leans, answer = self._features(turn), self._side(turn), None
        if features is not None or leans is not None:
            key, private = self._cache.key(turn.person), turn.consent is not Consent.YES
            answer = _Answer(turn.person, key, _place_of(turn), features, leans, private)
        self._answers[turn.id] = answer
        self._answers.move_to_end(turn.id)
        if len(self._answers) > _ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def _features(self, turn: Turn) -> tuple[float, ...] | None:
        """Return a steered answer's features for the current dials; () if its ratings teach nothing, None if it is in nobody's state."""
        steered, rules = turn.steered, self._rules
        names = () if steered is None else self._bases.get(steered.basis, ())
        allowed = turn.consent in (Consent.ADAPT, Consent.YES) and turn.tenant not in rules.without
        if steered is None or not allowed or set(rules.names).isdisjoint(names):
            return None
        # the features' mean is 0 only if the tokens were drawn from the same distribution
        if not steered.features or turn.sampling.temperature == 0 or turn.sampling.top_p < 1:
            return ()
        told = dict(zip(names, steered.features, strict=False))
        return tuple(told.get(name, 0.0) for name in rules.names)

    def _side(self, turn: Turn) -> bool | None:
        """Return true if an answer to this person may be steered, false for the holdout; None if answers of its kind never are.

        Hash and kind alone decide this, so that both sides differ only in their dials (intention to treat).
        """
        rules = self._rules.violations
        if not rules.signals or turn.consent is Consent.NEVER or turn.tenant in self._rules.without:
            return None
        known = turn.verified or not rules.verified
        return holdout_place(turn.person) >= rules.holdout if known and could_lean(turn, self._fitted) else None

    # ------------------------------------------------------------ states

    def _loaded(self, person: Person, key: int | None) -> _Entry | None:
        try:
            packed = self._cache.load(person)
            if packed is None:
                return None
            state = self._unpacked(packed)
        except Corrupt as error:
            _LOG.warning("A person's state cannot be read; the person starts over: %s", error)
            return None
        if state.names != self._names:
            return None
        return _Entry(key, state)

    def _unpacked(self, packed: bytes) -> PersonState:
        """Parse a value of the cache, `ready`. Raises Corrupt."""
        prior, regression = self._rules.prior, self._rules.regression
        if packed[:1] == bytes([OLDER_FORMAT]):
            return older_state(packed, prior, regression)
        return PersonState.unpack(packed, regression)

    def _put(self, person: Person, key: int | None, state: PersonState) -> None:
        entry = _Entry(key, state)
        self._dirty[person] = entry
        self._gone.discard(person)
        self._remember(person, entry)

    def _remember(self, person: Person, entry: _Entry) -> None:
        self._states[person] = entry
        self._states.move_to_end(person)
        if len(self._states) > _STATES:
            self._states.popitem(last=False)


def _place_of(turn: Turn) -> int:
    """Return an answer's place among its person's answers: its start in microseconds, and the number of the choice.

    Answers that share both count as one.
    """
    _, _, choice = turn.id.rpartition(":")
    return _place_at(turn.started_at, int(choice) % _CHOICES if choice.isdecimal() else 0)


def _place_at(at: float, choice: int) -> int:
    return int(at * 1e6) * _CHOICES + choice


def time_of(place: int) -> float:
    """Return the Unix time of a place among a person's answers."""
    return place // _CHOICES / 1e6


def _resets(state: PersonState) -> int:
    return (state.latest or state.settled).resets


def _hashed(signal: str) -> int:
    return int.from_bytes(blake2b(signal.encode(), digest_size=4).digest(), "little")


def _named(row: Row) -> list[Any]:
    return [type(row).__name__, *identity(row)]
