"""A log on Postgres where names, settings of the server and its administrators are hostile."""

import asyncio
import contextlib
import os
import subprocess
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from pydantic import ValidationError
from tests.contract.test_log import BATCH, ROWS, SIGNAL, TURN, read
from tests.fakes.postgres_server import started
from tests.unit.record.postgres.test_postgres_log import DAY, signals, sql

from ostinato.core.errors import BadConfig, Conflict, StorageFull, Unavailable
from ostinato.core.records import ParsedCall, Signal, Turn
from ostinato.record.codec.kinds import TURNS
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.schema import LAYOUT
from ostinato.record.postgres.server import LogServer, digest_of


def through(config, **parameters):
    """The same log, over connections that begin with other settings."""
    told = "%20".join(f"-c%20{name}%3D{value}" for name, value in parameters.items())
    return config.model_copy(update={"url": f"{config.url}&options={told}"})


def test_a_server_that_refuses_a_worker_which_it_had_let_in_is_away(in_postgres, monkeypatch):
    server = LogServer.of(in_postgres())
    assert server.ask(lambda connection: 1) == 1
    server = replace(server, wait_s=0.5)

    def refuses(**_):
        raise psycopg.OperationalError("FATAL:  no pg_hba.conf entry for host")

    monkeypatch.setattr(psycopg, "connect", refuses)
    with pytest.raises(Unavailable, match=r"no pg_hba\.conf entry"):
        server.ask(lambda connection: 1)
    with pytest.raises(BadConfig, match=r"refuses the login: .*no pg_hba\.conf entry"):
        replace(server, name="a server that was never reached").ask(lambda connection: 1)


# ---------------------------------------------------------------- names


async def test_names_that_hold_the_sign_between_names_stay_apart(in_postgres):
    one = replace(SIGNAL, tenant="a\x00b", id="c")
    two = replace(SIGNAL, tenant="a", id="b\x00c")
    with PostgresLog.open(in_postgres()) as log:
        await log.append(one)
        assert await log.append(two) == 2
        assert await log.append(one, two) == 2
        assert await log.find(Signal, [("a", "b\x00c"), ("a\x00b", "c")]) == [two, one]


def test_an_identitys_hash_is_stored_and_never_changes():
    hashes = {name: str(digest_of(TURNS, (name,))) for name in ("a", "é", "a\x00é")}
    assert hashes == {
        "a": "b77ae0e4-9132-cb90-96f9-3d17d34cf893",
        "é": "1e8c8f91-0271-ad72-eed6-4259ac121b38",
        "a\x00é": "82bdb388-4ce8-0194-480c-7e8f869e14a1",
    }


@pytest.mark.parametrize("name", ["\x00", "'; DROP TABLE log; --", "%s{}$1", "t" * 2**20, "🎵" * 2**18])
async def test_a_tenant_or_a_user_of_any_name_is_kept_as_it_is(in_postgres, name):
    turn = replace(TURN, id=f"turn {name}", tenant=name, user=name, episode=name)
    signal = replace(SIGNAL, id=name, tenant=name, turn=turn.id, comment=name)
    with PostgresLog.open(in_postgres(append_s=60)) as log:
        assert await log.append(turn, signal) == 2
        assert await log.append(turn, signal) == 2
        assert [row for _, row in await read(log)] == [turn, signal]
        assert await log.find(Turn, [(turn.id,)]) == [turn]
        assert await log.find(Signal, [(name, name)]) == [signal]


@pytest.mark.parametrize(
    "name",
    [
        "",
        'x"; DROP SCHEMA public; --',
        "a-b",
        "Ä",
        "A",
        "a\n",
        "a.b",
        "a\x00",
        "pg_catalog",
        "pg_temp",
        "pg_",
        "a" * 64,
    ],
)
def test_a_namespace_is_a_plain_name_and_none_of_the_servers_own(name):
    with pytest.raises(ValidationError, match="namespace"):
        RecordConfig(namespace=name)


@pytest.mark.parametrize("name", ["p", "pg", "pga_x", "page", "_x9", "select", "user", "a" * 63])
async def test_words_of_sql_are_names_like_others(in_postgres, name):
    config = in_postgres().model_copy(update={"namespace": name})
    with PostgresLog.open(config) as log:
        assert await log.append(TURN) == 1
        assert await read(log) == [(1, TURN)]


def test_the_servers_own_tables_are_no_log(in_postgres):
    with pytest.raises(BadConfig, match=r"not a log of Ostinato.*record\.namespace"):
        PostgresLog.open(in_postgres().model_copy(update={"namespace": "information_schema"}))


# ---------------------------------------------------------------- settings of the server


@pytest.mark.parametrize("level", ["serializable", "repeatable\\%20read"])
async def test_places_are_given_once_whatever_isolation_the_server_begins_with(in_postgres, level):
    config = through(in_postgres(append_s=60), default_transaction_isolation=level)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(PostgresLog.open(config)) for _ in range(4)]
        rows = signals(160)
        answers = await asyncio.gather(*(logs[i % 4].append(row) for i, row in enumerate(rows)), return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, Exception)] == []
        found = await read(logs[0])
    assert [place for place, _ in found] == list(range(1, 161))
    assert sorted(row.id for _, row in found) == sorted(row.id for row in rows)


async def test_a_database_without_an_encoding(in_postgres, postgres_server):
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE DATABASE raw ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    config = in_postgres(segment_rows=5000)
    config = config.model_copy(update={"url": config.url.replace("/postgres?", "/raw?")})
    alike = [replace(SIGNAL, id=f"s{i}", comment="the same words, naïve 🎵, again and again " * 3) for i in range(2000)]
    with PostgresLog.open(config) as log:
        await log.append(*ROWS)
        for start in range(0, 2000, 250):
            await log.append(*alike[start : start + 250])
        with PostgresLog.open(config) as other, closing(PostgresRoles(config).take("train")):
            assert [row for _, row in await read(other)] == [*ROWS, *alike]


async def test_a_transaction_that_never_ends_stops_nobody(in_postgres, postgres_server):
    """Neither in another database of the cluster nor in the log's own."""
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE DATABASE neighbour")
    now, config = [0.0], in_postgres(segment_rows=2, retain_days=1, append_s=60)
    with contextlib.ExitStack() as stack:
        for url in (config.url, config.url.replace("/postgres?", "/neighbour?")):
            open_ = stack.enter_context(psycopg.connect(url))
            open_.execute("SELECT pg_current_xact_id()")
        log = stack.enter_context(PostgresLog.open(config, lambda: now[0]))
        await log.append(TURN, SIGNAL)
        assert await log.append(BATCH) == 3
        assert [row for _, row in await read(log)] == [TURN, SIGNAL, BATCH]
        now[0] = 3 * DAY
        await log.append(*signals(2, 50))
        assert await log.drop_old(now[0], keep_after=3) == 1
        with closing(PostgresRoles(config).take("train")) as holder:
            holder.check()


# ---------------------------------------------------------------- its administrators


async def test_a_user_without_a_right_is_told_which(in_postgres, postgres_server):
    config = in_postgres()
    with PostgresLog.open(config) as log:
        await log.append(TURN)
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE ROLE guest LOGIN")
    guest = config.model_copy(update={"url": config.url.replace(f"//{postgres_server.owner}@", "//guest@")})
    with pytest.raises(BadConfig, match=r"permission denied.*grant the user of record\.url USAGE"):
        PostgresLog.open(guest)
    sql(config, f"GRANT USAGE ON SCHEMA {config.namespace} TO guest")
    with pytest.raises(BadConfig, match="permission denied"):
        PostgresLog.open(guest)
    sql(config, f"GRANT SELECT ON ALL TABLES IN SCHEMA {config.namespace} TO guest")
    with PostgresLog.open(guest) as log:
        assert await read(log) == [(1, TURN)]
        with pytest.raises(BadConfig, match="permission denied"):
            await log.append(SIGNAL)
        with pytest.raises(BadConfig, match="permission denied"):
            PostgresRoles(guest).take("train")
        sql(config, f"GRANT ALL ON ALL TABLES IN SCHEMA {config.namespace} TO guest")
        assert await log.append(SIGNAL) == 2
    with pytest.raises(BadConfig, match="CREATE SCHEMA"):
        PostgresLog.open(guest.model_copy(update={"namespace": "guests_own"}))


async def test_a_log_of_the_version_before_is_brought_up_to_this_one(in_postgres):
    config = in_postgres()
    with PostgresLog.open(config) as log:
        await log.append(TURN)
    sql(config, "DROP TABLE leases")
    sql(config, "ALTER TABLE segments DROP COLUMN layout")
    sql(config, "UPDATE log SET layout = 1")
    opened = await asyncio.gather(*(asyncio.to_thread(PostgresLog.open, config) for _ in range(4)))
    assert sql(config, "SELECT layout FROM log") == [(LAYOUT,)]
    for log in opened:
        assert await log.append(SIGNAL) == 2
        log.close()
    with closing(PostgresRoles(config).take("train")):
        pass


async def test_tables_of_the_version_before_are_changed_by_their_owner_alone(in_postgres, postgres_server):
    config = in_postgres()
    with PostgresLog.open(config) as log:
        await log.append(TURN)
    sql(config, "ALTER TABLE segments DROP COLUMN layout")
    sql(config, "UPDATE log SET layout = 2")
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE ROLE tenant LOGIN")
    sql(config, f"GRANT ALL ON SCHEMA {config.namespace} TO tenant")
    sql(config, f"GRANT ALL ON ALL TABLES IN SCHEMA {config.namespace} TO tenant")
    tenant = config.model_copy(update={"url": config.url.replace(f"//{postgres_server.owner}@", "//tenant@")})
    remedy = r"layout 2 and cannot .*must be owner.*start once as the tables' owner, or .*ALTER TABLE \.\.\. OWNER TO"
    with pytest.raises(BadConfig, match=remedy):
        PostgresLog.open(tenant)
    assert sql(config, "SELECT layout FROM log") == [(2,)]
    sql(config, "ALTER TABLE segments OWNER TO tenant")
    with PostgresLog.open(tenant) as log:
        assert await read(log) == [(1, replace(TURN, calls=None))]
    assert sql(config, "SELECT layout FROM log") == [(LAYOUT,)]


async def test_tables_of_the_version_before_that_another_session_holds_are_changed_once_it_has_ended(in_postgres):
    config = in_postgres(append_s=2)
    PostgresLog.open(config).close()
    sql(config, "ALTER TABLE segments DROP COLUMN layout")
    sql(config, "UPDATE log SET layout = 2")
    with LogServer.of(in_postgres(append_s=60)).dial() as holder, holder.transaction():
        holder.execute("LOCK TABLE segments IN ACCESS SHARE MODE")  # as pg_dump does
        with pytest.raises(Unavailable, match=r"lock timeout.*another session \(a pg_dump, say\) holds a table"):
            PostgresLog.open(config)
    with PostgresLog.open(config) as log:
        assert await log.append(TURN) == 1


@pytest.mark.parametrize("rows", [1, 0])
async def test_of_turns_from_before_calls_were_stored_it_is_not_known_which_they_made(in_postgres, rows):
    """Older rows stay in their segment; the version that stores calls begins another, or takes over one without rows."""
    config = in_postgres()
    called = replace(TURN, id="c:0", calls=(ParsedCall(name="ls", start=0, end=1),))
    with PostgresLog.open(config) as log:
        await log.append(*[TURN][:rows])
    sql(config, "ALTER TABLE segments DROP COLUMN layout")
    sql(config, "UPDATE log SET layout = 2")
    old = [replace(TURN, calls=None)][:rows]
    with PostgresLog.open(config) as log, PostgresLog.open(config) as reads:
        assert [row for _, row in await read(reads)] == old
        await log.append(replace(TURN, id="n:0"), called)
        new = [replace(TURN, id="n:0"), called]
        assert [row for _, row in await read(reads)] == [*old, *new]
        assert await reads.find(Turn, [("n:0",), ("c:0",)]) == new
    assert sql(config, "SELECT layout FROM segments ORDER BY first") == [(2,), (LAYOUT,)][1 - rows :]


async def test_a_process_that_a_newer_version_overtook_writes_no_more(in_postgres):
    config = in_postgres()
    with PostgresLog.open(config) as log:
        await log.append(TURN)
        sql(config, "UPDATE log SET layout = layout + 1")
        with pytest.raises(BadConfig, match=f"has layout {LAYOUT + 1}, this Ostinato reads {LAYOUT}"):
            await log.append(SIGNAL)


async def test_the_same_turn_of_another_gateway_is_refused_and_the_first_one_kept(in_postgres):
    other = replace(TURN, sampled_ids=(7, 8), text="another answer")
    with PostgresLog.open(in_postgres()) as here, PostgresLog.open(in_postgres()) as there:
        answers = await asyncio.gather(here.append(TURN), there.append(other), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert [type(each) for each in refused] == [Conflict]
        kept = other if answers[0] is refused[0] else TURN
        assert await read(here) == [(1, kept)]
        assert await here.append(kept) == await there.append(kept, SIGNAL) - 1 == 1
        lost = await asyncio.gather(
            there.append(replace(TURN, id="n")), there.append(replace(other, id="n")), return_exceptions=True
        )
        assert [type(each) for each in lost if isinstance(each, Exception)] == [Conflict]


# ---------------------------------------------------------------- a disk that is full


def mounted(place, size, *options):
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "none", str(place)], check=False
    )


@pytest.fixture
def tiny_disk():
    """A server, and a tablespace of it on a file system of 12 MB that can be made larger."""
    with started() as server, contextlib.ExitStack() as stack:
        place = server.directory / "tiny"
        place.mkdir()
        if os.getuid() != 0 or mounted(place, "12m").returncode:
            pytest.skip("a file system of its own needs root and CAP_SYS_ADMIN")
        stack.callback(subprocess.run, ["umount", "-l", str(place)], check=False)
        owner = server.directory.stat()
        os.chown(place, owner.st_uid, owner.st_gid)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE TABLESPACE tiny LOCATION '{place}'")
        yield server, place


async def test_on_a_disk_that_is_really_full_nothing_acknowledged_is_lost_and_room_mends_it(tiny_disk):
    server, place = tiny_disk
    config = through(RecordConfig(url=server.url, append_s=60), default_tablespace="tiny")
    acked, refused = [], 0
    with PostgresLog.open(config) as log:
        for number in range(40):
            row = replace(SIGNAL, id=f"s{number}", comment=os.urandom(400_000).hex())
            try:
                await log.append(row)
                acked.append(row)
            except StorageFull:
                refused += 1
                if refused == 2:
                    break
        assert refused == 2
        assert len(acked) > 3
        assert [row for _, row in await read(log)] == acked
        assert mounted(place, "64m", "remount").returncode == 0
        assert await log.append(row) == len(acked) + 1
        assert [row for _, row in await read(log)] == [*acked, row]
