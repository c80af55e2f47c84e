"""The reward for a coding agent's turn: its parts, what silence means, and where the credit of an episode goes."""

from dataclasses import replace
from itertools import permutations

import pytest

from ostinato.core.records import Finish, NoReward, Pending, Reward, Signal, Source
from ostinato.core.samples import Episode
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout
from ostinato.reward.functions import AgentWeights, agent, parts_of
from ostinato.reward.protocol import load
from ostinato.testing.records import a_turn

TURN = a_turn("r:0")


def said(name, at=20.0, value=1.0, id=None):
    return Signal(
        id=id or f"{name}@{at}",
        turn="r:0",
        name=name,
        value=value,
        source=Source.CODE,
        occurred_at=at,
        received_at=at + 0.1,
    )


def decided(*signals, **options):
    """The reward, after checking that no order of arrival and no repetition changes it."""
    options = {"window": 100.0} | options
    now = TURN.ended_at + options["window"]
    answers = {agent(TURN, order, now, **options) for order in permutations((*signals, *signals[:1]))}
    (answer,) = answers
    return answer


@pytest.mark.parametrize(
    ("signals", "parts"),
    [
        ([said("lines_kept_5m", value=1.0)], {"kept lines": 0.5}),
        ([said("lines_kept_5m", value=1.0), said("lines_kept_1h", 30, value=0.0)], {"kept lines": -0.5}),
        ([said("lines_kept_commit", value=1.0), said("lines_kept_1h", 30, value=0.0)], {"kept lines": -0.5}),
        ([said("lines_kept_1h", value=0.0), said("lines_kept_commit", 30, value=1.0)], {"kept lines": 0.5}),
        ([said("lines_kept_24h", value=1.0), said("lines_kept_commit", 30, value=0.0)], {"kept lines": 0.5}),
        ([said("lines_kept_1h", id="a", value=1.0), said("lines_kept_1h", id="b", value=0.0)], {"kept lines": 0.0}),
        ([said("lines_kept_1h", value=7.0)], {"kept lines": 0.5}),
        ([said("tests_failed", 12), said("tests_passed", 14)], {"tests": 0.5}),
        ([said("tests_passed", 12), said("tests_failed", 14)], {"tests": -0.5}),
        ([said("accepted", 12), said("undone", 14)], {"explicit": -0.5}),
        ([said("accepted", value=0.0)], {"explicit": -0.5}),
        ([said("rejected", value=0.0)], {}),
        ([said("dissatisfied")], {"dissatisfied": -0.5}),
        ([said("tool_rejected"), said("interrupted")], {"refused": -0.5, "interrupted": -0.3}),
        ([said("tool_modified"), said("tool_modified", 21), said("tool_ok")], {"modified": -0.2}),
        ([said("tool_modified", value=0.0)], {}),
        ([said("tool_error", id=str(i)) for i in range(4)], {"tool errors": -0.3}),
        ([said("tool_ok"), said("praised"), said("followed_up"), said("tool_accepted")], {}),
        (
            [said("lines_kept_1h", value=0.0), said("tests_failed"), said("dissatisfied")],
            {"kept lines": -0.5, "tests": -0.5, "dissatisfied": -0.5},
        ),
    ],
)
def test_the_reward_is_the_sum_of_its_parts_within_one(signals, parts):
    reward = decided(*signals)
    assert isinstance(reward, Reward)
    assert reward.value == pytest.approx(max(-1.0, sum(parts.values())))
    assert parts_of(TURN, reward, signals, {"window": 100.0}) == pytest.approx(parts)


def test_what_came_after_the_window_does_not_count():
    assert decided(said("dissatisfied", 200.0), said("tool_ok")).value == 0.0
    assert isinstance(agent(TURN, [said("dissatisfied")], TURN.ended_at + 99.0, window=100.0), Pending)


def test_silence_means_what_the_operator_says():
    assert decided() == NoReward(reason="silence")
    assert decided(silence=-0.2).value == -0.2
    assert decided(said("tool_ok"), silence=-0.2).value == 0.0


def test_parts_are_those_of_the_options_it_was_given_under():
    signals = [said("tests_passed")]
    reward = decided(*signals, tests=1.0)
    assert parts_of(TURN, reward, signals, {"tests": 1.0, "window": 100.0}) == {"tests": 1.0}
    assert parts_of(TURN, reward, signals, {}) == {}
    assert parts_of(TURN, replace(reward, function="copilot@1"), signals, {"tests": 1.0}) == {}


def test_a_turn_whose_client_left_was_stopped_for_certain_only_if_something_says_so():
    left = replace(TURN, finish=Finish.LEFT)

    def worth(*signals, turn=left, **options):
        reward = agent(turn, signals, 500.0, window=100.0, **options)
        assert isinstance(reward, Reward)
        assert parts_of(turn, reward, signals, options) == ({"interrupted": reward.value} if reward.value else {})
        return reward.value

    assert worth() == pytest.approx(-0.15), "a client may also have timed out"
    assert worth(left=1.0) == worth(said("interrupted"), left=0.0) == worth(said("interrupted"), turn=TURN) == -0.3
    assert isinstance(agent(left, (), 500.0, window=100.0, left=0.0), NoReward)


def test_it_is_found_by_name_and_its_weights_are_checked():
    function = load("ostinato.reward.functions:agent", {"tests": 0.25, "window": 0.0})
    assert function(TURN, [said("tests_passed", TURN.ended_at - 1)], TURN.ended_at).value == 0.25
    with pytest.raises(Exception, match="tests"):
        load("ostinato.reward.functions:agent", {"tests": 3.0})
    assert AgentWeights() == AgentWeights(0.5, 1.0, 0.5, 0.5, 0.5, 0.5, 0.3, 0.5, 0.1, 0.2, 1.0)


def test_the_old_name_of_the_weight_of_an_explicit_verdict_is_taken_with_a_warning(caplog):
    old, new = (
        {"function": "ostinato.reward.functions:agent", "options": {name: 0.25}} for name in ("said", "explicit")
    )
    assert RewardConfig.model_validate(old) == RewardConfig.model_validate(new)
    (warning,) = caplog.messages
    assert "reward.options.said" in warning
    assert "reward.options.explicit" in warning
    function = load(new["function"], {**RewardConfig.model_validate(old).options, "window": 0.0})
    assert function(TURN, [said("accepted", TURN.ended_at - 1)], TURN.ended_at).value == 0.25


def test_both_names_at_once_are_refused_and_other_functions_may_have_an_option_of_the_old_name(caplog):
    both = {"function": "ostinato.reward.functions:agent", "options": {"said": 0.25, "explicit": 0.5}}
    with pytest.raises(ValueError, match="'said' is the old name of 'explicit'; give 'explicit' alone"):
        RewardConfig.model_validate(both)
    assert RewardConfig.model_validate({"function": "ours:said", "options": {"said": 1}}).options == {"said": 1}
    assert not caplog.messages


def credit(*rewards, users=None):
    """The advantage of each turn: an episode for each list of rewards."""
    episodes, values = [], {}
    for number, each in enumerate(rewards):
        turns = tuple(
            replace(
                a_turn(f"r{number}{i}:0", prompt=(number, i)),
                episode=f"e{number}",
                user=f"u{number}",
                started_at=float(i),
                ended_at=i + 0.5,
            )
            for i in range(len(each))
        )
        episodes.append(Episode(id=f"e{number}", tenant="default", turns=turns))
        values |= {turn.id: value for turn, value in zip(turns, each, strict=True)}
    found = SingleRollout(RewardConfig(), Baseline())(episodes, values)
    return [[found[turn.id][0] for turn in episode.turns] for episode in episodes]


def test_the_outcome_of_a_session_reaches_its_earlier_turns():
    kept, undone = credit([0.0, 0.0, 0.5], [0.0, 0.0, -0.5])
    assert 0 < kept[0] < kept[1] < kept[2]
    assert 0 > undone[0] > undone[1] > undone[2]


def test_a_signal_about_one_call_is_credited_to_the_turn_that_made_it():
    (session, other) = credit([0.0, -0.5, 0.0], [0.0, 0.0, 0.0])
    assert session[1] < session[0] < session[2] == other[2]
