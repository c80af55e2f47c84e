"""Prepares a row for writing: checks it, and packs it as far as possible without knowing its segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ostinato.core.errors import BadRequest
from ostinato.core.records import Identity, Row, Turn, identity
from ostinato.record.codec import turns
from ostinato.record.codec.kinds import Kind, dump, key_of, kind_of


@dataclass(slots=True)
class Ready:
    """A row that can be stored. `said`: what people wrote in it, unless it is a turn. `secret`: the number of the key that encrypts it."""

    kind: Kind
    row: Row
    identity: Identity
    key: int
    body: bytes
    said: bytes | None = None
    turn: turns.Prepared | None = None
    secret: int | None = None

    @property
    def size(self) -> int:
        """Bytes, before repeated content is removed."""
        size = len(self.body) + len(self.said or b"")
        if self.turn is None:
            return size
        row = cast("Turn", self.row)
        return (
            size
            + len(self.turn.ids)
            + len(self.turn.logprobs)
            + len(self.turn.grammar)
            + len(self.turn.calls)
            + len(row.text)
            + len(row.routes)
        )


def prepare(row: Row) -> Ready:
    """Check and pack a row. Raises BadRequest, which names the field that cannot be stored."""
    kind = kind_of(type(row))
    prepared = turns.prepare(row) if isinstance(row, Turn) else None
    body = dump(kind, row, kind.body) if prepared is None else prepared.head
    said = None
    if any(getattr(row, name) is not None for name in kind.said):
        said = dump(kind, row, kind.said)
    names = identity(row)
    try:
        key = key_of(kind, names)
    except UnicodeEncodeError as error:
        raise BadRequest(f"{kind.record.__name__} cannot be stored: {error}") from error
    return Ready(kind, row, names, key, body, said, prepared)
