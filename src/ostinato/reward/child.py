"""The process that runs a reward function: questions in, one line of JSON each, answers out in the same order.

Started by `isolated.py`, which kills it and all processes that it started when an answer is late. It kills them and itself when its
input ends, whatever the function is doing, since a separate thread reads the input: a desk that was killed leaves nothing running.
The function's output goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from queue import SimpleQueue
from typing import BinaryIO

from ostinato.core.errors import BadConfig
from ostinato.core.seams import RewardFn
from ostinato.reward.protocol import READY, answer_line, answered, load, read_question


def main() -> None:
    """Load the function that the first line names, then answer until the input ends."""
    questions, answers = _take_over()
    hello = json.loads(questions.readline())
    sys.path[:] = hello["path"]
    resource.setrlimit(resource.RLIMIT_DATA, (hello["memory_bytes"], hello["memory_bytes"]))
    function = _load(hello["function"], hello["options"], answers)
    waiting: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(questions, waiting), daemon=True).start()
    this = os.getpid()
    while True:
        line = answer_line(answered(function, read_question(waiting.get()), hello["max_abs"]))
        if os.getpid() != this:
            os._exit(0)  # the function forked: the copy's answer would be taken for that to the next question
        answers.write(line)


def _take_over() -> tuple[BinaryIO, BinaryIO]:
    """Reserve standard input and output for this protocol: the function gets an empty input, and its output goes to standard error."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


def _load(name: str, options: dict[str, object], answers: BinaryIO) -> RewardFn:
    try:
        function = load(name, options)
    except BadConfig as error:
        why = str(error)
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, SystemExit too
        why = f"reward.function {name!r}: importing it raised {type(error).__name__}: {error}"
    else:
        answers.write(READY)
        return function
    answers.write(json.dumps(["BadConfig", why]).encode() + b"\n")
    sys.exit(0)


def _read(questions: BinaryIO, waiting: SimpleQueue[bytes]) -> None:
    for line in questions:
        waiting.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
