"""Earlier answers that a call may refer to by id: whole (`previous_response_id`) or item by item (`item_reference`), kept in memory while
there is room. Items that are no longer in memory are parsed again from the answer's turn in the log.

Idempotency keys: a repeated call gets the answer of the first, also after a restart.

The call's id is derived from tenant, key and body, so the turns of an earlier try can be found in the log by their ids. After a try
that left no complete answer (the client went away, the engine failed, the process was killed between two choices), the next try gets
the next number.
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
from ostinato.serve.dialects.items import Memo
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.dialects.responses import Responses, ResponsesRequest
from ostinato.serve.dialects.responses_items import ReferenceMessage, messages_of

MOST_RESTORED = 1_000  # answers that one call may have read from the log
_OVERHEAD = 500  # the cost of a message or an entry besides its characters, in characters


class PreviousGone(BadRequest):
    """The named previous answer is not in memory."""

    code = "previous_response_not_found"


class ItemGone(NotFound):
    """The named item of an earlier answer is not in memory, or somebody else's, which is told alike."""

    code = "item_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The messages that a call of `user` added after the answer `before`: its input and its own answer. `named`: the ids of the items of
    other answers that are among them.
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
    """The items of an answer to `user`, as they were told, to which the answer's writer may still add."""

    user: str
    told: list[Json]
    _read: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])

    def messages(self, id: str) -> tuple[Message, ...] | None:
        """The messages of an item, the same objects each time; None if there is no such item."""
        if len(self._read) < len(self.told):
            self._read = {item["id"]: messages_of(item) for item in self.told}
        return self._read.get(id)


class ResponseStore:
    """One tenant's answers by id, each linked to the answer before it, and their items. The least recently used are dropped. An answer
    that is kept holds what its call referred to, and needs no item.

    Args:
        budget: about how many characters are held at most: a quarter for items, which so outlive the long inputs of their calls.

    Example::

        conversation = previous.conversation(request, "ann")  # what its answer named is before what it says
        ...  # the answer is sampled and stored as a turn
        previous.keep(request, turn, answer)
    """

    def __init__(self, budget: int) -> None:
        self._kept = Memo[str, _Kept](budget - budget // 4)
        self._items = Memo[str, _Items](budget // 4)
        self._forgotten: dict[str | None, float] = {}  # when, by user, None for all of them

    def conversation(self, request: ConversationRequest, user: str) -> Conversation:
        """The request's conversation: the messages up to the answer that it names come first, and those of items stand where it refers to
        them. An item that is there already is not repeated.

        Raises PreviousGone, ItemGone, BadRequest.
        """
        if not isinstance(request, ResponsesRequest) or not request.refers:
            return request.conversation
        # the first answer is asked for last, so that of a conversation the newest answers are dropped first
        steps, read = dict(self._back(request.previous_response_id)), request.read
        there = {id for kept in steps.values() for id in kept.named}
        own, named = list[Message](), list[str]()
        for part in read.parts:
            if not isinstance(part, ReferenceMessage):
                own.append(part)
                continue
            # also of one that is there: others' ids and wrong ones are always refused
            found = self._item(part.id, user)
            if part.id not in there and _answer_of(part.id) not in steps:
                there.add(part.id)
                named.append(part.id)
                own += found
        read.parts, read.named = own, [*read.named, *named]  # so that what is kept of the call needs no item
        before = [message for kept in reversed(steps.values()) for message in kept.said]
        return request.going_on([*before, *own])

    def missing(self, request: Request, user: str) -> Mapping[str, Collection[str]]:
        """The items that a request refers to and that are not in memory, by the answers that their ids name, at most `MOST_RESTORED`."""
        missing = defaultdict[str, list[str]](list)
        for part in request.read.parts if isinstance(request, ResponsesRequest) else ():
            if isinstance(part, ReferenceMessage) and self._found(part.id, user) is None:
                answer = _answer_of(part.id)
                if answer in missing or len(missing) < MOST_RESTORED:
                    missing[answer].append(part.id)
        return missing

    def restore(self, turn: Turn, ids: Collection[str], request: Request, renderer: Renderer) -> None:
        """Keep the items of an answer again, parsed from its turn, if those with these ids are among them. `request`: offers the tools."""
        forgotten = max(self._forgotten.get(turn.user, -math.inf), self._forgotten.get(None, -math.inf))
        # of a summary the client got another item, which is not in the log
        lost = turn.purpose is Purpose.COMPACTION or turn.started_at <= forgotten or not is_whole(turn)
        if not isinstance(request, ResponsesRequest) or lost:
            return
        items = next((items for items in _parsed_items(turn, request, renderer) if _ids(items).issuperset(ids)), None)
        if items is not None:
            self._items.put(
                turn.id.rpartition(":")[0], _Items(turn.user, items), cost=len(turn.text) + _OVERHEAD * (1 + len(items))
            )

    def known(self, request: ConversationRequest, user: str) -> Conversation:
        """The same without what is no longer kept."""
        with suppress(PreviousGone, ItemGone):
            return self.conversation(request, user)
        return request.conversation

    def keep(
        self, request: ConversationRequest, turn: Turn, answer: Message, block: CompactionBlock | None = None
    ) -> None:
        """Keep an answer, and the summary that the call began with, unless the client sent `store` false or the answer is incomplete."""
        if not isinstance(request, ResponsesRequest) or request.store is False or not turn.finish.complete:
            return
        read, told = request.read, (*([] if block is None else [block_message(block)]), answer)
        kept = _Kept(turn.user, request.previous_response_id, (*read.parts, *told), tuple(read.named))
        self._keep(request, turn.id.rpartition(":")[0], kept, told)

    def keep_block(self, request: Request, id: str, user: str, block: CompactionBlock) -> None:
        """Keep a summary, with which a conversation that goes on from this answer begins."""
        if isinstance(request, ResponsesRequest) and request.store is not False:
            told = (block_message(block),)
            self._keep(request, id, _Kept(user, None, told), told)

    def forget(self, row: Forgotten) -> None:
        """Drop the answers of somebody who was forgotten, for good."""
        self._forgotten[row.user] = row.at
        self._kept.drop(lambda kept: row.covers((row.tenant, kept.user)))
        self._items.drop(lambda items: row.covers((row.tenant, items.user)))

    def _keep(self, request: ResponsesRequest, id: str, kept: _Kept, told: Sequence[Message]) -> None:
        """Keep an answer that consists of the messages `told`. Its last items may be written after this, so their size is that of these."""
        self._kept.put(id, kept, cost=kept.cost)
        items = _Items(kept.user, request.told.setdefault(id, []))
        parts = sum(bool(message.text) + bool(message.reasoning) + len(message.calls) for message in told)
        self._items.put(id, items, cost=sum(message.chars for message in told) + _OVERHEAD * (1 + parts))

    def _back(self, id: str | None) -> Iterator[tuple[str, _Kept]]:
        """The answers of a conversation, the last one first. Raises PreviousGone."""
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
        """The messages of an item of an answer to this user. Raises ItemGone."""
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
        """The messages of an item in memory; None if it is not there, or is somebody else's."""
        items = self._items.get(_answer_of(id))
        return items.messages(id) if items is not None and items.user == user else None


def _parsed_items(turn: Turn, request: ResponsesRequest, renderer: Renderer) -> Iterator[list[Json]]:
    """A turn's items as a body lists them, then as a stream does, which begins another where text follows a call. None if other calls are
    parsed than when it was sampled.
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
    """The id of the answer that an item's id names, as `Responses` writes them; any other text for other ids."""
    kind, _, rest = item.partition("_")
    return rest if kind == "cmp" else rest.rpartition("_")[0]


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
