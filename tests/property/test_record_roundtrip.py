"""Any rows, repeated in any way, over any cut into segments: what comes back is equal, in order, the first of each identity."""

import struct
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.notices import Alarm, AlarmState, Forgotten, Stamp
from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    Delivered,
    Finish,
    Holdback,
    LineSurvival,
    LineValues,
    ParsedCall,
    Pick,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    Turn,
    Window,
    WindowMaker,
    identity,
)
from ostinato.core.steering import DialPrior, DialSet, SetBy, Steered
from ostinato.record import reader as reader_module
from ostinato.record.codec.kinds import KINDS as ALL_KINDS
from ostinato.record.codec.tokens import flat, narrow, pack_logprobs, shared_ids, unflat, unpack_logprobs, widen
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.segment_directory import SegmentFilters, build_filter
from ostinato.testing.records import a_turn

text = st.text(max_size=20)
name = st.sampled_from(["a", "b", "c", "d", "é🎵", "\x00"])
real = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 1), max_size=6).map(tuple)
versions = st.builds(PolicyVersion, number=st.integers(0, 2**40), hash=text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | real | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
places = st.integers(0, 2**31)
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
        presence_penalty=real,
        frequency_penalty=real,
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31), real), max_size=2).map(tuple),
        grammar=st.just("") | text,
    ),
    finish=st.sampled_from(Finish),
    text=text,
    started_at=real,
    ended_at=real,
    numerics=text,
    routes=st.binary(max_size=20),
    nucleus=st.binary(max_size=20),
    group=st.none() | text,
    verified=st.booleans(),
    auto=st.none() | st.builds(Pick, arm=text, odds=st.dictionaries(text, real, max_size=3), cost=st.none() | real),
    steered=st.none()
    | st.builds(
        Steered,
        basis=text,
        dials=st.lists(real, max_size=3).map(tuple),
        cap=real,
        budget=real,
        tokens=st.integers(0, 2**31),
        kl=real,
        features=st.lists(real, max_size=3).map(tuple),
        gaps=st.lists(st.tuples(places, places), max_size=3).map(tuple),
        clip=real,
    ),
    style=st.none() | st.builds(Pick, arm=text, odds=st.dictionaries(text, real, max_size=3)),
    consent=st.sampled_from(Consent),
    calls=st.none() | st.lists(st.builds(ParsedCall, name=text, start=places, end=places), max_size=3).map(tuple),
    window=st.none()
    | st.builds(Window, number=places, begins_with=st.none() | text, by=st.sampled_from(WindowMaker), budget=places),
).map(lambda turn: turn if turn.counts else turn.without_words())
line_ranges = st.lists(st.tuples(places, places), max_size=3).map(tuple)
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
    lines=st.lists(
        st.builds(
            LineSurvival, call=st.none() | places, argument=text, lines=places, followed=line_ranges, kept=line_ranges
        ),
        max_size=2,
    ).map(tuple),
)
line_values = st.builds(
    LineValues,
    call=st.none() | places,
    argument=text,
    lines=places,
    runs=st.lists(st.tuples(places, places, real), max_size=3).map(tuple),
)
names = st.lists(text, max_size=3).map(tuple)
rewards = st.builds(
    Reward,
    turn=name,
    value=real,
    function=text,
    signals=names,
    at=real,
    lines=st.lists(line_values, max_size=2).map(tuple),
)
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
gone = st.builds(Forgotten, id=name, tenant=text, user=st.none() | text, key=st.integers(0, 2**40), at=real)
choices = st.builds(ConsentGiven, id=name, tenant=text, user=text, level=st.sampled_from(Consent), at=real)
dials = st.builds(
    DialSet,
    id=name,
    tenant=text,
    user=text,
    at=real,
    by=st.sampled_from(SetBy),
    dials=st.none() | st.dictionaries(text, st.none() | real, max_size=3),
)
number_lists = st.lists(real, max_size=4).map(tuple)
priors = st.builds(
    DialPrior,
    names=name,
    number=st.integers(0, 2**62),
    people=st.integers(0, 2**62),
    mean=number_lists,
    within=number_lists,
    between=number_lists,
    organisations=st.dictionaries(text, number_lists, max_size=3),
    upto=st.integers(0, 2**62),
    at=real,
    sigma=real,
)
rows = st.one_of(
    turns,
    deliveries,
    signals,
    rewards,
    quarantines,
    holdbacks,
    batches,
    releases,
    stamps,
    alarms,
    choices,
    dials,
    priors,
    gone,
)
KINDS: set[type] = {kind.record for kind in ALL_KINDS}


configs = st.builds(
    RecordConfig,
    segment_rows=st.sampled_from([1, 2, 5, 1000]),
    encrypt=st.sampled_from(["none", "tenant", "user"]),
)


@given(st.lists(st.lists(rows, max_size=6), max_size=5), configs, st.booleans())
@settings(max_examples=60)
async def test_the_log_keeps_the_first_of_each_identity_in_order(
    calls: list[list[Row]], config: RecordConfig, reopen: bool
):
    with tempfile.TemporaryDirectory() as directory:
        log = SqlLog.open(Path(directory) / "log", config=config)
        for call in calls:
            await log.append(*call)
            if reopen:
                log.close()
                log = SqlLog.open(Path(directory) / "log", config=config)
        found = [item async for item in log.read(0, KINDS)]
        expected = firsts([row for call in calls for row in call])
        assert [row for _, row in found] == expected
        assert [seq for seq, _ in found] == list(range(1, len(expected) + 1))
        assert [types(row) for _, row in found] == [types(row) for row in expected]
        for row in expected:
            assert await log.find(type(row), [identity(row)]) == [row]
        assert log.newest() == len(found)
        assert log.tail(3, KINDS) == found[-3:]
        log.close()


def types(row: Row) -> list[type]:
    return [type(getattr(row, field.name)) for field in fields(row) if field.name != "detail"]


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
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*stream)
        page = reader_module.PAGE
        try:
            for reader_module.PAGE in (1, 2, 7, 40, 119, 120, 121):
                for kinds in ({Signal}, {Signal, Reward}, KINDS):
                    expected = [(seq, row) for seq, row in enumerate(stream, 1) if type(row) in kinds]
                    assert [item async for item in log.read(0, kinds)] == expected
                    assert [item async for item in log.read(50, kinds)] == [each for each in expected if each[0] > 50]
        finally:
            reader_module.PAGE = page


# ---------------------------------------------------------------- turns that share tokens


talks = st.lists(
    st.tuples(
        st.integers(0, 7),  # which earlier turn it continues, or repeats
        st.sampled_from(["follow", "sibling", "cut", "new"]),
        st.lists(st.integers(0, 70_000), max_size=12),
        st.lists(st.integers(0, 2**31 - 1), max_size=12),
        st.booleans(),  # whether it names its parent, or lies
    ),
    max_size=40,
)


@given(talks, st.sampled_from([7, 1000]), st.sampled_from(["none", "user"]), st.randoms(use_true_random=False))
@settings(max_examples=60)
async def test_turns_that_share_tokens_come_back_whole_one_by_one(talk: Any, size: int, encrypt: str, shuffle: Any):
    made: list[Turn] = []
    system = tuple(range(40))
    for i, (which, how, more, sampled, honest) in enumerate(talk):
        before = made[-1 - which % len(made)] if made else None
        prompt = system + tuple(more)
        if before is not None and how == "follow":
            prompt = before.prompt_ids + before.sampled_ids + tuple(more)
        elif before is not None and how == "sibling":
            prompt = before.prompt_ids
        elif before is not None and how == "cut":
            prompt = before.prompt_ids[: len(before.prompt_ids) // 2] + tuple(more)
        named = before if honest or not made else made[0]
        turn = a_turn(f"t{i}:0", prompt=prompt, sampled=sampled, user=f"u{i % 2}")
        made.append(replace(turn, parent=None if named is None else named.id))
    with tempfile.TemporaryDirectory() as directory:
        config = RecordConfig(segment_rows=size, encrypt=encrypt)
        with SqlLog.open(Path(directory) / "log", config=config) as log:
            for start in range(0, len(made), 3):
                await log.append(*made[start : start + 3])
        with SqlLog.open(Path(directory) / "log", config=config) as log:
            order = list(made)
            shuffle.shuffle(order)
            for turn in order:
                assert await log.find(Turn, [(turn.id,)]) == [turn]
            assert [row async for _, row in log.read(0, {Turn})] == made


@given(ids)
def test_ids_take_as_few_bytes_as_they_need_and_come_back(some: tuple[int, ...]):
    width, packed = narrow(flat(some))
    assert unflat(widen(width, packed)) == some
    assert len(packed) == len(some) * (2 if max(some, default=0) < 1 << 16 else 3 if max(some) < 1 << 24 else 4)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40).map(tuple))
def test_logprobs_come_back_to_the_bit(logprobs: tuple[float, ...]):
    packed = pack_logprobs(logprobs)
    assert struct.pack(f"{len(logprobs)}f", *unpack_logprobs(packed)[0]) == struct.pack(f"{len(logprobs)}f", *logprobs)


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_what_two_prompts_share_is_their_longest_common_beginning(one: list[int], two: list[int]):
    pairs = list(zip(one, two, strict=False))
    expected = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert shared_ids(flat(one), flat(two)) == expected


@given(st.sets(st.integers(0, 2**63 - 1), max_size=300), st.sets(st.integers(0, 2**63 - 1), max_size=300))
def test_a_filter_never_denies_a_key_that_it_was_made_of(one: set[int], two: set[int]):
    sealed = SegmentFilters()
    sealed.add(1, build_filter(sorted(one)))
    sealed.add(900, build_filter(sorted(two)))
    found = sealed.holding(sorted(one | two)) if one | two else {}
    assert all(1 in found[key] for key in one)
    assert all(900 in found[key] for key in two)
    sealed.drop_before(900)
    found = sealed.holding(sorted(one | two)) if one | two else {}
    assert all(1 not in each for each in found.values())
    assert all(900 in found[key] for key in two)


def _signal(i: int) -> Signal:
    return Signal(
        id=f"s{i}", turn="t", name="n", value=1.0, source=Source.LLM, occurred_at=float(i), received_at=float(i)
    )
