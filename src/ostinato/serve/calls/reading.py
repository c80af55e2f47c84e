"""Parses one answer while it is sampled into text, reasoning and tool calls."""

from __future__ import annotations

from ostinato.core.conversation import Message, Piece, Role, ToolCall
from ostinato.core.seams import AnswerReader


class Reading:
    """Parses one answer and accumulates the result. Without a reader, everything is text.

    Example::

        reading = Reading(renderer.reader(conversation, turn))
        pieces = reading.take("Let me look.", last=False)
        ...
        answer = reading.message()
    """

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def take(self, text: str, *, last: bool) -> list[Piece]:
        """The pieces that new text completes; `last`: no text follows."""
        if self._reader is None:
            pieces = [Piece(text=text)] if text else []
        else:
            pieces = self._reader.feed(text) if text else []
            if last:
                pieces = [*pieces, *self._reader.finish()]
        for piece in pieces:
            self._text.append(piece.text)
            self._reasoning.append(piece.reasoning)
            if piece.call is not None:
                self._calls.append(piece.call)
        return pieces

    def message(self) -> Message:
        """The message read so far."""
        return Message(
            role=Role.ASSISTANT,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
        )
