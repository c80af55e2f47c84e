"""Pages between others go back to the system."""

import ctypes
import resource
from pathlib import Path

import pytest

from ostinato.model.cpu import trim_heap


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc's allocator can be asked")
def test_pages_between_others_are_given_back():
    blocks = [bytearray(b"x" * 100_000) for _ in range(2000)]
    kept = blocks[::50]
    del blocks
    before = resident()
    trim_heap()
    assert before - resident() > 100_000_000
    assert all(block[0] == ord("x") for block in kept)
