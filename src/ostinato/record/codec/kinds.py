"""The kinds of rows that the log keeps, and the JSON form of each of their fields.

Packing validates a row: values that no database accepts (NaN, a lone surrogate, None where a string belongs) are refused with the field's
name, before they can fail the other rows of the same transaction.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from typing import Any

from ostinato.core import records
from ostinato.core.errors import BadRequest
from ostinato.core.notices import Alarm, AlarmState, Forgotten, Stamp
from ostinato.core.steering import DialPrior, DialSet, SetBy

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Form:
    """How a field's value is converted to JSON and back. `load` None: the JSON value is the field's value."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any] | None = None


def text(value: Any) -> str:
    """Return the string itself. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not a string")
    return value


def real(value: Any) -> float:
    """Return the number as a float; infinities are allowed. Raises TypeError; ValueError for NaN."""
    number = float(value)
    if math.isnan(number):
        raise ValueError("NaN is not a number that the log keeps")
    return number


def whole(value: Any) -> int:
    """Return the integer itself. Raises TypeError."""
    if not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} is not a whole number")
    return value


def _or_none(form: Form) -> Form:
    load = form.load
    return Form(
        lambda value: None if value is None else form.dump(value),
        None if load is None else lambda value: None if value is None else load(value),
    )


def _tuple_of(form: Form) -> Form:
    """Return the form of a tuple of any length."""
    dump, load = form.dump, form.load
    return Form(
        lambda values: [dump(value) for value in values],
        tuple if load is None else lambda values: tuple(load(value) for value in values),
    )


def _tuple(*forms: Form) -> Form:
    """Return the form of a tuple with one item of each of these forms, which must need no conversion back."""
    return Form(
        lambda items: [form.dump(item) for form, item in zip(forms, items, strict=True)],
        lambda items: tuple(item for _, item in zip(forms, items, strict=True)),
    )


def _mapping_of(form: Form) -> Form:
    """Return the form of a mapping from strings."""
    load = form.load
    return Form(
        lambda named: {text(name): form.dump(value) for name, value in named.items()},
        None if load is None else lambda named: {name: load(value) for name, value in named.items()},
    )


def _record(kind: Any) -> Form:
    """Return the form of a record: an array of its fields in order. New fields of a record are appended at the end."""
    forms = {field.name: FORMS[str(field.type)] for field in fields(kind)}

    def read(values: Any) -> Any:
        named = zip(forms.items(), values, strict=False)
        return kind(**{name: value if form.load is None else form.load(value) for (name, form), value in named})

    return Form(lambda row: [form.dump(getattr(row, name)) for name, form in forms.items()], read)


def _credits(credits: tuple[records.Advantages, ...]) -> list[list[Any]]:
    """Run-length encode advantages turn by turn: most turns have a single value for all tokens."""
    return [[[real(value), len(list(same))] for value, same in groupby(turn)] for turn in credits]


def _to_credits(turns: Any) -> tuple[records.Advantages, ...]:
    return tuple(tuple(value for value, length in runs for _ in range(length)) for runs in turns)


def _sampling(sampling: records.Sampling) -> list[Any]:
    stop, seed = [text(each) for each in sampling.stop], None if sampling.seed is None else whole(sampling.seed)
    plain = [whole(sampling.max_tokens), real(sampling.temperature), real(sampling.top_p), stop, seed]
    bias = [[whole(token), real(value)] for token, value in sampling.logit_bias]
    edits = [real(sampling.presence_penalty), real(sampling.frequency_penalty), bias]
    return [*plain, *edits] if any(edits) else plain


def _to_sampling(value: Any) -> records.Sampling:
    max_tokens, temperature, top_p, stop, seed, *edits = value
    presence, frequency, bias = edits or (0.0, 0.0, ())
    return records.Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=tuple(stop),
        seed=seed,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple((token, value) for token, value in bias),
    )


_TEXT, _REAL, _WHOLE = Form(text), Form(real), Form(whole)
_ENUMS = (
    *(records.Arm, records.Purpose, records.Branch, records.Consent, records.Finish, records.RewardReach),
    *(records.Source, records.WindowMaker, SetBy, AlarmState),
)

FORMS: dict[str, Form] = {
    "str": _TEXT,
    "str | None": _or_none(_TEXT),
    "float": _REAL,
    "float | None": _or_none(_REAL),
    "int": _WHOLE,
    "int | None": _or_none(_WHOLE),
    "bool": Form(bool),
    "bytes": Form(lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "tuple[str, ...]": _tuple_of(_TEXT),
    "tuple[float, ...]": _tuple_of(_REAL),
    "tuple[tuple[str, float], ...]": _tuple_of(_tuple(_TEXT, _REAL)),
    "tuple[tuple[int, int, float], ...]": _tuple_of(_tuple(_WHOLE, _WHOLE, _REAL)),
    "Ranges": _tuple_of(_tuple(_WHOLE, _WHOLE)),
    "Mapping[str, Any]": Form(dict),
    "Mapping[str, float]": _mapping_of(_REAL),
    "Mapping[str, float | None] | None": _or_none(_mapping_of(_or_none(_REAL))),
    "Mapping[str, tuple[float, ...]]": _mapping_of(_tuple_of(_REAL)),
    "Sampling": Form(_sampling, _to_sampling),
    "tuple[Advantages, ...]": Form(_credits, _to_credits),
    **{kind.__name__: Form(str, kind) for kind in _ENUMS},
}
"""Forms by the field's type annotation. Those of nested records are built from these and added below."""

_POLICY = _record(records.PolicyVersion)
FORMS.update(
    {
        "PolicyVersion": _POLICY,
        "PolicyVersion | None": _or_none(_POLICY),
        "Pick | None": _or_none(_record(records.Pick)),
        "Window | None": _or_none(_record(records.Window)),
        "tuple[TurnHint, ...]": _tuple_of(_record(records.TurnHint)),
        "tuple[LineSurvival, ...]": _tuple_of(_record(records.LineSurvival)),
        "tuple[LineValues, ...]": _tuple_of(_record(records.LineValues)),
    }
)


@dataclass(frozen=True, eq=False)
class Kind:
    """How one type of record is stored.

    `identity` names the fields that identify a row, in the order of `core.records.identity`. `body` names the fields of the row's JSON
    array; new fields of a record are appended at the end. `said` names the fields with user text, stored separately so that they can be
    encrypted. `for_ever`: retention never drops such rows. `since`: the segment format from which on the kind exists.
    """

    table: str
    record: type[records.Row]
    identity: tuple[str, ...]
    body: tuple[str, ...]
    said: tuple[str, ...] = ()
    for_ever: bool = False
    since: int = 1

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The form of each field that is stored as JSON."""
        stored = (*self.body, *self.said)
        return {field.name: FORMS[str(field.type)] for field in fields(self.record) if field.name in stored}

    @cached_property
    def restored(self) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
        """The fields that need a conversion after JSON parsing, as (name, `load` function)."""
        return tuple((name, form.load) for name, form in self.forms.items() if form.load is not None)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The positions of the identity's fields in the body."""
        return tuple(self.body.index(name) for name in self.identity)


TURNS = Kind(
    "turns",
    records.Turn,
    ("id",),
    (
        "id",
        "episode",
        "parent",
        "user",
        "tenant",
        "arm",
        "propensity",
        "sampling",
        "finish",
        "started_at",
        "ended_at",
        "numerics",
        "group",
        "verified",
        "auto",
        "purpose",
        "branch",
        "harness",
        "window",
        "consent",
        "secret",
    ),
)
"""The JSON of a turn has none of its tokens, text, spans, grammar, parsed calls and steering: `codec.turns` packs them."""

SIGNALS = Kind(
    "signals",
    records.Signal,
    ("tenant", "id"),
    ("id", "turn", "name", "value", "source", "occurred_at", "received_at", "retracts", "tenant", "lines"),
    said=("correction", "comment"),
)
SMALL = (
    SIGNALS,
    Kind("deliveries", records.Delivered, ("id",), ("id", "turns", "at")),
    Kind(
        "rewards",
        records.Reward,
        ("turn",),
        ("turn", "value", "function", "signals", "at", "upto", "lines", "reach", "early"),
    ),
    Kind("quarantines", records.Quarantine, ("turn",), ("turn", "reason", "at", "upto")),
    Kind("holdbacks", records.Holdback, ("turn",), ("turn", "reason", "at")),
    Kind(
        "batches",
        records.Batch,
        ("step",),
        (
            *("step", "turns", "credits", "reference", "at", "base", "even", "weights", "shown", "after"),
            *("upto", "hints", "scales", "drawn"),
        ),
        for_ever=True,
    ),
    Kind(
        "releases",
        records.ReleaseEvent,
        ("id",),
        ("id", "action", "policy", "previous", "reason", "detail", "at"),
        for_ever=True,
    ),
    Kind("stamps", Stamp, ("id",), ("id", "contract", "at"), for_ever=True),
    Kind("alarms", Alarm, ("id",), ("id", "name", "state", "reason", "at", "detail"), for_ever=True),
    Kind(
        "bases",
        records.SteeringBasis,
        ("hash",),
        ("hash", "names", "tokens", "directions", "weights", "at"),
        for_ever=True,
        since=4,
    ),
    Kind("consents", records.ConsentGiven, ("id",), ("id", "tenant", "user", "level", "at"), for_ever=True, since=4),
    Kind("dials", DialSet, ("id",), ("id", "tenant", "user", "at", "by"), said=("dials",), since=5),
    Kind(
        "priors",
        DialPrior,
        ("number",),
        ("names", "number", "people", "mean", "within", "between", "organisations", "upto", "at", "sigma"),
        for_ever=True,
        since=5,
    ),
    Kind("forgotten", Forgotten, ("id",), ("id", "tenant", "user", "key", "at"), for_ever=True, since=5),
)
"""The kinds that are stored as JSON only: one array, and a second one for user text (`Kind.said`)."""

KINDS = (TURNS, *SMALL)
FOR_EVER = frozenset(kind for kind in SMALL if kind.for_ever)
"""The kinds that retention never drops.

A fold that starts at the horizon needs the training steps, releases, contracts (stamps) and alarms. Turns refer to steering bases. Consents
and erasures bind for ever. Priors of dials are counted in a year's privacy budget, because each released noisy figures.
"""

_BY_RECORD: Mapping[type, Kind] = {kind.record: kind for kind in KINDS}
_CHECKED = [kind.forms for kind in KINDS]  # fail at import, not at the first row, if a field has no form


def kind_of(record: type) -> Kind:
    """Return how a record type is stored. Raises BadRequest for a type that the log does not keep."""
    kind = _BY_RECORD.get(record)
    if kind is None:
        known = ", ".join(sorted(kind.record.__name__ for kind in KINDS))
        raise BadRequest(f"the log keeps {known}, not {record.__name__}")
    return kind


def key_of(kind: Kind, identity: records.Identity) -> int:
    """Return a 63-bit hash of an identity, for indexes. Identities may collide, so a row found by its key must be checked.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    plain = "\0".join([kind.table, *map(str, identity)]).encode()
    return int.from_bytes(blake2b(plain, digest_size=8).digest(), "big") >> 1


def dump(kind: Kind, row: records.Row, names: tuple[str, ...]) -> bytes:
    """Return some of a row's fields as a JSON array. Raises BadRequest, which names the field that cannot be stored."""
    forms = kind.forms
    try:
        return to_json([forms[name].dump(getattr(row, name)) for name in names]).encode()
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise _refused(kind, row, names, error) from error


def _refused(kind: Kind, row: records.Row, names: tuple[str, ...], error: Exception) -> BadRequest:
    for name in names:
        try:
            to_json(kind.forms[name].dump(getattr(row, name))).encode()
        except (ValueError, TypeError, OverflowError, AttributeError) as found:
            return BadRequest(f"{kind.record.__name__}.{name} cannot be stored: {found}", field=name)
    return BadRequest(f"{kind.record.__name__} cannot be stored: {error}")


def load(kind: Kind, names: tuple[str, ...], values: list[Any]) -> dict[str, Any]:
    """The inverse of `dump`: {name: value}. A field that was added to the record after the row was written is left to its default."""
    found = dict(zip(names, values, strict=False))
    for name, restore in kind.restored:
        if name in found:
            found[name] = restore(found[name])
    return found
