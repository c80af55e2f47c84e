"""What a demo's report says of the arms: the difference adjusted for prompts beside the plain one, and which turns adjust it."""

from dataclasses import replace

from ostinato.core.records import Arm, PolicyVersion, ReleaseEvent, Reward
from ostinato.status.observed_run import Observed, acceptance_rows, before_releases
from ostinato.testing.records import a_turn

START, END = 1000.0, 1900.0  # the last third begins at 1600


def rated(at, user, arm, good, prompt, took=1.0):
    turn = replace(
        a_turn(f"{at}-{user}", user=user, arm=arm, prompt=prompt),
        propensity=0.3 if arm is Arm.CONTROL else 0.7,
        started_at=at,
        ended_at=at + took,
    )
    return turn, Reward(turn=turn.id, value=0.75 if good else -0.25, function="copilot@1", signals=(), at=at)


def shipped(at, number):
    policy = PolicyVersion(number=number, hash=f"{number:064x}")
    before = None if number == 0 else PolicyVersion(number=0, hash=f"{0:064x}")
    return ReleaseEvent(id=f"s{number}", action="shipped", policy=policy, previous=before, reason="", detail={}, at=at)


def a_run(*releases):
    """Control's people ask for what is easy, live's for what is hard: each is accepted as often as before the release."""
    found = list[tuple]()
    for i in range(60):
        easy, hard = (1, 2, 3), (4, 5, 6)
        for first in (1000.0, 1600.0):
            at = first + i
            found.append(rated(at, f"c{i % 6}", Arm.CONTROL, i % 5 != 0, easy))
            found.append(rated(at, f"l{i % 6}", Arm.LIVE, i % 5 == 0, hard))
    return Observed(rated=found, releases=[shipped(990.0, 0), *releases])


def test_the_difference_is_adjusted_for_what_each_arms_people_ask_and_stands_beside_the_plain_one():
    rows = dict(acceptance_rows(a_run(shipped(1200.0, 3)), START, END))
    assert rows["the same, unadjusted"].startswith("-60.0 pp, 95% [")
    adjusted = rows["live minus control, last third"]
    assert abs(float(adjusted.split(" pp")[0])) < 5.0, "what is left of it by shrinking"
    assert "less each prompt's acceptance before the first release" in adjusted
    assert next(iter(rows)) == "acceptance, live arm, last third"


def test_only_turns_that_ended_before_the_first_release_and_are_not_of_the_last_third_adjust_it():
    seen = a_run(shipped(1030.5, 3), shipped(1050.0, 5))
    assert {turn.started_at for turn, _ in before_releases(seen, START, END)} == {1000.0 + i for i in range(30)}
    unreleased = {turn.started_at for turn, _ in before_releases(a_run(), START, END)}
    assert unreleased == {1000.0 + i for i in range(60)}, "without a release all of the first two thirds"
