"""Turns people's next messages into signals about the previous answer. They are queued in memory, then classified and written in batches.

No call waits for this or fails because of it. If the process is killed, at most the last quarter of a second is lost, and the judge's
outstanding labels.
"""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from ostinato.core.conversation import Conversation, Message, Role, calling_turn
from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Forgotten
from ostinato.core.records import Purpose, Signal, Source
from ostinato.serve.calls.conversations import PendingPrompt
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.feedback.next_message import DISSATISFIED, VERSION, NextMessage, kind_of
from ostinato.serve.judge_prompt import Case
from ostinato.serve.message_judge import Judge, LabelledMessage
from ostinato.serve.parts import Parts

# ---------------------------------------------------------------- replies typed as feedback


INTERRUPTION = "[Request interrupted by user"  # Claude Code's note that a person pressed Escape
_OF_A_CALL = f"{INTERRUPTION} for tool use"  # its note that a person refused or stopped a tool call
# tags of blocks that agents add: reminders, environments, instructions, a command's output
_TAG = re.compile(r"<(?P<closes>/?)(?P<name>[a-z][a-z_-]{0,63})>")
_FENCE = "```"
_MOST_CHARS = 2_000  # characters of typed text that are kept
_MOST_SENT = 50_000  # characters of a message, or of the messages before it, that are searched
_MOST_TAGS = 1_000
_LOOKED_THROUGH = 50  # a person's earlier messages that are searched for their last typed text


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """The text that a person typed. `stopped`, `refused`: by the agent's note before it, they stopped the answer or refused its tool call.

    `later`: an interruption follows other typed text, so the last text is about an interrupted answer that is not in the conversation.

    Example: ``Typed(text="Use git.", stopped=True)``
    """

    text: str = ""
    stopped: bool = False
    refused: bool = False
    later: bool = False


def typed(message: str) -> Typed:
    """Return the typed part of a message: without tagged blocks, fenced code, quoted lines, and agents' interruption notes."""
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
    prose = "\n".join(line for line in _prose("\n".join(lines)) if not line.startswith(">"))
    return Typed(text=prose.strip()[:_MOST_CHARS], stopped=stopped, refused=refused, later=later)


def asked_before(conversation: Conversation, known: int) -> str:
    """Return the last text that a person typed in the first `known` messages; "" if none is found."""
    return next(_typed_in(conversation.messages[:known]), "")


def _typed_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts that a person typed in these messages, the last one first. Bounded, since it runs on the event loop."""
    theirs, left = [message.text for message in messages if message.role is Role.USER], _MOST_SENT
    for text in reversed(theirs[-_LOOKED_THROUGH:]):
        if left <= 0:
            return
        left -= len(text)
        if said := typed(text).text:
            yield said


def _prose(text: str) -> Iterator[str]:
    """Yield the lines outside code fences."""
    for piece in text.split(_FENCE)[::2]:
        yield from piece.splitlines()


def _outside(text: str) -> Iterator[str]:
    """Yield the pieces of a text outside tagged blocks (a tag up to its next closing tag), separated by line breaks."""
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


# ---------------------------------------------------------------- follow-ups


_LOG = logging.getLogger(__name__)
EVERY_S = 0.25
_BATCH_SIZE = 256  # signals per write
_RETRY_S = 2.0
_MAX_QUEUED = 10_000  # signals held in memory while the log accepts no writes
_MAX_ANSWERED = 16_384  # delivered answers held for all tenants, to notice questions that are asked again
_LEAST_ANSWERED = 64  # of these, the fewest per tenant
_MAX_INTERRUPTED = 512  # interrupted answers held per tenant until their conversation goes on
_LONGEST_LEFT = 20_000  # most characters of such an answer, and of its question
_SINCE = 8  # messages after an interrupted answer's question within which the question is recognised
_READING_S = 2.0  # a question repeated sooner comes from a program, since nobody can have read the answer


class _Draft(NamedTuple):
    """A signal before it has a tenant and a time. `labelled`: the message with the rules' label, for the judge."""

    id: str
    turn: str
    name: str
    comment: str | None = None
    source: Source = Source.IMPLICIT
    labelled: LabelledMessage | None = None


class _Interrupted(NamedTuple):
    """An interrupted answer: its turn, and the part that was sent. `asked`: the text that the next message repeats before its new words."""

    turn: str
    answer: str
    asked: str = ""
    user: str = ""


class _Asked(NamedTuple):
    """A question, its arrival time, and the turn of an earlier answer to it that a person had time to read ("" if there is none)."""

    tenant: str
    question: PendingPrompt
    at: float
    read: str


class FollowUps:
    """Classifies the next messages of conversations, if `serve.next_message` is set.

    Example: ``follow_ups.note("acme", question, Purpose.TASK)`` when a question arrives, ``follow_ups.answered(question, turns, answers)``
    when its answers are delivered, ``follow_ups.left(question, turn, answer)`` if the client disconnects before the end, and at shutdown
    ``await follow_ups.close()``
    """

    def __init__(self, parts: Parts, intake: Intake, judge: Judge | None = None) -> None:
        self.on = parts.config.next_message
        self._judge = judge
        self._clock = parts.clock
        self._intake = intake
        # by tenant: the turn and its time of delivery
        self._answered: dict[str, OrderedDict[tuple[bytes, str], tuple[str, float]]] = {}
        self._most_answered = max(_LEAST_ANSWERED, _MAX_ANSWERED // len(parts.keys.tenants))
        self._left: dict[str, OrderedDict[tuple[bytes, str], _Interrupted]] = {}  # by tenant
        self._asked: list[_Asked] = []
        self._queued: list[Signal] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, tenant: str, question: PendingPrompt, purpose: Purpose) -> None:
        """Queue a question to be classified. A repeated question gives the same signal ids and so counts once."""
        if self.on and purpose is Purpose.TASK and not question.conversation.continued:
            now, answered = self._clock(), self._answered.setdefault(tenant, OrderedDict())
            turn, at = answered.get(_place(question), ("", now)) if question.again else ("", now)
            read = turn if now - at >= _READING_S else ""
            self._asked.append(_Asked(tenant, question, now, read))
            self._wait(EVERY_S)

    def answered(self, question: PendingPrompt, turns: Sequence[str], answers: Sequence[Message]) -> None:
        """Record that a client received these answers in full: a person who asks again after that was not content with the answer."""
        if self.on and len(turns) == 1 and answers[0].text.strip() and not answers[0].calls:
            place, answered = _place(question), self._answered.setdefault(question.scope.tenant, OrderedDict())
            answered[place] = (turns[0], self._clock())
            answered.move_to_end(place)
            if len(answered) > self._most_answered:
                answered.popitem(last=False)

    def left(self, question: PendingPrompt, turn: str, answer: Message) -> None:
        """Record that a client interrupted an answer. If its conversation goes on with other words, a person stopped it; the same question
        again may be a program's retry and gives no signal.
        """
        if not self.on or question.scope.shared or question.conversation.continued:
            return
        last, episode = question.conversation.messages[-1], question.scope.episode or ""
        left = self._left.setdefault(question.scope.tenant, OrderedDict())
        if len(answer.text) > _LONGEST_LEFT:
            return
        left[question.plain[-1], episode] = _Interrupted(turn, answer.text, user=question.scope.user)
        # agents send the person's message again, merged with the words that come next
        if last.role is Role.USER and 0 < len(last.text) <= _LONGEST_LEFT:
            left[question.plain[-2], episode] = _Interrupted(turn, answer.text, last.text, question.scope.user)
        while len(left) > _MAX_INTERRUPTED:
            left.popitem(last=False)

    def forget(self, row: Forgotten) -> None:
        """Drop a forgotten person's interrupted answers and unclassified questions."""
        left = self._left.get(row.tenant, {})
        for place in [place for place, each in left.items() if row.covers((row.tenant, each.user))]:
            del left[place]
        self._asked = [each for each in self._asked if not row.covers((each.tenant, each.question.scope.user))]

    async def close(self) -> None:
        """Write everything queued, without retries."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        await self._write()

    # ------------------------------------------------------------ classifying

    def _classify(self) -> None:
        asked, self._asked = self._asked, []
        for each in asked:
            for draft in self._signals_of(each):
                signal = Signal(
                    id=draft.id,
                    tenant=each.tenant,
                    turn=draft.turn,
                    name=draft.name,
                    value=1.0,
                    source=draft.source,
                    occurred_at=each.at,
                    received_at=each.at,
                    comment=draft.comment,
                )
                self._queued.append(signal)
                if self._judge is not None and draft.labelled is not None:
                    self._judge.ask(each.tenant, draft.id, draft.labelled, partial(self._judged, signal))

    def _judged(self, ruled: Signal, kind: NextMessage) -> None:
        """Queue the judge's label for a message. It counts as received now, so a reward whose window has closed ignores it."""
        assert self._judge is not None
        now, decides = self._clock(), self._judge.decides
        judged = replace(
            ruled,
            id=f"{'judge' if decides else 'judged'}-{ruled.id}",
            name=_name(kind) if decides else f"judged_{_name(kind)}",
            received_at=now,
            comment=self._judge.comment(kind),
        )
        self._queued.append(judged)
        if decides:  # the rules' label counts until now; it is retracted but stays in the log
            self._queued.append(
                replace(ruled, id=f"{judged.id}-r", value=0.0, received_at=now, comment=None, retracts=ruled.id)
            )
        self._wait(EVERY_S)

    def _signals_of(self, asked: _Asked) -> Iterator[_Draft]:
        """Yield the signals of a message; none if no person wrote it, or if the previous answer belongs to no known turn."""
        question = asked.question
        messages, known = question.conversation.messages, question.known
        new = messages[known:]
        if not new or new[-1].role is not Role.USER:
            return
        if (stopped := self._after_interruption(question)) is not None:
            yield from stopped
            return
        if any(message.role is Role.ASSISTANT for message in new):
            return
        words = typed(new[-1].text)
        if question.entry is not None and not (words.later or _spoken(new[:-1])):
            yield from self._about(question, question.entry.turn, words, new)
        if asked.read and words.text:
            yield _Draft(f"again-{asked.read}", asked.read, "dissatisfied", _comment(NextMessage.RETRY))

    def _after_interruption(self, question: PendingPrompt) -> list[_Draft] | None:
        """Return the signals about an answer interrupted before this message; None if there was none, or nothing was said since."""
        messages, episode = question.conversation.messages, question.scope.episode or ""
        left_here = self._left.get(question.scope.tenant, {})
        # the messages before `known` have been answered
        for i in range(len(messages) - 1, max(question.known, len(messages) - _SINCE) - 1, -1):
            left = left_here.get((question.plain[i], episode))
            if left is None or not messages[i].text.startswith(left.asked):
                continue
            since = [replace(messages[i], text=messages[i].text[len(left.asked) :]), *messages[i + 1 :]]
            kept = "".join(message.text for message in since if message.role is Role.ASSISTANT)
            words = typed("\n".join(message.text for message in since if message.role is Role.USER))
            if left.answer.startswith(kept) and (words.text or words.stopped):
                before = typed(left.asked).text or asked_before(question.conversation, i)
                return list(_about_left(left, words, before))
        return None

    def _about(self, question: PendingPrompt, turn: str, words: Typed, new: Sequence[Message]) -> Iterator[_Draft]:
        """Yield the signals from what a person said about the previous answer and did with its calls."""
        id = f"next-{question.plain[-1].hex()}"
        calls = [message.answers for message in new if message.failed and calling_turn(message.answers) == turn]
        if words.refused and calls:
            for call in calls:
                yield _Draft(f"rejected-{call}", turn, "tool_rejected", None, Source.HUMAN)
        elif words.stopped:
            yield _Draft(f"{id}-i", turn, "interrupted")
        if words.text:
            messages, known = question.conversation.messages, question.known
            case = Case(
                request=asked_before(question.conversation, known),
                answer=messages[known - 1].text,
                message=words.text,
            )
            kind = kind_of(case.message, case.request, case.answer)
            yield _Draft(id, turn, _name(kind), _comment(kind), labelled=LabelledMessage(case, kind))

    # ------------------------------------------------------------ writing

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._classify()
        if self._writing is None and self._queued:
            self._writing = asyncio.ensure_future(self._write())
            self._writing.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        if self._queued:
            self._wait(_RETRY_S)

    async def _write(self) -> None:
        self._classify()
        while self._queued:
            tenant = self._queued[0].tenant
            theirs = [signal for signal in self._queued if signal.tenant == tenant]
            # a retraction stays in one write with the judge's label
            part = theirs[: _BATCH_SIZE + any(signal.retracts for signal in theirs[_BATCH_SIZE : _BATCH_SIZE + 1])]
            ids = {signal.id for signal in part}
            try:
                await self._intake.take(part)
            except OstinatoError as error:
                dropped = max(0, len(self._queued) - _MAX_QUEUED)
                self._queued = self._queued[dropped:]
                _LOG.warning(
                    "%d next messages are not written yet, %d were dropped: %s", len(self._queued), dropped, error
                )
                return
            self._queued = [signal for signal in self._queued if signal.tenant != tenant or signal.id not in ids]


def _about_left(left: _Interrupted, words: Typed, before: str) -> Iterator[_Draft]:
    """Yield the signals from words that follow an interrupted answer: a client that goes on with other words had stopped it."""
    yield _Draft(f"left-{left.turn}", left.turn, "interrupted")
    case = Case(request=before, answer=left.answer, message=words.text)
    if words.text and (kind := kind_of(case.message, case.request, case.answer)) in DISSATISFIED:
        yield _Draft(
            f"left-{left.turn}-w", left.turn, _name(kind), _comment(kind), labelled=LabelledMessage(case, kind)
        )


def _spoken(messages: Sequence[Message]) -> bool:
    """True if a person typed text in these messages. Only the first of several is about the answer, and it was classified on arrival."""
    return any(_typed_in(messages))


def _place(question: PendingPrompt) -> tuple[bytes, str]:
    """Return the key that a question and its repetitions share."""
    return question.plain[-1], question.scope.episode or ""


def _name(kind: NextMessage) -> str:
    return "dissatisfied" if kind in DISSATISFIED else "praised" if kind is NextMessage.PRAISE else "followed_up"


def _comment(kind: NextMessage) -> str:
    return f"{kind.value} ({VERSION})"
