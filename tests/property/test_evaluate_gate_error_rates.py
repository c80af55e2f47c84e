"""The gate's error rates by simulation: losses are blocked, equal models pass, small losses do not add up, and the rates are the settings'.

Item by item: a version has an effect of its own on each item, which stays, and every draw adds noise, as the gate assumes before it
has measured anything. Means of runs are compared with their own sampling error, three standard errors of it.
"""

import numpy as np

from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, Incumbents, Verdict
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.gate import Match, Paired, assumed_error, decide, smallest_margin, smallest_total_margin

V0, V1, CANDIDATE = (PolicyVersion(number=n, hash=f"{n:02d}") for n in (0, 1, 9))
MATCH = Match(
    suite="s", suite_hash="9f", candidate=CANDIDATE, candidate_mean=0.5, live_mean=0.5,
    incumbents=Incumbents(live=V1, best=V0, anchor=V0, round=0),
)  # fmt: skip


RUNS = 200


class World:
    """Versions with true means; what is drawn of one is its mean, its effect on each item, and fresh noise."""

    def __init__(self, seed, items, config):
        self.rng, self.items, self.config = np.random.default_rng(seed), items, config

    def version(self, mean):
        return mean, self.rng.normal(0.0, self.config.item_spread, self.items)

    def draw(self, version, draws):
        mean, effect_I = version
        return mean + effect_I + self.rng.normal(0.0, self.config.draw_spread / np.sqrt(draws), self.items)

    def added(self, version, held, draws):
        """The mean of the draws after the first `held`, up to `draws`."""
        return self.draw(version, draws - held)

    def judge(self, candidate, live, best, anchor):
        """Play the looks of one candidate to the end; each adds fresh draws to those before."""
        sides = {"candidate": candidate, "live": live, "best": best, "anchor": anchor}
        means, held = {name: np.zeros(self.items) for name in sides}, 0
        for draws in self.config.schedule():
            for name, version in sides.items():
                new_I = self.added(version, held, draws)
                means[name] = (means[name] * held + new_I * (draws - held)) / draws
            held = draws
            paired = [
                Paired(
                    suite="s",
                    against=against,
                    policy=V0,
                    differences_I=means["candidate"] - means[against],
                    draws=draws,
                )
                for against in Incumbent
            ]
            report = decide(paired, (), self.config, MATCH)
            if report.verdict is not Verdict.EXTEND:
                return report
        raise AssertionError("the gate did not end")


def share(config, items, *, candidate=0.0, live=0.0, best=0.0, runs=RUNS, seed=0, found=lambda report: report.verdict):
    """The share of runs in which a fresh candidate is found to be so; SHIP, unless said otherwise."""
    world, hits = World(seed, items, config), 0
    for _ in range(runs):
        versions = [world.version(mean) for mean in (candidate, live, best, best)]
        hits += found(world.judge(*versions)) in (Verdict.SHIP, True)
    return hits / runs


def slack(rate, runs=RUNS):
    return 3 * (rate * (1 - rate) / runs) ** 0.5


def test_a_loss_of_the_margin_against_live_ships_as_often_as_alpha_says():
    for alpha in (0.05, 0.2):
        # a margin of 1.4 standard errors: a loss of it is seldom significant by itself, so the margin decides
        config = GateConfig(alpha=alpha, margin=0.015, total_margin=0.9)
        shipped = share(config, 400, candidate=-0.015, best=-0.015)
        assert abs(shipped - alpha) <= slack(alpha), "not less either: the rate is the setting's, not the suite's"


def test_a_loss_of_the_total_margin_ships_as_often_as_the_share_of_the_week_says():
    for per_week in (1, 5):
        config = GateConfig(alpha=0.2, margin=0.9, total_margin=0.03, candidates_per_week=per_week)
        # anchor and best are drawn apart, so both must hold: their common rate lies below one's and above the product
        shipped = share(config, 400, candidate=-0.03, live=-0.03)
        rate = 0.2 / per_week
        assert 0 < shipped <= rate + slack(rate)


def test_a_week_of_candidates_that_sit_at_the_total_margin_ships_none_in_nearly_every_week():
    """At 5% each, twenty tries find a way through in more than half of all weeks."""
    config = GateConfig(margin=0.9, total_margin=0.03, candidates_per_week=20)
    weeks = [share(config, 400, candidate=-0.03, live=-0.03, runs=20, seed=week) > 0 for week in range(40)]
    assert sum(weeks) / 40 <= 0.05 + slack(0.05, 40)


def test_equal_candidates_pass_at_the_smallest_margins():
    config = GateConfig()
    smallest = GateConfig(
        total_margin=smallest_total_margin(300, config),
        margin=smallest_margin(assumed_error(300, config), config.alpha),
    )
    world, passed = World(3, 300, smallest), 0
    for _ in range(RUNS):
        first, candidate = world.version(0.0), world.version(0.0)
        shared_I = world.draw(first, 8)  # live, best and anchor are one version, which is drawn once
        differences_I = world.draw(candidate, 8) - shared_I
        paired = [
            Paired(suite="s", against=against, policy=V0, differences_I=differences_I, draws=8) for against in Incumbent
        ]
        passed += decide(paired, (), smallest, MATCH).verdict is Verdict.SHIP
    assert passed / RUNS >= 0.9 - slack(0.9)


def test_an_equal_candidate_is_seldom_called_better_and_a_better_one_is():
    config = GateConfig(alpha=0.2, candidates_per_week=1)
    rate = share(config, 400, found=lambda report: report.better)
    assert 0 < rate <= 0.2 + slack(0.2)
    assert share(GateConfig(), 400, candidate=0.06, found=lambda report: report.better, runs=60) >= 0.9


def test_many_looks_keep_the_error_budget():
    config = GateConfig(alpha=0.2, margin=0.015, total_margin=0.9, first_draws=1, max_draws=8)
    shipped = share(config, 400, candidate=-0.015, best=-0.015)
    assert 0.05 < shipped <= 0.2 + slack(0.2)


def ladder(config, items, step, candidates, seed, make=World):
    """Candidates that are each `step` better than what is live; where live, best and the number of releases end."""
    world = make(seed, items, config)
    anchor = live = best = world.version(0.0)
    ships = 0
    for _ in range(candidates):
        candidate = world.version(live[0] + step)
        report = world.judge(candidate, live, best, anchor)
        if report.verdict is Verdict.SHIP:
            live, ships = candidate, ships + 1
            best = candidate if report.better else best
    return live[0], best[0], ships


def test_small_losses_do_not_add_up():
    """Against live alone, most of thirty candidates that are one point worse each ship."""
    config = GateConfig(margin=0.03, total_margin=0.04, candidates_per_week=56)
    ends = [ladder(config, 600, -0.01, 30, seed)[0] for seed in range(8)]
    assert min(ends) >= -0.04
    alone = GateConfig(margin=0.03, total_margin=0.99, candidates_per_week=56)
    assert ladder(alone, 600, -0.01, 30, 0)[0] <= -0.10, "the bound against best and anchor is what holds it"


def test_equal_candidates_ship_as_often_late_as_early():
    """Live's own draws were kept: the one that shipped by luck kept its luck, and the fifth equal candidate shipped half as often."""
    config = GateConfig(alpha=0.2, margin=0.015, total_margin=0.9)
    shipped = np.zeros(6)
    for seed in range(60):
        world = World(seed, 300, config)
        anchor = live = world.version(0.0)
        for turn in range(6):
            candidate = world.version(0.0)
            if world.judge(candidate, live, anchor, anchor).verdict is Verdict.SHIP:
                shipped[turn] += 1
                live = candidate
    early, late = shipped[:2].mean() / 60, shipped[4:].mean() / 60
    assert late >= early - 3 * (early * (1 - early) / 60) ** 0.5


# ---------------------------------------------------------------- draws that are kept


class KeptDraws(World):
    """Every version keeps its draws until a candidate is blocked or takes a second look (`gate.kept_rounds`)."""

    def __init__(self, seed, items, config):
        super().__init__(seed, items, config)
        self.kept = {}

    def added(self, version, held, draws):
        key = id(version), held, draws
        if key not in self.kept:
            self.kept[key] = version, super().added(version, held, draws)
        return self.kept[key][1]

    def judge(self, candidate, live, best, anchor):
        report = super().judge(candidate, live, best, anchor)
        if report.verdict is not Verdict.SHIP or report.draws > self.config.first_draws:
            self.kept.clear()
        return report


def after_ships(make, config, loss, *, before=3, runs=400):
    """The share of candidates worse than live by `loss` that ship right after equal ones did, and of runs that got there."""
    shipped, reached = 0, 0
    for seed in range(runs):
        world = make(seed, 200, config)
        anchor = live = world.version(0.0)
        for _ in range(before):
            candidate = world.version(0.0)
            if world.judge(candidate, live, anchor, anchor).verdict is not Verdict.SHIP:
                break
            live = candidate
        else:
            reached += 1
            shipped += world.judge(world.version(-loss), live, anchor, anchor).verdict is Verdict.SHIP
    return shipped / reached, reached


def test_a_loss_of_the_margin_ships_no_more_often_beside_the_draws_that_live_was_shipped_by():
    for looks in ({"first_draws": 8, "max_draws": 8}, {"first_draws": 2, "max_draws": 4}):
        config = GateConfig(alpha=0.2, margin=0.04, total_margin=0.9, **looks)
        shipped, reached = after_ships(KeptDraws, config, 0.04)
        assert reached > 100
        assert shipped <= 0.2 + slack(0.2, reached)


def test_kept_draws_of_the_anchor_pass_a_loss_of_the_total_margin_no_more_often_than_their_share():
    """Ten candidates that all sit there share the anchor's luck, so they pass together or not at all: the rate is the mean's."""
    config = GateConfig(alpha=0.2, margin=0.9, total_margin=0.03, candidates_per_week=5, first_draws=8, max_draws=8)
    passed = []
    for seed in range(150):
        world = KeptDraws(seed, 200, config)
        anchor, live = world.version(0.0), world.version(-0.03)
        passed.append(0)
        for _ in range(10):
            candidate = world.version(-0.03)
            if world.judge(candidate, live, anchor, anchor).verdict is not Verdict.SHIP:
                continue
            live, passed[-1] = candidate, passed[-1] + 1
    rates = np.array(passed) / 10
    assert rates.mean() <= 0.2 / 5 + 3 * rates.std() / np.sqrt(len(rates))


def test_small_losses_do_not_add_up_where_draws_are_kept():
    config = GateConfig(margin=0.03, total_margin=0.04, candidates_per_week=56)
    ends = [ladder(config, 600, -0.01, 30, seed, make=KeptDraws)[0] for seed in range(8)]
    assert min(ends) >= -0.04


def test_better_candidates_ship_one_after_another_where_draws_are_kept():
    """A lucky release blocks one candidate at most: after a block all are drawn anew."""
    config = GateConfig(margin=0.1, total_margin=0.115, first_draws=2, max_draws=4, candidates_per_week=20)
    ships = [ladder(config, 96, 0.02, 8, seed, make=KeptDraws)[2] for seed in range(60)]
    fresh = [ladder(config, 96, 0.02, 8, seed)[2] for seed in range(60)]
    assert np.mean(ships) >= np.mean(fresh) - 3 * np.std(fresh) / np.sqrt(60)
