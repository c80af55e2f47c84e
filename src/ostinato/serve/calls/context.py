"""The context of a call in progress, the making of its prompt for the engine, and the limits on its sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from ostinato.core.conversation import PART_CHARS, CompactionBlock, Conversation, Message, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Consent, Pick, Purpose, Sampling, Turn
from ostinato.serve.calls.caller import (
    Caller,
    CallRoute,
    Placement,
    for_auto,
    purpose_of,
    style_texts,
    system_message_count,
    with_style,
)
from ostinato.serve.calls.compaction import SummaryTurn
from ostinato.serve.calls.conversations import AUTO, ConversationScope, PendingPrompt, Prompt, Sessions, chain_of
from ostinato.serve.calls.response_store import ResponseStore
from ostinato.serve.config import SamplingRule
from ostinato.serve.dialects.anthropic import CountRequest, MessagesRequest
from ostinato.serve.dialects.compaction_blocks import InCallCompaction
from ostinato.serve.dialects.context_edits import COMPACT, cleared
from ostinato.serve.dialects.dialect import Compacted, ContextExceeded, ConversationRequest, Json, Request
from ostinato.serve.dialects.openai import CompletionRequest, check_ids
from ostinato.serve.dialects.responses import ResponsesRequest
from ostinato.serve.fair_thread import CHARS_PER_DIGEST, LONG, PARSED_PER_CHAR, FairThread
from ostinato.serve.feedback.followups import FollowUps
from ostinato.serve.parts import Parts
from ostinato.serve.priority import Person
from ostinato.serve.reader import LongRenderer
from ostinato.serve.scrub import Scrubber, unmasked_message
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.watch import DisconnectWatch

_LOWEST_BIAS = -100.0  # the lowest logit bias that all engines accept
LEAST_SHARE = 16
"""Agents request more tokens than there are: an answer gets at least 1/16 of the context, and a summary within a call at most that much."""
_TURNS_PER_READ = 16  # turns read from the log at once: each holds its whole prompt
MOST_LOGGED = 200_000
"""Most log-probabilities in one body: more would take hundreds of megabytes of memory while it is serialised."""

# ---------------------------------------------------------------- the call in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """A call in progress. `data`: its body; `placement`: its weights, or None if Auto will draw an arm once the episode is known; `person`:
    notified of tokens.
    """

    route: CallRoute
    data: bytes
    request: Request
    caller: Caller
    placement: Placement | None
    exchange: Exchange
    watch: DisconnectWatch
    person: Person

    @property
    def scope(self) -> ConversationScope:
        """The set of conversations that the call may continue."""
        caller, arm = self.caller, AUTO if self.placement is None else self.placement.assignment.arm.value
        return ConversationScope(tenant=caller.tenant, user=caller.user, arm=arm, episode=caller.episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """The prompt for the engine and, for a conversation, what is needed to parse and remember the answer.

    Callbacks: `remember` indexes each turn for follow-up calls, `answered` runs once the answer is delivered, `left` when the client
    disconnects midway. `told`: the messages as the client sent them; `edits`: the context edits applied to them; `compacted`: the summary
    that the answer begins with; `tries`: the turns sampled to write it. `style`: the conversation's style. `scrubber`: what masked the
    prompt, if masking is on; `secret`: the prompt holds secrets, which keeps its turns from training.
    """

    prompt: Prompt
    purpose: Purpose = Purpose.TASK
    grammar: str = ""
    call_token: int | None = None  # must not be sampled, since calls are forbidden
    conversation: Conversation | None = None
    told: Conversation | None = None
    edits: Sequence[Json] | None = None
    compacted: Compacted | None = None
    tries: Sequence[str] = ()
    remember: Callable[[Turn, Message, bool], None] | None = None
    answered: Callable[[Sequence[str], Sequence[Message]], None] | None = None
    left: Callable[[str, Message], None] | None = None
    style: Pick | None = None
    scrubber: Scrubber | None = None
    secret: bool = False


# ---------------------------------------------------------------- sampling


ANY_TENANT = "*"


def override_sampling(asked: Sampling, caller: Caller, rules: Mapping[str, SamplingRule]) -> tuple[Sampling, str]:
    """Return this caller's sampling parameters, and the overridden ones as a header's value ("" if there are none).

    A caller that names a slot is measuring, so its parameters are not overridden.

    Example: ``override_sampling(Sampling(max_tokens=9, temperature=0.0), ann, {"*": SamplingRule(temperature=1.0)})[1] == "temperature=1"``
    """
    rule = rules.get(caller.tenant, rules.get(ANY_TENANT))
    if rule is None or caller.slot is not None:
        return asked, ""
    changed = {name: value for name, value in rule if value is not None and value != getattr(asked, name)}
    return replace(asked, **changed), ", ".join(f"{name}={value:g}" for name, value in changed.items())


def compacts(request: Request) -> bool:
    """Return True for a request whose whole answer is a summary."""
    return isinstance(request, MessagesRequest | ResponsesRequest) and request.compacts


def in_call_compaction(request: Request) -> InCallCompaction | None:
    """Return the request's wish for compaction within the call once the prompt is long, if it has one."""
    return request.in_call if isinstance(request, MessagesRequest | ResponsesRequest) else None


def forbids_calls_alone(conversation: Conversation) -> bool:
    """Return True if calls are forbidden without a schema, which would leave no room for a call anyway."""
    demand = conversation.demand
    return demand is not None and demand.forbidden and demand.schema is None


def constrained(sampling: Sampling, question: EnginePrompt) -> Sampling:
    """Return the sampling with the answer's grammar, a logit bias that prevents a forbidden call, and masked stop strings."""
    bias = sampling.logit_bias
    stop = sampling.stop if question.scrubber is None else tuple(map(question.scrubber.text, sampling.stop))
    if question.call_token is not None:
        bias = (
            *((token, value) for token, value in bias if token != question.call_token),
            (question.call_token, _LOWEST_BIAS),
        )
    return replace(sampling, grammar=question.grammar, logit_bias=bias, stop=stop)


def least_answer(request: Request, conversation: Conversation | None, context: int) -> int:
    """Return the fewest tokens that an answer needs room for. For a summary within a call the operator's limits apply."""
    within = conversation is not None and conversation.summarises and not compacts(request)
    wanted = context // LEAST_SHARE if within else request.budget
    return max(1, min(wanted or 1, context // LEAST_SHARE))


def check_logged(request: Request, max_tokens: int) -> None:
    """Raise BadRequest for a body with more than `MOST_LOGGED` log-probabilities; a stream may have any number."""
    logged = (request.n or 1) * max_tokens * (1 + request.tops)
    if request.wants_logprobs and not request.stream and logged > MOST_LOGGED:
        raise BadRequest(
            f"{logged} log-probabilities (n x max_tokens x (1 + top_logprobs)) are more than the {MOST_LOGGED} that one body may have; "
            "ask for fewer, or stream.",
            field="logprobs",
        )


# ---------------------------------------------------------------- the prompt


class Prompts:
    """Makes the engine's prompt from a request: the client's conversation, masked and shortened as configured, then its ids.

    Args:
        parts: the gateway's.
        context: most tokens of prompt and answer together.
        sessions: each tenant's indexed conversations.
        previous: each tenant's answers that calls may refer to.
        follow_ups: gets people's next messages.

    Example: ``question = await prompts.ask(asked)``, whose ids are ``question.prompt.ids``
    """

    def __init__(
        self,
        parts: Parts,
        context: int,
        sessions: Mapping[str, Sessions],
        previous: Mapping[str, ResponseStore],
        follow_ups: FollowUps,
    ) -> None:
        self._parts = parts
        self._context = context
        self._sessions, self._previous, self._follow_ups = sessions, previous, follow_ups
        self._rendering = LongRenderer(parts.renderer, parts.reader)
        # a thread of its own, so that a slow grammar delays no prompt
        self._thread, self.compiling = parts.thread, FairThread()

    async def ask(
        self,
        asked: CallContext,
        told: Conversation | None = None,
        summary: SummaryTurn | None = None,
        style: Pick | None = None,
    ) -> EnginePrompt:
        """Return the prompt of a request, or of `told`, a conversation that the gateway made from it and that may begin with its own
        `summary`. `style`: that of the summarised conversation.

        Raises BadRequest.
        """
        request = asked.request
        if isinstance(request, CompletionRequest):
            return await self._of_completion(asked, request)
        tenant, previous = asked.caller.tenant, self._previous[asked.caller.tenant]
        ours, request = told is not None, cast("ConversationRequest", request)
        if told is None:
            await self.restore_items(asked)
            told = previous.conversation(request, asked.caller.user)
        size = asked.exchange.received
        if told is not request.conversation:  # it continues a stored answer or begins with a summary
            size += sum(message.chars for message in told.messages)
        rough = CHARS_PER_DIGEST * told.parts
        if not told.hashed:
            rough += size // PARSED_PER_CHAR + PART_CHARS * told.parts
        masked, scrubber, secret = await self.scrubbed(asked, for_auto(told) if asked.placement is None else told, size)
        styled, style, arm = await self._styled(asked, masked, style, ours=ours)
        render = partial(self._rendered, asked, request, rough, summary)
        result, again = None, None
        if styled is not masked:
            with suppress(ContextExceeded):
                result = await render(styled, masked, style)
        if result is not None and not self._fits(request, *result[:2]):
            result, again = None, result[0].again
        if result is None:  # it has no style, or does not fit with it
            style, arm = (style, arm) if styled is masked else (None, None)
            result = await render(masked, masked, style, again=again)
        question, prompt, edits = result
        conversation = question.conversation
        purpose = purpose_of(asked.exchange.headers, conversation)
        purpose = Purpose.COMPACTION if conversation.summarises else purpose
        call_token, grammar = await self._form(tenant, conversation)
        engine_prompt = EnginePrompt(
            prompt=prompt,
            purpose=purpose,
            grammar=grammar,
            call_token=call_token,
            conversation=conversation,
            told=told,
            edits=edits,
            style=question.style if question.style is not None and question.style.arm == arm else style,
            scrubber=scrubber,
            secret=secret,
        )
        if asked.caller.consent is Consent.NEVER:  # nothing may refer to its answer later
            return engine_prompt
        if not ours:
            self._follow_ups.note(tenant, question, purpose)
        return self._remembering(tenant, request, question, engine_prompt, conversation.block if ours else None)

    async def restore_items(self, asked: CallContext) -> None:
        """Load referenced items of earlier answers that are not in memory from the log."""
        tenant, user = asked.caller.tenant, asked.caller.user
        previous = self._previous[tenant]
        missing = previous.missing(asked.request, user)
        answers = [*missing]
        for first in range(0, len(answers), _TURNS_PER_READ):
            names = [(f"{answer}:0",) for answer in answers[first : first + _TURNS_PER_READ]]
            for turn in await self._parts.log.find(Turn, names):
                if (turn.tenant, turn.user) == (tenant, user):
                    items = missing[turn.id.removesuffix(":0")]
                    restore = partial(previous.restore, turn, items, asked.request, self._parts.renderer)
                    await self._thread.run(tenant, len(turn.text) // PARSED_PER_CHAR, restore)

    async def _rendered(
        self,
        asked: CallContext,
        request: ConversationRequest,
        rough: int,
        summary: SummaryTurn | None,
        styled: Conversation,
        unstyled: Conversation,
        style: Pick | None,
        *,
        again: bool | None = None,
    ) -> tuple[PendingPrompt, Prompt, Sequence[Json] | None]:
        """Look a conversation up and render it; return also the context edits. `again`: whether it was asked before, if known.

        Raises BadRequest.
        """
        tenant = asked.caller.tenant
        conversation, edits = await self.edited(tenant, request, styled)
        sessions, weighed = self._sessions[tenant], partial(_chains_of, asked.scope, conversation, styled, unstyled)
        chars, chain, origin, plain = await self._thread.run(tenant, rough, weighed)
        self.check_length(chars, asked.route.field)
        summary = summary or await self._proven(asked, conversation)
        question = sessions.look(asked.scope, conversation, chain, summary, origin=origin, plain=plain, style=style)
        question.again = question.again if again is None else again
        cost = chars + PART_CHARS * conversation.parts
        return question, await self._thread.run(tenant, cost, partial(sessions.render, question)), edits

    def _fits(self, request: ConversationRequest, question: PendingPrompt, prompt: Prompt) -> bool:
        """Return True if a prompt leaves room for an answer, or will be compacted within the call."""
        told, room = question.conversation, self._context - len(prompt.ids)
        shortened = in_call_compaction(request) is not None and not told.summarises
        return shortened or room >= least_answer(request, told, self._context)

    def _remembering(
        self,
        tenant: str,
        request: ConversationRequest,
        question: PendingPrompt,
        engine_prompt: EnginePrompt,
        block: CompactionBlock | None,
    ) -> EnginePrompt:
        """Add the callbacks that keep the answer. `block`: the gateway's own summary with which the prompt begins."""
        sessions, previous, scrubber = self._sessions[tenant], self._previous[tenant], engine_prompt.scrubber

        def remember(turn: Turn, answer: Message, seen: bool) -> None:
            sessions.remember(question, turn, answer if scrubber is None else scrubber.message(answer), seen=seen)
            if not question.conversation.summarises:
                unmasked = answer if scrubber is None else unmasked_message(answer, scrubber.values)
                previous.keep(request, turn, unmasked, block)

        return replace(
            engine_prompt,
            remember=remember,
            answered=partial(self._follow_ups.answered, question) if self._follow_ups.on else None,
            left=partial(self._follow_ups.left, question) if self._follow_ups.on else None,
        )

    async def _styled(
        self, asked: CallContext, conversation: Conversation, style: Pick | None, *, ours: bool
    ) -> tuple[Conversation, Pick | None, str | None]:
        """Return the conversation in its style, the style drawn if it begins here, and the style's arm if it continues.

        A continued conversation keeps the style of the turn that it continues; if no such turn is known, it has none. `style`: that of a
        summarised conversation; `ours`: the gateway made this conversation, so no style is drawn for it.
        """
        styles = self._parts.styles
        texts = style_texts(self._parts, asked.caller, asked.placement, asked.exchange, conversation)
        if not texts or styles is None:
            return conversation, None, None
        tenant, scope, sessions = asked.caller.tenant, asked.scope, self._sessions[asked.caller.tenant]
        begins = not conversation.answered and conversation.block is None
        if style is None and begins and not ours:
            cost = CHARS_PER_DIGEST * conversation.parts
            before = sessions.dealt(scope, await self._thread.run(tenant, cost, partial(chain_of, scope, conversation)))
            style = styles.deal((tenant, asked.caller.user), texts) if before is None else before[0]
        if style is not None and style.arm in (*texts, styles.none):
            return with_style(conversation, texts.get(style.arm, "")), style, None
        if style is not None or begins or ours:
            return conversation, None, None
        made = {styles.none: conversation, **{arm: with_style(conversation, text) for arm, text in texts.items()}}

        def forms() -> list[tuple[str, Conversation, list[bytes], set[str | None]]]:
            either = {None, styles.none}
            return [
                (arm, form, chain_of(scope, form), either if arm in either else {arm}) for arm, form in made.items()
            ]

        tried = await self._thread.run(tenant, CHARS_PER_DIGEST * conversation.parts * len(made), forms)
        for arm, form, chain, arms in tried:
            if sessions.knows(scope, form, chain, arms):
                return form, None, arm
        for arm, form, chain, arms in tried:
            cost = form.chars + PART_CHARS * form.parts
            if await self._thread.run(tenant, cost, partial(sessions.knows_cold, scope, form, chain, arms)):
                return form, None, arm
        return conversation, None, None

    async def edited(
        self, tenant: str, request: Request | CountRequest, conversation: Conversation
    ) -> tuple[Conversation, Sequence[Json] | None]:
        """Return the conversation without what its client wants cleared, and the edits; None for them if the request asks for none."""
        wanted = request.context_management if isinstance(request, MessagesRequest | CountRequest) else None
        if wanted is None:
            return conversation, None
        if not any(edit.type != COMPACT for edit in wanted.edits):
            return conversation, []
        chars = await self._thread.run(tenant, CHARS_PER_DIGEST * conversation.parts, lambda: conversation.chars)
        self.check_length(chars, "messages")
        work = partial(cleared, conversation, wanted, self.tokens, self.most_tokens)
        return await self._thread.run(tenant, 3 * (chars + PART_CHARS * conversation.parts), work)

    def tokens(self, conversation: Conversation) -> int:
        """Return the length of a conversation's prompt."""
        return len(self._rendering.chat(conversation))

    @property
    def most_tokens(self) -> int:
        """The prompt length at which a conversation is compacted at the latest, if its client asks for compaction."""
        return int(self._parts.config.compaction_share * self._context)

    async def _proven(self, asked: CallContext, conversation: Conversation) -> SummaryTurn | None:
        """Return the turn that wrote the conversation's initial summary, if its signature proves one. Raises CompactionRefused."""
        block, scope = conversation.block, asked.scope
        if block is None:
            return None
        verify = partial(self._parts.blocks.summary, scope.tenant, asked.route.kind, scope.place, block)
        return await self._thread.run(scope.tenant, (len(block.token) + len(block.content)) // PARSED_PER_CHAR, verify)

    async def scrubbed(
        self, asked: CallContext, conversation: Conversation, chars: int
    ) -> tuple[Conversation, Scrubber | None, bool]:
        """Return the conversation as the model may see it, the scrubber if it is masked, and whether it holds secrets."""
        scrubbing, caller = self._parts.scrubbing, asked.caller
        if scrubbing is None:
            return conversation, None, False
        self.check_length(conversation.chars, asked.route.field)
        scrubber = scrubbing.person(caller.tenant, caller.user)
        masked = await self._thread.run(
            caller.tenant, chars // PARSED_PER_CHAR, partial(scrubber.conversation, conversation)
        )
        return (masked, scrubber, False) if scrubbing.masks else (conversation, None, masked is not conversation)

    async def _form(self, tenant: str, conversation: Conversation) -> tuple[int | None, str]:
        """Return the token that must not be sampled, and the compiled grammar of the answer. Raises BadRequest."""
        if conversation.demand is None:
            return None, ""
        renderer, forbids = self._parts.renderer, forbids_calls_alone(conversation)
        call_token = renderer.call_token() if forbids else None
        if call_token is not None:
            return call_token, ""
        if not self._parts.engine.capabilities().follows_grammars:
            if forbids:
                return None, ""  # a sampled call is passed on as text
            raise BadRequest("this server's engine cannot enforce a format; send tool_choice 'auto' and no format.")
        grammar = await self._thread.run(tenant, LONG, partial(renderer.grammar, conversation))
        if grammar and not renderer.has_compiled(grammar):
            await self.compiling.run(tenant, LONG, partial(renderer.compile, grammar))
        return None, grammar

    async def _of_completion(self, asked: CallContext, request: CompletionRequest) -> EnginePrompt:
        prompt, scrubber, secret = await self.scrub_text(asked, request.prompt)
        if isinstance(prompt, str):
            self.check_length(len(prompt), "prompt")
            encode = partial(self._rendering.encode, prompt)
            prompt = await self._thread.run(asked.caller.tenant, len(prompt), encode)
        check_ids(prompt, self._parts.renderer.vocab_size)
        purpose = purpose_of(asked.exchange.headers, None)
        return EnginePrompt(prompt=Prompt(ids=tuple(prompt)), purpose=purpose, scrubber=scrubber, secret=secret)

    async def scrub_text(
        self, asked: CallContext, prompt: str | list[int]
    ) -> tuple[str | list[int], Scrubber | None, bool]:
        """Like `scrubbed`, for a prompt of text or ids; ids are returned unchanged if their text holds nothing to mask."""
        if self._parts.scrubbing is None:
            return prompt, None, False
        text = prompt
        if not isinstance(text, str):
            check_ids(text, self._parts.renderer.vocab_size)
            text = self._parts.renderer.decode(text)
        told = Conversation(messages=(Message(role=Role.USER, text=text),))
        masked, scrubber, secret = await self.scrubbed(asked, told, len(text))
        return prompt if masked is told else masked.messages[0].text, scrubber, secret

    def check_length(self, chars: int, field: str) -> None:
        """Raise ContextExceeded for a text that is too long to be tokenised."""
        most = self._context * self._parts.config.max_chars_per_token
        if chars > most:
            tokens = math.ceil(chars / self._parts.config.max_chars_per_token)
            raise ContextExceeded(prompt=tokens, answer=0, context=self._context, field=field, chars=chars)


def _chains_of(
    scope: ConversationScope, conversation: Conversation, sent: Conversation, unstyled: Conversation
) -> tuple[int, list[bytes], list[bytes] | None, list[bytes] | None]:
    """Return a conversation's length in characters, its hash chain, the chain of what was sent if some of it was cleared, and the chain
    with the system prompt of `unstyled` if it has a style.
    """
    origin, plain = None if sent is conversation else chain_of(scope, sent), None
    if sent is not unstyled:
        before, after = system_message_count(unstyled), system_message_count(conversation)
        bare = replace(conversation, messages=(*unstyled.messages[:before], *conversation.messages[after:]))
        plain = [b""] * (after - before) + chain_of(scope, bare)  # same indices, if the style is a message of its own
    return conversation.chars, chain_of(scope, conversation), origin, plain
