"""The process of each training rank except the first: ``python -m ostinato.app.rank``. It trains, and publishes its part of the weights."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading

from ostinato.core.weights import Learned, WeightPart
from ostinato.train.sharding.calls import RankTask, read_task
from ostinato.train.sharding.trainer import take_part
from ostinato.weights.publish.chunk_source import PartHolder
from ostinato.weights.publish.ranks import Handed, RankSettings, publish_part
from ostinato.weights.store.factory import open_url


def main() -> None:
    """Run until the first rank ends."""
    # a terminal sends them to all ranks; the first rank decides when to end
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    task, handed = read_task(sys.stdin.buffer.readline()), Handed()

    def hand_over(learned: Learned) -> None:
        assert isinstance(learned.weights, WeightPart)
        handed.put(learned.policy_number, learned.weights)

    threading.Thread(target=_publish, args=(task, handed), daemon=True).start()
    take_part(task, sys.stdin.buffer, hand_over)
    sys.stdout.flush()
    os._exit(0)


def _publish(task: RankTask, handed: Handed) -> None:
    settings = RankSettings.model_validate_json(task.settings)
    holder = PartHolder(open_url(settings.weights), settings.publish)
    line = socket.socket(fileno=task.line)
    asyncio.run(publish_part(line, holder, handed))


if __name__ == "__main__":
    main()
