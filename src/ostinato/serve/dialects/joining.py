"""Joins parts of a conversation into messages, for dialects that send one side's turn in several parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from ostinato.core.conversation import Message, Role


def joined(parts: Iterable[Message]) -> Iterator[Message]:
    """Merge adjacent parts of the same role into one message, because templates expect alternating roles. Tool results stay separate.

    An assistant's parts are joined without a separator, as they are pieces of one answer's text. Texts keep their order and so do calls,
    but not the order between texts and calls.
    """
    for role, group in groupby(parts, key=lambda part: part.role):
        same = list(group)
        if role is Role.TOOL or len(same) == 1:
            yield from same
            continue
        yield Message(
            role=role,
            text=("" if role is Role.ASSISTANT else "\n").join(part.text for part in same if part.text),
            reasoning="".join(part.reasoning for part in same),
            calls=tuple(call for part in same for call in part.calls),
        )
