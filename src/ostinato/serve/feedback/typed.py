"""Extracts the text a person typed from a user's message, to which agents add reminders, environments and notes. Pure."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ostinato.core.conversation import Conversation, Role

INTERRUPTION = "[Request interrupted by user"  # Claude Code's note when a person pressed Escape
_OF_A_CALL = f"{INTERRUPTION} for tool use"  # its note when a tool call was refused or stopped
# of reminders, environments, instructions, a command's output
_TAG = re.compile(r"<(?P<closes>/?)(?P<name>[a-z][a-z_-]{0,63})>")
_FENCE = "```"
_MOST_CHARS = 2_000  # most characters of typed text that are kept
_MOST_SENT = 50_000  # characters of a message that are searched
_MOST_TAGS = 1_000
_LOOKED_THROUGH = 50  # earlier messages of a person that are searched for their last typed text


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """The text that a person typed. `stopped`, `refused`: the agent notes that before it they stopped the answer or refused its tool call.

    `later`: an interruption comes after other typed text, so the last text is about an interrupted answer that was not kept.

    Example: ``Typed(text="Use git.", stopped=True)``
    """

    text: str = ""
    stopped: bool = False
    refused: bool = False
    later: bool = False


def typed(message: str) -> Typed:
    """The typed part of a message: without tagged blocks, fenced code, quoted lines, and agents' bracketed interruption notes."""
    lines: list[str] = []
    stopped = refused = later = False
    for line in "".join(_outside(message[:_MOST_SENT])).splitlines():
        bare = line.strip()
        if bare.startswith(INTERRUPTION):
            later = later or bool(lines)
            stopped = stopped or not lines
            refused = refused or (not lines and bare.startswith(_OF_A_CALL))
        elif bare:
            lines.append(bare)
    said = "\n".join(line for line in _prose("\n".join(lines)) if not line.startswith(">"))
    return Typed(text=said.strip()[:_MOST_CHARS], stopped=stopped, refused=refused, later=later)


def asked_before(conversation: Conversation, known: int) -> str:
    """The last text that a person typed in the first `known` messages; "" if none is found."""
    theirs = [message.text for message in conversation.messages[:known] if message.role is Role.USER]
    said = (typed(text).text for text in reversed(theirs[-_LOOKED_THROUGH:]))
    return next((text for text in said if text), "")


def _prose(text: str) -> Iterator[str]:
    """The lines outside code fences."""
    for piece in text.split(_FENCE)[::2]:
        yield from piece.splitlines()


def _outside(text: str) -> Iterator[str]:
    """The pieces of a text outside tagged blocks (a tag up to its next closing tag), separated by line breaks."""
    tags = list(islice(_TAG.finditer(text), _MOST_TAGS))
    closings: dict[str, list[int]] = {}
    for tag in tags:
        if tag["closes"]:
            closings.setdefault(tag["name"], []).append(tag.end())
    at = 0
    for tag in tags:
        ends = closings.get(tag["name"], [])
        if tag["closes"] or tag.start() < at or not ends or ends[-1] < tag.end():
            continue
        yield text[at : tag.start()]
        yield "\n"
        at = ends[bisect(ends, tag.end())]
    yield text[at:]
