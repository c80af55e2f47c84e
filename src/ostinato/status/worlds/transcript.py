"""A rollout's turns as readable steps: the new input, the model's answer and its tool calls. Bounded and pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.core.conversation import Conversation, Tool
from ostinato.core.records import PolicyVersion, Turn
from ostinato.core.seams import AnswerReader

LONGEST_PART = 8_000
"""Most characters shown of one part: its beginning and its end."""
LONGEST_STEP = 24_000
"""Most characters shown of one step's input, and of all its calls."""
LONGEST_PAGE = 100_000
"""No further step is begun after this many characters of steps."""
_MOST_TOKENS = 8_000
_MOST_PARTS = 60
_MOST_CALLS = 20
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
_ANY_TOOL = (Tool(name="any"),)  # a reader looks for calls only if there are tools, and accepts any name

Pieces = Callable[[int], bytes]
Readers = Callable[[Conversation, str], AnswerReader]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidPart:
    """A part of the model's input or output. `role`: "" if the template does not state it. `cut`: characters that are not shown."""

    role: str
    text: str
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A tool that the model called. `arguments` are JSON text. Example: ``CallPart(name="read", arguments='{"path": "calc.py"}')``"""

    name: str
    arguments: str
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """One turn of a rollout: the new part of its prompt, and the model's answer. `at` counts from 0.

    `new`: how many of the `prompt` tokens are new since the turn before; `rewritten`: the earlier text was given in another form.
    `missing`: the log no longer has the turn; `redacted`: its text was erased.
    """

    at: int
    turn: str
    versions: tuple[PolicyVersion, ...] = ()
    prompt: int = 0
    new: int = 0
    sampled: int = 0
    finish: str = ""
    seconds: float = 0.0
    given: tuple[SaidPart, ...] = ()
    reasoning: SaidPart | None = None
    answer: SaidPart | None = None
    calls: tuple[CallPart, ...] = ()
    rewritten: bool = False
    redacted: bool = False
    missing: bool = False


def part_of(role: str, text: str, longest: int = LONGEST_PART) -> SaidPart:
    """Return a text, cut in its middle if it is long. Example: ``part_of("user", "hi") == SaidPart(role="user", text="hi")``"""
    cut = len(text) - longest
    if cut <= 0:
        return SaidPart(role=role, text=text)
    half = longest // 2
    return SaidPart(role=role, text=f"{text[:half]}\n… {cut:,} characters are not shown …\n{text[-half:]}", cut=cut)


def steps_of(
    ids: Sequence[str],
    turns: Sequence[Turn | None],
    first: int,
    before: Turn | None,
    pieces: Pieces,
    readers: Readers | None,
    *,
    tools: bool,
) -> tuple[RolloutStep, ...]:
    """Return the steps of consecutive turns: as many as fit one page, at least one.

    Args:
        ids: the turns' ids.
        turns: the turns; None for a turn that the log no longer has.
        first: the index of the first turn in its rollout.
        before: the turn before them; None if they are the first.
        pieces: returns the bytes of a token; b"" for a control token.
        readers: makes readers that separate an answer's text from its calls; None: answers are shown as they were sampled.
        tools: whether the harness has tools, so that an answer may contain calls.
    """
    steps: list[RolloutStep] = []
    for place, (id, turn) in enumerate(zip(ids, turns, strict=True), first):
        if turn is None:
            steps.append(RolloutStep(at=place, turn=id, missing=True))
        else:
            steps.append(_step(place, turn, before, pieces, readers, tools=tools))
        before = turn
        if sum(map(_length, steps)) > LONGEST_PAGE:
            break
    return tuple(steps)


def _length(step: RolloutStep) -> int:
    said = (*step.given, *(part for part in (step.reasoning, step.answer) if part is not None))
    return sum(len(part.text) for part in said) + sum(len(call.arguments) for call in step.calls)


def _step(
    place: int, turn: Turn, before: Turn | None, pieces: Pieces, readers: Readers | None, *, tools: bool
) -> RolloutStep:
    known = () if before is None else (*before.prompt_ids, *before.sampled_ids)
    same = _common(known, turn.prompt_ids)
    rewritten = before is not None and same < len(before.prompt_ids)
    new = turn.prompt_ids if rewritten else turn.prompt_ids[same:]
    reasoning, answer, calls = _answered(turn, pieces, readers, tools=tools)
    return RolloutStep(
        at=place,
        turn=turn.id,
        versions=turn.versions,
        prompt=len(turn.prompt_ids),
        new=len(new),
        sampled=len(turn.sampled_ids),
        finish=turn.finish.value,
        seconds=turn.ended_at - turn.started_at,
        given=() if turn.redacted else tuple(_parts(new, pieces)),
        reasoning=reasoning,
        answer=answer,
        calls=calls,
        rewritten=rewritten,
        redacted=turn.redacted,
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    if one == other[: len(one)]:
        return len(one)
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


def _parts(ids: Sequence[int], pieces: Pieces) -> Iterator[SaidPart]:
    """Yield the texts between control tokens, each with its role if its first line names it, as in most templates."""
    cut = len(ids) - _MOST_TOKENS
    kept = ids if cut <= 0 else (*ids[: _MOST_TOKENS // 2], None, *ids[-_MOST_TOKENS // 2 :])
    told, left = 0, LONGEST_STEP
    for text in _segments(kept, pieces, cut):
        role, _, rest = text.partition("\n")
        role, said = (role.strip(), rest) if role.strip() in _ROLES else ("", text)
        if not said.strip():
            continue  # the empty beginning of the answer
        told += 1
        if told > _MOST_PARTS or left <= 0:
            yield SaidPart(role="", text="… the parts after these are not shown …")
            return
        part = part_of(role, said.strip("\n"))
        left -= len(part.text)
        yield part


def _segments(ids: Sequence[int | None], pieces: Pieces, cut: int) -> Iterator[str]:
    held: list[bytes] = []
    for token in ids:
        piece = f"\n… {cut:,} tokens are not shown …\n".encode() if token is None else pieces(token)
        if piece:
            held.append(piece)
        elif held:
            yield b"".join(held).decode(errors="replace")
            held = []
    if held:
        yield b"".join(held).decode(errors="replace")


def _answered(
    turn: Turn, pieces: Pieces, readers: Readers | None, *, tools: bool
) -> tuple[SaidPart | None, SaidPart | None, tuple[CallPart, ...]]:
    """Return the reasoning, text and calls of an answer."""
    if turn.redacted:
        return None, None, ()
    sampled = b"".join(map(pieces, turn.sampled_ids)).decode(errors="replace") if turn.sampled_ids else turn.text
    if readers is None or len(turn.sampled_ids) > 4 * _MOST_TOKENS:
        return None, part_of("assistant", sampled), ()
    reader = readers(Conversation(messages=(), tools=_ANY_TOOL if tools else ()), turn.id)
    found = [*reader.feed(sampled), *reader.finish()]
    reasoning, text = "".join(each.reasoning for each in found), "".join(each.text for each in found)
    calls = [each.call for each in found if each.call is not None][:_MOST_CALLS]
    return (
        part_of("reasoning", reasoning) if reasoning.strip() else None,
        part_of("assistant", text) if text.strip() or not calls else None,
        tuple(_call(call.name, call.arguments, LONGEST_STEP // len(calls)) for call in calls),
    )


def _call(name: str, arguments: str, longest: int) -> CallPart:
    shown = part_of("", arguments, min(longest, LONGEST_PART))
    return CallPart(name=name[:200], arguments=shown.text, cut=shown.cut)
