"""Earlier answers that a call may continue by id (`previous_response_id`): their messages, kept in memory while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.core.conversation import Conversation, Message
from ostinato.core.errors import BadRequest
from ostinato.core.records import Turn
from ostinato.serve.dialects.dialect import ConversationRequest
from ostinato.serve.dialects.responses import ResponsesRequest

_OVERHEAD = 500  # the cost of a message or an entry besides its characters, in characters


class PreviousGone(BadRequest):
    """The named previous answer is not in memory."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The messages that a call added after the answer `before`: its input and its own answer."""

    before: str | None
    said: tuple[Message, ...]

    @property
    def cost(self) -> int:
        return sum(message.chars for message in self.said) + _OVERHEAD * (1 + len(self.said))


class ResponseStore:
    """One tenant's answers by id, each linked to the answer before it. The least recently used are dropped.

    Args:
        budget: about how many characters are held at most.

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
        """The request's conversation, preceded by the messages up to the answer that it names. Raises PreviousGone, BadRequest."""
        if not isinstance(request, ResponsesRequest) or request.previous_response_id is None:
            return request.conversation
        steps = list(self._back(request.previous_response_id))
        # moves the first answer last, so that of a conversation the newest answers are dropped first
        for step in steps:
            self._kept.move_to_end(step)
        return request.after([message for step in reversed(steps) for message in self._kept[step].said])

    def keep(self, request: ConversationRequest, turn: Turn, answer: Message) -> None:
        """Keep an answer, unless the client sent `store` false or the answer is incomplete."""
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
