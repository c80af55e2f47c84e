"""Rows in pieces: read as one, refused where they do not meet."""

import numpy as np
import pytest

from ostinato.core.errors import Corrupt
from ostinato.train.ranks import Joined

WHOLE = np.arange(20, dtype=np.float32).reshape(10, 2)


def test_any_rows_are_those_of_the_whole():
    joined = Joined({"w": [(7, WHOLE[7:]), (0, WHOLE[:3]), (3, WHOLE[3:7]), (10, WHOLE[10:])], "b": [(0, WHOLE[0])]})
    assert list(joined) == ["w", "b"]
    assert len(joined) == 2
    np.testing.assert_array_equal(joined["w"], WHOLE)
    for first in range(11):
        for last in range(first, 11):
            np.testing.assert_array_equal(joined.rows("w", first, last), WHOLE[first:last])


def test_what_one_piece_has_is_not_copied():
    joined = Joined({"w": [(0, WHOLE[:6]), (6, WHOLE[6:])]})
    assert np.shares_memory(joined.rows("w", 1, 5), WHOLE)
    assert not np.shares_memory(joined.rows("w", 5, 7), WHOLE)


@pytest.mark.parametrize(
    "pieces", [[(0, WHOLE[:3]), (4, WHOLE[4:])], [(0, WHOLE[:5]), (4, WHOLE[4:])], [(1, WHOLE[1:])]]
)
def test_gaps_and_overlaps_are_refused(pieces: list):
    with pytest.raises(Corrupt, match="'w' do not meet"):
        Joined({"w": pieces})
