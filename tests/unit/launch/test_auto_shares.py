"""The shares that `ostinato auto --share` takes."""

import pytest

from ostinato.core.errors import BadConfig
from ostinato.launch.commands.auto import parse_shares


def test_shares_are_read_by_arm():
    assert parse_shares(("live=0.7", "large=0.3")) == {"live": 0.7, "large": 0.3}


@pytest.mark.parametrize("texts", [("live=nan",), ("live=inf",), ("live",), ("live=0.4", "live=1.0")])
def test_what_is_no_share_or_is_given_twice_is_refused(texts):
    with pytest.raises(BadConfig):
        parse_shares(texts)
