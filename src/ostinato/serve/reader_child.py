"""The helper process for long requests: validates, renders and tokenises what the gateway sends, one request after the other.

It computes the same functions of the same bytes as the gateway would. Messages cross two pipes, each as a head and a body of declared
length. The helper has no keys, no log and no conversations, and keeps nothing between two requests.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ostinato.core.conversation import Conversation, Message
from ostinato.core.errors import BadRequest, NotFound, TooLarge
from ostinato.core.interpreter import keep_heaps_small
from ostinato.core.seams import Renderer
from ostinato.serve.dialects.anthropic import parse_count, parse_messages
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.items import FoundItem, ItemCache, ItemReader
from ostinato.serve.dialects.openai import parse_chat, parse_completion
from ostinato.serve.dialects.responses import parse_compact, parse_responses
from ostinato.serve.feedback.intake import count_events, parse_feedback
from ostinato.serve.wire.body import parse_json

GROWTH_BYTES = 192 << 20
"""Growth of the helper's memory after which a new helper replaces it. Four times as much ends it at once."""
ITEMS = ("messages", "input")
"""The fields whose items agents repeat with every call; their items are parsed through a cache."""
SIZES = struct.Struct(">II")  # of a head and a body
READY = b"ready"
NO_MEMORY = 86  # exit code after a request that took too much memory
_NICE = 10  # priority below the engine and the event loop
_T = TypeVar("_T")
BODY_PARSERS: dict[str, Callable[[Any, ItemCache], Any]] = {
    parse.__name__: parse
    for parse in (parse_chat, parse_completion, parse_messages, parse_count, parse_responses, parse_compact)
}
REFUSALS: dict[str, type[BadRequest]] = {each.__name__: each for each in (BadRequest, TooLarge, NotFound)}

# ---------------------------------------------------------------- messages between gateway and helper


class ReaderJob(msgspec.Struct, omit_defaults=True):
    """A request about the body that follows. `turn`: echoed by the answer; `limits`: JSON depth and values; `known`: for `follow`, the
    number of leading messages up to the stored turn's answer; `most`: for `count`, the characters up to which the prompt is tokenised.
    """

    name: str
    turn: int = 0
    parser: str = ""
    limits: tuple[int, int] = (0, 0)
    hashed: bool = False
    known: int = 0
    most: int = 0
    tenant: str = ""
    now: float = 0.0


class ReaderAnswer(msgspec.Struct, omit_defaults=True):
    """The helper's answer. `refusal`: the error's class, text and field; `unread`: the gateway must parse the body itself; `grown`: the
    helper should be replaced.
    """

    refusal: tuple[str, str, str | None] | None = None
    unread: bool = False
    grown: bool = False
    turn: int = 0
    number: int = 0
    chars: int = 0


class ReaderHello(msgspec.Struct):
    """The first message to the helper. `cpu_s`, `longest_s`: limits per request, in seconds."""

    renderer: str
    model: str
    cpu_s: float
    longest_s: float


_JOB, _CONVERSATION = msgspec.json.Decoder(ReaderJob), msgspec.json.Decoder(Conversation)


def read_body(
    parse: Callable[[Any, ItemCache], _T], data: bytes, items: ItemCache, limits: tuple[int, int], value: Any = None
) -> _T:
    """Parse a body with a dialect's parser; its items are parsed through `items`. `limits`: JSON depth and values; `value`: the body as
    JSON, if it is parsed already. Raises BadRequest, TooLarge.
    """
    depth, values = limits
    try:
        return parse(parse_json(data, depth=depth, values=values, unread=ITEMS) if value is None else value, items)
    except BadRequest:
        raise
    except ValueError:
        parse_json(data, depth=depth, values=values)  # raises an error that locates what is malformed
        raise


# ---------------------------------------------------------------- the helper's side


class _RecordingItems(ItemCache):
    """Parses every item and records the results in order; None for an item that only the gateway can process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[FoundItem | None] = []

    def read(
        self, reader: ItemReader, item: Any, where: str, omissions: Omissions, found: FoundItem | None = None
    ) -> Sequence[Message]:
        own, at = Omissions(), len(self.found)
        self.found.append(None)
        messages = tuple(super().read(reader, item, where, own))
        for word in own.words:
            omissions.add(word)
        if all(type(message) is Message for message in messages):
            self.found[at] = messages, tuple(own.words)
        return messages


def answer(job: ReaderJob, body: bytes, renderer: Renderer) -> tuple[ReaderAnswer, bytes]:
    """Return the answer to a job. Pure."""
    try:
        return _WORK[job.name](job, body, renderer)
    except BadRequest as error:
        if type(error).__name__ not in REFUSALS:
            return ReaderAnswer(unread=True), b""
        return ReaderAnswer(refusal=(type(error).__name__, str(error), error.field)), b""


def _read(job: ReaderJob, body: bytes, renderer: Renderer) -> tuple[ReaderAnswer, bytes]:
    items = _RecordingItems()
    found = read_body(BODY_PARSERS[job.parser], body, items, job.limits)
    conversation = getattr(found, "conversation", None)
    if job.hashed and isinstance(conversation, Conversation):
        conversation.compute_digests()
    return ReaderAnswer(), msgspec.json.encode(items.found)


def _count(job: ReaderJob, body: bytes, renderer: Renderer) -> tuple[ReaderAnswer, bytes]:
    request = read_body(parse_count, body, ItemCache(), job.limits)
    if request.context_management is not None:
        return ReaderAnswer(unread=True), b""
    chars = request.conversation.chars
    return ReaderAnswer(chars=chars, number=len(renderer.chat(request.conversation)) if chars <= job.most else 0), b""


def _ids(ids: list[int]) -> tuple[ReaderAnswer, bytes]:
    return ReaderAnswer(), array("i", ids).tobytes()


def _feedback(job: ReaderJob, body: bytes, renderer: Renderer) -> tuple[ReaderAnswer, bytes]:
    value = parse_json(body, depth=job.limits[0], values=job.limits[1])
    number = count_events(value)
    try:
        signals = parse_feedback(value, tenant=job.tenant, now=job.now)
    except (BadRequest, TooLarge) as error:
        return ReaderAnswer(number=number, refusal=(type(error).__name__, str(error), error.field)), b""
    # `chars` is 1 for a list
    return ReaderAnswer(number=number, chars=int(isinstance(value, list))), msgspec.json.encode(signals)


_WORK: dict[str, Callable[[ReaderJob, bytes, Renderer], tuple[ReaderAnswer, bytes]]] = {
    "read": _read,
    "count": _count,
    "chat": lambda job, body, renderer: _ids(renderer.chat(_CONVERSATION.decode(body))),
    "follow": lambda job, body, renderer: _ids(renderer.follow_up(_CONVERSATION.decode(body), job.known)),
    "encode": lambda job, body, renderer: _ids(renderer.encode(body.decode())),
    "feedback": _feedback,
}


def main() -> None:
    """Answer requests until the input closes. A request that exceeds a limit on time or memory ends the process."""
    keep_heaps_small()
    requests, replies = os.dup(0), os.dup(1)
    threading.Thread(target=_exit_with, args=(requests,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.modules["torch"] = cast("Any", None)  # tokenizers work without it, and it takes 200 MB
    hello = msgspec.json.decode(_received(requests)[0], type=ReaderHello)
    module, _, name = hello.renderer.partition(":")
    renderer = cast("Renderer", getattr(importlib.import_module(module), name)(Path(hello.model)))
    baseline, data_limit = _memory(_RESIDENT), _memory(_DATA) + 4 * GROWTH_BYTES
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (data_limit if hard_limit == resource.RLIM_INFINITY else min(data_limit, hard_limit), hard_limit),
    )
    os.write(replies, READY)
    os.nice(_NICE)
    while True:
        try:
            head, body = _received(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, hello.longest_s)
        signal.setitimer(signal.ITIMER_PROF, hello.cpu_s)
        job = _JOB.decode(head)
        reply, reply_body = answer(job, body, renderer)
        reply.turn = job.turn
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply.grown = _memory(_RESIDENT) > baseline + GROWTH_BYTES
        _send(replies, msgspec.json.encode(reply), reply_body)


def _exit_with(requests: int) -> None:
    """Exit the process, whatever it is doing, once the gateway's end of the pipe is closed. Runs on its own thread."""
    waiting = select.poll()
    waiting.register(requests, 0)  # a hang-up is always reported
    waiting.poll()
    os._exit(0)


_RESIDENT, _DATA = 1, 5  # columns of /proc/self/statm


def _memory(place: int) -> int:
    """Return this process's memory of one kind, in bytes."""
    return int(Path("/proc/self/statm").read_bytes().split()[place]) * resource.getpagesize()


def _received(file: int) -> tuple[bytes, bytes]:
    """Receive a head and a body. Raises EOFError."""
    sizes = SIZES.unpack(_exactly(file, SIZES.size))
    return _exactly(file, sizes[0]), _exactly(file, sizes[1])


def _exactly(file: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(file, size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _send(file: int, head: bytes, body: bytes) -> None:
    left = memoryview(SIZES.pack(len(head), len(body)) + head + body)
    while left:
        left = left[os.write(file, left) :]


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(NO_MEMORY)
