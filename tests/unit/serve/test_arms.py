import pytest

from ostinato.core.arm_assignment import ANONYMOUS, Dealing
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, PolicyVersion
from ostinato.serve.arms import Arms

ALL = {"live", "canary", "control", "previous"}
PINNED = ["live", "control", "live", "control", "control", "live", "control", "live"]
USERS = [f"user-{i}" for i in range(5_000)]
OLD, NEW = PolicyVersion(number=0, hash="old"), PolicyVersion(number=1, hash="new")


def arms_of(control=0.0, salt="ostinato", learner=0.0, **dealing):
    arms = Arms(control=control, learner=learner, salt=salt)
    if dealing:
        arms.deal(Dealing(**({"salt": "trial"} | dealing)))
    return arms


def dealt(loaded=ALL, **shares):
    arms = arms_of(**shares)
    return {user: arms.assign("acme", user, loaded) for user in USERS}


@pytest.mark.parametrize(("trial", "arm"), [({"canary": 0.05}, Arm.CANARY), ({"previous": 0.1}, Arm.PREVIOUS)])
def test_shares_are_met_and_propensities_are_the_shares(trial, arm):
    got = dealt(control=0.2, **trial).values()
    (share,) = trial.values()
    for which, expected in ((Arm.CONTROL, 0.2), (arm, 0.8 * share), (Arm.LIVE, 0.8 * (1 - share))):
        mine = [a for a in got if a.arm is which]
        assert len(mine) / len(USERS) == pytest.approx(expected, abs=0.02)
        assert {round(a.propensity, 12) for a in mine} == {round(expected, 12)}


def test_who_stays_on_the_verified_release_takes_part_in_nothing_else():
    everywhere = {*ALL, "verified"}
    shares = {"control": 0.2, "verified": 0.1, "verified_salt": "a"}
    plain, trial = dealt(everywhere, **shares), dealt(everywhere, **shares, canary=0.5)
    for which, expected in ((Arm.CONTROL, 0.2), (Arm.VERIFIED, 0.08), (Arm.CANARY, 0.36), (Arm.LIVE, 0.36)):
        mine = [a for a in trial.values() if a.arm is which]
        assert len(mine) / len(USERS) == pytest.approx(expected, abs=0.02)
        assert {round(a.propensity, 12) for a in mine} == {round(expected, 12)}
    stays = [u for u in USERS if trial[u].arm is Arm.VERIFIED]
    assert stays == [u for u in USERS if plain[u].arm is Arm.VERIFIED], "a trial moves none of them"
    other = dealt(everywhere, **shares | {"verified_salt": "b"})
    assert sum(other[u].arm is Arm.VERIFIED for u in stays) / len(stays) < 0.25, "another release, other users"
    assert not [a for a in dealt(ALL, **shares).values() if a.arm is Arm.VERIFIED], "not while it is not loaded"


def test_who_follows_training_takes_part_in_nothing_else_and_stays():
    everywhere = {*ALL, "verified", "learner"}
    shares = {"control": 0.2, "learner": 0.05}
    trial = shares | {"verified": 0.1, "verified_salt": "a", "canary": 0.5}
    before, plain, tried = (dealt(everywhere, **each) for each in ({"control": 0.2}, shares, trial))
    expected = {Arm.CONTROL: 0.2, Arm.LEARNER: 0.04, Arm.VERIFIED: 0.076, Arm.CANARY: 0.342, Arm.LIVE: 0.342}
    for arm, share in expected.items():
        mine = [each for each in tried.values() if each.arm is arm]
        assert len(mine) / len(USERS) == pytest.approx(share, abs=0.02)
        assert {round(each.propensity, 12) for each in mine} == {round(share, 12)}
    assert all((plain[u].arm is Arm.CONTROL) == (before[u].arm is Arm.CONTROL) for u in USERS), "never control's users"
    follows = [u for u in USERS if plain[u].arm is Arm.LEARNER]
    other = dealt(everywhere, **trial | {"verified_salt": "b", "canary": 0.1})
    wider = dealt(everywhere, **trial | {"learner": 0.1})
    assert (
        [u for u in USERS if tried[u].arm is Arm.LEARNER]
        == [u for u in USERS if other[u].arm is Arm.LEARNER]
        == follows
    )
    assert all(wider[u].arm is Arm.LEARNER for u in follows), "those who are there stay when the share grows"
    absent = dealt({*ALL, "verified"}, **trial)
    assert Arm.LEARNER not in {each.arm for each in absent.values()}, "not before a version for them is loaded"


def test_nobody_without_a_name_and_nobody_of_a_tenant_with_a_version_of_its_own_follows_training():
    arms = Arms(learner=0.5, branches=["acme"])
    loaded = {"live", "learner", "branch/acme"}
    assert arms.assign("other", ANONYMOUS, loaded).arm is Arm.LIVE
    assert {arms.assign("acme", user, loaded).arm for user in USERS} == {Arm.BRANCH}
    assert {arms.assign("other", user, loaded).arm for user in USERS} == {Arm.LIVE, Arm.LEARNER}


def test_a_user_stays_while_a_share_grows_and_control_never_moves():
    before, after, wider = dealt(control=0.2), dealt(control=0.2, canary=0.3), dealt(control=0.2, canary=0.5)
    assert all((after[u].arm is Arm.CONTROL) == (before[u].arm is Arm.CONTROL) for u in USERS)
    assert all(wider[u].arm is Arm.CANARY for u in USERS if after[u].arm is Arm.CANARY)


def test_who_tried_a_release_first_is_not_who_stays_behind_it():
    canary, proving = dealt(canary=0.3), dealt(previous=0.1)
    assert not [u for u in USERS if canary[u].arm is Arm.CANARY and proving[u].arm is Arm.PREVIOUS]


def test_each_trial_asks_other_users():
    one, two = dealt(canary=0.2, salt="a"), dealt(canary=0.2)
    again, other = dealt(canary=0.2, salt="a"), arms_of(canary=0.2)
    assert [a.arm for a in one.values()] == [a.arm for a in again.values()] == [a.arm for a in two.values()]
    other.deal(Dealing(salt="the next trial", canary=0.2))
    both = sum(other.assign("acme", u, ALL).arm is Arm.CANARY for u in USERS if one[u].arm is Arm.CANARY)
    first = sum(a.arm is Arm.CANARY for a in one.values())
    assert both / first == pytest.approx(0.2, abs=0.05)


def test_the_end_of_a_trial_gives_everybody_live():
    arms = arms_of(canary=1.0)
    assert arms.assign("acme", "ann", ALL).arm is Arm.CANARY
    arms.deal(None)
    assert arms.assign("acme", "ann", ALL).arm is Arm.LIVE


def test_the_assignment_is_pinned():
    # A change here deals every user of every deployment anew.
    assert [str(Arms(control=0.5).assign("acme", f"u{i}", ALL).arm) for i in range(8)] == PINNED


def test_an_arm_without_weights_gives_its_share_to_live():
    got = dealt({"live", "control"}, control=0.3, canary=0.3).values()
    assert {(a.arm, round(a.propensity, 12)) for a in got} == {(Arm.CONTROL, 0.3), (Arm.LIVE, 0.7)}


def test_whole_shares_leave_nobody_out_and_anonymous_is_live():
    assert {a.arm for a in dealt(control=1.0).values()} == {Arm.CONTROL}
    assert {a.arm for a in dealt(canary=1.0).values()} == {Arm.CANARY}
    assert Arms(control=1.0).assign("acme", "anonymous", ALL).arm is Arm.LIVE


def test_the_salt_deals_anew_and_bad_shares_are_refused():
    one = [Arms(control=0.5, salt="a").assign("acme", u, ALL).arm for u in USERS]
    two = [Arms(control=0.5, salt="b" * 200).assign("acme", u, ALL).arm for u in USERS]
    assert 0.4 < sum(x is y for x, y in zip(one, two, strict=True)) / len(USERS) < 0.6
    with pytest.raises(BadConfig, match="must lie in"):
        Arms(control=1.1)


def test_namesakes_of_different_tenants_are_dealt_apart():
    arms = Arms(control=0.5)
    same = sum(arms.assign("acme", user, ALL) == arms.assign("bolt", user, ALL) for user in USERS)
    assert 0.45 < same / len(USERS) < 0.55
    pairs = [(arms.assign("a", f"b{i}", ALL).arm, arms.assign("ab", f"{i}", ALL).arm) for i in range(200)]
    assert any(one is not two for one, two in pairs), "tenant and user must not run together"


def test_a_release_on_trial_is_one_by_the_ledgers_word_and_once_it_has_its_own_weights():
    slots = {"live": OLD, "control": OLD, "canary": NEW, "previous": OLD}
    assert arms_of().releases(slots) == {"live", "control"}
    assert arms_of(canary=0.05).releases(slots) == {"live", "control", "canary"}
    assert arms_of(canary=0.05).releases({**slots, "canary": OLD}) == {"live", "control"}, "it was not loaded yet"
    assert arms_of(previous=0.1).releases({**slots, "live": NEW}) == {"live", "control", "previous"}
    assert arms_of().releases({}) == set()
