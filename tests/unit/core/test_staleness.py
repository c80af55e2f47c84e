"""Staleness counts steps, not version numbers."""

import pytest

from ostinato.core.staleness import Lineage


@pytest.mark.parametrize(("step", "number", "lag"), [(0, 0, 0), (5, 5, 0), (5, 3, 2), (5, 0, 5)])
def test_without_a_return_it_is_the_difference(step, number, lag):
    assert Lineage().lag(step, number) == lag


@pytest.mark.parametrize(
    ("step", "number", "lag"),
    [
        (9, 4, 0),  # the trainer has just gone back to v4
        (10, 4, 1),
        (11, 4, 2),
        (11, 3, 3),
        (11, 10, 1),
        (11, 11, 0),
        (9, 6, 2),  # v6 was left behind: two steps back to v4
    ],
)
def test_after_a_return_the_way_leads_over_the_base(step, number, lag):
    assert Lineage(first=10, base=4).lag(step, number) == lag
