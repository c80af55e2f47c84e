"""Tries a grammar from outside in a separate process before it is compiled in one that serves.

llguidance's compiler does not bound its recursion, time or memory: a schema of 900 characters took half a minute and 2.8 GB, and one of
88,000 ended its process.
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
from collections.abc import Collection
from hashlib import blake2b
from threading import Lock

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.model.grammar_child import READY, Hello
from ostinato.model.grammars import REFUSED, check_text

COMPILE_S = 2.0
"""Seconds that a grammar may take: 60 tools of eight arguments take 0.02, 1,500 patterns 0.2."""
MEMORY_BYTES = 64 << 20
"""Memory that a grammar may take beyond what the process starts with: the two above take 1 MB and 6 MB."""
_START_S = 60.0
_DEFAULT_STACK = 2 << 20  # of a thread, if the process has no limit on its own stack
_KNOWN = 4096  # verdicts
_LATE_S = 60.0  # how long the verdict "took too long" is kept: the machine may have been busy
_LOG = logging.getLogger(__name__)


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
        self._hello = Hello(
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
            ready = _asked(process, json.dumps(self._hello).encode() + b"\n", _START_S) == READY
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
