"""Which turns compare versions with each other."""

from dataclasses import replace

import pytest

from ostinato.core.records import Arm, Consent, Finish, Pick, PolicyVersion, Span
from ostinato.core.verdicts import LATE_REWARD
from ostinato.release.metrics.facts import HEARD, tasks_of
from ostinato.release.metrics.reactions import reacted
from ostinato.testing.records import a_signal, a_turn

ONE, OTHER = (Span(policy=PolicyVersion(number=i, hash=str(i) * 8), tokens=1) for i in (1, 2))
TURN = replace(a_turn("a:0"), arm=Arm.LIVE, finish=Finish.STOP, spans=(ONE, ONE))


def test_a_turn_of_one_version_counts_for_it():
    found = reacted(TURN, [], "-")
    assert (found.turn, found.arm, found.policy, found.person) == ("a:0", Arm.LIVE, "1" * 8, TURN.person)


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.ABORT])
def test_a_turn_that_was_cut_before_its_first_token_counts_for_its_arm(finish):
    assert reacted(replace(TURN, finish=finish, spans=()), [], "-").policy == ""


@pytest.mark.parametrize(
    "other",
    [
        {"arm": Arm.EVAL},
        {"auto": Pick(arm="large", odds={"large": 1.0})},
        {"spans": (ONE, OTHER)},
        {"spans": ()},
        {"finish": Finish.GRAMMAR},
        {"finish": Finish.GRAMMAR, "spans": ()},
        {"consent": Consent.NEVER},
    ],
)
def test_what_compares_no_versions_is_left_out(other):
    assert reacted(replace(TURN, **other), [], "-") is None


def test_a_turns_tasks_are_how_its_prompt_begins_and_all_of_it_unless_it_goes_on():
    long = replace(TURN, prompt_ids=tuple(range(100)), parent=None)
    opening, whole = tasks_of(long)
    assert tasks_of(replace(long, prompt_ids=(*range(99), 7))) == (
        opening,
        tasks_of(replace(long, prompt_ids=(*range(99), 7)))[1],
    )
    assert tasks_of(replace(long, prompt_ids=(*range(99), 7)))[1] != whole
    assert tasks_of(replace(long, prompt_ids=(7, *range(99))))[0] != opening
    assert tasks_of(replace(long, parent="a:1")) == (opening,), "it holds what a version answered"
    assert {tenant for tenant, _ in tasks_of(replace(long, tenant="bolt"))} == {"bolt"}
    assert len(tasks_of(replace(long, prompt_ids=(1, 2, 3)))) == 1
    assert tasks_of(long.without_words()) == ()


def test_late_rewards_are_values_but_nobody_has_said_them():
    found = reacted(TURN, [], "-")
    found.said.hear(a_signal(TURN, LATE_REWARD, value=0.75))
    assert (found.known()[LATE_REWARD], found.known()[HEARD]) == (0.75, 0.0)
    found.said.hear(a_signal(TURN, "accepted"))
    assert found.known()[HEARD] == 1.0
