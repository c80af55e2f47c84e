"""Any rows, in any order, repeated in any way: what comes back is equal, in order, and the first of each identity."""

import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.records import (
    Alarm,
    AlarmState,
    Arm,
    Batch,
    Delivered,
    Finish,
    Holdback,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    Stamp,
    Turn,
    identity,
)
from ostinato.record import log as log_module
from ostinato.record.codec import BY_RECORD, decode, encode
from ostinato.record.log import SqlLog

text = st.text(max_size=20)
name = st.sampled_from(["a", "b", "c", "d", "é🎵", "\x00"])
real = st.floats(allow_nan=False)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(tuple)
versions = st.builds(PolicyVersion, number=st.integers(0, 2**40), hash=text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | real | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
turns = st.builds(
    Turn,
    id=name,
    episode=text,
    parent=st.none() | text,
    user=text,
    tenant=text,
    arm=st.sampled_from(Arm),
    propensity=real,
    prompt_ids=ids,
    sampled_ids=ids,
    logprobs=st.lists(st.floats(max_value=0, width=32, allow_nan=False), max_size=6).map(tuple),
    spans=st.lists(st.builds(Span, policy=versions, tokens=st.integers(0, 2**31)), max_size=3).map(tuple),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(0, 2**31),
        temperature=real,
        top_p=real,
        stop=st.lists(text, max_size=3).map(tuple),
        seed=st.none() | st.integers(0, 2**64),
    ),
    finish=st.sampled_from(Finish),
    text=text,
    started_at=real,
    ended_at=real,
    numerics=text,
    routes=st.binary(max_size=20),
    group=st.none() | text,
    verified=st.booleans(),
)
signals = st.builds(
    Signal,
    id=name,
    turn=name,
    name=text,
    value=real,
    source=st.sampled_from(Source),
    occurred_at=real,
    received_at=real,
    correction=st.none() | text,
    comment=st.none() | text,
    retracts=st.none() | text,
    tenant=name,
)
names = st.lists(text, max_size=3).map(tuple)
rewards = st.builds(Reward, turn=name, value=real, function=text, signals=names, at=real)
holdbacks = st.builds(Holdback, turn=name, reason=text, at=real)
batches = st.builds(
    Batch,
    step=st.integers(1, 4),
    turns=names,
    credits=st.lists(st.lists(real, max_size=3).map(tuple), max_size=3).map(tuple),
    reference=versions,
    at=real,
    base=st.none() | versions,
)
releases = st.builds(
    ReleaseEvent,
    id=name,
    action=text,
    policy=versions,
    previous=st.none() | versions,
    reason=text,
    detail=st.dictionaries(text, json_values, max_size=3),
    at=real,
)
stamps = st.builds(Stamp, id=name, contract=text, at=real)
deliveries = st.builds(Delivered, id=name, turns=names, at=real)
quarantines = st.builds(Quarantine, turn=name, reason=text, at=real, upto=st.integers(0, 2**62))
alarms = st.builds(
    Alarm,
    id=name,
    name=text,
    state=st.sampled_from(AlarmState),
    reason=text,
    at=real,
    detail=st.dictionaries(text, json_values, max_size=3),
)
rows = st.one_of(turns, deliveries, signals, rewards, quarantines, holdbacks, batches, releases, stamps, alarms)
KINDS: set[type] = set(BY_RECORD)


@given(rows)
@settings(max_examples=400, deadline=None)
def test_encoding_is_undone_exactly(row: Row):
    encoded = encode(row)
    back = decode(BY_RECORD[type(row)], encoded.values)
    assert back == row
    for field in fields(row):
        assert type(getattr(back, field.name)) is type(getattr(row, field.name)) or field.name == "detail"
    if isinstance(row, Turn):
        assert len(encoded.values["logprobs"]) == 4 * len(row.logprobs)


@given(st.lists(st.lists(rows, max_size=6), max_size=5))
@settings(max_examples=20, deadline=None)
async def test_the_log_keeps_the_first_of_each_identity_in_order(calls: list[list[Row]]):
    with tempfile.TemporaryDirectory() as directory, SqlLog.open(Path(directory) / "log.sqlite") as log:
        for call in calls:
            await log.append(*call)
        found = [row async for _, row in log.read(0, KINDS)]
        assert found == firsts([row for call in calls for row in call])
        assert log.newest() == len(found)


def firsts(stream: Sequence[Row]) -> list[Row]:
    kept: dict[tuple[type, object], Row] = {}
    for row in stream:
        kept.setdefault((type(row), identity(row)), row)
    return list(kept.values())


async def test_pages_merge_the_kinds_in_order_whatever_their_size(tmp_path: Path):
    rng = np.random.default_rng(5)
    stream: list[Row] = []
    for i in range(120):
        kind = int(rng.integers(3))
        held = Holdback(turn=f"h{i}", reason="x", at=float(i))
        stream.append([held, Reward(turn=f"r{i}", value=1.0, function="f", signals=(), at=float(i)), _signal(i)][kind])
    with SqlLog.open(tmp_path / "log.sqlite") as log:
        await log.append(*stream)
        page = log_module.PAGE
        try:
            for log_module.PAGE in (1, 2, 7, 40, 119, 120, 121):
                for kinds in ({Signal}, {Signal, Reward}, KINDS):
                    expected = [(seq, row) for seq, row in enumerate(stream, 1) if type(row) in kinds]
                    assert [item async for item in log.read(0, kinds)] == expected
                    assert [item async for item in log.read(50, kinds)] == [each for each in expected if each[0] > 50]
        finally:
            log_module.PAGE = page


def _signal(i: int) -> Signal:
    return Signal(
        id=f"s{i}", turn="t", name="n", value=1.0, source=Source.LLM, occurred_at=float(i), received_at=float(i)
    )
