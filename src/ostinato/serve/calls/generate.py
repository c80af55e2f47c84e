"""Handles all calls that sample, in every dialect.

Steps of a call: identify the sender and charge the quota -> read the body -> parse the request -> reserve capacity -> find user, arm and
weights -> replay the answer stored under the same idempotency key, if any -> render the prompt ids -> sample -> write the turn to the log
-> send the end of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.conversation import PART_CHARS, CompactionBlock, Conversation
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Branch, Consent, Finish, Purpose, Turn, WindowMaker
from ostinato.serve.auth import Principal
from ostinato.serve.auto_deals import Deal
from ostinato.serve.calls.answer import STREAM, Answer, Deliveries
from ostinato.serve.calls.caller import Caller, CallRoute, Senders, asks_auto, draw_arm, steering_of, wants_steering
from ostinato.serve.calls.capture import Call, Capture, EngineFailed, cache_salt, call_of_turns, replay
from ostinato.serve.calls.compaction import SummaryTurn
from ostinato.serve.calls.context import (
    LEAST_SHARE,
    CallContext,
    EnginePrompt,
    Prompts,
    check_logged,
    compacts,
    constrained,
    in_call_compaction,
    least_answer,
    override_sampling,
)
from ostinato.serve.calls.conversations import OWN_EPISODE, AnswerParser, Prompt, Sessions
from ostinato.serve.calls.response_store import CallAttempt, IdempotencyKeys, ResponseStore, body_digest, is_whole
from ostinato.serve.consent import ConsentChoices
from ostinato.serve.dialects.anthropic import parse_count
from ostinato.serve.dialects.compaction_blocks import CompactionUnavailable, begun_with, with_summary_request
from ostinato.serve.dialects.dialect import Compacted, ContextExceeded, ConversationRequest, Heading, Request
from ostinato.serve.dialects.items import ItemCache
from ostinato.serve.dialects.openai import CompletionRequest, parse_score
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.fair_thread import PARSED_PER_CHAR
from ostinato.serve.feedback.followups import FollowUps
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.outside_models import OutsideFailed, OutsideQuery
from ostinato.serve.parts import Parts
from ostinato.serve.priority import Person
from ostinato.serve.reader import LONG_CHARS, LongRenderer, PromptLength, crowded
from ostinato.serve.reader_child import ITEMS, read_body
from ostinato.serve.scrub import unmasked
from ostinato.serve.wire.exchange import Exchange, Headers
from ostinato.serve.wire.watch import DisconnectWatch

# ---------------------------------------------------------------- calls


_LOG = logging.getLogger(__name__)
_SUMMARY_TRIES = 3
_NO_SUMMARY = f"The model wrote no usable summary, {_SUMMARY_TRIES} times; send the request again."
_T = TypeVar("_T")
_REPLAYED: Headers = [(b"idempotent-replayed", b"true")]


class CallHandlers:
    """Answers model calls.

    `intake` gets each turn that is in the log, and before sampling the ids of turns whose text will not be stored. `follow_ups` gets
    people's next messages. `choices` holds people's consent.
    """

    def __init__(self, parts: Parts, intake: Intake, follow_ups: FollowUps, choices: ConsentChoices) -> None:
        config, tenants = parts.config, parts.keys.tenants
        self._parts = parts
        self._intake = intake
        self._context = min(parts.renderer.context, parts.engine.capabilities().context)
        self._numerics = parts.engine.numerics()
        self._senders = Senders(parts, choices)
        budget = config.session_tokens // len(tenants)
        self._masks = parts.scrubbing if parts.scrubbing is not None and parts.scrubbing.masks else None
        read = 0 if self._masks else config.history_bytes // len(tenants)  # never cache messages that must be masked
        self._items = {tenant: ItemCache(read) for tenant in tenants}
        self._rendering = LongRenderer(parts.renderer, parts.reader)
        self._sessions = {tenant: Sessions(self._rendering, budget=budget) for tenant in tenants}
        self._previous = {tenant: ResponseStore(config.previous_chars // len(tenants)) for tenant in tenants}
        self._follow_ups = follow_ups
        self._prompts = Prompts(parts, self._context, self._sessions, self._previous, follow_ups)
        self._thread = parts.thread
        self._repeats = IdempotencyKeys(parts.log, remembered=config.repeat_keys // len(tenants))
        self._deliveries = Deliveries(parts.log, parts.clock, parts.writes)

    def restore(self, turn: Turn) -> None:
        """Restore state from a turn of an earlier process. Call it with the oldest turn first."""
        if turn.tenant in self._sessions:
            self._sessions[turn.tenant].restore(turn)
        self._repeats.restore(turn)
        if self._parts.deals is not None:
            self._parts.deals.restore(turn)

    def forget(self, row: Forgotten) -> None:
        """Drop a forgotten user's conversations, and all cached messages of the tenant, which do not name their user."""
        if row.tenant in self._sessions:
            self._sessions[row.tenant].forget(row)
            self._previous[row.tenant].forget(row)
            self._items[row.tenant].clear()
        self._follow_ups.forget(row)

    async def close(self) -> None:
        """Finish pending writes, within `store_timeout_s`."""
        longest_s = self._parts.config.store_timeout_s
        try:
            async with asyncio.timeout(longest_s):
                await self._parts.writes.drain()
                await self._deliveries.close()
                await self._follow_ups.close()
        except TimeoutError:
            _LOG.error("The log did not confirm the last writes within %g s; they may or may not be stored.", longest_s)
        self._prompts.compiling.close()

    # ------------------------------------------------------------ before the engine

    async def serve(self, route: CallRoute, exchange: Exchange) -> None:
        """Answer one call. Errors are raised; the exchange turns them into error responses."""
        who, data = await self._received(exchange)
        request = await self._parsed(who.tenant, exchange, data, route.parse)
        caller = self._senders.caller(exchange, who, request.asker, store=request.store)
        async with self._admitted(caller) as person:
            drawn = asks_auto(self._parts, request, caller)
            with self._parts.quotas.places(caller.tenant, request.n or 1):
                self._parts.metrics.calls(+1)
                try:
                    async with DisconnectWatch(exchange.receive) as watch:
                        exchange.watch = watch
                        placement = None if drawn else await self._senders.place(caller)
                        asked = CallContext(
                            route=route,
                            data=data,
                            request=request,
                            caller=caller,
                            placement=placement,
                            exchange=exchange,
                            watch=watch,
                            person=person,
                        )
                        await self._once(asked)
                finally:
                    exchange.watch = None  # an error response is sent without it
                    self._parts.metrics.calls(-1)

    async def _received(self, exchange: Exchange) -> tuple[Principal, bytes]:
        """Identify the sender, charge the call, and read the body. Raises Unauthorized, QuotaExceeded, BadRequest, TooLarge."""
        who, quotas = self._parts.keys.identify(exchange.headers), self._parts.quotas
        quotas.count_call(who.tenant)  # before the body is read
        return who, await exchange.body(partial(quotas.count_bytes, who.tenant))

    @asynccontextmanager
    async def _admitted(self, caller: Caller) -> AsyncGenerator[Person]:
        """Admit a call: a person's call is tracked; a call of a world or of the gate waits for people's calls."""
        if caller.slot is None:
            with self._parts.people.person() as person:
                yield person
            return
        left_s = None if caller.until is None else caller.until - time.monotonic()
        async with self._parts.people.machine(left_s):
            yield Person()

    async def count(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`: a prompt's length in tokens. Nothing is sampled or stored."""
        who, data = await self._received(exchange)
        if (counted := await self._counted(who.tenant, data)) is not None:
            self._prompts.check_length(counted.chars, "messages")
            await exchange.reply(200, json_bytes({"input_tokens": counted.tokens}))
            return
        request = await self._parsed(who.tenant, exchange, data, parse_count)
        conversation = request.conversation
        rough = exchange.received // PARSED_PER_CHAR + PART_CHARS * conversation.parts
        if self._masks is not None:  # count what the model would get
            mask = self._masks.person(who.tenant, ANONYMOUS).conversation
            conversation = await self._thread.run(who.tenant, rough, partial(mask, conversation))
        chars = await self._thread.run(who.tenant, rough, lambda: conversation.chars)
        self._prompts.check_length(chars, "messages")
        shown, edits = await self._prompts.edited(who.tenant, request, conversation)
        cost = chars + PART_CHARS * conversation.parts
        tokens = await self._thread.run(who.tenant, cost, partial(self._prompts.tokens, shown))
        body: dict[str, Any] = {"input_tokens": tokens}
        if edits is not None:
            original = tokens + sum(edit["cleared_input_tokens"] for edit in edits)
            body["context_management"] = {"original_input_tokens": original}
        await exchange.reply(200, json_bytes(body))

    async def score(self, exchange: Exchange) -> None:
        """`POST /v1/worlds/score`, for operators: an answer's log-probabilities under a slot's weights. Nothing is sampled or stored."""
        who, data = await self._received(exchange)
        request = await self._parsed(who.tenant, exchange, data, parse_score)
        caller = self._senders.caller(exchange, who, request.asker, store=False)
        if caller.slot is None:
            raise BadRequest("X-Ostinato-Slot must name the weights that score; send it.", field="X-Ostinato-Slot")
        conversation = request.conversation
        if self._masks is not None:  # mask as in the call that may have produced the answer
            mask = self._masks.person(who.tenant, caller.user).conversation
            conversation = await self._thread.run(who.tenant, exchange.received, partial(mask, conversation))
        self._prompts.check_length(conversation.chars + len(request.answer), "messages")
        cost = conversation.chars + PART_CHARS * conversation.parts
        prompt = await self._thread.run(who.tenant, cost, partial(self._rendering.chat, conversation))
        answer = self._parts.renderer.encode(request.answer)
        if len(prompt) + len(answer) > self._context:
            raise ContextExceeded(prompt=len(prompt), answer=len(answer), context=self._context, field="messages")
        async with DisconnectWatch(exchange.receive), self._admitted(caller):
            placement = await self._senders.place(caller)
            salt = cache_salt(caller.tenant, caller.user, placement.assignment.arm)
            logprobs = await self._parts.engine.score(placement.slot, [*prompt, *answer], len(prompt), salt)
        await exchange.reply(200, json_bytes({"logprobs": logprobs}))

    async def _parsed(self, tenant: str, exchange: Exchange, data: bytes, parse: Callable[[Any, ItemCache], _T]) -> _T:
        """Parse a body on the shared thread. Raises BadRequest, TooLarge."""
        config, items, reader = self._parts.config, self._items[tenant], self._parts.reader

        def read() -> _T:
            value, known = None, items
            if reader is not None and len(data) >= LONG_CHARS:
                value = None if crowded(data) else exchange.parsed(data, unread=ITEMS)
                known = reader.ahead(parse, data, items, value, hashed=self._masks is None)
            request = read_body(parse, data, known, (config.max_depth, config.max_values), value)
            conversation = getattr(request, "conversation", None)
            if isinstance(conversation, Conversation) and self._masks is None:
                conversation.compute_digests()
            return request

        return await self._thread.run(tenant, exchange.received // PARSED_PER_CHAR, read)

    async def _counted(self, tenant: str, data: bytes) -> PromptLength | None:
        """Return a long prompt's length as counted in the reader process; None if it must be counted here."""
        reader = self._parts.reader
        if reader is None or self._masks is not None or len(data) < LONG_CHARS:
            return None
        most = self._context * self._parts.config.max_chars_per_token
        return await self._thread.run(tenant, len(data), partial(reader.count, data, most))

    async def _once(self, asked: CallContext) -> None:
        """Answer a call, from the log if its idempotency key was answered before."""
        key = asked.exchange.text("Idempotency-Key")
        if key is None:
            await self._sample(asked, CallAttempt(base=f"{asked.route.kind}-{secrets.token_hex(16)}"))
            return
        caller = asked.caller
        more = {"user": caller.user, "x-ostinato": [caller.episode, caller.group, caller.slot]}
        if self._masks is not None:  # keyed, so that masked values cannot be guessed from the digest
            more["key"] = self._masks.key(caller.tenant, caller.user).hex()

        def digest() -> str:
            return body_digest(asked.route.kind, {**asked.exchange.parsed(asked.data), **more})

        shape = await self._thread.run(caller.tenant, asked.exchange.received // PARSED_PER_CHAR, digest)
        async with self._repeats.attempt(asked.route.kind, caller.tenant, key, shape, asked.request.n or 1) as attempt:
            begun = attempt.turns and attempt.turns[0].purpose is Purpose.COMPACTION
            if attempt.turns and not (compacts(asked.request) or (begun and in_call_compaction(asked.request))):
                await self._repeat(asked, attempt.turns)
            else:
                await self._sample(asked, attempt)

    # ------------------------------------------------------------ the answer

    async def _sample(self, asked: CallContext, attempt: CallAttempt) -> None:
        """Sample an answer. If the prompt is too long, send the error in the stream where the dialect does so."""
        overflow = asked.route.overflow
        try:
            await (self._compact if compacts(asked.request) else self._sample_fitting)(asked, attempt)
        except ContextExceeded as error:
            if overflow is None or not asked.request.stream:
                raise
            heading = self._heading(attempt.id, self._parts.clock(), asked.request, error.prompt)
            if not asked.exchange.status:  # else heartbeats during a summary have already sent the head
                await asked.exchange.start(200, STREAM)
            await asked.exchange.write(overflow(asked.request, heading, error).encode(), last=True)

    async def _sample_fitting(self, asked: CallContext, attempt: CallAttempt) -> None:
        """Sample an answer. If an outside model fails before any output, draw another of Auto's arms; each attempt is logged as a turn."""
        question, failed = await self._prompts.ask(asked), dict[str, OutsideFailed]()
        # the client asked for the summary itself, so it is the whole answer
        if attempt.turns and question.purpose is Purpose.COMPACTION:
            await self._repeat(asked, attempt.turns)
            return
        if await self._needs_summary(asked, question) or attempt.turns:
            shorter = await self._with_summary(asked, attempt, question)
            if shorter is None:
                return
            question = shorter
            if attempt.turns and (turns := await self._stored(attempt)):
                await self._send(asked, self._stored_capture(turns), replay(turns), question, asked.person)
                return
        episode = self._episode(asked, question)
        while True:
            try:
                call, deal = self._call(asked, attempt.id, episode, question, failed)
            except Unavailable:
                if not failed:
                    raise
                raise [*failed.values()][-1] from None
            capture = self._capture(call)
            try:
                with self._at_engine(asked, attempt, capture) as person:
                    await self._send(asked, capture, self._chunks(question, call, deal), question, person)
                return
            except OutsideFailed as error:
                if asked.exchange.body_sent or deal is None:
                    raise
                failed[deal.arm.name] = error
                attempt.again()

    @contextmanager
    def _at_engine(self, asked: CallContext, attempt: CallAttempt, capture: Capture) -> Generator[Person]:
        """Yield the `Person` to notify of tokens. Sampling is charged to the tenant's quota and traced; a replayed answer is not.

        A person's wait is measured from here on, for the live weights only: servers lent to other work are called back for live traffic.
        """
        call = capture.call
        if capture.stored:
            yield asked.person
            return
        charged = len(call.prompt_ids) + call.sampling.max_tokens * call.n
        self._parts.quotas.hold_tokens(call.tenant, charged)
        if call.consent is Consent.NEVER:
            self._intake.drop_text_of(call.tenant, call.turn_ids())
        try:
            if asked.caller.slot is not None or call.arm is Arm.OUTSIDE:
                yield asked.person
            else:
                user = f"{call.tenant}/{self._senders.known(asked.caller)}" if call.slot == Arm.LIVE else None
                with self._parts.people.asks(asked.person, call.n, user) as person:
                    yield person
        finally:
            attempt.writes += capture.begun
            self._parts.quotas.give_back_tokens(call.tenant, charged - len(call.prompt_ids) - capture.charged_tokens)
            if self._parts.tracing is not None:
                self._parts.tracing.answered(capture, asked.request.model, asked.exchange.headers)

    def _chunks(self, question: EnginePrompt, call: Call, deal: Deal | None) -> AsyncIterator[Chunk]:
        """Return the sampled chunks, from the engine or from an outside model."""
        deals, conversation = self._parts.deals, question.conversation
        if deals is None or deal is None or deal.release is not Arm.OUTSIDE or conversation is None:
            return self._parts.engine.generate(call.request())
        return deals.chunks(deal, OutsideQuery(conversation=conversation, sampling=call.sampling, n=call.n))

    # ------------------------------------------------------------ summaries

    async def _compact(self, asked: CallContext, attempt: CallAttempt) -> None:
        """Answer a request for a summary with a signed block. An unusable summary is stored as a turn, too, and another is sampled under
        the next id; a repeated call finds them all.

        Raises CompactionUnavailable if no summary is usable.
        """
        question = await self._prompts.ask(asked)
        ids, usable = await self._sample_summary(asked, attempt, question, self._episode(asked, question))
        if usable is None:
            self._deliveries.note(ids)
            raise CompactionUnavailable(_NO_SUMMARY)
        capture, answer, text = usable
        block, _ = self._signed(asked, capture.call, text)
        await self._send_summary(asked, replace(question, tries=ids), capture, answer, block)

    def _episode(self, asked: CallContext, question: EnginePrompt) -> str:
        return asked.caller.episode or question.prompt.episode or f"{OWN_EPISODE}{secrets.token_hex(16)}"

    async def _needs_summary(self, asked: CallContext, question: EnginePrompt) -> bool:
        """Return True if the call must begin with a summary: its client asked for compaction and the prompt has reached the trigger.

        Raises BadRequest if the trigger would make every call summarise again, or the conversation was summarised too often.
        """
        wish, config = in_call_compaction(asked.request), self._parts.config
        if wish is None or question.told is None or question.purpose is Purpose.COMPACTION:
            return False
        if wish.trigger is not None and wish.trigger < config.compaction_least_tokens:
            raise BadRequest(
                f"{wish.field} is {wish.trigger}; this server summarises conversations of {config.compaction_least_tokens} tokens and "
                "more (serve.compaction_least_tokens), or at the end of its context: send a larger number, or none.",
                field=wish.field,
            )
        trigger = min(wish.trigger or self._context, self._prompts.most_tokens)
        if len(question.prompt.ids) < trigger:
            return False
        number = 0 if question.prompt.window is None else question.prompt.window.number
        if number >= config.compaction_most:
            raise BadRequest(
                f"The conversation was summarised {number} times, which is the most allowed (serve.compaction_most); begin a new one.",
                field=asked.route.field,
            )
        empty = begun_with(question.told, CompactionBlock(content="", token=""))
        work = partial(self._prompts.tokens, empty)
        fixed = await self._thread.run(asked.caller.tenant, empty.chars + PART_CHARS * empty.parts, work)
        share = self._context // LEAST_SHARE  # most tokens of the summary, and fewest of the answer
        if fixed + share >= trigger or fixed + share + min(asked.request.budget or share, share) > self._context:
            raise BadRequest(
                f"Instructions and tools take {fixed} tokens, and a summary up to {share}: the conversation would be summarised at "
                f"{trigger} tokens again and again. Shorten them, or send a larger trigger if {trigger} is yours.",
                field=wish.field,
            )
        return True

    async def _with_summary(
        self, asked: CallContext, attempt: CallAttempt, question: EnginePrompt
    ) -> EnginePrompt | None:
        """Return the question with the conversation replaced by its summary, which is sampled now or was by an earlier try. None if the
        summary was the whole answer and is sent. If no summary is usable, the question is returned unchanged but for `compacted`, which
        says so.

        Raises CompactionUnavailable, CompactionRefused.
        """
        wish, sent = in_call_compaction(asked.request), question.told
        assert wish is not None
        assert sent is not None, "only conversations are summarised"
        summarising = await self._prompts.ask(
            asked, with_summary_request(sent, wish.instructions, asked.route.field), style=question.style
        )
        episode = self._episode(asked, question)
        ids, usable = await self._sample_summary(asked, attempt, summarising, episode)
        if usable is None:
            if wish.pause:
                raise CompactionUnavailable(_NO_SUMMARY)
            prompt = replace(question.prompt, episode=episode)
            return replace(question, prompt=prompt, compacted=Compacted(block=None, counts=None), tries=ids)
        capture, answer, text = usable
        block, summary = self._signed(asked, capture.call, text)
        compacted = Compacted(block=block, counts=answer.counts())
        if wish.pause:
            await self._send_summary(asked, replace(question, compacted=compacted, tries=ids), capture, answer, block)
            return None
        attempt.again()
        after = await self._prompts.ask(asked, begun_with(sent, block), summary, question.style)
        # the client's own words belong to the window before the summary
        heard = {"answered": question.answered, "left": question.left}
        return replace(after, edits=question.edits, compacted=compacted, tries=ids, **heard)

    async def _sample_summary(
        self, asked: CallContext, attempt: CallAttempt, question: EnginePrompt, episode: str
    ) -> tuple[list[str], tuple[Capture, Answer, str] | None]:
        """Sample summaries until one is usable. Return the ids of all their turns, and the usable one (None if there is none)."""
        repeated, ids, tried = bool(attempt.turns), list[str](), 0
        while tried < _SUMMARY_TRIES:
            if turns := await self._stored(attempt) if repeated else []:
                # an earlier try ended here with the answer, after unusable summaries only
                if turns[0].purpose is not Purpose.COMPACTION:
                    break
                capture, chunks = self._stored_capture(turns), replay(turns)
            else:
                call, _ = self._call(asked, attempt.id, episode, question, ())
                call = replace(call, branch=Branch.AGAIN) if ids else call
                tried += 1
                capture, chunks = self._capture(call), self._parts.engine.generate(call.request())
            answer, text = await self._summarise(asked, attempt, capture, chunks, question)
            ids += capture.call.turn_ids()
            if text:
                return ids, (capture, answer, text)
            attempt.again()
        return ids, None

    async def _stored(self, attempt: CallAttempt) -> list[Turn]:
        """Return the turn stored by an earlier try under this id, or under the first later id with a whole answer; [] if there is none."""
        while (turns := await self._parts.log.find(Turn, [(f"{attempt.id}:0",)])) and not is_whole(turns[0]):
            attempt.again()
        return turns

    async def _summarise(
        self,
        asked: CallContext,
        attempt: CallAttempt,
        capture: Capture,
        chunks: AsyncIterator[Chunk],
        question: EnginePrompt,
    ) -> tuple[Answer, str]:
        """Sample a summary, or replay a stored one. Return its text; "" if it is unusable: empty, cut off, or with a tool call."""
        conversation = cast("Conversation", question.conversation)
        parser = self._make_parser(conversation, capture.call.turn_ids()[0])
        try:
            with self._at_engine(asked, attempt, capture) as person:
                answer = self._make_answer(asked, capture, chunks, question, [parser], person, [])
                await answer.sample(stream=bool(asked.request.stream))
        except EngineFailed as error:
            raise CompactionUnavailable(f"No summary could be sampled: {error}") from error
        choice = capture.choices[0]
        with_calls = self._make_parser(replace(conversation, demand=None), capture.call.turn_ids()[0])
        with_calls.take("".join(choice.text), last=True)
        usable = choice.finish is Finish.STOP and not with_calls.parsed_calls()
        text = parser.message().text.strip() if usable else ""
        # the client keeps the block, so it contains the client's real values; they are masked again when it comes back
        return answer, text if question.scrubber is None else unmasked(text, question.scrubber.values)

    def _signed(self, asked: CallContext, call: Call, text: str) -> tuple[CompactionBlock, SummaryTurn]:
        """Return a summary's signed block, and the turn that wrote it."""
        scope, route, turn = asked.scope, asked.route, call.turn_ids()[0]
        number = 0 if call.window is None else call.window.number
        summary = SummaryTurn(turn=turn, episode=call.episode, number=number, by=WindowMaker.GATEWAY)
        block = self._parts.blocks.sign(
            scope.tenant, route.kind, scope.place, summary, text, inside=route.kind == "resp"
        )
        return block, summary

    async def _send_summary(
        self, asked: CallContext, question: EnginePrompt, capture: Capture, answer: Answer, block: CompactionBlock
    ) -> None:
        """Send a summary in the dialect's form."""
        call, route = capture.call, asked.route
        assert route.compacted is not None, "no other route asks for summaries"
        if call.consent is not Consent.NEVER:
            self._previous[call.tenant].keep_block(asked.request, call.id, call.user, block)
        heading = self._heading(call.id, call.started_at, asked.request, len(call.prompt_ids), question)
        data = route.compacted(asked.request, heading, block, answer.counts(), answer.ostinato())
        await answer.deliver(data, stream=bool(asked.request.stream))
        self._deliveries.note(question.tries)  # the unusable ones have ended, too, and are trained on
        self._parts.metrics.delivered(call.tenant, 1)

    # ------------------------------------------------------------ sampled or replayed

    async def _repeat(self, asked: CallContext, turns: list[Turn]) -> None:
        request = asked.request
        if isinstance(request, CompletionRequest):
            conversation, edits, (_, scrubber, _) = None, None, await self._prompts.scrub_text(asked, request.prompt)
        else:
            await self._prompts.restore_items(asked)
            conversation = self._previous[asked.caller.tenant].known(
                cast("ConversationRequest", request), asked.caller.user
            )
            conversation, scrubber, _ = await self._prompts.scrubbed(asked, conversation, conversation.chars)
            conversation, edits = await self._prompts.edited(asked.caller.tenant, request, conversation)
        prompt = Prompt(ids=turns[0].prompt_ids)
        question = EnginePrompt(prompt=prompt, conversation=conversation, edits=edits, scrubber=scrubber)
        await self._send(asked, self._stored_capture(turns), replay(turns), question, asked.person)

    async def _send(
        self,
        asked: CallContext,
        capture: Capture,
        chunks: AsyncIterator[Chunk],
        question: EnginePrompt,
        person: Person,
    ) -> None:
        call, request = capture.call, asked.request
        readings = [self._make_parser(question.conversation, turn) for turn in call.turn_ids()]
        headers = _REPLAYED if capture.stored else []
        answer = self._make_answer(asked, capture, chunks, question, readings, person, headers)
        await answer.send(stream=bool(request.stream))
        self._deliveries.note([*question.tries, *call.turn_ids()])
        if question.answered is not None:
            question.answered(call.turn_ids(), [reading.message() for reading in readings])
        self._parts.metrics.delivered(call.tenant, call.n)

    def _make_answer(
        self,
        asked: CallContext,
        capture: Capture,
        chunks: AsyncIterator[Chunk],
        question: EnginePrompt,
        readings: Sequence[AnswerParser],
        person: Person,
        headers: Headers,
    ) -> Answer:
        call, request = capture.call, asked.request
        heading = self._heading(call.id, call.started_at, request, len(call.prompt_ids), question)
        writer = asked.route.writer(request, heading, self._parts.renderer if request.wants_logprobs else None)
        if question.scrubber is not None:
            writer = question.scrubber.restoring(writer, question.conversation)
        if request.omitted:  # parts of the request that the model did not get
            headers = [*headers, (b"x-ostinato-omitted", ", ".join(request.omitted).encode())]
        return Answer(
            self._parts,
            asked,
            question,
            capture,
            chunks,
            writer=writer,
            readings=readings,
            person=person,
            headers=headers,
        )

    @staticmethod
    def _heading(
        id: str, created: float, request: Request, prompt_tokens: int, question: EnginePrompt | None = None
    ) -> Heading:
        return Heading(
            id=id,
            created=created,
            model=request.model,
            choices=request.n or 1,
            prompt_tokens=prompt_tokens,
            count_usage=request.wants_usage,
            compacted=None if question is None else question.compacted,
            edits=None if question is None else question.edits,
        )

    def _make_parser(self, conversation: Conversation | None, turn: str) -> AnswerParser:
        if conversation is None:
            return AnswerParser(None)
        return AnswerParser(self._parts.renderer.reader(conversation, turn), one_call=conversation.one_call)

    def _call(
        self, asked: CallContext, id: str, episode: str, question: EnginePrompt, failed: Collection[str]
    ) -> tuple[Call, Deal | None]:
        """Return the call, and Auto's deal if it drew one. Only the token quota (`_at_engine`) may refuse a call after the draw."""
        request, caller, prompt = asked.request, asked.caller, question.prompt
        room = self._context - len(prompt.ids)
        conversation = question.conversation
        # the gateway's own summary: the operator's limits apply
        own_summary = conversation is not None and conversation.summarises and not compacts(request)
        wanted = self._context // LEAST_SHARE if own_summary else request.budget
        least = least_answer(request, conversation, self._context)
        if room < least:
            raise ContextExceeded(prompt=len(prompt.ids), answer=least, context=self._context, field=asked.route.field)
        placement, deal = asked.placement, None
        if placement is None:
            wants_steering(asked.exchange)  # refuses a malformed header
            placement, deal = draw_arm(self._parts, caller.tenant, episode, failed)
        default = asked.route.default_tokens or self._parts.config.default_max_tokens
        if question.purpose is Purpose.COMPACTION:  # a truncated summary would stop the agent
            default = max(default, self._context // LEAST_SHARE)
        requested = request.sampling(min(wanted or default, room))
        asked_for = constrained(replace(requested, stop=()) if own_summary else requested, question)
        sampling, overridden = override_sampling(asked_for, caller, self._parts.config.sampling)
        check_logged(request, sampling.max_tokens)
        call = Call(
            id=id,
            episode=episode,
            parent=prompt.parent,
            user=caller.user,
            tenant=caller.tenant,
            arm=placement.assignment.arm,
            propensity=placement.assignment.propensity,
            slot=placement.slot,
            prompt_ids=prompt.ids,
            packed_prompt=prompt.packed,
            sampling=sampling,
            n=request.n or 1,
            started_at=self._parts.clock(),
            numerics="" if placement.assignment.arm is Arm.OUTSIDE else self._numerics,
            group=caller.group,
            harness=caller.harness,
            verified=caller.verified,
            auto=None if deal is None else deal.pick,
            auto_arm=None if deal is None else deal.arm,
            overridden=overridden,
            tops=request.tops,
            purpose=question.purpose,
            branch=prompt.branch,
            window=prompt.window,
            until=caller.until,
            steering=steering_of(
                self._parts, caller, placement, asked.exchange, question.purpose, sampling, question.conversation
            ),
            style=question.style,
            consent=caller.consent,
            form=asked.route.form_fields(None if question.conversation is None else question.conversation.demand),
            secret=question.secret and caller.slot is None,  # rollouts and evaluations involve no person
            finds=None if caller.slot or self._masks or (hold := self._parts.scrubbing) is None else hold.finds,
        )
        return call, deal

    def _capture(self, call: Call) -> Capture:
        return Capture(call, self._parts, self._intake.turn)

    def _stored_capture(self, turns: Sequence[Turn]) -> Capture:
        return Capture(call_of_turns(turns), self._parts, self._intake.turn, stored=True)
