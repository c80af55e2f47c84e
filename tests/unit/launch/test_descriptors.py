"""A worker may open as many files as the system lets it, and leaves some of them to others than its connections."""

import resource

import pytest

from ostinato.launch.workers.serve import room_for_connections


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_raised_and_four_fifths_of_it_are_for_connections(limits):
    hard = limits[1]
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert room_for_connections() == int(0.8 * most)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)


def test_a_limit_that_is_higher_still_is_left_alone(limits, monkeypatch):
    monkeypatch.setattr("ostinato.launch.workers.serve._MAX_OPEN_FILES", 100)
    assert room_for_connections() == 80
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
