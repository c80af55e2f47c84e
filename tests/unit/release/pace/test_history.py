"""What the ledger's lines say of trials and verdicts, and what was risked with them."""

import pytest

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.release.guard import GuardConfig
from ostinato.release.pace import WEEK, WEEKS, PaceHistory, spent
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.incumbent_test import StandingConfig

V3, V5 = (PolicyVersion(number=number, hash=f"{number:02d}" * 16) for number in (3, 5))


def told(*lines, previous=None):
    history = PaceHistory()
    for at, action, policy, detail in lines:
        history.apply(
            ReleaseEvent(
                id=f"{at}", action=action, policy=policy, previous=previous, reason="", detail=detail, at=float(at)
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


def test_the_time_since_another_candidate_counts_from_its_last_look_and_not_from_ones_own():
    assert told().since_another(V3, 9.0) is None
    history = told((10, "evaluated", V3, verdict("EXTEND")))
    assert history.since_another(V3, 30.0) is None, "its own looks are one candidate's"
    assert history.since_another(V5, 30.0) == 20.0, "alpha was risked on an abandoned one, too"
    history = told(
        (10, "evaluated", V3, verdict("BLOCK")), (20, "evaluated", V5, verdict("EXTEND")), (25, "evaluated", V5, verdict("EXTEND"))
    )  # fmt: skip
    assert history.since_another(V5, 30.0) == 20.0
    again = told((10, "evaluated", V3, verdict("SHIP")), (20, "evaluated", V3, verdict("EXTEND")))
    assert again.since_another(V3, 30.0) == 20.0, "judged anew, it is another candidate"


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


def test_what_the_guard_and_the_standing_comparison_may_have_taken_back_adds_up():
    guard, standing = GuardConfig(alpha=0.02), StandingConfig(alpha=0.01, period_s=WEEK)
    history = told((10, "shipped", V3, {}), (WEEK, "shipped", V5, {}), (2.5 * WEEK, "verified", V5, {}), previous=V3)
    rules = {"tried": False, "gate_alpha": 0.1}
    found = spent(history, TrialConfig(), now=3.0 * WEEK, guard=guard, standing=standing, **rules)
    assert found.false_rollbacks == pytest.approx(2 * 0.02 + (3 + 1) * 0.01)
    later = spent(history, TrialConfig(), now=(WEEKS + 2.6) * WEEK, guard=guard, **rules)
    assert later.false_rollbacks == pytest.approx(0.02), "what was live already four weeks ago may be taken back still"
    assert spent(history, TrialConfig(), now=3.0 * WEEK, **rules).false_rollbacks == 0.0
    assert spent(told((0, "shipped", V3, {})), TrialConfig(), now=9.0, guard=guard, **rules).false_rollbacks == 0.0


def test_each_later_period_beside_what_was_replaced_has_the_budget_of_a_trial():
    config = TrialConfig(false_stops=0.5, trials_a_week=20.0, retest_s=100.0)
    lines = [(0, "canary", V3, {"share": 0.1, "salt": "a"}), (50, "shipped", V3, {"share": 0.9})]
    assert spent(told(*lines), config, tried=True, gate_alpha=0.1, now=350.0).false_stops == pytest.approx(4 * 0.025)
    over = told(*lines, (250, "rolled_back", V5, {}))
    assert spent(over, config, tried=True, gate_alpha=0.1, now=9_000.0).false_stops == pytest.approx(3 * 0.025)
    approved = told(
        lines[0], (50, "awaits_approval", V3, {}), (300, "shipped", V3, {"share": 0.9, "salt": "b", "actor": "ann"})
    )
    assert spent(approved, config, tried=True, gate_alpha=0.1, now=410.0).false_stops == pytest.approx(3 * 0.025)


def test_all_verdicts_of_the_last_weeks_count_however_fast_they_came():
    count = int(WEEKS * WEEK / 1_800)
    history = told(*((1_800 * number, "evaluated", V3, verdict("BLOCK")) for number in range(1, count + 1)))
    found = spent(history, TrialConfig(), tried=False, gate_alpha=0.01, now=WEEKS * WEEK)
    assert (found.verdicts, found.false_ships) == (count, pytest.approx(0.01 * count))


def test_a_clock_that_was_ahead_takes_nothing_off_a_bound():
    config = TrialConfig(false_stops=0.5, trials_a_week=20.0, retest_s=100.0)
    began = (9_000, "canary", V3, {"share": 0.1, "salt": "a"})
    for history in (told(began), told(began, (100, "blocked", V3, {}))):
        assert spent(history, config, tried=True, gate_alpha=0.1, now=200.0).false_stops == pytest.approx(0.025)
