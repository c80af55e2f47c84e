"""A rank that waits in NCCL is not told that another one is gone, so it looks itself."""

import subprocess
import sys
import time

import psutil
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

RANK = """
import os
from ostinato.train.sharding.trainer import end_with_first
print(os.getpid(), flush=True)
end_with_first(os.getppid())
"""
FIRST = f"""
import os
if os.fork():
    os.wait()
else:
    exec({RANK!r})
"""
OTHERS = """
import subprocess, sys, threading
from ostinato.train.sharding.trainer import end_with_others
other = subprocess.Popen(["sleep", "600"])
print(other.pid, flush=True)
closing = threading.Event()
if sys.argv[1] == "closing":
    closing.set()
end_with_others([other], closing)
"""


def ended(process: psutil.Process) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_rank_ends_soon_after_the_first():
    with FORK_SERVER.popen([sys.executable, "-c", FIRST], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        rank = psutil.Process(int(first.stdout.readline()))
        time.sleep(2)
        assert not ended(rank), "while the first rank is there, it waits"
        first.kill()
        until = time.monotonic() + WHOLE_PROGRAM_S
        while not ended(rank):
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.mark.parametrize("closing", [False, True])
def test_the_first_rank_ends_soon_after_another_unless_they_are_closing(closing: bool):
    word = "closing" if closing else "working"
    with FORK_SERVER.popen([sys.executable, "-c", OTHERS, word], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        other = psutil.Process(int(first.stdout.readline()))
        if not closing:
            time.sleep(2)
            assert first.poll() is None, "while the others are there, it works on"
        other.kill()
        assert first.wait(WHOLE_PROGRAM_S) == (0 if closing else 1)
