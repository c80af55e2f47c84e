"""Keys under another master key: all of them or none, whatever happens, and no trace of the old wrapping."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from record_rows import collect
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.core.errors import BadConfig, NotFound, Unavailable
from ostinato.core.records import Row, Turn
from ostinato.record.config import RecordConfig
from ostinato.record.keys import KeyRing, MasterKey, Scope, rekey
from ostinato.record.log import SqlLog
from ostinato.record.sqlite import connect
from ostinato.testing.records import a_turn

TURNS = [a_turn(f"t{i}:0", user=f"u{i}") for i in range(30)]
ROWS: list[tuple[int, Row]] = list(enumerate(TURNS, 1))


@contextmanager
def opened(run: Path, master: Path | None) -> Iterator[SqlLog]:
    config = RecordConfig(encrypt="user", master_key=master)  # type: ignore[arg-type]
    with SqlLog.open(run / "log", config=config) as log:
        yield log


@pytest.fixture
def masters(tmp_path: Path) -> tuple[Path, Path]:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 40)
    return tmp_path / "a", tmp_path / "b"


def stored(keys: Path) -> list[bytes]:
    with closing(connect(keys, write=False)) as db:
        return [secret for (secret,) in db.execute("SELECT secret FROM keys WHERE secret IS NOT NULL")]


def opens(run: Path, master: Path | None) -> bool:
    try:
        ring = KeyRing(run / "log-keys.db", master, lambda: 0.0)
    except BadConfig:
        return False
    ring.close()
    with closing(connect(run / "log-keys.db", write=False)) as db:
        unwrapping = MasterKey(run / "log-keys.db", master)
        for scope, secret in db.execute("SELECT scope, secret FROM keys WHERE secret IS NOT NULL"):
            unwrapping.unwrap(secret, scope)
    return True


@pytest.mark.parametrize("wrapped", [True, False])
async def test_every_row_is_read_with_the_new_master_key_alone(
    tmp_path: Path, masters: tuple[Path, Path], wrapped: bool
):
    old = masters[0] if wrapped else None
    keys = tmp_path / "run" / "log-keys.db"
    with opened(tmp_path / "run", old) as log:
        await log.append(*TURNS)
    before = stored(keys)
    assert rekey(keys, old, masters[1]) == 30
    assert not opens(tmp_path / "run", masters[0])
    with opened(tmp_path / "run", masters[1]) as log:
        assert await collect(log) == ROWS
    left = b"".join(path.read_bytes() for path in (tmp_path / "run").glob("log-keys.db*"))
    assert [secret for secret in before if secret in left or (secret[1:] in left and not wrapped)] == []
    after = stored(keys)
    assert rekey(keys, old, masters[1]) == rekey(keys, masters[1], masters[1]) == 30
    assert stored(keys) == after


async def test_what_was_forgotten_stays_so(tmp_path: Path, masters: tuple[Path, Path]):
    with opened(tmp_path / "run", masters[0]) as log:
        await log.append(*TURNS)
        await log.forget("default", "u7")
    assert rekey(tmp_path / "run" / "log-keys.db", *masters) == 29
    with opened(tmp_path / "run", masters[1]) as log:
        assert [row.id for _, row in await collect(log, 0, {Turn}) if row.redacted] == ["t7:0"]  # type: ignore[union-attr]


DIES = """
import os, signal, sys
from pathlib import Path

from ostinato.record import keys as module

point = int(sys.argv[4])
connect = module.connect

class Dying:
    def __init__(self, db):
        self.db, self.calls = db, 0

    def __getattr__(self, name):
        def call(*arguments):
            if self.calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            return getattr(self.db, name)(*arguments)
        return call

module.connect = lambda path, write: Dying(connect(path, write=write))
module.rekey(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""


async def test_a_kill_before_any_statement_leaves_exactly_one_master_key_and_the_next_call_completes(
    tmp_path: Path, masters: tuple[Path, Path]
):
    keys, found = tmp_path / "run" / "log-keys.db", set[tuple[bool, bool]]()
    with opened(tmp_path / "run", masters[0]) as log:
        await log.append(*TURNS)
    whole = keys.read_bytes()
    for point in range(20):
        keys.write_bytes(whole)
        command = [sys.executable, "-c", DIES, str(keys), *map(str, masters), str(point)]
        ended = (await asyncio.to_thread(FORK_SERVER.run, command, timeout=WHOLE_PROGRAM_S)).returncode
        with_old, with_new = opens(tmp_path / "run", masters[0]), opens(tmp_path / "run", masters[1])
        assert with_old != with_new
        found.add((with_old, with_new))
        rekey(keys, *masters)
        assert opens(tmp_path / "run", masters[1])
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert found == {(True, False), (False, True)}
    assert 5 < point < 19


async def test_a_kill_amid_the_writing_leaves_exactly_one_master_key(tmp_path: Path, masters: tuple[Path, Path]):
    """The transaction is on the disk in part, with its journal: the cache is too small for it."""
    keys = tmp_path / "run" / "log-keys.db"
    with opened(tmp_path / "run", masters[0]) as log:
        await log.append(*[a_turn(f"t{i}:0", user=f"u{i}") for i in range(600)])
    before = keys.read_bytes()
    spilling = DIES.replace("Dying(connect(path, write=write))", "Dying(spilled(connect(path, write=write)))").replace(
        "point = ", "def spilled(db):\n    db.execute('PRAGMA cache_size=2')\n    return db\n\npoint = "
    )
    command = [sys.executable, "-c", spilling, str(keys), *map(str, masters), "5"]  # before COMMIT
    ended = await asyncio.to_thread(FORK_SERVER.run, command, timeout=WHOLE_PROGRAM_S)
    assert ended.returncode == -signal.SIGKILL
    assert keys.read_bytes() != before
    assert opens(tmp_path / "run", masters[0])
    assert not opens(tmp_path / "run", masters[1])
    assert rekey(keys, *masters) == 600
    assert opens(tmp_path / "run", masters[1])


async def test_a_wrong_master_key_changes_nothing(tmp_path: Path, masters: tuple[Path, Path]):
    keys = tmp_path / "run" / "log-keys.db"
    with opened(tmp_path / "run", masters[0]) as log:
        await log.append(*TURNS)
    before = stored(keys)
    (tmp_path / "c").write_bytes(b"c" * 40)
    (tmp_path / "short").write_bytes(b"c" * 31)
    wrong: list[tuple[Path | None, Path, str]] = [
        (tmp_path / "c", masters[1], r"record\.master_key does not open the keys"),
        (None, masters[1], r"name its file in record\.master_key"),
        (tmp_path / "no", masters[1], r"record\.master_key: .* cannot be read"),
        (masters[0], tmp_path / "no", r"--new-master: .* cannot be read"),
        (masters[0], tmp_path / "short", "--new-master: .* holds 31 bytes"),
    ]
    for old, new, said in wrong:
        with pytest.raises(BadConfig, match=said):
            rekey(keys, old, new)
    assert stored(keys) == before
    with pytest.raises(NotFound, match="there are no keys"):
        rekey(tmp_path / "none.db", *masters)
    assert not (tmp_path / "none.db").exists()


async def test_a_process_that_missed_the_change_makes_no_key_under_the_old_master_key(
    tmp_path: Path, masters: tuple[Path, Path]
):
    keys = tmp_path / "keys.db"
    for old in (masters[0], None):
        ring = KeyRing(keys, old, lambda: 0.0)
        ring.numbers([Scope("acme")])
        rekey(keys, old, masters[1])
        with pytest.raises(BadConfig, match=r"record\.master_key"):
            ring.numbers([Scope("other")])
        ring.close()
        assert len(stored(keys)) == 1
        keys.unlink()


async def test_a_process_that_wraps_clear_keys_meanwhile_wraps_none_back(
    tmp_path: Path, masters: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """It has found clear keys, and the master key is changed before it can write."""
    keys = tmp_path / "keys.db"
    ring = KeyRing(keys, None, lambda: 0.0)
    ring.numbers([Scope("acme")])
    ring.close()
    retried, calls = KeyRing._retried, 0

    def rekeyed(self: KeyRing, act: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            rekey(keys, None, masters[1])
        return retried(self, act)

    monkeypatch.setattr(KeyRing, "_retried", rekeyed)
    with pytest.raises(BadConfig, match=r"record\.master_key does not open the keys"):
        KeyRing(keys, masters[0], lambda: 0.0)
    assert calls == 1
    KeyRing(keys, masters[1], lambda: 0.0).close()


async def test_a_file_in_use_is_said(tmp_path: Path, masters: tuple[Path, Path]):
    keys = tmp_path / "keys.db"
    ring = KeyRing(keys, None, lambda: 0.0)
    ring.numbers([Scope("acme")])
    other: Any = connect(keys, write=True)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="another process uses"):
        rekey(keys, None, masters[1])
    other.close()
    ring.close()
