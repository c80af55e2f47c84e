"""The server's read-only routes about itself: models, health, metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ostinato.core.errors import NotFound
from ostinato.core.records import Arm
from ostinato.serve.dialects.openai_reply import json_bytes
from ostinato.serve.parts import Parts
from ostinato.serve.wire.exchange import Exchange

# vLLM's, OpenRouter's, Groq's, Mistral's and Anthropic's
_CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class About:
    """The handlers of the read-only routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        names = [parts.model] + ([] if parts.deals is None else [parts.deals.name])
        context = min(parts.renderer.context, parts.engine.capabilities().context)
        self._cards = {name: _card(name, parts.clock(), context) for name in names}

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        self._parts.keys.identify(exchange.headers)
        names = list(self._cards)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
        await exchange.reply(200, json_bytes({"object": "list", "data": list(self._cards.values()), **pages}))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model}`."""
        self._parts.keys.identify(exchange.headers)
        name = exchange.path.removeprefix("/v1/models/")
        card = self._cards.get(name)
        if card is None:
            known = " and ".join(map(repr, self._cards))
            raise NotFound(f"There is no model {name[:200]!r}; this server has {known}.", field="model")
        await exchange.reply(200, json_bytes(card))

    async def health(self, exchange: Exchange) -> None:
        """`GET /health`: 200 when calls can be answered, else 503. The model, the slots and the reason need a key, if there are any."""
        loaded = self._parts.engine.slots()
        slots = {name: {"number": policy.number, "hash": policy.hash} for name, policy in loaded.items()}
        status, body = "ready", {"model": self._parts.model, "slots": slots}
        if Arm.LIVE not in slots:
            status = "loading"
        elif failure := self._parts.writes.failing():
            status = "failing"
            body["reason"] = (
                f"The log took no write ({failure}), so no call can be answered; the server's output says why."
            )
        told = body if self._parts.keys.knows(exchange.headers) else {}
        await exchange.reply(200 if status == "ready" else 503, json_bytes({"status": status, **told}))

    async def numbers(self, exchange: Exchange) -> None:
        """`GET /metrics`, for Prometheus: all metrics for an operator, with the metrics key, or if no keys are configured; else only the
        tenant's own.
        """
        keys = self._parts.keys
        tenant = None
        if not keys.may_scrape(exchange.headers):
            who = keys.identify(exchange.headers)
            tenant = None if who.admin or keys.open else who.tenant
        page = self._parts.metrics.page(tenant)
        await exchange.reply(200, page, kind=_PROMETHEUS)


def _card(name: str, made: float, context: int) -> dict[str, Any]:
    """A model as the model lists of OpenAI and Anthropic describe it, and under the other names by which agents look for its context."""
    return {
        "id": name,
        "object": "model",
        "created": int(made),
        "owned_by": "ostinato",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(made), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        **dict.fromkeys(_CONTEXT_NAMES, context),
    }
