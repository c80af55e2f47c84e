"""Context compaction: recognises the summary with which a conversation begins anew after its earlier messages were dropped.

Agents summarise a long conversation and go on in a new one that begins with the summary. Its messages are others, so it continues no turn;
what links it to the conversation before is that the long lines of one earlier answer stand in it. Lines are compared, since agents cut tags
and analysis off a summary before they use it.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ostinato.core.conversation import Message, Role
from ostinato.core.records import Window, WindowMaker

_LONG = 40  # characters of a line that tells texts apart
_LEAST = 200  # characters of such lines that must be found again
_ANSWERS = 64  # of each user
_OVERHEAD = 50  # the cost of an answer besides its lines, in lines
_MOST_LINES = 2_048  # of one answer; of longer ones the first count
_FIRST = 2  # messages that may hold the summary: the system's and the user's
_BREAKS = re.compile(r"[\n<>]")  # tags around a summary end its lines


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryTurn:
    """An answer with which a later window of its episode begins. `number`: that of the window that it summarises.

    Example: ``SummaryTurn(turn="msg-3f:0", episode="e1", number=0, by=WindowMaker.AGENT).next_window() == Window(number=1, ...)``
    """

    turn: str
    episode: str
    number: int
    by: WindowMaker

    def next_window(self) -> Window:
        """The window that begins with it."""
        return Window(number=self.number + 1, begins_with=self.turn, by=self.by)


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer's long lines, as hashes, with the length of each."""

    summary: SummaryTurn
    hashes: array[int]
    lengths: array[int]

    @property
    def cost(self) -> int:
        return len(self.hashes) + _OVERHEAD


class SummaryIndex:
    """The long lines of each user's last answers. Bounded: the answers of the users who were silent longest are dropped.

    `add` is called on one thread; `find` only reads and may run on another at the same time.

    Args:
        lines: most lines held, 12 bytes each.

    Example::

        index.add(place, summary, "Done so far: ...")
        index.find(place, None, conversation.messages)  # the summary, if the first messages repeat most of its lines
    """

    def __init__(self, lines: int) -> None:
        self._most = lines
        self._held = 0
        self._answers: OrderedDict[bytes, list[_Known]] = OrderedDict()

    def add(self, place: bytes, summary: SummaryTurn, text: str) -> None:
        """Remember an answer of this user, unless it has too few long lines to be recognised."""
        lines = [*islice(_long_lines(text), _MOST_LINES)]
        if sum(map(len, lines)) < _LEAST:
            return
        answers = self._answers.setdefault(place, [])
        self._answers.move_to_end(place)
        answers.append(_Known(summary, array("q", map(hash, lines)), array("I", map(len, lines))))
        self._held += answers[-1].cost
        if len(answers) > _ANSWERS:
            self._held -= answers.pop(0).cost
        while self._held > self._most:
            oldest = next(iter(self._answers))
            self._held -= self._answers[oldest].pop(0).cost
            if not self._answers[oldest]:
                del self._answers[oldest]

    def find(self, place: bytes, episode: str | None, messages: Sequence[Message]) -> SummaryTurn | None:
        """The answer of this user, or of this episode of his, most of whose long lines stand in the first messages that are not the
        assistant's; None if none has at least half of its lines there, and `_LEAST` characters. The newest of several alike.
        """
        answers = list(self._answers.get(place, ()))
        if not answers:
            return None
        first = islice((message for message in messages if message.role is not Role.ASSISTANT), _FIRST)
        there = {hash(line) for message in first for line in _long_lines(message.text)}
        best: tuple[float, SummaryTurn | None] = (0.0, None)
        for known in reversed(answers):
            found = [length for line, length in zip(known.hashes, known.lengths, strict=True) if line in there]
            share = len(found) / len(known.hashes)
            if episode in (None, known.summary.episode) and share >= 0.5 and sum(found) >= _LEAST and share > best[0]:
                best = (share, known.summary)
        return best[1]


def _long_lines(text: str) -> Iterator[str]:
    """The lines of a text that are long enough to tell it apart, with single spaces."""
    for line in _BREAKS.split(text):
        normal = " ".join(line.split())
        if len(normal) >= _LONG:
            yield normal
