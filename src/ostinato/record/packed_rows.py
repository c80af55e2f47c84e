"""Decodes the rows of a segment into records, on any database, with the segment's dictionaries, policies and token texts."""

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
from ostinato.record.codec.kinds import TURNS, Kind, load
from ostinato.record.codec.shrink import Dictionaries, Shrinker, Use
from ostinato.record.codec.tokens import PackedTokens, unflat, widen
from ostinato.record.codec.turns import Held, KeyDestroyed, Ready
from ostinato.record.keys import KeyRing

_CACHE_BYTES = 4 << 20  # of token ids that stay in memory as bases of other turns
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""Exceptions that decoding a damaged row may raise."""
_MAX_LOOKUPS = 8  # of missing token texts, after which all texts are read at once


class PackedRows(ABC):
    """The rows of one segment as records. Used by one thread at a time.

    A stored row is a tuple that begins with its sequence number. A turn: number, key, head, tokens, logprobs, text, routes. A row of a kind
    with user text (`Kind.said`): number, body, key, text. Any other row: number, body.
    """

    first: Cursor
    """The sequence number of its first row."""

    def __init__(self, name: str, ring: KeyRing | None) -> None:
        self.name = name
        self.ring = ring
        self.policies: dict[int, PolicyVersion] = {}
        self.pieces: dict[int, str] = {}
        self._lookups = 0
        self._held: OrderedDict[Cursor, Held] = OrderedDict()
        self._weight = 0
        self.shrinker = Shrinker(self.stored_dictionaries)
        self.shrinker.refresh()

    # ------------------------------------------------------------ queries to the database

    @property
    @abstractmethod
    def knows_calls(self) -> bool:
        """True if a turn without parsed tool calls had none; False if the segment is older than the storage of tool calls."""

    @abstractmethod
    def locate(self, kind: Kind, identity: Identity) -> Cursor | None:
        """Return the sequence number of the row with this identity; None if it is not in this segment."""

    @abstractmethod
    def stored_tokens(self, seq: Cursor) -> tuple[int | None, bytes] | None:
        """Return the key and the packed ids of the turn with this sequence number."""

    @abstractmethod
    def stored_policies(self) -> Iterable[tuple[int, int, str]]:
        """Return the segment's policy versions as (number in the segment, version number, hash)."""

    @abstractmethod
    def stored_pieces(self, tokens: Collection[int] | None) -> Sequence[tuple[int, str]]:
        """Return the (token, text) pairs that the segment has, of these tokens or of all (None)."""

    @abstractmethod
    def stored_dictionaries(self) -> Dictionaries:
        """Return the dictionaries that rows are compressed with, by number."""

    # ------------------------------------------------------------ writing, in a transaction that the caller began

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """True if it has the format in which new segments are created."""

    @abstractmethod
    def made_at(self) -> float:
        """Return when the segment was created."""

    @abstractmethod
    def put(self, rows: Sequence[tuple[Ready, int]], values: Sequence[tuple[Any, ...]]) -> None:
        """Write rows, each with its identity key; `values` are their stored forms."""

    @abstractmethod
    def put_pieces(self, rows: Sequence[tuple[int, str]]) -> int:
        """Write the texts of tokens that have none yet and return how many were written."""

    @abstractmethod
    def put_policy(self, policy: PolicyVersion) -> int:
        """Return the segment's number for a policy version; assign one if there is none yet."""

    @abstractmethod
    def newest_dictionary(self) -> int:
        """Return the number of the dictionary added last; 1 if there is none."""

    @abstractmethod
    def put_dictionary(self, number: int, use: Use, body: bytes) -> None:
        """Write a dictionary."""

    # ------------------------------------------------------------ rows

    def decode(self, kind: Kind, stored: Any) -> Row:
        """Return the record of one stored row. Values under a destroyed key are left out."""
        try:
            if kind is TURNS:
                return turns.decode(self, stored)
            values = load(kind, kind.body, json.loads(self.shrinker.unpack(stored[1])))
            if kind.said and stored[3] is not None:
                with suppress(KeyDestroyed):
                    said = self.decrypt(stored[2], "said", stored[0], stored[3])
                    values |= load(kind, kind.said, json.loads(self.shrinker.unpack(said)))
            return kind.record(**values)
        except DAMAGE as error:
            raise self.corrupt(stored[0], error) from error

    def corrupt(self, seq: Cursor, error: Exception) -> Corrupt:
        """Return the error for a row whose decoding raised `error`."""
        return Corrupt(f"row {seq} of {self.name} cannot be read: {error!r}; restore it from a copy")

    # ------------------------------------------------------------ token ids, policies and token texts

    def tokens(self, seq: Cursor) -> Held:
        """Return a turn's ids, including those from its bases. Raises KeyDestroyed; ValueError if a base is missing."""
        chain: list[tuple[Cursor, int | None, PackedTokens]] = []
        while (held := self._held.get(seq)) is None:
            stored = self.stored_tokens(seq)
            if stored is None:
                raise ValueError(f"turn {seq}, on which others depend, is missing")
            packed = turns.unpack_tokens(self.shrinker, self.decrypt(stored[0], "tokens", seq, stored[1]))
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
        """Cache a turn's ids, because it may be the base of the next turns."""
        if seq in self._held:
            return
        self._held[seq] = held
        self._weight += len(held.ids)
        while self._weight > _CACHE_BYTES and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._weight -= len(dropped.ids)

    def decrypt(self, secret: int | None, column: str, seq: Cursor, blob: bytes) -> bytes:
        """Return the plain value of a column, decrypted if it has a key. Raises KeyDestroyed, Corrupt."""
        if secret is None:
            return blob
        if self.ring is None:
            raise Corrupt(f"{self.name} holds encrypted rows, but their keys are missing; restore the file of keys")
        return self.ring.decrypt(secret, _associated_data(column, seq), blob)

    def encrypt(self, secret: int | None, column: str, seq: Cursor, plain: bytes) -> bytes:
        """The inverse of `decrypt`."""
        if secret is None or self.ring is None:
            return plain
        return self.ring.encrypt(secret, _associated_data(column, seq), plain)

    def policy(self, number: int) -> PolicyVersion:
        """Return the policy version with this number in the segment. Raises ValueError if it is missing."""
        if number not in self.policies:
            for place, version, digest in self.stored_policies():
                self.policies[place] = PolicyVersion(number=version, hash=digest)
        if number not in self.policies:
            raise ValueError(f"policy {number} is missing")
        return self.policies[number]

    def spell(self, ids: bytes) -> str | None:
        """Return the concatenated texts of tokens; None if any of them has no text in this segment."""
        tokens = unflat(ids)
        spelt = self.known_text(tokens)
        if spelt is None:
            self._read_pieces(tokens)
            spelt = self.known_text(tokens)
        return spelt

    def known_text(self, tokens: Sequence[int]) -> str | None:
        """Return the concatenated texts of tokens; None if any of them has no text in memory."""
        try:
            return "".join(map(self.pieces.__getitem__, tokens))
        except KeyError:
            return None

    def read_all_pieces(self) -> None:
        """Load all token texts of this segment into memory."""
        self.pieces.update(self.stored_pieces(None))

    def _read_pieces(self, tokens: Iterable[int]) -> None:
        """Read the missing texts; after several calls, read all texts at once."""
        self._lookups += 1
        if self._lookups == _MAX_LOOKUPS:
            self.read_all_pieces()
            return
        self.pieces.update(self.stored_pieces([token for token in set(tokens) if token not in self.pieces]))


def _associated_data(column: str, seq: Cursor) -> bytes:
    """Return the associated data (AEAD) of an encrypted value, so that it cannot be moved to another column or row."""
    return f"{column}:{seq}".encode()
