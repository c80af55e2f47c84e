"""Context compaction: recognises an agent's request for a summary, and the summary with which a conversation begins anew after its earlier
messages were dropped; signs the summaries that the gateway makes for its clients.

Agents summarise a long conversation and go on in a new one that begins with the summary. Its messages are others, so it continues no turn;
what links it to the conversation before is that the long lines of one earlier answer stand in it. Lines are compared, since agents cut tags
and analysis off a summary before they use it.
"""

from __future__ import annotations

import hmac
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any

from ostinato.core.conversation import CompactionBlock, Conversation, Message, Role
from ostinato.core.records import Window, WindowMaker
from ostinato.serve.dialects.compaction_blocks import CompactionRefused, packed_token, signature_invalid, unpacked_token

_LONG = 40  # characters of a line that tells texts apart
_LEAST = 200  # characters of such lines that must be found again
_ANSWERS = 64  # of each user
_OVERHEAD = 50  # the cost of an answer besides its lines, in lines
_MOST_LINES = 2_048  # of one answer; of longer ones the first count
_FIRST = 2  # messages that may hold the summary: the system's and the user's, or the task and what follows it
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
    """An answer's long lines, as hashes, with the length of each; whose it was, and whether it was sampled as a summary."""

    user: str
    summary: SummaryTurn
    asked: bool
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

    def add(self, place: bytes, summary: SummaryTurn, text: str, user: str = "", *, asked: bool = False) -> None:
        """Remember an answer of this user, unless it has too few long lines to be recognised. `asked`: a summary was asked for."""
        lines = [*islice(_long_lines(text), _MOST_LINES)]
        if sum(map(len, lines)) < _LEAST:
            return
        answers = self._answers.setdefault(place, [])
        self._answers.move_to_end(place)
        answers.append(_Known(user, summary, asked, array("q", map(hash, lines)), array("I", map(len, lines))))
        self._held += answers[-1].cost
        if len(answers) > _ANSWERS:
            self._held -= answers.pop(0).cost
        while self._held > self._most:
            oldest = next(iter(self._answers))
            self._held -= self._answers[oldest].pop(0).cost
            if not self._answers[oldest]:
                del self._answers[oldest]

    def forget(self, user: str | None) -> None:
        """Drop the answers of a user; None: everybody's."""
        for place, answers in [*self._answers.items()]:
            if user in (None, answers[0].user):
                self._held -= sum(known.cost for known in self._answers.pop(place))

    def find(self, place: bytes, episode: str | None, messages: Sequence[Message]) -> SummaryTurn | None:
        """The answer of this user, or of this episode of his, most of whose long lines stand in the first messages that are not the
        assistant's; None if none has at least half of its lines there, and `_LEAST` characters. The newest of several alike. One that was
        asked for as a summary may also stand in the assistant's first message: any other answer is there in an edited history, too.
        """
        answers = list(self._answers.get(place, ()))
        if not answers:
            return None
        first = [*islice((message for message in messages if message.role is not Role.ASSISTANT), _FIRST)]
        if first and messages[0].role is Role.SYSTEM:  # a program that keeps the task has the summary behind it
            first += islice(takewhile(lambda message: message.role is not Role.ASSISTANT, messages), _FIRST, _FIRST + 1)
        there = {hash(line) for message in first for line in _long_lines(message.text)}
        spoken = next((message.text for message in messages[: _FIRST + 1] if message.role is Role.ASSISTANT), "")
        anywhere = there.union(map(hash, _long_lines(spoken)))
        best: tuple[float, SummaryTurn | None] = (0.0, None)
        for known in reversed(answers):
            places = anywhere if known.asked else there
            found = [length for line, length in zip(known.hashes, known.lengths, strict=True) if line in places]
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


# ---------------------------------------------------------------- agents' requests for a summary


_HEAD = 2_000  # characters of the system message in which an agent's prompt for summaries begins
_TAIL = 3_000  # characters at the end of a request in which its closing words stand; an agent may append a paragraph


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPrompt:
    """The words by which an agent's request for a summary is told: all that are given must be there.

    Attributes:
        agent: whose prompt it is, and the release in which it was read.
        system: stands near the beginning of the system message.
        begins: the user's last message begins with it.
        holds: stands in the user's last message.
        ends: stands near that message's end.

    Example: ``SummaryPrompt(agent="aider 0.86.2", system="*Briefly* summarize this partial conversation")``
    """

    agent: str
    system: str = ""
    begins: str = ""
    holds: str = ""
    ends: str = ""

    def asks(self, head: str, request: str, tail: str) -> bool:
        """True if the beginning of the system message, the user's last message and the end of that are this prompt's."""
        fits = self.system in head and request.startswith(self.begins) and self.ends in tail
        return fits and self.holds in request  # last, as it may be long


SUMMARY_PROMPTS = (
    SummaryPrompt(
        agent="Claude Code 2.1.330",
        holds="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
        ends="Tool calls will be rejected and you will fail the task.",
    ),
    SummaryPrompt(
        agent="Claude Code 2.1.330, without its lines about tools",
        begins="Your task is to create a detailed summary of ",
        holds="Your summary should include the following sections:",
    ),
    SummaryPrompt(
        agent="Codex 0.169.0",
        begins="You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM",
    ),
    SummaryPrompt(
        agent="opencode 1.18.33", system="You are a context summarization agent. You are given a conversation"
    ),
    SummaryPrompt(
        agent="opencode 1.18.33, after an overflow",
        begins="Here is the conversation so far:\n\n<conversation>",
        holds="Output exactly the Markdown structure shown inside <template>",
    ),
    SummaryPrompt(
        agent="qwen-code 0.24.4",
        system="You are the component that summarizes a conversation when its context window is about to overflow.",
        ends="Then, produce the <state_snapshot> XML.",
    ),
    SummaryPrompt(
        agent="qwen-code 0.24.4, sharing the conversation's prefix",
        begins="You are the component that summarizes a conversation when its context window is about to overflow.",
        ends="Then, produce the <state_snapshot> XML.",
    ),
    SummaryPrompt(agent="aider 0.86.2", system="*Briefly* summarize this partial conversation about programming."),
    SummaryPrompt(
        agent="Cline 3.0.65",
        system="Summarize the provided coding session into a concise continuation note with detailed",
    ),
    SummaryPrompt(
        agent="Continue 1.5.47",
        begins="Please provide a concise summary of our conversation so far, capturing the key context, decisions made, and",
    ),
)


def asks_for_summary(conversation: Conversation) -> bool:
    """True if the conversation ends with an agent's own request for a summary of it, as one of `SUMMARY_PROMPTS` words it.

    Only the system message and the user's last message are read, so that a file or a tool's result that quotes a prompt is none.
    """
    messages = conversation.messages
    request = next((message for message in reversed(messages) if message.role is not Role.SYSTEM), None)
    if request is None or request.role is not Role.USER:
        return False
    head = messages[0].text[:_HEAD] if messages[0].role is Role.SYSTEM else ""
    tail = request.text[-_TAIL:]
    return any(prompt.asks(head, request.text, tail) for prompt in SUMMARY_PROMPTS)


# ---------------------------------------------------------------- signed blocks


_VERSION = 1


class BlockSigner:
    """Signs the summaries that clients keep, and verifies those that they send back. Stateless: a block is valid after a restart, too.

    A signature covers the tenant, the model's name (not its version, which changes with every release), the dialect, the summary's turn,
    episode and window, whose conversation it was, and the content.

    Args:
        keys: secrets; the first signs, and all verify, so that a key can be replaced by putting the new one in front.
        model: the name under which the model is served.
    """

    def __init__(self, keys: Sequence[str], model: str) -> None:
        self._keys = [blake2b(key.encode(), person=b"compaction").digest() for key in keys]
        self._model = model

    def sign(
        self, tenant: str, dialect: str, place: bytes, summary: SummaryTurn, content: str, *, inside: bool
    ) -> CompactionBlock:
        """The block of a summary. `place`: whose conversations may be continued; `inside`: the token holds the content, too."""
        fields: dict[str, Any] = {
            "turn": summary.turn,
            "episode": summary.episode,
            "number": summary.number,
            "place": place.hex(),
        }
        fields |= {"content": _digest(content)} | ({"text": content} if inside else {})
        mac = self._mac(self._keys[0], tenant, dialect, fields)
        return CompactionBlock(content=content, token=packed_token(fields, mac))

    def summary(self, tenant: str, dialect: str, place: bytes, block: CompactionBlock) -> SummaryTurn | None:
        """The turn that wrote a block; None if it was written in a conversation of another user or arm, whose text alone is taken.

        Raises CompactionRefused unless this server signed it for this tenant, model and dialect, with this content.
        """
        fields, mac = unpacked_token(block.token, block.field)
        if not any(hmac.compare_digest(mac, self._mac(key, tenant, dialect, fields)) for key in self._keys):
            raise signature_invalid(block.field)
        if fields["content"] != _digest(block.content):
            message = "The compaction block's content is not what was signed; send the block back as it was returned."
            raise CompactionRefused("content_mismatch", message, block.field)
        if fields["place"] != place.hex():
            return None
        return SummaryTurn(
            turn=fields["turn"], episode=fields["episode"], number=fields["number"], by=WindowMaker.GATEWAY
        )

    def _mac(self, key: bytes, tenant: str, dialect: str, fields: dict[str, Any]) -> bytes:
        signed = json.dumps([_VERSION, self._model, tenant, dialect, fields], sort_keys=True)
        return hmac.digest(key, signed.encode(), "sha256")


def _digest(content: str) -> str:
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
