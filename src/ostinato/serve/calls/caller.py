"""Determines who a model call is for, what it is for, and which weights answer it.

The purpose of a call is the task itself or an auxiliary call. The header X-Ostinato-Purpose states it; otherwise it is inferred from
headers that coding agents send anyway: Codex marks its sub-agents and compactions, Claude Code and opencode their sub-agents. Compactions
of other agents are recognised by the wording of their requests. A call without tools in an agent's session is a side call, such as for a
title.

It also holds the routes that sample: how each parses a request and formats its answer. Everything else about a call is the same for all.
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
from ostinato.serve.consent import ConsentChoices, read_level
from ostinato.serve.dialects import anthropic, anthropic_reply, openai_reply, responses
from ostinato.serve.dialects.dialect import ContextExceeded, Counts, ErrorShape, Heading, Json, Request, Writer
from ostinato.serve.dialects.items import ItemCache
from ostinato.serve.dialects.openai import ChatRequest, parse_chat, parse_completion
from ostinato.serve.parts import Parts
from ostinato.serve.wire.exchange import Exchange

# ---------------------------------------------------------------- the purpose of a call


SESSION_HEADERS = ("X-Claude-Code-Session-Id", "Session-Id", "X-Session-Id")  # Claude Code, Codex, opencode
_SESSIONS = [name.lower().encode() for name in SESSION_HEADERS]
_PARENTS = (b"x-claude-code-agent-id", b"x-codex-parent-thread-id", b"x-parent-session-id")
_COMPACTIONS = ("compact", "compaction")


def purpose_of(headers: Mapping[bytes, bytes], conversation: Conversation | None) -> Purpose:
    """Return the purpose of a call, from its headers (lower-case names) and, for a conversation, its tools and its request. Raises
    BadRequest.

    Example: ``purpose_of({b"x-ostinato-purpose": b"side"}, None) is Purpose.SIDE``
    """
    declared = headers.get(b"x-ostinato-purpose")
    if declared is not None:
        try:
            return Purpose(declared.decode("latin-1"))
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
    """Return `request_kind` from Codex' turn metadata, a JSON header that may exceed other headers' limit; "" if there is none."""
    try:
        fields = json.loads(metadata)
    except (ValueError, RecursionError):
        return ""
    kind = fields.get("request_kind") if isinstance(fields, dict) else None
    return kind if isinstance(kind, str) else ""


def _uses_tools(conversation: Conversation) -> bool:
    return bool(conversation.callable_tools) or any(message.calls for message in conversation.messages)


# ---------------------------------------------------------------- the caller


_LOOK_S = 0.05
_LEFT_MS = re.compile(r"[0-9]{1,9}")  # at most eleven days


class Loading(Unavailable):
    """No weights are loaded yet."""

    retry_after_s = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller as declared or, if `verified`, as proven. `until`: deadline for the end of sampling, by `time.monotonic`; None: no
    deadline.

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


class Senders:
    """Reads callers from headers and bodies, and chooses the weights that answer them."""

    def __init__(self, parts: Parts, choices: ConsentChoices) -> None:
        self._parts, self._choices = parts, choices

    def caller(self, exchange: Exchange, who: Principal, user: str | None, *, store: bool | None) -> Caller:
        """Return the caller of a request; `user` and `store` are the body's. Raises BadRequest, Unauthorized."""
        user = user or exchange.text("X-Ostinato-User") or ANONYMOUS
        signature = exchange.text("X-Ostinato-User-Signature")
        if signature is not None:
            if user == ANONYMOUS:
                raise Unauthorized("X-Ostinato-User-Signature without a user; name the user that was signed.")
            self._parts.users.check(who.tenant, user, signature, self._parts.clock())
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
            until=_deadline(exchange, slot),
            consent=self._consent(exchange, (who.tenant, user), slot, store),
        )

    def _consent(self, exchange: Exchange, person: Person, slot: str | None, store: bool | None) -> Consent:
        """Return the strictest of the operator's settings, the person's choice, and the request's wish. Raises BadRequest, Unavailable.

        A call that names a slot is an evaluation or a rollout and involves no person: only the header counts.
        """
        header = exchange.text("X-Ostinato-Train")
        asked = Consent.YES if header is None else read_level(header, "X-Ostinato-Train")
        if slot is not None:
            return asked
        by_field = self._parts.privacy.store_false if store is False else Consent.YES
        # body and header may name different users: both choices count
        named = {person[1], exchange.text("X-Ostinato-User") or person[1]}
        chosen = [self._choices.of((person[0], user)) for user in named]
        return Consent.strictest(asked, by_field, self._parts.privacy.at_most(person[0]), *chosen)

    def known(self, caller: Caller) -> str:
        """Return the user's name if the operator trusts it (`serve.arm_users`), else `ANONYMOUS`."""
        return caller.user if caller.verified or self._parts.config.arm_users == "declared" else ANONYMOUS

    async def place(self, caller: Caller) -> Placement:
        """Return this caller's weights; waits up to `loading_wait_s` for the first weights to load. Raises NotFound, Loading."""
        loaded = self._parts.engine.slots()
        if caller.slot is not None:
            if caller.slot not in loaded:
                raise NotFound(
                    f"No weights are loaded in slot {caller.slot!r}; loaded: {', '.join(sorted(loaded))}.", field="slot"
                )
            arm = Arm.WORLD if caller.slot == Arm.WORLD else Arm.EVAL
            return Placement(slot=caller.slot, assignment=Assignment(arm=arm, propensity=1.0))
        if Arm.LIVE not in loaded:
            loaded = await self._loaded()
        assignment = self._parts.arms.assign(caller.tenant, self.known(caller), loaded)
        return Placement(slot=slot_of(caller.tenant, assignment.arm), assignment=assignment)

    async def _loaded(self) -> Mapping[str, PolicyVersion]:
        ends = asyncio.get_running_loop().time() + self._parts.config.loading_wait_s
        while Arm.LIVE not in (loaded := self._parts.engine.slots()):
            if asyncio.get_running_loop().time() >= ends:
                raise Loading("The model's weights are still being loaded; try again in a moment.")
            await asyncio.sleep(_LOOK_S)
        return loaded


def _deadline(exchange: Exchange, slot: str | None) -> float | None:
    """Return the deadline for the end of sampling, counted from the call's arrival. Raises BadRequest, Unauthorized.

    Only a caller that names a slot may set a deadline: turns that end at a deadline are trained on, which must not happen to a person's
    turn that a clock cut off.
    """
    header = exchange.text("X-Ostinato-Left-Ms")
    if header is None:
        return None
    if slot is None:
        raise Unauthorized(
            "X-Ostinato-Left-Ms is allowed only with X-Ostinato-Slot, which needs an admin key; leave the header out."
        )
    if not _LEFT_MS.fullmatch(header):
        raise BadRequest(
            "X-Ostinato-Left-Ms must be the time left for the answer, in whole milliseconds, 0 to 999999999.",
            field="X-Ostinato-Left-Ms",
        )
    return exchange.came_at + int(header) / 1000


def _agents_session(exchange: Exchange) -> str | None:
    """Return the session named in the headers that coding agents send anyway. Raises BadRequest."""
    return next((session for name in SESSION_HEADERS if (session := exchange.text(name)) is not None), None)


# ---------------------------------------------------------------- personalisation


_STEERED_PURPOSES = (Purpose.TASK, Purpose.SUBAGENT)  # the purposes of calls whose answers are personalised


def steering_of(
    parts: Parts,
    caller: Caller,
    placement: Placement,
    exchange: Exchange,
    purpose: Purpose,
    sampling: Sampling,
    conversation: Conversation | None,
) -> Steering | None:
    """Return the steering of an answer towards its person's preferences; None if there is none. Raises BadRequest.

    None where `_may_steer` forbids it, for a constrained format, and for auxiliary calls. None while a trial compares releases of which one
    has no steering basis: the other's users would be served better for that reason alone. An engine with static steering (a fixed bias per
    answer) also gives None for calls with tools or a `logit_bias`.
    """
    adaptation, policy = parts.adaptation, parts.engine.slots().get(placement.slot)
    if not _may_steer(caller, placement, exchange) or adaptation is None or policy is None:
        return None
    if sampling.grammar or purpose not in _STEERED_PURPOSES:
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
    """Return the styles that a person's conversation may have now, as {arm: system text}. Raises BadRequest.

    Empty where steering is not allowed (`_may_steer`), for the holdout, and for calls with tools or a constrained format, whose output a
    program reads. A summary keeps its conversation's style. While releases are compared, in a trial or with the verified one, only styles
    approved for all of them count.
    """
    styles, slots = parts.styles, parts.engine.slots()
    policy = None if placement is None else slots.get(placement.slot)
    if styles is None or placement is None or policy is None or not _may_steer(caller, placement, exchange):
        return {}
    if conversation.demand is not None or _has_tools(conversation):
        return {}
    purpose = Purpose.COMPACTION if conversation.summarises else purpose_of(exchange.headers, conversation)
    if purpose not in (*_STEERED_PURPOSES, Purpose.COMPACTION):
        return {}
    if not styles.entitled((caller.tenant, caller.user), verified=caller.verified):
        return {}
    arm = placement.assignment.arm
    return styles.texts(parts.arms.styled(caller.tenant, arm, slots), shared=arm is not Arm.BRANCH)


def wants_steering(exchange: Exchange) -> bool:
    """Return False if the call opts out of personalisation (X-Ostinato-Adapt). Raises BadRequest for a malformed header."""
    wanted = exchange.text("X-Ostinato-Adapt")
    if wanted not in (None, "on", "off"):
        raise BadRequest("X-Ostinato-Adapt takes on or off.", field="X-Ostinato-Adapt")
    return wanted != "off"


def _may_steer(caller: Caller, placement: Placement, exchange: Exchange) -> bool:
    """Return True for named callers with consent who do not opt out, except on a named slot, the control arm or an outside model.

    Raises BadRequest for a malformed X-Ostinato-Adapt header.
    """
    wanted = wants_steering(exchange)
    named = caller.user != ANONYMOUS and caller.slot is None
    agreed = wanted and caller.consent in (Consent.ADAPT, Consent.YES)
    return named and agreed and placement.assignment.arm not in (Arm.CONTROL, Arm.OUTSIDE)


def with_style(conversation: Conversation, text: str) -> Conversation:
    """Return the conversation with a text appended to the client's system prompt, or as its system prompt if it has none.

    Example: ``with_style(asked, "Answer in one sentence.").messages[0].role is Role.SYSTEM``
    """
    if not text:
        return conversation
    messages, first = conversation.messages, system_message_count(conversation)
    before = messages[first - 1].text.rstrip() if first else ""
    system = Message(role=Role.SYSTEM, text=f"{before}\n\n{text}" if before else text)
    return replace(conversation, messages=(*messages[: max(0, first - 1)], system, *messages[first:]))


def system_message_count(conversation: Conversation) -> int:
    """Return the number of system messages with which a conversation begins."""
    messages = conversation.messages
    return next((place for place, each in enumerate(messages) if each.role is not Role.SYSTEM), len(messages))


# ---------------------------------------------------------------- Auto


def asks_auto(parts: Parts, request: Request, caller: Caller) -> bool:
    """Return True if the request is for Auto, False if it is for the served model.

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
    """Draw the arm that answers this call of an episode. `failed`: arms that have failed already. Raises Unavailable if no arm is left."""
    deals = parts.deals
    assert deals is not None, "a request for Auto is refused where there is none"
    deal = deals.deal(tenant, episode, parts.arms.releases(parts.engine.slots()), failed)
    if failed:
        parts.metrics.passed_on(tenant, [*failed][-1])
    assignment = Assignment(arm=deal.release, propensity=deal.propensity)
    return Placement(slot=deal.release.value, assignment=assignment), deal


def for_auto(conversation: Conversation) -> Conversation:
    """Return the conversation for Auto's arms: without tools that must not be called, since not every arm can forbid calls."""
    demand = conversation.demand
    if demand is None or not demand.forbidden:
        return conversation
    return replace(conversation, tools=(), demand=None if demand.schema is None else replace(demand, forbidden=False))


def _has_tools(conversation: Conversation) -> bool:
    used = any(message.calls or message.role is Role.TOOL for message in conversation.messages)
    return used or bool(conversation.tools)


# ---------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRoute:
    """A route that samples, in one dialect.

    Attributes:
        path: the URL's path.
        kind: prefix of its answers' ids.
        field: the request's field that holds the prompt, for errors.
        form: the request's field that holds the schema of the answer's text, for errors; "" if the dialect has none.
        parse: parses a JSON body into a request, given the cache of the tenant's parsed items; raises BadRequest naming the field.
        writer: makes the writer of the answer. The renderer decodes tokens, if log-probabilities are wanted.
        errors: the dialect's format of errors.
        overflow: makes the stream that reports a prompt that is too long, for streamed requests; None: it is an HTTP error.
        default_tokens: the answer's token limit if the client sets none; None: the gateway's default.
        compacted: formats the whole answer to a request for a summary, in dialects that have such requests.
    """

    path: str
    kind: str
    field: str
    parse: Callable[[Any, ItemCache], Request]
    writer: Callable[[Any, Heading, Renderer | None], Writer]
    errors: ErrorShape
    overflow: Callable[[Any, Heading, ContextExceeded], str] | None = None
    default_tokens: int | None = None
    form: str = ""
    compacted: Callable[[Any, Heading, CompactionBlock, Counts, Json], bytes] | None = None

    def form_fields(self, demand: Demand | None) -> str:
        """Return the names of the request's fields from which the grammar of this demand came.

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
