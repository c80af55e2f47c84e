"""The routes that sample: how each parses a request and shapes its answer. Everything else about a call is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostinato.core.conversation import Demand
from ostinato.core.seams import Renderer
from ostinato.serve.dialects import anthropic, openai_reply, responses
from ostinato.serve.dialects.dialect import ContextExceeded, ErrorShape, Heading, Request, Writer
from ostinato.serve.dialects.items import ReadItems
from ostinato.serve.dialects.openai import parse_chat, parse_completion


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

    def form_fields(self, demand: Demand | None) -> str:
        """The fields of a request that may hold the grammar of this demand.

        Example: ``"response_format"``, ``"tools"``, or both if the answer may be either.
        """
        if demand is None:
            return ""
        return " or ".join([self.form] * (demand.schema is not None) + ["tools"] * bool(demand.calls))


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
        writer=lambda request, heading, renderer: anthropic.Messages(heading),
        errors=anthropic.ERRORS,
    ),
    CallRoute(
        path="/v1/responses",
        kind="resp",
        field="input",
        form="text.format",
        parse=responses.parse_responses,
        writer=lambda request, heading, renderer: responses.Responses(heading, request.offered, request.repeated),
        errors=responses.ERRORS,
        overflow=lambda request, heading, error: responses.Responses(
            heading, request.offered, request.repeated
        ).refused(error),
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
