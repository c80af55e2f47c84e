import pytest

from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm
from ostinato.serve.arms import Arms

ALL = {"live", "canary", "control"}
PINNED = ["live", "control", "live", "control", "control", "live", "control", "live"]
USERS = [f"user-{i}" for i in range(5_000)]


def test_shares_are_met_and_propensities_are_the_shares():
    arms = Arms(control=0.2, canary=0.05)
    got = [arms.assign("acme", user, ALL) for user in USERS]
    for arm, share in ((Arm.CONTROL, 0.2), (Arm.CANARY, 0.05), (Arm.LIVE, 0.75)):
        mine = [a for a in got if a.arm is arm]
        assert len(mine) / len(USERS) == pytest.approx(share, abs=0.02)
        assert {round(a.propensity, 12) for a in mine} == {share}


def test_a_user_stays_and_one_share_never_moves_the_other_arm():
    before = {u: Arms(control=0.2, canary=0.0).assign("acme", u, ALL).arm for u in USERS}
    after = {u: Arms(control=0.2, canary=0.3).assign("acme", u, ALL).arm for u in USERS}
    assert all(after[u] is Arm.CONTROL for u in USERS if before[u] is Arm.CONTROL)
    assert all(after[u] is not Arm.CONTROL for u in USERS if before[u] is Arm.LIVE)
    wider = {u: Arms(control=0.2, canary=0.5).assign("acme", u, ALL).arm for u in USERS}
    assert all(wider[u] is Arm.CANARY for u in USERS if after[u] is Arm.CANARY)


def test_the_assignment_is_pinned():
    # A change here deals every user of every deployment anew.
    assert [str(Arms(control=0.5).assign("acme", f"u{i}", ALL).arm) for i in range(8)] == PINNED


def test_an_arm_without_weights_gives_its_share_to_live():
    arms = Arms(control=0.3, canary=0.3)
    got = [arms.assign("acme", user, {"live", "control"}) for user in USERS]
    assert {(a.arm, a.propensity) for a in got} == {(Arm.CONTROL, 0.3), (Arm.LIVE, 0.7)}


def test_whole_shares_leave_nobody_out_and_anonymous_is_live():
    assert {Arms(control=1.0).assign("acme", u, ALL).arm for u in USERS} == {Arm.CONTROL}
    assert {Arms(canary=1.0).assign("acme", u, ALL).arm for u in USERS} == {Arm.CANARY}
    assert Arms(control=1.0).assign("acme", "anonymous", ALL).arm is Arm.LIVE


def test_the_salt_deals_anew_and_bad_shares_are_refused():
    one = [Arms(control=0.5, salt="a").assign("acme", u, ALL).arm for u in USERS]
    two = [Arms(control=0.5, salt="b" * 200).assign("acme", u, ALL).arm for u in USERS]
    assert 0.4 < sum(x is y for x, y in zip(one, two, strict=True)) / len(USERS) < 0.6
    with pytest.raises(BadConfig, match="sum"):
        Arms(control=0.7, canary=0.4)


def test_namesakes_of_different_tenants_are_dealt_apart():
    arms = Arms(control=0.5)
    same = sum(arms.assign("acme", user, ALL) == arms.assign("bolt", user, ALL) for user in USERS)
    assert 0.45 < same / len(USERS) < 0.55
    pairs = [(arms.assign("a", f"b{i}", ALL).arm, arms.assign("ab", f"{i}", ALL).arm) for i in range(200)]
    assert any(one is not two for one, two in pairs), "tenant and user must not run together"
