"""Which lines written by an answer survive: line numbers, and where these lines are in the answer's text. Pure.

Line numbers count from 1 within one text: an argument of a tool call, or the answer itself. Lines end at line feeds; the last may
lack its end. Clients send numbers only, so what somebody did with the lines reveals nothing about their content.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ostinato.core.errors import BadRequest
from ostinato.core.records import LineSurvival, ParsedCall, Ranges, Turn

MOST_LINES = 20_000
"""Most lines of one text that can be followed."""
_RANGES = re.compile(r"[0-9]{1,6}(?:-[0-9]{1,6})?(?:, ?[0-9]{1,6}(?:-[0-9]{1,6})?)*")
# possessive quantifiers, and an unterminated string extends to the end, so that no text is scanned twice
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[{}\[\]:,]', re.DOTALL)
_LINE_END = re.compile(r"\n|\\(?:u(?P<code>[0-9a-fA-F]{4})|(?P<letter>.))", re.DOTALL)
_LINE_FEED = 10

# ---------------------------------------------------------------- ranges of line numbers


def parse_ranges(text: str, lines: int) -> Ranges:
    """Parse ascending, disjoint ranges of line numbers; adjacent ones are joined. "" gives none.

    Raises ValueError for anything else, and for a line beyond `lines`.

    Example: ``parse_ranges("1-4, 5, 9", 12) == ((1, 5), (9, 9))``
    """
    if text and _RANGES.fullmatch(text) is None:
        raise ValueError('is no list of line numbers such as "1-5, 9"')
    found: list[tuple[int, int]] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        start, end = int(first), int(last or first)
        if not (found[-1][1] if found else 0) < start <= end:
            raise ValueError(f"{part.strip()} is not above the lines before it; give ascending, disjoint ranges from 1")
        if end > lines:
            raise ValueError(f"names line {end}, and the text has {lines}")
        found[-1:] = [(found[-1][0], end)] if found and found[-1][1] == start - 1 else [*found[-1:], (start, end)]
    return tuple(found)


def holds(ranges: Ranges, parts: Ranges) -> bool:
    """Return True if each of `parts` is within one of `ranges`, both as from `parse_ranges`."""
    starts = [start for start, _ in ranges]
    places = ((bisect_right(starts, start) - 1, end) for start, end in parts)
    return all(at >= 0 and end <= ranges[at][1] for at, end in places)


def count(ranges: Ranges) -> int:
    """Return the number of lines in the ranges."""
    return sum(end - start + 1 for start, end in ranges)


def fates(survival: LineSurvival) -> Iterator[tuple[int, int, bool]]:
    """Yield the followed lines as ascending runs (first, last, True if kept).

    Example: of the lines 1 to 3, of which 2 is kept: ``(1, 1, False), (2, 2, True), (3, 3, False)``
    """
    kept = list(survival.kept)
    for start, end in survival.followed:
        at = start
        while kept and kept[0][0] <= end:
            first, last = kept.pop(0)
            if at < first:
                yield at, first - 1, False
            yield first, last, True
            at = last + 1
        if at <= end:
            yield at, end, False


def kept_share(survivals: Iterable[LineSurvival]) -> float | None:
    """Return the share of the followed lines that survive; None if none is followed."""
    texts = list(survivals)
    followed = sum(count(each.followed) for each in texts)
    return sum(count(each.kept) for each in texts) / followed if followed else None


# ---------------------------------------------------------------- places of lines in the text


def line_spans(turn: Turn, call: int | None, argument: str, lines: int) -> list[tuple[int, int]]:
    """Return the lines of one text as (start, end) in characters of `turn.text`, each with its line end; in JSON that is an escape.

    Args:
        turn: the turn that wrote it.
        call: the number of the tool call in the answer, from 0; None: the answer's own text.
        argument: the call's argument that contains the text.
        lines: the number of lines that the sender of the line numbers counted.

    Raises:
        BadRequest: the answer has no such call or argument, or its text has another number of lines.
    """
    if call is None and argument:
        raise BadRequest(f"argument {argument!r} needs a call; name the call's id, not the answer's", field="lines")
    if call is None:
        what, spans = "the answer", _cut(0, len(turn.text), (match.end() for match in re.finditer("\n", turn.text)))
    else:
        what, spans = f"argument {argument!r} of call {call} of {turn.id}", _in_call(turn, call, argument)
    if len(spans) != lines:
        raise BadRequest(f"{what} has {len(spans)} lines that the answer wrote, not {lines}", field="lines")
    return spans


def _in_call(turn: Turn, number: int, argument: str) -> list[tuple[int, int]]:
    """Return the lines of an argument; [] if it is not found, or is ambiguous."""
    named = [call for call in turn.calls or () if call.name]
    if number >= len(named):
        raise BadRequest(f"{turn.id} has {len(named)} calls, and none of number {number}", field="lines")
    call = named[number]
    sharing = [place for place, other in enumerate(named) if (other.start, other.end) == (call.start, call.end)]
    tagged, values = _tagged(turn.text, call, argument), _json_values(turn.text, call, argument)
    if tagged and (not values or tagged[0] < values[0]):  # the earlier one; the other occurs within its text
        start, end = tagged[0]
        breaks = [match.end() for match in re.compile("\n").finditer(turn.text, start, end)]
        return _cut(start, end, breaks) if len(tagged) == len(sharing) == 1 else []
    if len(values) != len(sharing):
        return []
    start, end = values[sharing.index(number)]
    breaks = [
        match.end()
        for match in _LINE_END.finditer(turn.text, start, end)
        if match[0] == "\n" or match["letter"] == "n" or int(match["code"] or "0", 16) == _LINE_FEED
    ]
    return _cut(start, end, breaks)


def _json_values(text: str, call: ParsedCall, argument: str) -> list[tuple[int, int]]:
    """Return the contents of the strings that an argument of this name has in a call's JSON, at the level nearest to the top."""
    found: list[tuple[int, int, int]] = []
    level, key, before = 0, f'"{argument}"', ("", "")
    for match in _TOKEN.finditer(text, call.start, call.end):
        token = match[0]
        level += (token in "{[") - (token in "}]")
        if before == (key, ":") and token[0] == '"':
            found.append((level, match.start() + 1, match.end() - 1))
        before = (before[1], token)
    top = min((level for level, _, _ in found), default=0)
    return [(start, end) for level, start, end in found if level == top]


def _tagged(text: str, call: ParsedCall, argument: str) -> list[tuple[int, int]]:
    """Return the contents of an argument's tags, as written by Qwen3-Coder, on lines of their own, and GLM."""
    name = re.escape(argument)
    coder = rf"<parameter={name}>\n?(?P<coder>(?:(?!<parameter=).)*?)\n?</parameter>"
    glm = rf"<arg_key>{name}</arg_key>\s*<arg_value>(?P<glm>(?:(?!<arg_value>).)*?)</arg_value>"
    matches = re.compile(f"{coder}|{glm}", re.DOTALL).finditer(text, call.start, call.end)
    return [match.span(match.lastgroup or 0) for match in matches]


def _cut(start: int, end: int, breaks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the lines between `start` and `end`, given the ends of their line breaks."""
    edges = [start, *breaks]
    if edges[-1] < end:
        edges.append(end)
    return list(pairwise(edges))
