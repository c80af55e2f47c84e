"""The process of a rank that publishes nothing: ``python -m ostinato.train.sharding.rank``, told by its standard input what to do."""

from __future__ import annotations

import os
import signal
import sys

from ostinato.train.sharding.calls import read_task
from ostinato.train.sharding.trainer import take_part


def main() -> None:
    """Live as long as the first rank does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the first rank says when to end
    take_part(read_task(sys.stdin.buffer.readline()), sys.stdin.buffer, lambda _: None)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
