"""Freed blocks go back to the system, whatever lies between them, and large ones come in large pages."""

import sys
from pathlib import Path

import pytest
from tests.fakes.fork_server import FORK_SERVER

PROGRAM = """
import sys, torch
from ostinato.train.sharding.trainer import return_freed_memory
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


def number_said(*command: str, **environment: str) -> int:
    """What a fresh process says; its libraries are imported, but it has made no tensor."""
    done = FORK_SERVER.run([sys.executable, "-c", *command], env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_are_returned_though_some_between_them_are_kept():
    found = {how: number_said(PROGRAM, how) for how in ("by itself", "returned")}
    assert found["returned"] < 30, "11 of 200 MiB are held"
    assert found["by itself"] > 150, "what this is for"


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import os, resource, torch
from ostinato.train.sharding.trainer import return_freed_memory
given = dict(os.environ)
return_freed_memory()
assert os.environ == given, "programs that are started from here would have it too"
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(64 << 18).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

ASKED = """
import mmap, resource
block = mmap.mmap(-1, 64 << 20)
block.madvise(mmap.MADV_HUGEPAGE)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for at in range(0, 64 << 20, 4096):
    block[at] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""The same block, of a program that asks the kernel itself: how much memory lies together is the machine's affair."""


def faults(**environment: str) -> int:
    """Page faults of a process that makes one tensor of 64 MiB, 16,384 pages of 4 KiB."""
    return number_said(FAULTS, **environment)


@pytest.mark.skipif(
    not PAGES.exists() or "[madvise]" not in PAGES.read_text(),
    reason="this kernel gives large pages to all or to nobody, not to those who ask",
)
def test_a_large_block_costs_few_page_faults_unless_the_environment_says_otherwise():
    if (found := faults()) >= 5_000 and number_said(ASKED) >= 5_000:
        pytest.skip("no large pages are left: the free memory of this machine lies in pieces")
    assert found < 5_000
    assert faults(THP_MEM_ALLOC_ENABLE="0") > 15_000
