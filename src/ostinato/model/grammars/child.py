"""The process that compiles strangers' grammars first: one a line in, why it is refused out, "" if it is not.

Started by `trial.py`, which kills it when an answer is late. It has less stack than the threads that compile in earnest, and little
memory beyond what it starts with: what would end those, ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TypedDict

from ostinato.core.errors import BadRequest
from ostinato.model.grammars.compiling import Grammars

READY = b"ready\n"
_LONGEST_S = 10  # for a grammar, whatever became of the process that asked


class Hello(TypedDict):
    """The first line. `memory_bytes` are for a grammar; `stack_bytes` those of the thread that compiles."""

    tokenizer: str
    vocab_size: int
    stop_ids: list[int]
    memory_bytes: int
    stack_bytes: int


def main() -> None:
    """Answer until the input ends."""
    hello: Hello = json.loads(sys.stdin.buffer.readline())
    threading.stack_size(hello["stack_bytes"])
    thread = threading.Thread(target=_answer, args=(hello,))
    thread.start()
    thread.join()


def _answer(hello: Hello) -> None:
    grammars = Grammars(hello["tokenizer"], hello["vocab_size"], hello["stop_ids"])
    grammars.compiled('start: "a"')  # the first takes what all of them need
    most = _data_bytes() + hello["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _say(READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says at its end tells nobody anything
    for line in sys.stdin.buffer:
        signal.alarm(_LONGEST_S)
        try:
            grammars.compiled(json.loads(line))
            why = ""
        except BadRequest as error:
            why = str(error)
        signal.alarm(0)
        _say(json.dumps(why).encode() + b"\n")


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _data_bytes() -> int:
    """The private memory of this process, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


if __name__ == "__main__":
    main()
