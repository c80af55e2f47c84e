"""Long sessions: the turns before a cut are credited with what came after it, and outcomes reach a session's first turn."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.errors import NoSignal
from ostinato.core.records import Batch, Consent, Holdback, NoReward, PolicyVersion, Reward, RewardReach, Span, Turn
from ostinato.core.samples import LaterReturns
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.batching import ready_parts
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode, episode_returns
from ostinato.reward.functions import agent, copilot
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.ledger_entries import Matured, TurnFacts
from ostinato.reward.log_fold import LedgerFollower, restored, snapshot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import Failure, RewardRequest, checked
from ostinato.reward.runners import asker_of
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="0" * 64)
WINDOW = 30.0
FREE = {"user_cap": 1.0, "tenant_cap": 1.0, "user_steps": 0}
ENDS = RewardConfig(
    **FREE, batch_tokens=4 * 321, outcomes=("accepted", "rejected")
)  # cuts a session of `session` behind 32 turns


def rewards_of(config):
    return lambda turn, said, now: copilot(turn, said, now, window=WINDOW, outcomes=config.outcomes)


def session(turns, *, at=1000.0, name="long", every=1.0):
    """Turns of one session: each prompt is ten tokens longer than the one before, an answer has one token."""
    return [
        replace(
            a_turn(f"{name}{i}:0", user=f"user of {name}", prompt=range(10 * (i + 1)), sampled=(7,)),
            episode=name,
            parent=f"{name}{i - 1}:0" if i else None,
            started_at=at + every * i,
            ended_at=at + every * i,
        )
        for i in range(turns)
    ]


def others(count, *, at, name="o"):
    """Single turns of other people, every other one accepted, the rest rejected: 0.25 in the mean."""
    turns = [a_turn(f"{name}{i}:0", user=f"{name}{i}", prompt=(i, 5), sampled=(7,), ended_at=at) for i in range(count)]
    said = [
        a_signal(turn, "accepted" if i % 2 else "rejected", at=turn.ended_at + 1, id=f"said {turn.id}")
        for i, turn in enumerate(turns)
    ]
    return [*turns, a_delivery(*turns), *said]


async def begun(log, now, open_desk, config, *, decided=True, every=1.0, stale=None):
    """A desk whose baseline has seen 40 turns, and a session of 60 behind 20 more; with its end accepted if it is `decided`. All but the
    first `stale` turns of the session are of version 1.
    """
    desk = open_desk(log, rewards_of(config), config)
    await log.append(*others(40, at=10.0))
    now.at = 100.0
    await desk.poll()
    assert await desk.batch(step=1, size=40, reference=V0)
    new = PolicyVersion(number=1, hash="1" * 64)
    long = [
        turn if stale is None or i < stale else replace(turn, spans=(Span(policy=new, tokens=1),))
        for i, turn in enumerate(session(60, every=every))
    ]
    await log.append(*others(20, at=1000.0, name="p"), *long, a_delivery(*long))
    if decided:
        await log.append(a_signal(long[-1], "accepted", at=long[-1].ended_at + 1, id="end"))
    return desk, long


def advantages(made, turns):
    """The first token's advantage of those of these turns that are in a batch."""
    found = {sample.turn.id: sample.advantages[0] for sample in made.samples}
    return [found[turn.id] for turn in turns if turn.id in found]


async def test_the_beginning_of_a_session_cut_for_its_tokens_is_credited_with_its_end(log, now, open_desk):
    desk, long = await begun(log, now, open_desk, ENDS)
    now.at = 1200.0
    await desk.poll()
    made = await desk.batch(step=2, size=40, reference=V0)
    first = advantages(made, long)
    assert len(first) == 32, "the first part"
    assert min(first) > 0.5, "it succeeded; with 0 for what comes later all are below -0.4"
    assert max(first) - min(first) < 0.1, "the outcome reaches all alike"
    (row,) = [row for row in log.of(Batch) if row.step == 2]
    (after,) = [LaterReturns(*values) for values in row.after if values]
    assert row.after[row.turns.index(long[31].id)] == after
    assert (after.outcomes_mean, after.decided, after.fading) == (0.75, 0.75, 0.0)
    assert not any(sample.cut for sample in made.samples), "to a value head too its end is known"


async def test_the_last_part_has_nothing_behind_it(log, now, open_desk):
    config = RewardConfig(**FREE, outcomes=ENDS.outcomes, episode_turns=32)
    desk, long = await begun(log, now, open_desk, config)
    now.at = 1200.0
    await desk.poll()
    first = await desk.batch(step=2, size=40, reference=V0)
    last = await desk.batch(step=3, size=40, reference=V0)
    assert [len(advantages(made, long)) for made in (first, last)] == [32, 28]
    assert min(advantages(first, long) + advantages(last, long)) > 0.5
    assert [len([values for values in made.row.after if values]) for made in (first, last)] == [1, 0]
    assert last.row.after == ()


async def test_what_is_not_known_yet_is_what_the_baseline_expects(log, now, open_desk):
    config = ENDS.model_copy(update={"batch_tokens": 1 << 17, "episode_wait_s": 60.0})
    desk, long = await begun(log, now, open_desk, config, decided=False, every=10.0)
    now.at = long[31].ended_at + WINDOW + 1.0
    await desk.poll()
    made = await desk.batch(step=2, size=40, reference=V0)
    first = advantages(made, long)
    assert 28 <= len(first) <= 36, "those whose windows have closed"
    assert max(map(abs, first)) < 0.1, (
        "nothing is known, and nothing taught; with 0 for what comes later all are below -0.4"
    )
    (after,) = [LaterReturns(*values) for values in made.row.after if values]
    assert after.decided == 0.0
    assert after.outcomes_mean == pytest.approx(0.25, abs=0.05), "an expected outcome does not fade either"
    assert abs(after.fading) < 0.05
    assert [sample.turn.id for sample in made.samples if sample.cut] == [long[len(first) - 1].id], "for a value head"
    assert [each async for each in desk.recorded(2, 2)] == [made]


@pytest.mark.parametrize("how", ["secret", "aggregate", "never", "withdrawn", "ends"])
async def test_of_a_session_whose_last_turn_is_held_back_alone_the_end_is_not_known(log, now, open_desk, how):
    """Its last turn brought success, and must not be learned from. The turns before it were credited as if nothing had followed, so that
    they looked worse than they were; now as if their end were not known yet. A session that does end there gets what it deserves.
    """
    desk, _ = await begun(log, now, open_desk, ENDS)
    turns = session(6, name="short", at=1300.0)
    last = {
        "secret": replace(turns[-1], secret=True),
        "aggregate": replace(turns[-1], consent=Consent.AGGREGATE),
        "never": replace(turns[-1], consent=Consent.NEVER).without_words(),
        "withdrawn": turns[-1],
    }
    whole = [*turns[:-1], *([last[how]] if how in last else [])]
    said = [a_signal(each, "accepted", at=each.ended_at + 1) for each in whole[5:]]
    await log.append(*others(20, at=1300.0, name="q"), *whole, a_delivery(*whole), *said)
    now.at = 1400.0
    await desk.poll()
    if how == "withdrawn":
        ledger = desk._reading.ledger
        ledger.apply(10**6, Holdback(turn=turns[-1].id, reason="consent:withdrawn", at=now.at))
    made = await desk.batch(step=2, size=25, reference=V0)
    found = advantages(made, turns)
    assert len(found) == 5
    after = [
        values for values in made.row.after if values and made.row.turns[made.row.after.index(values)] == turns[4].id
    ]
    if how == "ends":
        assert (max(found) < -0.2, after) == (True, [])
    else:
        assert max(map(abs, found)) < 0.1, "neither praised nor blamed"
        assert [LaterReturns(*values).decided for values in after] == [0.0]
    state = json.loads(json.dumps(snapshot(desk._reading.ledger)))
    again = restored(state, desk._reading.ledger.config)
    assert json.loads(json.dumps(snapshot(again))) == state
    assert ("alone" in state, len(state["alone"])) == (True, int(how != "ends"))


async def test_parts_of_which_nothing_is_known_are_no_contrast(log, now, open_desk):
    config = ENDS.model_copy(update={"batch_tokens": 1 << 17, "episode_wait_s": 60.0})
    desk, long = await begun(log, now, open_desk, config, decided=False, every=10.0)
    now.at = long[31].ended_at + WINDOW + 1.0
    await desk.poll()
    with pytest.raises(NoSignal, match="rewards are 0"):
        await desk.batch(step=2, size=30, reference=V0)  # of the session alone, which is the newest


async def test_a_part_alone_is_learned_from_if_its_end_is_known(log, now, open_desk):
    desk, long = await begun(log, now, open_desk, ENDS)
    now.at = 1200.0
    await desk.poll()
    made = await desk.batch(step=2, size=30, reference=V0)
    assert len(advantages(made, long)) == len(made.samples) == 32
    assert min(advantages(made, long)) > 0.5


async def test_the_baseline_is_taught_no_zeros_and_not_how_the_next_part_ends(log, now, open_desk):
    desk, long = await begun(log, now, open_desk, ENDS)
    now.at = 1200.0
    await desk.poll()
    before = LedgerFollower(log, ENDS)
    await before.catch_up()
    await desk.batch(step=2, size=40, reference=V0)
    reading = LedgerFollower(log, ENDS)
    await reading.catch_up()
    expected = [each.ledger.baseline.predict(context_of(long[5])) for each in (before, reading)]
    assert expected[1] == pytest.approx(expected[0], abs=0.02), "with 0 for what comes later it falls by more than 0.1"


async def test_a_desk_that_starts_again_reads_the_same(log, now, open_desk):
    desk, _ = await begun(log, now, open_desk, ENDS)
    now.at = 1200.0
    await desk.poll()
    rows = list(log.rows)
    made = await desk.batch(step=2, size=40, reference=V0)
    again = type(log)()
    await again.append(*rows)
    assert (await open_desk(again, rewards_of(ENDS), ENDS).batch(step=2, size=40, reference=V0)).row == made.row
    repeated = [batch.row async for batch in desk.history(1)]
    assert repeated == [made.row]


@pytest.mark.parametrize("cut", [{"batch_tokens": 4 * 321}, {"episode_turns": 7}, {"episode_turns": 41}])
@pytest.mark.parametrize("outcomes", [("accepted",), ()])
async def test_a_cut_changes_no_credit_of_a_decided_session(log, now, open_desk, cut, outcomes):
    found = []
    for settings in (cut, {}):
        config, log = RewardConfig(**FREE, outcomes=outcomes, **settings), type(log)()
        desk, long = await begun(log, now, open_desk, config)
        said = [(5, "undone"), (20, "accepted"), (35, "undone"), (45, "accepted")]
        await log.append(*(a_signal(long[i], name, at=long[i].ended_at + 1) for i, name in said))
        now.at = 1200.0
        await desk.poll()
        made = await desk.batch(step=2, size=61, reference=V0) or await desk.batch(step=2, size=20, reference=V0)
        found.append(np.array(advantages(made, long)))
    part, whole = found
    assert 0 < len(part) < len(whole) == 60
    ratios = part / whole[: len(part)]
    assert ratios[0] > 0
    assert ratios == pytest.approx(ratios[0]), "the same up to the batch's RMS"


async def test_a_stale_beginning_teaches_the_baseline_no_zeros(log, now, open_desk):
    config = ENDS.model_copy(update={"batch_tokens": 1 << 17, "max_staleness": 0})
    desk, long = await begun(log, now, open_desk, config, stale=30)
    now.at = 1200.0
    await desk.poll()
    before = LedgerFollower(log, config)
    await before.catch_up()
    assert await desk.batch(step=2, size=81, reference=V0) is None, "too few are left"
    assert [log.reasons(Holdback)[turn.id] for turn in long[:30]] == ["stale:1"] * 30
    reading = LedgerFollower(log, config)
    await reading.catch_up()
    reading.ledger.teaching.catch_up()
    expected = [each.ledger.baseline.predict(context_of(long[5])) for each in (before, reading)]
    assert expected[1] == pytest.approx(expected[0], abs=0.02), "with 0 for what comes later it falls by more than 0.1"


# ---------------------------------------------------------------- outcomes


def credited(turns, rewards, outcomes=(), **settings):
    """With a baseline that expects 0.25 of every turn, and twenty other turns whose rewards are 0.25 in the mean."""
    base, apart = Quarter(), [a_turn(f"o{i}:0", user=f"o{i}", prompt=(i,), sampled=(7,)) for i in range(20)]
    rewards = rewards | {turn.id: 0.75 if i % 2 else -0.25 for i, turn in enumerate(apart)}
    single = SingleRollout(RewardConfig(**FREE, **settings), base, outcomes=outcomes)
    found = single(by_episode([*turns, *apart]), rewards)
    unit = (found["o1:0"][0] - found["o0:0"][0]) / 1.0
    return [found[turn.id][0] / unit for turn in turns]


class Quarter(Baseline):
    """Expects a quarter."""

    def predict(self, context):
        return 0.25


def test_an_outcome_reaches_the_first_of_170_turns_and_a_rating_does_not():
    turns = session(170)
    rewards = dict.fromkeys((turn.id for turn in turns), 0.0) | {turns[-1].id: 0.75}
    assert credited(turns, rewards, {turns[-1].id}) == pytest.approx([0.5] * 170)
    fading = credited(turns, rewards)
    assert fading[-1] == pytest.approx(0.5)
    assert fading[120] == pytest.approx(-0.25, abs=0.01), "0.9 per call: gone after 44 calls"
    assert credited(turns, rewards, discount=1.0) == pytest.approx([0.5] * 170)


def test_an_outcome_told_on_every_turn_is_worth_no_more_than_once():
    turns = session(170)
    rewards = {turn.id: 0.75 for turn in turns}
    assert credited(turns, rewards, set(rewards)) == pytest.approx([0.5] * 170)
    mixed = dict.fromkeys(rewards, 0.0) | {turns[10].id: -0.25, turns[160].id: 0.75}
    found = credited(turns, mixed, {turns[10].id, turns[160].id})
    assert found[:11] == pytest.approx([0.0] * 11), "the mean of both outcomes"
    assert found[11:161] == pytest.approx([0.5] * 150), "of the one that is still to come"
    assert found[161:] == pytest.approx([-0.25] * 9), "no turn is credited with what came before it"


def test_which_signals_are_outcomes():
    turn = a_turn("a:0", ended_at=10.0)
    reach = {}
    for name in ("accepted", "tests_passed", "task_done", "merged", "task_failed", "reverted"):
        reward = agent(turn, [a_signal(turn, name, at=11.0)], 50.0, window=WINDOW)
        reach[name] = reward.value, reward.reach
    assert reach["accepted"] == (0.5, RewardReach.TURN)
    assert reach["tests_passed"] == (0.5, RewardReach.TURN)
    assert reach["task_done"] == reach["merged"] == (1.0, RewardReach.EPISODE)
    assert reach["task_failed"] == reach["reverted"] == (-1.0, RewardReach.EPISODE)
    nothing = agent(turn, [a_signal(turn, "task_done", value=0.0, at=11.0)], 50.0, window=WINDOW)
    assert (nothing.value, nothing.reach) == (0.0, RewardReach.TURN)
    assert isinstance(agent(turn, [], 50.0, window=WINDOW), NoReward)
    accepted = [a_signal(turn, "accepted", at=11.0), a_signal(turn, "task_done", at=12.0, id="d")]
    assert copilot(turn, accepted, 50.0, window=WINDOW).reach is RewardReach.TURN, "it does not count task_done"
    assert copilot(turn, accepted, 50.0, window=WINDOW, outcomes=("accepted",)).reach is RewardReach.EPISODE


async def test_the_configured_outcomes_reach_the_built_in_function_and_the_log(log, now):
    config = RewardConfig(outcomes=("accepted",), options={"window": WINDOW})
    turn = a_turn("a:0", ended_at=10.0)
    await log.append(turn, a_delivery(turn), a_signal(turn, "accepted", at=11.0))
    now.at = 100.0
    await RewardDesk(log, asker_of(config), now, config).poll()
    assert [row.reach for row in log.of(Reward)] == [RewardReach.EPISODE]


def test_a_function_of_ones_own_may_say_the_reach_and_nonsense_costs_its_turn():
    turn = a_turn("a:0")
    asked = RewardRequest(turn=turn, signals=(), now=50.0)
    reward = Reward(turn="a:0", value=1.0, function="mine@1", signals=(), at=50.0)
    assert checked(replace(reward, reach="episode"), asked, 100.0) == replace(reward, reach=RewardReach.EPISODE)
    answer = checked(replace(reward, reach="world"), asked, 100.0)
    assert answer == Failure(reason="reward_nonsense: the reach world; it must be one of turn, episode")


# ---------------------------------------------------------------- parts


def test_returns_of_parts_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    for _ in range(300):
        turns, rewards = [], []
        for call in range(int(rng.integers(2, 12))):
            for choice in range(int(rng.integers(1, 3))):
                turns.append(f"{call}:{choice}")
                lines = int(rng.integers(0, 4)) * int(rng.random() < 0.4)
                mean = float(rng.normal()) if lines else 0.0
                rewards.append((mean + float(rng.normal()) * (rng.random() < 0.5), mean, lines))
        outcomes = {turn for turn in turns if rng.random() < rng.choice([0.0, 0.3])}
        discount = float(rng.choice([0.0, 0.5, 0.9, 1.0]))
        whole = episode_returns(turns, rewards, discount, outcomes=outcomes)
        cuts = [i for i in range(1, len(turns)) if turns[i].split(":")[0] != turns[i - 1].split(":")[0]]
        for cut in cuts:
            rest = episode_returns(turns[cut:], rewards[cut:], discount, outcomes=outcomes)
            part = episode_returns(turns[:cut], rewards[:cut], discount, outcomes=outcomes, after=rest.first)
            joined = np.array([*part.turns, *rest.turns])
            assert joined == pytest.approx(np.array(whole.turns), abs=1e-12)
            assert part.first == pytest.approx(whole.first, abs=1e-12)
            doubled = rest.first.divided(0.5)
            assert doubled.total == pytest.approx(2 * rest.first.total)


def test_a_cut_keeps_the_choices_of_a_call_together():
    config = RewardConfig(episode_turns=4)
    ids = ["a:0", "b:0", "c:0", "c:1", "c:2", "d:0"]
    turns = [replace(a_turn(name, prompt=range(10 * i + 1)), episode="e") for i, name in enumerate(ids)]
    matured = [
        Matured(facts=TurnFacts.of(i, turn, config), value=0.0, silent=False, signals=(), since=0.0)
        for i, turn in enumerate(turns)
    ]
    (part,) = ready_parts(matured, lambda unit: None, now=1e9, config=config)
    assert [entry.facts.id for entry in part.entries] == ids[:2]
    (part,) = ready_parts(
        matured[2:], lambda unit: None, now=1e9, config=config.model_copy(update={"episode_turns": 2})
    )
    assert [entry.facts.id for entry in part.entries] == ids[2:4], "nothing is left before it"
    ledger = TurnLedger(config)
    ledger.matured = {entry.facts.id: replace(entry, value=1.0) for entry in matured[2:]}
    (after,) = ledger.later_returns(part.entries).values()
    assert after.fading == 1.0, "of the next call, not of the other choice"


def test_what_comes_after_is_no_part_of_who_is_compared():
    same = [replace(a_turn(f"a:{i}", prompt=(1, 2), sampled=(7,)), episode="e") for i in range(2)]
    other = [a_turn(f"o{i}:0", prompt=(i,), sampled=(7,), user=f"o{i}") for i in range(2)]
    rewards = {"a:0": 1.0, "a:1": 0.0, "o0:0": 1.0, "o1:0": 0.0}
    found = {}
    for after in (None, LaterReturns()):
        credit = SingleRollout(RewardConfig(**FREE), Baseline())
        found[after] = credit(by_episode([*same, *other], {("default", "e"): after} if after else None), rewards)
    assert found[None]["a:1"][0] < 0, "the last call's choices are compared with each other"
    assert found[LaterReturns()]["a:1"][0] == 0, "what follows came of one of them, and says nothing of the others"


async def test_a_desk_that_reads_the_log_anew_has_the_live_ones_baseline(log, now, open_desk):
    """What follows turns that were held back is looked up before the batch that takes it, live and afterwards."""
    config = RewardConfig(**FREE, max_staleness=2, outcomes=("accepted", "rejected"))
    desk = open_desk(log, rewards_of(config), config)
    for step in range(1, 8):
        policy = PolicyVersion(number=step - 1, hash=f"{step}" * 64)
        long = [
            replace(turn, spans=(Span(policy=V0 if i == 0 else policy, tokens=1),))
            for i, turn in enumerate(session(6, at=1000.0 * step, name=f"long{step}-"))
        ]
        single = [
            replace(row, spans=(Span(policy=policy, tokens=1),)) if isinstance(row, Turn) else row
            for row in others(20, at=1000.0 * step, name=f"o{step}-")
        ]
        await log.append(*single, *long, a_delivery(*long), a_signal(long[-1], "accepted", at=1000.0 * step + 10))
        now.at = 1000.0 * step + 500
        await desk.poll()
        assert await desk.batch(step=step, size=20, reference=V0)
    assert sum(row.reason.startswith("stale:") for row in log.of(Holdback)) >= 4
    again = open_desk(log, rewards_of(config), config)
    await again.poll()
    live, anew = desk._reading.ledger, again._reading.ledger
    for ledger in (live, anew):
        ledger.teaching.catch_up()
    assert anew.baseline.snapshot() == live.baseline.snapshot()
