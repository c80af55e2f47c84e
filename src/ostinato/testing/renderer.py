"""`ByteRenderer`: converts messages to tokens and back for `FakeEngine`, without a tokenizer library.

A token is a UTF-8 byte. Roles are bytes that UTF-8 never uses, so that text cannot forge them. Every message ends with `STOP_ID`.
As in Hermes, tools are described in the system message, and calls are text; a tool's message has its own role.
The letters "lo" are merged into one token that the engine never samples, so re-tokenizing an answer's text gives other ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.seams import AnswerReader
from ostinato.model.answer_reader import HERMES, Reader
from ostinato.model.response_constraints import grammar_of
from ostinato.model.template_repairs import spoken, with_described_tools
from ostinato.testing.engine import STOP_ID, VOCAB_SIZE

MERGED = 0xFB
_PAIR = b"lo"
_ROLES = {Role.SYSTEM: 0xF8, Role.USER: 0xF9, Role.ASSISTANT: 0xFA, Role.TOOL: 0xFC}


class ByteRenderer:
    """Implements `core.seams.Renderer`.

    Example: a conversation of one user message "hi" becomes ``[0xF9, 104, 105, STOP_ID, 0xFA]``
    """

    def __init__(self, *, context: int = 4096) -> None:
        self.vocab_size = VOCAB_SIZE
        self.context = context

    def chat(self, conversation: Conversation) -> list[int]:
        return self._rendered(with_described_tools(conversation), continued=conversation.continued)

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        return self._rendered(conversation.messages[known:], continued=conversation.continued)

    def grammar(self, conversation: Conversation) -> str:
        return grammar_of(conversation, HERMES.wording, {}, thinks=False, opening="", opener=HERMES.opener)

    def call_token(self) -> int | None:
        return None

    def has_compiled(self, grammar: str) -> bool:
        return True

    def compile(self, grammar: str) -> None:
        pass

    def fulfils(self, grammar: str, ids: Sequence[int]) -> bool:
        return True

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        return Reader(HERMES, tools=conversation.callable_tools, turn=turn, opening="")

    def encode(self, text: str) -> list[int]:
        return list(_encoded(text))

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(token for token in ids if token < STOP_ID and token not in _ROLES.values())
        return text.replace(bytes([MERGED]), _PAIR).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if token == MERGED:
            return _PAIR
        return bytes([token]) if token < STOP_ID and token not in _ROLES.values() else b""

    def opens_call(self, text: str) -> bool:
        return HERMES.opens_call(text)

    def stop_ids(self) -> frozenset[int]:
        return frozenset({STOP_ID})

    def _rendered(self, messages: Sequence[Message], *, continued: bool) -> list[int]:
        ids = list[int]()
        for each in messages:
            ids.append(_ROLES[each.role])
            ids += _encoded(spoken(each))
            ids.append(STOP_ID)
        return ids[:-1] if continued else [*ids, _ROLES[Role.ASSISTANT]]


def _encoded(text: str) -> bytes:
    return text.encode().replace(_PAIR, bytes([MERGED]))
