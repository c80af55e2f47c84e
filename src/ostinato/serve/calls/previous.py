"""Answers that a call may go on from by their id (`previous_response_id`): what was said, in memory, while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.core.conversation import Conversation, Message
from ostinato.core.errors import BadRequest
from ostinato.core.records import Turn
from ostinato.serve.dialects.dialect import ConversationRequest
from ostinato.serve.dialects.responses import ResponsesRequest

_OVERHEAD = 500  # what a message or an entry costs besides its characters, in characters


class PreviousGone(BadRequest):
    """An answer that is to be gone on from is not kept."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a call added to the answer before it: its input, and its own answer."""

    before: str | None
    said: tuple[Message, ...]

    @property
    def cost(self) -> int:
        return sum(message.chars for message in self.said) + _OVERHEAD * (1 + len(self.said))


class Previous:
    """One tenant's answers by id, each with what came before it. The least recently used are dropped.

    Args:
        budget: about how many characters are held.

    Example::

        conversation = previous.conversation(request)  # what its answer named is before what it says
        ...  # the answer is sampled and stored as a turn
        previous.keep(request, turn, answer)
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def conversation(self, request: ConversationRequest) -> Conversation:
        """What is to be answered, behind what was said up to the answer that the request names. Raises PreviousGone, BadRequest."""
        if not isinstance(request, ResponsesRequest) or request.previous_response_id is None:
            return request.conversation
        steps = list(self._back(request.previous_response_id))
        for step in steps:  # the first answer last: of a conversation that is dropped the newest answers go first
            self._kept.move_to_end(step)
        return request.after([message for step in reversed(steps) for message in self._kept[step].said])

    def keep(self, request: ConversationRequest, turn: Turn, answer: Message) -> None:
        """Take in an answer, unless the client said not to, or it is not whole."""
        if not isinstance(request, ResponsesRequest) or request.store is False or not turn.finish.trainable:
            return
        id = turn.id.rpartition(":")[0]
        kept = _Kept(request.previous_response_id, (*request.read.parts, answer))
        self._held += kept.cost - (self._kept[id].cost if id in self._kept else 0)
        self._kept[id] = kept
        while self._held > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._held -= dropped.cost

    def _back(self, id: str) -> Iterator[str]:
        at: str | None = id
        while at is not None:
            kept = self._kept.get(at)
            if kept is None:
                raise PreviousGone(
                    f"Previous response with id {id[:200]!r} not found. Answers are kept in memory, until the server starts anew "
                    "or needs the room (serve.previous_chars), and not with store=false; send the whole input.",
                    field="previous_response_id",
                )
            yield at
            at = kept.before
