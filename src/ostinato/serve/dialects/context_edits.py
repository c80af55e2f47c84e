"""Context editing: the request field `context_management`, and the rules that clear old tool results and thinking from a prompt.

Nothing is kept between calls: the client sends its whole history each time, and the same rules clear the same parts of it. The cleared
prompt differs from the one that was sampled from, so its tokens from the first cleared part on are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ostinato.core.conversation import PART_CHARS, Conversation, Message, Role
from ostinato.serve.dialects.compaction_blocks import InCallCompaction
from ostinato.serve.dialects.dialect import Json, Name
from ostinato.serve.dialects.field_rules import Fields

COMPACT, CLEAR_TOOL_USES, CLEAR_THINKING = "compact_20260112", "clear_tool_uses_20250919", "clear_thinking_20251015"
CLEARED = "[This tool result was cleared to save context.]"
_TRIGGER, _KEPT_USES, _KEPT_TURNS = 100_000, 3, 1  # Anthropic's defaults
_PER_CHAR = 4  # most tokens per character

Count = Callable[[Conversation], int]
"""Returns the length of a conversation's prompt in tokens."""


class Measure(Fields):
    """A number of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Annotated[int, Field(ge=0, le=10_000_000)] | None = None

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if (self.type == "all") != (self.value is None):
            raise ValueError("takes a value with every type but 'all'")
        return self


# the fields of each edit, and the types of measures that they take
_MEASURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    COMPACT: {"trigger": ("input_tokens",), "instructions": (), "pause_after_compaction": ()},
    CLEAR_THINKING: {"keep": ("thinking_turns", "all")},
    CLEAR_TOOL_USES: {
        "trigger": ("input_tokens", "tool_uses"),
        "keep": ("tool_uses",),
        "clear_at_least": ("input_tokens",),
        "clear_tool_inputs": (),
        "exclude_tools": (),
    },
}


class ContextEdit(Fields):
    """One way to shorten the prompt."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"]
    trigger: Measure | None = None
    keep: Literal["all"] | Measure | None = None
    clear_at_least: Measure | None = None
    clear_tool_inputs: bool | list[Name] | None = None
    exclude_tools: list[Name] | None = None
    instructions: str | None = None
    pause_after_compaction: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        taken = _MEASURES[self.type]
        for name in sorted(self.model_fields_set - {"type"}):
            value = getattr(self, name)
            if name not in taken:
                raise ValueError(f"of type {self.type} takes {', '.join(taken)}; leave {name} out")
            if isinstance(value, Measure) and value.type not in taken[name]:
                raise ValueError(f"of type {self.type} takes a {name} of the type {' or '.join(taken[name])}")
        return self


class ContextManagement(Fields):
    """How a long prompt may be shortened: thinking is cleared first, then tool results, and the rest is summarised."""

    edits: list[ContextEdit] = Field(default_factory=list[ContextEdit], max_length=16)

    @model_validator(mode="after")
    def _check_types(self) -> Self:
        types = [edit.type for edit in self.edits]
        if twice := [type for type in types if types.count(type) > 1]:
            raise ValueError(f"has two edits of the type {twice[0]}; send each once")
        return self

    def edit(self, type: str) -> ContextEdit | None:
        """Return the edit of this type, if there is one."""
        return next((edit for edit in self.edits if edit.type == type), None)

    @property
    def compaction(self) -> InCallCompaction | None:
        """The wish to have a long prompt summarised."""
        for place, edit in enumerate(self.edits):
            if edit.type == COMPACT:
                return InCallCompaction(
                    field=f"context_management.edits[{place}].trigger",
                    trigger=None if edit.trigger is None else edit.trigger.value,
                    instructions=edit.instructions,
                    pause=edit.pause_after_compaction,
                )
        return None


# ---------------------------------------------------------------- clearing


def cleared(
    conversation: Conversation, wanted: ContextManagement, count: Count, most: int
) -> tuple[Conversation, list[Json]]:
    """Apply the edits; return the shortened conversation and Anthropic's `applied_edits`.

    Args:
        conversation: the messages as the client sent them.
        wanted: the edits.
        count: counts the tokens of a prompt; not called for conversations too short to be edited.
        most: the largest effective trigger in tokens; larger ones, and the default, are lowered to it.
    """
    applied = list[Json]()
    for type, clear in ((CLEAR_THINKING, _clear_thinking), (CLEAR_TOOL_USES, _clear_tool_uses)):
        edit = wanted.edit(type)
        result = None if edit is None else clear(conversation, edit, count, most)
        if result is not None:
            conversation, counts = result
            applied.append({"type": type} | counts)
    return conversation, applied


def _clear_thinking(
    conversation: Conversation, edit: ContextEdit, count: Count, most: int
) -> tuple[Conversation, Json] | None:
    """Clear the thinking of all but the last turns that have any. A turn begins with a user's message."""
    keep = edit.keep or Measure(type="thinking_turns", value=_KEPT_TURNS)
    if keep == "all" or keep.value is None:
        return None
    turn, turns = 0, list[int]()
    for message in conversation.messages:
        turn += message.role is Role.USER
        turns.append(turn)
    thought = sorted({turn for turn, each in zip(turns, conversation.messages, strict=True) if each.reasoning})
    gone = frozenset(thought[: max(0, len(thought) - keep.value)])
    if not gone:
        return None
    messages = [
        replace(message, reasoning="", cleared=True) if turn in gone and message.reasoning else message
        for turn, message in zip(turns, conversation.messages, strict=True)
    ]
    shorter = replace(conversation, messages=tuple(messages))
    told: Json = {"cleared_thinking_turns": len(gone), "cleared_input_tokens": _saved(conversation, shorter, count)}
    return shorter, told


@dataclass(frozen=True, slots=True)
class _Use:
    """A tool use with a result: the indices of both messages."""

    call: str
    name: str
    asked: int
    answered: int


def _clear_tool_uses(
    conversation: Conversation, edit: ContextEdit, count: Count, most: int
) -> tuple[Conversation, Json] | None:
    """Clear the results of all but the last tool uses, and their inputs if requested, once the trigger is reached."""
    uses = _uses(conversation.messages)
    trigger = edit.trigger or Measure(type="input_tokens", value=_TRIGGER)
    keep = _KEPT_USES if edit.keep is None or edit.keep == "all" else edit.keep.value or 0
    old = [use for use in uses[: max(0, len(uses) - keep)] if use.name not in (edit.exclude_tools or ())]
    if not old or not _reached(conversation, trigger, len(uses), count, most):
        return None
    messages = [*conversation.messages]
    for use in old:
        messages[use.answered] = replace(messages[use.answered], text=CLEARED)
        if edit.clear_tool_inputs is True or (edit.clear_tool_inputs and use.name in edit.clear_tool_inputs):
            asked = messages[use.asked]
            calls = [replace(call, arguments="{}") if call.id == use.call else call for call in asked.calls]
            messages[use.asked] = replace(asked, calls=tuple(calls))
    shorter = replace(conversation, messages=tuple(messages))
    less = _saved(conversation, shorter, count)
    if less < max(1, 0 if edit.clear_at_least is None else edit.clear_at_least.value or 0):
        return None
    return shorter, {"cleared_tool_uses": len(old), "cleared_input_tokens": less}


def _uses(messages: Sequence[Message]) -> list[_Use]:
    """Return the tool uses that have a result, oldest first."""
    asked = {call.id: (place, call.name) for place, message in enumerate(messages) for call in message.calls}
    return [
        _Use(message.answers, asked[message.answers][1], asked[message.answers][0], place)
        for place, message in enumerate(messages)
        if message.role is Role.TOOL and message.answers in asked
    ]


def _reached(conversation: Conversation, trigger: Measure, uses: int, count: Count, most: int) -> bool:
    value = trigger.value or 0
    if trigger.type == "tool_uses":
        return uses > value
    least = min(value, most)
    longest = conversation.chars * _PER_CHAR + conversation.parts * PART_CHARS
    return longest > least and count(conversation) > least


def _saved(conversation: Conversation, shorter: Conversation, count: Count) -> int:
    return max(0, count(conversation) - count(shorter))
