"""One open segment: its rows as records, and what they are packed with."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.core.errors import Corrupt
from ostinato.core.records import Identity, PolicyVersion, Row
from ostinato.core.seams import Cursor
from ostinato.record.codec import turns
from ostinato.record.codec.kinds import KINDS, SIGNALS, TURNS, Kind, key_of, load
from ostinato.record.codec.shrink import Dictionaries, Shrinker, Use
from ostinato.record.codec.tokens import Packed, unflat, widen
from ostinato.record.codec.turns import Forgotten, Held
from ostinato.record.keys import KeyRing
from ostinato.record.segments.schema import check
from ostinato.record.sqlite import connect, driver, translate

KEYS = (1 << 63) - 1
_HELD = 4 << 20  # bytes of ids that stay in memory for the turns that lean on them
_OFTEN = 8  # turns whose tokens are looked up one by one


class SegmentGone(Exception):
    """The file is not there: retention dropped it."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a closed segment says about itself: its last row, when it was closed, the tables that have rows."""

    last: Cursor
    at: float
    tables: frozenset[str]


class Segment:
    """A segment file, open. Used by one thread at a time; close it when done.

    Raises, here and in every method: SegmentGone (opening only), Corrupt, BadConfig for another format, the driver's errors.
    """

    def __init__(self, path: Path, ring: KeyRing | None, *, write: bool = False) -> None:
        self.path = path
        self.ring = ring
        try:
            self.db = connect(path, write=write)
        except driver.OperationalError as error:
            if not path.exists():
                raise SegmentGone(str(path)) from error
            raise translate(error, path) from error
        try:
            self.version = check(self.db, path)
            (self.first,) = self.db.execute("SELECT first FROM segment").fetchone()
            self.shrinker = Shrinker(self._dictionaries)
            self.shrinker.refresh()
        except BaseException as error:
            self.db.close()
            if isinstance(error, Exception) and not path.exists():  # dropped in this very moment
                raise SegmentGone(str(path)) from error
            raise
        self.policies: dict[int, PolicyVersion] = {}
        self.pieces: dict[int, str] = {}
        self._asked = 0
        self._held: OrderedDict[Cursor, Held] = OrderedDict()
        self._weight = 0
        self._seal: Seal | None = None

    def close(self) -> None:
        """Let go of the file."""
        self.db.close()

    # ------------------------------------------------------------ where it stands

    def newest(self) -> Cursor:
        """The place of its newest row; the one before its first if it has none."""
        return self.db.execute(_NEWEST).fetchone()[0] or self.first - 1

    def seal(self) -> Seal | None:
        """How it was closed; None while it is open."""
        if self._seal is None:
            found = self.db.execute("SELECT last, at, kinds FROM seal").fetchone()
            self._seal = found and Seal(found[0], found[1], frozenset(json.loads(found[2])))
        return self._seal

    def filter(self) -> bytes:
        """What `segments.filters` made of its identities when it was closed; empty while it is open."""
        found = self.db.execute("SELECT filter FROM seal").fetchone()
        return found[0] if found else b""

    # ------------------------------------------------------------ rows

    def fetch(self, kind: Kind, after: Cursor, end: Cursor, limit: int, *, newest_first: bool = False) -> list[Any]:
        """Rows of one kind as they are stored, `after` < place <= `end`. `decode` makes records of them."""
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT * FROM {kind.table} WHERE seq > ? AND seq <= ? ORDER BY seq {order} LIMIT ?"
        return self.db.execute(query, (after, end, limit)).fetchall()

    def before_last(self, count: int, kind: Kind) -> tuple[Cursor | None, int]:
        """The place before the newest `count` rows of one kind, if there are so many here; and how many there are, if not."""
        query = f"SELECT seq FROM {kind.table} ORDER BY seq DESC LIMIT 1 OFFSET ?"
        found = self.db.execute(query, (count - 1,)).fetchone()
        if found is not None:
            return found[0] - 1, count
        return None, self.db.execute(f"SELECT count(*) FROM {kind.table}").fetchone()[0]

    def decode(self, kind: Kind, stored: Any) -> Row:
        """The record of one stored row. What lies under a key that was forgotten is left out."""
        try:
            if kind is TURNS:
                return turns.decode(self, stored)
            values = load(kind, kind.body, json.loads(self.shrinker.unpack(stored[1])))
            if kind is SIGNALS and stored[3] is not None:
                with suppress(Forgotten):
                    said = self.reveal(stored[2], "said", stored[0], stored[3])
                    values |= load(kind, kind.said, json.loads(self.shrinker.unpack(said)))
            return kind.record(**values)
        except (ValueError, IndexError, TypeError, KeyError) as error:
            raise Corrupt(
                f"row {stored[0]} of {self.path} cannot be read: {error!r}; restore it from a copy"
            ) from error

    def locate(self, kind: Kind, identity: Identity) -> Cursor | None:
        """Where the row with this identity lies; None if it is not in this segment."""
        return self.place(kind, identity, key_of(kind, identity))[0]

    def place(self, kind: Kind, identity: Identity, key: int) -> tuple[Cursor | None, int]:
        """Where the row lies, or None; and the key that it has, or would get: two identities of one key lie side by side."""
        while (found := self.db.execute("SELECT seq FROM identities WHERE key = ?", (key,)).fetchone()) is not None:
            if self._identity(kind, found[0]) == identity:
                return found[0], key
            key = (key + 1) & KEYS
        return None, key

    def known(self, keys: Sequence[int]) -> set[int]:
        """Those of the keys that are taken."""
        query = "SELECT key FROM identities WHERE key IN (SELECT value FROM json_each(?))"
        return {key for (key,) in self.db.execute(query, (json.dumps(list(keys)),))}

    def row(self, kind: Kind, seq: Cursor) -> Row | None:
        """The record at one place, if it is of this kind."""
        stored = self.db.execute(f"SELECT * FROM {kind.table} WHERE seq = ?", (seq,)).fetchone()
        return None if stored is None else self.decode(kind, stored)

    def owner(self, seq: Cursor) -> tuple[str, str] | None:
        """The tenant and the user of the turn at one place; no key is needed for that."""
        stored = self.db.execute("SELECT head FROM turns WHERE seq = ?", (seq,)).fetchone()
        return None if stored is None else turns.head_owner(self.shrinker.unpack(stored[0]))

    def _identity(self, kind: Kind, seq: Cursor) -> Identity | None:
        column = "head" if kind is TURNS else "body"
        stored = self.db.execute(f"SELECT {column} FROM {kind.table} WHERE seq = ?", (seq,)).fetchone()
        if stored is None:
            return None
        plain = self.shrinker.unpack(stored[0])
        if kind is TURNS:
            return (turns.head_id(plain),)
        values = json.loads(plain)
        return tuple(values[at] for at in kind.places)

    # ------------------------------------------------------------ what rows are packed with

    def tokens(self, seq: Cursor) -> Held:
        """A turn's ids, its bases' included. Raises Forgotten; ValueError if a base is missing."""
        chain: list[tuple[Cursor, int | None, Packed]] = []
        while (held := self._held.get(seq)) is None:
            stored = self.db.execute("SELECT secret, tokens FROM turns WHERE seq = ?", (seq,)).fetchone()
            if stored is None:
                raise ValueError(f"turn {seq}, which others lean on, is missing")
            packed = turns.unpack_tokens(self.shrinker, self.reveal(stored[0], "tokens", seq, stored[1]))
            chain.append((seq, stored[0], packed))
            if not packed.gap:
                break
            seq -= packed.gap
        ids = b"" if held is None else held.ids
        for place, secret, packed in reversed(chain):
            ids = ids[: 4 * packed.shared] + widen(packed.width, packed.ids)
            held = Held(ids, packed.prompt, packed.depth, secret)
            self.hold(place, held)
        assert held is not None
        return held

    def hold(self, seq: Cursor, held: Held) -> None:
        """Keep a turn's ids in memory for a while: the next turns may lean on it."""
        if seq in self._held:
            return
        self._held[seq] = held
        self._weight += len(held.ids)
        while self._weight > _HELD and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._weight -= len(dropped.ids)

    def reveal(self, secret: int | None, column: str, seq: Cursor, blob: bytes) -> bytes:
        """What lies in a column, encrypted or not. Raises Forgotten, Corrupt."""
        if secret is None:
            return blob
        if self.ring is None:
            raise Corrupt(f"{self.path} holds encrypted rows, but their keys are missing; restore the file of keys")
        return self.ring.reveal(secret, _bound(column, seq), blob)

    def conceal(self, secret: int | None, column: str, seq: Cursor, plain: bytes) -> bytes:
        """The inverse of `reveal`."""
        if secret is None or self.ring is None:
            return plain
        return self.ring.conceal(secret, _bound(column, seq), plain)

    def policy(self, number: int) -> PolicyVersion:
        """The policy version that rows of this segment call by a number. Raises ValueError."""
        if number not in self.policies:
            for place, version, digest in self.db.execute("SELECT id, number, hash FROM policies"):
                self.policies[place] = PolicyVersion(number=version, hash=digest)
        if number not in self.policies:
            raise ValueError(f"policy {number} is missing")
        return self.policies[number]

    def spell(self, ids: bytes) -> str | None:
        """The texts of tokens, one after the other; None if one of them has none in this segment."""
        tokens = unflat(ids)
        try:
            return "".join(map(self.pieces.__getitem__, tokens))
        except KeyError:
            self._read_pieces(tokens)
        try:
            return "".join(map(self.pieces.__getitem__, tokens))
        except KeyError:
            return None

    def read_all_pieces(self) -> None:
        """Have the texts of all tokens in memory that this segment has the texts of."""
        self.pieces.update(self.db.execute("SELECT token, text FROM pieces").fetchall())

    def _read_pieces(self, tokens: Iterable[int]) -> None:
        """Read what is missing; who asks often is given all at once."""
        self._asked += 1
        if self._asked == _OFTEN:
            self.read_all_pieces()
            return
        missing = json.dumps([token for token in set(tokens) if token not in self.pieces])
        query = "SELECT token, text FROM pieces WHERE token IN (SELECT value FROM json_each(?))"
        self.pieces.update(self.db.execute(query, (missing,)).fetchall())

    def _dictionaries(self) -> Dictionaries:
        found = self.db.execute("SELECT id, use, body FROM dictionaries").fetchall()
        return {number: (Use(use), body) for number, use, body in found}


_NEWEST = "SELECT max(" + ", ".join(f"ifnull((SELECT max(seq) FROM {kind.table}), 0)" for kind in KINDS) + ")"


def _bound(column: str, seq: Cursor) -> bytes:
    """What an encrypted value is bound to, so that it cannot be put in another's place."""
    return f"{column}:{seq}".encode()
