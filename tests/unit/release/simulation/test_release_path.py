"""Release after release: who gets what, what moves live, and what an outage does (nothing)."""

import numpy as np
import pytest
from benchmarks.release.path.release_path import PathConfig, ReleasePath

from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import TimeSlot
from ostinato.release.trial.incumbent_test import StandingConfig

CONFIG = PathConfig(
    trial=TrialConfig(margin=0.04, better_after_s=4 * HOUR),
    standing=StandingConfig(share=0.1, better_after_s=12 * HOUR),
)


class Product:
    """Simulated users who meet the versions that a path deals them; `worth` is each version's effect."""

    def __init__(self, path, worth, *, users=4000, seed=0):
        self.path, self.worth, self.now = path, worth, 0.0
        self.rng = np.random.default_rng(seed)
        self.stays, self.taste = self.rng.random(users), self.rng.beta(3.4, 2.3, users)
        self.shock = 0.0
        self.deal_anew()

    def deal_anew(self):
        self.place = self.rng.random(len(self.taste))

    def run(self, slots):
        steps = []
        for _ in range(slots):
            deal = self.path.deal()
            stays, treated = self.stays < deal.standing, (self.place < deal.share) & (self.stays >= deal.standing)
            worth = np.where(
                stays, self.worth[deal.best], np.where(treated, self.worth[deal.treated], self.worth[deal.other])
            )
            people = np.flatnonzero(self.rng.random(len(self.taste)) < 0.3)
            good = self.rng.binomial(4, np.clip((self.taste + worth) * (1 - self.shock), 0, 1)[people]).astype(float)

            def slot(rows, treated, people=people, good=good):
                return TimeSlot(
                    day=int(self.now // (24 * HOUR)),
                    people_R=people[rows],
                    turns_R=np.full(rows.sum(), 4.0),
                    good_R=good[rows],
                    expected_R=np.full(rows.sum(), 0.6),
                    treated_R=treated[people[rows]],
                )

            self.now += HOUR / 2
            everybody = np.ones(len(people), dtype=bool)
            steps += self.path.observe(slot(~stays[people], treated), slot(everybody, ~stays), self.now)
        return steps


def test_before_a_trial_everybody_gets_live_and_some_the_best():
    path = ReleasePath(CONFIG, "v0", active=4000)
    deal = path.deal()
    assert (deal.best, deal.standing, deal.share, deal.other) == ("v0", 0.1, 0.0, "v0")
    assert path.ready(0.0)


def test_a_good_candidate_goes_live_is_proven_better_and_becomes_the_best():
    path = ReleasePath(CONFIG, "v0", active=4000)
    product = Product(path, {"v0": 0.0, "v1": 0.12})
    path.begin("v1", 0.0)
    assert not path.ready(0.0)
    steps = product.run(150)
    assert [step.what for step in steps if step.what != "ramp"] == ["ship", "better", "best", "confirmed"]
    assert (path.live, path.previous, path.best) == ("v1", "v0", "v1")
    deal = path.deal()
    assert (deal.treated, deal.other) == ("v1", "v0")
    assert deal.share == pytest.approx(0.9)
    assert path.ready(product.now)


def test_the_next_trial_waits_while_a_release_is_being_proven():
    path = ReleasePath(CONFIG.model_copy(update={"proving_s": 24 * HOUR}), "v0", active=4000)
    product = Product(path, {"v0": 0.0, "v1": 0.05})
    path.begin("v1", 0.0)
    while path.live == "v0":
        product.run(1)
    shipped = product.now
    assert not path.ready(shipped + 23 * HOUR)
    assert path.ready(shipped + 24 * HOUR)


def test_a_bad_one_is_blocked_and_live_never_moved():
    path = ReleasePath(CONFIG, "v0", active=4000)
    product = Product(path, {"v0": 0.0, "v1": -0.15})
    path.begin("v1", 0.0)
    steps = product.run(100)
    assert steps[-1].what == "block"
    assert (path.live, path.candidate) == ("v0", None)
    assert path.deal().share == 0.0
    assert path.ready(product.now)


def test_a_staircase_of_losses_too_small_for_one_comparison_ends_at_the_best_release():
    config = PathConfig(trial=TrialConfig(margin=0.06), standing=StandingConfig(share=0.2))
    path = ReleasePath(config, 0, active=4000)
    product = Product(path, {n: -0.03 * n for n in range(20)})
    back = []
    for n in range(1, 12):
        product.deal_anew()
        path.begin(n, product.now)
        for _ in range(200):
            found = product.run(1)
            back += [step for step in found if step.what == "return_to_best"]
            if back or path.ready(product.now):
                break
        if back:
            break
    assert back
    assert path.live == 0
    assert "worse than the best release: -" in back[0].reason
    assert not path.ready(product.now), "a rollback is followed by a pause"
    assert path.ready(product.now + config.cooldown_s)


@pytest.mark.parametrize(("allowed", "pause"), [(1, CONFIG.cooldown_s), (0, 24 * HOUR)])
def test_after_a_rollback_there_is_a_pause_and_a_day_of_it_where_no_more_are_allowed(allowed, pause):
    path = ReleasePath(CONFIG.model_copy(update={"rollbacks_a_day": allowed}), "v0", active=4000)
    product = Product(path, {"v0": 0.0, "v1": 0.0})
    path.begin("v1", 0.0)
    for _ in range(150):
        if any(step.what == "ship" for step in product.run(1)):
            break
    product.worth["v1"] = -0.5
    for _ in range(200):
        if any(step.what in ("roll_back", "return_to_best") for step in product.run(1)):
            break
    assert path.live == "v0"
    assert not path.ready(product.now + pause - 1.0)
    assert path.ready(product.now + pause)


@pytest.mark.parametrize("seed", range(4))
def test_an_outage_that_hits_every_arm_rolls_nothing_back(seed):
    path = ReleasePath(CONFIG, "v0", active=4000)
    product = Product(path, {"v0": 0.0, "v1": 0.0, "v2": 0.0}, seed=seed)
    path.begin("v1", 0.0)
    for _ in range(150):
        if any(step.what == "ship" for step in product.run(1)):
            break
    assert path.live == "v1"
    product.deal_anew()
    path.begin("v2", product.now)
    product.shock = 0.3
    steps = product.run(24)
    product.shock = 0.0
    steps += product.run(24)
    assert not [step for step in steps if step.what in ("roll_back", "return_to_best", "block")]
