"""The parts of an outside model's HTTP responses that are used, as typed records; everything else is ignored.

The shapes are those of OpenAI's chat completions: openai-python 3.52, `types/chat/chat_completion_chunk.py`.
"""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationError


class OutsideFailure(Exception):
    """An outside model did not answer correctly. `blame`: the fault lies with the model's service, not with this particular request."""

    def __init__(self, message: str, *, blame: bool = True) -> None:
        super().__init__(message)
        self.blame = blame


class OutsideDelta(BaseModel):
    """New text of a choice."""

    content: str | None = None


class OutsideChoice(BaseModel):
    """An update to a choice."""

    index: int = Field(ge=0)
    delta: OutsideDelta = Field(default_factory=OutsideDelta)
    finish_reason: str | None = None


class OutsideUsage(BaseModel):
    """Token counts as reported by the outside model, over all choices."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class OutsideEvent(BaseModel):
    """One event of a stream."""

    choices: list[OutsideChoice] = Field(default_factory=list[OutsideChoice])
    usage: OutsideUsage | None = None
    error: object = None


def read_outside(line: bytes) -> OutsideEvent | None:
    """Parse one line of a stream; None for a line without an event. Raises OutsideFailure."""
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
