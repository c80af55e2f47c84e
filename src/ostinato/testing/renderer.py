"""`ByteRenderer`: messages <-> tokens for `FakeEngine`, without a tokenizer library.

A token is a UTF-8 byte; roles are bytes that UTF-8 never uses, so that text cannot forge them; every message ends with `STOP_ID`.
One pair of letters ("lo") has a token of its own that the engine never samples: rendering an answer's text again gives other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.testing.engine import STOP_ID, VOCAB_SIZE

MERGED = 0xFB
_PAIR = b"lo"
_ROLES = {"system": 0xF8, "user": 0xF9, "assistant": 0xFA}


class ByteRenderer:
    """Implements `core.seams.Renderer`.

    Example: ``ByteRenderer().chat([{"role": "user", "content": "hi"}]) == [0xF9, 104, 105, STOP_ID, 0xFA]``
    """

    def __init__(self, *, context: int = 4096) -> None:
        self.vocab_size = VOCAB_SIZE
        self.context = context

    def chat(self, messages: Sequence[dict[str, Any]], *, continue_final: bool = False) -> list[int]:
        ids = [token for message in messages for token in self._message(message)]
        return ids[:-1] if continue_final else [*ids, _ROLES["assistant"]]

    def follow_up(self, messages: Sequence[dict[str, Any]], known: int) -> list[int]:
        return self.chat(messages[known:])

    def encode(self, text: str) -> list[int]:
        return list(text.encode().replace(_PAIR, bytes([MERGED])))

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(token for token in ids if token < STOP_ID and token not in _ROLES.values())
        return text.replace(bytes([MERGED]), _PAIR).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if token == MERGED:
            return _PAIR
        return bytes([token]) if token < STOP_ID and token not in _ROLES.values() else b""

    def stop_ids(self) -> frozenset[int]:
        return frozenset({STOP_ID})

    def _message(self, message: dict[str, Any]) -> list[int]:
        return [_ROLES[message["role"]], *self.encode(message["content"]), STOP_ID]
