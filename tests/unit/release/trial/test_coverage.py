"""The intervals of a trial with 20, 50 and 200 users who differ and come back."""

import pytest
from benchmarks.release.coverage import LEVEL, covered

RUNS = 120


@pytest.mark.parametrize(("users", "normal"), [(20, 0.78), (50, 0.86), (200, 0.88)])
def test_what_the_docstring_says_of_few_users(users, normal):
    found = covered(users, 0.6, 0.15, runs=RUNS, slots=8)
    assert normal <= found.normal <= 0.99
    assert found.student >= 0.90
    assert max(found.above, found.below) <= LEVEL
    assert found.planned <= 1.5 * LEVEL
