"""Shares that were set against people who came."""

import math

import numpy as np
import pytest

from ostinato.release.trial.trial import ArmBalance

VOID = math.log(1000.0)


def watch(rng, true, shares, people, batch=100):
    """The people after whom the trial is void; None if it never is."""
    balance = ArmBalance()
    for n in range(batch, people + 1, batch):
        balance.add(rng.multinomial(batch, true).tolist(), shares)
        if balance.log_factor() >= VOID:
            return n
    return None


def test_right_shares_are_never_doubted():
    rng = np.random.default_rng(0)
    runs = [watch(rng, [p, 1 - p], [p, 1 - p], 20_000) for p in (0.01, 0.05, 0.5) for _ in range(60)]
    assert not any(runs)


def test_52_per_cent_instead_of_50_is_found_in_twenty_thousand():
    rng = np.random.default_rng(1)
    found = [watch(rng, [0.52, 0.48], [0.5, 0.5], 20_000) for _ in range(100)]
    assert sum(n is not None for n in found) >= 90


def test_a_canary_that_loses_a_fifth_of_its_people_is_found():
    rng = np.random.default_rng(2)
    found = [watch(rng, [0.04, 0.96], [0.05, 0.95], 20_000) for _ in range(60)]
    assert sum(n is not None for n in found) >= 57


def test_a_ramp_hides_nothing_and_right_shares_on_it_are_not_doubted():
    rng = np.random.default_rng(3)
    for wrong in (1.0, 0.8):
        balance = ArmBalance()
        for share in (0.01, 0.05, 0.10, 0.25, 0.50):
            for _ in range(60):
                p = share * wrong
                balance.add(rng.multinomial(100, [p, 1 - p]).tolist(), (share, 1 - share))
        assert (balance.log_factor() >= VOID) == (wrong < 1.0)


def test_somebody_in_an_arm_of_share_0_is_wrong_at_once():
    balance = ArmBalance()
    balance.add((0, 10), (0.0, 1.0))
    assert balance.log_factor() == 0.0
    balance.add((1, 10), (0.0, 1.0))
    assert balance.log_factor() == math.inf


def test_shares_that_are_none_are_refused():
    with pytest.raises(ValueError, match="one share each, 1 in all"):
        ArmBalance().add((1, 2), (0.5, 0.4))
    with pytest.raises(ValueError, match="one share each"):
        ArmBalance().add((1, 2, 3), (0.5, 0.5))
