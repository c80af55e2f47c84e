"""A small package as a source distribution, from which a test can build tasks."""

import io
import tarfile

MODULE = '''"""Counting."""


def clamp(value, low, high):
    """Bring a value between two bounds, both allowed."""
    if low > high:
        raise ValueError("bounds")
    if value < low:
        return low
    if value > high:
        return high
    return value


class Bag:
    """Things and how often."""

    def __init__(self):
        self.counts = {}

    def add(self, thing, times=1):
        """Put a thing in, so many times."""
        if times <= 0:
            raise ValueError("times")
        before = self.counts.get(thing, 0)
        self.counts[thing] = before + times
        return self.counts[thing]


def unused(x):
    y = x + 1
    z = y * 2
    return z
'''
TESTS = """import pytest
from tiny_counts import Bag, clamp

@pytest.mark.parametrize(("value", "wanted"), [(-1, 0), (0, 0), (3, 3), (9, 9), (12, 9)])
def test_clamp(value, wanted):
    assert clamp(value, 0, 9) == wanted

def test_clamp_bounds():
    with pytest.raises(ValueError):
        clamp(1, 2, 0)

def test_add():
    bag = Bag()
    assert bag.add("a") == 1
    assert bag.add("a", 2) == 3

def test_add_none():
    with pytest.raises(ValueError):
        Bag().add("a", 0)

@pytest.mark.parametrize("number", range(12))
def test_other(number):
    assert Bag().counts == {}
"""
METADATA = "Metadata-Version: 2.2\nName: tiny-counts\nVersion: 1.0\n"


def tiny_files() -> dict[str, bytes]:
    return {
        "PKG-INFO": METADATA.encode(),
        "tiny_counts.py": MODULE.encode(),
        "tests/test_counts.py": TESTS.encode(),
        "build/lib/tiny_counts.py": MODULE.encode(),
        ".git/HEAD": b"ref",
    }


def tiny_sdist(files: dict[str, bytes] | None = None, top: str = "tiny_counts-1.0/") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:  # uncompressed, because gzip would add a timestamp
        for path, data in (tiny_files() if files is None else files).items():
            entry = tarfile.TarInfo(top + path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
