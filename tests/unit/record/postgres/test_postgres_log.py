"""What the log on Postgres promises beyond the contract: segments, retention, other processes, and whatever befalls its server."""

import asyncio
import contextlib
from dataclasses import replace

import psycopg
import pytest
from psycopg.pq import PipelineStatus
from tests.contract.test_log import BASIS, BATCH, DIALS, EVENT, KINDS, ROWS, SIGNAL, TURN, read
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.errors import BadConfig, BadRequest, StorageFull, Unavailable
from ostinato.core.records import Batch, Signal, Source, SteeringBasis, Turn
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import LogServer

DAY = 86_400.0


def signals(count, start=0):
    return [replace(SIGNAL, id=f"s{i}") for i in range(start, start + count)]


def sql(config, statement, values=()):
    """Run a statement on a connection that goes around the log."""
    with LogServer.of(config).dial() as connection:
        cursor = connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


class Breaking:
    """A connection that fails once at the statements that begin with a word; `after`: once they were carried out."""

    def __init__(self, connection, word, *, after):
        self._connection, self._word, self._after = connection, word, after
        self.broken = self._due = False

    def __getattr__(self, name):
        return getattr(self._connection, name)

    @contextlib.contextmanager
    def pipeline(self):
        with self._connection.pipeline():
            yield
        if self._due:
            self._break()

    def execute(self, statement, *rest, **options):
        text = statement if isinstance(statement, str) else statement.as_string()
        hit = not self.broken and text.startswith(self._word)
        if hit and not self._after:
            self._break()
        answer = self._connection.execute(statement, *rest, **options)
        if hit:
            self._due = self._connection.info.pipeline_status != PipelineStatus.OFF  # carried out when that ends
            if not self._due:
                self._break()
        return answer

    def _break(self):
        self.broken = True
        self._connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")


# ---------------------------------------------------------------- segments


async def test_rows_are_read_found_and_counted_across_segments(in_postgres):
    config = in_postgres(segment_rows=3)
    with PostgresLog.open(config) as log:
        for row in ROWS:
            await log.append(row)
        end = await log.append(*signals(5))
        with PostgresLog.open(config) as other:
            found = await read(other)
            assert [row for _, row in found] == [*ROWS, *signals(5)]
            assert [seq for seq, _ in found] == list(range(1, end + 1))
            assert await other.find(Turn, [("r:0",)]) == [TURN]
            assert await other.places(Batch, [(1,)]) == [7]
            assert other.tail(2, {Turn, Batch}) == [(1, TURN), (7, BATCH)]
            assert await other.before_last(6, Signal) == 2
            assert await log.append(*ROWS) == end
    assert sql(config, "SELECT count(*) FROM segments")[0][0] >= 3


async def test_turns_lean_on_each_other_and_texts_are_spelt_by_tokens_as_in_sqlite(in_postgres):
    first = replace(TURN, sampled_ids=tuple(range(100, 150)), logprobs=(-0.5,) * 50, text="x" * 50)
    first = replace(first, spans=(replace(TURN.spans[0], tokens=50),))
    after = replace(first, id="r:1", parent="r:0", prompt_ids=(*first.prompt_ids, *first.sampled_ids))
    config = in_postgres()
    with PostgresLog.open(config) as log:
        log.derive_text(lambda _: "x")
        await log.append(first)
        with PostgresLog.open(config) as other:  # which has not seen the first being written
            other.derive_text(lambda _: "x")
            await other.append(after)
        assert [row for _, row in await read(log)] == [first, after]
    (one, spelt, said), (two, *_) = sql(
        config, "SELECT length(tokens), spelt, said FROM rows_0000000000000001 ORDER BY seq"
    )
    assert two < one
    assert (spelt, said) == (None, None)


async def test_many_alike_rows_train_dictionaries_that_other_processes_read(in_postgres):
    rows = [replace(SIGNAL, id=f"s{i}", comment="the same words again and again " * 3) for i in range(4000)]
    config = in_postgres()
    with PostgresLog.open(config) as log:
        for start in range(0, 4000, 250):
            await log.append(*rows[start : start + 250])
        for _ in range(200):
            await log.append(replace(SIGNAL, id=f"t{_}"))
            if sql(config, "SELECT count(*) FROM dictionaries")[0][0]:
                break
        last = replace(SIGNAL, id="last", comment=rows[0].comment)
        await log.append(last)
    with PostgresLog.open(config) as other:
        assert [row for _, row in other.tail(1, {Signal})] == [last]
        assert [row for _, row in await read(other)][:4000] == rows


async def test_old_segments_go_and_what_stays_for_ever_stays_in_its_place(in_postgres):
    now = [0.0]
    config = in_postgres(segment_rows=4, retain_days=1)
    with PostgresLog.open(config, lambda: now[0]) as log, PostgresLog.open(config) as reader:
        await log.append(TURN, BATCH, EVENT, SIGNAL)
        await log.append(*signals(4, 10))
        half = [item async for item in reader.read(0, KINDS)]
        now[0] = 3 * DAY
        end = await log.append(*signals(2, 20))
        assert await log.drop_old(now[0], keep_after=3) == 0
        assert await log.drop_old(now[0], keep_after=7) == 1
        assert await reader.horizon() == 4
        assert await read(reader) == [
            (2, BATCH),
            (3, EVENT),
            *half[4:],
            (9, signals(1, 20)[0]),
            (10, signals(1, 21)[0]),
        ]
        assert await reader.find(Turn, [("r:0",)]) == []
        assert await reader.find(Batch, [(1,)]) == [BATCH]
        assert await reader.places(Batch, [(1,)]) == [2]
        assert await reader.before_last(1, Batch) == 1
        assert reader.tail(1, {Batch}) == [(2, BATCH)]
        assert await log.append(BATCH) == end
        assert await log.append(TURN) == end + 1  # nobody knows it any more
        now[0] = 5 * DAY
        assert await log.drop_old(now[0], keep_after=8) == 1
    assert sql(config, "SELECT count(*) FROM kept") == [(2,)]
    assert sql(config, "SELECT count(*) FROM identities WHERE seq <= 8") == [(2,)]


async def test_a_basis_outlives_the_turns_that_name_it(in_postgres):
    now = [0.0]
    with PostgresLog.open(in_postgres(segment_rows=4, retain_days=1), lambda: now[0]) as log:
        await log.append(BASIS, TURN, SIGNAL, EVENT)
        end = await log.append(replace(TURN, id="later:0"))  # which closes the first segment
        now[0] = 3 * DAY
        assert await log.drop_old(now[0], keep_after=9) == 1
        assert await log.find(SteeringBasis, [(BASIS.hash,)]) == [BASIS]
        assert BASIS.basis() == DIALS
        assert await log.append(BASIS) == end


async def test_an_idle_logs_last_segment_is_closed_and_dropped_when_its_time_has_come(in_postgres):
    now = [0.0]
    with PostgresLog.open(in_postgres(retain_days=1), lambda: now[0]) as log:
        await log.append(TURN)
        now[0] = 2 * DAY
        assert await log.drop_old(now[0], keep_after=1) == 0
        now[0] = 4 * DAY
        assert await log.drop_old(now[0], keep_after=1) == 1
        assert await read(log) == []
        assert log.newest() == 1
        assert await log.append(SIGNAL) == 2


async def test_a_segment_that_somebody_reads_is_left_for_the_next_call(in_postgres):
    now = [0.0]
    config = in_postgres(segment_rows=1, retain_days=1)
    with PostgresLog.open(config, lambda: now[0]) as log:
        await log.append(TURN)
        await log.append(SIGNAL)
        now[0] = 3 * DAY
        with LogServer.of(config).dial() as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM rows_0000000000000001")
            assert await log.drop_old(now[0], keep_after=1) == 0
            assert await log.find(Turn, [("r:0",)]) == [TURN]
        assert await log.drop_old(now[0], keep_after=1) == 1


@pytest.mark.parametrize("statement", ["UPDATE rows_0000000000000001 SET seq = 9", "DELETE FROM rows_0000000000000001"])
async def test_rows_cannot_be_changed(in_postgres, statement):
    with PostgresLog.open(in_postgres()) as log:
        await log.append(TURN)
        for each in (statement, "TRUNCATE rows_0000000000000001"):
            with pytest.raises(psycopg.Error, match="append-only"):
                sql(in_postgres(), each)
        assert await read(log) == [(1, TURN)]


# ---------------------------------------------------------------- whatever befalls it


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("word", ["BEGIN", "INSERT", "COMMIT"])
async def test_a_connection_that_dies_at_any_statement_loses_and_doubles_nothing(in_postgres, monkeypatch, word, after):
    config = in_postgres(append_s=30)
    dial, broken = LogServer.dial, []

    def dialled(server):
        connection = Breaking(dial(server), word, after=after)
        connection.broken = any(each.broken for each in broken)
        broken.append(connection)
        return connection

    with PostgresLog.open(config) as log:
        await log.append(SIGNAL)
        log._appender._leave()
        monkeypatch.setattr(LogServer, "dial", dialled)
        assert await log.append(TURN, BATCH) == 3
        assert any(each.broken for each in broken)
        monkeypatch.undo()
        assert await read(log) == [(1, SIGNAL), (2, TURN), (3, BATCH)]


@pytest.mark.parametrize(
    ("code", "kept"),
    [("40001", True), ("40P01", True), ("57P01", True), ("25006", True), ("25P03", True), ("53100", False)],
)
async def test_what_the_server_answers_once(in_postgres, code, kept):
    """A trigger of the test's own raises the code at one insert; what passes is tried again, a full disk is told."""
    config = in_postgres(append_s=30)
    with PostgresLog.open(config) as log:
        await log.append(SIGNAL)
        sql(config, "CREATE SEQUENCE times")  # what it counts is not rolled back
        sql(
            config,
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN IF nextval('times') = 1 THEN "
            f"RAISE EXCEPTION 'planted' USING ERRCODE = '{code}'; END IF; RETURN NEW; END$$",
        )
        sql(config, "CREATE TRIGGER planted BEFORE INSERT ON identities FOR EACH ROW EXECUTE FUNCTION fail()")
        if kept:
            assert await log.append(TURN) == 2
        else:
            with pytest.raises(StorageFull, match="planted"):
                await log.append(TURN)
            assert await read(log) == [(1, SIGNAL)]
            assert await log.append(TURN) == 2  # there is room again
        assert await read(log) == [(1, SIGNAL), (2, TURN)]


async def test_on_a_full_disk_what_fits_is_kept_and_the_others_are_told(in_postgres):
    config = in_postgres(append_s=30)
    with PostgresLog.open(config) as log:
        await log.append(SIGNAL)
        sql(
            config,
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN IF length(NEW.body) > 500 THEN "
            "RAISE EXCEPTION 'no space left' USING ERRCODE = '53100'; END IF; RETURN NEW; END$$",
        )
        sql(
            config, "CREATE TRIGGER planted BEFORE INSERT ON rows_0000000000000001 FOR EACH ROW EXECUTE FUNCTION fail()"
        )
        big = replace(BATCH, turns=tuple(f"{i * 7919:x}" for i in range(900)))
        small = signals(20, 100)
        answers = await asyncio.gather(log.append(big), *map(log.append, small), return_exceptions=True)
        assert isinstance(answers[0], StorageFull)
        assert all(isinstance(answer, int) for answer in answers[1:])
        assert [row for _, row in await read(log)] == [SIGNAL, *small]


async def test_who_holds_the_lock_for_long_makes_callers_unavailable_and_what_they_sent_may_be_sent_again(in_postgres):
    config = in_postgres(append_s=2)
    with PostgresLog.open(in_postgres()) as log, PostgresLog.open(config) as hasty:
        await log.append(SIGNAL)
        with LogServer.of(in_postgres(append_s=60)).dial() as holder, holder.transaction():
            holder.execute("SELECT pg_advisory_xact_lock(%s)", (LogServer.of(config).lock,))
            with pytest.raises(Unavailable, match="in time"):
                await hasty.append(TURN)
        assert await log.append(TURN) == 2
        assert await read(log) == [(1, SIGNAL), (2, TURN)]


async def test_clients_that_an_administrator_throws_out_go_on(in_postgres):
    config = in_postgres(append_s=30)
    thrown = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name = 'ostinato'"
    with PostgresLog.open(config) as log:
        await log.append(SIGNAL)
        assert await read(log) == [(1, SIGNAL)]
        sql(config, thrown)
        assert await log.append(TURN) == 2
        sql(config, thrown)
        assert await read(log) == [(1, SIGNAL), (2, TURN)]


# ---------------------------------------------------------------- what cannot be opened


def test_a_schema_of_another_program(in_postgres):
    config = in_postgres()
    sql(config, f"CREATE SCHEMA {config.namespace}")
    sql(config, "CREATE TABLE people (name text)")
    with pytest.raises(BadConfig, match=r"not a log of Ostinato.*record\.namespace"):
        PostgresLog.open(config)


def test_a_log_of_another_version(in_postgres):
    PostgresLog.open(in_postgres()).close()
    sql(in_postgres(), "UPDATE log SET layout = 7")
    with pytest.raises(BadConfig, match="has layout 7, this Ostinato reads 5"):
        PostgresLog.open(in_postgres())


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("postgresql://nobody@/absent?host={dir}", BadConfig, "does not exist"),
        ("postgresql://stranger@/postgres?host={dir}", BadConfig, "does not exist"),
        ("postgresql://nobody@/postgres?host={dir}/absent", Unavailable, "whether its server runs"),
        ("postgresql://nobody:pa55word@/postgres?host={dir}", BadConfig, r"record\.password_env"),
        ("mysql://nobody:pa55word@somewhere", BadConfig, "not a Postgres URL"),
    ],
)
def test_a_url_that_leads_nowhere(postgres_server, url, error, said):
    wait_s = (
        0.5 if error is Unavailable else WHOLE_PROGRAM_S
    )  # who is answered is told at once, on a busy machine as soon as it can
    config = RecordConfig(url=url.format(dir=postgres_server.directory), append_s=wait_s)
    with pytest.raises(error, match=said) as found:
        PostgresLog.open(config)
    assert "pa55word" not in str(found.value)


def test_the_password_comes_from_the_environment_and_is_told_to_nobody():
    config = RecordConfig(url="postgresql://ann@db.example/loop?sslmode=verify-full", password_env="LOOP_PASSWORD")
    server = LogServer.of(config, {"LOOP_PASSWORD": "pa55word"})
    assert server.parameters["password"] == "pa55word"
    assert "pa55word" not in server.name + str(config) + repr(server)
    with pytest.raises(BadConfig, match="LOOP_PASSWORD, which is not set: export it"):
        LogServer.of(config, {})


def test_encryption_is_refused_rather_than_left_out(in_postgres):
    with pytest.raises(BadConfig, match=r"record\.encrypt"):
        PostgresLog.open(in_postgres(encrypt=Encrypt.USER))


async def test_a_row_that_cannot_be_stored_leaves_its_neighbours_alone(in_postgres):
    with PostgresLog.open(in_postgres()) as log:
        bad = replace(SIGNAL, id="bad", value=float("nan"))
        answers = await asyncio.gather(log.append(bad), log.append(TURN), return_exceptions=True)
        assert isinstance(answers[0], BadRequest)
        assert await read(log) == [(1, TURN)]
        odd = replace(SIGNAL, id="\x00", source=Source.LLM, comment="\x00", correction="")
        await log.append(odd)
        assert await log.find(Signal, [("default", "\x00")]) == [odd]
