"""Functions that hang, and the time for an answer: it begins once one hangs, so that a slow machine makes no quick answer late."""

import asyncio
from pathlib import Path

from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.reward import runners

HANGING = "open({mark!r}, 'w').close()"
"""What a function does before it hangs, with the path of its mark."""


def time_begins_with_a_hang(monkeypatch, mark: Path) -> None:
    """Whatever is asked has all the time that a machine needs, until the file `mark` tells that the function hangs."""
    honest = runners._line

    async def line(process, seconds):
        answers = process.answers

        def comes():
            return answers._buffer or answers.at_eof() or answers.exception()

        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not comes():
                if mark.exists() or process.process.returncode is not None:
                    mark.unlink(missing_ok=True)
                    return await honest(process, seconds)
                await asyncio.sleep(0.005)
        return await honest(process, WHOLE_PROGRAM_S)

    monkeypatch.setattr(runners, "_line", line)
