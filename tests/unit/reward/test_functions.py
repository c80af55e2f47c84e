"""The copilot reward, case by case, and the loader that finds it."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from ostinato.core.errors import BadConfig
from ostinato.core.records import NoReward, Pending, Reward, Signal, Source
from ostinato.reward.functions import copilot, tab
from ostinato.reward.protocol import load
from ostinato.testing.records import a_signal, a_turn

TURN = a_turn("r:0")


def said(name: str, at: float, *, id: str | None = None, value: float = 1.0, retracts: str | None = None) -> Signal:
    return Signal(
        id=id or f"{name}@{at}",
        turn="r:0",
        name=name,
        value=value,
        source=Source.HUMAN,
        occurred_at=at,
        received_at=at + 0.1,
        retracts=retracts,
    )


AHEAD = replace(said("accepted", 11), occurred_at=3_611.0)
"""From a client whose clock is an hour ahead."""


def value(*signals: Signal) -> float:
    """The reward, after checking that no order of arrival and no repetition changes it."""
    answers = {copilot(TURN, order, 40.0, window=30.0) for order in permutations((*signals, *signals[:1]))}
    (answer,) = answers
    assert isinstance(answer, Reward)
    return answer.value


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([], 0.0),
        ([said("ignored", 11)], 0.0),
        ([said("accepted", 11)], 0.75),
        ([said("rejected", 11)], -0.25),
        ([said("accepted", 11), said("undone", 15)], -0.25),
        ([said("undone", 11), said("accepted", 15)], 0.75),
        ([said("rejected", 11), said("accepted", 12)], 0.75),
        ([said("accepted", 11), said("ignored", 12)], 0.75),
        ([said("accepted", 11, value=0.0)], -0.25),
        ([said("accepted", 11), said("undone", 12, value=0.0)], 0.75),
        ([said("accepted", 11, id="a"), said("rejected", 11, id="b")], -0.25),  # same instant: the id decides
        ([said("accepted", 11, id="a"), said("oops", 12, retracts="a")], 0.0),
        ([said("accepted", 11, id="a"), said("undone", 12, id="b"), said("oops", 13, retracts="b")], 0.75),
        ([said("oops", 11, id="r", retracts="a"), said("accepted", 12, id="a")], 0.0),  # the retraction came first
        ([said("accepted", 11, id="a"), said("x", 12, id="r", retracts="a"), said("y", 13, retracts="r")], 0.0),
        ([said("accepted", 11, id="a"), said("rejected", 12, retracts="a")], 0.0),  # a retraction says nothing itself
        ([said("accepted", 39.9)], 0.75),
        ([said("accepted", 39.95)], 0.0),  # received 0.05 s after the window
        ([said("accepted", 11), said("undone", 100)], 0.75),
        ([said("accepted", 11, id="a"), said("oops", 100, retracts="a")], 0.75),
        ([said("accepted", 5)], 0.75),  # a client whose clock is slow
        ([AHEAD, said("undone", 12)], -0.25),
        ([said("undone", 10.5), AHEAD], 0.75),
        # of what came together, its own times decide
        ([AHEAD, replace(said("undone", 11), id="0", occurred_at=3_612.0)], -0.25),
    ],
)
def test_what_counts(signals: list[Signal], expected: float):
    assert value(*signals) == expected


def test_nothing_is_decided_before_the_window_closes():
    accepted = said("accepted", 11)
    assert copilot(TURN, [accepted], 39.999, window=30.0) == Pending(until=40.0)
    assert copilot(TURN, [accepted], 40.0, window=30.0) == Reward(
        turn="r:0", value=0.75, function="copilot@1", signals=(accepted.id,), at=40.0
    )


def test_looking_late_changes_nothing():
    signals = [said("accepted", 11), said("undone", 500)]
    assert copilot(TURN, signals, 40.0, window=30.0) == copilot(TURN, signals, 9e9, window=30.0)


def test_options_move_the_window_and_the_threshold():
    answer = copilot(replace(TURN, ended_at=0.0), [said("accepted", 1)], 2.0, t=0.4, window=2.0)
    assert isinstance(answer, Reward)
    assert (answer.value, answer.at) == (0.6, 2.0)


def test_feedback_within_the_hour_counts_by_default():
    assert copilot(TURN, [], 3609.9) == Pending(until=3610.0)
    answer = copilot(TURN, [said("accepted", 3600.0)], 3610.0)
    assert isinstance(answer, Reward)
    assert answer.value == 0.75


@pytest.mark.parametrize(
    ("signals", "silence", "expected"),
    [
        ([], -0.1, -0.1),
        ([], None, None),
        ([said("ignored", 11)], None, 0.0),  # said aloud: no silence
        ([said("ignored", 11)], -0.1, 0.0),
        ([said("accepted", 11, id="a"), said("oops", 12, retracts="a")], None, None),  # taken back: nothing was said
        ([said("accepted", 50)], None, None),  # too late
        ([said("accepted", 11)], None, 0.75),
    ],
)
def test_silence_means_what_the_operator_says(signals: list[Signal], silence: float | None, expected: float | None):
    answer = copilot(TURN, signals, 40.0, window=30.0, silence=silence)
    assert answer == NoReward(reason="silence") if expected is None else answer.value == expected


def test_showing_pays_iff_the_chance_of_acceptance_is_above_t():
    for t in (0.1, 0.25, 0.6):
        for p in (t - 0.01, t + 0.01):
            shown = p * (1 - t) + (1 - p) * -t
            assert (shown > 0) == (p > t)


# ---------------------------------------------------------------- a model that may suggest nothing


@pytest.mark.parametrize(
    ("text", "signals", "expected"),
    [
        ("Friday", [said("accepted", 11)], 0.75),
        ("Friday", [said("rejected", 11)], -0.25),
        ("Friday", [said("accepted", 11), said("undone", 12)], -0.25),
        ("Friday", [], None),  # shown, and nothing heard: not the 0 of silence
        ("Friday", [said("accepted", 11, id="a"), said("oops", 12, retracts="a")], None),
        ("-", [], 0.0),
        (" - \n", [], 0.0),
        ("", [], 0.0),
        ("-", [said("accepted", 11)], 0.0),  # nobody can accept what was not shown
        ("", [said("rejected", 11)], 0.0),
        ("-1", [said("rejected", 11)], -0.25),  # begins like silence
    ],
)
def test_silence_is_read_off_the_turn(text: str, signals: list[Signal], expected: float | None):
    turn = replace(TURN, text=text)
    answers = {tab(turn, order, 40.0, window=30.0) for order in permutations((*signals, *signals[:1]))}
    (answer,) = answers
    if expected is None:
        assert answer == NoReward(reason="silence")
    else:
        assert isinstance(answer, Reward)
        assert (answer.value, answer.at, answer.function) == (expected, 40.0, "tab@1")


@pytest.mark.parametrize("text", ["-", "Friday"])
def test_silence_is_decided_no_sooner_than_a_suggestion(text: str):
    turn = replace(TURN, text=text)
    assert tab(turn, [said("accepted", 11)], 39.999, window=30.0) == Pending(until=40.0)


def test_another_word_may_stand_for_nothing():
    answer = load("ostinato.reward.functions:tab", {"nothing": "pass", "window": 1})(
        replace(TURN, text="pass"), [], 11.0
    )
    assert isinstance(answer, Reward)
    assert answer.value == 0.0


# ---------------------------------------------------------------- the loader

COPILOT = "ostinato.reward.functions:copilot"


def test_load_binds_checked_options():
    answer = load(COPILOT, {"t": 0.5, "window": 1})(TURN, [said("accepted", 10.5)], 11.0)
    assert isinstance(answer, Reward)
    assert answer.value == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("copilot", {}, "must have the form 'module:function'"),
        ("os;import x:y", {}, "must have the form"),
        ("ostinato.reward.absent:copilot", {}, "cannot be imported"),
        ("ostinato.reward.functions:copilto", {}, "did you mean copilot?"),
        ("ostinato.reward.functions:ACCEPTED", {}, "is a str, not a function"),
        (COPILOT, {"windwo": 3}, "did you mean window?"),
        (COPILOT, {"turn": 3}, "no such option"),
        (COPILOT, {"zzz": 3}, "known: left, outcomes, silence, t, window"),
        (COPILOT, {"t": 1.5}, "less than 1"),
        (COPILOT, {"t": float("nan")}, "reward.options.t"),
        (COPILOT, {"window": "soon"}, "valid number"),
        (COPILOT, {"window": float("inf")}, "finite number"),
        ("reward_needing_an_option:needy", {}, "reward.options.scale is missing"),
    ],
)
def test_load_names_what_is_wrong(
    name: str, options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    (tmp_path / "reward_needing_an_option.py").write_text("def needy(turn, signals, now, *, scale): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadConfig) as caught:
        load(name, options)
    assert message in str(caught.value)


def test_feedback_within_the_hour_counts():
    """What the README says of the time that people have is the default."""
    assert "within the hour" in (Path(__file__).parents[3] / "README.md").read_text()
    turn = a_turn("a:0", ended_at=10.0)
    late = [a_signal(turn, "accepted", at=10.0 + 3599.0)]
    assert copilot(turn, late, 10.0 + 3599.0) == Pending(until=3610.0)
    assert copilot(turn, late, 3610.0).value > 0
    assert copilot(turn, [a_signal(turn, "accepted", at=10.0 + 3601.0)], 3700.0).value == 0
