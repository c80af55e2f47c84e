"""A kernel's parts run side by side, whichever team came first."""

import os
import threading

import pytest
from tests.deadlines import PATIENT_S

from ostinato.model import cpu
from ostinato.model.cpu import split, spread, team


@pytest.fixture(autouse=True)
def a_pool_of_its_own(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cpu._pool.cache_clear()
    yield
    cpu._pool().shutdown()
    cpu._pool.cache_clear()


def test_a_team_s_parts_run_at_once_after_a_smaller_team_s():
    for count in (2, 4):
        met, parts = threading.Barrier(count, timeout=PATIENT_S), []

        def run(first, last, met=met, parts=parts):
            met.wait()  # breaks if a part waits for another to end
            parts.append((first, last))

        with team(count):
            split(8, run)
        assert sorted(parts) == [(8 * i // count, 8 * (i + 1) // count) for i in range(count)]


def test_what_a_part_raises_is_raised():
    def run(first, last):
        if first:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        spread([0, 1, 2], run)
