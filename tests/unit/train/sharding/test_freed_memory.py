"""Freed blocks go back to the system, whatever lies between them."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from ostinato.train.sharding.memory import return_freed_memory
if sys.argv[1] == "returned":
    return_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
torch.zeros(30 << 18).add_(1)  # glibc's bound is 30 MiB from now on
before = resident()
blocks = [torch.zeros(1 << 18).add_(1) for _ in range(200)]
kept = blocks[::20] + blocks[-1:]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_are_returned_though_some_between_them_are_kept():
    found = {
        how: int(
            subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("by itself", "returned")
    }
    assert found["returned"] < 30, "11 of 200 MiB are held"
    assert found["by itself"] > 150, "what this is for"
