"""Determines who a model call is for and which weights answer it: user, signature, arm, slot, episode, group.

The purpose of a call: the task itself or an auxiliary call. It is given by the header X-Ostinato-Purpose, or else inferred from headers
that coding agents send anyway: Codex marks its sub-agents and compactions, Claude Code and opencode their sub-agents. Compactions of other
agents are told by the words of their requests. A call in an agent's session without tools is a side call: a title, a topic.

The routes that sample: how each parses a request and shapes its answer. Everything else about a call is the same for all of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.conversation import CompactionBlock, Conversation, Demand, Message, Role
from ostinato.core.errors import BadRequest, NotFound, Unauthorized, Unavailable
from ostinato.core.records import Arm, Consent, Person, PolicyVersion, Purpose, Sampling
from ostinato.core.seams import Renderer
from ostinato.core.steering import Steering
from ostinato.serve.arms import Assignment, slot_of
from ostinato.serve.auth import Principal
from ostinato.serve.auto_deals import Deal
from ostinato.serve.calls.compaction import asks_for_summary
from ostinato.serve.calls.conversations import ConversationScope
from ostinato.serve.consent import ConsentChoices, read_level
from ostinato.serve.dialects import anthropic, anthropic_reply, openai_reply, responses
from ostinato.serve.dialects.dialect import ContextExceeded, Counts, ErrorShape, Heading, Json, Request, Writer
from ostinato.serve.dialects.items import ReadItems
from ostinato.serve.dialects.openai import ChatRequest, parse_chat, parse_completion
from ostinato.serve.parts import Parts
from ostinato.serve.wire.exchange import Exchange

# ---------------------------------------------------------------- the purpose of a call


SESSION_HEADERS = ("X-Claude-Code-Session-Id", "Session-Id", "X-Session-Id")  # Claude Code, Codex, opencode
_SESSIONS = [name.lower().encode() for name in SESSION_HEADERS]
_PARENTS = (b"x-claude-code-agent-id", b"x-codex-parent-thread-id", b"x-parent-session-id")
_COMPACTIONS = ("compact", "compaction")


def purpose_of(headers: Mapping[bytes, bytes], conversation: Conversation | None) -> Purpose:
    """The purpose of a call, by its headers (names in lower case) and, for a conversation, its tools and its request. Raises BadRequest.

    Example: ``purpose_of({b"x-ostinato-purpose": b"side"}, None) is Purpose.SIDE``
    """
    said = headers.get(b"x-ostinato-purpose")
    if said is not None:
        try:
            return Purpose(said.decode("latin-1"))
        except ValueError:
            raise BadRequest(f"X-Ostinato-Purpose takes {', '.join(Purpose)}.", field="X-Ostinato-Purpose") from None
    subagent = headers.get(b"x-openai-subagent", b"").decode("latin-1")
    if subagent in _COMPACTIONS or _codex_kind(headers.get(b"x-codex-turn-metadata", b"")) in _COMPACTIONS:
        return Purpose.COMPACTION
    if conversation is not None and asks_for_summary(conversation):
        return Purpose.COMPACTION
    if subagent or any(name in headers for name in _PARENTS):
        return Purpose.SUBAGENT
    in_session = any(name in headers for name in _SESSIONS)
    return Purpose.SIDE if in_session and conversation is not None and not _uses_tools(conversation) else Purpose.TASK


def _codex_kind(metadata: bytes) -> str:
    """The `request_kind` in Codex' turn metadata, a JSON header that may be longer than other headers; "" if there is none."""
    try:
        told = json.loads(metadata)
    except (ValueError, RecursionError):
        return ""
    kind = told.get("request_kind") if isinstance(told, dict) else None
    return kind if isinstance(kind, str) else ""


def _uses_tools(conversation: Conversation) -> bool:
    return bool(conversation.callable_tools) or any(message.calls for message in conversation.messages)


# ---------------------------------------------------------------- the caller


_LOOK_S = 0.05
_LEFT_MS = re.compile(r"[0-9]{1,9}")  # eleven days at most


class Loading(Unavailable):
    """No weights are loaded yet."""

    retry_after_s = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller as declared or, if `verified`, as proven. `until`: deadline for the end of sampling, by `time.monotonic`; None: none.

    Example: ``Caller(tenant="acme", user="u42", verified=False, episode=None, group=None, slot=None, harness="")``
    """

    tenant: str
    user: str
    verified: bool
    episode: str | None
    group: str | None
    slot: str | None
    harness: str
    until: float | None = None
    consent: Consent = Consent.YES


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The weights that answer a call.

    Example: ``Placement(slot="live", assignment=Assignment(arm=Arm.LIVE, propensity=0.8))``
    """

    slot: str
    assignment: Assignment

    def scope(self, caller: Caller) -> ConversationScope:
        """The conversations that may be continued."""
        return ConversationScope(
            tenant=caller.tenant, user=caller.user, arm=self.assignment.arm.value, episode=caller.episode
        )


class Senders:
    """Reads callers from headers and bodies, and finds their weights."""

    def __init__(self, parts: Parts, choices: ConsentChoices) -> None:
        self._engine = parts.engine
        self._config = parts.config
        self._privacy, self._choices = parts.privacy, choices
        self._clock = parts.clock
        self._users, self._arms = parts.users, parts.arms

    def caller(self, exchange: Exchange, who: Principal, user: str | None, *, store: bool | None) -> Caller:
        """The caller of a request; `user` and `store` are the body's. Raises BadRequest, Unauthorized."""
        user = user or exchange.text("X-Ostinato-User") or ANONYMOUS
        signature = exchange.text("X-Ostinato-User-Signature")
        if signature is not None:
            if user == ANONYMOUS:
                raise Unauthorized("X-Ostinato-User-Signature without a user; name the user that was signed.")
            self._users.check(who.tenant, user, signature, self._clock())
        slot = exchange.text("X-Ostinato-Slot")
        if slot is not None and not who.admin:
            raise Unauthorized("X-Ostinato-Slot needs an admin key; send it as X-Ostinato-Key or leave the header out.")
        return Caller(
            tenant=who.tenant,
            user=user,
            verified=signature is not None,
            episode=exchange.text("X-Ostinato-Episode") or exchange.session or _agents_session(exchange),
            group=exchange.text("X-Ostinato-Group"),
            slot=slot,
            harness=exchange.text("X-Ostinato-Harness") or "",
            until=_until(exchange, slot),
            consent=self._consent(exchange, (who.tenant, user), slot, store),
        )

    def _consent(self, exchange: Exchange, person: Person, slot: str | None, store: bool | None) -> Consent:
        """The strictest of what the operator and the person allow and the request asks for. Raises BadRequest, Unavailable.

        A call that names a slot is an evaluation or a rollout, of which no person is part: only the header counts.
        """
        said = exchange.text("X-Ostinato-Train")
        asked = Consent.YES if said is None else read_level(said, "X-Ostinato-Train")
        if slot is not None:
            return asked
        by_field = self._privacy.store_false if store is False else Consent.YES
        named = {
            person[1],
            exchange.text("X-Ostinato-User") or person[1],
        }  # both, where body and header name different users
        chosen = [self._choices.of((person[0], user)) for user in named]
        return Consent.strictest(asked, by_field, self._privacy.at_most(person[0]), *chosen)

    def known(self, caller: Caller) -> str:
        """The user's name if the operator trusts it (`serve.arm_users`); all other users are `ANONYMOUS`."""
        return caller.user if caller.verified or self._config.arm_users == "declared" else ANONYMOUS

    async def place(self, caller: Caller) -> Placement:
        """The weights for this caller; waits up to `loading_wait_s` for the first weights to load. Raises NotFound, Loading."""
        loaded = self._engine.slots()
        if caller.slot is not None:
            if caller.slot not in loaded:
                raise NotFound(
                    f"No weights are loaded in slot {caller.slot!r}; loaded: {', '.join(sorted(loaded))}.", field="slot"
                )
            arm = Arm.WORLD if caller.slot == Arm.WORLD else Arm.EVAL
            return Placement(slot=caller.slot, assignment=Assignment(arm=arm, propensity=1.0))
        if Arm.LIVE not in loaded:
            loaded = await self._loaded()
        assignment = self._arms.assign(caller.tenant, self.known(caller), loaded)
        return Placement(slot=slot_of(caller.tenant, assignment.arm), assignment=assignment)

    async def _loaded(self) -> Mapping[str, PolicyVersion]:
        ends = asyncio.get_running_loop().time() + self._config.loading_wait_s
        while Arm.LIVE not in (loaded := self._engine.slots()):
            if asyncio.get_running_loop().time() >= ends:
                raise Loading("The model's weights are still being loaded; try again in a moment.")
            await asyncio.sleep(_LOOK_S)
        return loaded


def _until(exchange: Exchange, slot: str | None) -> float | None:
    """The deadline for the end of sampling, counted from the call's arrival. Raises BadRequest, Unauthorized.

    Only a caller that names a slot may set a deadline: turns that end at a deadline are trained on, and a person's turn cut off by a
    clock must not be.
    """
    said = exchange.text("X-Ostinato-Left-Ms")
    if said is None:
        return None
    if slot is None:
        raise Unauthorized(
            "X-Ostinato-Left-Ms is allowed only with X-Ostinato-Slot, which needs an admin key; leave the header out."
        )
    if not _LEFT_MS.fullmatch(said):
        raise BadRequest(
            "X-Ostinato-Left-Ms must be the time left for the answer, in whole milliseconds, 0 to 999999999.",
            field="X-Ostinato-Left-Ms",
        )
    return exchange.came_at + int(said) / 1000


def _agents_session(exchange: Exchange) -> str | None:
    """The session named in the headers that coding agents send anyway. Raises BadRequest."""
    return next((session for name in SESSION_HEADERS if (session := exchange.text(name)) is not None), None)


# ---------------------------------------------------------------- what an answer leans to


_LEANING = (Purpose.TASK, Purpose.SUBAGENT)  # the purposes of calls whose answers lean to the person


def steering_of(
    parts: Parts,
    caller: Caller,
    placement: Placement,
    exchange: Exchange,
    purpose: Purpose,
    sampling: Sampling,
    conversation: Conversation | None,
) -> Steering | None:
    """How an answer leans to its person; None for a named slot, the control arm, outside models, a demanded form, auxiliary calls, a caller
    without a name or without the consent, or if the caller wants none. While a trial compares releases of which one has no basis, no
    answer leans: the other's people would be served better for that alone. An engine that can only bias whole answers leans none that
    may hold a call or has biases of its own. Raises BadRequest for a header that says neither.
    """
    wanted = exchange.text("X-Ostinato-Adapt")
    if wanted not in (None, "on", "off"):
        raise BadRequest("X-Ostinato-Adapt takes on or off.", field="X-Ostinato-Adapt")
    adaptation, policy = parts.adaptation, parts.engine.slots().get(placement.slot)
    if adaptation is None or policy is None or wanted == "off" or caller.slot is not None or caller.user == ANONYMOUS:
        return None
    if sampling.grammar or purpose not in _LEANING or placement.assignment.arm in (Arm.CONTROL, Arm.OUTSIDE):
        return None
    if caller.consent not in (Consent.ADAPT, Consent.YES):
        return None
    if not adaptation.fits(parts.arms.compared(parts.engine.slots())):
        return None
    if parts.engine.capabilities().steers == "static" and (
        sampling.logit_bias or (conversation is not None and conversation.tools)
    ):
        return None
    return adaptation.steering((caller.tenant, caller.user), weights=policy.hash, verified=caller.verified)


def style_texts(
    parts: Parts, caller: Caller, placement: Placement | None, exchange: Exchange, conversation: Conversation
) -> Mapping[str, str]:
    """The styles that a person's conversation may be in now, by arm: none where no answer of theirs leans (`steering_of`), for the
    holdout, and for calls with tools or a demanded form, whose words a program reads. A summary keeps its conversation's style. While
    releases are compared, in a trial or with the verified one, only styles that are approved for all of them count. Raises BadRequest.
    """
    styles, slots = parts.styles, parts.engine.slots()
    policy = None if placement is None else slots.get(placement.slot)
    if styles is None or placement is None or policy is None or caller.slot is not None or caller.user == ANONYMOUS:
        return {}
    if conversation.demand is not None or _has_tools(conversation) or exchange.text("X-Ostinato-Adapt") == "off":
        return {}
    purpose = Purpose.COMPACTION if conversation.summarises else purpose_of(exchange.headers, conversation)
    arm, allowed = placement.assignment.arm, caller.consent in (Consent.ADAPT, Consent.YES)
    if purpose not in (*_LEANING, Purpose.COMPACTION) or arm in (Arm.CONTROL, Arm.OUTSIDE) or not allowed:
        return {}
    if not styles.entitled((caller.tenant, caller.user), verified=caller.verified):
        return {}
    return styles.texts(parts.arms.styled(caller.tenant, arm, slots), shared=arm is not Arm.BRANCH)


def with_style(conversation: Conversation, text: str) -> Conversation:
    """A conversation with a text behind the client's system prompt, or as its system prompt if it has none.

    Example: ``with_style(asked, "Answer in one sentence.").messages[0].role is Role.SYSTEM``
    """
    if not text:
        return conversation
    messages, first = conversation.messages, leading(conversation)
    before = messages[first - 1].text.rstrip() if first else ""
    system = Message(role=Role.SYSTEM, text=f"{before}\n\n{text}" if before else text)
    return replace(conversation, messages=(*messages[: max(0, first - 1)], system, *messages[first:]))


def leading(conversation: Conversation) -> int:
    """With how many system messages a conversation begins."""
    messages = conversation.messages
    return next((place for place, each in enumerate(messages) if each.role is not Role.SYSTEM), len(messages))


# ---------------------------------------------------------------- auto's draws


def asks_auto(parts: Parts, request: Request, caller: Caller) -> bool:
    """True if the request is for Auto, False if it is for the model.

    Raises NotFound for an unknown model, and BadRequest for a feature that not every arm supports.
    """
    model, deals = parts.model, parts.deals
    if deals is None or request.model != deals.name:
        if request.model == model:
            return False
        raise NotFound(f"There is no model {request.model!r}; this server has {model!r}.", field="model")
    if not isinstance(request, ChatRequest):
        raise BadRequest(f"{deals.name} answers chat completions only; ask {model!r} instead.", field="model")
    for field, wanted in (
        ("logprobs", request.wants_logprobs),
        ("continue_final_message", request.continue_final_message),
        ("tools", _has_tools(for_auto(request.conversation))),
        ("response_format", for_auto(request.conversation).demand is not None),
        ("logit_bias", bool(request.logit_bias)),
        ("presence_penalty", bool(request.presence_penalty)),
        ("frequency_penalty", bool(request.frequency_penalty)),
    ):
        if wanted:
            raise BadRequest(f"{field}: not every arm of {deals.name} supports it; ask {model!r} instead.", field=field)
    if caller.slot is not None:
        raise BadRequest(f"X-Ostinato-Slot names a slot, and {deals.name} draws one; leave one out.", field="model")
    return True


def draw_arm(parts: Parts, tenant: str, episode: str, failed: Collection[str]) -> tuple[Placement, Deal]:
    """The arm that answers this call of an episode; `failed` are the arms that could not. Raises Unavailable if no arm is left."""
    deals = parts.deals
    assert deals is not None, "a request for Auto is refused where there is none"
    deal = deals.deal(tenant, episode, parts.arms.releases(parts.engine.slots()), failed)
    if failed:
        parts.metrics.passed_on(tenant, [*failed][-1])
    assignment = Assignment(arm=deal.release, propensity=deal.propensity)
    return Placement(slot=deal.release.value, assignment=assignment), deal


def for_auto(conversation: Conversation) -> Conversation:
    """The conversation as Auto's arms get it: without tools that may not be called, as not every arm can be kept from calling them."""
    demand = conversation.demand
    if demand is None or not demand.forbidden:
        return conversation
    return replace(conversation, tools=(), demand=None if demand.schema is None else replace(demand, forbidden=False))


def _has_tools(conversation: Conversation) -> bool:
    told = any(message.calls or message.role is Role.TOOL for message in conversation.messages)
    return told or bool(conversation.tools)


# ---------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRoute:
    """A route that samples, in one dialect.

    Attributes:
        path: the URL's path.
        kind: prefix of its answers' ids.
        field: the request's field that holds the prompt, for errors.
        form: the request's field that holds the schema of the answer's text, for errors; "" if the dialect has none.
        parse: parses a JSON body into a request, given the items of the tenant's earlier ones; raises BadRequest naming the field.
        writer: makes the writer that shapes the answer. The renderer gives the tokens' text, if log-probabilities are wanted.
        errors: the dialect's shape of errors.
        overflow: makes the stream that answers a streamed request whose prompt is too long; None: the answer is an HTTP error.
        default_tokens: an answer's token budget if the client names none; None: the gateway's default.
        compacted: shapes the whole answer to a request for a summary, in dialects that have such requests.
    """

    path: str
    kind: str
    field: str
    parse: Callable[[Any, ReadItems], Request]
    writer: Callable[[Any, Heading, Renderer | None], Writer]
    errors: ErrorShape
    overflow: Callable[[Any, Heading, ContextExceeded], str] | None = None
    default_tokens: int | None = None
    form: str = ""
    compacted: Callable[[Any, Heading, CompactionBlock, Counts, Json], bytes] | None = None

    def form_fields(self, demand: Demand | None) -> str:
        """The fields of a request that may hold the grammar of this demand.

        Example: ``"response_format"``, ``"tools"``, or both if the answer may be either.
        """
        if demand is None:
            return ""
        of_tools = bool(demand.calls) or demand.schema is None
        return " or ".join([self.form] * (demand.schema is not None) + ["tools"] * of_tools)


ROUTES = (
    CallRoute(
        path="/v1/chat/completions",
        kind="chatcmpl",
        field="messages",
        form="response_format",
        parse=parse_chat,
        writer=lambda request, heading, renderer: openai_reply.Chat(heading, renderer),
        errors=openai_reply.ERRORS,
    ),
    CallRoute(
        path="/v1/messages",
        kind="msg",
        field="messages",
        form="output_config.format",
        parse=anthropic.parse_messages,
        writer=lambda request, heading, renderer: anthropic_reply.Messages(heading),
        compacted=anthropic_reply.compaction_answer,
        errors=anthropic_reply.ERRORS,
    ),
    CallRoute(
        path="/v1/responses",
        kind="resp",
        field="input",
        form="text.format",
        parse=responses.parse_responses,
        writer=lambda request, heading, renderer: responses.Responses(
            heading, request.offered, request.repeated, request.told
        ),
        errors=responses.ERRORS,
        overflow=lambda request, heading, error: responses.Responses(
            heading, request.offered, request.repeated
        ).refused(error),
        compacted=responses.compaction_answer,
    ),
    CallRoute(
        path="/v1/responses/compact",
        kind="resp",
        field="input",
        parse=responses.parse_compact,
        writer=lambda request, heading, renderer: responses.Responses(heading),
        errors=responses.ERRORS,
        compacted=responses.compaction_answer,
    ),
    CallRoute(
        path="/v1/completions",
        kind="cmpl",
        field="prompt",
        parse=parse_completion,
        writer=lambda request, heading, renderer: openai_reply.Completion(heading, renderer),
        errors=openai_reply.ERRORS,
        default_tokens=16,  # OpenAI's
    ),
)
