"""What the rows of one segment are packed with, whatever database it lies in; and the records that they make."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ostinato.core.errors import Corrupt
from ostinato.core.records import Identity, PolicyVersion, Row
from ostinato.core.seams import Cursor
from ostinato.record.codec import turns
from ostinato.record.codec.kinds import SIGNALS, TURNS, Kind, load
from ostinato.record.codec.rows import Ready
from ostinato.record.codec.shrink import Dictionaries, Shrinker, Use
from ostinato.record.codec.tokens import Packed, unflat, widen
from ostinato.record.codec.turns import Forgotten, Held
from ostinato.record.keys import KeyRing

_HELD = 4 << 20  # bytes of ids that stay in memory for the turns that lean on them
_OFTEN = 8  # turns whose tokens are looked up one by one


class PackedRows(ABC):
    """One segment's rows as records. Used by one thread at a time.

    A stored row is a tuple that begins with its place. A turn: place, key, head, tokens, logprobs, text, routes. A signal: place,
    body, key, what was said. Any other row: place and body.
    """

    def __init__(self, name: str, ring: KeyRing | None) -> None:
        self.name = name
        self.ring = ring
        self.policies: dict[int, PolicyVersion] = {}
        self.pieces: dict[int, str] = {}
        self._asked = 0
        self._held: OrderedDict[Cursor, Held] = OrderedDict()
        self._weight = 0
        self.shrinker = Shrinker(self.stored_dictionaries)
        self.shrinker.refresh()

    # ------------------------------------------------------------ what the database is asked

    @abstractmethod
    def locate(self, kind: Kind, identity: Identity) -> Cursor | None:
        """Where the row with this identity lies; None if it is not in this segment."""

    @abstractmethod
    def stored_tokens(self, seq: Cursor) -> tuple[int | None, bytes] | None:
        """The key and the packed ids of the turn at one place."""

    @abstractmethod
    def stored_policies(self) -> Iterable[tuple[int, int, str]]:
        """What the segment calls its policy versions: name, number, hash."""

    @abstractmethod
    def stored_pieces(self, tokens: Collection[int] | None) -> Sequence[tuple[int, str]]:
        """The texts of these tokens, or of all, as far as the segment has them."""

    @abstractmethod
    def stored_dictionaries(self) -> Dictionaries:
        """The dictionaries that rows are compressed with, by number."""

    # ------------------------------------------------------------ writing, in a transaction that others began

    @abstractmethod
    def made_at(self) -> float:
        """When the segment was made."""

    @abstractmethod
    def put(self, rows: Sequence[tuple[Ready, int]], values: Sequence[tuple[Any, ...]]) -> None:
        """Write rows, each with its key, as they are to be stored."""

    @abstractmethod
    def put_pieces(self, rows: Sequence[tuple[int, str]]) -> int:
        """Write the texts of tokens, but for those that have one; how many were written."""

    @abstractmethod
    def put_policy(self, policy: PolicyVersion) -> int:
        """What the segment calls a policy version, from now on if it has no name yet."""

    @abstractmethod
    def newest_dictionary(self) -> int:
        """The number of the dictionary that was added last; 1 if there is none."""

    @abstractmethod
    def put_dictionary(self, number: int, use: Use, body: bytes) -> None:
        """Write a dictionary."""

    # ------------------------------------------------------------ rows

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
                f"row {stored[0]} of {self.name} cannot be read: {error!r}; restore it from a copy"
            ) from error

    # ------------------------------------------------------------ what rows are packed with

    def tokens(self, seq: Cursor) -> Held:
        """A turn's ids, its bases' included. Raises Forgotten; ValueError if a base is missing."""
        chain: list[tuple[Cursor, int | None, Packed]] = []
        while (held := self._held.get(seq)) is None:
            stored = self.stored_tokens(seq)
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
            raise Corrupt(f"{self.name} holds encrypted rows, but their keys are missing; restore the file of keys")
        return self.ring.reveal(secret, _bound(column, seq), blob)

    def conceal(self, secret: int | None, column: str, seq: Cursor, plain: bytes) -> bytes:
        """The inverse of `reveal`."""
        if secret is None or self.ring is None:
            return plain
        return self.ring.conceal(secret, _bound(column, seq), plain)

    def policy(self, number: int) -> PolicyVersion:
        """The policy version that rows of this segment call by a number. Raises ValueError."""
        if number not in self.policies:
            for place, version, digest in self.stored_policies():
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
        self.pieces.update(self.stored_pieces(None))

    def _read_pieces(self, tokens: Iterable[int]) -> None:
        """Read what is missing; who asks often is given all at once."""
        self._asked += 1
        if self._asked == _OFTEN:
            self.read_all_pieces()
            return
        self.pieces.update(self.stored_pieces([token for token in set(tokens) if token not in self.pieces]))


def _bound(column: str, seq: Cursor) -> bytes:
    """What an encrypted value is bound to, so that it cannot be put in another's place."""
    return f"{column}:{seq}".encode()
