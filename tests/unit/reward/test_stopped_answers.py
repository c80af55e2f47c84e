"""What is learned from answers that people stop while they are written: the gradient of the expected reward, exactly."""

from dataclasses import replace
from math import exp

import pytest

from ostinato.core.records import Finish, NoReward, Reward, Signal, Source
from ostinato.reward.functions import copilot, tab
from ostinato.reward.ledger_entries import untrainable
from ostinato.testing.records import a_turn

LEFT = replace(a_turn("r:0"), finish=Finish.LEFT)


def said(name: str, turn: str = "r:0") -> Signal:
    return Signal(
        id=f"{name}-{turn}",
        turn=turn,
        name=name,
        value=1.0,
        source=Source.HUMAN,
        occurred_at=11.0,
        received_at=11.0,
    )


def worth(turn, *signals, **options) -> float | None:
    answer = copilot(turn, signals, 9e9, **options)
    return answer.value if isinstance(answer, Reward) else None


# (style, probability given the style, how it ended, what was said): half stop a long answer, and who waits for its end likes it
OUTCOMES = [
    ("short", 0.6, Finish.STOP, "accepted"),
    ("short", 0.4, Finish.STOP, "rejected"),
    ("long", 0.5, Finish.LEFT, "interrupted"),
    ("long", 0.45, Finish.STOP, "accepted"),
    ("long", 0.05, Finish.STOP, "rejected"),
]


def gradient(theta: float, finishes) -> tuple[float, float]:
    """The derivative of the expected reward in the logit of the long style, and what the turns that teach make of it, with these finishes
    and with the mean of their rewards as the baseline.
    """

    def chance(logit: float) -> dict[str, float]:
        long = 1 / (1 + exp(-logit))
        return {"long": long, "short": 1 - long}

    def expected(logit: float) -> float:
        return sum(chance(logit)[style] * p * value for (style, p, _, _), value in zip(OUTCOMES, values, strict=True))

    turns = [replace(a_turn(f"{i}:0"), finish=finish) for i, (_, _, finish, _) in enumerate(OUTCOMES)]
    values = [worth(turn, said(name, turn.id)) or 0.0 for turn, (_, _, _, name) in zip(turns, OUTCOMES, strict=True)]
    now, step = chance(theta), 1e-5
    score = {"long": now["short"], "short": -now["long"]}  # of the first token, which a stopped answer has, too
    teaching = [
        (now[style] * p, value, score[style])
        for (style, p, finish, _), value, turn in zip(OUTCOMES, values, turns, strict=True)
        if untrainable(turn, 0.2) is None and finish in finishes
    ]
    baseline = sum(p * value for p, value, _ in teaching) / sum(p for p, _, _ in teaching)
    taught = sum(p * (value - baseline) * direction for p, value, direction in teaching)
    return (expected(theta + step) - expected(theta - step)) / (2 * step), taught


@pytest.mark.parametrize("theta", [-2.0, 0.0, 1.5])
def test_the_turns_that_teach_give_the_gradient_of_the_expected_reward(theta):
    true, taught = gradient(theta, set(Finish))
    assert true < 0, "the long style is worth less to people"
    assert taught == pytest.approx(true, rel=1e-6)
    _, without = gradient(theta, {Finish.STOP})
    assert without > 0, "those who stayed would teach the opposite"


def test_a_stopped_answer_is_worth_a_rejection_as_far_as_a_person_stopped_it():
    assert worth(LEFT) == -0.125
    assert worth(LEFT, left=0.0) == 0.0
    assert worth(LEFT, said("interrupted"), left=0.0) == -0.25
    assert worth(LEFT, said("accepted")) == 0.75, "what somebody says of it decides"
    assert worth(LEFT, silence=None, left=0.0) is None
    assert worth(LEFT, silence=None) == -0.125


def test_an_editor_that_cancels_suggestions_while_people_type_says_nothing_about_them():
    assert isinstance(tab(LEFT, (), 9e9), NoReward)
