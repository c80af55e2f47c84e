"""The process of a rank that publishes nothing: ``python -m ostinato.train.sharding.rank``. It reads its calls from standard input."""

from __future__ import annotations

import os
import signal
import sys

from ostinato.train.sharding.calls import read_task
from ostinato.train.sharding.trainer import take_part


def main() -> None:
    """Run until the first rank ends."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all ranks; the first decides when to end
        signal.signal(number, signal.SIG_IGN)
    take_part(read_task(sys.stdin.buffer.readline()), sys.stdin.buffer, lambda _: None)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
