"""Subprocess that runs a reward function: requests in, one line of JSON each, answers out in the same order.

`runners.py` starts it, and kills it with all its children when an answer is late. It also kills itself and its children when its
input ends, whatever the function is doing, since a separate thread reads the input: a killed desk leaves nothing running.
The function's output goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from queue import SimpleQueue
from typing import BinaryIO

from ostinato.core.child_process import read_until_end, take_over
from ostinato.core.errors import BadConfig
from ostinato.core.seams import RewardFn
from ostinato.reward.protocol import READY, answer_line, answered, load, read_question


def main() -> None:
    """Load the function that the first line names, then answer requests until the input ends."""
    questions, answers = take_over()
    hello = json.loads(questions.readline())
    sys.path[:] = hello["path"]
    resource.setrlimit(resource.RLIMIT_DATA, (hello["memory_bytes"], hello["memory_bytes"]))
    function = _load(hello["function"], hello["options"], hello["setting"], answers)
    waiting: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=read_until_end, args=(questions, waiting.put), daemon=True).start()
    this = os.getpid()
    while True:
        line = answer_line(answered(function, read_question(waiting.get()), hello["max_abs"]))
        if os.getpid() != this:
            os._exit(0)  # the function forked: the copy must not answer the next question
        answers.write(line)


def _load(name: str, options: dict[str, object], setting: str, answers: BinaryIO) -> RewardFn:
    try:
        function = load(name, options, setting)
    except BadConfig as error:
        why = str(error)
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, SystemExit too
        why = f"{setting}.function {name!r}: importing it raised {type(error).__name__}: {error}"
    else:
        answers.write(READY)
        return function
    answers.write(json.dumps(["BadConfig", why]).encode() + b"\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
