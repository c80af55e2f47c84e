"""Offloads long requests to a helper process, both ends: bodies are validated, rendered and tokenised beside the gateway's interpreter.

Python runs one thread of a process at a time, so that a long request read on a thread takes turns with the engine and the event loop.
The helper computes the same functions of the same bytes. What it says crosses two pipes, each message as a head and a body of declared
length. It has no keys, no log and no conversations, and keeps nothing between two requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from ostinato.core.conversation import PART_CHARS, Conversation, Message
from ostinato.core.errors import BadRequest, NotFound, TooLarge, Unavailable
from ostinato.core.interpreter import keep_heaps_small
from ostinato.core.records import Signal
from ostinato.core.seams import AnswerReader, Renderer
from ostinato.serve.dialects.anthropic import parse_count, parse_messages
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.items import FoundItem, ItemReader, ReadItems
from ostinato.serve.dialects.openai import parse_chat, parse_completion
from ostinato.serve.dialects.responses import parse_compact, parse_responses
from ostinato.serve.feedback.intake import count_events, parse_feedback
from ostinato.serve.wire.body import parse_json

LONG_CHARS = 16_384
"""Characters of a prompt, or bytes of a body, from which on the helper reads it: 3 ms that it saves the others, for a hop of 0.5."""
LONG_HISTORY_CHARS = 131_072
"""The same for what follows a stored turn, of which only the new messages are tokenised."""
CPU_S, LONGEST_S = 20.0, 300.0
"""Processor time that one request may take of the helper, and time in all: then it ends, and the request is refused. On a busy machine the
helper, which steps back, gets a tenth of a core.
"""
START_S = 60.0
"""How long a start may take, during which long requests are read in the gateway."""
GROWTH_BYTES = 192 << 20
"""How much the helper may grow before another takes its place; four times that ends it in the middle."""
ITEMS = ("messages", "input")
"""The fields whose items agents repeat with every call; each item is read once."""
_NICE = 10  # the engine and the event loop come first
_CROWDED = 20_000  # values of a body, roughly, from which on nothing of it is looked at here
_FEW = 256  # and up to which a body of any length is read in less time than the hop takes
_SLACK_S = 10.0  # after which it is ended from outside
_TRIES, _AGAIN_S = 3, 60.0  # to start it, and how long it is left alone then
_NOT_ITS_OWN = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals that do not end it, but its gateway, which still has calls to answer then; it ends with its input."""
_SIZES = struct.Struct(">II")
_READY = b"ready"
_ABSENT = "the process that reads long requests does not start, so they are read beside the engine and slow it down"
_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_PARSERS: dict[str, Callable[[Any, ReadItems], Any]] = {
    parse.__name__: parse
    for parse in (parse_chat, parse_completion, parse_messages, parse_count, parse_responses, parse_compact)
}
_REFUSALS: dict[str, type[BadRequest]] = {each.__name__: each for each in (BadRequest, TooLarge, NotFound)}

# ---------------------------------------------------------------- messages between both ends


class _Job(msgspec.Struct, omit_defaults=True):
    """What the helper is asked about the body that follows. `turn`: the answer repeats it; `limits`: of depth and values; `known`: of
    `follow`; `most`: of `count`, in characters.
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


class _Said(msgspec.Struct, omit_defaults=True):
    """What it says. `refusal`: the error's class, text and field; `unread`: the gateway must read the body itself; `grown`: another should
    take its place.
    """

    refusal: tuple[str, str, str | None] | None = None
    unread: bool = False
    grown: bool = False
    turn: int = 0
    number: int = 0
    chars: int = 0


class _Hello(msgspec.Struct):
    """What it is told first. `cpu_s`, `longest_s`: of one request, in seconds."""

    renderer: str
    model: str
    cpu_s: float
    longest_s: float


_JOB, _SAID = msgspec.json.Decoder(_Job), msgspec.json.Decoder(_Said)
_FOUND = msgspec.json.Decoder(list[FoundItem | None])
_CONVERSATION = msgspec.json.Decoder(Conversation)
_SIGNALS = msgspec.json.Decoder(list[Signal])


def read_body(
    parse: Callable[[Any, ReadItems], _T], data: bytes, items: ReadItems, limits: tuple[int, int], value: Any = None
) -> _T:
    """The request that a parser of a dialect finds in a body, its items read through `items`. `limits`: of depth and
    values; `value`: the body as JSON, if it is parsed already. Raises BadRequest, TooLarge.
    """
    depth, values = limits
    try:
        return parse(parse_json(data, depth=depth, values=values, unread=ITEMS) if value is None else value, items)
    except BadRequest:
        raise
    except ValueError:
        parse_json(data, depth=depth, values=values)  # tells what is malformed, and where
        raise


# ---------------------------------------------------------------- the helper's end


class _Recorded(ReadItems):
    """Reads every item, and records in order what was found; None for what only the gateway can make of it."""

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


def answer(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    """What a job comes to. Pure."""
    try:
        return _WORK[job.name](job, body, renderer)
    except BadRequest as error:
        if type(error).__name__ not in _REFUSALS:
            return _Said(unread=True), b""
        return _Said(refusal=(type(error).__name__, str(error), error.field)), b""


def _read(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    items = _Recorded()
    found = read_body(_PARSERS[job.parser], body, items, job.limits)
    conversation = getattr(found, "conversation", None)
    if job.hashed and isinstance(conversation, Conversation):
        conversation.compute_digests()
    return _Said(), msgspec.json.encode(items.found)


def _count(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    request = read_body(parse_count, body, ReadItems(), job.limits)
    if request.context_management is not None:
        return _Said(unread=True), b""
    chars = request.conversation.chars
    return _Said(chars=chars, number=len(renderer.chat(request.conversation)) if chars <= job.most else 0), b""


def _chat(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    return _Said(), array("i", renderer.chat(_CONVERSATION.decode(body))).tobytes()


def _follow(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    return _Said(), array("i", renderer.follow_up(_CONVERSATION.decode(body), job.known)).tobytes()


def _encode(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    return _Said(), array("i", renderer.encode(body.decode())).tobytes()


def _feedback(job: _Job, body: bytes, renderer: Renderer) -> tuple[_Said, bytes]:
    value = parse_json(body, depth=job.limits[0], values=job.limits[1])
    number = count_events(value)
    try:
        signals = parse_feedback(value, tenant=job.tenant, now=job.now)
    except (BadRequest, TooLarge) as error:
        return _Said(number=number, refusal=(type(error).__name__, str(error), error.field)), b""
    # `chars`: 1 for a list
    return _Said(number=number, chars=int(isinstance(value, list))), msgspec.json.encode(signals)


_WORK: dict[str, Callable[[_Job, bytes, Renderer], tuple[_Said, bytes]]] = {
    "read": _read,
    "count": _count,
    "chat": _chat,
    "follow": _follow,
    "encode": _encode,
    "feedback": _feedback,
}


def main() -> None:
    """Answer until the input ends. A request that takes too long, or too much memory, ends the process."""
    keep_heaps_small()
    asks, says = os.dup(0), os.dup(1)
    threading.Thread(target=_end_with, args=(asks,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.modules["torch"] = cast("Any", None)  # tokenizers do without, and it takes 200 MB
    hello = msgspec.json.decode(_received(asks)[0], type=_Hello)
    module, _, name = hello.renderer.partition(":")
    renderer = cast("Renderer", getattr(importlib.import_module(module), name)(Path(hello.model)))
    small, bound = _memory(_RESIDENT), _memory(_DATA) + 4 * GROWTH_BYTES
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))
    os.write(says, _READY)
    os.nice(_NICE)
    while True:
        try:
            head, body = _received(asks)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, hello.longest_s)
        signal.setitimer(signal.ITIMER_PROF, hello.cpu_s)
        job = _JOB.decode(head)
        said, found = answer(job, body, renderer)
        said.turn = job.turn
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        said.grown = _memory(_RESIDENT) > small + GROWTH_BYTES
        _send(says, msgspec.json.encode(said), found)


def _end_with(asks: int) -> None:
    """End this process in the middle of whatever it does once the gateway's end of the pipe is closed. For a thread of its own."""
    waiting = select.poll()
    waiting.register(asks, 0)  # a pipe's other end that is closed is told always
    waiting.poll()
    os._exit(0)


_RESIDENT, _DATA = 1, 5  # their places in /proc/self/statm


def _memory(place: int) -> int:
    """Bytes of this process's memory of one kind."""
    return int(Path("/proc/self/statm").read_bytes().split()[place]) * resource.getpagesize()


def _received(file: int) -> tuple[bytes, bytes]:
    """A head and a body. Raises EOFError."""
    sizes = _SIZES.unpack(_exactly(file, _SIZES.size))
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
    left = memoryview(_SIZES.pack(len(head), len(body)) + head + body)
    while left:
        left = left[os.write(file, left) :]


# ---------------------------------------------------------------- the gateway's end


class Counted(NamedTuple):
    """The length of a prompt to be counted, in characters and in tokens; 0 tokens if it has too many characters."""

    chars: int
    tokens: int


class ReadEvents(NamedTuple):
    """A body of feedback: how many events it has, and its signals or why they are refused; `listed`: it is a list."""

    events: int
    listed: bool
    signals: Sequence[Signal]
    refused: BadRequest | None


class RequestReader:
    """The helper as the gateway sees it. Its methods block: call them on the thread of long requests. Thread-safe.

    They return None for what must be read here: what is short, and everything while the helper starts or cannot be started. They raise
    Unavailable if it ended while it read: killed, or because the request took too long. `failures` counts how often it failed; `trouble`
    says why it did last, "" since it has answered again.

    Args:
        model: the model's directory.
        depth, values: the limits of a JSON body.
        renderer: "module:class" of what renders and tokenises there, made of the directory.
        cpu_s, longest_s: seconds that one request may take, of the processor and in all.
        start_s: seconds that a start may take.

    Example: ``reader = RequestReader(path, depth=64, values=100_000); await reader.start(); ids = reader.chat(conversation)``
    """

    def __init__(
        self,
        model: Path,
        *,
        depth: int,
        values: int,
        renderer: str = "ostinato.model.renderer:HFRenderer",
        cpu_s: float = CPU_S,
        longest_s: float = LONGEST_S,
        start_s: float = START_S,
    ) -> None:
        self._hello = _Hello(renderer=renderer, model=str(model), cpu_s=cpu_s, longest_s=longest_s)
        self._limits = (depth, values)
        self._longest_s, self._start_s = longest_s, start_s
        self._lock = threading.Lock()
        self._current: _Process | None = None
        self._starting: _Process | None = None
        self._turn, self._tries, self._not_before, self._closed = 0, 0, 0.0, False
        self.failures, self.trouble = 0, ""

    @property
    def pid(self) -> int | None:
        """The process id of the helper that is asked; None while there is none."""
        return None if self._current is None else self._current.pid

    async def start(self) -> None:
        """Start the helper, without waiting until it can be asked."""

        def begin() -> None:
            with self._lock:
                self._look()

        await asyncio.to_thread(begin)

    async def close(self) -> None:
        """End the helper, and start no other; whoever waits for it gets Unavailable."""
        self._closed = True
        for each in (self._current, self._starting):
            if each is not None:
                each.kill()

        def reap() -> None:
            with self._lock:
                for each in (self._current, self._starting):
                    if each is not None:
                        each.end()
                self._current = self._starting = None

        await asyncio.to_thread(reap)

    # ------------------------------------------------------------ what it is asked

    def ahead(self, parse: Callable[..., Any], data: bytes, items: ReadItems, value: Any, *, hashed: bool) -> ReadItems:
        """The items of a body, read by the helper if they are long and new: pass them to the parser in the place of `items`.

        `value`: the body as JSON, None if it is not parsed yet; `hashed`: digests are computed, too. Raises BadRequest, TooLarge,
        Unavailable.
        """
        if parse.__name__ not in _PARSERS or _values(data) < _FEW:
            return items
        if value is not None and _news(value, items) < LONG_CHARS:
            return items
        found = self._asked(_Job(name="read", parser=parse.__name__, hashed=hashed, limits=self._limits), data)
        return items if found is None else _Ahead(items, _FOUND.decode(found[1]))

    def count(self, data: bytes, most: int) -> Counted | None:
        """The length of a prompt to be counted, which has at most `most` characters. Raises BadRequest, TooLarge, Unavailable."""
        if len(data) < LONG_CHARS:
            return None
        found = self._asked(_Job(name="count", most=most, limits=self._limits), data)
        return None if found is None else Counted(found[0].chars, found[0].number)

    def chat(self, conversation: Conversation) -> list[int] | None:
        """The ids of a long conversation (`Renderer.chat`). Raises BadRequest, Unavailable."""
        return self._ids(_Job(name="chat"), conversation)

    def follow_up(self, conversation: Conversation, known: int) -> list[int] | None:
        """The ids that follow a turn in a long conversation (`Renderer.follow_up`). Raises BadRequest, Unavailable."""
        return self._ids(_Job(name="follow", known=known), conversation, LONG_HISTORY_CHARS)

    def encode(self, text: str) -> list[int] | None:
        """The ids of a long text (`Renderer.encode`). Raises BadRequest, Unavailable."""
        if len(text) < LONG_CHARS:
            return None
        try:
            body = text.encode()
        except UnicodeEncodeError:  # which is refused here
            return None
        return _ids_of(self._asked(_Job(name="encode"), body))

    def feedback(self, data: bytes, tenant: str, now: float) -> ReadEvents | None:
        """The events in a body (`parse_feedback`). Raises BadRequest, TooLarge for a body that is no JSON; Unavailable."""
        if len(data) < LONG_CHARS:
            return None
        found = self._exchanged(_Job(name="feedback", tenant=tenant, now=now, limits=self._limits), data)
        if found is None or found[0].unread:
            return None
        said, body = found
        if said.refusal is None:
            return ReadEvents(said.number, bool(said.chars), _SIGNALS.decode(body), None)
        error = _refused(said)
        if not said.number:  # it was no JSON
            raise error
        return ReadEvents(said.number, False, (), error)

    def _ids(self, job: _Job, conversation: Conversation, least: int = LONG_CHARS) -> list[int] | None:
        if conversation.chars + PART_CHARS * conversation.parts < least:
            return None
        try:
            body = msgspec.json.encode(conversation)
        except UnicodeEncodeError:  # half of a surrogate pair, which is refused here
            return None
        return _ids_of(self._asked(job, body))

    def _asked(self, job: _Job, body: bytes) -> tuple[_Said, bytes] | None:
        found = self._exchanged(job, body)
        if found is None or found[0].unread:
            return None
        if found[0].refusal is not None:
            raise _refused(found[0])
        return found

    # ------------------------------------------------------------ the process

    def _exchanged(self, job: _Job, body: bytes) -> tuple[_Said, bytes] | None:
        with self._lock:
            self._look()
            process = self._current
            if process is None:
                return None
            self._turn += 1
            job.turn = self._turn
            try:
                head, found = process.ask(msgspec.json.encode(job), body, self._longest_s + _SLACK_S)
                said = _SAID.decode(head)
                if said.turn != job.turn:
                    raise _OutOfStep
            except EOFError:
                why = "it was killed, or the request took more of its time or memory than one may"
            except TimeoutError:
                why = f"it did not answer within {self._longest_s + _SLACK_S:g} s"
            except _OutOfStep:
                why = "what it said answers another"
            except BaseException:  # such as for want of memory: what is left in the pipes would answer the next request
                self._replace()
                raise
            else:
                self.trouble = ""
                if said.grown and self._starting is None:
                    self._begin()
                return said, found
            self._failed(f"the process that reads long requests ended while it read one of {len(body)} bytes: {why}")
            self._replace()
        raise Unavailable("The process that reads long requests ended while it read this one; send it again.")

    def _look(self) -> None:
        """See what became of the helpers, without waiting: one that is ready takes its place, for one that ended another starts."""
        if self._current is not None and self._current.ended():  # while nobody asked it
            self._replace()
        starting = self._starting
        if starting is None:
            if self._current is None:
                self._begin()
            return
        said = starting.first_word()
        if said == _READY:
            if self._current is not None:
                self._current.end()
            self._current, self._starting, self._tries = starting, None, 0
            return
        late = said is None and time.monotonic() > starting.since + self._start_s
        if said is None and not late:
            return
        starting.end()
        self._starting, self._tries = None, self._tries + 1
        if late or self._tries >= _TRIES:
            self._left_alone(f"{_ABSENT}; the gateway's output says why")
        else:
            self._begin()

    def _replace(self) -> None:
        """End the helper that is asked, and start another unless one starts already."""
        if self._current is not None:
            self._current.end()
            self._current = None
        if self._starting is None:
            self._begin()

    def _begin(self) -> None:
        if self._closed or time.monotonic() < self._not_before:
            return
        try:
            self._starting = _Process(self._hello, self)
        except OSError as error:
            self._left_alone(f"{_ABSENT}: {error}")
        if self._closed and self._starting is not None:  # meanwhile
            self._starting.kill()

    def _left_alone(self, why: str) -> None:
        self._tries, self._not_before = 0, time.monotonic() + _AGAIN_S
        self._failed(why)

    def _failed(self, why: str) -> None:
        self.failures, self.trouble = self.failures + 1, why
        _LOG.error("%s", why)


class _OutOfStep(Exception):
    """A helper's answer belongs to another request."""


class _Process:
    """A helper and its pipes, ended with `owner` at the latest. `since`: when it was started, on the monotonic clock. Raises OSError."""

    def __init__(self, hello: _Hello, owner: object) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_ITS_OWN)  # which the process inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ostinato.serve.reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid, self.since = self._process.pid, time.monotonic()
        self.kill = weakref.finalize(owner, self._process.kill)
        self._asks, self._says = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._asks, False)
        word = msgspec.json.encode(hello)
        with contextlib.suppress(BrokenPipeError):  # its end is noticed later
            os.write(self._asks, _SIZES.pack(len(word), 0) + word)  # a pipe holds as much

    def ended(self) -> bool:
        """True once it has ended."""
        return self._process.poll() is not None

    def end(self) -> int:
        """End it and wait until it has; returns its exit code, or minus the number of the signal that ended it before."""
        self.kill()
        with contextlib.suppress(OSError), self._process:  # closes its pipes, and waits
            self._process.kill()
        return self._process.returncode

    def first_word(self) -> bytes | None:
        """What it says before it is asked anything; None so far, b"" if it ended."""
        waiting = select.poll()
        waiting.register(self._says, select.POLLIN)
        return os.read(self._says, 1 << 10) if waiting.poll(0) else None

    def ask(self, head: bytes, body: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Send a head and a body, and receive what is said to them. Raises EOFError if it ends, TimeoutError."""
        until = time.monotonic() + seconds
        left: list[memoryview] = [memoryview(part) for part in (_SIZES.pack(len(head), len(body)) + head, body) if part]
        data, size = bytearray(), _SIZES.size
        waiting = select.poll()
        waiting.register(self._says, select.POLLIN)
        waiting.register(self._asks, select.POLLOUT)
        while len(data) < size:
            ready = dict(waiting.poll(max(0, int(1000 * (until - time.monotonic())))))
            if not ready:
                raise TimeoutError
            if self._asks in ready:
                try:
                    left[0] = left[0][os.write(self._asks, left[0]) :]
                except OSError:
                    raise EOFError from None
                left = left if left[0] else left[1:]
                if not left:
                    waiting.unregister(self._asks)
            if self._says in ready:
                part = os.read(self._says, 1 << 20)
                if not part:
                    raise EOFError
                data += part
                if len(data) >= _SIZES.size:
                    heads, bodies = _SIZES.unpack_from(data)
                    size = _SIZES.size + heads + bodies
        heads = _SIZES.unpack_from(data)[0]
        return bytes(data[_SIZES.size : _SIZES.size + heads]), bytes(data[_SIZES.size + heads :])


def _refused(said: _Said) -> BadRequest:
    assert said.refusal is not None
    name, text, field = said.refusal
    return _REFUSALS[name](text, field=field)


def _ids_of(found: tuple[_Said, bytes] | None) -> list[int] | None:
    if found is None:
        return None
    ids = array("i")
    ids.frombytes(found[1])
    return ids.tolist()


def crowded(data: bytes) -> bool:
    """True if a body may hold so many values that even cutting it into its items takes noticeable time."""
    return len(data) >= LONG_CHARS and _values(data) > _CROWDED


def _values(data: bytes) -> int:
    """About how many values a body has, those in texts of JSON included."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _news(value: Any, items: ReadItems) -> int:
    """The bytes of a body's items that were not read before. What else it holds, such as tools, is parsed here each time."""
    lists: Iterable[Any] = value.values() if isinstance(value, dict) else ()
    return sum(items.unknown(each) for each in lists if isinstance(each, list))


class _Ahead(ReadItems):
    """A tenant's items, with what was found in those of one body, in their order."""

    def __init__(self, items: ReadItems, found: Sequence[FoundItem | None]) -> None:
        super().__init__()
        self._items, self._found = items, iter(found)

    def read(
        self, reader: ItemReader, item: Any, where: str, omissions: Omissions, found: FoundItem | None = None
    ) -> Sequence[Message]:
        return self._items.read(reader, item, where, omissions, next(self._found, None))

    def merged(self, parts: Sequence[Message]) -> Message:
        return self._items.merged(parts)


class LongRenderer:
    """What `Sessions` needs of a renderer, long conversations by the helper. Example: ``LongRenderer(renderer, reader).chat(told)``"""

    def __init__(self, renderer: Renderer, reader: RequestReader | None) -> None:
        self._renderer, self._reader = renderer, reader

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        """As `Renderer.reader`."""
        return self._renderer.reader(conversation, turn)

    def stop_ids(self) -> frozenset[int]:
        """As `Renderer.stop_ids`."""
        return self._renderer.stop_ids()

    def chat(self, conversation: Conversation) -> list[int]:
        """As `Renderer.chat`. Raises Unavailable, too."""
        found = None if self._reader is None else self._reader.chat(conversation)
        return self._renderer.chat(conversation) if found is None else found

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        """As `Renderer.follow_up`. Raises Unavailable, too."""
        found = None if self._reader is None else self._reader.follow_up(conversation, known)
        return self._renderer.follow_up(conversation, known) if found is None else found

    def encode(self, text: str) -> list[int]:
        """As `Renderer.encode`. Raises Unavailable, too."""
        found = None if self._reader is None else self._reader.encode(text)
        return self._renderer.encode(text) if found is None else found


if __name__ == "__main__":
    main()
