"""The router as a fold: what rows do to the odds, and that a saving goes on where it was."""

import json
from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
from pydantic import ValidationError

from ostinato.core.records import Arm, Consent, Finish, Pick, Reward, Turn
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.posterior import drawn
from ostinato.release.auto.router import FoldedRouter, Router
from ostinato.serve.config import AutoConfig
from ostinato.testing.records import a_turn

EVEN = {"live": 0.5, "large": 0.5}
ODDS = {"live": 0.5, "large": 0.25, "small": 0.25}


def a_dealt_turn(id, arm, *, user="ann", odds=EVEN, cost=None, episode=None, version=0, **options) -> Turn:
    turn = a_turn(id, user=user, version=version, **options)
    outside = {} if arm == "live" else {"arm": Arm.OUTSIDE, "sampled_ids": (), "logprobs": (), "spans": ()}
    return replace(turn, auto=Pick(arm=arm, odds=odds, cost=cost), episode=episode or turn.episode, **outside)


def a_reward(turn, value):
    return Reward(turn=turn.id, value=value, function="test@1", signals=(), at=20.0)


def taught(router, likes, users=60, seed=1, **options):
    """Each user gets one turn of each arm and likes it with the arm's probability."""
    rng = np.random.default_rng(seed)
    for user in range(users):
        for arm, chance in likes.items():
            turn = a_dealt_turn(f"{arm}{user}.{seed}:0", arm, user=f"u{user}", **options)
            router.apply(turn)
            router.apply(a_reward(turn, 1.0 if rng.random() < chance else -1.0))
    return router


def test_before_anything_is_known_all_are_drawn_alike():
    assert Router(["live", "large"], RouterConfig()).odds({"live", "large"}) == pytest.approx(EVEN)


def test_turns_that_may_not_count_teach_it_nothing():
    router, config = Router(["live", "large"], RouterConfig()), RouterConfig()
    for user in range(60):
        turn = replace(a_dealt_turn(f"{user}:0", "live", user=f"u{user}"), consent=Consent.NEVER, finish=Finish.ERROR)
        router.apply(turn.without_words())
        router.apply(a_reward(turn, -1.0))
    assert router.state() == Router(["live", "large"], config).state()


def test_shares_go_where_the_reward_is_and_stop_at_the_floor():
    odds = taught(Router(["live", "large"], RouterConfig(floor=0.05)), {"live": 0.9, "large": 0.2}).odds(EVEN)
    assert odds["live"] == pytest.approx(0.95, abs=1e-6)
    assert list(odds) == ["live", "large"]


def test_an_arm_that_is_not_to_be_had_leaves_its_share_to_the_others():
    router = taught(
        Router(["live", "large", "small"], RouterConfig()), {"live": 0.6, "large": 0.5, "small": 0.5}, odds=ODDS
    )
    assert sum(router.odds({"live", "small"}).values()) == pytest.approx(1.0)
    assert router.odds({"small", "unheard of"}) == {"small": 1.0}
    assert router.odds(set()) == {}


def test_money_and_time_count_as_much_as_the_operator_says():
    for config, dear in (
        (RouterConfig(price=40.0), {"cost": 0.05}),
        (RouterConfig(weights={"reward": 1.0, "seconds": -0.2}), {"ended_at": 40.0}),
    ):
        router = Router(["live", "large"], config)
        for arm in EVEN:
            options = dear if arm == "large" else {"cost": 0.0}
            for user in range(60):
                turn = a_dealt_turn(f"{arm}{user}:0", arm, user=f"u{user}", **options)
                turn = replace(turn, started_at=9.0)
                router.apply(turn)
                router.apply(a_reward(turn, 1.0 if user % 2 else -1.0))
        assert router.odds(EVEN)["live"] > 0.9, config


def test_a_failed_answer_counts_as_the_least_reward():
    router = Router(["live", "large"], RouterConfig())
    for user in range(40):
        router.apply(a_dealt_turn(f"{user}:0", "large", user=f"u{user}", finish=Finish.ERROR))
    view = router.views()[1]
    assert (view.arm, view.failed, view.turns) == ("large", 40, 40)
    assert view.utility.mean < -0.9


def test_a_failure_weighs_the_same_however_few_answers_are_rated():
    for rated in (1.0, 0.2, 0.1):
        router, rng = Router(["live", "large"], RouterConfig()), np.random.default_rng(2)
        for i in range(4000):
            for arm, failing, value in (("live", 0.02, 0.6), ("large", 0.0, 0.5)):
                failed = rng.random() < failing
                finish = {"finish": Finish.ERROR} if failed else {}
                turn = a_dealt_turn(f"{arm}{i}:0", arm, user=f"u{i % 400}", **finish)
                router.apply(turn)
                if not failed and rng.random() < rated:
                    router.apply(a_reward(turn, value + rng.uniform(-0.3, 0.3)))
        live, large = router.views()
        assert live.utility.mean == pytest.approx(0.98 * 0.6 - 0.02, abs=0.02), rated
        assert large.utility.mean == pytest.approx(0.5, abs=0.02), rated
        assert router.odds(EVEN)["live"] > 0.9, rated


def test_an_answer_that_people_stop_counts_by_its_reward_as_one_that_they_reject():
    """A tenth of either arm's answers is bad: live's are stopped while they are written, large's are read to the end."""
    router = Router(["live", "large"], RouterConfig(weights={"reward": 1.0, "seconds": -0.1}))
    for i in range(2000):
        for arm, finish in (("live", Finish.LEFT), ("large", Finish.STOP)):
            bad = i // 200 == 0
            seconds = 1.0 if bad and finish is Finish.LEFT else 4.0
            turn = a_dealt_turn(f"{arm}{i}:0", arm, user=f"u{i % 200}", finish=finish if bad else Finish.STOP)
            router.apply(replace(turn, started_at=10.0, ended_at=10.0 + seconds))
            router.apply(a_reward(turn, -0.5 if bad else 0.5))
    live, large = router.views()
    assert large.utility.mean == pytest.approx(0.9 * 0.5 - 0.1 * 0.5 - 0.4, abs=0.06)
    assert live.utility.mean == pytest.approx(large.utility.mean, abs=0.01)


def test_a_reward_from_outside_the_log_speaks_of_a_turn_that_did_not_fail():
    router = Router(["live"], RouterConfig())
    for user in range(400):
        router.measure("live", ("acme", f"u{user}"), "reward", 0.5)
    assert router.views()[0].utility.mean == pytest.approx(0.5, abs=0.02)


def test_a_saving_that_mixed_failures_and_rewards_is_refused():
    state = Router(["live"], RouterConfig()).state()
    del state["format"]
    with pytest.raises(ValueError, match="format"):
        Router(["live"], RouterConfig()).restore(state)


def test_turns_that_auto_did_not_deal_and_foreign_arms_say_nothing():
    router = Router(["live", "large"], RouterConfig())
    before = router.views()
    for turn in (a_turn("a:0"), replace(a_turn("b:0"), auto=Pick(arm="gone", odds={"gone": 1.0}))):
        router.apply(turn)
        router.apply(a_reward(turn, 1.0))
    assert router.views() == before


def test_a_turn_is_rewarded_once():
    router, turn = Router(["live"], RouterConfig()), a_dealt_turn("a:0", "live", odds={"live": 1.0})
    for row in (turn, a_reward(turn, 1.0)):
        router.apply(row)
    before = router.views()
    router.apply(a_reward(turn, 1.0))
    assert router.views() == before


def test_one_user_with_a_thousand_upvotes_hardly_moves_a_share():
    likes = {"live": 0.6, "large": 0.6}
    quiet, loud = (taught(Router(list(likes), RouterConfig()), likes, users=400) for _ in range(2))
    for i in range(1000):
        turn = a_dealt_turn(f"loud{i}:0", "large", user="mallory")
        loud.apply(turn)
        loud.apply(a_reward(turn, 1.0))
    means = [router.views()[1].utility.mean for router in (quiet, loud)]
    assert 0.0 < means[1] - means[0] <= 0.01  # of a range of 2
    assert loud.odds(EVEN)["large"] - quiet.odds(EVEN)["large"] <= 0.06


def test_users_that_nobody_proved_are_one():
    proven = taught(Router(list(EVEN), RouterConfig(users="verified")), {"live": 0.9, "large": 0.1})
    assert proven.views()[0].utility.users == pytest.approx(1.0)
    assert proven.odds(EVEN)["live"] < 0.9


def test_new_weights_widen_the_doubt_and_a_rollback_finds_what_was_known():
    router = taught(Router(["live", "large"], RouterConfig(kept=0.25)), {"live": 0.5, "large": 0.5}, users=300)
    before = router.views()[0].utility.deviation
    router.apply(a_dealt_turn("new:0", "live", version=1))
    after = router.views()[0].utility.deviation
    assert after == pytest.approx(2 * before, rel=0.1)
    router.apply(a_dealt_turn("back:0", "live", version=0))
    assert router.views()[0].utility.deviation == pytest.approx(before, rel=0.001)  # it has one turn more
    assert router.views()[1].utility.deviation < 1.1 * before


def test_a_release_takes_what_is_known_of_it_from_canary_to_live():
    names, odds = ["live", "canary"], {"live": 0.5, "canary": 0.5}
    router = Router(names, RouterConfig())

    def say(arm, version, value, count, start=0):
        for i in range(start, start + count):
            turn = replace(a_turn(f"{arm}{version}.{i}:0", user=f"u{i}", version=version, arm=Arm(arm)), episode=f"{i}")
            turn = replace(turn, auto=Pick(arm=arm, odds=odds))
            router.apply(turn)
            router.apply(a_reward(turn, value if i % 4 else -value))

    say("live", 0, 0.2, 80)
    say("canary", 1, 0.8, 1)
    live, canary = router.views()
    assert canary.utility.deviation > 1.5 * live.utility.deviation, "it begins with a share of what is known of live"
    assert canary.utility.mean == pytest.approx(live.utility.mean, abs=0.05)
    say("canary", 1, 0.8, 80, start=100)
    good = router.views()[1].utility
    say("live", 1, 0.8, 1, start=300)
    assert router.views()[0].utility.mean == pytest.approx(good.mean, abs=0.02)
    say("canary", 2, -1.0, 40, start=400)
    say("canary", 3, 0.0, 1, start=500)
    assert router.views()[1].utility.mean == pytest.approx(good.mean, abs=0.1), (
        "no bad canary before it counts against it"
    )
    say("live", 0, 0.2, 1, start=600)
    assert router.views()[0].utility.mean == pytest.approx(live.utility.mean, abs=0.02), (
        "a rollback forgets the release"
    )


def test_an_episode_is_one_draw_however_many_turns_it_has():
    router, rng = Router(list(EVEN), RouterConfig()), np.random.default_rng(3)
    for episode in range(600):
        arm = drawn(EVEN, float(rng.random()))
        for turn in range(1 if arm == "live" else 12):  # an arm whose episodes are longer is no wrong propensity
            router.apply(a_dealt_turn(f"{episode}.{turn}:0", arm, episode=f"e{episode}"))
    assert [balance.draws for balance in router.propensities.balances()] == [600, 600]
    assert not router.propensities.wrong(0.01)


def test_a_saving_goes_on_where_it_was():
    router, again = (
        taught(Router(list(EVEN), RouterConfig()), {"live": 0.7, "large": 0.4}),
        Router(list(EVEN), RouterConfig()),
    )
    open_turn = a_dealt_turn("open:0", "large", cost=0.5)
    router.apply(open_turn)
    again.restore(json.loads(json.dumps(router.state())))
    for each in (router, again):
        each.apply(a_reward(open_turn, 1.0))
        each.apply(a_dealt_turn("open:1", "large", episode=open_turn.episode))
    assert again.views() == router.views()
    assert again.odds(EVEN) == router.odds(EVEN)
    assert again.state() == router.state()


def test_a_saving_of_other_arms_is_taken_as_far_as_it_goes():
    router = taught(Router(list(EVEN), RouterConfig()), {"live": 0.7, "large": 0.4})
    changed = Router(["live", "new"], RouterConfig(weights={"reward": 1.0, "seconds": -0.01}))
    changed.restore(json.loads(json.dumps(router.state())))
    live, new = changed.views()
    assert live.utility.mean == pytest.approx(
        router.views()[0].utility.mean - 0.6
    )  # half of 120 s, of which nothing is known
    assert new.turns == 0


@pytest.mark.parametrize(
    "options",
    [
        {"low": 1.0, "high": 1.0},
        {"weights": {}},
        {"weights": {"reward": 0.0}},
        {"weights": {"applause": 1.0}},
        {"flor": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValidationError):
        RouterConfig(**options)


def test_what_answers_cost_is_a_mean_over_those_that_had_a_price():
    router = Router(["live", "large"], RouterConfig())
    for number, cost in enumerate([2.0, None, 4.0]):
        router.apply(a_dealt_turn(f"a{number}:0", "large", cost=cost))
    (view,) = (view for view in router.views() if view.arm == "large")
    assert view.cost == 3.0


def test_a_draw_is_counted_once_however_many_episodes_of_others_come_between():
    """As the gateway, whose episodes keep their arm: else whoever comes back would be counted for their arm again."""
    router, back = (
        Router(["live", "large"], RouterConfig(), episodes=8),
        a_dealt_turn("back:0", "large", episode="back"),
    )
    router.apply(back)
    for number in range(40):
        router.apply(replace(a_dealt_turn(f"{number}:0", "live", episode=f"e{number}"), tenant="other"))
        router.apply(replace(back, id=f"back:{number}"))
        router.restore(json.loads(json.dumps(router.state())))
    assert {balance.arm: balance.draws for balance in router.propensities.balances()} == {"large": 41, "live": 41}


def test_by_default_as_many_episodes_are_remembered_as_keep_their_arm():
    for kind in (Router, FoldedRouter):
        assert signature(kind).parameters["episodes"].default == AutoConfig().episodes
