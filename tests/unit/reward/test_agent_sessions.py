"""Sessions of people who keep or undo what an agent wrote, from the log through the desk to each turn's credit."""

from dataclasses import replace
from functools import partial

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.core.conversation import call_id
from ostinato.core.notices import Forgotten
from ostinato.core.records import (
    Batch,
    Consent,
    ConsentGiven,
    Holdback,
    PolicyVersion,
    Purpose,
    Reward,
    Window,
    WindowMaker,
)
from ostinato.reward.accounting import account
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import agent
from ostinato.serve.feedback.intake import parse_feedback
from ostinato.testing.records import a_delivery, a_turn

V0 = PolicyVersion(number=0, hash="00")
WINDOW_S = 100.0
STEPS = ("look", "edit", "report")


def session(person, at=10.0):
    """Three turns: the agent looks, edits, and reports."""
    return {
        step: replace(
            a_turn(f"chatcmpl-{person:02x}{i}:0", user=f"person {person}", prompt=(person, i), ended_at=at + i),
            episode=f"session {person}",
        )
        for i, step in enumerate(STEPS)
    }


def says(turn, name, value=1.0, at=50.0, call=None):
    """The signal as it comes in over the network; about the turn's call, if one is given."""
    target = turn.id if call is None else call_id(turn.id, call)
    event = {"id": f"{name} {turn.id}", "target": target, "name": name, "value": value, "source": "code"}
    return parse_feedback(event, tenant="default", now=at)


@pytest.fixture
def learn(log, now, open_desk):
    """The credit of each turn's first token, and its reward, after one batch of these sessions."""

    async def learned(sessions, *signals, **options):
        turns = [turn for each in sessions for turn in each.values()]
        await log.append(*turns, a_delivery(*turns), *(row for rows in signals for row in rows))
        options = {"window": WINDOW_S} | options
        config = RewardConfig(user_cap=1.0, group_wait_s=0.0)
        desk = open_desk(log, partial(agent, **options), config)
        now.at = 10.0 + len(STEPS) + WINDOW_S + 1
        made = await desk.batch(1, len(turns), V0)
        assert made is not None
        (batch,) = log.of(Batch)
        credit = {turn: each[0] for turn, each in zip(batch.turns, batch.credits, strict=True)}
        return credit, {row.turn: row for row in log.of(Reward)}

    return learned


async def test_the_outcome_of_a_session_reaches_all_its_turns(learn):
    kept, undone = session(1), session(2)
    credit, rewards = await learn(
        [kept, undone],
        says(kept["report"], "tests_passed"),
        says(undone["report"], "tests_failed"),
        silence=0.0,
    )
    assert [rewards[turn.id].value for turn in kept.values()] == [0.0, 0.0, 0.5]
    assert [rewards[turn.id].value for turn in undone.values()] == [0.0, 0.0, -0.5]
    assert 0 < credit[kept["look"].id] < credit[kept["edit"].id] < credit[kept["report"].id]
    assert 0 > credit[undone["look"].id] > credit[undone["edit"].id] > credit[undone["report"].id]


async def test_what_is_said_about_a_call_counts_for_the_turn_that_made_it(learn):
    one, other = session(1), session(2)
    credit, rewards = await learn(
        [one, other], says(one["edit"], "lines_kept_1h", 1.0, call=2), says(other["report"], "followed_up"), silence=0.0
    )
    assert {turn: row.value for turn, row in rewards.items() if row.value} == {one["edit"].id: 0.5}
    assert credit[one["edit"].id] > credit[one["look"].id] > credit[one["report"].id] == credit[other["report"].id] == 0


async def test_people_who_keep_and_people_who_undo(learn):
    """Twelve people. Every third takes back what was written, and says so."""
    sessions = {person: session(person) for person in range(12)}
    undo = {person for person in sessions if person % 3 == 0}
    signals = []
    for person, turns in sessions.items():
        share = 0.1 if person in undo else 0.9
        signals += [
            says(turns["edit"], "lines_kept_5m", 1.0, at=30.0, call=0),
            says(turns["edit"], "lines_kept_1h", share, at=40.0, call=0),
            says(turns["report"], "dissatisfied" if person in undo else "praised"),
        ]
    credit, rewards = await learn(list(sessions.values()), *signals, silence=0.0)
    for person, turns in sessions.items():
        signs = {credit[turns[step].id] > 0 for step in ("look", "edit")}
        assert signs == {person not in undo}
        assert rewards[turns["edit"].id].value == pytest.approx(-0.4 if person in undo else 0.4)
        assert (credit[turns["report"].id] < 0) is (person in undo)


# ---------------------------------------------------------------- ways to please it


def worth(*signals):
    turn = a_turn("chatcmpl-3f:0")
    heard = [row for name, value, n in signals for i in range(n) for row in said(turn, name, value, i)]
    return agent(turn, heard, turn.ended_at + WINDOW_S, window=WINDOW_S)


def said(turn, name, value, i):
    event = {"id": f"{name}{i}", "target": turn.id, "name": name, "value": value, "source": "code"}
    return parse_feedback(event, tenant="default", now=50.0)


def test_what_does_not_pay():
    honest = worth(("lines_kept_1h", 0.9, 1), ("tests_passed", 1.0, 1)).value
    assert worth(("lines_kept_1h", 0.9, 40), ("tests_passed", 1.0, 40)).value == pytest.approx(honest)  # much of it
    assert worth(("tool_ok", 1.0, 50), ("tool_accepted", 1.0, 50)).value == 0  # calls for their own sake
    assert worth(("praised", 1.0, 9)).value == 0  # flattery
    assert worth(("followed_up", 1.0, 1)).value == 0 < honest  # talk, questions
    assert worth(("lines_kept_1h", 0.3, 1), ("praised", 1.0, 1)).value < 0  # what is thanked for and taken back
    assert not hasattr(worth(), "value")  # hiding from whoever watches


def test_what_still_pays():
    """Known, and in the guide: who sees it are the monitors."""
    likely_undone = worth(("lines_kept_1h", 0.4, 1)).value
    assert worth(("followed_up", 1.0, 1)).value > likely_undone  # asking where an edit may fail
    assert worth(("tests_passed", 1.0, 1)).value > 0  # tests that were weakened pass


async def test_one_edit_in_pieces_earns_more_than_in_one(learn):
    """Known, and in the guide: what a session's turns earn adds up."""
    whole, pieces = session(1), session(2)
    edits = [says(turn, "lines_kept_1h", 1.0, call=0) for turn in pieces.values()]
    credit, _ = await learn([whole, pieces], says(whole["look"], "lines_kept_1h", 1.0, call=0), *edits, silence=0.0)
    assert credit[pieces["look"].id] > 2 * credit[whole["look"].id] > 0


# ---------------------------------------------------------------- side calls that were summaries


def windows(person, *, summary="s", episode=None, tenant="default"):
    """A turn, a side call, and a turn in the window that begins with what the side call said."""
    work = session(person)
    side = replace(work["edit"], purpose=Purpose.SIDE)
    begun = Window(number=1, begins_with=side.id if summary == "s" else summary, by=WindowMaker.AGENT)
    after = replace(work["report"], window=begun, episode=episode or side.episode, tenant=tenant)
    return work["look"], side, after


async def folded(log, now, open_desk, *rows, size=2, purposes=(Purpose.TASK, Purpose.COMPACTION)):
    """What is trained on and held back once all rewards are known, read in two halves by two desks."""
    config = RewardConfig(user_cap=1.0, group_wait_s=0.0, purposes=purposes)

    def desk():
        return open_desk(log, partial(agent, window=WINDOW_S, silence=0.5), config)

    for row in rows:
        await log.append(row)
        now.at = 14.0
        await desk().poll()
        mine, theirs = await account(log, config=config), await recount(log)
        assert (mine.waiting, mine.oldest_wait, mine.held) == (theirs.waiting, theirs.oldest_wait, theirs.held)
    await log.append(*says(rows[0], "tests_failed", at=14.5))  # so that there is something to tell apart
    now.at = 10.0 + len(STEPS) + WINDOW_S + 1
    made = await desk().batch(1, size, V0)
    await desk().poll()
    found = await recount(log)
    assert found.balanced
    assert found.waiting == 0
    return () if made is None else made.row.turns, log.reasons(Holdback)


async def test_a_side_call_with_which_a_window_begins_is_learned_from_as_its_compaction(log, now, open_desk):
    look, side, after = windows(1)
    rows = (look, side, a_delivery(look, side), after, a_delivery(after))
    trained, held = await folded(log, now, open_desk, *rows, size=3)
    assert (trained, held) == ((look.id, side.id, after.id), {})


async def test_a_side_call_that_no_window_begins_with_is_held_back_once_its_reward_is_due(log, now, open_desk):
    look, side, after = windows(1, summary="another:0")
    trained, held = await folded(log, now, open_desk, look, side, a_delivery(look, side), after, a_delivery(after))
    assert (trained, held) == ((look.id, after.id), {side.id: "purpose:side"})


@pytest.mark.parametrize("other", [{"episode": "another"}, {"tenant": "another"}])
async def test_a_window_of_another_episode_or_tenant_says_nothing_about_a_side_call(other, log, now, open_desk):
    look, side, after = windows(1, **other)
    trained, held = await folded(log, now, open_desk, look, side, a_delivery(look, side), after, a_delivery(after))
    assert side.id not in trained
    assert held == {side.id: "purpose:side"}


async def test_a_withdrawal_counts_for_a_side_call_that_waits_whatever_is_agreed_to_later(log, now, open_desk):
    look, side, after = windows(1)
    refused = ConsentGiven(id="c1", tenant=side.tenant, user=side.user, level=Consent.AGGREGATE, at=20.0)
    agreed = replace(refused, id="c2", level=Consent.YES, at=21.0)
    desk = open_desk(log, partial(agent, window=WINDOW_S, silence=0.5), RewardConfig())
    for row in (look, side, a_delivery(look, side), refused, agreed, after, a_delivery(after)):
        await log.append(row)
        await desk.poll()
    now.at = 10.0 + len(STEPS) + WINDOW_S + 1
    await desk.poll()
    assert log.reasons(Holdback)[side.id] == "consent:withdrawn"


async def test_a_side_call_that_was_a_compaction_is_held_back_where_compactions_are(log, now, open_desk):
    look, side, after = windows(1)
    rows = (look, side, a_delivery(look, side), after, a_delivery(after))
    trained, held = await folded(log, now, open_desk, *rows, purposes=(Purpose.TASK,))
    assert (trained, held) == ((look.id, after.id), {side.id: "purpose:compaction"})


async def test_a_person_who_takes_the_consent_back_is_not_learned_from_by_way_of_a_summary(log, now, open_desk):
    look, side, after = windows(1)
    no = ConsentGiven(id="c", tenant=side.tenant, user=side.user, level=Consent.AGGREGATE, at=13.0)
    trained, held = await folded(log, now, open_desk, look, side, a_delivery(look, side), no, after)
    assert side.id not in trained
    assert held[side.id] == "consent:withdrawn"


async def test_a_side_call_of_somebody_who_is_forgotten_is_held_back_whatever_begins_with_it(log, now, open_desk):
    look, side, after = windows(1)
    desk = open_desk(log, partial(agent, window=WINDOW_S))
    for row in (look, side, Forgotten(id="f", tenant=side.tenant, user=side.user, key=0, at=13.0), after):
        await log.append(row)
        await desk.poll()
    assert log.reasons(Holdback) == {look.id: "forgotten", side.id: "forgotten"}


async def test_a_log_in_which_the_side_call_was_held_back_at_once_is_read_as_it_was(log, now, open_desk):
    look, side, after = windows(1)
    early = Holdback(turn=side.id, reason="purpose:side", at=13.5)
    trained, held = await folded(log, now, open_desk, look, side, early, a_delivery(look), after, a_delivery(after))
    assert (trained, held) == ((look.id, after.id), {side.id: "purpose:side"})
    assert len(log.of(Holdback)) == 1
