"""What a turn costs on the disk: only the tokens that no earlier turn holds, no text that they spell, nothing twice."""

import random
import struct
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from record_rows import collect, when_trained

from ostinato.core.errors import BadRequest
from ostinato.core.records import ParsedCall, PolicyVersion, Signal, Source, Span, Turn
from ostinato.record.codec import shrink
from ostinato.record.codec import turns as codec
from ostinato.record.codec.kinds import KINDS, TURNS
from ostinato.record.codec.shrink import Use
from ostinato.record.codec.tokens import pack_logprobs
from ostinato.record.config import RecordConfig
from ostinato.record.head import MAX_CHAIN
from ostinato.record.log import SqlLog
from ostinato.record.segment import Segment
from ostinato.testing.records import a_turn

draw = random.Random(3)


def ids(count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(49_152) for _ in range(count))


def follow(before: Turn, i: int, new: int = 10) -> Turn:
    prompt = before.prompt_ids + before.sampled_ids + ids(new)
    return replace(a_turn(f"t{i}:0", prompt=prompt, sampled=ids(20)), parent=before.id)


def spell(token: int) -> str:
    return f"·{token}"


def spelt(turn: Turn, text: str | None = None) -> Turn:
    return replace(turn, text="".join(map(spell, turn.sampled_ids)) if text is None else text)


def stored(log: SqlLog, column: str) -> list[Any]:
    return [row[0] for row in log._reader._segments.newest().db.execute(f"SELECT {column} FROM turns ORDER BY seq")]


# ---------------------------------------------------------------- tokens


async def test_a_prompt_that_came_packed_is_stored_as_any_other(log: SqlLog):
    first = a_turn("t0:0", prompt=ids(300), sampled=ids(20))
    packed = follow(first, 1)
    packed.keep_packed_prompt(struct.pack(f"<{len(packed.prompt_ids)}I", *packed.prompt_ids))
    await log.append(first, packed)
    assert codec.prepare_turn(packed) == codec.prepare_turn(replace(packed))
    assert [row for _, row in await collect(log)] == [first, replace(packed)]
    assert not replace(packed, prompt_ids=(1,)).packed_prompt


def test_a_packed_prompt_is_checked():
    turn = a_turn(prompt=(1, 2))
    with pytest.raises(ValueError, match="12 bytes are not 2 packed ids"):
        turn.keep_packed_prompt(bytes(12))
    turn.keep_packed_prompt(struct.pack("<2i", 1, -2))
    with pytest.raises(BadRequest, match="prompt_ids cannot be stored"):
        codec.prepare_turn(turn)


async def test_a_follow_up_stores_its_new_tokens_only(log: SqlLog):
    turns = [a_turn("t0:0", prompt=ids(300), sampled=ids(20))]
    for i in range(1, 10):
        turns.append(follow(turns[-1], i))
    for turn in turns:
        await log.append(turn)
    sizes = [len(blob) for blob in stored(log, "tokens")]
    assert sizes[0] >= 640
    assert max(sizes[1:]) <= 2 * 30 + 12
    assert [row for _, row in await collect(log)] == turns


async def test_choices_of_one_call_share_their_prompt(log: SqlLog):
    prompt = ids(300)
    turns = [a_turn(f"call:{i}", prompt=prompt, sampled=ids(20)) for i in range(8)]
    await log.append(*turns)
    assert max(len(blob) for blob in stored(log, "tokens")[1:]) <= 2 * 20 + 12
    assert [row for _, row in await collect(log)] == turns


async def test_a_system_prompt_is_stored_once(log: SqlLog):
    system = ids(300)
    turns = [a_turn(f"t{i}:0", user=f"u{i}", prompt=system + ids(30), sampled=ids(20)) for i in range(10)]
    for turn in turns:
        await log.append(turn)
    assert max(len(blob) for blob in stored(log, "tokens")[1:]) <= 2 * 50 + 12


async def test_a_parent_whose_tokens_are_no_prefix_is_not_believed(log: SqlLog):
    first = a_turn("t0:0", prompt=ids(300))
    liar = replace(a_turn("t1:0", prompt=ids(300)), parent="t0:0")
    half = replace(a_turn("t2:0", prompt=first.prompt_ids[:150] + ids(150)), parent="t0:0")
    await log.append(first, liar, half)
    assert [row for _, row in await collect(log)] == [first, liar, half]
    sizes = [len(blob) for blob in stored(log, "tokens")]
    assert sizes[1] >= 600
    assert 300 <= sizes[2] <= 320


async def test_after_a_restart_a_follow_up_still_leans_on_its_parent(tmp_path: Path):
    turns = [a_turn("t0:0", prompt=ids(300), sampled=ids(20))]
    for i in range(1, 5):
        turns.append(follow(turns[-1], i))
    for turn in turns:
        with SqlLog.open(tmp_path / "log") as log:
            await log.append(turn)
    with SqlLog.open(tmp_path / "log") as log:
        assert max(len(blob) for blob in stored(log, "tokens")[1:]) <= 2 * 30 + 12
        assert await log.find(Turn, [("t4:0",)]) == [turns[4]]


async def test_a_long_episode_can_be_read_at_any_turn_with_few_rows(log: SqlLog):
    turns = [a_turn("t0:0", prompt=ids(50), sampled=ids(5))]
    for i in range(1, 150):
        turns.append(follow(turns[-1], i, new=2))
    await log.append(*turns)
    with SqlLog.open(log._directory.path) as other:
        segment = other._reader._segments.newest()
        asked: list[str] = []
        segment.db.set_trace_callback(asked.append)
        most = 0
        for turn in (turns[MAX_CHAIN], turns[MAX_CHAIN + 1], turns[75], turns[149]):
            segment._held.clear()
            asked.clear()
            assert await other.find(Turn, [(turn.id,)]) == [turn]
            most = max(most, sum("tokens FROM turns" in each for each in asked))
        assert MAX_CHAIN - 5 <= most <= MAX_CHAIN


async def test_every_segment_can_be_read_by_itself(tmp_path: Path):
    turns = [a_turn("t0:0", prompt=ids(300), sampled=ids(20))]
    for i in range(1, 9):
        turns.append(follow(turns[-1], i))
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=3)) as log:
        for turn in turns:
            await log.append(turn)
    for first in (1, 4):
        (tmp_path / "log" / f"{first:016d}.db").unlink()
    with SqlLog.open(tmp_path / "log") as log:
        assert [row for _, row in await collect(log)] == turns[6:]


# ---------------------------------------------------------------- text


async def test_a_text_that_the_tokens_spell_is_not_stored_and_read_without_a_tokenizer(log: SqlLog):
    whole, cut = spelt(a_turn("a:0", sampled=(5, 6, 7))), spelt(a_turn("b:0", sampled=(5, 6, 8)), "·5·6")
    other, empty = spelt(a_turn("c:0", sampled=(5, 6)), "·5·x"), spelt(a_turn("d:0", sampled=(5,)), "")
    log.derive_text(spell)
    await log.append(whole, cut, other, empty)
    assert [type(each) for each in stored(log, "text")] == [type(None), int, bytes, int]
    with SqlLog.open(log._directory.path) as reader:
        assert [row for _, row in await collect(reader)] == [whole, cut, other, empty]


async def test_a_tokenizer_that_fails_or_changes_costs_nothing_but_room(log: SqlLog):
    def fails(token: int) -> str:
        if token == 9:
            raise IndexError(token)
        return "\ud800" if token == 8 else spell(token)

    log.derive_text(fails)
    first = [spelt(a_turn(f"a{token}:0", sampled=(5, token))) for token in (7, 8, 9)]
    await log.append(*first)
    log.derive_text(lambda token: f"[{token}]")
    second = replace(a_turn("b:0", sampled=(5, 7, 11)), text="[5][7][11]")
    third = spelt(a_turn("c:0", sampled=(5, 7)))
    await log.append(second, third)
    assert [type(each) for each in stored(log, "text")] == [type(None), bytes, bytes, bytes, type(None)]
    assert [row for _, row in await collect(log)] == [*first, second, third]


async def test_two_processes_that_learn_a_token_at_once_lose_nothing(tmp_path: Path):
    with SqlLog.open(tmp_path / "log") as one, SqlLog.open(tmp_path / "log") as two:
        for each in (one, two):
            each.derive_text(spell)
        turns = [spelt(a_turn(f"t{i}:0", sampled=(i // 2, 100 + i))) for i in range(12)]
        for i, turn in enumerate(turns):
            await (one, two)[i % 2].append(turn)
        assert [row for _, row in await collect(one)] == turns
        assert [row for _, row in await collect(two)] == turns
        assert stored(one, "text") == [None] * 12


async def test_nor_do_two_that_spell_it_differently(tmp_path: Path):
    with SqlLog.open(tmp_path / "log") as one, SqlLog.open(tmp_path / "log") as two:
        one.derive_text(spell)
        two.derive_text(lambda token: f"[{token}]")
        await two.append(spelt(a_turn("t0:0", sampled=(1,)), "[1]"))
        turn = spelt(a_turn("t1:0", sampled=(1, 2)))  # the one knows nothing of what the other said about token 1
        await one.append(turn)
        assert await two.find(Turn, [("t1:0",)]) == [turn]
        assert [type(each) for each in stored(one, "text")] == [type(None), bytes]


# ---------------------------------------------------------------- dictionaries


def chatter(i: int) -> Signal:
    words = draw.choices(["please", "shorter", "thank you", "wrong", "the second point", "again", "in English"], k=12)
    return Signal(
        id=f"s{i}", turn=f"chatcmpl-{draw.randbytes(16).hex()}:0", name="accepted", value=1.0, source=Source.HUMAN,
        occurred_at=1.7e9 + i, received_at=1.7e9 + i, comment=" ".join(words),
    )  # fmt: skip


async def test_dictionaries_are_trained_on_a_segments_own_rows_and_used_by_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shrink, "SAMPLES", 200)
    rows = [chatter(i) for i in range(600)]
    with SqlLog.open(tmp_path / "log") as log, SqlLog.open(tmp_path / "log") as other:
        await log.append(*rows[:300])
        when_trained(log)
        await log.append(*rows[300:400])
        await other.append(*rows[400:500])
        segment = log._reader._segments.newest()
        assert {use for (use,) in segment.db.execute("SELECT use FROM dictionaries")} == {Use.ROWS, Use.TEXT}
        sizes = [a + b for a, b in segment.db.execute("SELECT length(body), length(said) FROM signals ORDER BY seq")]
        assert sum(sizes[:300]) / 300 > 1.4 * sum(sizes[300:400]) / 100
        assert 0.8 < sum(sizes[300:400]) / sum(sizes[400:500]) < 1.2
        assert [row for _, row in await collect(log)] == rows[:500]
        assert [row for _, row in await collect(other)] == rows[:500]
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*rows[500:])
        assert [row for _, row in await collect(log)] == rows


async def test_a_segments_dictionaries_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shrink, "SAMPLES", 20)
    with SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=100)) as log:
        for i in range(25):
            await log.append(*[chatter(10 * i + j) for j in range(10)])
            when_trained(log)
        counts = []
        for first in (1, 101, 201):
            segment = log._reader._segments.get(first)
            counts.append(segment.db.execute("SELECT count(*) FROM dictionaries").fetchone()[0])
        assert counts[:2] == [2, 2]


async def test_who_only_reads_a_segment_digests_no_dictionary_for_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shrink, "SAMPLES", 20)
    made: list[Any] = []
    make = shrink._compressor
    with SqlLog.open(tmp_path / "log") as log:
        for i in range(20):
            await log.append(*[chatter(10 * i + j) for j in range(10)])
            when_trained(log)
        expected = await collect(log)
    monkeypatch.setattr(shrink, "_compressor", lambda known: made.append(known) or make(known))
    with SqlLog.open(tmp_path / "log") as log:
        assert await collect(log) == expected
        assert log._reader._segments.newest().shrinker.has(Use.ROWS)
        assert made == []
        await log.append(chatter(1000))
        assert 0 < len(made) <= 2


# ---------------------------------------------------------------- nothing is left out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_every_field_of_a_record_is_stored(kind: Any):
    apart = (
        {"prompt_ids", "sampled_ids", "logprobs", "spans", "text", "routes", "nucleus", "calls", "steered", "style"}
        if kind is TURNS
        else set()
    )
    assert {*kind.body, *kind.said} | apart == {field.name for field in fields(kind.record) if field.init}


CALLS = (ParsedCall(name="bash", start=6, end=81), ParsedCall(name="", start=90, end=101))


@pytest.mark.parametrize("grammar", ["", 'start: "a"'])
def test_calls_cost_a_few_bytes_and_a_turn_without_any_costs_none(grammar: str):
    plain = a_turn()
    plain = replace(plain, sampling=replace(plain.sampling, grammar=grammar))
    before = pack_logprobs(plain.logprobs) + (zlib.compress(grammar.encode()) if grammar else b"")
    without, made, unknown = (
        codec.pack_logprobs_column(codec.prepare_turn(replace(plain, calls=calls))) for calls in ((), CALLS, None)
    )
    assert without == before, "as versions without calls stored it"
    assert (len(made) - len(before), len(unknown) - len(before)) == (2 + len('[["bash",6,81],["",90,101]]'), 2)


@pytest.mark.parametrize("change", [{}, {"sampled_ids": (), "logprobs": (), "spans": ()}])
@pytest.mark.parametrize("grammar", ["", 'start: "a"'])
@pytest.mark.parametrize("calls", [(), CALLS, None])
async def test_calls_come_back_with_and_without_a_grammar_and_tokens(
    log: SqlLog, calls: Any, grammar: str, change: dict[str, Any]
):
    turn = replace(a_turn(), calls=calls, **change)
    turn = replace(turn, sampling=replace(turn.sampling, grammar=grammar))
    await log.append(turn)
    assert [row async for _, row in log.read(0, {Turn})] == [turn]


def test_a_call_that_no_log_can_keep_is_refused():
    with pytest.raises(BadRequest, match=r"Turn\.calls"):
        codec.prepare_turn(replace(a_turn(), calls=(ParsedCall(name="\ud800", start=0, end=1),)))


def test_logprobs_take_three_and_a_half_bytes_each():
    likely = [-(10.0 ** draw.uniform(-6, 1)) for _ in range(200)]
    assert len(pack_logprobs(likely)) <= 3.5 * 200 + 8


def test_a_few_far_logprobs_cost_a_byte_more_each():
    mixed = [-0.5] * 100 + [-0.0, -1e-38, float("-inf")]
    assert len(pack_logprobs(mixed)) <= 3.5 * 103 + 8 + 103


@pytest.mark.parametrize(
    ("counts", "explicit", "spans"),
    [([2], False, b"3"), ([2], True, b"[[3,2]]"), ([1], False, b"[[3,1]]"), ([1, 1], False, b"[[3,1],[4,1]]")],
)
def test_one_version_over_the_whole_answer_is_its_number_alone(counts: list[int], explicit: bool, spans: bytes):
    policy = PolicyVersion(number=0, hash="00")
    turn = replace(a_turn(), spans=tuple(Span(policy=policy, tokens=count) for count in counts))
    head = codec.pack_head(codec.prepare_turn(turn), turn, [3, 4][: len(counts)], explicit=explicit)
    assert head.startswith(b"[" + spans + b',"t:0",')


async def test_what_was_read_once_is_leaned_on_without_reading_it_again(tmp_path: Path):
    first = a_turn("t0:0", prompt=ids(50), sampled=ids(20))
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(first)
        await log.append(follow(first, 1))
    segment = Segment(tmp_path / "log" / "0000000000000001.db", None)
    try:
        (row,) = segment.fetch(TURNS, 0, 1, 1)
        assert segment.decode(TURNS, row) == first
        asked: list[str] = []
        segment.db.set_trace_callback(asked.append)
        assert segment.tokens(1).prompt == 50
        assert asked == []
        segment.tokens(2)
        assert len(asked) == 1
    finally:
        segment.close()
