"""Bodies of `POST /v1/feedback`: from JSON to signals. Early, late, repeated and unordered events are all accepted."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from ostinato.core.conversation import calling_turn
from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.records import Signal, Source
from ostinato.serve.dialects.dialect import SHOWN, printable, refusal, validate

MAX_EVENTS = 1000
MAX_VALUE = 1e9  # absolute value: squares and sums of such values stay far below a float's maximum
_MAX_TIME = 253_402_300_799.0  # the end of the year 9999

_Id = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=65_536)]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    id: _Id = Field(default_factory=lambda: f"fb-{secrets.token_hex(16)}")
    target: _Id
    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
    retracts: _Id | None = None  # before `value`, which may be left out with it
    value: bool | float | None = Field(default=None, union_mode="left_to_right", validate_default=True)
    source: str = Source.HUMAN.value
    correction: _Text | None = None
    comment: _Text | None = None
    occurred_at: float | str | None = None

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
                raise ValueError("is no ISO 8601 time; send Unix seconds or '2026-01-31T12:00:00Z'") from None
        if at is not None and not 0.0 <= at <= _MAX_TIME:
            raise ValueError(f"is {at:g}; Unix seconds lie in [0, {_MAX_TIME:g}]")
        return at


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
        BadRequest: names the fields at fault, "[3].value" within a list, up to the tenth bad event; no event of a bad list is taken.
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
            signals.append(_signal(event, f"[{i}]", tenant, now))
        except BadRequest as error:
            wrong[error.field or f"[{i}]"] = str(error).removesuffix(".")
        if len(wrong) == SHOWN and i + 1 < len(body):
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
    )


def _turn(target: str) -> str:
    """The turn that is named: by its own id, by a tool call's id, or by an answer's id, meaning its first choice."""
    return target if ":" in target else calling_turn(target) or f"{target}:0"
