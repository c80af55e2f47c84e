"""Compiles grammars for one tokenizer: a matcher says which tokens may come next.

A grammar from outside is tried first, in a separate process. llguidance's compiler does not bound its recursion, time or memory: a schema
of 900 characters took half a minute and 2.8 GB, and one of 88,000 ended its process.
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
_KEPT = 32  # compiled grammars; the memory of each is bounded by its trial
_LIMITS = LLParserLimits(step_lexer_fuel=20_000, step_max_items=5_000)
"""Limits on the cost of one token's mask, for which every stream of a step waits. 60 tools of eight arguments take 0.2 ms and come nowhere
near the limits; grammars beyond them have cost up to 40 ms, and an answer that reaches them ends there.
"""


class Grammars:
    """Compiles grammars for one tokenizer; the last ones are cached. Safe to share between threads.

    Compiling has no limits on time, memory and stack, so a grammar from outside is tried first (`GrammarTrial`).

    Args:
        tokenizer: with its control tokens, as JSON.
        vocab_size: the number of the model's logits.
        stop_ids: the tokens that may end an answer once the grammar is satisfied.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids))
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def has(self, grammar: str) -> bool:
        """True if the compiled grammar is cached."""
        with self._lock:
            return grammar in self._kept

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an answer. Raises BadRequest for an invalid grammar, or one that is too large."""
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:
            made = self.compiled(grammar)
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def forget(self, grammar: str) -> None:
        """Drop a grammar of which a matcher has failed: all its copies share one lexer, and fail with it from then on."""
        with self._lock:
            self._kept.pop(grammar, None)

    def accepts(self, grammar: str, ids: Sequence[int]) -> bool:
        """True if an answer of these tokens, with or without its stop token, follows the grammar to its end. Raises BadRequest."""
        matcher = self.matcher(grammar)
        accepted = matcher.consume_tokens(list(ids)) and (matcher.is_stopped() or matcher.is_accepting())
        if matcher.is_error():
            self.forget(grammar)
            return False
        return accepted

    def compiled(self, grammar: str) -> LLMatcher:
        """A matcher that is not cached. Raises BadRequest."""
        check_text(grammar)
        made = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
        tried = made.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # the first mask is often the most expensive: no stream waits for it here
        if tried.is_error():
            why = " ".join(tried.get_error().split())[:500]
            raise BadRequest(REFUSED + why)
        return made


def check_text(grammar: str) -> None:
    """Raise BadRequest for a grammar that is too long, or not valid text."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"the grammar of the answer has {len(grammar)} characters; send {MAX_GRAMMAR_CHARS} at most")
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("a tool's name holds half of a surrogate pair, which is not text", field="tools") from error


# ---------------------------------------------------------------- the trial


COMPILE_S = 2.0
"""Seconds that a grammar may take: 60 tools of eight arguments take 0.02, 1,500 patterns 0.2."""
MEMORY_BYTES = 64 << 20
"""Memory that a grammar may take beyond what the process starts with: the two above take 1 MB and 6 MB."""
_START_S = 60.0
_DEFAULT_STACK = 2 << 20  # of a thread, if the process has no limit on its own stack
_KNOWN = 4096  # verdicts
_LATE_S = 60.0  # how long the verdict "took too long" is kept: the machine may have been busy
_LOG = logging.getLogger(__name__)


TRIAL_READY = b"ready\n"
"""What the trial's process says once it can be asked."""


class TrialHello(TypedDict):
    """The first line for it. `memory_bytes`: the memory that a grammar may take; `stack_bytes`: the stack of the thread that compiles."""

    tokenizer: str
    vocab_size: int
    stop_ids: list[int]
    memory_bytes: int
    stack_bytes: int


class GrammarTrial:
    """Checks whether a grammar can be compiled within bounds. The process starts with the first grammar, and again after one ended it.

    Safe to share between threads; one grammar is tried at a time, and blocks its caller. Verdicts are cached.

    Args:
        tokenizer: with its control tokens, as JSON.
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
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # the reason, and until when it holds
        self._lock = Lock()

    def check(self, grammar: str) -> None:
        """Raise BadRequest for an invalid grammar, or one that takes too much; Unavailable if the process does not start."""
        check_text(grammar)
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            why, until = self._known.get(key, ("", 0.0))
            if until < time.monotonic():
                why, until = self._tried(grammar)
            self._known[key] = why, until
            self._known.move_to_end(key)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        if why:
            raise BadRequest(why)

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._stop()

    def _tried(self, grammar: str) -> tuple[str, float]:
        """The reason for refusing a grammar, "" if there is none, and until when that verdict holds."""
        question, until = json.dumps(grammar).encode() + b"\n", math.inf
        try:
            line = b"" if self._process is None else _asked(self._process, question, COMPILE_S)
            if not line:  # a process that has ended may have done so before this grammar
                self._stop()
                line = _asked(self._start(), question, COMPILE_S)
        except TimeoutError:
            line, until = b"", time.monotonic() + _LATE_S
        if line:
            return str(json.loads(line)), until
        self._stop()
        _LOG.warning("a grammar of %d characters took more than it may, and is refused", len(grammar))
        limits = f"{COMPILE_S:g} s or {MEMORY_BYTES >> 20} MiB"
        return f"{REFUSED}its grammar takes more than {limits} to make; ask for less.", until

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
                "formats and demanded calls cannot be checked: the process that does did not start; its output says why"
            )
        return process

    def _stop(self) -> None:
        self._process = None
        self._end()


def _asked(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """The process's answer, with the end of the line; b"" if the process has ended. Raises TimeoutError."""
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
    with contextlib.suppress(OSError), process:  # closes its pipes, and waits
        pass


def _stack_bytes() -> int:
    """The stack size of a thread here (with glibc, the process's limit)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
