"""Offloads long requests to a helper process, which validates, renders and tokenises them outside the gateway's interpreter.

Because of Python's global interpreter lock, a long request parsed on a thread would compete with the engine and the event loop. This module
is the gateway's side; the helper's is `reader_child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ostinato.core.conversation import PART_CHARS, Conversation, Message
from ostinato.core.errors import BadRequest, TooLarge, Unavailable
from ostinato.core.records import Signal
from ostinato.core.seams import AnswerReader, Renderer
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.items import FoundItem, ItemCache, ItemReader
from ostinato.serve.reader_child import (
    BODY_PARSERS,
    GROWTH_BYTES,
    NO_MEMORY,
    READY,
    REFUSALS,
    SIZES,
    ReaderAnswer,
    ReaderHello,
    ReaderJob,
)

LONG_CHARS = 16_384
"""Characters of a prompt, or bytes of a body, from which on the helper is used: it saves 3 ms here and costs 0.5 ms of transfer."""
LONG_HISTORY_CHARS = 131_072
"""The same threshold for the continuation of a stored turn, where only the new messages are tokenised."""
CPU_S, LONGEST_S = 20.0, 300.0
"""Processor time and wall time that one request may take in the helper; then the helper exits and the request is refused. The wall time is
generous because the helper has a low priority and may get a tenth of a core on a busy machine.
"""
START_S = 60.0
"""Longest start of the helper, during which long requests are parsed in the gateway."""
_MAX_VALUES_HERE = 20_000  # approximate values in a body from which on the gateway does not even split it into items
_FEW_VALUES = 256  # approximate values below which a body of any length is parsed faster than transferred
_SLACK_S = 10.0  # after the helper's own limit, until the gateway kills it
_TRIES, _AGAIN_S = 3, 60.0  # attempts to start it, and the pause after they fail
_REFUSED_S = 60.0  # how long a request that exceeded a limit is refused at once
_VARIABLES = {"PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH"} | {
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
}
_PREFIXES = ("LC_", "PYTHON")
_BLOCKED_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals that the helper blocks, so that the gateway can finish its calls first. The helper exits when its input closes."""
_ABSENT = "the process that reads long requests does not start, so they are read beside the engine and slow it down"
_LOG = logging.getLogger(__name__)
_ANSWER, _ITEMS = msgspec.json.Decoder(ReaderAnswer), msgspec.json.Decoder(list[FoundItem | None])
_SIGNALS = msgspec.json.Decoder(list[Signal])


class PromptLength(NamedTuple):
    """The length of a prompt in characters and tokens; 0 tokens if it has too many characters to be tokenised."""

    chars: int
    tokens: int


class ReadEvents(NamedTuple):
    """A parsed feedback body: the number of its events, and its signals or the reason for refusal. `listed`: the body is a list."""

    events: int
    listed: bool
    signals: Sequence[Signal]
    refused: BadRequest | None


class RequestReader:
    """The gateway's interface to the helper. Its methods block: call them on the thread for long requests. Thread-safe.

    The first long request starts the helper. Methods return None for what the gateway must parse itself: short requests, and all requests
    while the helper is starting or cannot be started. They raise TooLarge if the request exceeded a limit on time or memory, and
    Unavailable if the helper was killed while it worked on the request. `failures` and `answers` count its failures and answers; `trouble`
    is the reason of the last failure, "" once it has answered again.

    Args:
        model: the model's directory.
        depth, values: limits of a JSON body.
        renderer: "module:class" of the renderer that the helper makes from the directory.
        cpu_s, longest_s: seconds of processor time and of wall time that one request may take.
        start_s: longest start, in seconds.

    Example: ``reader = RequestReader(path, depth=64, values=100_000); ids = reader.chat(conversation)``
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
        self._hello = ReaderHello(renderer=renderer, model=str(model), cpu_s=cpu_s, longest_s=longest_s)
        self._limits = (depth, values)
        self._longest_s, self._start_s = longest_s, start_s
        self._lock = threading.Lock()
        self._current: _Process | None = None
        self._starting: _Process | None = None
        self._too_large: dict[bytes, tuple[str, float]] = {}  # digest of a request -> exceeded limit, and expiry
        self._turn, self._tries, self._not_before, self._closed = 0, 0, 0.0, False
        self.failures, self.answers, self.trouble = 0, 0, ""

    @property
    def pid(self) -> int | None:
        """The process id of the running helper; None without one."""
        return None if self._current is None else self._current.pid

    async def close(self) -> None:
        """End the helper for good; requests in progress there get Unavailable."""
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

    # ------------------------------------------------------------ requests to the helper

    def ahead(self, parse: Callable[..., Any], data: bytes, items: ItemCache, value: Any, *, hashed: bool) -> ItemCache:
        """Return the items of a body as parsed by the helper, if they are long and new; pass them to the parser in place of `items`.

        `value`: the body as JSON, or None if it is not parsed yet; `hashed`: compute digests, too. Raises BadRequest, TooLarge,
        Unavailable.
        """
        if parse.__name__ not in BODY_PARSERS or _values(data) < _FEW_VALUES:
            return items
        if value is not None and _news(value, items) < LONG_CHARS:
            return items
        reply = self._ask(ReaderJob(name="read", parser=parse.__name__, hashed=hashed, limits=self._limits), data)
        return items if reply is None else _PreparsedItems(items, _ITEMS.decode(reply[1]))

    def count(self, data: bytes, most: int) -> PromptLength | None:
        """Return the length of a prompt; one of more than `most` characters is not tokenised. Raises BadRequest, TooLarge, Unavailable."""
        if len(data) < LONG_CHARS:
            return None
        reply = self._ask(ReaderJob(name="count", most=most, limits=self._limits), data)
        return None if reply is None else PromptLength(reply[0].chars, reply[0].number)

    def chat(self, conversation: Conversation) -> list[int] | None:
        """Return the ids of a long conversation (`Renderer.chat`). Raises BadRequest, Unavailable."""
        return self._ids(ReaderJob(name="chat"), conversation)

    def follow_up(self, conversation: Conversation, known: int) -> list[int] | None:
        """Return the ids that follow a turn in a long conversation (`Renderer.follow_up`). Raises BadRequest, Unavailable."""
        return self._ids(ReaderJob(name="follow", known=known), conversation, LONG_HISTORY_CHARS)

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a long text (`Renderer.encode`). Raises BadRequest, Unavailable."""
        if len(text) < LONG_CHARS:
            return None
        try:
            body = text.encode()
        except UnicodeEncodeError:  # the gateway refuses it
            return None
        return _ids_of(self._ask(ReaderJob(name="encode"), body))

    def feedback(self, data: bytes, tenant: str, now: float) -> ReadEvents | None:
        """Parse the events in a body (`parse_feedback`). Raises BadRequest or TooLarge if the body is not JSON; Unavailable."""
        if len(data) < LONG_CHARS:
            return None
        found = self._exchange(ReaderJob(name="feedback", tenant=tenant, now=now, limits=self._limits), data)
        if found is None or found[0].unread:
            return None
        reply, body = found
        if reply.refusal is None:
            return ReadEvents(reply.number, bool(reply.chars), _SIGNALS.decode(body), None)
        error = _refused(reply)
        if not reply.number:  # it was not JSON
            raise error
        return ReadEvents(reply.number, False, (), error)

    def _ids(self, job: ReaderJob, conversation: Conversation, least: int = LONG_CHARS) -> list[int] | None:
        if conversation.chars + PART_CHARS * conversation.parts < least:
            return None
        try:
            body = msgspec.json.encode(conversation)
        except UnicodeEncodeError:  # half of a surrogate pair; the gateway refuses it
            return None
        return _ids_of(self._ask(job, body))

    def _ask(self, job: ReaderJob, body: bytes) -> tuple[ReaderAnswer, bytes] | None:
        reply = self._exchange(job, body)
        if reply is None or reply[0].unread:
            return None
        if reply[0].refusal is not None:
            raise _refused(reply[0])
        return reply

    # ------------------------------------------------------------ the process

    def _exchange(self, job: ReaderJob, body: bytes) -> tuple[ReaderAnswer, bytes] | None:
        with self._lock:
            self._look()
            self._refuse_known(job, body)
            process = self._current
            if process is None:
                return None
            self._turn += 1
            job.turn = self._turn
            try:
                head, reply_body = process.ask(msgspec.json.encode(job), body, self._longest_s + _SLACK_S)
                reply = _ANSWER.decode(head)
                if reply.turn != job.turn:
                    raise _OutOfStep
            except EOFError:
                why = "it was killed, or failed as the gateway's output says"
            except TimeoutError:
                why = f"it did not answer within {self._longest_s + _SLACK_S:g} s"
            except _OutOfStep:
                why = "its answer belongs to another request"
            except BaseException:  # such as MemoryError: data left in the pipes would answer the next request
                self._replace()
                raise
            else:
                self.answers, self.trouble = self.answers + 1, ""
                process.grown = reply.grown
                if reply.grown and self._starting is None:
                    self._begin()
                return reply, reply_body
            code = self._replace()
            # memory left by earlier requests is not this one's fault
            excess = "" if process.grown else self._excess(code)
            why = f"the request took more than {excess}" if excess else why
            self._failed(f"the process that reads long requests ended while it read one of {len(body)} bytes: {why}")
            if excess:
                self._too_large[_digest(job, body)] = excess, time.monotonic() + _REFUSED_S
                raise _too_much(excess)
        raise Unavailable("The process that reads long requests ended while it read this one; send it again.")

    def _excess(self, code: int | None) -> str:
        """Return the limit whose excess ended the helper with this exit code; "" if something else ended it."""
        memory = f"{4 * GROWTH_BYTES >> 20} MiB of memory"
        limits = {
            -signal.SIGPROF: f"{self._hello.cpu_s:g} s of processor time",
            -signal.SIGALRM: f"{self._longest_s:g} s",
            NO_MEMORY: memory,
            -signal.SIGABRT: memory,  # a tokenizer aborts when it runs out
        }
        return limits.get(code or 0, "")

    def _refuse_known(self, job: ReaderJob, body: bytes) -> None:
        """Raise TooLarge for a request that has recently exceeded a limit."""
        if not self._too_large:
            return
        now = time.monotonic()
        self._too_large = {key: known for key, known in self._too_large.items() if known[1] > now}
        excess, _ = self._too_large.get(_digest(job, body), ("", 0.0))
        if excess:
            raise _too_much(excess)

    def _look(self) -> None:
        """Update the state of the helpers without waiting: a ready one replaces the current one, and one that has ended is restarted."""
        if self._current is not None and self._current.ended():  # while it was idle
            self._replace()
        starting = self._starting
        if starting is None:
            if self._current is None:
                self._begin()
            return
        message = starting.first_message()
        if message == READY:
            if self._current is not None:
                self._current.end()
            self._current, self._starting, self._tries = starting, None, 0
            return
        late = message is None and time.monotonic() > starting.since + self._start_s
        if message is None and not late:
            return
        starting.end()
        self._starting, self._tries = None, self._tries + 1
        if late or self._tries >= _TRIES:
            self._pause_starts(f"{_ABSENT}; the gateway's output says why")
        else:
            self._begin()

    def _replace(self) -> int | None:
        """End the current helper, and start another unless one is starting. Return the exit code as `_Process.end` does."""
        code = None if self._current is None else self._current.end()
        self._current = None
        if self._starting is None:
            self._begin()
        return code

    def _begin(self) -> None:
        if self._closed or time.monotonic() < self._not_before:
            return
        try:
            self._starting = _Process(self._hello, self)
        except OSError as error:
            self._pause_starts(f"{_ABSENT}: {error}")
        if self._closed and self._starting is not None:  # `close` was called meanwhile
            self._starting.kill()

    def _pause_starts(self, why: str) -> None:
        self._tries, self._not_before = 0, time.monotonic() + _AGAIN_S
        self._failed(why)

    def _failed(self, why: str) -> None:
        self.failures, self.trouble = self.failures + 1, why
        _LOG.error("%s", why)


def _too_much(excess: str) -> TooLarge:
    return TooLarge(f"This request takes more than {excess} to read; send less at once.")


def _digest(job: ReaderJob, body: bytes) -> bytes:
    return blake2b(body, key=f"{job.name} {job.parser} {job.known}".encode(), digest_size=16).digest()


def _environment() -> dict[str, str]:
    """Return the environment for the helper: what an interpreter and a tokenizer need, without keys."""
    kept = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    return {**kept, "TRANSFORMERS_VERBOSITY": "error"}  # it would warn that torch is missing


class _OutOfStep(Exception):
    """The helper's answer belongs to another request."""


class _Process:
    """A helper process and its pipes; it is killed when `owner` is garbage-collected, at the latest. `since`: its start time on the
    monotonic clock; `grown`: it has reported that its memory grew. Raises OSError.
    """

    grown = False

    def __init__(self, hello: ReaderHello, owner: object) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # inherited by the process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ostinato.serve.reader_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=_environment(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid, self.since = self._process.pid, time.monotonic()
        self.kill = weakref.finalize(owner, self._process.kill)
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        word = msgspec.json.encode(hello)
        with contextlib.suppress(BrokenPipeError):  # if it has ended, that is noticed later
            os.write(self._requests, SIZES.pack(len(word), 0) + word)  # fits into the pipe's buffer

    def ended(self) -> bool:
        """True once the process has ended."""
        return self._process.poll() is not None

    def end(self) -> int:
        """End the process and wait for it. Return its exit code, or minus the number of the signal that ended it."""
        self.kill()
        with contextlib.suppress(OSError), self._process:  # closes its pipes, and waits
            self._process.kill()
        return self._process.returncode

    def first_message(self) -> bytes | None:
        """Return the process's first message: None if there is none yet, b"" if the process ended."""
        waiting = select.poll()
        waiting.register(self._replies, select.POLLIN)
        return os.read(self._replies, 1 << 10) if waiting.poll(0) else None

    def ask(self, head: bytes, body: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Send a head and a body, and return the answer's. Raises EOFError if the process ends, TimeoutError."""
        until = time.monotonic() + seconds
        left: list[memoryview] = [memoryview(part) for part in (SIZES.pack(len(head), len(body)) + head, body) if part]
        data, size = bytearray(), SIZES.size
        waiting = select.poll()
        waiting.register(self._replies, select.POLLIN)
        waiting.register(self._requests, select.POLLOUT)
        while len(data) < size:
            ready = dict(waiting.poll(max(0, int(1000 * (until - time.monotonic())))))
            if not ready:
                raise TimeoutError
            if self._requests in ready:
                try:
                    left[0] = left[0][os.write(self._requests, left[0]) :]
                except OSError:
                    raise EOFError from None
                left = left if left[0] else left[1:]
                if not left:
                    waiting.unregister(self._requests)
            if self._replies in ready:
                part = os.read(self._replies, 1 << 20)
                if not part:
                    raise EOFError
                data += part
                if len(data) >= SIZES.size:
                    heads, bodies = SIZES.unpack_from(data)
                    size = SIZES.size + heads + bodies
        heads = SIZES.unpack_from(data)[0]
        return bytes(data[SIZES.size : SIZES.size + heads]), bytes(data[SIZES.size + heads :])


def _refused(reply: ReaderAnswer) -> BadRequest:
    assert reply.refusal is not None
    name, text, field = reply.refusal
    return REFUSALS[name](text, field=field)


def _ids_of(reply: tuple[ReaderAnswer, bytes] | None) -> list[int] | None:
    if reply is None:
        return None
    ids = array("i")
    ids.frombytes(reply[1])
    return ids.tolist()


def crowded(data: bytes) -> bool:
    """Return True if a body may hold so many values that even splitting it into items takes noticeable time."""
    return len(data) >= LONG_CHARS and _values(data) > _MAX_VALUES_HERE


def _values(data: bytes) -> int:
    """Return about how many values a body has, counting also those inside strings of JSON."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _news(value: Any, items: ItemCache) -> int:
    """Return the total bytes of a body's uncached items. Its other fields, such as tools, are parsed by the gateway each time."""
    lists: Iterable[Any] = value.values() if isinstance(value, dict) else ()
    return sum(items.unknown(each) for each in lists if isinstance(each, list))


class _PreparsedItems(ItemCache):
    """A tenant's cache of items, fed with the helper's results for the items of one body, in their order."""

    def __init__(self, items: ItemCache, found: Sequence[FoundItem | None]) -> None:
        super().__init__()
        self._items, self._found = items, iter(found)

    def read(
        self, reader: ItemReader, item: Any, where: str, omissions: Omissions, found: FoundItem | None = None
    ) -> Sequence[Message]:
        return self._items.read(reader, item, where, omissions, next(self._found, None))

    def merged(self, parts: Sequence[Message]) -> Message:
        return self._items.merged(parts)


class LongRenderer:
    """The part of `Renderer` that `Sessions` needs; long inputs go to the helper. Example: ``LongRenderer(renderer, reader).chat(told)``"""

    def __init__(self, renderer: Renderer, reader: RequestReader | None) -> None:
        self._renderer, self._reader = renderer, reader

    def reader(self, conversation: Conversation, turn: str) -> AnswerReader:
        """As `Renderer.reader`."""
        return self._renderer.reader(conversation, turn)

    def stop_ids(self) -> frozenset[int]:
        """As `Renderer.stop_ids`."""
        return self._renderer.stop_ids()

    def chat(self, conversation: Conversation) -> list[int]:
        """As `Renderer.chat`. Also raises Unavailable."""
        found = None if self._reader is None else self._reader.chat(conversation)
        return self._renderer.chat(conversation) if found is None else found

    def follow_up(self, conversation: Conversation, known: int) -> list[int]:
        """As `Renderer.follow_up`. Also raises Unavailable."""
        found = None if self._reader is None else self._reader.follow_up(conversation, known)
        return self._renderer.follow_up(conversation, known) if found is None else found

    def encode(self, text: str) -> list[int]:
        """As `Renderer.encode`. Also raises Unavailable."""
        found = None if self._reader is None else self._reader.encode(text)
        return self._renderer.encode(text) if found is None else found
