"""Records <-> table rows. Everything that could make a database refuse a row is refused here, in the caller's own call.

An encoded row is its kind (the table's name), its identity, and one plain value per column; `decode` is the inverse, exact for
every record whose log-probabilities are float32 numbers, which is what engines compute, and whose `detail` is made of JSON's types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import groupby, islice
from typing import Any

import numpy as np

from ostinato.core.errors import BadRequest
from ostinato.core.records import (
    Advantages,
    Alarm,
    AlarmState,
    Arm,
    Batch,
    Delivered,
    Finish,
    Holdback,
    Identity,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    Stamp,
    Turn,
)

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row ready to be bound: table name, identity within the table, column values without `seq`."""

    kind: str
    identity: Identity
    values: Values


@dataclass(frozen=True, slots=True)
class Kind:
    """How one record type is stored: its table, its identity's column, and the columns that need more than a plain value."""

    table: str
    record: type[Row]
    identity: tuple[str, ...]
    pack: Mapping[str, Callable[[Any], Any]]
    unpack: Mapping[str, Callable[[Any], Any]]


def _blob(dtype: str) -> Callable[[tuple[float, ...]], bytes]:
    return lambda numbers: np.asarray(numbers, dtype=dtype).tobytes()


def _numbers(dtype: str) -> Callable[[bytes], tuple[Any, ...]]:
    return lambda blob: tuple(np.frombuffer(blob, dtype=dtype).tolist())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _credits(credits: tuple[Advantages, ...]) -> bytes:
    """Runs of equal advantages, turn by turn: most turns have one for all of their tokens."""
    runs = [[(value, len(list(same))) for value, same in groupby(turn)] for turn in credits]
    counts = np.asarray([len(turn) for turn in runs], "<i4")
    lengths = np.asarray([length for turn in runs for _, length in turn], "<i4")
    values = np.asarray([value for turn in runs for value, _ in turn], "<f8")
    return (
        np.asarray([len(counts), len(lengths)], "<i4").tobytes()
        + counts.tobytes()
        + lengths.tobytes()
        + values.tobytes()
    )


def _to_credits(blob: bytes) -> tuple[Advantages, ...]:
    turns, runs = np.frombuffer(blob, "<i4", 2).tolist()
    counts = np.frombuffer(blob, "<i4", turns, 8).tolist()
    lengths = np.frombuffer(blob, "<i4", runs, 8 + 4 * turns).tolist()
    values = np.frombuffer(blob, "<f8", runs, 8 + 4 * (turns + runs)).tolist()
    pairs = iter(zip(values, lengths, strict=True))
    return tuple(tuple(value for value, length in islice(pairs, count) for _ in range(length)) for count in counts)


def _strings(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _policy(policy: PolicyVersion | None) -> str | None:
    return None if policy is None else _json([policy.number, policy.hash])


def _to_policy(text: str | None) -> PolicyVersion | None:
    if text is None:
        return None
    number, digest = json.loads(text)
    return PolicyVersion(number=number, hash=digest)


def _spans(spans: tuple[Span, ...]) -> str:
    return _json([[span.policy.number, span.policy.hash, span.tokens] for span in spans])


def _to_spans(text: str) -> tuple[Span, ...]:
    return tuple(Span(policy=PolicyVersion(number=n, hash=h), tokens=t) for n, h, t in json.loads(text))


def _sampling(sampling: Sampling) -> str:
    return _json({field.name: getattr(sampling, field.name) for field in fields(Sampling)})


def _to_sampling(text: str) -> Sampling:
    values: dict[str, Any] = json.loads(text)
    values["stop"] = tuple(values["stop"])
    return Sampling(**values)


KINDS: tuple[Kind, ...] = (
    Kind(
        table="turns",
        record=Turn,
        identity=("id",),
        pack={
            "arm": str,
            "finish": str,
            "prompt_ids": _blob("<i4"),
            "sampled_ids": _blob("<i4"),
            "logprobs": _blob("<f4"),
            "spans": _spans,
            "sampling": _sampling,
        },
        unpack={
            "arm": Arm,
            "finish": Finish,
            "prompt_ids": _numbers("<i4"),
            "sampled_ids": _numbers("<i4"),
            "logprobs": _numbers("<f4"),
            "spans": _to_spans,
            "sampling": _to_sampling,
        },
    ),
    Kind(table="deliveries", record=Delivered, identity=("id",), pack={"turns": _json}, unpack={"turns": _strings}),
    Kind(table="signals", record=Signal, identity=("tenant", "id"), pack={"source": str}, unpack={"source": Source}),
    Kind(table="rewards", record=Reward, identity=("turn",), pack={"signals": _json}, unpack={"signals": _strings}),
    Kind(table="quarantines", record=Quarantine, identity=("turn",), pack={}, unpack={}),
    Kind(table="holdbacks", record=Holdback, identity=("turn",), pack={}, unpack={}),
    Kind(
        table="batches",
        record=Batch,
        identity=("step",),
        pack={"turns": _json, "credits": _credits, "reference": _policy, "base": _policy},
        unpack={"turns": _strings, "credits": _to_credits, "reference": _to_policy, "base": _to_policy},
    ),
    Kind(
        table="releases",
        record=ReleaseEvent,
        identity=("id",),
        pack={"policy": _policy, "previous": _policy, "detail": lambda detail: _json(dict(detail))},
        unpack={"policy": _to_policy, "previous": _to_policy, "detail": json.loads},
    ),
    Kind(table="stamps", record=Stamp, identity=("id",), pack={}, unpack={}),
    Kind(
        table="alarms",
        record=Alarm,
        identity=("id",),
        pack={"state": str, "detail": lambda detail: _json(dict(detail))},
        unpack={"state": AlarmState, "detail": json.loads},
    ),
)

BY_RECORD: Mapping[type, Kind] = {kind.record: kind for kind in KINDS}
BY_TABLE: Mapping[str, Kind] = {kind.table: kind for kind in KINDS}


def kind_of(record: type) -> Kind:
    """How a record type is stored. Raises BadRequest for a type that the log does not keep."""
    kind = BY_RECORD.get(record)
    if kind is None:
        known = ", ".join(sorted(kind.record.__name__ for kind in KINDS))
        raise BadRequest(f"the log keeps {known}, not {record.__name__}")
    return kind


def encode(row: Row) -> Encoded:
    """One record as column values. Raises BadRequest naming the field that cannot be stored (NaN, lone surrogate, id over 2^31)."""
    kind = kind_of(type(row))
    values: Values = {}
    for field in fields(row):
        name = field.name
        value = getattr(row, name)
        pack = kind.pack.get(name)
        try:
            values[name] = _storable(value if pack is None else pack(value))
        except (ValueError, TypeError, OverflowError) as error:
            raise BadRequest(f"{kind.record.__name__}.{name} cannot be stored: {error}", field=name) from error
    return Encoded(kind.table, tuple(values[column] for column in kind.identity), values)


def decode(kind: Kind, values: Mapping[str, Any]) -> Row:
    """The record of one table row."""
    unpack = kind.unpack
    return kind.record(
        **{
            field.name: unpack[field.name](values[field.name]) if field.name in unpack else values[field.name]
            for field in fields(kind.record)
        }
    )


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        value.encode()  # a lone surrogate would fail inside the shared transaction and take its neighbours with it
    elif isinstance(value, float):
        if math.isnan(value):
            raise ValueError("NaN is not a number that the log keeps")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("the number does not fit in 64 bits")
    return value
