"""A desk starts from what it saved, reads on from there, and decides as one that read everything; memory stays flat."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.oracles.turn_accounting import recount
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Corrupt, NoSignal, StorageFull
from ostinato.core.notices import Forgotten
from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    Holdback,
    NoReward,
    PolicyVersion,
    Purpose,
    Quarantine,
    Reward,
    Turn,
)
from ostinato.core.staleness import Lineage
from ostinato.record.folds import FileFolds
from ostinato.reward import ledger_entries
from ostinato.reward.accounting import account, of_ledger
from ostinato.reward.config import BaselineConfig, RewardConfig
from ostinato.reward.ledger import kind_of
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.log_fold import LedgerFollower, needed_above, snapshot
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_delivery, a_signal

V0 = PolicyVersion(number=0, hash="00")


class Watched(MemoryLog):
    """A log that says how many rows were read in order, and whose beginning may be dropped, except batches and consents."""

    def __init__(self) -> None:
        super().__init__()
        self.read_rows = 0
        self.dropped = 0

    async def read(self, after, kinds):
        async for sequence, row in super().read(after, kinds):
            if sequence > self.dropped or isinstance(row, Batch | ConsentGiven):
                self.read_rows += 1
                yield sequence, row

    async def horizon(self):
        return self.dropped

    async def find(self, kind, identities):
        rows = await super().find(kind, identities)
        return [row for row in rows if self.rows.index(row) >= self.dropped]


async def day(log, desks, now, turn, number: int) -> None:
    """A day's traffic: episodes, signals early and late, people of two tenants, batches."""
    for i in range(number * 40, number * 40 + 40):
        each = turn(
            i,
            episode=f"e{i // 3}",
            tenant="acme" if i % 2 else "rival",
            ended_at=now.at + i % 40,
            arm=Arm.CONTROL if i % 11 == 0 else Arm.LIVE,
        )
        said = a_signal(each, "accepted" if i % 3 else "rejected", at=now.at + i % 40 + 1)
        await log.append(*([said, each] if i % 5 == 0 else [each, said] if i % 5 < 3 else [each, a_delivery(each)]))
    for later in (20.0, 75.0):
        now.at += later
        for desk in desks:
            await desk.poll()
            with contextlib.suppress(NoSignal):
                await desk.batch(desk.last_step + 1, 12, V0)
            await desk.poll()


CONFIG = RewardConfig(max_staleness=10**6, remember=100, baseline=BaselineConfig(max_keys=30))


async def test_a_desk_restarted_at_every_step_decides_as_one_that_never_stopped(now, open_desk, turn):
    steady_log, broken_log, folds = MemoryLog(), MemoryLog(), MemoryFolds()
    steady = open_desk(steady_log, config=CONFIG)
    for number in range(12):
        began = now.at
        await day(steady_log, [steady], now, turn, number)
        now.at = began
        broken = open_desk(broken_log, config=CONFIG, folds=folds)
        await day(broken_log, [broken], now, turn, number)
        if number % 3:
            await broken.save()  # and sometimes it is killed before it could
        mine, other = (desk._reading.ledger for desk in (broken, steady))
        for ledger in (mine, other):
            ledger.teaching.catch_up()
        assert mine.baseline.snapshot() == other.baseline.snapshot()
        assert {t: replace(e, ask_at=None) for t, e in mine.open.items()} == {
            t: replace(e, ask_at=None) for t, e in other.open.items()
        }
    assert broken_log.rows == steady_log.rows
    assert len([row for row in steady_log.rows if isinstance(row, Batch)]) >= 12
    assert "desk" in folds.kept


async def test_a_start_reads_on_from_the_saving_and_asks_no_open_turn_again(now, open_desk, turn):
    log, folds, asked = Watched(), MemoryFolds(), list[str]()

    def fn(turn, signals, now):
        asked.append(turn.id)
        return open_fn(turn, signals, now)

    from ostinato.reward.functions import copilot as open_fn

    desk = open_desk(log, fn=fn, config=CONFIG, folds=folds)
    for number in range(3):
        await day(log, [desk], now, turn, number)
    await desk.save()
    log.read_rows, asked[:] = 0, []
    later = open_desk(log, fn=fn, config=CONFIG, folds=folds)
    await log.append(turn(999), turn(998))
    await later.poll()
    assert log.read_rows <= 3  # the two, and the row that the saving ended with
    assert sorted(asked) == ["t998:0", "t999:0"]
    other = open_desk(log, fn=fn, config=CONFIG.model_copy(update={"options": {"window": 9.0}}), folds=folds)
    await other.poll()
    assert len(asked) > 20, "under other options all are asked anew"


async def test_it_saves_by_itself_every_so_many_rows(now, open_desk, turn):
    log, folds = MemoryLog(), MemoryFolds()
    desk = open_desk(log, config=RewardConfig(fold_rows=100), folds=folds)
    await log.append(*[turn(i) for i in range(99)])
    await desk.poll()
    assert folds.kept == {}
    await log.append(*[turn(i) for i in range(99, 250)])
    await desk.poll()
    assert folds.kept["desk"][0] == 200


@in_virtual_time
async def test_it_saves_every_hour_though_few_rows_came_lest_retention_waits_for_them(now, open_desk, turn):
    log, folds = MemoryLog(), MemoryFolds()
    desk = open_desk(log, config=CONFIG, folds=folds)
    await desk.poll()
    each = turn(0, arm=Arm.CONTROL)
    await log.append(each, a_delivery(each), a_signal(each, "accepted", at=11.0))
    now.at += 60.0
    await desk.poll()
    assert any(isinstance(row, Reward) for row in log.rows), "nothing depends on the turn any more"
    assert await needed_above(folds, CONFIG, now.at) == 0
    await asyncio.sleep(3600.0)
    await desk.poll()
    assert await needed_above(folds, CONFIG, now.at) == len(log.rows)


async def test_it_saves_when_it_is_closed_if_there_is_room(now, open_desk, turn):
    log, folds = MemoryLog(), MemoryFolds()
    desk = open_desk(log, folds=folds)
    await log.append(turn(0))
    await desk.poll()
    await desk.close()
    assert folds.kept["desk"][0] == 1

    class Full(MemoryFolds):
        async def save(self, name, cursor, state):
            raise StorageFull("no space left")

    desk = open_desk(log, folds=Full())
    await desk.poll()
    await desk.close()


@pytest.mark.parametrize("damage", ["none", "garbage", "another format", "another log", "ahead of the log"])
async def test_a_saving_that_cannot_be_used_is_not_missed(now, open_desk, turn, damage: str):
    log, folds = MemoryLog(), MemoryFolds()
    desk = open_desk(log, config=CONFIG, folds=folds)
    for number in range(3):
        await day(log, [desk], now, turn, number)
    await desk.save()
    cursor, text = folds.kept["desk"]
    state = json.loads(text)
    if damage == "none":
        folds.kept.clear()
    elif damage == "garbage":
        folds.kept["desk"] = (cursor, '{"ledger": {"format": "ledger@1", "open": 7}, "last": [], "plan": ""}')
    elif damage == "another format":
        state["ledger"]["format"] = "ledger@0"
        folds.kept["desk"] = (cursor, json.dumps(state))
    elif damage == "another log":
        folds.kept["desk"] = (cursor - 1, text)
    else:
        folds.kept["desk"] = (cursor + 1000, text)
    again = open_desk(log, config=CONFIG, folds=folds)
    before = list(log.rows)
    await again.poll()
    assert log.rows == before
    assert again.last_step == desk.last_step
    assert again._reading.ledger.counts == desk._reading.ledger.counts


def of_another_shape(text: str) -> dict[str, dict]:
    """Savings of today's format that are not whole, by what is wrong with them."""
    found: dict[str, dict] = {}

    def damaged(what: str, change) -> None:
        found[what] = json.loads(text)
        change(found[what])

    damaged("no ledger", lambda state: state.pop("ledger"))
    damaged("a ledger that is a list", lambda state: state.update(ledger=[]))
    damaged("no plan", lambda state: state.pop("plan"))
    damaged("no last row", lambda state: state.update(last=None))
    damaged("no open turns", lambda state: state["ledger"].pop("open"))
    damaged("turns that are a number", lambda state: state["ledger"].update(matured=7))
    damaged("a turn of another shape", lambda state: state["ledger"].update(open=[{"facts": {}}]))
    damaged("a time that is a list", lambda state: state["ledger"]["teaching"].update(at=[]))
    damaged("alarms that are a list", lambda state: state["ledger"]["alarms"].update(known=[]))
    damaged("a date that is a word", lambda state: state["ledger"].update(time="noon"))
    return found


async def test_a_saving_of_another_shape_ends_neither_the_desk_nor_the_tidying_up(now, open_desk, turn):
    log, folds = MemoryLog(), MemoryFolds()
    desk = open_desk(log, config=CONFIG, folds=folds)
    for number in range(2):
        await day(log, [desk], now, turn, number)
    await desk.save()
    cursor, text = folds.kept["desk"]
    assert 0 < await needed_above(folds, CONFIG, now.at) <= cursor
    for what, state in of_another_shape(text).items():
        folds.kept["desk"] = (cursor, json.dumps(state))
        assert await needed_above(folds, CONFIG, now.at) == 0, f"{what}: every row stays"
        again = open_desk(log, config=CONFIG, folds=folds)
        await again.poll()
        assert again._reading.ledger.counts == desk._reading.ledger.counts, what


# ---------------------------------------------------------------- a log that has forgotten its beginning


async def test_rows_about_turns_from_before_the_horizon_are_no_damage(now, open_desk, turn):
    log = Watched()
    desk = open_desk(log, config=CONFIG)
    for number in range(4):
        await day(log, [desk], now, turn, number)
    first_batch = next(i for i, row in enumerate(log.rows) if isinstance(row, Batch))
    log.dropped = first_batch  # its turns and rewards are gone, it is not
    again = open_desk(log, config=CONFIG)
    await again.poll()
    assert again.last_step == desk.last_step
    for number in range(4, 8):
        await day(log, [again], now, turn, number)
    assert again.last_step > desk.last_step
    found = await account(log, config=CONFIG)
    assert found.balanced
    assert found.ingested < (await recount(MemoryLogOf(log))).ingested


@pytest.mark.parametrize("whole", [True, False])
async def test_steps_are_numbered_on_where_every_row_but_the_batches_was_dropped(now, open_desk, turn, whole):
    log = Watched()
    desk = open_desk(log, config=CONFIG)
    await day(log, [desk], now, turn, 0)
    first = desk.last_step + 1
    await desk.restart(first, PolicyVersion(number=7, hash="07"), V0)
    await log.append(ConsentGiven(id="c", tenant="acme", user="ann", level=Consent.AGGREGATE, at=now.at))
    log.dropped = len(log.rows)
    await day(log, [desk], now, turn, 1)
    if whole:
        log.dropped = len(log.rows)
    again = open_desk(log, config=CONFIG)
    await again.poll()
    assert (again.last_step, again.lineage) == (desk.last_step, Lineage(first=first, base=7))
    assert again.lineage == desk.lineage
    assert [*again._reading.ledger.refusing] == [*desk._reading.ledger.refusing] == [("acme", "ann")]
    for number in (2, 3):
        await day(log, [again], now, turn, number)
    steps = [row.step for row in log.rows if isinstance(row, Batch)]
    assert steps == list(range(1, again.last_step + 1))
    assert again.last_step > desk.last_step > first
    assert (await account(log, config=CONFIG)).balanced


class MemoryLogOf(MemoryLog):
    """The same rows, all of them."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()
        self.rows = log.rows


async def test_a_saving_older_than_the_horizon_is_dropped_and_one_at_it_is_not(now, open_desk, turn):
    log, folds = Watched(), MemoryFolds()
    desk = open_desk(log, config=CONFIG, folds=folds)
    await day(log, [desk], now, turn, 0)
    await desk.save()
    cursor = folds.kept["desk"][0]
    for number in (1, 2):
        await day(log, [desk], now, turn, number)
    log.dropped = cursor
    assert (await account(log, folds, CONFIG)).ingested == 120
    log.dropped = cursor + 1
    assert (await account(log, folds, CONFIG)).ingested < 120


async def test_a_turn_of_a_clock_that_was_ahead_does_not_hold_back_what_a_start_needs(now, open_desk, turn):
    log, folds, year = MemoryLog(), MemoryFolds(), 3e7
    desk = open_desk(log, folds=folds)
    ahead = turn(1, ended_at=year)
    await log.append(turn(0, ended_at=0.0), ahead, a_signal(ahead, "accepted", at=1.0), turn(2, ended_at=2.0))
    now.at = 5.0
    await desk.poll()
    assert await needed_above(folds, CONFIG, now.at) == 0, "nothing is saved"
    await desk.save()
    assert await needed_above(folds, CONFIG, now.at) == 0, "turn 0 waits"
    now.at = 200.0
    await desk.poll()
    await desk.save()
    assert {row.turn for row in log.rows if isinstance(row, Holdback | Quarantine | Reward)} == {"t0:0", "t2:0"}
    assert await needed_above(folds, CONFIG, now.at) == len(log.rows)
    assert await needed_above(folds, CONFIG, year) == 1, "turn 1 waits until then"


async def test_alarms_after_a_lost_saving_get_new_names(now, open_desk, turn):
    log = Watched()
    desk = open_desk(log, fn=lambda *_: 1 / 0)
    now.at = 99.0
    await log.append(turn(0), a_delivery(turn(0)))
    await desk.poll()
    log.dropped = len(log.rows)
    again = open_desk(log, fn=lambda *_: 1 / 0)
    await log.append(turn(1), a_delivery(turn(1)))
    await again.poll()
    ids = [row.id for row in log.rows if type(row).__name__ == "Alarm"]
    assert len(set(ids)) == 2


async def test_history_reads_batches_by_name(now, open_desk, turn):
    log = Watched()
    desk = open_desk(log, config=CONFIG)
    made = []
    for number in range(6):
        await day(log, [desk], now, turn, number)
    log.read_rows = 0
    made = [batch async for batch in desk.history(2)]
    assert [batch.row.step for batch in made] == list(range(3, desk.last_step + 1))
    assert log.read_rows == 0
    assert all(sample.turn.id == turn_id for b in made for sample, turn_id in zip(b.samples, b.row.turns, strict=True))
    log.dropped = log.rows.index(made[0].row) + 1
    with pytest.raises(Corrupt, match="resume from a checkpoint of step 3 or later"):
        [batch async for batch in desk.history(2)]


async def test_a_turn_that_left_the_log_before_it_could_be_learned_from_is_held_back(now, open_desk, turn):
    class Forgetful(MemoryLog):
        gone = frozenset()

        async def find(self, kind, identities):
            return await super().find(
                kind, [each for each in identities if kind is not Turn or each[0] not in self.gone]
            )

    log = Forgetful()
    desk = open_desk(log)
    await log.append(turn(0), turn(1), turn(2), a_delivery(turn(0)), a_signal(turn(1)), a_signal(turn(2), "rejected"))
    log.gone = frozenset({"t0:0"})
    now.at = 99.0
    await desk.poll()
    log.gone = frozenset({"t0:0", "t1:0"})
    assert [each.id for each in await desk.turns(0, 1)] == ["t2:0"]
    assert len(await desk.ready(0, 2)) == 2, "who only looks does not fetch"
    assert await desk.turns(0, 2) == []
    held = {row.turn: row.reason for row in log.rows if isinstance(row, Holdback)}
    assert held == {"t0:0": "gone", "t1:0": "gone"}
    assert [row.reason for row in log.rows if isinstance(row, Quarantine)] == ["gone"]


# ---------------------------------------------------------------- contradictions


async def trained(log, now, open_desk, turn) -> list[Turn]:
    turns = [turn(i) for i in range(4)]
    await log.append(*turns, *[a_signal(each, "accepted" if i % 2 else "undone") for i, each in enumerate(turns)])
    now.at = 99.0
    assert await open_desk(log).batch(1, 4, V0)
    return turns


@pytest.mark.parametrize("what", ["twice", "unrewarded", "held back", "unknown"])
async def test_a_log_that_contradicts_itself_is_refused(log, now, open_desk, turn, what: str):
    turns = await trained(log, now, open_desk, turn)
    await log.append(turn(8), turn(9), Holdback(turn="t9:0", reason="arm:odd", at=1.0))
    named = {"twice": turns[0].id, "unrewarded": "t8:0", "held back": "t9:0", "unknown": "t77:0"}[what]
    await log.append(replace(log.of(Batch)[0], step=2, turns=(named,), credits=((1.0,),)))
    with pytest.raises(Corrupt, match=f"batch 2 holds turn {named}"):
        await open_desk(log).poll()
    assert not (await recount(log)).balanced, "and whoever counts afresh sees it too"


NARROWER = {
    "other calls": {"config": RewardConfig(user_cap=1.0, purposes=(Purpose.SUBAGENT,))},
    "warmer ones": {"config": RewardConfig(user_cap=1.0, min_temperature=1.5)},
    "smaller rewards": {"config": RewardConfig(user_cap=1.0, max_abs=0.1)},
    "rollouts alone": {"taught": Taught(people=False, groups=1)},
    "others": {"gold": lambda tenant, user: True},
}
"""What a desk learns from after its settings were changed, by what differs: nothing of `trained`."""


@pytest.mark.parametrize("settings", NARROWER.values(), ids=NARROWER)
async def test_what_was_learned_from_under_earlier_settings_stays_so_where_the_log_is_read_again(
    log, now, open_desk, turn, settings
):
    """After an upgrade, or a restored backup, the trainer refused its own log: "restore the log"."""
    await trained(log, now, open_desk, turn)
    before = open_desk(log)
    await before.poll()
    later = open_desk(log, **settings)
    await later.poll()
    assert later.last_step == 1
    assert log.of(Holdback) == [], "each of them has its outcome"
    found = of_ledger(later._reading.ledger)
    assert (found.balanced, found.trained, found.waiting) == (True, 4, 0)
    assert later._reading.ledger.baseline.snapshot() == before._reading.ledger.baseline.snapshot()


@pytest.mark.parametrize("settings", NARROWER.values(), ids=NARROWER)
async def test_and_so_it_does_for_one_that_is_killed_and_starts_from_its_saving_at_every_row(
    log, now, open_desk, turn, settings
):
    await trained(log, now, open_desk, turn)
    config, taught = settings.get("config", RewardConfig(user_cap=1.0)), settings.get("taught", Taught())
    copy, folds = MemoryLog(), MemoryFolds()
    for row in log.rows:
        await copy.append(row)
        more = {"gold": settings["gold"]} if "gold" in settings else {}
        again = LedgerFollower(copy, config, folds, arms=taught.arms, **more)
        await again.catch_up()
        await again.save()
    assert (again.ledger.last_step, again.ledger.counts["trained"], again.ledger.doubted) == (1, 4, {})


@pytest.mark.parametrize("settings", NARROWER.values(), ids=NARROWER)
async def test_and_what_was_held_back_then_teaches_as_it_did(log, now, open_desk, turn, settings):
    """Stale turns and those that a step passed over teach the baseline, and the latter count among those that it was drawn from."""
    await trained(log, now, open_desk, turn)
    *before, batch = log.rows
    others, reward = [turn(i) for i in (5, 6, 12)], log.of(Reward)[1]
    drawn = "passed_over: step 1 drew others"
    held = [Holdback(turn="t5:0", reason="stale: 9 steps", at=98.0)]
    held += [Holdback(turn=each.id, reason=drawn, at=batch.at) for each in others[1:]]
    copy = MemoryLog()
    await copy.append(*others, *before, *(replace(reward, turn=each.id, upto=0) for each in others), *held, batch)
    taught = settings.get("taught", Taught())
    run = LedgerFollower(copy, RewardConfig(user_cap=1.0))
    again = LedgerFollower(
        copy,
        settings.get("config", RewardConfig(user_cap=1.0)),
        arms=taught.arms,
        **({"gold": settings["gold"]} if "gold" in settings else {}),
    )
    await run.catch_up()
    await again.catch_up()
    run.ledger.teaching.catch_up()
    again.ledger.teaching.catch_up()
    assert again.ledger.baseline.snapshot() == run.ledger.baseline.snapshot()
    assert again.ledger.recent.snapshot() == run.ledger.recent.snapshot()
    assert again.ledger.settled.get("t6:0") == run.ledger.settled.get("t6:0")


async def test_who_is_forgotten_meanwhile_leaves_no_name_there(log, now, open_desk, turn):
    await trained(log, now, open_desk, turn)
    copy = MemoryLog()
    await copy.append(*log.rows[:-1], Forgotten(id="f", tenant="default", user="u1", key=1, at=99.0), log.rows[-1])
    folds, config = MemoryFolds(), RewardConfig(user_cap=1.0, purposes=(Purpose.SUBAGENT,))
    reading = LedgerFollower(copy, config, folds)
    async for row in reading.rows(saving=False):
        if isinstance(row, Forgotten):
            assert len(reading.ledger.doubted) == 4
            assert '"u1"' not in json.dumps(snapshot(reading.ledger))
    assert reading.ledger.counts["trained"] == 4


async def test_what_is_not_learned_from_any_more_is_in_no_further_batch(log, now, open_desk, turn):
    """Who stops learning from people must not see one more step of what they said."""
    folds, turns = MemoryFolds(), [turn(i) for i in range(4)]
    desk = open_desk(log, folds=folds)
    await log.append(*turns, *[a_signal(each, "accepted" if i % 2 else "undone") for i, each in enumerate(turns)])
    now.at = 99.0
    await desk.poll()
    await desk.close()
    later = open_desk(log, folds=folds, taught=Taught(people=False, groups=1))
    assert await later.batch(1, 4, V0) is None
    now.at += RewardConfig().batch_wait_s
    assert await later.turns(0, 4) == []
    assert {kind_of(why) for why in log.reasons(Holdback).values()} == {"too_few"}
    assert len(log.reasons(Holdback)) == 4


async def test_a_count_that_misses_a_turn_is_not_balanced(log, now, open_desk, turn):
    await trained(log, now, open_desk, turn)
    desk = open_desk(log)
    await log.append(turn(20), a_delivery(turn(20)))
    await desk.poll()
    assert of_ledger(desk._reading.ledger).balanced
    desk._reading.ledger.matured.clear()  # what a fault in the desk would do: the turn hangs for ever
    assert not of_ledger(desk._reading.ledger).balanced


async def test_a_turn_is_counted_once_while_its_person_takes_the_consent_back(log, now, open_desk, turn):
    desk = open_desk(log)
    await log.append(turn(0))
    await desk.poll()
    await log.append(ConsentGiven(id="c", tenant="default", user="u0", level=Consent.NEVER, at=1.0))
    found = await account(log)
    assert (found.waiting, found.balanced) == (1, True), "although the desk has not held it back yet"


async def test_a_function_with_a_reason_of_its_own_for_every_turn_does_not_fill_memory(
    log, now, open_desk, turn, monkeypatch
):
    monkeypatch.setattr(ledger_entries, "MOST_REASONS", 10)
    turns = [turn(i) for i in range(50)]
    await log.append(*turns, a_delivery(*turns))
    await open_desk(log, lambda turn, signals, now: NoReward(reason=f"only {turn.id}")).poll()
    found = await account(log)
    assert (found.balanced, sum(found.held.values())) == (True, 50)
    assert len(found.held) == len(found.quarantined) == 11
    assert found.quarantined["no_reward"] == 40


async def test_turns_that_hang_show(log, now, open_desk, turn):
    await log.append(turn(0, ended_at=5.0), turn(1, ended_at=50.0))
    await open_desk(log).poll()
    for found in (await account(log), await recount(log)):
        assert (found.waiting, found.oldest_wait, found.balanced) == (2, 5.0, True)


# ---------------------------------------------------------------- size


async def test_what_a_desk_knows_does_not_grow_with_the_log(tmp_path: Path, now, open_desk, turn):
    """Six times the turns, all decided: the desk holds no more. What it holds is what it saves, and whom to ask later."""
    config = RewardConfig(max_staleness=10**6, remember=50, baseline=BaselineConfig(max_keys=20), user_cap=1.0)
    log, folds = MemoryLog(), FileFolds(tmp_path / "folds")
    desk = open_desk(log, config=config, folds=folds)
    sizes: list[int] = []
    number = 0
    for upto in (5, 30):
        while number < upto:
            await day(log, [desk], now, turn, number)
            number += 1
        now.at += 1000.0
        await desk.poll()
        while len(desk._reading.ledger.matured) >= 12:
            with contextlib.suppress(NoSignal):
                await desk.batch(desk.last_step + 1, 12, V0)
        await desk.save()
        sizes.append(len(json.dumps(snapshot(desk._reading.ledger))))
        assert len(desk._scheduler._later) == 0
    assert desk._reading.ledger.counts["ingested"] == 1200
    assert sizes[1] < sizes[0] + 12 * 700, "but for the turns that wait, of which there are fewer than a batch holds"
    assert (tmp_path / "folds" / "desk.fold").stat().st_size < 20_000
    assert (await account(log, folds, config)).balanced
