"""Runs some workers under a supervisor, as `ostinato up` runs all of them: ``python -m tests.examinations.hosts.crew NAME,NAME WORD ...``.

Prints a line of JSON for each event, until SIGTERM.
"""

import asyncio
import json
import signal
import sys

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.launch.commands.crew import launch
from ostinato.record.roles import hold


async def main(names: list[str], words: list[str]) -> None:
    config, stopping = load(None, words), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    def say(worker: str, what: str) -> None:
        print(json.dumps({"at": wall_clock(), "worker": worker, "what": what}), flush=True)

    with hold(home(config).root, "up"):
        async with launch(config, say, names=names) as launched:
            await launched.during(_set(stopping))


async def _set(event: asyncio.Event) -> None:
    await event.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].split(","), sys.argv[2:]))
