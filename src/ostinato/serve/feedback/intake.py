"""Parses the bodies of `POST /v1/feedback`, writes signals to the log, and reports the status of each.

Early, late, repeated and unordered events are all accepted. An event about another tenant's turn is answered exactly like one about a turn
that does not exist, so the status does not reveal other tenants' ids. Both are stored as sent, except comments, corrections and lines
about a turn whose text must not be stored. A reward function never gets another tenant's signal.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.conversation import call_number, calling_turn
from ostinato.core.errors import BadRequest, OstinatoError, StorageFull, TooLarge, Unavailable
from ostinato.core.line_survival import MOST_LINES, holds, line_spans, parse_ranges
from ostinato.core.notices import Forgotten
from ostinato.core.records import LineSurvival, Quarantine, Reward, Signal, Source, Turn, identity
from ostinato.serve.dialects.dialect import MAX_REPORTED_FIELDS, printable, refusal, validate
from ostinato.serve.fair_thread import PARSED_PER_CHAR
from ostinato.serve.quotas import QuotaExceeded

if TYPE_CHECKING:  # the parsing of events must not import the rest of the gateway
    from ostinato.serve.parts import Parts

_MAX_TURNS = 100_000  # turns held in memory
_MAX_PENDING = 100_000  # turns held that are not in the log yet and whose text must not be stored, over all tenants
_MIN_PENDING = 1_024  # of these, the fewest per tenant
_V = TypeVar("_V")


class Status(StrEnum):
    """The status of an event. Except for `changed`, the event is in the log.

    `early`: no turn of this tenant has the id so far. `repeated`: the same event was stored before (comment and correction are not compared
    while no turn of the tenant has the id). `changed`: a different event is stored under this id, and stays. `late`: the turn's reward was
    decided without it. `retracted`: the event that it names no longer counts.
    """

    ACCEPTED = "accepted"
    EARLY = "early"
    REPEATED = "repeated"
    CHANGED = "changed"
    LATE = "late"
    RETRACTED = "retracted"


class Intake:
    """Stores signals.

    Example: ``statuses = await intake.take(parse_feedback(body, tenant="acme", now=now))``
    """

    def __init__(self, parts: Parts) -> None:
        self._log = parts.log
        self._writes = parts.writes
        self._thread = parts.thread
        self._metrics = parts.metrics
        self._timeout_s = parts.config.store_timeout_s
        self._learners = [each for each in (parts.adaptation, parts.styles) if each is not None]
        self._room, self._least_free_mb = parts.room, parts.config.least_free_mb
        self._scrubbing = parts.scrubbing
        self._tenants: OrderedDict[str, str] = OrderedDict()  # turn -> its tenant
        self._users: OrderedDict[str, str] = OrderedDict()  # turn -> its user, if comments are scrubbed
        self._decided: OrderedDict[str, None] = OrderedDict()  # turns whose reward is already decided
        # turns about which no comment, correction or lines are stored, from any tenant: those in `_tenants`, and those not in the log yet
        self._unkept: set[str] = set()
        # the latter by tenant, so that no tenant can evict another's
        self._pending: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._max_pending = max(_MIN_PENDING, _MAX_PENDING // len(parts.keys.tenants))

    def turn(self, turn: Turn) -> None:
        """Register a turn that is in the log, so that feedback about it needs no lookup."""
        # an evicted turn is looked up again
        self._unkept.difference_update(_remember(self._tenants, turn.id, turn.tenant))
        if self._scrubbing is not None:
            _remember(self._users, turn.id, turn.user)
        if not turn.counts:
            self._unkept.add(turn.id)
            self._pending[turn.tenant].pop(turn.id, None)

    def forget(self, row: Forgotten) -> None:
        """Drop the user's name from the held turns of a forgotten person."""
        theirs = [turn for turn, user in self._users.items() if row.covers((self._tenants.get(turn, ""), user))]
        for turn in theirs:
            del self._users[turn]

    def drop_text_of(self, tenant: str, turns: Sequence[str]) -> None:
        """Let `take` drop comments, corrections and lines about these turns of a tenant, which are not in the log yet."""
        for turn in turns:
            self._unkept.add(turn)
            self._unkept.difference_update(_remember(self._pending[tenant], turn, None, self._max_pending))

    async def take(self, signals: Sequence[Signal]) -> list[Status]:
        """Write one tenant's signals, durable on return. Return their statuses in order.

        Raises StorageFull, Unavailable; BadRequest for lines that the answer does not have.
        """
        self._check_room()
        try:
            async with asyncio.timeout(self._timeout_s):
                unkept = await self._look_up({signal.turn for signal in signals}, signals[0].tenant)
                signals, early = await self._scrubbed(signals)
                await self._check_lines(signals)
                signals = [
                    replace(each, comment=None, correction=None, lines=()) if each.turn in unkept else each
                    for each in signals
                ]
                late = {signal.turn for signal in signals if signal.turn in self._decided}
                await asyncio.shield(self._writes.begin(self._log.append(*signals)))
                for each in self._learners:
                    each.heard()
                stored = await self._stored(signals)
        except (BadRequest, QuotaExceeded):
            raise
        except TimeoutError:
            self._metrics.store_error()
            raise Unavailable(
                f"The log did not confirm the events within {self._timeout_s:g} s; they may or may not be stored. "
                "Send them again with the same ids."
            ) from None
        except OstinatoError:
            self._metrics.store_error()
            raise
        statuses: list[Status] = []
        answered: set[str] = set()
        for signal, before in zip(signals, early, strict=True):
            status = self._status(signal, before, stored, answered, late)
            answered.add(signal.id)
            foreign = self._tenants.get(signal.turn, signal.tenant) != signal.tenant
            self._metrics.event(signal.tenant, signal.name, status.value, foreign=foreign)
            statuses.append(status)
        return statuses

    async def _check_lines(self, signals: Sequence[Signal]) -> None:
        """Raise BadRequest for a signal about lines that its answer does not have, or about an answer that is not stored yet.

        Answers of other tenants are never read.
        """
        for place, signal in enumerate(signals):
            if signal.lines and not self._known(signal):
                where = f"[{place}].lines" if len(signals) > 1 else "lines"
                raise BadRequest(
                    f"{where}: turn {signal.turn!r} is not stored yet, so its lines cannot be checked; send them later, or leave them out",
                    field=where,
                )
        about = {signal.turn for signal in signals if signal.lines}
        if about:
            turns = {turn.id: turn for turn in await self._log.find(Turn, [(turn,) for turn in about])}
            size = sum(len(turn.text) for turn in turns.values())
            await self._thread.run(signals[0].tenant, size // PARSED_PER_CHAR, partial(_refuse_lines, signals, turns))

    def _check_room(self) -> None:
        """Raise StorageFull while the remaining space is reserved for turns, which cannot be sent again."""
        if self._room is not None and self._room() < 1e6 * self._least_free_mb:
            raise StorageFull(
                f"The log's disk has less than {self._least_free_mb:g} MB left (serve.least_free_mb), which is kept for turns; free some "
                "space and send the events again with the same ids."
            )

    async def _scrubbed(self, signals: Sequence[Signal]) -> tuple[Sequence[Signal], Sequence[Signal]]:
        """Return the signals with secrets and personal data masked, and as they would have been masked before their turn was known.

        Placeholders are those of the turn's user, and of an anonymous one before the turn is known. This applies in both scrubbing modes,
        because no tool needs a comment's values and a correction may be trained on.
        """
        scrubbing = self._scrubbing
        size = sum(len(signal.comment or "") + len(signal.correction or "") for signal in signals)
        if scrubbing is None or not size:
            return signals, signals

        def masked(signal: Signal, user: str) -> Signal:
            text = scrubbing.person(signal.tenant, user).text
            told = {"comment": signal.comment, "correction": signal.correction}
            return replace(signal, **{name: None if said is None else text(said) for name, said in told.items()})

        def work() -> tuple[Sequence[Signal], Sequence[Signal]]:
            mine = [self._users.get(each.turn, ANONYMOUS) if self._known(each) else ANONYMOUS for each in signals]
            whole = [masked(signal, user) for signal, user in zip(signals, mine, strict=True)]
            return whole, [masked(signal, ANONYMOUS) for signal in signals]

        return await self._thread.run(signals[0].tenant, size // PARSED_PER_CHAR, work)

    def _known(self, signal: Signal) -> bool:
        return self._tenants.get(signal.turn) == signal.tenant

    def _status(
        self, signal: Signal, before: Signal, stored: dict[str, Signal], answered: set[str], late: set[str]
    ) -> Status:
        kept = stored.get(signal.id, signal)
        if not self._known(signal):  # must not reveal whether the text of another tenant's turn is stored
            kept, signal, before = (replace(each, comment=None, correction=None) for each in (kept, signal, before))
        if not (_same(kept, signal) or _same(kept, before)):
            return Status.CHANGED
        if kept.received_at != signal.received_at or signal.id in answered:
            return Status.REPEATED
        if not self._known(signal):
            return Status.EARLY
        if signal.turn in late:
            return Status.LATE
        if signal.retracts is not None:
            return Status.RETRACTED if signal.retracts in stored else Status.EARLY
        return Status.ACCEPTED

    async def _look_up(self, turns: Iterable[str], tenant: str) -> set[str]:
        """Look up the turns' tenants, and which turns are decided, where unknown. Return those about which no text is stored."""
        unknown = [(turn,) for turn in turns if self._tenants.get(turn) != tenant]
        if unknown:
            for turn in await self._log.find(Turn, unknown):
                self.turn(turn)
        unkept = self._unkept.intersection(turns)
        open_ = [(turn,) for turn in turns if self._tenants.get(turn) == tenant and turn not in self._decided]
        if open_:
            for kind in (Reward, Quarantine):
                for row in await self._log.find(kind, open_):
                    _remember(self._decided, row.turn, None)
        return unkept

    async def _stored(self, signals: Sequence[Signal]) -> dict[str, Signal]:
        """Return the signals in the log under the ids that these signals have or retract."""
        ids = dict.fromkeys(identity(signal) for signal in signals)
        ids |= dict.fromkeys((signal.tenant, signal.retracts) for signal in signals if signal.retracts is not None)
        return {row.id: row for row in await self._log.find(Signal, list(ids))}


def _refuse_lines(signals: Sequence[Signal], turns: Mapping[str, Turn]) -> None:
    """Raise BadRequest for the first signal about lines that its answer does not have. Each text is parsed once."""
    known = set[tuple[str, int | None, str, int]]()
    for place, signal in enumerate(signals):
        turn = turns.get(signal.turn)
        for text in signal.lines if turn is not None and not turn.redacted else ():
            key = (signal.turn, text.call, text.argument, text.lines)
            if turn is None or key in known:
                continue
            known.add(key)
            try:
                line_spans(turn, text.call, text.argument, text.lines)
            except BadRequest as error:
                where = f"[{place}].lines" if len(signals) > 1 else "lines"
                raise BadRequest(f"{where}: {error}", field=where) from None


def _same(one: Signal, other: Signal) -> bool:
    """True if both have the same content. `occurred_at` is compared only if both senders gave it; otherwise it is the arrival time."""
    both_given = one.occurred_at != one.received_at and other.occurred_at != other.received_at
    at = one.occurred_at if both_given else 0.0
    return replace(one, received_at=0.0, occurred_at=at) == replace(
        other, received_at=0.0, occurred_at=other.occurred_at if both_given else 0.0
    )


def _remember(known: OrderedDict[str, _V], key: str, value: _V, most: int | None = None) -> list[str]:
    """Add or renew a key; keep the newest `most` (None: `_MAX_TURNS`) and return the evicted keys."""
    known[key] = value
    known.move_to_end(key)
    return [known.popitem(last=False)[0]] if len(known) > (_MAX_TURNS if most is None else most) else []


# ---------------------------------------------------------------- events


MAX_EVENTS = 1000
MAX_VALUE = 1e9  # absolute value; squares and sums of such values stay far below a float's maximum
_MAX_RANGES = 4096  # characters of a list of line numbers
_MAX_TEXTS = 16  # texts of one answer per event with lines
_MAX_TIME = 253_402_300_799.0  # the end of the year 9999
_APART_S = 1e-6  # between the arrival times of two events in a list

_Id = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=65_536)]


class _Lines(BaseModel):
    """The lines of one text that survive; see `LineSurvival`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    argument: Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    of: Annotated[int, Field(ge=1, le=MOST_LINES)]
    followed: Annotated[str, StringConstraints(max_length=_MAX_RANGES)] = ""  # "": all lines
    kept: Annotated[str, StringConstraints(max_length=_MAX_RANGES)]

    @field_validator("followed", "kept")
    @classmethod
    def _numbers(cls, ranges: str, info: ValidationInfo) -> str:
        parse_ranges(ranges, info.data.get("of", MOST_LINES))
        return ranges

    def survival(self, call: int | None) -> LineSurvival:
        """Return the record. Raises ValueError if a kept line is not among those followed."""
        followed = parse_ranges(self.followed or f"1-{self.of}", self.of)
        kept = parse_ranges(self.kept, self.of)
        if not holds(followed, kept):
            raise ValueError(f"kept lines {self.kept!r} are not all among those followed, {self.followed!r}")
        return LineSurvival(call=call, argument=self.argument, lines=self.of, followed=followed, kept=kept)


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    id: _Id = Field(default_factory=lambda: f"fb-{secrets.token_hex(16)}")
    target: _Id
    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
    retracts: _Id | None = None  # must precede `value`, whose validator reads it
    value: bool | float | None = Field(default=None, union_mode="left_to_right", validate_default=True)
    source: str = Source.HUMAN.value
    correction: _Text | None = None
    comment: _Text | None = None
    occurred_at: float | str | None = None
    lines: Annotated[list[_Lines], Field(max_length=_MAX_TEXTS)] = []

    @field_validator("lines")
    @classmethod
    def _disjoint(cls, texts: list[_Lines]) -> list[_Lines]:
        for each in texts:
            each.survival(None)
        if len({each.argument for each in texts}) < len(texts):
            raise ValueError("names an argument twice; give each text once")
        return texts

    @field_validator("value")
    @classmethod
    def _bounded(cls, value: bool | float | None, info: ValidationInfo) -> bool | float | None:
        if value is None and info.data.get("retracts", "") is None:
            raise ValueError("is missing; send true, false or a finite number")
        if value is not None and abs(value) > MAX_VALUE:
            raise ValueError(f"is {value:g}; send a number between -{MAX_VALUE:g} and {MAX_VALUE:g}")
        return value

    @field_validator("source")
    @classmethod
    def _known(cls, source: str) -> str:
        if source not in list(Source):
            raise ValueError(f"must be one of {', '.join(Source)}")
        return source

    @field_validator("occurred_at")
    @classmethod
    def _seconds(cls, at: float | str | None) -> float | None:
        if isinstance(at, str):
            try:
                moment = datetime.fromisoformat(at)
                at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                raise ValueError("is not an ISO 8601 time; send Unix seconds or '2026-01-31T12:00:00Z'") from None
        if at is not None and not 0.0 <= at <= _MAX_TIME:
            raise ValueError(f"is {at:g}; Unix seconds must be in [0, {_MAX_TIME:g}]")
        return at


def count_events(body: Any) -> int:
    """Return the number of events in a body, before any is parsed: 1 if it is not a list, at most `MAX_EVENTS`."""
    return max(1, min(len(body), MAX_EVENTS)) if isinstance(body, list) else 1


def parse_feedback(body: Any, *, tenant: str, now: float) -> list[Signal]:
    """Parse one event or a list of events into signals.

    Args:
        body: the JSON value.
        tenant: the sender; event ids are unique per tenant.
        now: the arrival time. Each further event of a list arrives a microsecond later, which preserves their order. It is also the time of
            events that give none.

    Raises:
        BadRequest: names the bad fields, "[3].value" within a list, up to the tenth bad event. No event of such a list is stored.
        TooLarge: the list has more than `MAX_EVENTS` events.
    """
    if not isinstance(body, list):
        return [_signal(body, "", tenant, now)]
    if not body:
        raise BadRequest("The list of events is empty; send at least one.")
    if len(body) > MAX_EVENTS:
        raise TooLarge(f"{len(body)} events in one call; send at most {MAX_EVENTS}.")
    signals, wrong = list[Signal](), dict[str, str]()
    for i, event in enumerate(body):
        try:
            signals.append(_signal(event, f"[{i}]", tenant, now + i * _APART_S))
        except BadRequest as error:
            wrong[error.field or f"[{i}]"] = str(error).removesuffix(".")
        if len(wrong) == MAX_REPORTED_FIELDS and i + 1 < len(body):
            raise refusal(wrong, f"the {len(body) - i - 1} events after [{i}] were not checked")
    if wrong:
        raise refusal(wrong)
    return signals


def _signal(body: Any, where: str, tenant: str, now: float) -> Signal:
    event = validate(_Event, body, where)
    return Signal(
        id=event.id,
        tenant=tenant,
        turn=_turn(event.target),
        name=event.name,
        value=0.0 if event.value is None else float(event.value),
        source=Source(event.source),
        occurred_at=now if event.occurred_at is None else float(event.occurred_at),
        received_at=now,
        correction=event.correction,
        comment=event.comment,
        retracts=event.retracts,
        lines=tuple(each.survival(call_number(event.target)) for each in event.lines),
    )


def _turn(target: str) -> str:
    """Return the turn that a target names: by its own id, by a tool call's id, or by an answer's id, which means its first choice."""
    return target if ":" in target else calling_turn(target) or f"{target}:0"
