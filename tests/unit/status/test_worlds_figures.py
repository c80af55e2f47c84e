"""What the worlds demo reports: which turns are compared, what was solved before and after, and where it stopped if it did."""

from dataclasses import replace

import pytest

from ostinato.app.evaluation import check_suite
from ostinato.app.worlds import function_tasks
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, PolicyVersion, ReleaseEvent, Reward
from ostinato.core.report import ItemScore
from ostinato.launch.commands.worlds.demo import Plan, worlds_demo_overrides
from ostinato.reward.accounting import Accounting
from ostinato.status.observed_run import Observed
from ostinato.status.worlds_figures import Phases, Solved, beside_control, last_word, worlds_report
from ostinato.testing.records import a_turn
from ostinato.worlds.tasks.tasksets import save

V0, V9 = (PolicyVersion(number=n, hash=f"{n:064x}") for n in (0, 9))
PHASES = Phases(began=0.0, trained=600.0, judged=660.0, ended=1260.0, measured=1320.0)
BALANCED = Accounting(ingested=8, trained=4, held={"arm:live": 4}, waiting=0, rewarded=8)


def rated(number, arm, version, at, accepted):
    turn = replace(
        a_turn(f"t{number}:0", user=f"u{number % 7}{arm}", arm=arm, version=version, ended_at=at + 1.0), propensity=0.5
    )
    return turn, Reward(turn=turn.id, value=float(accepted), signals=(), function="f@1", at=at + 2.0)


def event(action, at, reason, policy=V9, previous=V0, **detail):
    return ReleaseEvent(
        id=f"{action}{at}", action=action, policy=policy, previous=previous, reason=reason, detail=detail, at=at
    )


def people(arm, version, start, accepted, count=70):
    return [rated(n, arm, version, start + n, n % 10 < accepted) for n in range(count)]


def scores(solved):
    return [ItemScore(item=f"i{n}", draw=0, score=float(n < solved)) for n in range(100)]


def page(seen, asked=(300, 1)):
    solved = Solved(before=scores(10), after=scores(40))
    lines = [
        {"kind": "measured", "split": "held_out", "solved": 12, "of": 120},
        {"kind": "measured", "split": "canary", "solved": 0, "of": 9},
        {"kind": "group"},
        {"kind": "measured", "split": "held_out", "solved": 30, "of": 120},
    ]
    return worlds_report(seen, V9, PHASES, solved, measured=lines, found=BALANCED, asked=asked, seed=0, model="smol")


def tried(*more, bar=True):
    held = {
        "suite": "world functions",
        "axis": "score",
        "value": 0.3,
        "bound": 0.2,
        "wanted": 0.15,
        "n": 120,
        "holds": bar,
    }
    looked = {
        "difference": 0.2,
        "lower": 0.1,
        "upper": 0.3,
        "margin": 0.1,
        "power": 1.0,
        "items": 120,
        "draws": 4,
        "verdict": "SHIP",
    }
    first = event("shipped", 0.0, "the starting model", policy=V0, previous=None)
    return [first, event("evaluated", 640.0, "why", report=looked | {"bars": [held]}), *more]


def test_only_what_the_candidate_answered_live_is_compared_and_with_control_of_the_same_time():
    """Base's last answers in the live arm, the canary's, those of who stayed behind, and whatever was before are none of it."""
    seen = Observed(
        rated=[
            *people(Arm.LIVE, 0, 700.0, 1),
            *people(Arm.CANARY, 9, 700.0, 9),
            *people(Arm.CONTROL, 0, 700.0, 9),
            *people(Arm.LIVE, 0, 805.0, 9, count=3),
            *people(Arm.LIVE, 9, 810.0, 5),
            *people(Arm.CONTROL, 0, 810.0, 2),
            *people(Arm.PREVIOUS, 0, 810.0, 9),
        ],
        releases=tried(
            event("canary", 660.0, "passed"), event("shipped", 800.0, "passed; canary not worse than 10.0 pp")
        ),
    )
    compared = beside_control(seen, V9, 800.0, 1260.0)
    assert {(turn.arm, turn.oldest) for turn, _ in compared} == {(Arm.LIVE, 9), (Arm.CONTROL, 0)}
    assert len(compared) == 140
    summary = dict(page(seen).summary)
    assert summary["acceptance, live arm, trained in the world"].startswith("50.0% [")
    assert summary["acceptance, control arm, not trained in it"].startswith("20.0% [")
    assert summary["acceptance, control arm, not trained in it"].endswith("of 70, 7 users")
    assert summary["live minus control"].startswith("+30.0 pp, 95% [")
    assert summary["acceptance before it was live, canary arm"].startswith("90.0% [")
    assert summary["acceptance before it was live, live arm"].startswith("10.0% [")
    assert summary["v9 shipped"] == "at 13.3 min: not worse than 10.0 pp"
    assert summary["minutes"] == "world 10.0, bar and gate 1.0, users 10.0, last measurement 1.0; 22.0 in all"


def test_success_in_the_world_is_a_paired_difference_with_its_interval():
    found = dict(page(Observed(releases=tried())).summary)
    assert found["solved in the world, held-out tasks"].startswith("10.0% -> 40.0%, +30.0 pp, 95% [+2")
    assert found["solved in the world, held-out tasks"].endswith("100 tasks x 1")
    assert found["held-out tasks while it trained"] == "10%, 25%"
    assert found["bar on score of world functions"] == "cleared: 99% bound 20.0% of 15.0% wanted, 120 items"


def test_a_candidate_below_the_bar_says_so_and_shows_no_users():
    why = "below a quality bar (score of world functions: bound 0.080, wanted 0.15, 120 items)"
    seen = Observed(releases=tried(event("blocked", 650.0, why), bar=False))
    found = page(seen, asked=(0, 0))
    summary = dict(found.summary)
    assert (found.users, found.curves) == (0, ())
    assert summary["bar on score of world functions"].startswith("MISSED")
    assert summary["v9 blocked"] == f"at 10.8 min: {why}"
    assert summary["live minus control"] == "it did not go live"
    assert last_word(seen, V9) == why


def test_the_report_calls_its_users_simulated():
    found = page(Observed(releases=tried()))
    assert "simulated users" in found.title
    assert found.notes[0].startswith("The users are simulated")


def test_the_time_is_divided_by_a_setting():
    assert Plan.of(minutes=20.0, training=0.75) == Plan(training_s=900.0, users_s=300.0)


async def test_the_demos_own_settings_can_come_to_a_verdict(tmp_path):
    settings = worlds_demo_overrides(0, tmp_path / "run")
    (tmp_path / "run").mkdir()
    save(function_tasks(), tmp_path / "run" / "functions.jsonl")
    suite = await check_suite(load(None, settings))
    assert len(suite.items) == 120
    lofty = load(None, [word.replace("at_least=0.15", "at_least=0.999") for word in settings])
    with pytest.raises(BadConfig, match="or lower the bar"):
        await check_suite(lofty)
