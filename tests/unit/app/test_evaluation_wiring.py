"""A suite that cannot be graded is told before anything is sampled; a run without one says so in its log."""

import json

import numpy as np
import pytest

from ostinato.app.branches import branch_config
from ostinato.app.evaluation import (
    COARSE,
    HEARING,
    NO_SUITE,
    check_learner,
    check_suite,
    gate_rules,
    note_hearing,
    note_resolution,
    note_suite,
    note_switched_off,
    open_releases,
    open_suite,
    open_suites,
)
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Alarm
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.demo import demo_overrides
from ostinato.release.alarms import note
from ostinato.release.monitors.watcher import standing
from ostinato.weights.publish.publisher import VersionPublisher

ITEM = {"id": "a", "family": "f", "messages": [{"role": "user", "content": "x"}]}


SMALL = ["evaluate.gate.margin=0.99", "evaluate.gate.total_margin=0.99"]
"""Margins that a suite of one item can hold."""


def suite(tmp_path, *settings, count=1, **more):
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps({**ITEM, **more} | ({"id": f"a{n}"} if n else {})) + "\n" for n in range(count)))
    return load(None, [f"evaluate.suite={path}", f"run.directory={tmp_path / 'run'}", *(settings or SMALL)])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"grader": "vibes"},
            "no grader 'vibes'; there are function, pattern, pytest, python_tests, suggestion, harbor",
        ),
        ({"grader": "pattern"}, "needs a string 'pattern'"),
        ({"grader": "pattern", "pattern": "("}, "is not a regular expression"),
        ({"grader": "python_tests", "tests": "assert f()"}, "needs a 'head' that starts with 'def name"),
        ({"grader": "python_tests", "head": "x = 1", "tests": "assert f()"}, "needs a 'head'"),
        ({"grader": "python_tests", "head": "def f():\n", "tests": " "}, "needs 'tests'"),
    ],
)
async def test_an_item_that_cannot_be_graded_is_named(tmp_path, more, told):
    with pytest.raises(BadConfig, match="task 'a'") as caught:
        await check_suite(suite(tmp_path, **more))
    assert told in str(caught.value)


async def test_a_suite_that_can_be_graded_passes(tmp_path):
    assert len((await check_suite(suite(tmp_path, grader="pattern", pattern="x"))).items) == 1
    good = suite(tmp_path, grader="python_tests", head="def f():\n", tests="assert f() == 1")
    assert len((await check_suite(good)).items) == 1
    demo = load(None, list(demo_overrides("copilot", 0, tmp_path / "run")))
    assert len((await check_suite(demo)).items) == 96, "the demo's own margins are what its suite can hold"


async def test_a_suite_too_small_for_its_margins_is_refused_before_anything_is_sampled(tmp_path):
    with pytest.raises(
        BadConfig, match=r"smallest evaluate\.gate\.margin that it can hold .* set evaluate\.gate\.margin="
    ):
        await check_suite(suite(tmp_path, "evaluate.items=0", count=50, grader="pattern", pattern="x"))
    with pytest.raises(BadConfig, match=r"evaluate\.gate\.total_margin that it can hold is 11\.4 pp"):
        await check_suite(
            load(None, [*demo_overrides("copilot", 0, tmp_path / "run"), "evaluate.gate.total_margin=0.1"])
        )


async def test_bars_may_name_a_suite_of_their_own_and_must_be_within_reach(tmp_path):
    safety = tmp_path / "safety.jsonl"
    safety.write_text(
        "".join(json.dumps(ITEM | {"id": f"s{n}", "grader": "pattern", "pattern": "no"}) + "\n" for n in range(90))
    )
    bars = f"evaluate.bars=[{{suite='{safety}', at_least=0.95}}, {{axis='format', at_least=0.01}}]"
    config = suite(tmp_path, *SMALL, bars, grader="pattern", pattern="x")
    found = open_suites(config)
    assert [each.suite.name for each in found.aside] == ["safety"]
    assert [bar.suite for bar in found.bars] == ["safety", "suite"]
    await check_suite(config)
    lofty = suite(tmp_path, *SMALL, bars.replace("0.95", "0.99"), grader="pattern", pattern="x")
    with pytest.raises(BadConfig, match=r"suite 'safety': with 90 items .* give it 459 items or lower the bar"):
        await check_suite(lofty)


def test_the_gate_must_show_that_a_candidate_is_better_where_no_users_can(tmp_path):
    assert gate_rules(load(None, [])).require == "no_loss"
    assert gate_rules(load(None, ["release.require='win'"])).require == "win"
    assert gate_rules(load(None, ["release.require='win'", "release.canary=true"])).require == "no_loss"
    with pytest.raises(BadConfig, match="sample_best=false leaves out"):
        gate_rules(load(None, ["release.require='win'", "evaluate.gate.sample_best=false"]))


def test_several_suites_have_several_names(tmp_path):
    other = tmp_path / "elsewhere" / "suite.jsonl"
    other.parent.mkdir()
    other.write_text(json.dumps(ITEM | {"grader": "pattern", "pattern": "x"}) + "\n")
    config = suite(tmp_path, f"evaluate.further_suites=['{other}']", grader="pattern", pattern="x")
    with pytest.raises(BadConfig, match="two task files are named 'suite'"):
        open_suites(config)
    other.rename(other.with_name("other.jsonl"))
    config = suite(
        tmp_path, f"evaluate.further_suites=['{other.with_name('other.jsonl')}']", grader="pattern", pattern="x"
    )
    assert [each.suite.name for each in open_suites(config).compared] == ["suite", "other"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "without a suite no training step can be tested"),
        (["evaluate.suite=demo", "learn.source=worlds"], "nothing is learned from users"),
    ],
)
def test_nobody_follows_training_that_nothing_tests_or_that_learns_nothing_from_them(settings, told):
    with pytest.raises(BadConfig, match=told) as caught:
        check_learner(load(None, ["serve.learner_share=0.05", *settings]))
    assert "serve.learner_share = 0" in str(caught.value), "the remedy"
    check_learner(load(None, settings))


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ([], {"learner", "learner-test", "world", "canary", "previous", "evaluation"}),
        (["learn.source=both", "evaluate.suite=demo"], {"learner", "learner-test", "canary", "previous"}),
        (["serve.learner_share=0.05", "evaluate.suite=demo"], {"canary", "previous"}),
        (
            ["serve.learner_share=0.05", "evaluate.suite=demo", "evaluate.gate.sample_best=false"],
            {"canary", "previous", "evaluation-best"},
        ),
    ],
)
async def test_refs_that_nobody_moves_any_more_go_to_live_and_others_stay_with_those_who_move_them(
    tmp_path, settings, idle
):
    config = load(None, [f"run.directory={tmp_path / 'run'}", *settings])
    with open_run(config) as run:
        publisher = VersionPublisher(run.store)
        versions = [
            (
                await publisher.publish(
                    n, {"w": WeightArray("F32", (4,), np.full(16, n, np.uint8))}, run="r", base=None
                )
            ).policy
            for n in range(2)
        ]
        arms = {"learner", "learner-test", "world", "canary", "previous", "evaluation", "evaluation-best"}
        refs = {"live": 0, "control": 0, **dict.fromkeys(arms, 1)}
        for ref, number in refs.items():
            await run.store.move_ref(ref, None, versions[number].hash)
        controller = open_releases(run)
        await controller.bootstrap(versions[0])
        await controller.follow()
        held = {ref for ref in refs if await run.follower.resolve(ref) == versions[1]}
    assert held == arms - idle


def test_a_branchs_own_run_has_nobody_who_follows_training(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}", "serve.learner_share=0.05", "evaluate.suite=demo"])
    assert branch_config(config, "acme").serve.learner_share == 0.0


def test_there_is_no_suite_unless_one_is_named():
    with pytest.raises(BadConfig, match=r"name a task file in evaluate\.suite"):
        open_suite(load())


async def test_trials_that_stop_listening_before_rewards_do_say_so(tmp_path):
    """By default a reward waits an hour, and a trial half a minute."""
    where = f"run.directory={tmp_path / 'run'}"
    for settings in (
        ["release.canary=false"],
        ["release.canary=true"],
        ["release.canary=true", "release.outcomes.maturity_s=3600"],
        ["release.canary=true", "reward.options.window=60"],
        ["release.canary=true", "reward.options.window=30"],
        ["release.canary=true", "reward.function=yours:own"],
        ["release.canary=true", "release.outcomes.maturity_s=3600", "reward.surrogate.truth_after_s=86400"],
    ):
        with open_run(load(None, [where, *settings])) as run:
            await note_hearing(run)
    with open_run(load(None, [where])) as run:
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [
        (HEARING, "raised"),
        (HEARING, "cleared"),
        (HEARING, "raised"),
        (HEARING, "cleared"),
        (HEARING, "raised"),
    ]
    assert "rewards for 86400 s (reward.surrogate.truth_after_s)" in alarms[-1].reason
    assert "for 30 s (release.outcomes.maturity_s), rewards for 3600 s" in alarms[0].reason


async def test_alarms_of_what_is_switched_off_end(tmp_path):
    where, names = f"run.directory={tmp_path / 'run'}", ("auto:propensities", "worlds:cheated", "worlds:best_of_k")
    arms = 'serve.auto.arms=[{name="live", slot="live"}, {name="frozen", slot="control"}]'
    with open_run(load(None, [where])) as run:
        for name in names:
            await note(run.log, name, raised=True, why="found", at=1.0)
    for settings, left in (([arms, "learn.source=worlds"], [*names]), ([], ["worlds:best_of_k"]), ([], [names[-1]])):
        with open_run(load(None, [where, *settings])) as run:
            await note_switched_off(run)
            assert sorted(await standing(run.log)) == sorted(left)


async def test_a_run_without_a_suite_says_so_once_and_takes_it_back(tmp_path):
    without = load(None, [f"run.directory={tmp_path / 'run'}"])
    with_one = load(None, [f"run.directory={tmp_path / 'run'}", "evaluate.suite=demo"])
    for config in (with_one, without, without, with_one, with_one, without):
        with open_run(config) as run:
            await note_suite(run)
    with open_run(without) as run:
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [
        (NO_SUITE, "raised"),
        (NO_SUITE, "cleared"),
        (NO_SUITE, "raised"),
    ]
    assert "nothing ships by itself" in alarms[0].reason


async def test_what_the_anchors_draws_show_is_told_after_the_first_verdict_with_the_remedy(tmp_path):
    """A hundred items hold 8.6 points if a draw varies by 0.245, and 10.0 if by 0.35."""
    margins = "evaluate.gate.total_margin=0.09", "evaluate.gate.margin=0.09", "evaluate.gate.sealed_share=0.0"
    config = suite(tmp_path, *margins, count=100, grader="pattern", pattern="x")
    with open_run(config) as run:
        own = open_suite(config).suite
        assert (await check_suite(config)).hash == own.hash, "by the assumed spread it may start"
        for number, spread in enumerate([0.35, 0.1, 0.1]):
            report = {"verdict": "BLOCK", "suite_hash": own.hash, "smallest_margin": 0.5, "draw_spread": spread}
            policy = PolicyVersion(number=number, hash=f"{number:064x}")
            await run.log.append(
                ReleaseEvent(
                    id=str(number), action="evaluated", policy=policy, previous=None, reason="", detail={"report": report}, at=1.0
                )
            )  # fmt: skip
            await note_resolution(run, own)
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [(COARSE, "raised"), (COARSE, "cleared")]
    assert "measured: a draw varies by 0.35" in alarms[0].reason
    assert "items in a round, or set evaluate.gate.total_margin=" in alarms[0].reason


@pytest.mark.parametrize("then", ["another suite", "no suite"])
async def test_that_a_suite_is_too_coarse_is_told_no_longer_when_it_is_measured_no_longer(tmp_path, then):
    margins = "evaluate.gate.total_margin=0.09", "evaluate.gate.margin=0.09", "evaluate.gate.sealed_share=0.0"
    config = suite(tmp_path, *margins, count=100, grader="pattern", pattern="x")
    with open_run(config) as run:
        own = open_suite(config).suite
        report = {"verdict": "BLOCK", "suite_hash": own.hash, "smallest_margin": 0.5, "draw_spread": 0.35}
        policy = PolicyVersion(number=1, hash=f"{1:064x}")
        await run.log.append(
            ReleaseEvent(
                id="1", action="evaluated", policy=policy, previous=None, reason="", detail={"report": report}, at=1.0
            )
        )
        await note_resolution(run, own)
    config = suite(tmp_path, *margins, count=101, grader="pattern", pattern="y")
    if then == "no suite":
        config = load(None, [f"run.directory={tmp_path / 'run'}"])
    with open_run(config) as run:
        await note_suite(run)
        if then == "another suite":
            await note_resolution(run, open_suite(config).suite)
        alarms = [row async for _, row in run.log.read(0, {Alarm}) if row.name == COARSE]
    assert [str(alarm.state) for alarm in alarms] == ["raised", "cleared"]


async def test_a_suite_that_proves_coarser_than_its_margin_raises_an_alarm_once_that_was_measured(tmp_path):
    config = suite(tmp_path, "evaluate.gate.total_margin=0.04", grader="pattern", pattern="x")
    with open_run(config) as run:
        own = open_suite(config).suite

        async def judged(number, smallest, suite_hash=own.hash):
            policy = PolicyVersion(number=number, hash=f"{number:064x}")
            report = {"verdict": "BLOCK", "suite_hash": suite_hash, "smallest_margin": smallest}
            await run.log.append(
                ReleaseEvent(
                    id=str(number), action="evaluated", policy=policy, previous=None, reason="", detail={"report": report}, at=1.0
                )
            )  # fmt: skip
            await note_resolution(run, own)

        for number in range(4):
            await judged(number, 0.06)
        await judged(4, 0.06, "another suite")
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
        assert alarms == [], "too few verdicts to know"
        for number, smallest in enumerate([0.06, 0.06, 0.03, 0.03, 0.03], start=5):
            await judged(number, smallest)
        alarms = [row async for _, row in run.log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [(COARSE, "raised"), (COARSE, "cleared")]
    assert "can hold a total margin of 6.0 pp, and 4.0 pp is set" in alarms[0].reason
    assert "raise evaluate.gate.total_margin" in alarms[0].reason
