"""Bodies of `POST /v1/feedback`: from JSON to signals. Early, late, repeated and unordered events are all accepted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from ostinato.core.conversation import calling_turn
from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.records import Signal, Source
from ostinato.serve.dialects.fields import printable, validate

MAX_EVENTS = 1000
MAX_VALUE = 1e9  # absolute value: squares and sums of such values stay far below a float's maximum
_MAX_TIME = 253_402_300_799.0  # the end of the year 9999

_Id = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=65_536)]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    id: _Id
    target: _Id
    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
    value: bool | float | None = Field(default=None, union_mode="left_to_right")
    source: str
    correction: _Text | None = None
    comment: _Text | None = None
    occurred_at: float | str | None = None
    retracts: _Id | None = None


def count_events(body: Any) -> int:
    """How many events a body has, before any is parsed: 1 if it is not a list, at most `MAX_EVENTS`."""
    return max(1, min(len(body), MAX_EVENTS)) if isinstance(body, list) else 1


def parse_feedback(body: Any, *, tenant: str, now: float) -> list[Signal]:
    """The signals of one event or a list of events.

    Args:
        body: the JSON value.
        tenant: the sender; event ids are unique per tenant.
        now: the arrival time; also the event time, for events that give none.

    Raises:
        BadRequest: names the field at fault, "[3].value" within a list; no event of a bad list is taken.
        TooLarge: the list has more than `MAX_EVENTS` events.
    """
    if not isinstance(body, list):
        return [_signal(body, "", tenant, now)]
    if not body:
        raise BadRequest("The list of events is empty; send at least one.")
    if len(body) > MAX_EVENTS:
        raise TooLarge(f"{len(body)} events in one call; send at most {MAX_EVENTS}.")
    return [_signal(event, f"[{i}]", tenant, now) for i, event in enumerate(body)]


def _signal(body: Any, where: str, tenant: str, now: float) -> Signal:
    event = validate(_Event, body, where)
    dot = f"{where}." if where else ""
    return Signal(
        id=event.id,
        tenant=tenant,
        turn=_turn(event.target),
        name=event.name,
        value=_value(event, f"{dot}value"),
        source=_source(event.source, f"{dot}source"),
        occurred_at=_time(event.occurred_at, now, f"{dot}occurred_at"),
        received_at=now,
        correction=event.correction,
        comment=event.comment,
        retracts=event.retracts,
    )


def _turn(target: str) -> str:
    """The turn that is named: by its own id, by a tool call's id, or by an answer's id, meaning its first choice."""
    return target if ":" in target else calling_turn(target) or f"{target}:0"


def _value(event: _Event, field: str) -> float:
    if event.value is None:
        if event.retracts is None:
            raise BadRequest(f"{field} is missing; send true, false or a finite number.", field=field)
        return 0.0
    if abs(event.value) > MAX_VALUE:
        raise BadRequest(
            f"{field} is {event.value:g}; send a number between -{MAX_VALUE:g} and {MAX_VALUE:g}.", field=field
        )
    return float(event.value)


def _source(source: str, field: str) -> Source:
    try:
        return Source(source)
    except ValueError:
        raise BadRequest(f"{field} must be one of {', '.join(Source)}.", field=field) from None


def _time(value: float | str | None, now: float, field: str) -> float:
    if value is None:
        return now
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadRequest(
                f"{field} is no ISO 8601 time; send Unix seconds or '2026-01-31T12:00:00Z'.", field=field
            ) from None
    if not 0.0 <= value <= _MAX_TIME:
        raise BadRequest(f"{field} is {value:g}; Unix seconds lie in [0, {_MAX_TIME:g}].", field=field)
    return float(value)
