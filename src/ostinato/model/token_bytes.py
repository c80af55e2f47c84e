"""The bytes of a token: a token may be part of a character, which decoding it alone cannot show."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenBytes:
    """The bytes of token ids. Exact for byte-level and byte-fallback tokenizers; for others the bytes of the decoded text.

    Example: for a byte-level tokenizer that cuts an emoji in two, ``b"".join(map(TokenBytes(core).of, ids)) == "🙂".encode()``
    """

    def __init__(self, core: Tokenizer) -> None:
        self._core = core
        self._plain = {id: token.content for id, token in core.get_added_tokens_decoder().items()}
        kinds = _kinds(json.loads(core.to_str()).get("decoder"))
        self._level = _byte_level() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds

    def of(self, token: int) -> bytes:
        """The bytes of one id; b"" for an id that the tokenizer does not know."""
        piece = self._plain.get(token)
        if piece is not None:
            return piece.encode()
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""
        if self._level:
            return bytes(self._level[character] for character in piece if character in self._level)
        if self._fallback:
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return self._core.decode([token]).encode()


def _kinds(decoder: Any) -> set[str]:
    """The names of a decoder and its parts."""
    if not decoder:
        return set()
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others are characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}
