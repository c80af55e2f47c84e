"""Parses one answer while it is sampled into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.conversation import Message, Piece, Role, ToolCall
from ostinato.core.seams import AnswerReader


class Reading:
    """Parses one answer and accumulates the result. Without a reader, everything is text.

    Args:
        reader: separates text, reasoning and calls.
        one_call: an answer may make one call: where a second begins, the answer is `over`, and nothing from there on is told.

    Example::

        reading = Reading(renderer.reader(conversation, turn))
        pieces = reading.take("Let me look.", last=False)
        ...
        answer = reading.message()
    """

    def __init__(self, reader: AnswerReader | None, *, one_call: bool = False) -> None:
        self.over = False
        self._reader = reader
        self._one_call = one_call
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def take(self, text: str, *, last: bool) -> list[Piece]:
        """The pieces that new text completes; `last`: no text follows."""
        if self._reader is None:
            return self._told([Piece(text=text)] if text else [])
        pieces = self._told(self._reader.feed(text) if text else [])
        self.over |= self._one_call and bool(self._calls) and self._reader.in_call()
        return [*pieces, *self._told(self._reader.finish())] if last else pieces

    def _told(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Add the pieces up to a call that may not be made, and return them."""
        told: list[Piece] = []
        for piece in pieces:
            self.over |= self._one_call and piece.call is not None and bool(self._calls)
            if self.over:
                break
            told.append(piece)
            self._text.append(piece.text)
            self._reasoning.append(piece.reasoning)
            if piece.call is not None:
                self._calls.append(piece.call)
        return told

    def message(self) -> Message:
        """The message read so far."""
        return Message(
            role=Role.ASSISTANT,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
        )
