"""Earlier answers that a call may refer to by id, as a whole (`previous_response_id`) or item by item (`item_reference`), in a bounded
cache. Items that were evicted, or answered by another process, are parsed again from the answer's turn in the log.

Also idempotency keys: a repeated call gets the answer of the first, even after a restart.

The call's id is derived from tenant, key and body, so the turns of an earlier attempt can be found in the log by id. After an attempt that
left no complete answer (the client disconnected, the engine failed, the process was killed between two choices), the next attempt gets the
next number.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ostinato.core.conversation import CompactionBlock, Conversation, Message, Tool
from ostinato.core.errors import BadRequest, Conflict, NotFound
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Purpose, Turn
from ostinato.core.seams import Log, Renderer
from ostinato.serve.calls.conversations import AnswerParser
from ostinato.serve.dialects.compaction_blocks import block_message
from ostinato.serve.dialects.dialect import ConversationRequest, Counts, Heading, Json, Request, Tokens, Whole
from ostinato.serve.dialects.items import LruCache
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.dialects.responses import Responses, ResponsesRequest
from ostinato.serve.dialects.responses_items import ReferenceMessage, messages_of

MAX_RESTORED = 1_000  # answers that one call may load from the log
_OVERHEAD = 500  # memory cost of a message or an entry besides its characters, in characters


class PreviousGone(BadRequest):
    """The referenced previous answer is not in memory."""

    code = "previous_response_not_found"


class ItemGone(NotFound):
    """The referenced item is neither in memory nor restored from the log, or belongs to somebody else; the client cannot tell which."""

    code = "item_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The messages that a call of `user` added after the answer `before`: its input and its own answer. `named`: the ids of referenced
    items among them.
    """

    user: str
    before: str | None
    said: tuple[Message, ...]
    named: tuple[str, ...] = ()

    @property
    def cost(self) -> int:
        return sum(message.chars for message in self.said) + _OVERHEAD * (1 + len(self.said) + len(self.named))


@dataclass(slots=True)
class _Items:
    """The items of an answer to `user`, as sent to the client. The answer's writer may still append to `told`."""

    user: str
    told: list[Json]
    _read: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])

    def messages(self, id: str) -> tuple[Message, ...] | None:
        """Return an item's messages, the same objects each time; None if there is no such item."""
        if len(self._read) < len(self.told):
            self._read = {item["id"]: messages_of(item) for item in self.told}
        return self._read.get(id)


class ResponseStore:
    """One tenant's answers by id, each linked to the one before it, and their items, in an LRU cache. A stored answer holds copies of all
    items that its call referred to.

    Args:
        budget: approximate limit in characters. A quarter is for items, which thereby outlive the long inputs of their calls.

    Example::

        conversation = previous.conversation(request, "ann")  # the messages up to the referenced answer, then the request's own
        ...  # the answer is sampled and stored as a turn
        previous.keep(request, turn, answer)
    """

    def __init__(self, budget: int) -> None:
        self._kept = LruCache[str, _Kept](budget - budget // 4)
        self._items = LruCache[str, _Items](budget // 4)
        self._forgotten: dict[str | None, float] = {}  # time of erasure by user; None: the whole tenant

    def conversation(self, request: ConversationRequest, user: str) -> Conversation:
        """Return the request's full conversation: first the messages up to the answer that it refers to, then its own, with referenced
        items in place. An item that is already there is not repeated.

        Raises PreviousGone, ItemGone, BadRequest.
        """
        if not isinstance(request, ResponsesRequest) or not request.refers:
            return request.conversation
        # this touches a conversation's first answer last, so that its newest answers are evicted first
        steps, read = dict(self._ancestors(request.previous_response_id)), request.read
        there = {id for kept in steps.values() for id in kept.named}
        own, named = list[Message](), list[str]()
        for part in read.parts:
            if not isinstance(part, ReferenceMessage):
                own.append(part)
                continue
            # looked up even if it is there already, so that foreign and wrong ids are always refused
            found = self._item(part.id, user)
            if part.id not in there and _answer_of(part.id) not in steps:
                there.add(part.id)
                named.append(part.id)
                own += found
        read.parts, read.named = own, [*read.named, *named]  # the stored call then depends on no item
        before = [message for kept in reversed(steps.values()) for message in kept.said]
        return request.going_on([*before, *own])

    def missing(self, request: Request, user: str) -> Mapping[str, Collection[str]]:
        """Return the ids of referenced items that are not in memory, by the id of their answer; at most `MAX_RESTORED` answers."""
        missing = defaultdict[str, list[str]](list)
        for part in request.read.parts if isinstance(request, ResponsesRequest) else ():
            if isinstance(part, ReferenceMessage) and self._found(part.id, user) is None:
                answer = _answer_of(part.id)
                if answer in missing or len(missing) < MAX_RESTORED:
                    missing[answer].append(part.id)
        return missing

    def restore(self, turn: Turn, ids: Collection[str], request: Request, renderer: Renderer) -> None:
        """Cache an answer's items again, parsed from its turn, if all of `ids` are among them. `request`: offers the tools."""
        # a summary's client got a signed compaction item, which is not in the log
        lost = turn.purpose is Purpose.COMPACTION or self._is_forgotten(turn) or not is_whole(turn)
        if not isinstance(request, ResponsesRequest) or lost:
            return
        items = next((items for items in _parsed_items(turn, request, renderer) if _ids(items).issuperset(ids)), None)
        if items is None:
            return
        id, cost = turn.id.rpartition(":")[0], len(turn.text) + _OVERHEAD * (1 + len(items))
        self._items.put(id, _Items(turn.user, items), cost=cost)
        if self._is_forgotten(turn):  # in the meantime, on the event loop
            self._items.drop(lambda held: held.told is items)

    def known(self, request: ConversationRequest, user: str) -> Conversation:
        """Like `conversation`, but without what is no longer in memory."""
        with suppress(PreviousGone, ItemGone):
            return self.conversation(request, user)
        return request.conversation

    def keep(
        self, request: ConversationRequest, turn: Turn, answer: Message, block: CompactionBlock | None = None
    ) -> None:
        """Store an answer, with the summary that the call began with, unless `store` is false or the answer is incomplete."""
        if not isinstance(request, ResponsesRequest) or request.store is False or not turn.finish.complete:
            return
        read, told = request.read, (*([] if block is None else [block_message(block)]), answer)
        kept = _Kept(turn.user, request.previous_response_id, (*read.parts, *told), tuple(read.named))
        self._keep(request, turn.id.rpartition(":")[0], kept, told)

    def keep_block(self, request: Request, id: str, user: str, block: CompactionBlock) -> None:
        """Store a summary as the beginning of conversations that continue from this answer."""
        if isinstance(request, ResponsesRequest) and request.store is not False:
            told = (block_message(block),)
            self._keep(request, id, _Kept(user, None, told), told)

    def forget(self, row: Forgotten) -> None:
        """Drop a forgotten user's answers; those up to now cannot be restored either."""
        self._forgotten[row.user] = row.at
        self._kept.drop(lambda kept: row.covers((row.tenant, kept.user)))
        self._items.drop(lambda items: row.covers((row.tenant, items.user)))

    def _is_forgotten(self, turn: Turn) -> bool:
        return turn.started_at <= max(self._forgotten.get(turn.user, -math.inf), self._forgotten.get(None, -math.inf))

    def _keep(self, request: ResponsesRequest, id: str, kept: _Kept, told: Sequence[Message]) -> None:
        """Store an answer that consists of the messages `told`. Its items may still be unwritten, so their size is taken from `told`."""
        self._kept.put(id, kept, cost=kept.cost)
        items = _Items(kept.user, request.told.setdefault(id, []))
        parts = sum(bool(message.text) + bool(message.reasoning) + len(message.calls) for message in told)
        self._items.put(id, items, cost=sum(message.chars for message in told) + _OVERHEAD * (1 + parts))

    def _ancestors(self, id: str | None) -> Iterator[tuple[str, _Kept]]:
        """Yield the answers of a conversation, the last one first. Raises PreviousGone."""
        while id is not None:
            kept = self._kept.get(id)
            if kept is None:
                raise PreviousGone(
                    f"Previous response with id {id[:200]!r} not found. Answers are kept in memory, until the server restarts "
                    "or needs the room (serve.previous_chars), and not with store=false; send the whole input.",
                    field="previous_response_id",
                )
            yield id, kept
            id = kept.before

    def _item(self, id: str, user: str) -> Sequence[Message]:
        """Return the messages of an item of an answer to this user. Raises ItemGone."""
        found = self._found(id, user)
        if found is not None:
            return found
        raise ItemGone(
            f"Item with id {id[:200]!r} not found. Items are not persisted when `store` is set to false, and a summary, or the answer of "
            "a stream that was broken off, is kept in memory only. Send the item itself, which the AI SDK does with `store` set to "
            "false, or remove it from your input.",
            field="input",
        )

    def _found(self, id: str, user: str) -> Sequence[Message] | None:
        """Return the messages of an item in memory; None if there is no such item of an answer to this user."""
        items = self._items.get(_answer_of(id))
        return items.messages(id) if items is not None and items.user == user else None


def _parsed_items(turn: Turn, request: ResponsesRequest, renderer: Renderer) -> Iterator[list[Json]]:
    """Yield a turn's items as a body lists them, then as a stream does, which starts a new item for text after a call. Yield nothing if the
    calls parsed now are not those recorded in the turn.
    """
    id, calls = turn.id.rpartition(":")[0], turn.calls
    tools = {tool.name: tool for tool in request.conversation.tools}
    missing = {call.name for call in calls or () if call.name not in tools}
    offered = (*tools.values(), *(Tool(name=name, description="", parameters={}) for name in missing))
    told = Conversation(messages=(), tools=() if calls == () else offered)
    parser = AnswerParser(renderer.reader(told, turn.id), one_call=calls is not None and len(calls) == 1)
    pieces = parser.take(turn.text, last=True)
    if calls is not None and parser.parsed_calls() != calls:
        return
    heading = Heading(id=id, created=turn.started_at, model="", choices=1, prompt_tokens=0, count_usage=False)
    counts, nothing = Counts(prompt=0, answer=0), Tokens((), ())
    items: dict[str, list[Json]] = {}
    body = Responses(heading, request.offered, told=items)
    body.body([Whole(message=parser.message(), tokens=nothing, finish=turn.finish)], counts, {})
    yield items.pop(id)
    stream = Responses(heading, request.offered, told=items)
    stream.opening()
    stream.delta(0, pieces, nothing)
    stream.ending(0, turn.finish, "", (counts, {}))
    yield items.pop(id)


def _ids(items: Sequence[Json]) -> set[str]:
    return {item["id"] for item in items}


def _answer_of(item: str) -> str:
    """Return the id of the answer from an item's id as written by `Responses`; an arbitrary text for other ids."""
    kind, _, rest = item.partition("_")
    return rest if kind == "cmp" else rest.rpartition("_")[0]


# ---------------------------------------------------------------- idempotency


_MOST_TRIES = 64
_NAME_CHARS = 24  # shorter than the random part of an id without a key


class KeyReused(BadRequest):
    """An idempotency key was reused with a different body."""

    status = 422
    code = "idempotency_key_reused"


@dataclass(slots=True, kw_only=True)
class CallAttempt:
    """One attempt at a call: its id, the turns of an earlier attempt that answered it (if any), and the writes that it has begun."""

    base: str
    number: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])
    writes: list[asyncio.Future[Any]] = field(default_factory=list[asyncio.Future[Any]])

    @property
    def id(self) -> str:
        """The prefix of this attempt's turn ids."""
        return f"{self.base}-{self.number}" if self.number else self.base

    def again(self) -> None:
        """Advance to the next id, because the turns under this one record a failure."""
        self.number += 1


class IdempotencyKeys:
    """Serialises calls with the same key and finds the answers of earlier ones.

    Args:
        log: holds the earlier answers.
        remembered: how many of each tenant's keys are remembered with their bodies.

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
    async def attempt(self, kind: str, tenant: str, key: str, shape: str, n: int) -> AsyncGenerator[CallAttempt]:
        """Wait for other calls under the same key, then look for their answer. `shape`: the `body_digest`.

        Raises KeyReused, Conflict.
        """
        name = _digest(_NAME_CHARS, tenant.encode(), key.encode())
        bodies = self._bodies[tenant]
        _claim(bodies, name, shape)
        while name in self._open:
            await asyncio.shield(self._open[name])
            _claim(bodies, name, shape)  # again, since a call that left nothing has released the key
        ended = self._open[name] = asyncio.get_running_loop().create_future()
        attempt = CallAttempt(base=f"{kind}-{name}-{shape}")
        try:
            attempt.turns = await self._find(attempt, n)
            yield attempt
        finally:
            # nothing was written, so the key may be used with another body
            if not attempt.turns and not attempt.writes:
                bodies.pop(name, None)
            self._release(name, ended, [write for write in attempt.writes if not write.done()])
            while len(bodies) > self._remembered:
                bodies.popitem(last=False)

    def restore(self, turn: Turn) -> None:
        """Remember the key of a call read from the log."""
        parts = turn.id.partition(":")[0].split("-")
        if len(parts) >= 3 and len(parts[1]) == _NAME_CHARS and self._remembered:
            bodies = self._bodies[turn.tenant]
            bodies[parts[1]] = parts[2]
            if len(bodies) > self._remembered:
                bodies.popitem(last=False)

    async def _find(self, attempt: CallAttempt, n: int) -> list[Turn]:
        """Advance `attempt` to the number that was answered and return its turns, or to the first without turns and return []."""
        for _ in range(_MOST_TRIES):
            turns = await self._log.find(Turn, [(f"{attempt.id}:{index}",) for index in range(n)])
            if not turns or (len(turns) == n and all(is_whole(turn) for turn in turns)):
                return turns
            attempt.again()
        raise Conflict(f"{_MOST_TRIES} tries under this Idempotency-Key ended without an answer; make a new key.")

    def _release(self, name: str, ended: asyncio.Future[None], writes: list[asyncio.Future[Any]]) -> None:
        """Let the next call in once none of this attempt's writes is pending."""
        if writes:
            writes[0].add_done_callback(lambda _: self._release(name, ended, [w for w in writes if not w.done()]))
            return
        del self._open[name]
        if not ended.done():
            ended.set_result(None)


def _claim(bodies: OrderedDict[str, str], name: str, shape: str) -> None:
    """Bind the key to this body. Raises KeyReused if it is bound to another."""
    if bodies.setdefault(name, shape) != shape:
        raise KeyReused(
            "This Idempotency-Key was used before with another body; make a new key for each new call.",
            field="Idempotency-Key",
        )
    bodies.move_to_end(name)


def is_whole(turn: Turn) -> bool:
    """Return True if the turn is a complete answer that can be replayed."""
    return turn.finish.complete and not turn.redacted and (bool(turn.spans) or turn.arm is Arm.OUTSIDE)


def body_digest(kind: str, body: Any) -> str:
    """Return a digest of a call's kind and body. Pure."""
    return _digest(12, kind.encode(), _canonical(body))


def _canonical(body: Any) -> bytes:
    """The body as JSON with sorted top-level fields, without the streaming options, which do not change the question."""
    plain = {name: body[name] for name in sorted(body) if name not in ("stream", "stream_options")}
    return json_bytes(plain)


def _digest(length: int, *parts: bytes) -> str:
    state = blake2b(digest_size=length // 2)
    for part in parts:
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()
