"""Ends a rank whose peers are gone. For GPUs: NCCL does not tell a rank that another has ended while it waits for it in a collective."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0


def end_with_first(first: int) -> None:
    """End this process soon after its parent, the first rank with this process id."""
    while os.getppid() == first:
        time.sleep(_LOOK_S)
    os._exit(1)


def end_with_others(others: Sequence[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    """End this process, the first rank, soon after any of the others, unless they are `closing`."""
    while not closing.wait(_LOOK_S):
        ended = {rank: code for rank, process in enumerate(others, 1) if (code := process.poll()) is not None}
        if ended and not closing.is_set():
            _LOG.error("ranks of the trainer have ended, with these exit codes: %s; so the first one ends, too", ended)
            os._exit(1)
