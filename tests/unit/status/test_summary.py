"""What status starts from: a fold of bounded size that gives the same wherever it is cut, saved and taken up again."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.notices import Alarm, AlarmState, Stamp
from ostinato.core.records import (
    Arm,
    Batch,
    Finish,
    Holdback,
    Pick,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Signal,
    Source,
    SteeringBasis,
)
from ostinato.core.staleness import Lineage
from ostinato.core.steering import Basis, Steered
from ostinato.status import summary
from ostinato.status.summary import FOLD, KINDS, Summary, catch_up, keep, summarise
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_turn

BASIS = Basis(("brief",), np.arange(3), np.ones((1, 3), np.float32), "0" * 64)
V = [PolicyVersion(number=number, hash=f"{number:064x}") for number in range(4)]


def rows(number: int):
    """Turn `number` and what became of it: five kinds of fate, one after the other."""
    arm = (Arm.LIVE, Arm.CONTROL, Arm.EVAL)[number % 3]
    turn = a_turn(f"t{number}:0", arm=arm, version=number % 4, sampled=(1, 2, 3))
    turn = replace(turn, user=f"user {number % 7}", verified=number % 3 == 0)
    if number == 0:
        yield SteeringBasis.of(BASIS, at=1.0)
    if number % 4 == 0:
        lean = Steered(basis=BASIS.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=3, kl=0.2, features=(0.1,))
        turn = replace(turn, steered=lean)
    if number % 3 == 0:
        odds = {"concise@1": 0.25, "none": 0.75}
        turn = replace(turn, style=Pick(arm=("concise@1", "none")[number // 3 % 2], odds=odds))
    yield turn
    reward = Reward(turn=turn.id, value=number % 2 - 0.25, function="f@1", signals=("s",) * (number % 2), at=1.0)
    signal = Signal(
        id=f"s{number}", turn=turn.id, name="accepted", value=1.0, source=Source.HUMAN, occurred_at=1.0, received_at=1.0
    )
    match number % 5:
        case 0:
            yield from (signal, reward)
            yield Batch(step=number, turns=(turn.id,), credits=((0.1,) * 3,), reference=V[0], at=1.0)
        case 1:
            yield Holdback(turn=turn.id, reason="arm:control", at=1.0)
        case 2:
            yield Quarantine(turn=turn.id, reason="reward_failed: KeyError", at=1.0)
            yield Holdback(turn=turn.id, reason=f"no_signal: {number}", at=1.0)
        case 3:
            yield reward
            state = AlarmState.RAISED if number % 2 else AlarmState.CLEARED
            yield Alarm(id=f"a{number}", name=f"coverage:{number % 3}", state=state, reason="silence", at=float(number))
        case _:
            yield ReleaseEvent(
                id=f"r{number}", action="shipped", policy=V[1], previous=V[0], reason="better", detail={}, at=2.0
            )
            yield Stamp(id=f"c{number % 7}", contract="{}", at=1.0)


def every(count: int):
    return [row for number in range(count) for row in rows(number)]


def shown(rows):
    """Those of the rows that the summary is made of."""
    return [row for row in rows if type(row) in KINDS]


async def test_it_shows_what_became_of_the_newest_turns():
    log = MemoryLog()
    await log.append(*every(50))
    found, read = await summarise(log, MemoryFolds(), 10_000)
    assert read == len(shown(log.rows))
    assert (found.signals, found.tokens, found.step) == (10, 150, 45)
    waiting = [turn for number in range(50) for turn in [f"t{number}:0"] if number % 3 != 2 and number % 5 in (1, 4)]
    assert list(found.unrated) == waiting, "people's turns without a reward, or a row that says why there is none"
    assert found.actions == {"shipped": 10}
    assert found.held == {"arm:control": 10, "no_signal": 10}
    assert found.releases[-1].number == 1
    raised = {row.name: row for row in log.rows if isinstance(row, Alarm)}
    standing = {name for name, alarm in raised.items() if alarm.state is AlarmState.RAISED}
    assert set(found.alarms) == standing
    assert standing
    assert {each.served.arm for each in found.rated} == {"live", "control"}, "evaluation is no person"
    assert {each.heard for each in found.rated} == {True, False}
    assert found.styles.answers == {"concise@1": 9, "none": 8}
    dealt = {turn for turn, served in found.unrated.items() if served.style is not None}
    assert dealt == {turn for turn in waiting if int(turn[1:-2]) % 3 == 0}
    assert not any(each.served.style for each in found.rated), "whom a style pleases is kept of nobody"
    assert sum(each.rated for each in found.styles.effects()) == sum(each.served.arm == "live" for each in found.rated)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 60), max_size=5))
async def test_wherever_it_is_cut_saved_and_taken_up_it_comes_to_the_same(cuts):
    whole, log, folds = every(20), MemoryLog(), MemoryFolds()
    at = 0
    for cut in sorted(cuts):
        await log.append(*whole[at : cut + 1])
        at = max(at, cut + 1)
        found, _ = await summarise(log, folds, len(whole))
        await keep(found, folds)
    await log.append(*whole[at:])
    resumed, _ = await summarise(log, folds, len(whole))
    fresh, _ = await summarise(log, MemoryFolds(), len(whole))
    assert resumed == fresh


async def test_a_look_reads_only_what_is_new():
    log, folds = MemoryLog(), MemoryFolds()
    await log.append(*every(200))
    found, read = await summarise(log, folds, 10_000)
    assert read == len(shown(log.rows))
    await keep(found, folds)
    more = [row for number in (200, 201) for row in rows(number)]
    await log.append(*more)
    again, read = await summarise(log, folds, 10_000)
    assert read == len(shown(more)) > 0
    assert again.tokens == 3 * 202


async def test_its_size_does_not_grow_with_the_log(monkeypatch):
    for name, most in (("RATED", 20), ("OPEN", 10), ("RELEASES", 5), ("CONTRACTS", 3)):
        monkeypatch.setattr(summary, name, most)
    sizes = []
    for count in (500, 2_000):
        log = MemoryLog()
        waiting = [a_turn(f"w{number}:0") for number in range(count)]
        await log.append(*every(count), *waiting)
        found = Summary()
        await catch_up(found, log)
        sizes.append(len(json.dumps(found.state())))
        assert len(found.unrated) == 10
    assert sizes[1] < sizes[0] + 100, sizes
    assert sys.getsizeof(found.unrated) < 10_000


def test_feedback_is_counted_by_name_so_that_one_that_is_misspelt_is_seen():
    found = Summary()
    for number in range(100):
        for name in ("accepted", "acepted") if number == 7 else ("accepted", f"made-up-{number}"):
            signal = Signal(
                id=f"{number}:{name}",
                turn="t:0",
                name=name,
                value=1.0,
                source=Source.CODE,
                occurred_at=1.0,
                received_at=1.0,
            )
            found.apply(number, signal)
    assert (found.names["accepted"], found.names["acepted"], len(found.names)) == (100, 1, summary.NAMES + 1)
    assert found.names.total() == found.signals == 200
    assert Summary.of(1, json.loads(json.dumps(found.state()))).names == found.names
    before = {name: value for name, value in found.state().items() if name != "names"}
    assert not Summary.of(1, before).names, "what was kept before they were counted is good all the same"


@pytest.mark.parametrize("state", [{}, {"format": 0}, {"format": 2}, {"format": 3, "tokens": "many"}])
async def test_a_fold_of_another_version_is_not_used(state):
    log, folds = MemoryLog(), MemoryFolds()
    await log.append(*every(5))
    await folds.save(FOLD, 3, state)
    found, read = await summarise(log, folds, 10_000)
    assert (found.tokens, read) == (15, len(shown(log.rows)))


async def test_it_knows_from_where_the_trainer_went_on():
    found = Summary()
    for step, base in ((1, None), (4, V[2]), (5, None)):
        found.apply(step, Batch(step=step, turns=("a:0",), credits=((0.1,),), reference=V[0], at=1.0, base=base))
    resumed = Summary.of(5, json.loads(json.dumps(found.state())))
    assert (found.lineage, resumed.lineage) == (Lineage(first=4, base=2),) * 2
    assert Summary().lineage == Lineage()


async def test_a_fold_of_a_log_that_was_longer_belongs_to_another_log():
    log, folds = MemoryLog(), MemoryFolds()
    await log.append(*every(50))
    found, _ = await summarise(log, folds, len(log.rows))
    await keep(found, folds)
    other = MemoryLog()
    await other.append(*every(5))
    found, _ = await summarise(other, folds, len(other.rows))
    assert found.tokens == 15


async def test_nobody_waits_for_what_was_cut_short_and_what_was_erased_is_counted():
    log = MemoryLog()
    erased = replace(a_turn("e:0", sampled=(1,) * 7), sampled_ids=(), logprobs=(), text="")
    await log.append(a_turn("a:0", finish=Finish.ABORT), erased)
    found, _ = await summarise(log, MemoryFolds(), 2)
    assert list(found.unrated) == ["e:0"]
    assert found.tokens == 2 + 7
