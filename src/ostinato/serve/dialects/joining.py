"""Parts of a conversation as messages, for dialects that send one side's words in several parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from ostinato.core.conversation import Message, Role


def joined(parts: Iterable[Message]) -> Iterator[Message]:
    """The same with neighbours of one role as one message: templates want the roles to take turns. Results stay apart.

    An assistant's parts join without a gap, as its answer's text was cut; of the order of text and calls only that within
    each of the two is kept.
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
