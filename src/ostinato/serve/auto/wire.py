"""What a model outside says over HTTP, as typed records; everything else in its answers is ignored.

The shapes are those of OpenAI's chat completions: openai-python 3.52, `types/chat/chat_completion_chunk.py`.
"""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationError


class OutsideFailure(Exception):
    """A model outside did not answer as it should. `blame`: it is its own fault, and not that of this one question."""

    def __init__(self, message: str, *, blame: bool = True) -> None:
        super().__init__(message)
        self.blame = blame


class OutsideDelta(BaseModel):
    """New text of a choice."""

    content: str | None = None


class OutsideChoice(BaseModel):
    """What is new of a choice."""

    index: int = Field(ge=0)
    delta: OutsideDelta = Field(default_factory=OutsideDelta)
    finish_reason: str | None = None


class OutsideUsage(BaseModel):
    """Tokens as the outside counts them, all choices together."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class OutsideEvent(BaseModel):
    """One event of a stream."""

    choices: list[OutsideChoice] = Field(default_factory=list[OutsideChoice])
    usage: OutsideUsage | None = None
    error: object = None


def read_outside(line: bytes) -> OutsideEvent | None:
    """One line of a stream; None for a line that says nothing. Raises OutsideFailure."""
    said = line.strip()
    if not said.startswith(b"data:") or said == b"data: [DONE]":
        return None
    try:
        event = OutsideEvent.model_validate_json(said[5:])
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "its JSON"
        raise OutsideFailure(f"its answer is not understood: {where}: {first['msg']}") from None
    if event.error is not None:
        raise OutsideFailure("it ended the answer with an error")
    return event
