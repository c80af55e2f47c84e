"""A call on its way from the HTTP route to the engine: the caller, the request, and the callbacks for its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.core.conversation import Conversation, Message
from ostinato.core.records import Purpose, Turn
from ostinato.serve.calls.routes import CallRoute
from ostinato.serve.calls.sender import Caller, Placement
from ostinato.serve.calls.sessions import AUTO, Prompt, Scope
from ostinato.serve.dialects.dialect import Request
from ostinato.serve.people_first import Person
from ostinato.serve.wire.exchange import Exchange
from ostinato.serve.wire.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call in progress. `data` is its body; `placement` is None if Auto will deal once the episode is known; `person` is notified of
    tokens.
    """

    route: CallRoute
    data: bytes
    request: Request
    caller: Caller
    placement: Placement | None
    exchange: Exchange
    watch: Watch
    person: Person

    @property
    def scope(self) -> Scope:
        """The conversations that may be continued."""
        if self.placement is not None:
            return self.placement.scope(self.caller)
        return Scope(tenant=self.caller.tenant, user=self.caller.user, arm=AUTO, episode=self.caller.episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The prompt for the engine. For a conversation also the messages, needed to parse the answer, and two callbacks: `remember` stores
    each turn for follow-ups, and `answered` is called when the answer has been delivered.
    """

    prompt: Prompt
    purpose: Purpose = Purpose.TASK
    grammar: str = ""
    conversation: Conversation | None = None
    remember: Callable[[Turn, Message, bool], None] | None = None
    answered: Callable[[Sequence[str], Sequence[Message]], None] | None = None
