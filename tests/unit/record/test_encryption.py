"""What people wrote lies encrypted if asked; a forgotten key makes it unreadable for ever, and nobody else's."""

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_rows import EVERY, collect, signal

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadRequest, Corrupt
from ostinato.core.notices import Forgotten
from ostinato.core.records import Consent, ParsedCall, Pick, Row, Signal, Turn
from ostinato.core.steering import DialSet, SetBy, Steered
from ostinato.record import rowlog
from ostinato.record.codec import shrink
from ostinato.record.codec import turns as codec
from ostinato.record.codec.tokens import flat, narrow, pack_logprobs
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.log import SqlLog
from ostinato.record.sqlite import driver
from ostinato.testing.records import a_turn

WORDS = "the quick brown fox jumps over a lazy dog while nobody is looking at it "


def turn(i: int, user: str, tenant: str = "acme", **changed: Any) -> Turn:
    ids = tuple(range(1000 * (i + 1), 1000 * (i + 1) + 60))
    made = a_turn(f"t{i}:0", user=user, prompt=ids, sampled=tuple(reversed(ids)), routes=b"ROUTES of " + user.encode())
    logprobs = tuple(-(i + len(user) + at) / 64 for at in range(60))  # float32 numbers
    asked = replace(made.sampling, grammar=f'start: "what {user} may say"')
    said = f"{user} said: {WORDS}"
    calls = (ParsedCall(name=f"tool of {user}", start=0, end=9),)
    return replace(made, tenant=tenant, text=said, logprobs=logprobs, sampling=asked, calls=calls, **changed)


def told(i: int, about: Turn, **changed: Any) -> Signal:
    made = replace(signal(i), turn=about.id, tenant=about.tenant)
    return replace(made, **({"comment": f"comment of {about.user}", "correction": f"{about.user} meant"} | changed))


ANN, ANN_TOO, BOB = turn(0, "ann"), turn(1, "ann", parent="t0:0"), turn(2, "bob")
OTHER = turn(3, "ann", tenant="other")
ROWS: list[Row] = [ANN, ANN_TOO, BOB, OTHER, told(0, ANN), told(1, BOB), told(2, OTHER), signal(3)]


@contextmanager
def opened(path: Path, encrypt: str = "user", **settings: Any) -> Iterator[SqlLog]:
    with SqlLog.open(path / "log", config=RecordConfig(encrypt=encrypt, **settings)) as log:
        yield log


def traces(path: Path, *plain: bytes) -> list[tuple[str, bytes]]:
    """Which of these lie readable in which of a run's files."""
    files = [file for file in path.rglob("*") if file.is_file()]
    assert files
    return [(file.name, each) for file in files for each in plain if each in file.read_bytes()]


def written(one: Turn) -> list[bytes]:
    """What a turn looks like on the disk where it lies open."""
    ids = [narrow(flat(ids))[1] for ids in (one.sampled_ids, one.prompt_ids)]
    grammar = zlib.compress(one.sampling.grammar.encode())
    called = [call.name.encode() for call in one.calls or ()]
    return [one.text.encode()[:30], *ids, pack_logprobs(one.logprobs), grammar, one.routes, *called]


def redacted(one: Turn) -> Turn:
    asked = replace(one.sampling, grammar="")
    return replace(
        one,
        prompt_ids=(),
        sampled_ids=(),
        logprobs=(),
        text="",
        routes=b"",
        sampling=asked,
        calls=None,
        steered=None,
        style=None,
    )


@pytest.fixture(autouse=True)
def uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be looked for only if it is not compressed."""

    def stored(self: shrink.Shrinker, use: shrink.Use, plain: bytes) -> bytes:
        return b"\0" + plain

    monkeypatch.setattr(shrink.Shrinker, "pack", stored)


async def test_what_is_looked_for_is_there_when_it_is_not_encrypted(tmp_path: Path):
    with opened(tmp_path, "none") as log:
        await log.append(*ROWS)
        for plain in (*written(ANN), b"comment of ann", b"ann meant"):
            assert traces(tmp_path, plain)


@pytest.mark.parametrize("encrypt", ["tenant", "user"])
async def test_nothing_that_people_wrote_lies_readable(tmp_path: Path, encrypt: str):
    with opened(tmp_path, encrypt) as log:
        log.derive_text(lambda token: f"<{token}>")
        await log.append(*ROWS)
        assert await collect(log) == list(enumerate(ROWS, 1))
        plain = [each for one in (ANN, ANN_TOO, BOB, OTHER) for each in written(one)]
        assert traces(tmp_path, *plain, b"comment of", b" meant", b"<1059>") == []
    assert traces(tmp_path, *plain, b"comment of", b" meant") == []
    with opened(tmp_path, encrypt) as log:
        assert await collect(log) == list(enumerate(ROWS, 1))


async def test_a_forgotten_user_is_unreadable_for_ever_and_nobody_else(tmp_path: Path):
    with opened(tmp_path, segment_rows=3) as log:
        await log.append(*ROWS[:4])
        await log.append(*ROWS[4:])
        assert await log.find(Turn, [("t1:0",)]) == [ANN_TOO]  # in memory now
        keys = {number: log._ring._read(number) for number in (1, 2, 3)}  # type: ignore[union-attr]
        assert None not in keys.values()
        assert await log.forget("acme", "ann") == 9
        after = [redacted(ANN), redacted(ANN_TOO), BOB, OTHER, replace(told(0, ANN), comment=None, correction=None)]
        after += [*ROWS[5:], (await collect(log, 8))[0][1]]
        assert await collect(log) == list(enumerate(after, 1))
        assert [row.redacted for row in after if isinstance(row, Turn)] == [True, True, False, False]
        assert await log.find(Turn, [("t1:0",), ("t2:0",)]) == [redacted(ANN_TOO), BOB]
        assert log.tail(9, EVERY)[0] == (1, redacted(ANN))
    with opened(tmp_path, segment_rows=3) as log:
        assert await collect(log) == list(enumerate(after, 1))
    assert traces(tmp_path, *written(ANN), *written(ANN_TOO), b"comment of ann") == []


async def test_a_user_alone_is_not_forgotten_where_one_key_was_the_tenants(tmp_path: Path):
    with opened(tmp_path, "tenant") as log:
        await log.append(ANN)
    with opened(tmp_path, "user") as log:
        await log.append(ANN_TOO)
        await log.forget("acme", "ann")
        assert await log.find(Turn, [(ANN.id,), (ANN_TOO.id,)]) == [ANN, redacted(ANN_TOO)]
        await log.forget("acme")
        assert await log.find(Turn, [(ANN.id,)]) == [redacted(ANN)]


async def test_the_key_itself_is_gone_from_the_files(tmp_path: Path):
    with opened(tmp_path) as log:
        await log.append(*[turn(i, f"user{i}") for i in range(300)])
        ring = log._ring
        assert ring is not None
        secret = ring._db.execute(
            "SELECT secret FROM keys WHERE scope = ?", (Scope("acme", "user150").name,)
        ).fetchone()[0]
        assert traces(tmp_path, secret[1:])
        await log.forget("acme", "user150")
        assert traces(tmp_path, secret[1:]) == []


async def test_a_forgotten_tenant_takes_all_of_its_users_along(tmp_path: Path):
    with opened(tmp_path) as log:
        await log.append(*ROWS)
        await log.forget("acme")
        rows = [row for _, row in await collect(log)]
        assert rows[:4] == [redacted(ANN), redacted(ANN_TOO), redacted(BOB), OTHER]
        assert [row.comment for row in rows[4:7] if isinstance(row, Signal)] == [None, None, "comment of ann"]
        later = turn(9, "ann")
        await log.append(later)
        assert await log.find(Turn, [("t9:0",)]) == [later]


async def test_other_processes_notice_at_once(tmp_path: Path):
    with opened(tmp_path) as one, opened(tmp_path) as two:
        await two.append(ANN, BOB)
        assert await two.find(Turn, [("t0:0",)]) == [ANN]
        await one.forget("acme", "ann")
        assert await two.find(Turn, [("t0:0",), ("t2:0",)]) == [redacted(ANN), BOB]
        await two.append(ANN_TOO)  # under a key of its own: it does not lean on what nobody can read
        assert await one.find(Turn, [("t1:0",)]) == [ANN_TOO]


async def test_whose_turns_signals_are_about_is_asked_once_and_without_reading_the_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    turns = [turn(i, f"user{i % 5}") for i in range(20)]
    with opened(tmp_path, segment_rows=4) as log:
        for at in range(0, 20, 4):
            await log.append(*turns[at : at + 4])
    read: list[str] = []
    monkeypatch.setattr(codec, "decode", lambda *_: read.append("turn"))
    monkeypatch.setattr(KeyRing, "decrypt", lambda *_: read.append("secret"))
    with opened(tmp_path, segment_rows=4) as log:
        asked: list[Sequence[str]] = []
        owners = log._appender._reader.owners
        monkeypatch.setattr(log._appender._reader, "owners", lambda turns: asked.append(turns) or owners(turns))
        foreign = replace(told(50, turns[0]), tenant="other")
        about = [told(2 * i + j, one) for i, one in enumerate(turns) for j in range(2)]
        await log.append(*about, foreign, told(51, turn(90, "nobody")))
        assert (len(asked), len(asked[0]), read) == (1, 21, [])
        assert await log.places(Turn, [("t7:0",), ("no",), ("t0:0",)]) == [8, 1]
        assert read == []
    monkeypatch.undo()
    with opened(tmp_path, segment_rows=4) as log:
        await log.forget("acme", "user1")
        said = {row.turn for _, row in await collect(log) if isinstance(row, Signal) and row.comment is None}
        assert said == {f"t{i}:0" for i in range(1, 20, 5)}


async def test_signals_that_come_before_their_turn_are_forgotten_with_it(tmp_path: Path):
    early, orphan = told(10, ANN), told(11, turn(50, "ann"))
    foreign = replace(told(12, ANN), tenant="other")
    with opened(tmp_path) as log:
        await log.append(early, orphan, foreign)
        await log.append(ANN)
        await log.append(told(13, ANN))
        assert [row.comment for _, row in await collect(log, 0, {Signal})] == ["comment of ann"] * 4  # type: ignore[union-attr]
        await log.forget("acme", "ann")
        found = {row.id: row.comment for _, row in await collect(log, 0, {Signal}) if isinstance(row, Signal)}
        assert found == {"s10": None, "s11": "comment of ann", "s12": "comment of ann", "s13": None}


async def test_comments_on_turns_that_retention_had_dropped_are_forgotten_with_anybody_of_their_tenant(tmp_path: Path):
    day = 86_400.0
    config = RecordConfig(encrypt=Encrypt.USER, segment_rows=1, retain_days=1.0)
    with SqlLog.open(tmp_path / "log", clock=lambda: 10 * day, config=config) as log:
        await log.append(ANN)
        await log.append(BOB)
        assert await log.drop_old(12 * day, keep_after=9) == 2
        late, foreign = told(20, ANN, received_at=9 * day), replace(told(21, ANN, received_at=9 * day), tenant="other")
        awaited = told(22, turn(50, "bob"), received_at=10 * day - 60.0)
        await log.append(late, foreign, awaited)
        await log.forget("acme", "ann")
        found = {row.id: row.comment for _, row in await collect(log, 0, {Signal}) if isinstance(row, Signal)}
        assert found == {"s20": None, "s21": "comment of ann", "s22": "comment of bob"}


async def test_comments_on_awaited_turns_outlive_a_flood_of_another_tenants_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rowlog, "_FIRST_SIGNALS", 2)
    day, since = 86_400.0, 10 * 86_400.0 - 60.0
    config = RecordConfig(encrypt=Encrypt.USER, segment_rows=2, retain_days=1.0)
    with SqlLog.open(tmp_path / "log", clock=lambda: 10 * day, config=config) as log:
        await log.append(ANN)
        await log.append(BOB)
        assert await log.drop_old(12 * day, keep_after=9)
        await log.append(told(20, ANN, received_at=9 * day), told(21, turn(50, "bob"), received_at=since))
        for i in range(22, 40):
            await log.append(told(i, turn(i, "eve", tenant="flood"), received_at=since + 1))
        await log.forget("acme", "ann")
        found = {row.id: row.comment for _, row in await collect(log, 0, {Signal}) if isinstance(row, Signal)}
        assert (found["s20"], found["s21"], found["s30"]) == (None, "comment of bob", "comment of eve")


async def test_a_damaged_signal_keeps_nobody_from_being_forgotten(tmp_path: Path):
    day = 86_400.0
    config = RecordConfig(encrypt=Encrypt.USER, segment_rows=1, retain_days=1.0)
    with SqlLog.open(tmp_path / "log", clock=lambda: 10 * day, config=config) as log:
        await log.append(ANN)
        await log.append(BOB)
        assert await log.drop_old(12 * day, keep_after=9) == 2
        await log.append(ANN_TOO)
        for i, about in enumerate((ANN, turn(50, "bob"), turn(51, "eve", tenant="other"), turn(52, "bob")), start=20):
            await log.append(told(i, about, received_at=9 * day if about is ANN else 10 * day - 60.0))
        (damaged,) = await log.places(Signal, [("other", "s22")])
    with closing(driver.connect(str(tmp_path / "log" / f"{damaged:016}.db"))) as db:
        db.execute("DROP TRIGGER IF EXISTS signals_no_update")
        assert db.execute("UPDATE signals SET body = x'0102' WHERE seq = ?", (damaged,)).rowcount == 1
        db.commit()
    with SqlLog.open(tmp_path / "log", clock=lambda: 10 * day, config=config) as log:
        await log.forget("acme", "ann")
        (gone,) = await log.find(Turn, [(ANN_TOO.id,)])
        assert gone.redacted
        said = await log.find(Signal, [("acme", f"s{i}") for i in (20, 21, 23)])
        assert [each.comment for each in said] == [None, "comment of bob", "comment of bob"]


async def test_turns_lean_only_on_what_lies_under_the_same_key(tmp_path: Path):
    prompt = tuple(range(500))
    turns = [
        replace(a_turn(f"t{i}:0", prompt=prompt), user=f"u{i % 2}", parent="t0:0" if i else None) for i in range(4)
    ]
    with opened(tmp_path) as log:
        await log.append(*turns)
        await log.forget("acme" if turns[0].tenant == "acme" else "default", "u0")
        assert [row for _, row in await collect(log, 0, {Turn})] == [
            redacted(turns[0]),
            turns[1],
            redacted(turns[2]),
            turns[3],
        ]


async def test_no_dictionary_is_trained_on_what_is_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shrink, "SAMPLES", 20)
    with opened(tmp_path) as log:
        for i in range(60):
            await log.append(turn(i, "ann"), told(i, turn(i, "ann")))
        head = log._appender._head
        assert head is not None
        assert {*head._training._samples, *head._training._begun} == {shrink.Use.ROWS}


STOP = "and then Zebrastripe said"


def stopping(i: int, user: str) -> Turn:
    """A turn whose caller wrote stop strings and penalties and named tokens to avoid, steered by a person's dials."""
    made = turn(i, user)
    asked = replace(
        made.sampling, stop=(STOP, "\n\n"), logit_bias=((4711, -100.0), (4712, 1.5)), presence_penalty=0.515625
    )
    steered = Steered(
        basis="9c1f", dials=(0.578125, -1.5), cap=0.1, budget=3.0, tokens=1, kl=0.0625, features=(1.34375, -2.0)
    )
    style = Pick(arm="concise@a60d30c4", odds={"none": 0.171875, "concise@a60d30c4": 0.828125})
    return replace(made, sampling=asked, steered=steered, style=style)


WRITTEN = (STOP.encode(), b"4711", b"0.515625", b"0.578125", b"1.34375", b"9c1f", b"a60d30c4", b"0.828125")
"""Of its stop strings, bias, penalties, dials, features, basis, style and its odds."""


@pytest.mark.parametrize("grammar", ["", 'start: "a"'])
@pytest.mark.parametrize("logprobs", [True, False])
async def test_what_a_caller_wrote_of_the_sampling_is_encrypted_and_forgotten(
    tmp_path: Path, grammar: str, logprobs: bool
):
    one = stopping(0, "ann")
    one = replace(one, sampling=replace(one.sampling, grammar=grammar), logprobs=one.logprobs if logprobs else ())
    one = one if logprobs else replace(one, spans=())
    with opened(tmp_path) as log:
        await log.append(one, BOB)
        assert await collect(log) == [(1, one), (2, BOB)]
        assert traces(tmp_path, *WRITTEN) == []
        await log.forget("acme", "ann")
        asked = replace(one.sampling, stop=(), logit_bias=(), presence_penalty=0.0, grammar="")
        assert await log.find(Turn, [(one.id,)]) == [replace(redacted(one), sampling=asked)]
    assert traces(tmp_path, *WRITTEN) == []


async def test_without_encryption_it_stays_where_it_was(tmp_path: Path):
    with opened(tmp_path, "none") as log:
        await log.append(stopping(0, "ann"))
        assert traces(tmp_path, STOP.encode())
        assert await collect(log) == [(1, stopping(0, "ann"))]


async def test_the_tokens_of_an_answer_are_not_told_by_their_texts(tmp_path: Path):
    """Texts of tokens lie readable in the segment, for turns that are not encrypted."""
    said = replace(ANN, text="".join(f"<{token}>" for token in ANN.sampled_ids))
    with opened(tmp_path, "none") as log:
        log.derive_text(lambda token: f"<{token}>")
        await log.append(replace(said, id="open:0"))
        assert traces(tmp_path, b"<1059>")
    with opened(tmp_path / "closed") as log:
        log.derive_text(lambda token: f"<{token}>")
        await log.append(said)
        assert await collect(log) == [(1, said)]
        assert traces(tmp_path / "closed", b"<1059>") == []


async def test_a_dictionary_of_rows_holds_no_words_and_goes_with_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: Any
):
    monkeypatch.undo()  # rows are compressed, with dictionaries
    monkeypatch.setattr(shrink, "SAMPLES", 100)
    words = [STOP.encode(), *(each for i in range(3) for each in (f"comment of u{i}".encode(), f"u{i} meant".encode()))]
    with opened(tmp_path, segment_rows=700, retain_days=1.0) as log:
        for i in range(300):
            one = stopping(i, f"u{i % 3}")
            await log.append(one, told(i, one))
        for thread in log._appender._head._training._begun.values():
            await asyncio.to_thread(thread.join)
        for i in range(300, 310):
            await log.append(stopping(i, "u1"))
        found = sql(tmp_path / "log" / "0000000000000001.db", "SELECT use, body FROM dictionaries")
        assert [use for use, _ in found] == ["rows"]
        assert traces(tmp_path, found[0][1][-100:])
        assert [word for word in words if word in found[0][1]] == []
        assert traces(tmp_path, *words, WORDS.encode()[:30]) == []
        await log.append(*[signal(i) for i in range(1000, 1100)])
        await log.append(signal(2000))
        assert await log.drop_old(1e12, 10_000) == 1
        assert traces(tmp_path, found[0][1][-100:]) == []


# ---------------------------------------------------------------- what is refused


async def test_what_was_not_encrypted_cannot_be_forgotten(tmp_path: Path):
    with opened(tmp_path, "none") as log:
        await log.append(ANN)
        with pytest.raises(BadConfig, match="set it to 'tenant' or 'user' beforehand"):
            await log.forget("acme")
    with opened(tmp_path, "tenant") as log, pytest.raises(BadConfig, match="set it to 'user' to forget a user alone"):
        await log.forget("acme", "ann")


async def test_encrypted_rows_can_be_read_when_encryption_was_switched_off(tmp_path: Path):
    with opened(tmp_path) as log:
        await log.append(ANN)
    with opened(tmp_path, "none") as log:
        await log.append(BOB)
        assert await collect(log) == [(1, ANN), (2, BOB)]


async def test_lost_keys_are_no_forgotten_ones(tmp_path: Path):
    with opened(tmp_path) as log:
        await log.append(ANN)
    (tmp_path / "log-keys.db").unlink()
    with (
        opened(tmp_path, "none") as log,
        pytest.raises(Corrupt, match="their keys are missing; restore the file of keys"),
    ):
        await collect(log)
    with opened(tmp_path) as log, pytest.raises(Corrupt, match="lacks key 1"):
        await collect(log)


async def test_a_value_cannot_be_put_in_anothers_place(tmp_path: Path, sql: Any):
    with opened(tmp_path) as log:
        await log.append(ANN, ANN_TOO)
    path = tmp_path / "log" / "0000000000000001.db"
    sql(path, "DROP TRIGGER turns_no_update")
    sql(path, "UPDATE turns SET text = (SELECT text FROM turns WHERE seq = 1) WHERE seq = 2")
    with opened(tmp_path) as log, pytest.raises(Corrupt, match="was changed"):
        await log.find(Turn, [("t1:0",)])


# ---------------------------------------------------------------- the master key


async def test_a_master_key_wraps_the_keys(tmp_path: Path):
    master = tmp_path / "elsewhere" / "master"
    master.parent.mkdir()
    master.write_text("correct horse battery staple, twice over\n")
    with opened(tmp_path, master_key=master) as log:
        await log.append(*ROWS)
        assert await collect(log) == list(enumerate(ROWS, 1))
    with opened(tmp_path, master_key=master) as log:
        assert await collect(log) == list(enumerate(ROWS, 1))
    with pytest.raises(BadConfig, match=r"wrapped with a master key; name its file in record\.master_key"):
        SqlLog.open(tmp_path / "log")
    master.write_text("another, which does not open anything at all")
    with pytest.raises(BadConfig, match="does not open the keys"), opened(tmp_path, master_key=master):
        pass


async def test_keys_that_were_made_before_the_master_key_are_wrapped_when_it_comes(tmp_path: Path):
    master = tmp_path / "master"
    master.write_bytes(bytes(range(100, 140)))
    with opened(tmp_path) as log:
        await log.append(ANN)
        ring = log._ring
        assert ring is not None
        (stored,) = ring._db.execute("SELECT secret FROM keys").fetchone()
        assert traces(tmp_path, stored[1:])
    with opened(tmp_path, master_key=master) as log:
        assert await collect(log) == [(1, ANN)]
        assert traces(tmp_path, stored[1:]) == []


@pytest.mark.parametrize("content", [b" \n" + bytes(range(100, 130)), bytes(range(100, 131)) + b"\t"])
def test_random_bytes_that_begin_or_end_like_white_space_are_a_master_key(tmp_path: Path, content: bytes):
    (tmp_path / "master").write_bytes(content)
    KeyRing(tmp_path / "keys.db", tmp_path / "master", lambda: 0.0).close()


@pytest.mark.parametrize("content", [None, b"short", b"0123456789abcdef0123456789".ljust(40)])
def test_a_master_key_that_is_missing_or_short_is_refused(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "master").write_bytes(content)
    with pytest.raises(BadConfig, match=r"record\.master_key"):
        KeyRing(tmp_path / "keys.db", tmp_path / "master", lambda: 0.0)


def test_two_processes_make_one_key_for_one_scope(tmp_path: Path):
    rings = [KeyRing(tmp_path / "keys.db", None, lambda: 0.0) for _ in range(2)]
    scopes = [Scope("acme", f"u{i}") for i in range(5)]
    first = rings[0].numbers(scopes[:3])
    second = rings[1].numbers(scopes)
    assert {scope: second[scope] for scope in scopes[:3]} == first
    sealed = rings[0].encrypt(first[scopes[0]], b"there", b"hello")
    assert rings[1].decrypt(first[scopes[0]], b"there", sealed) == b"hello"
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("encrypt", ["none", "tenant", "user"])
async def test_a_turn_that_must_not_be_kept_is_stored_without_its_words_or_refused(tmp_path: Path, encrypt: str):
    said = replace(BOB, parent=ANN.id, consent=Consent.NEVER)
    unkept, after = said.without_words(), turn(5, "ann", parent=said.id)
    with opened(tmp_path, encrypt) as log:
        with pytest.raises(BadRequest, match=r"without_words") as caught:
            await log.append(ANN, said)
        assert caught.value.field == "consent"
        assert log.newest() == 0
        await log.append(ANN, unkept, after)
        assert [row for _, row in await collect(log)] == [ANN, unkept, after]
    with opened(tmp_path, encrypt) as log:
        assert await log.find(Turn, [(said.id,)]) == [unkept]
        assert unkept.redacted
        assert traces(tmp_path, *written(said)) == []
    assert encrypt != "none" or traces(tmp_path, *written(ANN)), "the search finds what is kept"


@pytest.mark.parametrize("encrypt", ["user", "tenant"])
async def test_dials_that_a_person_set_lie_under_their_key_and_go_with_it(tmp_path: Path, encrypt: str):
    """Also where they are the person's first row, and none of their turns has made a key."""
    people = [("acme", "ann"), ("acme", "bob"), ("other", "ann")]
    rows = [
        DialSet(id=f"d{i}", tenant=tenant, user=user, at=1.0, by=SetBy.PERSON, dials={"outspoken": 0.25})
        for i, (tenant, user) in enumerate(people)
    ]
    anew = replace(rows[0], id="anew", dials={})
    with opened(tmp_path, encrypt) as log:
        await log.append(*rows)
        assert [row for _, row in await collect(log, kinds={DialSet})] == rows
        assert traces(tmp_path, b"outspoken") == []
        await log.forget("acme", "ann" if encrypt == "user" else None)
        await log.append(anew)
        left = [row.dials for _, row in await collect(log, kinds={DialSet}) if isinstance(row, DialSet)]
        assert left == [None, {"outspoken": 0.25} if encrypt == "user" else None, {"outspoken": 0.25}, {}]


# ---------------------------------------------------------------- the row that tells the folds


async def told_gone(log: SqlLog) -> list[tuple[str, str | None]]:
    return [(row.tenant, row.user) for _, row in await collect(log, 0, {Forgotten}) if isinstance(row, Forgotten)]


async def test_a_row_says_who_was_forgotten_once_for_each_key(tmp_path: Path):
    with opened(tmp_path, segment_rows=3) as log:
        await log.append(*ROWS)
        for _ in range(2):
            await log.forget("acme", "ann")
            await log.forget("acme", "nobody")
        assert await told_gone(log) == [("acme", "ann"), ("acme", "nobody")]
        await log.append(turn(7, "ann"))  # who comes back, and is forgotten again
        await log.forget("acme", "ann")
        assert await told_gone(log) == [("acme", "ann"), ("acme", "nobody"), ("acme", "ann")]
        for _ in range(2):
            await log.forget("acme")
        assert (await told_gone(log))[3:] == [("acme", None)]
        assert await log.note_forgotten() == 0
    with opened(tmp_path) as log:
        assert await log.note_forgotten() == 0


async def test_who_came_back_long_ago_is_not_told_forgotten_by_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An earlier version wrote no rows: they are written of those who stayed away."""
    with opened(tmp_path) as log:
        await log.append(*ROWS)

        async def none(*rows: Row) -> int:
            return 0

        monkeypatch.setattr(log, "append", none)
        await log.forget("acme", "ann")
        await log.forget("acme", "bob")
        monkeypatch.undo()
        await log.append(turn(7, "ann"))
    config = RecordConfig(encrypt="user")
    with SqlLog.open(tmp_path / "log", config=config, clock=lambda: wall_clock() + 2 * 86_400.0) as log:
        await log.note_forgotten()
        assert await told_gone(log) == [("acme", "bob")]


@pytest.mark.parametrize("by", ["forget", "note_forgotten"])
@pytest.mark.parametrize("who", ["ann", None])
async def test_a_call_that_was_killed_between_the_keys_and_the_row_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str | None, by: str
):
    """By the next call, or by any process that looks; two that look at once write one row."""
    with opened(tmp_path) as log, opened(tmp_path) as other:
        await log.append(*ROWS)
        assert await other.note_forgotten() == 0

        async def killed(*rows: Row) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(log, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            await log.forget("acme", who)
        monkeypatch.undo()
        assert (await told_gone(log), (await other.find(Turn, [(ANN.id,)]))[0].redacted) == ([], True)
        if by == "forget":
            await other.forget("other", "ann")
            assert ("other", "ann") in await told_gone(log)
        else:
            await asyncio.gather(other.note_forgotten(), log.note_forgotten())
        gone = [each for each in await told_gone(log) if each[0] == "acme"]
        assert gone == ([("acme", "ann")] if who else [("acme", "ann"), ("acme", "bob")])
