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

    def added(self, side, version, held, draws):
        """The mean of a side's draws after the first `held`, up to `draws`."""
        return self.draw(version, draws - held)

    def judge(self, candidate, live, best, anchor):
        """Play the looks of one candidate to the end; each adds fresh draws to those before."""
        sides = {"candidate": candidate, "live": live, "best": best, "anchor": anchor}
        means, held = {name: np.zeros(self.items) for name in sides}, 0
        for draws in self.config.schedule():
            for name, version in sides.items():
                new_I = self.added(name, version, held, draws)
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


# ---------------------------------------------------------------- draws that are shared


class SharedDraws(World):
    """Ten candidates share the draws of best and anchor, and the first after a release those that live was shipped by (`share_draws`)."""

    def __init__(self, seed, items, config):
        super().__init__(seed, items, config)
        self.judged, self.shared, self.first, self.shipped, self.anchor = 0, {}, None, None, None

    def added(self, side, version, held, draws):
        side = "anchor" if version is self.anchor and side == "live" else side
        if side in ("best", "anchor"):
            key = side, id(version), held, draws
            if key not in self.shared:
                self.shared[key] = version, super().added(side, version, held, draws)
            return self.shared[key][1]
        if side == "live" and held == 0 and self.shipped is not None and self.shipped[0] is version:
            return self.shipped[1]
        new_I = super().added(side, version, held, draws)
        if side == "candidate" and held == 0:
            self.first = version, new_I
        return new_I

    def judge(self, candidate, live, best, anchor):
        self.anchor = anchor
        report = super().judge(candidate, live, best, anchor)
        once = report.verdict is Verdict.SHIP and report.draws == self.config.first_draws
        self.shipped = self.first if once else None
        self.judged += 1
        if self.judged % 10 == 0:
            self.shared.clear()
        return report


def right_after_a_release(make, config, loss, runs=500):
    """The share of candidates worse than live by `loss` that ship as the first after a release at its first look."""
    shipped, reached = 0, 0
    for seed in range(runs):
        world = make(seed, 400, config)
        anchor = before = world.version(0.0)
        live = world.version(0.0)
        if world.judge(live, before, anchor, anchor).verdict is Verdict.SHIP:
            reached += 1
            shipped += world.judge(world.version(-loss), live, anchor, anchor).verdict is Verdict.SHIP
    return shipped / reached, reached


def test_a_loss_of_the_margin_ships_no_more_often_beside_the_draws_that_live_was_shipped_by():
    for looks in ({"first_draws": 8, "max_draws": 8}, {"first_draws": 2, "max_draws": 8}):
        config = GateConfig(alpha=0.2, margin=0.015, total_margin=0.9, **looks)
        fresh, _ = right_after_a_release(World, config, 0.015)
        shared, reached = right_after_a_release(SharedDraws, config, 0.015)
        assert reached > 200
        assert fresh > 0.1, "the margin decides here, and not that the loss is significant"
        assert shared <= fresh


def test_a_loss_of_the_total_margin_ships_as_often_whether_draws_are_shared_or_not():
    """Ten candidates that all sit there share the luck of best and anchor: they pass together or not at all, and as many as else."""
    config = GateConfig(alpha=0.2, margin=0.9, total_margin=0.03, candidates_per_week=1)
    rates = {}
    for make in (World, SharedDraws):
        passed = []
        for seed in range(80):
            world = make(seed, 400, config)
            anchor, best, live = world.version(0.0), world.version(0.0), world.version(-0.03)
            verdicts = [world.judge(world.version(-0.03), live, best, anchor).verdict for _ in range(10)]
            passed.append(verdicts.count(Verdict.SHIP) / 10)
        rates[make] = np.mean(passed), np.std(passed) / np.sqrt(len(passed))
    (fresh, _), (shared, error) = rates[World], rates[SharedDraws]
    assert 0 < fresh <= 0.2 + slack(0.2, 800)
    assert shared <= fresh + 3 * error
    assert error < 0.04, "else it shows nothing"


def test_a_loss_of_the_margin_ships_as_often_where_live_is_the_anchor_and_shares_its_draws():
    config = GateConfig(alpha=0.2, margin=0.03, total_margin=0.9, candidates_per_week=1)
    rates = {}
    for make in (World, SharedDraws):
        passed = []
        for seed in range(80):
            world = make(seed, 400, config)
            live = world.version(0.0)
            verdicts = []
            for _ in range(10):
                verdicts.append(world.judge(world.version(-0.03), live, live, live).verdict)
                world.shipped = None  # the operator keeps the anchor
            passed.append(verdicts.count(Verdict.SHIP) / 10)
        rates[make] = np.mean(passed), np.std(passed) / np.sqrt(len(passed))
    (fresh, _), (shared, error) = rates[World], rates[SharedDraws]
    assert 0 < fresh <= 0.2 + slack(0.2, 800)
    assert shared <= fresh + 3 * error
    assert error < 0.04, "else it shows nothing"


def test_small_losses_add_up_no_more_where_draws_are_shared():
    config = GateConfig(alpha=0.2, margin=0.03, total_margin=0.04, candidates_per_week=2)
    fresh, shared = (
        [ladder(config, 400, -0.01, 30, seed, make)[0] for seed in range(40)] for make in (World, SharedDraws)
    )
    assert np.mean(shared) >= np.mean(fresh) - 3 * np.std(fresh) / np.sqrt(40)
    assert np.std(fresh) / np.sqrt(40) < 0.005
