"""Sequences of changes of a run's files, cut off at each of their calls by a full disk, a failing one and a kill: what is left can be used,
and the same sequence completes it.
"""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.faults import cut_everywhere
from tests.unit.app.test_branches import settings, turn

from ostinato.app.backups import back_up_log, restore_log
from ostinato.app.branches import branch_config, branches_begun, take_checkpoint
from ostinato.app.erasure import ErasureFiles, ErasureRequest
from ostinato.app.storage import home, open_log
from ostinato.config import Config
from ostinato.core.records import Arm, Turn
from ostinato.record.backup import MANIFEST, read_manifest
from ostinato.record.folds import FileFolds
from ostinato.run_directory import Home
from ostinato.train.checkpoint import ALL, Checkpoint, load, save, stored, thin
from ostinato.worlds.rollout.groups import EventFile


def state(step: int) -> Checkpoint:
    weights = {"w": np.full(9, step, np.float32)}
    return Checkpoint(step=step, weights=weights, moments={"exp_avg": np.zeros(9, np.float32)}, cursor=10 * step)


def step_in(place: Path) -> int | None:
    found = load(place)
    return None if found is None else found.step


def emptied(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place


def test_a_checkpoint_and_the_thinning_of_those_before(tmp_path):
    place = tmp_path / "checkpoints"

    def prepare() -> None:
        save(emptied(place), state(1))

    def act() -> None:
        save(place, state(2), keep=ALL)
        thin(place, keep=1, every=1, ladder=0)

    def check() -> None:
        assert step_in(place) in (1, 2)

    def again() -> None:
        act()
        assert step_in(place) == 2
        assert sorted(path.name for path in place.iterdir()) == sorted(["LATEST", *(p.name for p in stored(place))])

    assert cut_everywhere(act, again, check, prepare) > 30


def test_the_checkpoint_that_a_branch_takes(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    save(shared, state(5))

    def prepare() -> None:
        shutil.rmtree(own, ignore_errors=True)

    def check() -> None:
        assert step_in(own) in (None, 5)
        assert step_in(shared) == 5

    def again() -> None:
        if step_in(own) is None:  # as a branch that begins
            take_checkpoint(shared, own)
            assert sorted(path.name for path in own.iterdir()) == [stored(shared)[0].name, "LATEST"]
        assert step_in(own) == 5

    assert cut_everywhere(lambda: take_checkpoint(shared, own), again, check, prepare) > 30


# ---------------------------------------------------------------- backups


async def rows_of(config: Config) -> list[str]:
    with open_log(config) as log:
        return [row.id async for _, row in log.read(0, {Turn}) if isinstance(row, Turn)]


async def written(*configs: Config) -> None:
    for each in configs:
        with open_log(each) as log:
            await log.append(turn("acme-1", "acme", Arm.BRANCH))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with a branch, each with a row."""
    made = settings(tmp_path)
    asyncio.run(written(made, branch_config(made, "acme")))
    return made


def test_a_backup_with_a_branch(config, tmp_path):
    kept = tmp_path / "kept"

    def back_up() -> None:
        back_up_log(config, kept, lambda *_: None)

    def check() -> None:
        """A directory with a manifest has all that the manifest names."""
        if (kept / MANIFEST).exists():
            names = {each.name for each in read_manifest(kept).files}
            assert names <= {path.name for path in kept.iterdir()}
            assert (kept / "branches" / "acme" / MANIFEST).exists()

    def again() -> None:
        emptied(kept)
        back_up()
        check()
        assert (kept / MANIFEST).exists()

    assert cut_everywhere(back_up, again, check, lambda: emptied(kept)) > 30


def test_a_restoration_with_a_branch(config, tmp_path):
    kept, root = tmp_path / "kept", home(config).root
    back_up_log(config, kept, lambda *_: None)

    def restore() -> None:
        restore_log(config, kept, None, lambda *_: None)

    def check() -> None:
        for each in (config, *branches_begun(config)):
            if Home(each.run.directory).log.exists():
                assert asyncio.run(rows_of(each)) == ["acme-1"]

    def again() -> None:
        if not home(config).log.exists():
            restore()
        for each in (config, branch_config(config, "acme")):
            assert asyncio.run(rows_of(each)) == ["acme-1"]

    assert cut_everywhere(restore, again, check, lambda: shutil.rmtree(root)) > 30


# ---------------------------------------------------------------- small files


def test_a_request_to_be_erased_and_its_taking_up(tmp_path):
    place, asked = tmp_path / "run", ErasureRequest(tenant="acme", user="ann", upto=9)
    files = ErasureFiles(Home(place))

    def act() -> None:
        files.request(asked)
        files.remove([asked])

    def check() -> None:
        assert files.requests() in ([], [asked])

    def again() -> None:
        files.request(asked)
        assert files.requests() == [asked]
        files.remove([asked])
        assert files.requests() == []

    assert cut_everywhere(act, again, check, lambda: emptied(place)) > 10


def test_a_snapshot_of_a_fold(tmp_path):
    folds = FileFolds(tmp_path / "folds")

    def save_fold(cursor: int) -> None:
        asyncio.run(folds.save("desk", cursor, {"rows": cursor}))

    def read_fold() -> tuple[int, dict]:
        found = asyncio.run(folds.load("desk"))
        assert found is not None
        return found

    def check() -> None:
        assert read_fold() in ((1, {"rows": 1}), (2, {"rows": 2}))

    def again() -> None:
        save_fold(2)
        assert read_fold() == (2, {"rows": 2})

    assert cut_everywhere(lambda: save_fold(2), again, check, lambda: save_fold(1)) > 5


def test_a_journal_of_rollouts_that_is_written_anew(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    told = [{"kind": "told", "n": number} for number in range(3)]

    def events() -> list[dict]:
        journal, found = EventFile.open(path)
        journal.close()
        return found

    def prepare() -> None:
        path.unlink(missing_ok=True)
        journal, _ = EventFile.open(path)
        for event in told:
            journal.append(event)
        journal.close()

    def act() -> None:
        journal, _ = EventFile.open(path)
        try:
            journal.append({"kind": "spent", "n": 0}, sync=True)
            journal.rewrite(told[1:])
        finally:
            journal.close()

    def check() -> None:
        assert events() in (told, [*told, {"kind": "spent", "n": 0}], told[1:])

    def again() -> None:
        act()
        assert events() == told[1:]

    assert cut_everywhere(act, again, check, prepare) > 10
