"""Compiles grammars for one tokenizer into matchers, which say which tokens may come next.

An untrusted grammar is first compiled in a separate process, because llguidance's compiler bounds neither its recursion nor its time or
memory: a schema of 900 characters took half a minute and 2.8 GB, and one of 88,000 crashed its process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from threading import Lock
from typing import TypedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ostinato.core.errors import BadRequest, Unavailable

MAX_GRAMMAR_CHARS = 100_000
REFUSED = "The format, or the parameters of a tool that must be called, cannot be enforced: "
_CACHED = 32  # compiled grammars; the trial bounds the memory of each
_LIMITS = LLParserLimits(step_lexer_fuel=20_000, step_max_items=5_000)
"""Limits on the cost of one token's mask, for which all streams of a step wait. An answer that reaches them ends there. 60 tools of eight
arguments take 0.2 ms per mask, far from the limits; grammars beyond them took up to 40 ms.
"""


class Grammars:
    """A compiler of grammars for one tokenizer, with an LRU cache. Safe to share between threads.

    Compilation has no limits on time, memory and stack, so untrusted grammars must pass a `GrammarTrial` first.

    Args:
        tokenizer: the tokenizer's JSON, with its control tokens.
        vocab_size: the number of the model's logits.
        stop_ids: the tokens that may end an answer once the grammar is satisfied.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids))
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def has(self, grammar: str) -> bool:
        """Return whether the compiled grammar is cached."""
        with self._lock:
            return grammar in self._kept

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of an answer. Raises BadRequest for an invalid grammar, or one that is too large."""
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:
            made = self.compiled(grammar)
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            while len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def forget(self, grammar: str) -> None:
        """Evict a grammar after one of its matchers failed: all copies share one lexer, so they would fail too."""
        with self._lock:
            self._kept.pop(grammar, None)

    def accepts(self, grammar: str, ids: Sequence[int]) -> bool:
        """Return whether these tokens, with or without the stop token, are a complete answer under the grammar. Raises BadRequest."""
        matcher = self.matcher(grammar)
        accepted = matcher.consume_tokens(list(ids)) and (matcher.is_stopped() or matcher.is_accepting())
        if matcher.is_error():
            self.forget(grammar)
            return False
        return accepted

    def compiled(self, grammar: str) -> LLMatcher:
        """Compile a grammar without caching it. Raises BadRequest."""
        check_text(grammar)
        made = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
        tried = made.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # the first mask is often the most expensive, and no stream waits here
        if tried.is_error():
            why = " ".join(tried.get_error().split())[:500]
            raise BadRequest(REFUSED + why)
        return made


def check_text(grammar: str) -> None:
    """Raise BadRequest for a grammar that is too long or not valid Unicode."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"the grammar of the answer has {len(grammar)} characters; send {MAX_GRAMMAR_CHARS} at most")
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("a tool's name holds half of a surrogate pair, which is not text", field="tools") from error


# ---------------------------------------------------------------- trial compilation in a separate process


COMPILE_S = 2.0
"""Longest compilation of a grammar, in seconds: 60 tools of eight arguments take 0.02, 1,500 patterns 0.2."""
MEMORY_BYTES = 64 << 20
"""Memory for a grammar beyond what the process starts with: the two above take 1 MB and 6 MB."""
_START_S = 60.0
_DEFAULT_STACK = 2 << 20  # bytes of a thread's stack, if the process has no stack limit
_CACHED_VERDICTS = 4096
_TIMEOUT_VERDICT_S = 60.0  # lifetime of the verdict "took too long": the machine may have been busy
_LOG = logging.getLogger(__name__)


TRIAL_READY = b"ready\n"
"""What the trial's process writes once it accepts grammars."""


class TrialHello(TypedDict):
    """The first line sent to the process. `memory_bytes`: memory for a grammar; `stack_bytes`: stack of the compiling thread."""

    tokenizer: str
    vocab_size: int
    stop_ids: list[int]
    memory_bytes: int
    stack_bytes: int


class GrammarTrial:
    """Checks in a separate process whether a grammar compiles within time and memory limits.

    The process starts with the first grammar, and again after one crashed it or took too long. Safe to share between threads; one grammar
    is tried at a time, and its caller blocks. Verdicts are cached.

    Args:
        tokenizer: the tokenizer's JSON, with its control tokens.
        vocab_size: the number of the model's logits.
        stop_ids: the tokens that may end an answer.

    Example: ``trial.check(grammar)``, then ``grammars.matcher(grammar)``
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._hello = TrialHello(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            stop_ids=sorted(stop_ids),
            memory_bytes=MEMORY_BYTES,
            stack_bytes=_stack_bytes() // 2,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._end = lambda: None
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # (reason, expiry) by the grammar's digest
        self._lock = Lock()

    def check(self, grammar: str) -> None:
        """Raise BadRequest for an invalid grammar, or one that exceeds the limits; Unavailable if the process does not start."""
        check_text(grammar)
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            why, until = self._known.get(key, ("", 0.0))
            if until < time.monotonic():
                why, until = self._tried(grammar)
            self._known[key] = why, until
            self._known.move_to_end(key)
            if len(self._known) > _CACHED_VERDICTS:
                self._known.popitem(last=False)
        if why:
            raise BadRequest(why)

    def close(self) -> None:
        """Kill the process, if it runs."""
        with self._lock:
            self._stop()

    def _tried(self, grammar: str) -> tuple[str, float]:
        """Try a grammar; return the reason for refusing it, "" if there is none, and the verdict's expiry."""
        question, until = json.dumps(grammar).encode() + b"\n", math.inf
        try:
            line = b"" if self._process is None else _asked(self._process, question, COMPILE_S)
            if not line:  # retry once: the process may have died before this grammar
                self._stop()
                line = _asked(self._start(), question, COMPILE_S)
        except TimeoutError:
            line, until = b"", time.monotonic() + _TIMEOUT_VERDICT_S
        if line:
            return str(json.loads(line)), until
        self._stop()
        _LOG.warning("a grammar of %d characters took more than it may, and is refused", len(grammar))
        limits = f"{COMPILE_S:g} s or {MEMORY_BYTES >> 20} MiB"
        return f"{REFUSED}its grammar takes more than {limits} to compile; ask for less.", until

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ostinato.model.grammar_child"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process, self._end = process, weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        ready = False
        with contextlib.suppress(TimeoutError):
            ready = _asked(process, json.dumps(self._hello).encode() + b"\n", _START_S) == TRIAL_READY
        if not ready:
            self._stop()
            raise Unavailable(
                "formats and demanded calls cannot be checked: the process that checks them did not start; its output says why"
            )
        return process

    def _stop(self) -> None:
        self._process = None
        self._end()


def _asked(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Send a line to the process and return its answer, newline included; b"" if the process has ended. Raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    asks, answers, until = process.stdin.fileno(), process.stdout.fileno(), time.monotonic() + seconds
    answer, left = b"", memoryview(line)
    while not answer.endswith(b"\n"):
        waiting = select.poll()
        waiting.register(answers, select.POLLIN)
        if left:
            waiting.register(asks, select.POLLOUT)
        ready = dict(waiting.poll(max(0, int(1000 * (until - time.monotonic())))))
        if not ready:
            raise TimeoutError
        if asks in ready:
            try:
                left = left[os.write(asks, left) :]
            except OSError:
                return b""
        if answers in ready:
            part = os.read(answers, 1 << 16)
            if not part:
                return b""
            answer += part
    return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError), process:  # closes its pipes, and reaps it
        pass


def _stack_bytes() -> int:
    """Return the stack size of a thread in this process (with glibc, the process's limit)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
