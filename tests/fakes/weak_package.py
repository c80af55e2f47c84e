"""A small package whose tests check some functions more thoroughly than others."""

from tests.fakes.tiny_package import tiny_sdist

MODULE = '''"""Shapes."""


def clamp(value, low, high):
    """Bring a value between two bounds, both allowed."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def is_even(number):
    """Whether a number can be divided by two, bools left out."""
    if isinstance(number, bool):
        return False
    return number % 2 == 0


def first_of(things, *more):
    """The first thing that there is, in the order in which they are given."""
    found = [*things, *more]
    if not found:
        raise ValueError("nothing")
    return found[0] if more else things


def _scaled(value, by):
    scaled = value
    for _ in range(by - 1):
        scaled = scaled + value
    return scaled


def doubled(value):
    """Twice a value, for what can be multiplied."""
    return _scaled(value, 2)


class Shape:
    """Something with sides."""

    def sides(self):
        """How many sides it has, each counted once."""
        return 4


class Square(Shape):
    """Four alike."""

    def sides(self):
        """How many sides it has, each counted once."""
        sides = 2
        for _ in range(2):
            sides += 1
        return sides
'''
TESTS = """import pytest
import weak_shapes as shapes

@pytest.mark.parametrize(("value", "wanted"), [(-1, 0), (0, 0), (3, 3), (9, 9), (12, 9)])
def test_clamp(value, wanted):
    assert shapes.clamp(value, 0, 9) == wanted

@pytest.mark.parametrize("number", [2, 4])
def test_is_even(number):
    assert shapes.is_even(number)

def test_first_of():
    assert shapes.first_of("a") == "a"

def test_doubled():
    assert shapes.doubled(2) == 4

def test_doubled_text():
    assert shapes.doubled("a") == "aa"

def test_sides():
    assert shapes.Square().sides() == 4

@pytest.mark.parametrize("number", range(12))
def test_other(number):
    assert number < 12
"""


def weak_sdist() -> bytes:
    files = {
        "PKG-INFO": b"Metadata-Version: 2.2\nName: weak-shapes\nVersion: 1.0\n",
        "weak_shapes.py": MODULE.encode(),
        "tests/test_shapes.py": TESTS.encode(),
    }
    return tiny_sdist(files, top="weak_shapes-1.0/")
