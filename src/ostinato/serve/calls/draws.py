"""Which calls Auto deals, and to which arm: the draw before a call, and another draw after an outside model failed to answer."""

from __future__ import annotations

from collections.abc import Collection

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest, NotFound
from ostinato.serve.arms import Assignment
from ostinato.serve.auto.deals import Deal
from ostinato.serve.calls.sender import Caller, Placement
from ostinato.serve.dialects.dialect import Request
from ostinato.serve.dialects.openai import ChatRequest
from ostinato.serve.parts import Parts


class Draws:
    """The calls' interface to Auto; also used in a gateway without Auto, where `asked` is never true.

    Example::

        if draws.asked(request, caller):
            placement, deal = draws.draw(caller.tenant, episode)
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def asked(self, request: Request, caller: Caller) -> bool:
        """True if the request is for Auto, False if it is for the model.

        Raises NotFound for an unknown model, and BadRequest for a feature that not every arm supports.
        """
        model, deals = self._parts.model, self._parts.deals
        if deals is None or request.model != deals.name:
            if request.model == model:
                return False
            raise NotFound(f"There is no model {request.model!r}; this server has {model!r}.", field="model")
        if not isinstance(request, ChatRequest):
            raise BadRequest(f"{deals.name} answers chat completions only; ask {model!r} instead.", field="model")
        for field, wanted in (
            ("logprobs", request.wants_logprobs),
            ("continue_final_message", request.continue_final_message),
            ("tools", _uses_tools(request.conversation)),
            ("response_format", request.conversation.demand is not None),
            ("logit_bias", bool(request.logit_bias)),
            ("presence_penalty", bool(request.presence_penalty)),
            ("frequency_penalty", bool(request.frequency_penalty)),
        ):
            if wanted:
                raise BadRequest(
                    f"{field}: not every arm of {deals.name} can do it; ask {model!r} instead.", field=field
                )
        if caller.slot is not None:
            raise BadRequest(f"X-Ostinato-Slot names a slot, and {deals.name} draws one; leave one out.", field="model")
        return True

    def draw(self, tenant: str, episode: str, failed: Collection[str]) -> tuple[Placement, Deal]:
        """The arm that answers this call of an episode; `failed` are the arms that could not. Raises Unavailable if no arm is left."""
        deals = self._parts.deals
        assert deals is not None, "a request for Auto is refused where there is none"
        releases = self._parts.arms.releases(self._parts.engine.slots())
        deal = deals.deal(tenant, episode, releases, failed)
        if failed:
            self._parts.metrics.passed_on(tenant, [*failed][-1])
        assignment = Assignment(arm=deal.release, propensity=deal.propensity)
        return Placement(slot=deal.release.value, assignment=assignment), deal


def _uses_tools(conversation: Conversation) -> bool:
    told = any(message.calls or message.role is Role.TOOL for message in conversation.messages)
    return told or bool(conversation.tools)
