"""`ostinato log backup`, `restore` and `rekey`: what they refuse, what they say, and that nothing of another log stays in the run."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from ostinato.app.storage import Home, open_folds, open_log
from ostinato.config import Config, load
from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound
from ostinato.core.records import Batch, PolicyVersion, Turn
from ostinato.launch.commands import up
from ostinato.launch.commands.log import backup, rekey, restore
from ostinato.record.backup import KEYS
from ostinato.record.roles import hold
from ostinato.run_directory import MARK
from ostinato.status import summary
from ostinato.testing.records import a_turn

V1 = PolicyVersion(number=1, hash="a")


class Said(io.StringIO):
    """A console's output."""

    @property
    def console(self) -> Console:
        return Console(file=self, width=400)


@pytest.fixture
def said() -> Said:
    return Said()


def of(root: Path, *more: str) -> Config:
    return load(None, [f"run.directory='{root}'", *more])


async def write(config: Config, users: Sequence[str]) -> None:
    with open_log(config) as log:
        await log.append(*[a_turn(f"{user}:{i}", user=user) for i, user in enumerate(users)])


async def test_a_backup_is_restored_and_each_act_leaves_a_line(tmp_path: Path, said: Said):
    (tmp_path / "master").write_bytes(b"m" * 40)
    (tmp_path / "next").write_bytes(b"n" * 40)
    config = of(tmp_path / "run", "record.encrypt='user'", f"record.master_key='{tmp_path / 'master'}'")
    await write(config, ["ann", "bob"])
    backup(config, tmp_path / "kept", said.console)
    assert "backed up rows 1 to 2" in said.getvalue()
    assert f"the master key is not in it: keep a copy of {tmp_path / 'master'}" in said.getvalue()
    with open_log(config) as log:
        await log.forget("default", "ann")
    with pytest.raises(Conflict, match="there is a log"):
        restore(config, tmp_path / "kept", None, said.console)
    Home(tmp_path / "run").log.rename(tmp_path / "lost")
    restore(config, tmp_path / "kept", None, said.console)
    assert "1 keys that were forgotten since stay destroyed" in said.getvalue()
    rekey(config, tmp_path / "next", said.console)
    assert f'set record.master_key = "{tmp_path / "next"}" before the run starts again' in said.getvalue()
    config = of(tmp_path / "run", "record.encrypt='user'", f"record.master_key='{tmp_path / 'next'}'")
    with open_log(config) as log:
        found = await log.find(Turn, [("ann:0",), ("bob:1",)])
        assert [turn.redacted for turn in found] == [True, False]
    lines = [json.loads(line) for line in Home(tmp_path / "run").audit.read_text().splitlines() if line]
    assert [(line["kind"], line["result"]) for line in lines] == [
        ("log backup", "done"),
        ("log restore", Conflict.code),
        ("log restore", "done"),
        ("log rekey", "done"),
    ]


async def test_a_backup_from_before_a_rekey_is_restored_with_the_old_master_key(tmp_path: Path, said: Said):
    (tmp_path / "master").write_bytes(b"m" * 40)
    (tmp_path / "next").write_bytes(b"n" * 40)
    before, since = (
        of(tmp_path / "run", "record.encrypt='user'", f"record.master_key='{tmp_path / name}'")
        for name in ("master", "next")
    )
    await write(before, ["ann", "bob"])
    backup(before, tmp_path / "kept", said.console)
    rekey(before, tmp_path / "next", said.console)
    Home(tmp_path / "run").log.rename(tmp_path / "lost")
    with pytest.raises(BadConfig, match=r"name the old one's file with --old-master"):
        restore(since, tmp_path / "kept", None, said.console)
    restore(since, tmp_path / "kept", None, said.console, tmp_path / "master")
    with open_log(since) as log:
        assert [turn.user for turn in await log.find(Turn, [("ann:0",), ("bob:1",)])] == ["ann", "bob"]


async def test_keys_in_clear_are_said(tmp_path: Path, said: Said):
    config = of(tmp_path / "run", "record.encrypt='tenant'")
    await write(config, ["ann"])
    backup(config, tmp_path / "kept", said.console)
    assert f"{KEYS} in it is not wrapped with a master key" in said.getvalue()


async def test_nothing_that_was_derived_from_another_log_stays(tmp_path: Path, said: Said):
    """A summary of a longer log would count its rows twice once the restored log has grown beyond it."""
    config = of(tmp_path / "run")
    place = Home(tmp_path / "run")
    await write(config, ["ann"])
    backup(config, tmp_path / "kept", said.console)
    await write(config, ["ann", "bob", "cat"])
    with open_log(config) as log:
        folds = open_folds(config)
        seen, _ = await summary.summarise(log, folds, log.newest())
        await summary.keep(seen, folds)
    (place.folds / "page.sqlite").touch()
    place.log.rename(tmp_path / "lost")
    restore(config, tmp_path / "kept", None, said.console)
    assert not place.folds.exists()
    await write(config, [f"u{i}" for i in range(9)])
    with open_log(config) as log:
        folds = open_folds(config)
        seen, read = await summary.summarise(log, folds, log.newest())
        anew = summary.Summary()
        assert read == await summary.catch_up(anew, log) == 10
        assert seen.state() == anew.state()


async def test_a_backup_that_is_refused_leaves_what_was_derived(tmp_path: Path, said: Said):
    config = of(tmp_path / "run")
    place = Home(tmp_path / "run")
    await write(config, ["ann"])
    backup(config, tmp_path / "kept", said.console)
    place.log.rename(tmp_path / "lost")
    place.folds.mkdir(exist_ok=True)
    (place.folds / "page.sqlite").touch()
    next((tmp_path / "kept").glob("*1.db")).write_bytes(b"damaged")
    with pytest.raises(Corrupt, match="was changed since the backup"):
        restore(config, tmp_path / "kept", None, said.console)
    assert [path.name for path in place.folds.iterdir()] == ["page.sqlite"]


async def test_the_start_removes_what_a_killed_restoration_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Begun(Exception):
        pass

    async def fine(*_: object) -> None:
        pass

    def launching(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(up, "check_start", lambda *_, **__: fine())
    monkeypatch.setattr(up, "_launching", launching)
    config, place = of(tmp_path / "run"), Home(tmp_path / "run")
    await write(config, ["ann"])
    for name in (".log.restoring", ".log.replaced"):
        (place.root / name).mkdir()
        (place.root / name / KEYS).touch()
    with pytest.raises(Begun):
        await up.up(config, Said().console)
    assert [path.name for path in place.root.glob(".log.*")] == []
    with open_log(config) as log:
        assert log.newest() == 1


async def test_a_checkpoint_that_is_newer_than_the_backup_is_refused(tmp_path: Path, said: Said):
    config, place = of(tmp_path / "run"), Home(tmp_path / "run")
    await write(config, ["ann"])
    backup(config, tmp_path / "kept", said.console)
    with open_log(config) as log:
        await log.append(Batch(step=1, turns=(), credits=(), reference=V1, at=1.0))
    place.log.rename(tmp_path / "lost")
    checkpoint = place.checkpoints / "00000001-ab"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1, "cursor": 2}))
    with pytest.raises(Conflict, match=r"was written after row 1, where the backup ends: move .*checkpoints away"):
        restore(config, tmp_path / "kept", None, said.console)
    assert not place.log.exists()
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1, "cursor": 1}))
    restore(config, tmp_path / "kept", None, said.console)


@pytest.mark.parametrize("role", ["up", "serve", "train", "rollout", "release", "housekeeping"])
async def test_a_run_whose_workers_are_up_is_left_alone(tmp_path: Path, said: Said, role: str):
    config, place = of(tmp_path / "run", "record.encrypt='user'"), Home(tmp_path / "run")
    await write(config, ["ann"])
    (tmp_path / "next").write_bytes(b"n" * 40)
    with hold(place.root, role):
        backup(config, tmp_path / "kept", said.console)
        with pytest.raises(Conflict, match=f"another {role} process"):
            rekey(config, tmp_path / "next", said.console)
        with pytest.raises(Conflict, match=f"another {role} process"):
            restore(config, tmp_path / "kept", None, said.console)


async def test_a_log_in_postgres_is_backed_up_with_its_own_tools(tmp_path: Path, said: Said):
    config = of(tmp_path / "run", "record.url='postgresql://u@nowhere/d'", "record.namespace='mine'")
    with pytest.raises(BadConfig, match="pg_dump --format=custom --schema=mine"):
        backup(config, tmp_path / "kept", said.console)
    with pytest.raises(BadConfig, match="pg_restore --schema=mine"):
        restore(config, tmp_path / "kept", None, said.console)
    await write(of(tmp_path / "other"), ["ann"])
    backup(of(tmp_path / "other"), tmp_path / "kept", said.console)
    (tmp_path / "run" / "log").mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "log" / MARK).write_text("loop\n")
    with pytest.raises(BadConfig, match="is in Postgres; name it in"):
        backup(of(tmp_path / "run"), tmp_path / "more", said.console)
    with pytest.raises(BadConfig, match="is in Postgres; name another"):
        restore(of(tmp_path / "run"), tmp_path / "kept", None, said.console)


async def test_what_is_missing_is_named(tmp_path: Path, said: Said):
    with pytest.raises(NotFound, match="there is no log"):
        backup(of(tmp_path / "run"), tmp_path / "kept", said.console)
    with pytest.raises(NotFound, match="holds no manifest"):
        restore(of(tmp_path / "run"), tmp_path / "kept", None, said.console)
    with pytest.raises(NotFound, match="--keys: there is no file"):
        restore(of(tmp_path / "run"), tmp_path / "kept", tmp_path / "no-keys.db", said.console)
    with pytest.raises(NotFound, match="there are no keys"):
        rekey(of(tmp_path / "run"), tmp_path / "next", said.console)
    assert not (tmp_path / "run" / "log").exists()
