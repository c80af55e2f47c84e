"""Closed segments in bulk: copies of a segment that the writer wrote, with other names, times and sequence numbers.

A copy holds as many rows as its pattern, in the same order, with the same tokens and log-probabilities. Every name and hash is
replaced. Times, sequence numbers, steps and version numbers continue where the previous segment ended. The copy is the file
that the writer would have written for those rows, made in a fraction of the time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.record.traffic import LETTERS

from ostinato.record.codec.kinds import KINDS, SMALL, TURNS, Kind, to_json
from ostinato.record.codec.shrink import Shrinker, Use
from ostinato.record.segment import KEYS, Segment, create_segment
from ostinato.record.segment_directory import LogDirectory, build_filter
from ostinato.record.sqlite import sync_directory

_TIMES = frozenset({"started_at", "ended_at", "at", "occurred_at", "received_at"})
_WITHOUT = 1  # first byte of a value packed without a dictionary
_POLICIES = frozenset({"policy", "previous", "reference", "base"})


@dataclass(frozen=True, slots=True)
class Offsets:
    """Offsets that a copy adds to its pattern's sequence numbers, times, steps and version numbers."""

    place: int
    seconds: float
    step: int
    number: int

    def added(self, what: str, value: Any) -> Any:
        return value + {"place": self.place, "time": self.seconds, "step": self.step, "number": self.number}[what]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row with gaps for the values that a copy changes, other than names.

    `plain`: the fields that its key hashes. `early`: it was packed before the segment had a dictionary.
    """

    seq: int
    form: bytes
    gaps: tuple[tuple[str, Any], ...]
    plain: tuple[bytes, ...]
    early: bool
    columns: tuple[Any, ...]

    def body(self, offsets: Offsets) -> bytes:
        return self.form % tuple(offsets.added(what, value) for what, value in self.gaps)


class Pattern:
    """A closed segment, read into memory. Its rows are small rows and turns, none of them encrypted or with a comment.

    `rows`, `turns`, `steps`, `numbers`: how many rows, turns, steps and policy versions it holds. Names consist of `LETTERS`.
    """

    def __init__(self, path: Path) -> None:
        segment = Segment(path, None)
        try:
            seal = segment.seal()
            if seal is None:
                raise ValueError(f"{path} is not closed")
            self.first, self.last, self.sealed_at = segment.first, seal.last, seal.at
            (self.made_at,) = segment.db.execute("SELECT made_at FROM segment").fetchone()
            self.tables = seal.tables
            self.kinds = {kind: _rows(segment, kind) for kind in KINDS}
            self.extras = {
                name: segment.db.execute(f"SELECT * FROM {name}").fetchall()
                for name in ("dictionaries", "pieces", "policies")
            }
        finally:
            segment.close()
        self.rows = self.last - self.first + 1
        self.turns = len(self.kinds[TURNS])
        self.steps = sum(kind.table == "batches" and len(rows) for kind, rows in self.kinds.items())
        self.numbers = len(self.extras["policies"])


def copy(pattern: Pattern, directory: LogDirectory, offsets: Offsets, seed: int) -> Path:
    """Write a copy of a pattern that begins `offsets.place` rows after it. Its names depend only on `seed`."""
    letters = list(LETTERS)
    random.Random(seed).shuffle(letters)
    renamed = bytes.maketrans(LETTERS.encode(), "".join(letters).encode())
    first = pattern.first + offsets.place
    path = directory.segment(first)
    create_segment(path, first, pattern.made_at + offsets.seconds)
    segment = Segment(path, None, write=True)
    try:
        for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-100000"):
            segment.db.execute(f"PRAGMA {setting}")
        segment.db.execute("BEGIN IMMEDIATE")
        _insert_extras(segment, pattern, offsets, renamed)
        keys = _insert_rows(segment, pattern, offsets, renamed)
        tables = [kind.table for kind in KINDS if kind.table in pattern.tables]
        seal = (
            pattern.last + offsets.place,
            pattern.sealed_at + offsets.seconds,
            json.dumps(tables),
            build_filter(keys),
        )
        segment.db.execute("INSERT INTO seal VALUES (1, ?, ?, ?, ?)", seal)
        segment.db.execute("COMMIT")
        segment.db.execute("PRAGMA journal_mode=WAL")
    finally:
        segment.close()
    sync_directory(directory.path)
    return path


def _insert_extras(segment: Segment, pattern: Pattern, offsets: Offsets, renamed: bytes) -> None:
    segment.db.executemany("INSERT INTO dictionaries VALUES (?, ?, ?)", pattern.extras["dictionaries"])
    segment.db.executemany("INSERT INTO pieces VALUES (?, ?)", pattern.extras["pieces"])
    policies = [
        (place, number + offsets.number, digest.encode().translate(renamed).decode())
        for place, number, digest in pattern.extras["policies"]
    ]
    segment.db.executemany("INSERT INTO policies VALUES (?, ?, ?)", policies)
    segment.shrinker.refresh()


def _insert_rows(segment: Segment, pattern: Pattern, offsets: Offsets, renamed: bytes) -> Sequence[int]:
    """Write the rows, and their identities in row order as the writer does. Returns the keys."""
    early, later = Shrinker(dict), segment.shrinker
    identities: list[tuple[int, int]] = []
    for kind, rows in pattern.kinds.items():
        values: list[tuple[Any, ...]] = []
        for row in rows:
            seq = row.seq + offsets.place
            body = (early if row.early else later).pack(Use.ROWS, row.body(offsets).translate(renamed))
            values.append((seq, None, body, *row.columns) if kind is TURNS else (seq, body, *row.columns))
            identities.append((_key(kind, row, offsets, renamed), seq))
        if values:
            marks = ", ".join("?" * len(values[0]))
            segment.db.executemany(f"INSERT INTO {kind.table} VALUES ({marks})", values)
    identities.sort(key=lambda pair: pair[1])
    segment.db.executemany("INSERT INTO identities VALUES (?, ?)", identities)
    return [key for key, _ in identities]


def _key(kind: Kind, row: _Row, offsets: Offsets, renamed: bytes) -> int:
    """Like `codec.kinds.key_of`, which a test compares it with."""
    parts = [str(int(row.plain[0]) + offsets.step).encode()] if kind.identity == ("step",) else row.plain
    plain = b"\0".join([kind.table.encode(), *(part.translate(renamed) for part in parts)])
    return int.from_bytes(blake2b(plain, digest_size=8).digest(), "big") >> 1 & KEYS


# ---------------------------------------------------------------- reading the pattern


def _rows(segment: Segment, kind: Kind) -> list[_Row]:
    found: list[_Row] = []
    for stored in segment.fetch(kind, 0, 1 << 62, 1 << 62):
        if kind is TURNS:
            seq, secret, head, *columns = stored
            lead, *values = json.loads(segment.shrinker.unpack(head))
            front = [to_json(lead).encode()]
        else:
            assert kind in SMALL
            seq, body, *columns = stored
            secret, values, front = None, json.loads(segment.shrinker.unpack(body)), []
        if secret is not None or (any(columns[:2]) and kind is not TURNS):
            raise ValueError(f"row {seq} is encrypted or says something: no pattern for copies")
        named = dict(zip(kind.body, values, strict=True))
        parts, gaps = list[bytes](), list[tuple[str, Any]]()
        for name, value in named.items():
            part, gap = _part(name, value)
            parts.append(part)
            gaps += gap
        form = b"[" + b",".join([*(part.replace(b"%", b"%%") for part in front), *parts]) + b"]"
        plain = tuple(str(named[name]).encode() for name in kind.identity)
        early = stored[2 if kind is TURNS else 1][0] == _WITHOUT
        found.append(_Row(seq, form, tuple(gaps), plain, early, tuple(columns)))
    return found


def _part(name: str, value: Any) -> tuple[bytes, list[tuple[str, Any]]]:
    """A field of a row's JSON, with gaps for the values that a copy changes."""
    if name in _TIMES:
        return b"%r", [("time", value)]
    if name in ("upto", "step"):
        return b"%d", [("place" if name == "upto" else "step", value)]
    if name in _POLICIES and value is not None:
        return b"[%d," + to_json(value[1]).encode() + b"]", [("number", value[0])]
    return to_json(value).encode().replace(b"%", b"%%"), []
