"""What `make test` leaves out of a grid is marked, and no value is left out of all cells."""

from itertools import combinations, product

import pytest
from tests.grids import covering, first

AXES = ("abcdef", (1, 2, 3, 4), (None, False))


def short(cells):
    return [cell.values for cell in cells if not cell.marks]


@pytest.mark.parametrize("diagonals", [1, 2, 3])
@pytest.mark.parametrize("axes", [AXES, AXES[::-1], AXES[1:], AXES[:1]])
def test_every_cell_is_there_and_every_value_is_in_one_that_is_run(axes, diagonals):
    cells = covering(*axes, diagonals=diagonals)
    assert [cell.values for cell in cells] == [*product(*axes)]
    few = short(cells)
    assert all({cell[number] for cell in few} == {*axis} for number, axis in enumerate(axes))
    assert len(few) <= diagonals * max(map(len, axes))
    assert {mark.name for cell in cells for mark in cell.marks} <= {"examination"}


def test_with_two_diagonals_a_value_meets_two_of_another_axis():
    few = short(covering("abcdef", (1, 2, 3), diagonals=2))
    assert len(few) == 12
    assert all(len({number for letter, number in few if letter == each}) == 2 for each in "abcdef")


@pytest.mark.parametrize("letters", ["abcd", "abcde", "abcdefghijklm"])
def test_with_two_diagonals_two_axes_of_two_values_meet_in_all_pairs_and_each_meets_the_long_one(letters):
    axes = (letters, (1, 2), (None, False))
    few = short(covering(*axes, diagonals=2))
    for one, other in combinations(range(3), 2):
        assert {(cell[one], cell[other]) for cell in few} == {*product(axes[one], axes[other])}


def test_a_tuple_is_as_many_arguments():
    assert short(covering([("a", 1), ("b", 2)], [True])) == [("a", 1, True), ("b", 2, True)]


def test_the_first_are_run():
    assert short(first([3, 40, 500])) == [(3,)]
    assert short(first([3, 40, 500], few=2)) == [(3,), (40,)]


@pytest.mark.parametrize(("letter", "number"), covering("ab", (1, 2)))
def test_only_what_is_asked_for_is_run(request, letter, number):
    asked = "not examination" not in request.config.getoption("-m")
    assert asked or (letter, number) in [("a", 1), ("b", 2)]
