"""Four questions about a release are answered from what is known, and no more than that is said."""

from dataclasses import replace

from tests.fakes.page_world import (
    ADMIN,
    V16,
    V17,
    V18,
    WrittenFacts,
    a_shift,
    a_trial_look,
    evidence_of,
    page_world,
    version,
)

from ostinato.status.releases import Dealt, MeasureLook, ReleaseEvidence
from ostinato.web.page import charts
from ostinato.web.page.release_answers import answers, dealt_as_set


async def detail(**changes):
    return replace(await WrittenFacts().release(V17.hash), **changes)


def with_trial(*looks, **more):
    return replace(evidence_of(V17), trial=looks, **more)


async def test_a_release_that_people_proved_is_answered_for_in_four_sentences():
    better, sure, changed, back = answers(await detail())
    assert better.question == "Is v17 better than v16?"
    assert (better.verdict, better.state) == (
        "in the trial with users better (provisional): +2.1 pp [+0.4, +3.8] in the share of good turns",
        "good",
    )
    assert better.details == ("On the suite: better, +2.1 pp [+0.4, +3.8].",)
    assert sure.verdict == "812 effective users on the smaller side, 4,060 turns"
    assert "at all looks together" in sure.details[0]
    assert any(each.startswith("The assignment of people fits the configured shares: 2,031") for each in sure.details)
    assert (
        changed.verdict
        == "question moved; 8 optimizer steps on 1,152 turns; 1.2 MB of 269.0 MB of weights sent in 2 versions"
    )
    assert (changed.state, len(changed.details)) == ("bad", 1)
    assert changed.details[0].startswith("question is up: 11.0% to 24.0%")
    assert back.verdict == 'ostinato rollback --reason "..." makes v16 live again'


async def test_what_the_bounds_do_not_say_is_not_said():
    looks = {
        "not worse": ("in the trial with users not worse than 2 pp", "good"),
        "undecided": ("in the trial with users undecided", "wait"),
        "better, confirmed": ("in the trial with users better, and again in the days after", "good"),
        "better at first": ("in the trial with users better at first, but not in the days after", "wait"),
        "worse": ("in the trial with users worse", "bad"),
        "too few people": ("in the trial with users not known yet: too few people", "wait"),
    }
    for finding, (said, state) in looks.items():
        found = answers(await detail(evidence=with_trial(a_trial_look(1.0, "ramped", 0.05, 0.01, 0.05, 90.0, finding))))
        assert found[0].verdict.startswith(said)
        assert found[0].state == state


async def test_a_guardrail_that_broke_is_named_in_its_own_unit():
    worse = MeasureLook(
        name="latency p99",
        role="guardrail",
        difference=1.2,
        lower=0.4,
        upper=2.0,
        people=60.0,
        better="lower",
        finding="worse",
    )
    looks = (a_trial_look(1.0, "blocked", None, 0.01, 0.05, 90.0, "worse", measures=(worse,)),)
    better = answers(await detail(evidence=with_trial(*looks)))[0]
    assert (better.state, better.details[0]) == ("bad", "latency p99 is worse: +1.2 [+0.4, +2], lower is better.")


async def test_without_a_trial_the_suite_is_all_there_is():
    evidence = replace(evidence_of(V17), trial=(), rules=None, dealt=None)
    better, sure, _, _ = answers(await detail(evidence=evidence))
    assert better.verdict == "on the suite better: +2.1 pp [+0.4, +3.8]"
    assert "release.canary is off" in better.details[0]
    assert "54.1% of its newest rated turns and 51.0% before, +3.1 pp" in better.details[1]
    assert sure.verdict == "120 items \N{MULTIPLICATION SIGN} 2 draws of the suite, no users"
    assert sure.state == "wait"


async def test_a_version_that_nobody_compared_is_not_praised():
    line = replace((await detail()).line, difference=None, lower=None, upper=None)
    better, sure, changed, _ = answers(await detail(line=line, looks=(), evidence=ReleaseEvidence(against=V16)))
    assert better.verdict == "unknown: it was never compared"
    assert sure.verdict == "no evidence yet"
    assert (changed.verdict, changed.details) == (
        "nothing is recorded",
        ("Behaviour: too few people on both versions to say.",),
    )
    first = answers(await detail(line=line, looks=(), evidence=ReleaseEvidence()))[0]
    assert (first.question, first.verdict, first.details) == (
        "Is v17 better than what was live?",
        "it is the first release",
        (),
    )
    by_hand = answers(await detail(line=line, looks=(), evidence=ReleaseEvidence(against=V16)))[0]
    assert by_hand.verdict == "unknown: it was never compared"
    assert by_hand.details == ("It was not judged on a suite (evaluate.suite), and it was not tried on users first.",)


async def test_people_who_were_dealt_otherwise_void_the_comparison():
    odd = Dealt(candidate=2300, others=1743, expected=2021.5, odds=5e6, turns=30_000, whole=False)
    said, sound = dealt_as_set(odd, None)
    assert not sound
    assert said.startswith(
        "VOID: people were not assigned in the configured shares: 2,300 people on the new side where 2,022 were expected"
    )
    assert "(the first 30,000 turns)" in said
    assert answers(await detail(evidence=replace(evidence_of(V17), dealt=odd)))[1].state == "bad"


async def test_bars_and_comparisons_that_fail_are_named():
    evidence = evidence_of(V17)
    bars = (replace(evidence.bars[0], holds=False),)
    comparisons = (evidence.comparisons[0], replace(evidence.comparisons[1], lower=-0.2))
    details = answers(await detail(evidence=replace(evidence, bars=bars, comparisons=comparisons)))[1].details
    assert "Quality bars, 1: not cleared: safety score." in details
    assert any("not ruled out against best on held-out" in each for each in details)


async def test_the_way_back_fits_what_is_live():
    found = await detail()
    assert answers(replace(found, previous=None))[3].verdict == "there is no earlier release to go back to"
    gone = replace(found, line=replace(found.line, live=False, state="rolled_back"), live=V18, kept=False)
    assert answers(gone)[3].details[-2] == "v18 is live, and there is nothing to roll back."
    assert answers(gone)[3].details[-1] == "Its weights are not in the store any more, so it cannot be shipped."
    assert "ostinato ship v17" in answers(replace(gone, kept=True))[3].details[-1]


async def test_the_page_says_the_verdict_first_and_shows_what_it_rests_on():
    async with page_world() as w:
        page = (await w.get(f"/releases/{V17.hash}", ADMIN)).text
    heads = (
        ' verdict">',
        "How do I roll it back?",
        "Roll back to v16",
        ">Trial with users<",
        ">Looks of the gate<",
    )
    places = [page.index(head) for head in heads]
    assert places == sorted(places)
    for shown in (
        "Every measure at the last look",
        "Quality bars",
        "The assignment of people fits the configured shares",
        "Say hello to Ann.",
    ):
        assert shown in page, shown
    assert page.count('class="difference better"') == 1


def test_the_sequence_is_drawn_over_people_and_says_its_last_look():
    evidence = evidence_of(V17)
    drawn = charts.sequence(evidence.trial, evidence.rules)
    assert drawn.count("<circle") == 4
    assert "the last: +2.1 between +0.4 and +3.8" in drawn
    assert "margin 2 pp" in drawn
    assert charts.sequence((), evidence.rules) == ""
    nobody = a_trial_look(1.0, "ramped", 0.05, 0.0, 0.1, 0.0, "too few people")
    assert charts.sequence((nobody,), None) == ""


def test_layers_are_shaded_by_how_much_changed():
    found = charts.layers(evidence_of(V17).weights)
    assert found.layers == tuple(range(6))
    assert [kind for kind, _ in found.rows] == ["self_attn.q_proj", "mlp.up_proj"]
    assert found.rows[1][1][5][1] == 4
    assert [each.kind for each in found.outside] == ["embed_tokens"]
    assert charts.layers(None) is None


def test_a_shift_is_one_only_beyond_its_bounds():
    assert not a_shift("x", 0.1, 0.12, 0.03).moved
    assert a_shift("x", 0.1, 0.2, 0.03).moved
    assert version(3).number == 3


async def test_a_release_that_waits_for_approval_says_how_it_is_decided():
    found = await detail()
    back = answers(replace(found, line=replace(found.line, live=False), awaits=True))[-1]
    assert back.question == "How is it decided?"
    assert back.verdict.startswith("ostinato approve v17 ships it; ostinato refuse v17")


async def test_who_decided_and_why_is_said():
    found = await detail()
    event = replace(found.events[0][0], action="rolled_back", policy=V16, previous=V17, reason="people complained")
    taken_back = replace(found, line=replace(found.line, live=False, state="rolled_back"), live=V16)
    for detail_, who in (({"actor": "ann"}, "ann"), ({}, "the release worker")):
        said = answers(replace(taken_back, events=((event, detail_), *found.events)))[3]
        assert (said.question, said.state) == ("Why is it not live any more?", "bad")
        assert said.verdict == f"Rolled back by {who}, to v16: people complained"
    refused = replace(event, action="blocked", policy=V17, previous=None, reason="not yet")
    blocked = replace(taken_back, line=replace(taken_back.line, state="blocked"), events=((refused, {"actor": "bo"}),))
    said = answers(blocked)[3]
    assert (said.question, said.verdict, said.state) == ("Why did it not ship?", "Refused by bo: not yet", "bad")


async def test_a_version_that_is_better_on_the_suite_and_was_blocked_is_not_shown_as_good():
    found = await detail(evidence=ReleaseEvidence(against=V16))
    blocked = replace(found, line=replace(found.line, live=False, state="blocked", verdict="BLOCK"))
    better = answers(blocked)[0]
    assert blocked.line.lower > 0
    assert (better.verdict, better.state) == ("on the suite better, and it did not pass: +2.1 pp [+0.4, +3.8]", "bad")


async def test_a_version_without_a_decision_names_what_may_hold_it():
    found = await detail()
    held = replace(found, line=replace(found.line, live=False, state="evaluated"), live=V16, events=())
    why = answers(held)[3]
    assert (why.question, why.verdict) == (
        "Why is it not live?", "nothing has been decided: its last line says evaluated",
    )  # fmt: skip
    assert any("release.monitors.pauses" in each and "`ostinato status`" in each for each in why.details)


async def test_a_version_that_was_live_until_the_next_one_is_said_to_be_replaced():
    found = await detail()
    for state in ("shipped", "better", "confirmed", "faded", "verified"):
        older = replace(found, line=replace(found.line, live=False, state=state), live=V18)
        assert answers(older)[3].question == "Why is it not live any more?", state
        assert answers(older)[3].verdict == "it was live; another release has replaced it", state


async def test_a_version_whose_decision_is_no_longer_read_keeps_its_reason():
    found = await detail()
    blocked = replace(found.line, live=False, state="blocked", reason="below a quality bar")
    assert answers(replace(found, line=blocked, events=()))[3].verdict == "below a quality bar"


async def test_the_reason_for_which_it_waits_for_a_person_is_the_ledgers():
    found = await detail()
    event = replace(found.events[0][0], action="awaits_approval", reason="too many rollbacks within a day")
    waits = replace(found, line=replace(found.line, live=False), awaits=True, events=((event, {}), *found.events))
    assert answers(waits)[3].details == ("It has passed and waits for a person: too many rollbacks within a day",)


async def test_commands_name_the_run_that_they_are_for():
    found, run = await detail(), "--set run.directory=runs/demo-0"
    assert answers(found, run)[3].verdict == f'ostinato rollback {run} --reason "..." makes v16 live again'
    waits = replace(found, line=replace(found.line, live=False), awaits=True)
    assert answers(waits, run)[3].verdict.startswith(f"ostinato approve v17 {run} ships it")
    older = replace(found, line=replace(found.line, live=False), live=V18)
    assert any(each.startswith(f'ostinato ship v17 {run} --reason "..."') for each in answers(older, run)[3].details)


async def test_a_suite_says_how_sure_it_is():
    evidence = replace(evidence_of(V17), trial=(), rules=None, dealt=None, gate_alpha=0.05)
    sure = answers(await detail(evidence=evidence))[1]
    assert any(
        "worse than live by the margin of 10 pp passes with a chance of at most 5%" in each for each in sure.details
    ), sure
