"""A checkpoint that several ranks write together: all of it or none, and whole for any number of readers. The ranks are threads."""

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.train import checkpoint
from ostinato.train.checkpoint import Checkpoint, load, save
from ostinato.train.ranks import RankPart
from ostinato.train.sharding.balance import rows_of

W = np.arange(14, dtype=np.float32).reshape(7, 2)
B = np.arange(3, dtype=np.float32)
WHOLE = {"w": W, "b": B}


class Meeting:
    """Threads that speak in turn as ranks do."""

    def __init__(self, count: int) -> None:
        self.count, self._barrier = count, threading.Barrier(count, timeout=PATIENT_S)
        self._said: list[bytes] = [b""] * count

    def run(self, act: Callable[["Seat"], object]) -> list:
        """What each rank returns or raises."""
        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(act, Seat(self, rank)) for rank in range(self.count)]
            return [future.exception() or future.result() for future in futures]


class Seat:
    """One rank's place, as far as a checkpoint needs it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.count = meeting, rank, meeting.count

    def gather(self, said: bytes) -> list[bytes]:
        self._meeting._said[self.rank] = said
        self._meeting._barrier.wait()
        found = list(self._meeting._said)
        self._meeting._barrier.wait()
        return found


def part(step: int, rank: int, count: int) -> Checkpoint:
    spans = {name: rows_of(len(array), count, rank) for name, array in WHOLE.items()}
    weights = {name: WHOLE[name][a:b] + step for name, (a, b) in spans.items()}
    moments = {
        f"{kind}/{name}": array * k
        for k, kind in ((2, "exp_avg"), (3, "exp_avg_sq"))
        for name, array in weights.items()
    }
    return Checkpoint(
        step=step,
        weights=weights,
        moments={**moments, "rng": np.full(4, rank, np.uint8)},
        cursor=9,
        part=RankPart(
            shapes={name: array.shape for name, array in WHOLE.items()},
            firsts={name: a for name, (a, _) in spans.items()},
        ),
    )


def write(directory: Path, step: int, count: int) -> list:
    return Meeting(count).run(lambda seat: save(directory, part(step, seat.rank, count), ranks=seat))


def check(found: Checkpoint | None, step: int) -> None:
    assert found is not None
    assert (found.step, found.cursor, found.shapes) == (step, 9, {"w": (7, 2), "b": (3,)})
    for name, whole in WHOLE.items():
        for first in range(len(whole) + 1):
            for last in range(first, len(whole) + 1):
                expected = (whole + step)[first:last]
                np.testing.assert_array_equal(found.rows("weights", name, first, last), expected)
                np.testing.assert_array_equal(found.rows("exp_avg", name, first, last), expected * 2)
                np.testing.assert_array_equal(found.rows("exp_avg_sq", name, first, last), expected * 3)
    np.testing.assert_array_equal(found.moments["rng"], np.zeros(4, np.uint8))


@pytest.mark.parametrize("count", [2, 4, 5])
@pytest.mark.parametrize("readers", [1, 3])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, count: int, readers: int):
    write(tmp_path, 1, count)
    write(tmp_path, 2, count)
    check(load(tmp_path), 2)
    for found in Meeting(readers).run(lambda seat: load(tmp_path, seat)):
        check(found, 2)


def test_one_rank_alone_writes_the_form_that_it_always_wrote(tmp_path: Path):
    moments = {kind: np.arange(17, dtype=np.float32) * k for k, kind in ((2, "exp_avg"), (3, "exp_avg_sq"))}
    save(tmp_path, Checkpoint(step=1, weights=WHOLE, moments={**moments, "rng": np.zeros(4, np.uint8)}))
    found = load(tmp_path)
    assert found is not None
    assert found.part is None
    np.testing.assert_array_equal(found.rows("exp_avg", "b", 1, 3), [30, 32])
    np.testing.assert_array_equal(found.rows("exp_avg_sq", "w", 6, 7), [[36, 39]])


def files(directory: Path) -> Sequence[Path]:
    newest = max(path for path in directory.iterdir() if path.is_dir())
    return sorted(newest.glob("*.safetensors"))


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("harm", ["flip", "header", "cut", "remove"])
def test_damage_to_any_file_is_seen_by_all_and_the_one_before_is_taken(tmp_path: Path, harm: str, readers: int):
    write(tmp_path, 1, 2)
    write(tmp_path, 2, 2)
    assert len(files(tmp_path)) == 4
    for victim in files(tmp_path):
        whole = victim.read_bytes()
        if harm == "remove":
            victim.unlink()
        elif harm == "header":  # the rank that does not verify this file reads it all the same
            victim.write_bytes(whole[:8] + b"[" + whole[9:])
        else:
            victim.write_bytes(whole[:-1] if harm == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
        for found in Meeting(readers).run(lambda seat: load(tmp_path, seat)):
            check(found, 1)
        victim.write_bytes(whole)
    check(load(tmp_path), 2)


def test_with_none_whole_every_rank_refuses(tmp_path: Path):
    write(tmp_path, 1, 2)
    files(tmp_path)[0].unlink()
    assert all(isinstance(found, Corrupt) for found in Meeting(2).run(lambda seat: load(tmp_path, seat)))


def test_a_disk_that_refuses_one_rank_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, 1, 2)
    whole = checkpoint._write_arrays

    def refuse(path: Path, arrays: checkpoint.Arrays) -> dict:
        if "00002-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, arrays)

    monkeypatch.setattr(checkpoint, "_write_arrays", refuse)
    found = write(tmp_path, 2, 2)
    assert all(isinstance(each, StorageFull) and "No space left" in str(each) for each in found)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    check(load(tmp_path), 1)


def test_what_a_killed_writer_left_is_not_a_checkpoint(tmp_path: Path):
    write(tmp_path, 1, 2)
    (tmp_path / ".partial-7").mkdir()
    (tmp_path / ".partial-7" / "weights-00001-of-00002.safetensors").write_bytes(b"half")
    check(load(tmp_path), 1)
    write(tmp_path, 2, 2)
    assert not (tmp_path / ".partial-7").exists()
    check(load(tmp_path), 2)
