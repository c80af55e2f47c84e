"""A backup of a run's log has its branches': their logs, their keys and how far they were copied; their refs are the weight store's."""

import shutil

import pytest
from rich.console import Console
from tests.unit.app.test_branches import copied, publish, settings, turn

from ostinato.app import backups
from ostinato.app.backups import back_up_log, restore_log
from ostinato.app.branches import TenantRows, begin_branch, branch_config, branches_begun, copied_upto
from ostinato.app.storage import home, open_log, open_run, open_store
from ostinato.core.errors import BadConfig, Conflict, Corrupt, StorageFull
from ostinato.core.records import Arm, Batch, Turn
from ostinato.launch.commands.log import forget
from ostinato.record import backup
from ostinato.record.roles import hold


async def test_a_backup_has_its_log_its_keys_how_far_it_was_copied_and_its_refs(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    branch = branch_config(config, "acme")
    (v0,) = await publish(open_store(config), 1)
    with open_log(config) as log, open_run(branch) as run:
        await begin_branch(run, lambda _: None)
        await log.append(*[turn(f"acme-{n}", "acme", Arm.BRANCH, user=f"u{n}") for n in range(4)])
        rows = TenantRows(run)
        await rows.copy()
        rows.close()
        await run.log.append(Batch(step=1, turns=(), credits=(), reference=v0, at=1.0, base=v0, even=True))
        before, upto = [row async for _, row in run.log.read(0, {Turn, Batch})], await copied_upto(run.folds, log)
        refs = await run.store.refs()
    made = back_up_log(config, tmp_path / "kept", lambda *_: None)
    assert upto == made.last > 0
    shutil.copytree(config.run.directory / "weights", tmp_path / "weights")
    home(config).root.rename(tmp_path / "lost")
    home(config)
    shutil.copytree(tmp_path / "weights", config.run.directory / "weights")
    done = restore_log(config, tmp_path / "kept", None, lambda *_: None)
    assert (done.branches, done.kept) == (["acme"], [])
    with open_log(config) as log, open_run(branch) as run:
        assert [row async for _, row in run.log.read(0, {Turn, Batch})] == before, "words are readable"
        assert not any(row.redacted for row in before if isinstance(row, Turn))
        assert await copied_upto(run.folds, log) == upto
        assert await run.store.refs() == refs
        await log.append(turn("acme-9", "acme", Arm.BRANCH, user="u9"))
        rows = TenantRows(run)
        assert await rows.copy() == 1, "nothing is copied again, and what comes is"
        rows.close()


async def test_a_backup_that_was_cut_off_or_damaged_restores_nothing(tmp_path, monkeypatch):
    config = settings(tmp_path)
    branch = branch_config(config, "acme")
    with open_log(config) as log, open_log(branch) as own:
        for each in (log, own):
            await each.append(turn("acme-1", "acme", Arm.BRANCH))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    write = backup.write_atomic

    def full_at_last(path, *args, **more):
        if path.parent == tmp_path / "kept":
            full()
        write(path, *args, **more)

    for module, refused in ((backups, full), (backup, full), (backup, full_at_last)):
        with monkeypatch.context() as patched:
            patched.setattr(module, "write_atomic", refused)
            with pytest.raises(StorageFull, match="nothing was backed up"):
                back_up_log(config, tmp_path / "kept", lambda *_: None)
        assert list((tmp_path / "kept").iterdir()) == []
    back_up_log(config, tmp_path / "kept", lambda *_: None)
    home(config).root.rename(tmp_path / "lost")
    (told,) = (tmp_path / "kept").glob("branches/acme/copied.json")
    told.write_text("{}")
    with pytest.raises(Corrupt, match=r"copied.json cannot be read"):
        restore_log(config, tmp_path / "kept", None, lambda *_: None)
    assert not home(config).log.exists()
    assert branches_begun(config) == []
    told.write_text('{"copied": 1}')
    (tmp_path / "kept" / "branches" / ".DS_Store").write_text("of somebody's desktop")
    with hold(home(branch).root, "train"), pytest.raises(Conflict, match="another train process"):
        restore_log(config, tmp_path / "kept", None, lambda *_: None)
    assert restore_log(config, tmp_path / "kept", None, lambda *_: None).branches == ["acme"]


@pytest.mark.parametrize("theirs", ["acme", "globex"])
async def test_a_backup_that_fails_deletes_no_branch_of_another_into_the_same_directory(tmp_path, monkeypatch, theirs):
    config = settings(tmp_path)
    branch = branch_config(config, "acme")
    with open_log(config) as log, open_log(branch) as own:
        for each in (log, own):
            await each.append(turn("acme-1", "acme", Arm.BRANCH))
    other = tmp_path / "kept" / "branches" / theirs

    def begun(config):
        other.mkdir(parents=True)  # by another process, meanwhile
        return branches_begun(config)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backups, "branches_begun", begun)
    monkeypatch.setattr(backup, "_publish", full)
    refused, why = (BadConfig, "another backup") if theirs == "acme" else (StorageFull, "nothing was backed up")
    with pytest.raises(refused, match=why):
        back_up_log(config, tmp_path / "kept", lambda *_: None)
    assert sorted((tmp_path / "kept").rglob("*")) == [other.parent, other]


async def test_who_was_forgotten_after_a_backup_stays_forgotten_in_the_branch_that_is_restored(tmp_path):
    config = settings(tmp_path, "record.encrypt='user'")
    branch = branch_config(config, "acme")
    with open_log(config) as log, open_run(branch) as run:
        await log.append(*[turn(f"acme-{user}", "acme", Arm.BRANCH, user=user) for user in ("ann", "bob")])
        rows = TenantRows(run)
        await rows.copy()
        rows.close()
    back_up_log(config, tmp_path / "kept", lambda *_: None)
    await forget(config, "acme", "ann", Console(quiet=True), wait_s=0.1)
    home(config).log.rename(tmp_path / "lost")  # both keep their files of keys
    home(branch).log.rename(tmp_path / "lost too")
    assert restore_log(config, tmp_path / "kept", None, lambda *_: None).destroyed == 2
    with open_run(branch) as run:
        assert [each.redacted for each in await copied(run, Turn)] == [True, False]
