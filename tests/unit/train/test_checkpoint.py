"""A checkpoint comes back whole, or the one before it does."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.train import checkpoint as module
from ostinato.train.checkpoint import ALL, Checkpoint, adopt, kept_steps, load, partial_of, save, stored, thin


def made(step: int) -> Checkpoint:
    rng = np.random.default_rng(step)
    weights = {"a.weight": rng.normal(size=(5, 7)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    moments = {"exp_avg": rng.normal(size=38).astype(np.float32), "rng": np.arange(9, dtype=np.uint8)}
    return Checkpoint(step=step, weights=weights, moments=moments, cursor=10 * step, extra={"baseline": [1.5, step]})


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    assert one is not None
    arrays = [(a[k], b[k]) for a, b in ((one.weights, other.weights), (one.moments, other.moments)) for k in b]
    return (one.step, one.cursor, dict(one.extra)) == (other.step, other.cursor, dict(other.extra)) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in arrays
    )


def test_it_comes_back_with_the_same_bits_and_two_are_kept(tmp_path: Path):
    assert load(tmp_path / "none") is None
    for step in (1, 2, 3):
        save(tmp_path, made(step))
        assert same(load(tmp_path), made(step))
    assert sorted(path.name[:8] for path in tmp_path.iterdir() if path.is_dir()) == ["00000002", "00000003"]


def test_the_files_are_plain_safetensors(tmp_path: Path):
    path = save(tmp_path, made(4))
    for file, arrays in (("weights.safetensors", made(4).weights), ("optimizer.safetensors", made(4).moments)):
        found = load_file(path / file)
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, made(1))
    target = save(tmp_path, made(2)) / file
    body = bytearray(target.read_bytes())
    if damage == "flip":
        body[len(body) // 2] ^= 1
    if damage == "gone":
        target.unlink()
    else:
        target.write_bytes(body[: len(body) // 2] if damage == "cut" else body)
    with caplog.at_level(logging.WARNING):
        assert same(load(tmp_path), made(1))
    assert "falling back" in caplog.text


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "notes.txt"])
def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, name: str):
    path = save(tmp_path, made(1))
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = manifest["files"]["weights.safetensors"]
    body = json.dumps(manifest).encode()
    (path / "checkpoint.json").write_bytes(body)
    path.rename(path.with_name(f"00000001-{blake3(body).hexdigest()[:16]}"))
    with pytest.raises(Corrupt, match="which is no file of a checkpoint"):
        load(tmp_path)


def test_when_none_is_whole_the_error_says_what_to_do(tmp_path: Path):
    (save(tmp_path, made(1)) / "checkpoint.json").write_text(json.dumps({}))
    with pytest.raises(Corrupt, match=r"no whole checkpoint.*backup"):
        load(tmp_path)


def test_a_lost_pointer_or_one_to_nowhere_is_no_loss(tmp_path: Path):
    save(tmp_path, made(1))
    save(tmp_path, made(2))
    (tmp_path / "LATEST").write_text("00000009-feedfeedfeedfeed")
    assert same(load(tmp_path), made(2))
    (tmp_path / "LATEST").unlink()
    assert same(load(tmp_path), made(2))


def test_the_same_step_saved_again_is_the_same_checkpoint(tmp_path: Path):
    assert save(tmp_path, made(1)) == save(tmp_path, made(1))
    assert same(load(tmp_path), made(1))


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_taken_again(tmp_path: Path):
    save(tmp_path, made(1))
    weights = save(tmp_path, made(2)) / "weights.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    assert same(load(tmp_path), made(1))
    assert save(tmp_path, made(2)) == weights.parent
    assert same(load(tmp_path), made(2))


def test_a_directory_of_somebody_else_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "lost+found").mkdir()
    assert load(tmp_path) is None, "as where a volume is mounted"
    for step in (1, 2, 3):
        save(tmp_path, made(step), keep=2)
    assert [path.name[:8] for path in stored(tmp_path)] == ["00000003", "00000002"]
    thin(tmp_path, keep=1, every=1, ladder=0)
    assert (tmp_path / "lost+found").is_dir()


def test_a_checkpoint_that_goes_while_they_are_listed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = (save(tmp_path, made(step)) for step in (1, 2))
    is_dir = Path.is_dir

    def seen(path: Path) -> bool:
        found = is_dir(path)
        if path == first:  # the trainer's own process removes it
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "is_dir", seen)
    assert stored(tmp_path) == [second]


def test_a_checkpoint_that_is_taken_from_elsewhere_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = save(tmp_path / "there", made(3))
    partial = partial_of(tmp_path, saved.name)
    shutil.copytree(saved, partial)
    synced, sync = list[str](), os.fsync

    def recorded(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", recorded)
    taken = adopt(partial)
    assert {partial.name, *(path.name for path in taken.iterdir())} <= {*synced}
    assert same(load(tmp_path), made(3))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_it_keeps_the_one_before_and_leaves_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    save(tmp_path, made(1))
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(path: Path, body: bytes, *, durable: bool) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(StorageFull, match="earlier checkpoints are untouched"):
        save(tmp_path, made(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert same(load(tmp_path), made(1))


@pytest.mark.parametrize("every", [1, 5])
def test_a_ladder_of_checkpoints_at_most_doubles_the_way_back_to_any_step(every: int):
    ladder, kept, most = 6, set[int](), 0
    for newest in range(0, 700 * every, every):
        kept = kept_steps({*kept, newest}, keep=2, every=every, ladder=ladder)
        most = max(most, len(kept))
        for step in range(max(1, newest - (every << (ladder - 1))), newest + 1, max(1, every // 2)):
            older = max(each for each in kept if each < step)
            assert newest - older <= 2 * (newest - step + every)
    assert most == 2 * ladder


def test_without_a_ladder_the_newest_stay_alone_and_odd_steps_are_no_rungs(tmp_path: Path):
    assert kept_steps(range(50), keep=3, every=5, ladder=0) == {47, 48, 49}
    assert kept_steps([3, 7, 11, 10], keep=1, every=5, ladder=4) == {11, 10}
    for step in (2, 4, 5, 6):
        save(tmp_path, made(step), keep=ALL)
    thin(tmp_path, keep=1, every=2, ladder=1)
    assert [int(path.name.split("-")[0]) for path in stored(tmp_path)] == [6, 4]
    assert same(load(tmp_path), made(6))
