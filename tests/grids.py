"""Grids of tests: `make test` runs a few cells in which every value occurs, `make examine` the others.

What is left out is marked `examination`: `pytest -m examination --collect-only -q` lists it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], diagonals: int = 1) -> list[Any]:
    """The cells of all values of the axes, for `parametrize`: those off the diagonal are marked as examinations.

    A diagonal has every value of every axis. Each further one shifts all axes but the first by one value, for axes that depend on each
    other. Axes from the third on move one value further each time that they begin again, so that one as short as the second
    meets other values of it. A tuple among the values is as many arguments.
    """
    few = {
        tuple(_place(at, shift, number, len(axis)) for number, axis in enumerate(axes))
        for at, shift in product(range(max(map(len, axes))), range(diagonals))
    }
    return [
        pytest.param(*_spread(axis[at] for axis, at in zip(axes, cell, strict=True)), marks=_marks(cell in few))
        for cell in product(*(range(len(axis)) for axis in axes))
    ]


def first(values: Iterable[Any], few: int = 1) -> list[Any]:
    """The values, for `parametrize`: those after the first few are marked as examinations. Longer simulations, larger inputs."""
    return [pytest.param(value, marks=_marks(number < few)) for number, value in enumerate(values)]


def _place(at: int, shift: int, number: int, length: int) -> int:
    again = at // length if number > 1 else 0
    return (at + again + (shift if number else 0)) % length


def _spread(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _marks(short: bool) -> tuple[Any, ...]:
    return () if short else (pytest.mark.examination,)
