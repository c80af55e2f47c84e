"""The contract of `Log`, tested on every implementation."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.core.notices import Alarm, AlarmState, Forgotten, Stamp
from ostinato.core.records import (
    Arm,
    Batch,
    Branch,
    Consent,
    ConsentGiven,
    Delivered,
    Finish,
    Holdback,
    LineSurvival,
    LineValues,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    RewardReach,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    SteeringBasis,
    Turn,
    TurnHint,
    Window,
    WindowMaker,
)
from ostinato.core.seams import Log
from ostinato.core.steering import Basis, DialPrior, DialSet, SetBy, Steered
from ostinato.record.log import SqlLog
from ostinato.testing.log import MemoryLog

V3 = PolicyVersion(number=3, hash="9f" * 32)
TURN = Turn(
    id="r:0",
    episode="e",
    parent=None,
    user="u",
    tenant="t",
    arm=Arm.CANARY,
    propensity=0.25,
    prompt_ids=(1, 2, 2**31 - 1),
    sampled_ids=(7, 9),
    logprobs=(-0.5, -float.fromhex("0x1.99999ap-4")),  # float32 numbers
    spans=(Span(policy=V3, tokens=2),),
    sampling=Sampling(max_tokens=8, temperature=0.7, stop=("\n", "é\x00")),
    finish=Finish.LENGTH,
    text="naïve 🎵\x00 end",
    started_at=10.1,
    ended_at=10.4,
    numerics="0123456789abcdef",
    routes=b"ORT1\x00\xff\n",
    steered=Steered(
        basis="9c", dials=(0.5, -0.25), cap=0.1, budget=3.0, tokens=2, kl=0.1 / 3, features=(1e-9, -7.1), gaps=((1, 4),)
    ),
    branch=Branch.COMPACTED,
    window=Window(number=2, begins_with="q:0", by=WindowMaker.GATEWAY, budget=6144),
)
KEPT = LineSurvival(call=0, argument="content", lines=9, followed=((1, 9),), kept=((1, 5), (9, 9)))
SIGNAL = Signal(
    id="s", turn="r:0", name="accepted", value=0.1, source=Source.CODE, occurred_at=1.5, received_at=2.5, lines=(KEPT,)
)
WORTH = LineValues(call=None, argument="", lines=9, runs=((1, 5, 0.25), (6, 9, -0.1)))
REWARD = Reward(
    turn="r:0", value=0.75, function="copilot@1", signals=("s",), at=42.1, lines=(WORTH,), reach=RewardReach.EPISODE
)
HELD = Holdback(turn="q:0", reason="finish:abort", at=42.0)
BATCH = Batch(
    step=1,
    turns=("r:0",),
    credits=((0.1 + 0.2, -1.5),),
    reference=V3,
    at=50.0,
    shown=(0.25,),
    after=((0.5, 0.1 + 0.2),),
    hints=(TurnHint(turn="r:0", weight=0.1 + 0.2, signal="s"), TurnHint(turn="q:0", weight=0.5, following="r:0")),
)
EVENT = ReleaseEvent(
    id="r9", action="shipped", policy=V3, previous=None, reason="+4 pp", detail={"n": [1, 2.5, None]}, at=60.0
)
STAMP = Stamp(id="0123456789abcdef", contract='{"mode":"exact"}', at=70.0)
SENT = Delivered(id="d", turns=("r:0", "q:0"), at=11.0)
LOST = Quarantine(turn="p:0", reason="reward_failed: no", at=42.0, upto=7)
ALARM = Alarm(id="a1", name="coverage:t", state=AlarmState.RAISED, reason="silent", at=80.0, detail={"n": 3})
DIALS = Basis(("brief", "lists"), np.array([2, 7]), np.array([[1.0, -0.5], [0.25, 3.0]], np.float32), "9f")
BASIS = SteeringBasis.of(DIALS, at=90.0)
CHOICE = ConsentGiven(id="c1", tenant="acme", user="ann", level=Consent.AGGREGATE, at=91.0)
SET = DialSet(id="d1", tenant="acme", user="ann", at=92.0, by=SetBy.PERSON, dials={"brief": -0.1, "lists": None})
PRIOR = DialPrior(
    names="9c",
    number=2,
    people=412,
    mean=(0.1 + 0.2, 0.4),
    within=(0.003, -1e-9, 0.02),
    between=(0.0, 0.0, 0.0),
    organisations={"acme": (31.0, 0.1, 0.5)},
    upto=7,
    at=92.0,
    sigma=16.1,
)
GONE = Forgotten(id="forgotten-tenant-7", tenant="acme", user=None, key=7, at=92.0)
ROWS: list[Row] = [TURN, SENT, SIGNAL, REWARD, LOST, HELD, BATCH, EVENT, STAMP, ALARM, BASIS, CHOICE, SET, PRIOR, GONE]
KINDS: set[type] = {type(row) for row in ROWS}


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    if request.param == "memory":
        yield MemoryLog()
    elif request.param == "postgres":
        from ostinato.record.postgres.log import PostgresLog

        with PostgresLog.open(request.getfixturevalue("in_postgres")()) as opened:
            yield opened
    else:
        with SqlLog.open(tmp_path / "log") as opened:
            yield opened


async def read(log: Log, after: int = 0, kinds: set[type] = KINDS) -> list[tuple[int, Row]]:
    return [item async for item in log.read(after, kinds)]


async def test_every_kind_comes_back_equal_and_in_order(log: Log):
    for row in ROWS:
        await log.append(row)
    found = await read(log)
    assert [row for _, row in found] == ROWS
    assert [type(row) for _, row in found] == [type(row) for row in ROWS]
    sequence = [seq for seq, _ in found]
    assert sequence == sorted(set(sequence))
    assert sequence[0] > 0


async def test_append_returns_the_newest_cursor_and_reading_goes_on_from_it(log: Log):
    middle = await log.append(TURN, SIGNAL)
    end = await log.append(REWARD)
    assert end > middle
    assert await log.append(REWARD) == end
    assert await read(log, middle) == [(end, REWARD)]
    assert await read(log, end) == []


async def test_only_the_kinds_asked_for(log: Log):
    await log.append(*ROWS)
    assert [row for _, row in await read(log, 0, {Batch, Signal})] == [SIGNAL, BATCH]
    assert await read(log, 0, set()) == []


@pytest.mark.parametrize("first", ROWS, ids=lambda row: type(row).__name__)
async def test_a_repeated_identity_is_ignored_and_the_first_stays(log: Log, first: Row):
    changed = replace(first, text="other") if isinstance(first, Turn) else first
    if isinstance(first, Signal):
        changed = replace(first, value=-9.0)
    elif not isinstance(first, Turn):
        changed = replace(first, at=999.0)
    assert changed != first
    await log.append(first, changed)
    await log.append(changed, first)
    assert [row for _, row in await read(log)] == [first]


async def test_the_same_name_in_two_kinds_is_two_rows(log: Log):
    await log.append(replace(REWARD, turn="x"), Holdback(turn="x", reason="r", at=1.0), replace(SIGNAL, id="x"))
    assert len(await read(log)) == 3


async def test_many_appenders_at_once_lose_and_repeat_nothing(log: Log):
    rows = [replace(SIGNAL, id=f"s{i}") for i in range(200)]
    cursors = await asyncio.gather(*[log.append(row, rows[0]) for row in rows])
    found = await read(log)
    assert sorted(row.id for _, row in found if isinstance(row, Signal)) == sorted(row.id for row in rows)
    assert max(cursors) == found[-1][0]


async def test_a_reader_sees_what_was_there_when_it_began(log: Log):
    await log.append(*[replace(SIGNAL, id=f"s{i}") for i in range(3)])
    seen: list[Row] = []
    async for _, row in log.read(0, {Signal}):
        seen.append(row)
        await log.append(replace(SIGNAL, id=f"late{len(seen)}"))
        assert len(seen) < 10
    assert len(seen) == 3


async def test_no_rows_is_no_change(log: Log):
    end = await log.append(TURN)
    assert await log.append() == end


async def test_rows_are_found_by_identity_in_the_order_asked_for(log: Log):
    other = replace(SIGNAL, tenant="other", value=0.9)
    await log.append(TURN, SIGNAL, other)
    assert await log.find(Signal, [("other", "s"), ("nobody", "s"), ("default", "s")]) == [other, SIGNAL]
    assert await log.find(Turn, [("r:0",), ("absent",)]) == [TURN]
    assert await log.find(Batch, []) == []


async def test_two_tenants_may_use_one_id(log: Log):
    other = replace(SIGNAL, tenant="other")
    await log.append(SIGNAL, other, SIGNAL)
    assert [row for _, row in await read(log)] == [SIGNAL, other]


@pytest.mark.parametrize("kind", [Signal, Turn, Batch])
async def test_where_the_newest_of_a_kind_begin(log: Log, kind: type[Row]):
    for i in range(6):
        await log.append(replace(TURN, id=f"t{i}:0"), *(replace(SIGNAL, id=f"s{i}/{j}") for j in range(i % 3)))
    places = [place for place, _ in await read(log, 0, {kind})]
    for count in range(1, 9):
        place = await log.before_last(count, kind)
        assert place == (places[-count] - 1 if count <= len(places) else 0)
        assert len(await read(log, place, {kind})) == min(count, len(places))
    assert await log.before_last(0, kind) == 0
