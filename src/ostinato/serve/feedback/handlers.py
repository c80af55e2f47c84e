"""The handler of `POST /v1/feedback`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ostinato.core.errors import Unauthorized
from ostinato.core.records import Signal
from ostinato.core.verdicts import RESERVED
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.fair_thread import PER_PARSED
from ostinato.serve.feedback.events import count_events, parse_feedback
from ostinato.serve.feedback.intake import Intake
from ostinato.serve.parts import Parts
from ostinato.serve.wire.exchange import Exchange

_EVENT = 100  # characters that a tokenizer takes in the time in which an event is checked


def _refuse_reserved(signals: Sequence[Signal]) -> None:
    """Raise Unauthorized for event names that only the rollout worker may use."""
    for signal in signals:
        if signal.name in RESERVED:
            raise Unauthorized(
                f"The event name {signal.name!r} is a simulated world's and needs an admin key; send another name."
            )


class Feedback:
    """The handler of the route."""

    def __init__(self, parts: Parts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def take(self, exchange: Exchange) -> None:
        """Take one event or a list. All are durable when the 202 is sent, which holds the status of each."""
        who = self._parts.keys.identify(exchange.headers)
        tenant = who.tenant
        quotas = self._parts.quotas
        quotas.expect_events(tenant)  # before the body is read
        body = await exchange.json(partial(quotas.count_bytes, tenant))
        quotas.count_events(tenant, count_events(body))  # before any is looked at
        parse = partial(parse_feedback, body, tenant=tenant, now=self._parts.clock())
        signals = await self._parts.thread.run(
            tenant, max(exchange.received // PER_PARSED, _EVENT * count_events(body)), parse
        )
        if not who.admin:
            _refuse_reserved(signals)
        statuses = await self._intake.take(signals)
        answers = [{"id": signal.id, "status": status.value} for signal, status in zip(signals, statuses, strict=True)]
        await exchange.reply(202, json_bytes(answers if isinstance(body, list) else answers[0]))
