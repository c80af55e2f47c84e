"""Context compaction: recognises the summary with which a conversation begins anew after its earlier messages were dropped, and signs the
summaries that the gateway makes for its clients.

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
from itertools import islice
from typing import Any

from ostinato.core.conversation import CompactionBlock, Message, Role
from ostinato.core.records import Window, WindowMaker
from ostinato.serve.dialects.compaction_blocks import CompactionRefused, packed_token, signature_invalid, unpacked_token

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
    """An answer's long lines, as hashes, with the length of each; and whose it was."""

    user: str
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

    def add(self, place: bytes, summary: SummaryTurn, text: str, user: str = "") -> None:
        """Remember an answer of this user, unless it has too few long lines to be recognised."""
        lines = [*islice(_long_lines(text), _MOST_LINES)]
        if sum(map(len, lines)) < _LEAST:
            return
        answers = self._answers.setdefault(place, [])
        self._answers.move_to_end(place)
        answers.append(_Known(user, summary, array("q", map(hash, lines)), array("I", map(len, lines))))
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
