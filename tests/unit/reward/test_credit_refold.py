"""Credits without a person are those that a log gives which never held the person's rows; anything less keeps a trace of them."""

import json
import math
import random
from dataclasses import replace

import pytest

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.notices import Forgotten
from ostinato.core.records import (
    Batch,
    Consent,
    Delivered,
    Holdback,
    NoReward,
    PolicyVersion,
    Purpose,
    Quarantine,
    Reward,
    Signal,
    Turn,
)
from ostinato.reward.accounting import account
from ostinato.reward.config import RewardConfig
from ostinato.reward.erasure import CreditRefold, erased_people
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.log_fold import LedgerFollower, snapshot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.response_propensity import ResponsePropensity
from ostinato.reward.runners import Inline
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
GONE, FIRST = "u3", "u7"
"""Who is taken out; and somebody who was there before everybody else, and said nothing."""
ALL = Taught(every=True)
TIGHT = RewardConfig(batch_tokens=120)  # a step cannot hold all: turns are drawn, with weights, and others passed over


async def a_log(config: RewardConfig, taught: Taught, rounds: int = 8, forgotten: str | None = None) -> MemoryLog:
    """Batches of what eight users said, by a real desk whose clock moves with every row that it writes. Halfway, and with turns that wait,
    somebody may be `forgotten`.
    """
    log, time, draw = MemoryLog(), [1000.0], random.Random(3)

    def clock() -> float:
        time[0] += 1e-3
        return time[0]

    desk = RewardDesk(log, Inline(copilot, max_abs=config.max_abs), clock, config, taught=taught)
    for round_ in range(rounds):
        at = clock()
        for i in range(24):
            user = FIRST if round_ == i == 0 else f"u{draw.randrange(7)}"
            sampled = tuple(draw.randrange(9) for _ in range(draw.randrange(1, 6)))
            prompt, name = range(draw.randrange(1, 5)), f"{round_}-{i}:0"
            turn = a_turn(name, user=user, version=round_, prompt=prompt, sampled=sampled, ended_at=at)
            turn = replace(turn, episode=f"{round_}-{user}" if i % 3 else turn.episode, secret=round_ > 0 and i == 4)
            name = "accepted" if draw.random() < (0.2 if user == GONE else 0.7) else "rejected"
            said = [] if user == FIRST else [a_signal(turn, name, at=at)]
            await log.append(*reversed(said), turn, a_delivery(turn, at=at))
        if forgotten is not None and round_ == rounds // 2:
            await log.append(Forgotten(id="g", tenant="default", user=forgotten, key=1, at=at))
        time[0] += 4000.0
        await desk.batch(round_ + 1, 12, V0)
    if forgotten is not None:
        await desk.poll()
        again = LedgerFollower(log, config, arms=taught.arms)
        await again.catch_up()
        assert snapshot(again.ledger) == snapshot(desk._reading.ledger), "read anew, it is the same"
        assert (await account(log, config=config)).balanced
    return log


def without(rows, gone):
    """The rows of a log that never held a person, written for this test: batches lose the turns, as the definition says."""
    theirs = {row.id for row in rows if isinstance(row, Turn) and row.user == gone}
    for row in rows:
        if isinstance(row, Turn) and row.id in theirs:
            continue
        if isinstance(row, Signal | Reward | Holdback | Quarantine) and row.turn in theirs:
            continue
        if isinstance(row, Delivered) and theirs.issuperset(row.turns):
            continue
        yield row


async def refolded(log, config, taught, gone):
    refold = CreditRefold(log, config, taught, erased_people({("default", each): 1 << 40 for each in gone}))
    return [batch async for batch in refold.batches()]


CASES = [(RewardConfig(), Taught()), (TIGHT, ALL), (RewardConfig(user_steps=0, user_cap=0.05), Taught())]


@pytest.mark.parametrize(("config", "taught"), CASES)
async def test_with_everybody_every_batch_has_its_recorded_credits(config, taught):
    log = await a_log(config, taught)
    found = await refolded(log, config, taught, ["nobody"])
    assert len(found) == 8
    assert not any(batch.changed for batch in found)
    if taught.every:
        assert any(batch.recorded.weights for batch in found)
        assert any(isinstance(row, Holdback) and row.reason.startswith("passed_over") for row in log.rows)


@pytest.mark.parametrize(("config", "taught"), CASES)
async def test_credits_after_somebody_was_forgotten_are_folded_anew_to_the_same_bits(config, taught):
    """No fold knows them any more, live as when it is read anew; what waited of theirs is held back, and earlier credit stays."""
    log, plain = await a_log(config, taught, forgotten="u5"), await a_log(config, taught)
    assert not any(batch.changed for batch in await refolded(log, config, taught, ["nobody"]))
    steps = [[row for row in each.rows if isinstance(row, Batch)] for each in (log, plain)]
    assert steps[0][:4] == steps[1][:4]
    assert steps[0][5:] != steps[1][5:], "the others share batches without them"
    held = [row.turn for row in log.rows if isinstance(row, Holdback) and row.reason == "forgotten"]
    users = {turn.id: turn.user for turn in log.turns()}
    assert {users[turn] for turn in held} == {"u5"}
    ledger = LedgerFollower(log, config, arms=taught.arms)
    at = log.rows.index(next(row for row in log.rows if isinstance(row, Forgotten)))
    for seq, row in enumerate(log.rows[: at + 1], 1):
        ledger.ledger.apply(seq, row)
        assert row is not log.rows[at - 1] or '"u5"' in json.dumps(snapshot(ledger.ledger))
    assert '"u5"' not in json.dumps(snapshot(ledger.ledger))


@pytest.mark.parametrize("forgotten", [None, "u5"])
@pytest.mark.parametrize(("config", "taught"), CASES)
async def test_without_a_person_every_batch_is_that_of_a_log_that_never_held_them(config, taught, forgotten):
    log = await a_log(config, taught, forgotten=forgotten)
    found = await refolded(log, config, taught, [FIRST, GONE])
    never = MemoryLog()
    await never.append(*without(log.rows, GONE))
    theirs = {turn.id for turn in log.turns() if turn.user == GONE}
    episodes = {turn.id: turn.episode for turn in log.turns()}
    kept = [replace_batch(row, theirs, episodes) if isinstance(row, Batch) else row for row in never.rows]
    never = MemoryLog()
    await never.append(*kept)
    wanted = await refolded(never, config, taught, [FIRST])
    assert [batch.row.turns for batch in found] == [batch.row.turns for batch in wanted]
    assert [batch.row.credits for batch in found] == [batch.row.credits for batch in wanted]
    assert [batch.row.weights for batch in found] == [batch.row.weights for batch in wanted]
    assert all(theirs.isdisjoint(batch.row.turns) for batch in found)
    kept_as_recorded = [
        [
            credit
            for turn, credit in zip(batch.recorded.turns, batch.recorded.credits, strict=True)
            if turn not in theirs
        ]
        for batch in found
    ]
    assert [list(batch.row.credits) for batch in found] != kept_as_recorded, "leaving rows out is not enough"


def replace_batch(row: Batch, gone: set[str], episodes: dict[str, str]) -> Batch:
    """A batch without these turns. The weights of drawn turns keep their ratios and sum to the number of episodes."""
    kept = [i for i, turn in enumerate(row.turns) if turn not in gone]
    weights = [row.weights[i] for i in kept] if row.weights else []
    if weights and len(kept) < len(row.turns):
        each = len({episodes[row.turns[i]] for i in kept}) / len(kept)
        weights = [each * weight / (math.fsum(weights) / len(kept)) for weight in weights]
    return replace(
        row,
        turns=tuple(row.turns[i] for i in kept),
        credits=tuple(row.credits[i] for i in kept),
        weights=tuple(weights),
        drawn=tuple(row.drawn[i] for i in kept),
        after=tuple(row.after[i] for i in kept if row.after),
    )


async def test_by_how_much_people_are_cut_stands_in_the_row_for_values_and_is_folded_anew():
    config = RewardConfig(user_steps=2)
    logs = [await a_log(config, taught) for taught in (Taught(values=True), Taught())]
    rows, plain = ([row for row in log.rows if isinstance(row, Batch)] for log in logs)
    assert [replace(row, scales=()) for row in rows] == plain, "nothing else changes"
    users = {turn.id: turn.user for turn in logs[0].turns()}
    for row in rows:
        by_user = {users[turn]: scale for turn, scale in zip(row.turns, row.scales, strict=True)}
        assert [by_user[users[turn]] for turn in row.turns] == list(row.scales), "one for a person"
    assert min(scale for row in rows for scale in row.scales) < 1.0
    made = await refolded(logs[0], config, Taught(values=True), ["nobody"])
    assert not any(batch.changed for batch in made)
    without_gone = await refolded(logs[0], config, Taught(values=True), [GONE])
    assert all(len(batch.row.scales) == len(batch.row.turns) for batch in without_gone)
    assert any(batch.row.scales != batch.recorded.scales[: len(batch.row.scales)] for batch in without_gone)
    refold = CreditRefold(logs[0], config, Taught(values=True), erased_people({("default", GONE): 1 << 40}))
    async for batch in refold.batches():
        given = {sample.turn.id: sample.scale for sample in (await refold.samples(batch)).samples}
        assert batch.refused or list(given.values()) == list(batch.row.scales)
    assert all(batch.row.scales == () for batch in await refolded(logs[1], config, Taught(), [GONE]))


async def test_weights_of_drawn_turns_keep_their_ratios_and_sum_to_the_episodes():
    log = await a_log(TIGHT, ALL)
    episodes = {turn.id: turn.episode for turn in log.turns()}
    seen = 0
    for batch in await refolded(log, TIGHT, ALL, [GONE]):
        before = dict(zip(batch.recorded.turns, batch.recorded.weights, strict=False))
        after = dict(zip(batch.row.turns, batch.row.weights, strict=False))
        if not after or len(after) == len(before):
            continue
        seen += 1
        ratios = [after[turn] / before[turn] for turn in after]
        assert ratios == pytest.approx([ratios[0]] * len(ratios))
        assert sum(after.values()) == pytest.approx(len({episodes[turn] for turn in after}))
    assert seen


def quiet(turn, signals, now):
    """`copilot`; about what nobody said anything of, nothing is known."""
    found = copilot(turn, signals, now, silence=None)
    assert not isinstance(found, NoReward) or found.reason == "silence"
    return found


async def a_quiet_log(config: RewardConfig) -> MemoryLog:
    """Batches of short and long answers by a real desk, all of them rated but those of `GONE`, who asks for long ones and keeps silent."""
    log, time = MemoryLog(), [1000.0]

    def clock() -> float:
        time[0] += 1e-3
        return time[0]

    desk = RewardDesk(log, Inline(quiet, max_abs=config.max_abs), clock, config, taught=ALL)
    for round_ in range(3):
        at = clock()
        for i in range(60):
            user, length = (GONE, 12) if i % 3 == 0 else (f"u{i % 5 + 10}", 1 if i % 2 else 12)
            turn = a_turn(f"{round_}-{i}:0", user=user, version=round_, prompt=(i,), sampled=range(length), ended_at=at)
            said = [] if user == GONE else [a_signal(turn, "accepted" if i % 4 else "rejected", at=at)]
            await log.append(turn, a_delivery(turn, at=at), *said)
        time[0] += 4000.0
        await desk.batch(round_ + 1, 12, V0)
    return log


@pytest.mark.parametrize("config", [RewardConfig(), TIGHT])
async def test_whoever_only_kept_silent_leaves_the_weights_of_others_too(config):
    """None of their turns is in a batch: their silence is what the others' long answers stood for."""
    log = await a_quiet_log(config)
    assert not any(batch.changed for batch in await refolded(log, config, ALL, ["nobody"])), "the recorded weights"
    never = MemoryLog()
    await never.append(*without(log.rows, GONE))
    found = await refolded(log, config, ALL, [GONE])
    length = {turn.id: len(turn.sampled_ids) for turn in log.turns()}
    propensity = ResponsePropensity(config.propensity_cap)
    batches = iter(found)
    for row in never.rows:  # the definition, by hand
        if isinstance(row, Reward | Quarantine):
            propensity.see("default", length[row.turn], row)
        elif isinstance(row, Batch):
            batch = next(batches)
            assert batch.row.turns == row.turns, "none of theirs"
            assert batch.changed
            weights = dict(zip(row.turns, row.drawn, strict=True))
            weights = {turn: each * propensity.weight("default", length[turn]) for turn, each in weights.items()}
            mean = math.fsum(weights.values()) / len(weights)
            made = batch.row.weights or (1.0,) * len(weights)  # episodes of one turn
            assert made == pytest.approx([each / mean for each in weights.values()])
            assert row.weights != pytest.approx(made, rel=0.05), "as recorded, their silence is in them"
    assert next(batches, None) is None


async def test_weights_of_rows_without_what_was_drawn_stay_as_they_were():
    log = await a_quiet_log(RewardConfig())
    rows = [replace(row, drawn=()) if isinstance(row, Batch) else row for row in log.rows]
    old = MemoryLog()
    await old.append(*rows)
    found = await refolded(old, RewardConfig(), ALL, [GONE])
    assert found
    assert all(batch.row.weights == batch.recorded.weights for batch in found)


async def test_a_batch_of_erased_turns_alone_is_refused():
    log = await a_log(RewardConfig(), Taught(), rounds=2)
    everybody = [f"u{number}" for number in range(8)]
    assert [batch.refused for batch in await refolded(log, RewardConfig(), Taught(), everybody)] == [
        "no turn is left"
    ] * 2


async def test_turns_that_were_erased_before_are_taken_out_too():
    log = await a_log(RewardConfig(), Taught())
    wanted = await refolded(log, RewardConfig(), Taught(), [FIRST, GONE])
    redacted = MemoryLog()
    await redacted.append(
        *(
            replace(row, prompt_ids=(), sampled_ids=(), logprobs=(), text="")
            if isinstance(row, Turn) and row.user in (FIRST, GONE)
            else row
            for row in log.rows
        )
    )
    found = await refolded(redacted, RewardConfig(), Taught(), ["nobody"])
    assert [batch.row for batch in found] == [batch.row for batch in wanted]


async def test_credits_under_other_settings_are_refused():
    log = await a_log(RewardConfig(), Taught())
    with pytest.raises(Corrupt, match=r"batch \d was made under other settings"):
        await refolded(log, RewardConfig(user_cap=0.01, user_steps=0), Taught(), ["nobody"])


async def test_a_log_of_wider_settings_with_turns_that_were_passed_over_is_folded_anew():
    """The rewards of these are known, though nothing is learned from such turns any more."""
    log = await a_log(TIGHT, ALL)
    wanted = await refolded(log, TIGHT, ALL, [FIRST, GONE])
    found = await refolded(log, RewardConfig(batch_tokens=120, purposes=(Purpose.SUBAGENT,)), ALL, [FIRST, GONE])
    assert [batch.row.turns for batch in found] == [batch.row.turns for batch in wanted]
    assert [batch.row.credits for batch in found] == [batch.row.credits for batch in wanted]


async def test_a_turn_that_was_passed_over_without_a_reward_is_refused():
    log = await a_log(TIGHT, ALL)
    passed = next(row.turn for row in log.rows if isinstance(row, Holdback) and row.reason.startswith("passed_over"))
    torn = MemoryLog()
    await torn.append(*(row for row in log.rows if not (isinstance(row, Reward) and row.turn == passed)))
    with pytest.raises(Corrupt, match=f"step 1 passed over turn {passed}.*restore the log"):
        await refolded(torn, TIGHT, ALL, ["nobody"])


async def test_a_log_without_its_first_rows_is_refused(monkeypatch):
    log = await a_log(RewardConfig(), Taught(), rounds=1)

    async def horizon() -> int:
        return 12

    monkeypatch.setattr(log, "horizon", horizon)
    with pytest.raises(NotFound, match="rows up to 12 were dropped"):
        await refolded(log, RewardConfig(), Taught(), [GONE])


def test_somebody_who_comes_back_is_taken_out_only_up_to_their_request():
    erased = erased_people({("default", "ann"): 10, ("acme", None): 5})
    ann, redacted = a_turn("a:0", user="ann"), replace(a_turn("b:0", user="bob"), sampled_ids=())
    assert (erased(10, ann), erased(11, ann)) == (True, False)
    assert (erased(5, replace(ann, tenant="acme")), erased(6, replace(ann, tenant="acme"))) == (True, False)
    assert erased(1 << 40, redacted)
    assert not erased(1 << 40, replace(redacted, consent=Consent.NEVER)), "it was never stored, nor learned from"
    assert not erased(1, a_turn("c:0", user="bob"))


class CrowdedLog(MemoryLog):
    """Another process writes a turn just before each batch, which the desk has not read when it gives credit."""

    crowd: tuple[Turn, ...] = ()

    async def append(self, *rows):
        if self.crowd and any(isinstance(row, Batch) for row in rows):
            first, self.crowd = self.crowd[0], self.crowd[1:]
            await super().append(first)
        return await super().append(*rows)


async def test_sessions_that_were_cut_are_credited_again_with_what_the_desk_knew_of_their_rest():
    config, time, draw = RewardConfig(episode_wait_s=1.0), [1000.0], random.Random(7)
    log = CrowdedLog()

    def clock() -> float:
        time[0] += 1e-3
        return time[0]

    def turn_of(round_: int, i: int, user: str) -> Turn:
        sampled = tuple(range(1 + draw.randrange(4)))
        turn = a_turn(f"{round_}-{i}:0", user=user, version=round_, prompt=(i,), sampled=sampled, ended_at=clock())
        return replace(turn, episode=f"session of {user}")

    desk = RewardDesk(log, Inline(copilot, max_abs=config.max_abs), clock, config)
    for round_ in range(5):
        for i in range(14):
            turn = turn_of(round_, i, f"u{i % 7}")
            name = "accepted" if draw.random() < (0.2 if turn.user == GONE else 0.7) else "rejected"
            await log.append(turn, a_delivery(turn, at=time[0]), a_signal(turn, name, at=time[0]))
        time[0] += 4000.0
        for i in range(20, 24):  # their sessions go on: known to the desk, and not judged yet
            await log.append(turn_of(round_, i, f"u{i % 7}"))
        log.crowd = (turn_of(round_, 30, "u4"),)
        await desk.batch(round_ + 1, 12, V0)
    found = await refolded(log, config, Taught(), ["nobody"])
    assert len(found) == 5
    assert any(any(batch.recorded.after) for batch in found), "the case: sessions were cut"
    assert not any(batch.changed for batch in found)
    without_gone = await refolded(log, config, Taught(), [GONE])
    assert any(any(batch.row.after) for batch in without_gone)
    assert all(batch.changed for batch in without_gone)
