"""The process that tries untrusted grammars: reads one per line, and answers with the reason for refusing it, "" if there is none.

`grammars.GrammarTrial` starts it, and kills it if an answer is late. It has less stack than the threads that compile for serving, and
little memory beyond what it starts with, so a grammar that would crash those crashes this process first.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from ostinato.core.errors import BadRequest
from ostinato.model.grammars import TRIAL_READY, Grammars, TrialHello

_MAX_S = 10  # per grammar, even if the parent process is gone


def main() -> None:
    """Answer until the end of the input."""
    hello: TrialHello = json.loads(sys.stdin.buffer.readline())
    threading.stack_size(hello["stack_bytes"])
    thread = threading.Thread(target=_answer, args=(hello,))
    thread.start()
    thread.join()


def _answer(hello: TrialHello) -> None:
    grammars = Grammars(hello["tokenizer"], hello["vocab_size"], hello["stop_ids"])
    grammars.compiled('start: "a"')  # the first compilation allocates what all of them need
    most = _data_bytes() + hello["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _say(TRIAL_READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the output of a crash would only confuse
    for line in sys.stdin.buffer:
        signal.alarm(_MAX_S)
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
    """Return the private memory of this process in bytes, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


if __name__ == "__main__":
    main()
