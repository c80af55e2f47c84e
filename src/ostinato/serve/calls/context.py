"""A call in progress, what the engine is asked for it, and the sampling that the operator and the answer's form allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.core.conversation import Conversation, Message
from ostinato.core.errors import BadRequest
from ostinato.core.records import Purpose, Sampling, Turn
from ostinato.serve.calls.caller import Caller, CallRoute, Placement
from ostinato.serve.calls.conversations import AUTO, ConversationScope, Prompt
from ostinato.serve.config import SamplingRule
from ostinato.serve.dialects.anthropic import MessagesRequest
from ostinato.serve.dialects.dialect import Request
from ostinato.serve.dialects.responses import ResponsesRequest
from ostinato.serve.priority import Person
from ostinato.serve.scrub import Scrubber
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.watch import DisconnectWatch

_NEVER = -100.0  # the least bias that all engines take
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
        if self.placement is not None:
            return self.placement.scope(self.caller)
        return ConversationScope(
            tenant=self.caller.tenant, user=self.caller.user, arm=AUTO, episode=self.caller.episode
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """The prompt for the engine. For a conversation also the messages, needed to parse the answer, and three callbacks: `remember` stores
    each turn for follow-ups, `answered` is called when the answer has been delivered, and `left` when the client left in the middle.
    `scrubber` masked it, if anything is masked here; `secret`: it holds what keeps its turns from training.
    """

    prompt: Prompt
    purpose: Purpose = Purpose.TASK
    grammar: str = ""
    call_token: int | None = None  # to be kept from being sampled, as calls are forbidden
    conversation: Conversation | None = None
    remember: Callable[[Turn, Message, bool], None] | None = None
    answered: Callable[[Sequence[str], Sequence[Message]], None] | None = None
    left: Callable[[str, Message], None] | None = None
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


def check_logged(request: Request, max_tokens: int) -> None:
    """Refuse a body with more log-probabilities than `MOST_LOGGED`; a stream may have any number."""
    logged = (request.n or 1) * max_tokens * (1 + request.tops)
    if request.wants_logprobs and not request.stream and logged > MOST_LOGGED:
        raise BadRequest(
            f"{logged} log-probabilities (n x max_tokens x (1 + top_logprobs)) are more than the {MOST_LOGGED} that one body may have; "
            "ask for fewer, or stream.",
            field="logprobs",
        )
