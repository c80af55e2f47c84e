"""What `train.context_ranks` may be, and what a wrong one is told."""

import pytest
from pydantic import ValidationError

from ostinato.train.config import TrainConfig


@pytest.mark.parametrize(("ranks", "context_ranks"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)])
def test_a_divisor_of_the_ranks(ranks: int, context_ranks: int):
    assert TrainConfig(ranks=ranks, context_ranks=context_ranks).context_ranks == context_ranks


def test_one_process_is_told_to_become_several():
    with pytest.raises(ValidationError, match=r"train\.ranks is 1.*set train\.ranks to 2 or a multiple of it, or"):
        TrainConfig(context_ranks=2)


@pytest.mark.parametrize(("ranks", "context_ranks"), [(4, 3), (2, 4), (6, 4)])
def test_what_does_not_divide_the_ranks_is_told_what_does(ranks: int, context_ranks: int):
    with pytest.raises(
        ValidationError, match=rf"does not divide train\.ranks = {ranks}; set .* 1, 2.*, or train\.ranks"
    ):
        TrainConfig(ranks=ranks, context_ranks=context_ranks)


def test_none_at_all_is_no_number_of_ranks():
    with pytest.raises(ValidationError):
        TrainConfig(context_ranks=0)
