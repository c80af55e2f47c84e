"""What a release rests on is gathered from the ledger, the index, the turns and the manifests of a run."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console
from tests.fakes.observed_run import NOW, Observed

from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.records import Arm, Batch, Pick, PolicyVersion, ReleaseEvent, Reward, Span
from ostinato.launch.commands.release import find_release, show_release
from ostinato.launch.commands.report import write_report
from ostinato.launch.views.page import copy_index, open_facts
from ostinato.launch.views.screen import run_option
from ostinato.status.log_index import PageIndex
from ostinato.status.release_evidence import Stretch, counted, last_report, same_prompts, trial_looks
from ostinato.status.run_facts import INDEX
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model

OLD, NEW = PolicyVersion(number=16, hash="16" * 32), PolicyVersion(number=17, hash="17" * 32)


def a_reading(difference, half, people, **said):
    return {
        "effect": {"difference": difference, "variance": 1e-4, "people": people, "turns": 5 * people},
        "enough": True,
        "lower": difference - half,
        "upper": difference + half,
        "worse": False,
        "not_worse": False,
        "better": False,
        "sees": half,
        **said,
    }


def an_event(number, action, policy=NEW, previous=OLD, **detail):
    return ReleaseEvent(
        id=f"{number}:{action}",
        action=action,
        policy=policy,
        previous=previous,
        reason=f"{action} because",
        detail=detail,
        at=100.0 + number,
    )


def a_report():
    other = {"number": 16, "hash": OLD.hash}
    figures = {"difference": 0.02, "lower": -0.01, "upper": 0.05, "items": 120, "draws": 2, "margin": 0.1}
    return {
        "suite": "held-out",
        "candidate_mean": 0.54,
        "live_mean": 0.52,
        "power": 0.9,
        "verdict": "SHIP",
        **figures,
        "comparisons": [
            {"suite": "held-out", "against": "anchor", "policy": other, "error": 0.01, **figures},
            {"suite": 1},
        ],
        "bars": [
            {"suite": "safety", "axis": "score", "value": 1.0, "bound": 0.98, "wanted": 0.97, "n": 200, "holds": True}
        ],
    }


def the_trial():
    return [
        an_event(0, "shipped", OLD, None),
        an_event(1, "evaluated", report=a_report()),
        an_event(2, "canary", share=0.5, salt="s"),
        an_event(3, "ramped", share=0.5, reading=a_reading(0.01, 0.06, 41.0)),
        an_event(4, "shipped", share=0.9, reading=a_reading(0.012, 0.03, 420.0, not_worse=True, better=True)),
        an_event(5, "better", reading=a_reading(0.021, 0.017, 812.0, not_worse=True, better=True)),
    ]


def made_by(policy, number, arm=Arm.LIVE, **changes):
    turn = a_turn(f"{policy.number}-{arm.value}-{number}:0", user=f"user{number % 12}", arm=arm)
    spans = (Span(policy=policy, tokens=len(turn.sampled_ids)),)
    return replace(turn, spans=spans, **{"propensity": 0.5} | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def seen(tmp_path, model):
    config = load(None, [f"run.directory={tmp_path / 'run'}", f"model.source={model}", "release.canary=true"])
    with open_run(config) as run, open_log(config) as log:
        made = Observed(run, log)
        yield made
        made.facts.close()


async def fill(seen):
    """A trial of v17 against v16: twelve people on each side, turns of the gate, rewards and a batch."""
    events = the_trial()
    question, answer = "Which one do you want?", "```python\ndef f():\n    return 1\n```"
    await seen.fill(*events[:3])
    await seen.fill(made_by(OLD, 40, user="early"), made_by(OLD, 41, user="anonymous", propensity=1.0))
    await seen.fill(*(made_by(NEW, at, Arm.CANARY, text=question) for at in range(12, 24)))
    await seen.fill(*(made_by(OLD, at, text=answer) for at in range(24)))
    await seen.fill(*(made_by(policy, 0, Arm.EVAL, text=policy.hash[:4]) for policy in (NEW, OLD)))
    await seen.fill(
        *events[3:],
        *(
            Reward(turn=f"16-live-{at}:0", value=float(at % 2), function="f@1", signals=(), at=900.0)
            for at in range(24)
        ),
        *(Reward(turn=f"17-canary-{at}:0", value=1.0, function="f@1", signals=(), at=900.0) for at in range(12, 24)),
        Batch(step=17, turns=("16-live-0:0", "16-live-1:0"), credits=((0.1,), (0.1,)), reference=OLD, at=950.0),
    )


async def test_what_auto_dealt_is_in_no_comparison_of_releases(seen):
    """Its shares follow the reward: here all of its people get the canary, of whom the trial would have dealt it to a tenth."""
    await fill(seen)
    auto = Pick(arm="canary", odds={"live": 0.5, "canary": 0.5})
    turns = [made_by(NEW, at, Arm.CANARY, user=f"auto{at}", auto=auto) for at in range(100, 140)]
    await seen.fill(*turns, *(Reward(turn=each.id, value=-1.0, function="f@1", signals=(), at=900.0) for each in turns))
    evidence = (await seen.facts.release(NEW.hash)).evidence
    assert (evidence.dealt.candidate, evidence.dealt.others) == (12, 0)
    rates = {rate.name: rate for rate in evidence.rates}
    assert (rates["accepted"].after, rates["accepted"].turns_after, rates["question"].turns_after) == (1.0, 12, 12)


async def test_a_trials_looks_come_from_the_ledger_and_better_counts_from_its_line_on():
    looks = trial_looks(the_trial(), NEW.hash)
    assert [(look.action, look.finding, look.goal.people) for look in looks] == [
        ("ramped", "undecided", 41.0),
        ("shipped", "not worse", 420.0),
        ("better", "better", 812.0),
    ]
    back = an_event(6, "rolled_back", OLD, NEW, reading=a_reading(-0.05, 0.02, 900.0, worse=True))
    assert trial_looks([*the_trial(), back], NEW.hash)[-1].finding == "worse"
    assert trial_looks([back], OLD.hash) == ()
    for action, finding in (("confirmed", "better, confirmed"), ("faded", "better at first")):
        later = an_event(8, action, reading=a_reading(0.01, 0.02, 900.0))
        assert trial_looks([*the_trial(), later], NEW.hash)[-1].finding == finding
    few = an_event(7, "blocked", reading=a_reading(0.0, math.inf, 0.0, enough=False))
    (look,) = trial_looks([few], NEW.hash)
    assert (look.finding, look.goal.lower, look.sees) == ("too few people", None, None)


async def test_measures_are_read_where_the_reading_has_them_and_a_guardrail_that_is_worse_decides():
    latency = {
        "role": "guardrail",
        "direction": "lower",
        "estimate": 0.4,
        "lower": 0.1,
        "upper": 0.7,
        "people": 30,
        "enough": True,
        "worse": True,
    }
    told = {"latency p99": latency, "odd": 3}
    reading = a_reading(0, 0.1, 30.0, metric="acceptance", metrics=told)
    (look,) = trial_looks([an_event(3, "blocked", reading=reading)], NEW.hash)
    assert (look.finding, look.goal.name) == ("worse", "acceptance")
    assert [(each.name, each.role, each.difference, each.better, each.finding) for each in look.measures] == [
        ("latency p99", "guardrail", 0.4, "lower", "worse"),
        ("odd", "", None, "higher", ""),
    ]


async def test_comparisons_and_bars_that_are_not_whole_are_left_out():
    comparisons, bars = last_report(the_trial())
    assert [(each.against.value, each.policy, each.holds) for each in comparisons] == [("anchor", OLD, True)]
    assert [bar.suite for bar in bars] == ["safety"]
    assert last_report([]) == ((), ())


async def test_what_was_found_last_is_the_last_line_whatever_the_clock_said(seen):
    """The clock was ahead at the gate's first look and when users found it better, and was set back before the lines that followed."""
    few = a_report() | {"verdict": "EXTEND", "comparisons": [], "bars": []}
    reading = a_reading(0.021, 0.017, 812.0, not_worse=True, better=True)
    lines = [
        an_event(0, "shipped", OLD, None),
        replace(an_event(1, "evaluated", report=few), at=9_000.0),
        an_event(2, "evaluated", report=a_report()),
        an_event(3, "shipped", share=0.9, salt="s"),
        replace(an_event(4, "better", reading=reading), at=9_000.0),
        an_event(5, "faded", reading=a_reading(0.0, 0.02, 900.0)),
    ]
    await seen.fill(*lines)
    found = await seen.facts.release(NEW.hash)
    assert [look.verdict for look in found.looks] == ["EXTEND", "SHIP"]
    assert [bar.suite for bar in found.evidence.bars] == ["safety"]
    assert [look.finding for look in found.evidence.trial] == ["better", "better at first"]


def test_people_are_counted_under_the_share_in_force_when_they_came():
    parts = [Stretch(start=10, share=0.5, shipped=False), Stretch(start=20, share=0.9, shipped=True)]
    people = [("canary", 11), ("live", 12), ("live", 21), ("live", 22), ("previous", 23)]
    found = counted(people, parts, 9)
    assert (found.candidate, found.others, found.whole) == (3, 2, True)
    assert found.expected == pytest.approx(0.5 * 2 + 0.9 * 3)
    assert found.odds < 10
    skewed = counted([("canary", 11)] * 600 + [("live", 12)] * 400, parts, 1000)
    assert skewed.odds > 1000


async def test_a_trial_that_a_move_of_live_forestalled_is_none_and_ends_none(seen):
    third, fourth = (PolicyVersion(number=number, hash=f"{number}" * 32) for number in (18, 19))
    await seen.fill(*the_trial()[:3], an_event(3, "canary", third, fourth, share=0.5, salt="t"))
    await seen.fill(*(made_by(NEW, at, Arm.CANARY) for at in range(6)), *(made_by(OLD, at) for at in range(6, 12)))
    dealt = (await seen.facts.release(NEW.hash)).evidence.dealt
    assert (dealt.candidate, dealt.others) == (6, 6)
    await seen.fill(
        an_event(4, "evaluated", fourth, OLD, report=a_report()),
        an_event(5, "canary", fourth, third, share=0.1, salt="u"),
        *(made_by(OLD, at, user=f"later{at}") for at in range(12, 24)),
    )
    assert (await seen.facts.release(fourth.hash)).evidence.dealt is None


async def test_one_release_is_gathered_whole(seen):
    await fill(seen)
    evidence = (await seen.facts.release(NEW.hash[:12])).evidence
    assert (evidence.against, evidence.steps, evidence.turns) == (OLD, 1, 2)
    assert (evidence.rules.margin, len(evidence.trial)) == (0.02, 3)
    assert (evidence.dealt.candidate, evidence.dealt.others) == (12, 0)  # everybody came to the canary first
    rates = {rate.name: rate for rate in evidence.rates}
    assert (rates["accepted"].before, rates["accepted"].after) == (0.5, 1.0)
    assert (rates["question"].before, rates["question"].after, rates["question"].harmful) == (0.0, 1.0, True)
    assert [(each.before, each.after) for each in evidence.examples] == [("1616", "1717")]
    assert evidence.weights is None
    assert (await seen.facts.release(OLD.hash)).evidence.against is None


async def test_steps_that_the_trainer_went_back_behind_are_not_among_those_of_a_later_release(seen):
    """Steps 17 and 18 were refused and the trainer went back to v16: v19 is one step from it, of one turn."""
    await fill(seen)
    newest = PolicyVersion(number=19, hash="19" * 32)
    batches = [
        Batch(step=step, turns=(f"16-live-{step}:0",), credits=((0.1,),), reference=OLD, at=950.0, base=base)
        for step, base in ((18, None), (19, OLD))
    ]
    await seen.fill(*batches, an_event(9, "evaluated", newest, OLD, report=a_report()))
    evidence = (await seen.facts.release(newest.hash)).evidence
    assert (evidence.against, evidence.steps, evidence.turns) == (OLD, 1, 1)


async def test_a_return_without_turns_is_no_step(seen):
    """Step 18 cannot be repeated and step 19 begins at v16 anew, with no turns: v20 is one step from it, of one turn."""
    await fill(seen)
    newest = PolicyVersion(number=20, hash="20" * 32)
    batches = [
        Batch(
            step=step, turns=turns, credits=((0.1,),) * len(turns), reference=OLD, at=950.0, base=base, even=not turns
        )
        for step, turns, base in ((18, ("16-live-18:0",), None), (19, (), OLD), (20, ("16-live-20:0",), None))
    ]
    await seen.fill(*batches, an_event(9, "evaluated", newest, OLD, report=a_report()))
    evidence = (await seen.facts.release(newest.hash)).evidence
    assert (evidence.against, evidence.steps, evidence.turns) == (OLD, 1, 1)


async def test_what_was_sent_is_summed_along_the_manifests(seen):
    zero = await seen.publish(0, "live")
    one = await seen.publish(1, base=zero)
    two = await seen.publish(2, base=one)
    await seen.fill(an_event(0, "shipped", zero, None), an_event(1, "evaluated", two, zero, report=a_report()))
    change = (await seen.facts.release(two.hash)).evidence.weights
    assert change is not None
    assert (change.since, change.versions, change.full_bytes) == (zero, 2, 4_000)
    assert 0 < change.bytes < 3 * 4_000


def test_pairs_have_one_prompt_and_are_the_same_at_every_look():
    prompts = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 9)]
    before = [made_by(OLD, at, prompt_ids=prompt) for at, prompt in enumerate(prompts[:4])]
    after = [made_by(NEW, at, prompt_ids=prompt) for at, prompt in enumerate(prompts)]
    pairs = same_prompts(before, after)
    assert len(pairs) == 3
    assert all(one.prompt_ids == other.prompt_ids for one, other in pairs)
    assert same_prompts(before, after[::-1]) == pairs


async def test_the_command_line_answers_as_the_page_does(seen):
    await fill(seen)
    console = Console(file=io.StringIO(), width=160)
    await show_release(seen.run.config, "v17", console)
    text = console.file.getvalue()
    assert "Is v17 better than v16?" in text
    assert "in the trial with users better (provisional): +2.1 pp [+0.4, +3.8] in the share of good turns" in text
    assert f'ostinato rollback {run_option(seen.run.config)} --reason "..." makes v16 live again' in text
    assert (await find_release(seen.facts, "live")).line.policy == NEW
    assert (await find_release(seen.facts, OLD.hash[:8])).line.policy == OLD
    with pytest.raises(NotFound, match="v17, v16"):
        await find_release(seen.facts, "v99")
    await seen.fill(an_event(9, "evaluated", PolicyVersion(number=17, hash="ab" * 32), NEW, report=a_report()))
    with pytest.raises(BadRequest, match="2 releases match"):
        await find_release(seen.facts, "17")


async def test_a_look_from_the_command_line_starts_from_the_gateways_index_and_leaves_it_alone(seen, tmp_path):
    await fill(seen)
    index = seen.run.home.folds / INDEX
    copy_index(index, tmp_path / INDEX)
    assert PageIndex(tmp_path / INDEX, words=True).cursors() == PageIndex(index, words=True).cursors()
    await seen.run.log.append(an_event(8, "shipped", PolicyVersion(number=18, hash="18" * 32), NEW))
    async with open_facts(seen.run, turns_s=0.0) as facts:
        assert (await facts.releases(None)).live.number == 18
    assert (await seen.facts.releases(None)).live == NEW
    copy_index(tmp_path / "none", tmp_path / "nothing")
    (tmp_path / "damaged").write_bytes(b"no database at all" * 500)
    copy_index(tmp_path / "damaged", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


async def test_the_report_of_any_run_is_one_file_that_asks_nobody(seen, tmp_path):
    await fill(seen)
    console = Console(file=io.StringIO(), width=160)
    await write_report(seen.run.config, tmp_path / "out" / "report.html", console)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "in the trial with users better (provisional)" in page.lower()
    assert f'href="#v-{NEW.hash[:16]}"' in page
    assert 'href="/' not in page
    for word in ("<script", "<link", "<form", "src=", "url(", "@import", "http:", "https:"):
        assert word not in page, word
    with pytest.raises(NotFound):
        await write_report(load(None, [f"run.directory={tmp_path / 'none'}"]), tmp_path / "x.html", console)
    assert NOW == 1000.0


async def test_the_margin_of_a_trial_is_the_tolerance_of_its_goal_where_that_has_its_own(tmp_path, model):
    own = (
        "[{name='acceptance', tolerance=0.05}, {name='stars', role='goal', numerator=['stars'], most=5, tolerance=0.2}]"
    )
    settings = ["release.signals=['stars']", f"release.metrics={own}", "release.canary=true"]
    config = load(None, [f"run.directory={tmp_path / 'run'}", f"model.source={model}", *settings])
    with open_run(config) as run, open_log(config) as log:
        seen = Observed(run, log)
        await seen.fill(*the_trial()[:3])
        for number, (goal, margin) in enumerate((("acceptance", 0.05), ("stars", 0.04), ("gone", 0.02)), 3):
            reading = a_reading(-0.03, 0.015, 900.0, not_worse=True, metric=goal)
            await seen.fill(an_event(number, "looked", reading=reading))
            assert (await seen.facts.release(NEW.hash)).evidence.rules.margin == pytest.approx(margin)
        seen.facts.close()
