"""A call in progress, the prompt that the engine is asked for it, and the sampling that the operator and the answer's form allow."""

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
    leading,
    purpose_of,
    style_texts,
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
from ostinato.serve.fair_thread import LONG, PER_HASHED, PER_PARSED, FairThread
from ostinato.serve.feedback.followups import FollowUps
from ostinato.serve.parts import Parts
from ostinato.serve.priority import Person
from ostinato.serve.reader import LongRenderer
from ostinato.serve.scrub import Scrubber, unmasked_message
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.watch import DisconnectWatch

_NEVER = -100.0  # the least bias that all engines take
LEAST_SHARE = 16
"""Agents ask for more tokens than there are: an answer gets at least 1/16 of the context, and a summary within a call at most."""
_RECALLED = 16  # turns that are read from the log at once: each holds its whole prompt
MOST_LOGGED = 200_000
"""Log-probabilities in one body: more would take hundreds of megabytes of memory while it is written."""

# ---------------------------------------------------------------- the call in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """A call in progress. `data` is its body; `placement` is None if Auto will deal once the episode is known; `person` is notified of
    tokens.
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
        """The conversations that may be continued."""
        caller, arm = self.caller, AUTO if self.placement is None else self.placement.assignment.arm.value
        return ConversationScope(tenant=caller.tenant, user=caller.user, arm=arm, episode=caller.episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """The prompt for the engine. For a conversation also the messages, needed to parse the answer, and three callbacks: `remember` stores
    each turn for follow-ups, `answered` is called when the answer has been delivered, and `left` when the client left in the middle.
    `told`: the messages as the client sent them; `edits`: what was cleared of them; `compacted`: the summary that the answer begins with,
    and `tries`: the turns that were to write it. `style`: what its conversation was dealt. `scrubber` masked it, if anything is masked
    here; `secret`: it holds what keeps its turns from training.
    """

    prompt: Prompt
    purpose: Purpose = Purpose.TASK
    grammar: str = ""
    call_token: int | None = None  # to be kept from being sampled, as calls are forbidden
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


OTHERS = "*"


def override_sampling(asked: Sampling, caller: Caller, rules: Mapping[str, SamplingRule]) -> tuple[Sampling, str]:
    """The sampling parameters for this caller, and the overridden ones as a header's value ("" if there are none).

    A caller that names a slot is measuring, so its parameters are not overridden.

    Example: ``override_sampling(Sampling(max_tokens=9, temperature=0.0), ann, {"*": SamplingRule(temperature=1.0)})[1] == "temperature=1"``
    """
    rule = rules.get(caller.tenant, rules.get(OTHERS))
    if rule is None or caller.slot is not None:
        return asked, ""
    changed = {name: value for name, value in rule if value is not None and value != getattr(asked, name)}
    return replace(asked, **changed), ", ".join(f"{name}={value:g}" for name, value in changed.items())


def compacts(request: Request) -> bool:
    """True for a request that asks for a summary, and for nothing else."""
    return isinstance(request, MessagesRequest | ResponsesRequest) and request.compacts


def in_call(request: Request) -> InCallCompaction | None:
    """The wish that the answer to a request begins with a summary once its prompt is long."""
    return request.in_call if isinstance(request, MessagesRequest | ResponsesRequest) else None


def forbids_calls_alone(conversation: Conversation) -> bool:
    """True if calls are forbidden, and nothing else is demanded, which would leave no room for one."""
    demand = conversation.demand
    return demand is not None and demand.forbidden and demand.schema is None


def constrained(sampling: Sampling, question: EnginePrompt) -> Sampling:
    """The sampling with the grammar of the answer, a bias that keeps a forbidden call from beginning, and masked stop strings."""
    bias = sampling.logit_bias
    stop = sampling.stop if question.scrubber is None else tuple(map(question.scrubber.text, sampling.stop))
    if question.call_token is not None:
        bias = (
            *((token, value) for token, value in bias if token != question.call_token),
            (question.call_token, _NEVER),
        )
    return replace(sampling, grammar=question.grammar, logit_bias=bias, stop=stop)


def least_answer(request: Request, conversation: Conversation | None, context: int) -> int:
    """The tokens that an answer must have room for; the limits of a summary within a call are the operator's."""
    within = conversation is not None and conversation.summarises and not compacts(request)
    wanted = context // LEAST_SHARE if within else request.budget
    return max(1, min(wanted or 1, context // LEAST_SHARE))


def check_logged(request: Request, max_tokens: int) -> None:
    """Refuse a body with more log-probabilities than `MOST_LOGGED`; a stream may have any number."""
    logged = (request.n or 1) * max_tokens * (1 + request.tops)
    if request.wants_logprobs and not request.stream and logged > MOST_LOGGED:
        raise BadRequest(
            f"{logged} log-probabilities (n x max_tokens x (1 + top_logprobs)) are more than the {MOST_LOGGED} that one body may have; "
            "ask for fewer, or stream.",
            field="logprobs",
        )


# ---------------------------------------------------------------- the prompt


class Prompts:
    """Makes the engine's prompt of a request: its conversation as the client sent it, masked and shortened as is wanted, then its ids.

    Args:
        parts: the gateway's.
        context: most tokens of prompt and answer together.
        sessions: the conversations of each tenant.
        previous: the answers of each tenant that calls may name.
        follow_ups: is given people's next messages.

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
        self._thread, self.compiling = parts.thread, FairThread()  # a slow grammar delays no prompt

    async def ask(
        self,
        asked: CallContext,
        told: Conversation | None = None,
        summary: SummaryTurn | None = None,
        style: Pick | None = None,
    ) -> EnginePrompt:
        """The prompt of a request, or of a conversation made of it: `told`, which begins with the gateway's own `summary` if there is one.
        `style`: that of the conversation that was summarised.

        Raises BadRequest.
        """
        request = asked.request
        if isinstance(request, CompletionRequest):
            return await self._of_completion(asked, request)
        tenant, previous = asked.caller.tenant, self._previous[asked.caller.tenant]
        ours, request = told is not None, cast("ConversationRequest", request)
        if told is None:
            await self.recall(asked)
            told = previous.conversation(request, asked.caller.user)
        said = asked.exchange.received
        if told is not request.conversation:  # it goes on from an answer that is kept, or from a summary
            said += sum(message.chars for message in told.messages)
        rough = PER_HASHED * told.parts
        if not told.hashed:
            rough += said // PER_PARSED + PART_CHARS * told.parts
        masked, scrubber, secret = await self.scrubbed(asked, for_auto(told) if asked.placement is None else told, said)
        styled, style, arm = await self._styled(asked, masked, style, ours=ours)
        rendered = partial(self._rendered, asked, request, rough, summary)
        found, again = None, None
        if styled is not masked:
            with suppress(ContextExceeded):
                found = await rendered(styled, masked, style)
        if found is not None and not self._fits(request, *found[:2]):
            found, again = None, found[0].again
        if found is None:  # it has no style, or may fit without it
            style, arm = (style, arm) if styled is masked else (None, None)
            found = await rendered(masked, masked, style, again=again)
        question, prompt, edits = found
        conversation = question.conversation
        purpose = purpose_of(asked.exchange.headers, conversation)
        purpose = Purpose.COMPACTION if conversation.summarises else purpose
        call_token, grammar = await self._form(tenant, conversation)
        asks = EnginePrompt(
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
        if asked.caller.consent is Consent.NEVER:  # its answer is not named later, and no next message is about it
            return asks
        if not ours:
            self._follow_ups.note(tenant, question, purpose)
        return self._remembering(tenant, request, question, asks, conversation.block if ours else None)

    async def recall(self, asked: CallContext) -> None:
        """Read items of earlier answers from the log: those that the request refers to and that are not in memory."""
        tenant, user = asked.caller.tenant, asked.caller.user
        previous = self._previous[tenant]
        missing = previous.missing(asked.request, user)
        answers = [*missing]
        for first in range(0, len(answers), _RECALLED):
            names = [(f"{answer}:0",) for answer in answers[first : first + _RECALLED]]
            for turn in await self._parts.log.find(Turn, names):
                if (turn.tenant, turn.user) == (tenant, user):
                    items = missing[turn.id.removesuffix(":0")]
                    restore = partial(previous.restore, turn, items, asked.request, self._parts.renderer)
                    await self._thread.run(tenant, len(turn.text) // PER_PARSED, restore)

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
        """A conversation recognised and its prompt, and what was cleared of it. `again`: whether it was asked before, if that is known.

        Raises BadRequest.
        """
        tenant = asked.caller.tenant
        conversation, edits = await self.edited(tenant, request, styled)
        sessions, weighed = self._sessions[tenant], partial(_weighed, asked.scope, conversation, styled, unstyled)
        chars, chain, origin, plain = await self._thread.run(tenant, rough, weighed)
        self.check_length(chars, asked.route.field)
        summary = summary or await self._proven(asked, conversation)
        question = sessions.look(asked.scope, conversation, chain, summary, origin=origin, plain=plain, style=style)
        question.again = question.again if again is None else again
        cost = chars + PART_CHARS * conversation.parts
        return question, await self._thread.run(tenant, cost, partial(sessions.render, question)), edits

    def _fits(self, request: ConversationRequest, question: PendingPrompt, prompt: Prompt) -> bool:
        """True if a prompt leaves room for an answer, or is to be shortened within the call."""
        told, room = question.conversation, self._context - len(prompt.ids)
        shortened = in_call(request) is not None and not told.summarises
        return shortened or room >= least_answer(request, told, self._context)

    def _remembering(
        self,
        tenant: str,
        request: ConversationRequest,
        question: PendingPrompt,
        found: EnginePrompt,
        block: CompactionBlock | None,
    ) -> EnginePrompt:
        """The prompt with the callbacks that keep what comes of it. `block`: the gateway's own summary with which it begins."""
        sessions, previous, scrubber = self._sessions[tenant], self._previous[tenant], found.scrubber

        def remember(turn: Turn, answer: Message, seen: bool) -> None:
            sessions.remember(question, turn, answer if scrubber is None else scrubber.message(answer), seen=seen)
            if not question.conversation.summarises:
                said = answer if scrubber is None else unmasked_message(answer, scrubber.values)
                previous.keep(request, turn, said, block)

        return replace(
            found,
            remember=remember,
            answered=partial(self._follow_ups.answered, question) if self._follow_ups.on else None,
            left=partial(self._follow_ups.left, question) if self._follow_ups.on else None,
        )

    async def _styled(
        self, asked: CallContext, conversation: Conversation, style: Pick | None, *, ours: bool
    ) -> tuple[Conversation, Pick | None, str | None]:
        """The conversation in its style, the draw if it begins here, and the arm if it goes on instead: then it keeps the style of the turn
        that it continues, and has none if no turn of it is known here. `style`: that of a conversation that was summarised; `ours`: this
        one is the gateway's own, and is dealt none.
        """
        styles = self._parts.styles
        texts = style_texts(self._parts, asked.caller, asked.placement, asked.exchange, conversation)
        if not texts or styles is None:
            return conversation, None, None
        tenant, scope, sessions = asked.caller.tenant, asked.scope, self._sessions[asked.caller.tenant]
        begins = not conversation.answered and conversation.block is None
        if style is None and begins and not ours:
            cost = PER_HASHED * conversation.parts
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

        tried = await self._thread.run(tenant, PER_HASHED * conversation.parts * len(made), forms)
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
        """The conversation without what its client wants cleared, and what that was; None if the request has no such wish."""
        wanted = request.context_management if isinstance(request, MessagesRequest | CountRequest) else None
        if wanted is None:
            return conversation, None
        if not any(edit.type != COMPACT for edit in wanted.edits):
            return conversation, []
        chars = await self._thread.run(tenant, PER_HASHED * conversation.parts, lambda: conversation.chars)
        self.check_length(chars, "messages")
        work = partial(cleared, conversation, wanted, self.tokens, self.most_tokens)
        return await self._thread.run(tenant, 3 * (chars + PART_CHARS * conversation.parts), work)

    def tokens(self, conversation: Conversation) -> int:
        """The length of a conversation's prompt."""
        return len(self._rendering.chat(conversation))

    @property
    def most_tokens(self) -> int:
        """The tokens of prompt at which a conversation is shortened at the latest, if its client wishes that it is."""
        return int(self._parts.config.compaction_share * self._context)

    async def _proven(self, asked: CallContext, conversation: Conversation) -> SummaryTurn | None:
        """The turn that wrote the summary with which a conversation begins, if its client proves that. Raises CompactionRefused."""
        block, scope = conversation.block, asked.scope
        if block is None:
            return None
        verify = partial(self._parts.blocks.summary, scope.tenant, asked.route.kind, scope.place, block)
        return await self._thread.run(scope.tenant, (len(block.token) + len(block.content)) // PER_PARSED, verify)

    async def scrubbed(
        self, asked: CallContext, conversation: Conversation, chars: int
    ) -> tuple[Conversation, Scrubber | None, bool]:
        """The conversation as the model may see it, what masked it, and whether it holds what must not be learned."""
        scrubbing, caller = self._parts.scrubbing, asked.caller
        if scrubbing is None:
            return conversation, None, False
        self.check_length(conversation.chars, asked.route.field)
        scrubber = scrubbing.person(caller.tenant, caller.user)
        masked = await self._thread.run(
            caller.tenant, chars // PER_PARSED, partial(scrubber.conversation, conversation)
        )
        return (masked, scrubber, False) if scrubbing.masks else (conversation, None, masked is not conversation)

    async def _form(self, tenant: str, conversation: Conversation) -> tuple[int | None, str]:
        """The token to be kept from being sampled, and the grammar that the answer must follow, compiled. Raises BadRequest."""
        if conversation.demand is None:
            return None, ""
        renderer, forbids = self._parts.renderer, forbids_calls_alone(conversation)
        call_token = renderer.call_token() if forbids else None
        if call_token is not None:
            return call_token, ""
        if not self._parts.engine.capabilities().follows_grammars:
            if forbids:
                return None, ""  # a call is sampled, and told as the text that it is
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
        """The same for a prompt of text or of ids; ids that spell nothing to be masked stay as they are."""
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


def _weighed(
    scope: ConversationScope, conversation: Conversation, sent: Conversation, unstyled: Conversation
) -> tuple[int, list[bytes], list[bytes] | None, list[bytes] | None]:
    """A conversation's length in characters, the hashes by which it is recognised, those of what was sent if that was another, and its
    own with the system prompt of `unstyled` if what was sent has a style.
    """
    origin, plain = None if sent is conversation else chain_of(scope, sent), None
    if sent is not unstyled:
        before, after = leading(unstyled), leading(conversation)
        bare = replace(conversation, messages=(*unstyled.messages[:before], *conversation.messages[after:]))
        plain = [b""] * (after - before) + chain_of(scope, bare)  # a style alone has no message in it
    return conversation.chars, chain_of(scope, conversation), origin, plain
