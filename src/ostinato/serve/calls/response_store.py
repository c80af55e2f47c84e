"""Earlier answers that a call may continue by id (`previous_response_id`): their messages, kept in memory while there is room.

Idempotency keys: a repeated call gets the answer of the first, also after a restart.

The call's id is derived from tenant, key and body, so the turns of an earlier try can be found in the log by their ids. After a try
that left no complete answer (the client went away, the engine failed, the process was killed between two choices), the next try gets
the next number.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ostinato.core.conversation import CompactionBlock, Conversation, Message
from ostinato.core.errors import BadRequest, Conflict
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Turn
from ostinato.core.seams import Log
from ostinato.serve.dialects.compaction_blocks import block_message
from ostinato.serve.dialects.dialect import ConversationRequest, Request
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.dialects.responses import ResponsesRequest

_OVERHEAD = 500  # the cost of a message or an entry besides its characters, in characters


class PreviousGone(BadRequest):
    """The named previous answer is not in memory."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The messages that a call of `user` added after the answer `before`: its input and its own answer."""

    user: str
    before: str | None
    said: tuple[Message, ...]

    @property
    def cost(self) -> int:
        return sum(message.chars for message in self.said) + _OVERHEAD * (1 + len(self.said))


class ResponseStore:
    """One tenant's answers by id, each linked to the answer before it. The least recently used are dropped.

    Args:
        budget: about how many characters are held at most.

    Example::

        conversation = previous.conversation(request)  # what its answer named is before what it says
        ...  # the answer is sampled and stored as a turn
        previous.keep(request, turn, answer)
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def conversation(self, request: ConversationRequest) -> Conversation:
        """The request's conversation, preceded by the messages up to the answer that it names. Raises PreviousGone, BadRequest."""
        if not isinstance(request, ResponsesRequest) or request.previous_response_id is None:
            return request.conversation
        steps = list(self._back(request.previous_response_id))
        # moves the first answer last, so that of a conversation the newest answers are dropped first
        for step in steps:
            self._kept.move_to_end(step)
        return request.after([message for step in reversed(steps) for message in self._kept[step].said])

    def known(self, request: ConversationRequest) -> Conversation:
        """The same without what is no longer kept."""
        with suppress(PreviousGone):
            return self.conversation(request)
        return request.conversation

    def keep(
        self, request: ConversationRequest, turn: Turn, answer: Message, block: CompactionBlock | None = None
    ) -> None:
        """Keep an answer, and the summary that the call began with, unless the client sent `store` false or the answer is incomplete."""
        if not isinstance(request, ResponsesRequest) or request.store is False or not turn.finish.complete:
            return
        said = (*request.read.parts, *([] if block is None else [block_message(block)]), answer)
        self._put(turn.id.rpartition(":")[0], _Kept(turn.user, request.previous_response_id, said))

    def keep_block(self, request: Request, id: str, user: str, block: CompactionBlock) -> None:
        """Keep a summary, with which a conversation that goes on from this answer begins."""
        if isinstance(request, ResponsesRequest) and request.store is not False:
            self._put(id, _Kept(user, None, (block_message(block),)))

    def forget(self, row: Forgotten) -> None:
        """Drop the answers of somebody who was forgotten."""
        for id in [id for id, kept in self._kept.items() if row.covers((row.tenant, kept.user))]:
            self._held -= self._kept.pop(id).cost

    def _put(self, id: str, kept: _Kept) -> None:
        self._held += kept.cost - (self._kept[id].cost if id in self._kept else 0)
        self._kept[id] = kept
        while self._held > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._held -= dropped.cost

    def _back(self, id: str) -> Iterator[str]:
        at: str | None = id
        while at is not None:
            kept = self._kept.get(at)
            if kept is None:
                raise PreviousGone(
                    f"Previous response with id {id[:200]!r} not found. Answers are kept in memory, until the server restarts "
                    "or needs the room (serve.previous_chars), and not with store=false; send the whole input.",
                    field="previous_response_id",
                )
            yield at
            at = kept.before


# ---------------------------------------------------------------- idempotency


_MOST_TRIES = 64
_NAME_CHARS = 24  # fewer than an id without a key has


class KeyReused(BadRequest):
    """An idempotency key was reused with a different body."""

    status = 422
    code = "idempotency_key_reused"


@dataclass(slots=True, kw_only=True)
class Try:
    """One try at a call: its id, the turns of an earlier try that answered it (if any), and the writes that it has begun."""

    base: str
    number: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])
    writes: list[asyncio.Future[Any]] = field(default_factory=list[asyncio.Future[Any]])

    @property
    def id(self) -> str:
        """The prefix of its turns' ids."""
        return f"{self.base}-{self.number}" if self.number else self.base

    def again(self) -> None:
        """Go on under the next id, because the turns under this id record a failure."""
        self.number += 1


class IdempotencyKeys:
    """Serialises calls with the same key and finds the answers of earlier ones.

    Args:
        log: holds the earlier answers.
        remembered: how many of a tenant's keys are remembered with their bodies.

    Example::

        async with repeats.attempt("chatcmpl", tenant, key, body_digest("chatcmpl", body), n=1) as attempt:
            attempt.turns  # the answer, if there was one; else sample under attempt.id
    """

    def __init__(self, log: Log, *, remembered: int) -> None:
        self._log = log
        self._remembered = remembered
        # by tenant: digest of tenant and key -> digest of the body
        self._bodies: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)
        self._open: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def attempt(self, kind: str, tenant: str, key: str, shape: str, n: int) -> AsyncGenerator[Try]:
        """Wait for other calls under the same key, then look for their answer. `shape`: a digest of the body (`body_digest`).
        Raises KeyReused, Conflict.
        """
        name = _digest(_NAME_CHARS, tenant.encode(), key.encode())
        bodies = self._bodies[tenant]
        _claim(bodies, name, shape)
        while name in self._open:
            await asyncio.shield(self._open[name])
            _claim(bodies, name, shape)  # the call before may have left nothing, and with it the key
        ended = self._open[name] = asyncio.get_running_loop().create_future()
        attempt = Try(base=f"{kind}-{name}-{shape}")
        try:
            attempt.turns = await self._find(attempt, n)
            yield attempt
        finally:
            # the try left nothing, so the key may be used with another body
            if not attempt.turns and not attempt.writes:
                bodies.pop(name, None)
            self._release(name, ended, [write for write in attempt.writes if not write.done()])
            while len(bodies) > self._remembered:
                bodies.popitem(last=False)

    def restore(self, turn: Turn) -> None:
        """Remember the key of a call that was read from the log."""
        parts = turn.id.partition(":")[0].split("-")
        if len(parts) >= 3 and len(parts[1]) == _NAME_CHARS and self._remembered:
            bodies = self._bodies[turn.tenant]
            bodies[parts[1]] = parts[2]
            if len(bodies) > self._remembered:
                bodies.popitem(last=False)

    async def _find(self, attempt: Try, n: int) -> list[Turn]:
        """Advance `attempt` to the try that was answered and return its turns, or to the first number without turns and return []."""
        for _ in range(_MOST_TRIES):
            turns = await self._log.find(Turn, [(f"{attempt.id}:{index}",) for index in range(n)])
            if not turns or (len(turns) == n and all(is_whole(turn) for turn in turns)):
                return turns
            attempt.again()
        raise Conflict(f"{_MOST_TRIES} tries under this Idempotency-Key ended without an answer; make a new key.")

    def _release(self, name: str, ended: asyncio.Future[None], writes: list[asyncio.Future[Any]]) -> None:
        """Let the next call in, once none of this try's writes can still reach the log."""
        if writes:
            writes[0].add_done_callback(lambda _: self._release(name, ended, [w for w in writes if not w.done()]))
            return
        del self._open[name]
        if not ended.done():
            ended.set_result(None)


def _claim(bodies: OrderedDict[str, str], name: str, shape: str) -> None:
    """Remember the body under a key. Raises KeyReused if another one is."""
    if bodies.setdefault(name, shape) != shape:
        raise KeyReused(
            "This Idempotency-Key was used before with another body; make a new key for each new call.",
            field="Idempotency-Key",
        )
    bodies.move_to_end(name)


def is_whole(turn: Turn) -> bool:
    """True if the turn is a complete answer that can be replayed."""
    return turn.finish.complete and not turn.redacted and (bool(turn.spans) or turn.arm is Arm.OUTSIDE)


def body_digest(kind: str, body: Any) -> str:
    """A digest of a call's kind and body. Pure."""
    return _digest(12, kind.encode(), _canonical(body))


def _canonical(body: Any) -> bytes:
    """The body as JSON with its top-level fields sorted. The streaming options are left out: they do not change the question."""
    plain = {name: body[name] for name in sorted(body) if name not in ("stream", "stream_options")}
    return json_bytes(plain)


def _digest(length: int, *parts: bytes) -> str:
    state = blake2b(digest_size=length // 2)
    for part in parts:
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()
