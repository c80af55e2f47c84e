"""Harm to a minority: the share of treated users among the comparator's worst off."""

import math

import numpy as np
import pytest
from benchmarks.release.minority import Kind, run

from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig
from ostinato.release.metrics.metric import Metric, metrics_of
from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import NOTHING, Contrast, TailContrast, TimeSlot, contrast_of
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import NextAction


def slot(good, treated, *, turns=10.0, people=None, expected=0.5):
    good = np.asarray(good, dtype=np.float64)
    return TimeSlot(
        day=0,
        people_R=np.arange(len(good)) if people is None else np.asarray(people),
        turns_R=np.full(len(good), turns),
        good_R=good,
        expected_R=np.full(len(good), expected),
        treated_R=np.asarray(treated, dtype=np.bool_),
    )


def tail_of(*slots, tail=0.05, sign=1):
    contrast = TailContrast(tail, sign)
    for each in slots:
        contrast.add(each)
    return contrast.effect()


def test_one_user_in_twenty_who_loses_twenty_points_is_found_though_the_average_stays():
    found = [run(Kind(turns=20.0), seed) for seed in range(3)]
    assert all(each.days is not None for each in found)
    assert all(abs(each.average) < 0.01 for each in found)


@pytest.mark.parametrize("gain", [0.0, -0.018])
def test_equal_versions_and_a_loss_that_all_share_are_not_found(gain):
    assert max(run(Kind(turns=20.0, days=3, harmed=0.0, gain=gain), seed).evidence for seed in range(3)) < math.log(20)


def test_the_null_is_known_whatever_the_outcomes_are():
    """Nought or one in three turns: there are four outcomes, and the quantile lies within one."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(300):
        treated = rng.random(600) < 0.5
        shares.append(tail_of(slot(rng.binomial(3, 0.5, 600), treated, turns=3.0)).difference)
    assert abs(np.mean(shares)) < 0.003
    assert np.std(shares) < 1.05 * math.sqrt(0.05 * 0.95 * 4 / 600)
    assert tail_of(slot(rng.binomial(2, 0.5, 600), treated, turns=2.0)) == NOTHING


def test_lower_is_worse_or_better_as_the_metric_says():
    good = np.r_[np.zeros(20), np.full(180, 5.0), np.linspace(4.0, 6.0, 200)]
    treated = np.r_[np.ones(200), np.zeros(200)]
    assert tail_of(slot(good, treated)).difference > 0.04
    assert tail_of(slot(good, treated), sign=-1).difference < 0.0
    assert tail_of(slot(10.0 - good, treated), sign=-1).difference > 0.04


def test_too_few_users_of_the_comparator_have_no_quantile():
    assert tail_of(slot(np.full(150, 5.0), np.arange(150) < 80)) == NOTHING
    assert tail_of() == NOTHING


def test_once_a_share_grows_both_sides_are_watched_anew():
    """Users who are moved have a shorter record on the new side; scores of unlike lengths would differ by themselves."""
    rng = np.random.default_rng(1)
    few, many = np.arange(1000) < 100, np.arange(1000) < 500
    contrast = TailContrast(0.05, 1)
    for _ in range(5):
        contrast.add(slot(rng.binomial(10, 0.5, 1000), few))
    before = contrast.effect()
    contrast.add(slot(rng.binomial(10, 0.5, 1000), many))
    assert before.turns == 5_000
    assert contrast.effect().turns == 5_000, "500 users of a side, ten turns each"


def test_a_single_user_on_both_sides_counts_as_treated():
    contrast = TailContrast(0.05, 1)
    contrast.add(slot(np.full(400, 5.0), np.arange(400) < 200))
    contrast.add(slot(np.full(400, 5.0), np.arange(400) < 201))
    assert contrast.effect().people == 199
    assert contrast.effect().turns == pytest.approx(199 * 20.0)


def test_it_is_a_guardrail_that_blocks_and_one_that_holds_nothing():
    metrics = metrics_of(DEFAULT_METRICS, 0.02)
    assert next(metric for metric in metrics if metric.name == "harmed_users").role == "guardrail"
    assert isinstance(contrast_of(Metric.of(MetricConfig(name="acceptance"), 0.02), 20.0), Contrast)
    for harm, ends in ((0.0, NextAction.SHIP), (0.35, NextAction.BLOCK)):
        rng, reasons = np.random.default_rng(4), []
        trial = Trial(TrialConfig(shares=(0.5,)), active=6_000, metrics=metrics)
        treated, taste = rng.random(6_000) < 0.5, rng.beta(12, 8, 6_000)
        chance = np.where(treated & (rng.random(6_000) < 0.05), taste - harm, taste + 0.05 * harm * treated).clip(0, 1)
        for number in range(4):
            each = slot(rng.binomial(10, chance), treated, expected=0.6)
            trial.add(each, {"acceptance": {"": each}, "harmed_users": {"": each}}, (number + 1) * HOUR)
            if number == 3:
                reasons.append(trial.look((number + 1) * HOUR))
        assert reasons[-1].next is ends
        if harm:
            assert reasons[-1].reason.startswith("harmed_users worse: +")


@pytest.mark.parametrize(
    "fields", [{"role": "goal"}, {"quantile": 0.5}, {"most": 2.0}, {"numerator": ("user.returned",), "unless": ()}]
)
def test_what_a_tail_cannot_be_combined_with(fields):
    with pytest.raises(ValueError, match="with a tail users are counted"):
        MetricConfig(name="harmed_users", **fields)
