"""What the ledger's lines say of trials and verdicts, and what was risked with them."""

import pytest

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.release.pace.budget import WEEKS, spent
from ostinato.release.pace.cadence import WEEK
from ostinato.release.pace.history import History
from ostinato.release.trial.config import TrialConfig

V3, V5 = (PolicyVersion(number=number, hash=f"{number:02d}" * 16) for number in (3, 5))


def told(*lines):
    history = History()
    for at, action, policy, detail in lines:
        history.apply(
            ReleaseEvent(
                id=f"{at}", action=action, policy=policy, previous=None, reason="", detail=detail, at=float(at)
            )
        )
    return history


def verdict(word):
    return {"report": {"verdict": word}}


def test_a_trial_lasts_from_its_first_users_to_what_it_showed():
    history = told(
        (0, "evaluated", V3, verdict("EXTEND")), (5, "evaluated", V3, verdict("SHIP")), (10, "canary", V3, {}), (20, "ramped", V3, {}),
        (30, "blocked", V5, {}), (50, "shipped", V3, {"share": 0.9}), (60, "canary", V5, {}), (90, "awaits_approval", V5, {}),
        (99, "approved", V5, {"actor": "ann"}), (100, "shipped", V5, {"actor": "ann"}),
    )  # fmt: skip
    assert [(end.at, end.seconds, end.passed) for end in history.trials] == [(50.0, 40.0, True), (90.0, 30.0, True)]
    assert list(history.verdicts) == [5.0]


def test_what_was_stopped_did_not_pass_and_what_a_person_ended_says_nothing():
    history = told(
        (0, "canary", V3, {}), (7, "blocked", V3, {}), (10, "canary", V5, {}), (11, "shipped", V3, {"actor": "ann"}),
        (20, "canary", V5, {}), (25, "shipped", V5, {"actor": "ann"}),
    )  # fmt: skip
    assert [(end.seconds, end.passed) for end in history.trials] == [(7.0, False)]


def test_the_levels_of_the_last_weeks_add_up():
    config = TrialConfig(ship_alpha=0.05, false_stops=0.5, trials_a_week=20.0)
    lines = [(0, "canary", V3, {}), (10, "shipped", V3, {"share": 0.9})]
    old = told(*lines)
    assert spent(old, config, tried=True, gate_alpha=0.1, now=WEEKS * WEEK + 11).trials == 0
    both = told(*lines, (20, "evaluated", V5, verdict("SHIP")), (30, "canary", V5, {}), (40, "blocked", V5, {}))
    found = spent(both, config, tried=True, gate_alpha=0.1, now=50.0)
    assert (found.trials, found.verdicts) == (2, 1)
    assert found.false_ships == pytest.approx(2 * 0.05)
    assert found.false_stops == pytest.approx(2 * 0.5 / 20)
    assert found.stops_allowed == pytest.approx(WEEKS * 0.5)
    assert spent(both, config, tried=False, gate_alpha=0.1, now=50.0).false_ships == pytest.approx(0.1)
