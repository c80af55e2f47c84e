"""Context compaction: recognises agents' requests for a summary, and conversations that begin with a summary after their earlier messages
were dropped; signs the summaries that the gateway makes for its clients.

Agents summarise a long conversation and continue in a new one that begins with the summary. Since its messages differ, it continues no
turn. It is linked to the earlier conversation because it contains the long lines of one earlier answer. Lines are compared, since agents
cut tags and analysis off a summary before they use it.
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

_LONG_LINE_CHARS = 40  # fewest characters of a line that identifies a text
_MIN_CHARS = 200  # fewest characters of such lines that must match
_MAX_ANSWERS = 64  # answers indexed per user
_OVERHEAD = 50  # memory cost of an answer besides its lines, in lines
_MOST_LINES = 2_048  # lines indexed per answer; later lines are ignored
_LEADING = 2  # messages that may hold the summary: system and user, or the task and the next
_BREAKS = re.compile(r"[\n<>]")  # angle brackets too, since summaries stand between tags


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryTurn:
    """An answer with which a later window of its episode begins. `number`: the window that it summarises.

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
class _IndexedAnswer:
    """The hashes and lengths of an answer's long lines, its user, and whether it was sampled as a summary (`asked`)."""

    user: str
    summary: SummaryTurn
    asked: bool
    hashes: array[int]
    lengths: array[int]

    @property
    def cost(self) -> int:
        return len(self.hashes) + _OVERHEAD


class SummaryIndex:
    """Index of the long lines of each user's last answers. Bounded: the answers of the users silent for longest are evicted.

    `add` is called on one thread; `find` only reads and may run on another at the same time.

    Args:
        lines: most lines held, at 12 bytes each.

    Example::

        index.add(place, summary, "Done so far: ...")
        index.find(place, None, conversation.messages)  # the summary, if the first messages repeat most of its lines
    """

    def __init__(self, lines: int) -> None:
        self._most = lines
        self._held = 0
        self._answers: OrderedDict[bytes, list[_IndexedAnswer]] = OrderedDict()

    def add(self, place: bytes, summary: SummaryTurn, text: str, user: str = "", *, asked: bool = False) -> None:
        """Index an answer, unless it has too few long lines to be recognised. `asked`: the client had asked for a summary."""
        lines = [*islice(_long_lines(text), _MOST_LINES)]
        if sum(map(len, lines)) < _MIN_CHARS:
            return
        answers = self._answers.setdefault(place, [])
        self._answers.move_to_end(place)
        answers.append(_IndexedAnswer(user, summary, asked, array("q", map(hash, lines)), array("I", map(len, lines))))
        self._held += answers[-1].cost
        if len(answers) > _MAX_ANSWERS:
            self._held -= answers.pop(0).cost
        while self._held > self._most:
            oldest = next(iter(self._answers))
            self._held -= self._answers[oldest].pop(0).cost
            if not self._answers[oldest]:
                del self._answers[oldest]

    def forget(self, user: str | None) -> None:
        """Drop a user's answers; None drops everybody's."""
        for place, answers in [*self._answers.items()]:
            if user in (None, answers[0].user):
                self._held -= sum(known.cost for known in self._answers.pop(place))

    def find(self, place: bytes, episode: str | None, messages: Sequence[Message]) -> SummaryTurn | None:
        """Return the answer of this user (and this episode, if given) that the conversation begins with; None if there is none.

        It is the one with the largest share of its long lines, at least half of them and `_MIN_CHARS` characters, in the first messages
        that are not the assistant's; the newest of equals. The assistant's first message counts only for answers requested as summaries,
        since any other answer stands there in an edited history, too.
        """
        answers = list(self._answers.get(place, ()))
        if not answers:
            return None
        first = [*islice((message for message in messages if message.role is not Role.ASSISTANT), _LEADING)]
        if first and messages[0].role is Role.SYSTEM:  # agents that keep the task put the summary after it
            first += islice(
                takewhile(lambda message: message.role is not Role.ASSISTANT, messages), _LEADING, _LEADING + 1
            )
        head_lines = {hash(line) for message in first for line in _long_lines(message.text)}
        answer = next((message.text for message in messages[: _LEADING + 1] if message.role is Role.ASSISTANT), "")
        anywhere = head_lines.union(map(hash, _long_lines(answer)))
        best: tuple[float, SummaryTurn | None] = (0.0, None)
        for known in reversed(answers):
            places = anywhere if known.asked else head_lines
            matched = [length for line, length in zip(known.hashes, known.lengths, strict=True) if line in places]
            share = len(matched) / len(known.hashes)
            if (
                episode in (None, known.summary.episode)
                and share >= 0.5
                and sum(matched) >= _MIN_CHARS
                and share > best[0]
            ):
                best = (share, known.summary)
        return best[1]


def _long_lines(text: str) -> Iterator[str]:
    """Yield a text's lines that are long enough to identify it, with whitespace collapsed."""
    for line in _BREAKS.split(text):
        normal = " ".join(line.split())
        if len(normal) >= _LONG_LINE_CHARS:
            yield normal


# ---------------------------------------------------------------- agents' requests for a summary


_HEAD = 2_000  # characters of the system message that are searched for `SummaryPrompt.system`
_TAIL = 3_000  # characters at a request's end that are searched for `SummaryPrompt.ends`; agents may append a paragraph


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPrompt:
    """The wording by which an agent's request for a summary is recognised. All given parts must match.

    Attributes:
        agent: the agent and its release from which the prompt was taken.
        system: occurs near the beginning of the system message.
        begins: the user's last message begins with it.
        holds: occurs in the user's last message.
        ends: occurs near that message's end.

    Example: ``SummaryPrompt(agent="aider 0.86.2", system="*Briefly* summarize this partial conversation")``
    """

    agent: str
    system: str = ""
    begins: str = ""
    holds: str = ""
    ends: str = ""

    def asks(self, head: str, request: str, tail: str) -> bool:
        """Return True if the head of the system message, the user's last message and its tail match this prompt."""
        fits = self.system in head and request.startswith(self.begins) and self.ends in tail
        return fits and self.holds in request  # last, because the message may be long


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
    """Return True if the conversation ends with an agent's own request for a summary, in the wording of one of `SUMMARY_PROMPTS`.

    Only the system message and the user's last message are read, so a file or tool result that quotes such a prompt does not match.
    """
    messages = conversation.messages
    request = next((message for message in reversed(messages) if message.role is not Role.SYSTEM), None)
    if request is None or request.role is not Role.USER:
        return False
    head = messages[0].text[:_HEAD] if messages[0].role is Role.SYSTEM else ""
    tail = request.text[-_TAIL:]
    return any(prompt.asks(head, request.text, tail) for prompt in SUMMARY_PROMPTS)


# ---------------------------------------------------------------- signed compaction blocks


_VERSION = 1


class BlockSigner:
    """Signs the summaries that clients keep, and verifies them when they come back. Stateless: blocks stay valid across restarts.

    A signature covers the tenant, the model's name (not its version, which changes with every release), the dialect, the summary's turn,
    episode and window, the conversation's owner (tenant, user and arm), and the content.

    Args:
        keys: secrets. The first signs and all verify, so a key is rotated by putting the new one in front.
        model: the name under which the model is served.
    """

    def __init__(self, keys: Sequence[str], model: str) -> None:
        self._keys = [blake2b(key.encode(), person=b"compaction").digest() for key in keys]
        self._model = model

    def sign(
        self, tenant: str, dialect: str, place: bytes, summary: SummaryTurn, content: str, *, inside: bool
    ) -> CompactionBlock:
        """Return a summary's signed block. `place`: hash of the tenant, user and arm; `inside`: the token holds the content, too."""
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
        """Return the turn that wrote a block; None if another user or arm owns it, so that only its text may be used.

        Raises CompactionRefused unless this server signed the block for this tenant, model and dialect, with this content.
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
