"""What an erasure from the weights leaves behind where a disk refuses to delete, and what it has written when the power goes."""

import json
import os
import shutil
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from tests.unit.app.test_branches import publish, settings

from ostinato.app import erasure
from ostinato.app.erasure import ErasureFiles, ErasureJob, ErasureReplay
from ostinato.app.storage import open_run
from ostinato.run_directory import Home


async def test_an_erasure_is_not_over_while_a_checkpoint_that_may_know_somebody_is_there(tmp_path, monkeypatch):
    with open_run(settings(tmp_path)) as run:
        versions = await publish(run.store, 4)
        files, old = ErasureFiles(run.home), run.home.checkpoints / "00000002-ab"
        old.mkdir(parents=True)
        ended = (versions[3].number, versions[3].hash)
        job = ErasureJob(id="e", people=(), first=1, last=2, start=0, checkpoint="base", erased_turns=1, version=ended)
        files.put("job.json", asdict(job))
        files.rows("e").write_text("")
        learning: Any = SimpleNamespace(numerics="exact", tokens=None)
        replay = ErasureReplay(run, learning)
        with monkeypatch.context() as refusing:
            refusing.setattr(erasure.shutil, "rmtree", lambda path, ignore_errors: None)
            assert (await replay.purge(versions[3])).startswith("0 checkpoints and 2 versions")
        found = files.job()
        assert found is not None
        assert found.phase == "release"
        assert str(old) in replay.trouble
        shutil.rmtree(old)  # by a person
        await run.store.move_ref("pin/paper", None, versions[3].hash)  # its next look is when a ref has moved
        await replay.purge(versions[3])
        found = files.job()
        assert found is not None
        assert (found.phase, replay.trouble) == ("done", "")


async def test_what_is_left_is_named_as_long_as_it_is_there_and_nothing_is_called_deleted_that_stays(
    tmp_path, monkeypatch
):
    with open_run(settings(tmp_path)) as run:
        versions = await publish(run.store, 4)
        files, old = ErasureFiles(run.home), run.home.checkpoints / "00000002-ab"
        old.mkdir(parents=True)
        await run.store.move_ref("pin/paper", None, versions[1].hash)  # what it names waits for it
        ended = (versions[3].number, versions[3].hash)
        job = ErasureJob(id="e", people=(), first=1, last=2, start=0, checkpoint="base", erased_turns=1, version=ended)
        files.put("job.json", asdict(job))
        files.rows("e").write_text("")
        learning: Any = SimpleNamespace(numerics="exact", tokens=None)
        replay = ErasureReplay(run, learning)
        with monkeypatch.context() as refusing:
            refusing.setattr(erasure.shutil, "rmtree", lambda path, ignore_errors: None)
            assert (await replay.purge(versions[3])).startswith("0 checkpoints and 1 versions")
            await run.store.move_ref("pin/a", None, versions[3].hash)
            assert await replay.purge(versions[3]) == ""
        assert str(old) in replay.trouble
        shutil.rmtree(old)  # by a person
        await run.store.move_ref("pin/b", None, versions[3].hash)
        assert await replay.purge(versions[3]) == ""
        found = files.job()
        assert found is not None
        assert (found.phase, replay.trouble) == ("release", "")


def test_a_replayed_step_is_on_the_disk_before_a_checkpoint_can_hold_it(tmp_path, monkeypatch):
    files, synced, sync = ErasureFiles(Home(tmp_path)), list[str](), os.fsync

    def recorded(descriptor):
        sync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}") + files.steps("e").read_text())

    files.put("job.json", {})
    files.steps("e").touch()
    monkeypatch.setattr(os, "fsync", recorded)
    files.append_step("e", {"step": 1, "ess_turns": 0.5})
    files.append_step("e", {"step": 2, "refused": ""})
    lines = [json.dumps({"step": 1, "ess_turns": 0.5}) + "\n", json.dumps({"step": 2, "refused": ""}) + "\n"]
    assert synced == [str(files.steps("e")) + "".join(lines[:count]) for count in (1, 2)]
