"""The last published weights, kept in memory or on a disk: the same bytes, or a base that says it is not."""

import os
import weakref

import numpy as np
import pytest

from ostinato.core.errors import Corrupt
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.publish import chunk_source as base_module
from ostinato.weights.publish.chunk_source import Base, kept
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import CHUNK_ELEMENTS, hash_chunks, part_of

dup = os.dup
RNG = np.random.default_rng(3)


def model():
    return {
        "w": WeightArray("BF16", (CHUNK_ELEMENTS + 5,), RNG.integers(0, 100, 2 * CHUNK_ELEMENTS + 10, np.uint8)),
        "empty": WeightArray("F32", (0, 4), np.zeros(0, np.uint8)),
        "scalar": WeightArray("F32", (), np.ones(1, "<f4").view(np.uint8)),
    }


def kept_base(weights, directory) -> Base:
    part = part_of(weights)
    return kept("0" * 64, part, hash_chunks(part), directory)


@pytest.fixture(params=["memory", "disk"])
def directory(request, tmp_path):
    return None if request.param == "memory" else tmp_path


def test_every_chunk_is_what_was_published(directory):
    weights = model()
    base = kept_base(weights, directory)
    assert base.is_intact()
    assert len(base.hashes) == 3
    for at, chunk in part_of(weights).chunks.items():
        np.testing.assert_array_equal(base.chunk(*at), chunk)


def test_on_a_disk_the_arrays_are_free_and_no_file_has_a_name(tmp_path):
    weights = model()
    gone = weakref.ref(weights["w"].data)
    base = kept_base(weights, tmp_path)
    weights.clear()
    assert gone() is None
    assert base.is_intact()
    assert list(tmp_path.iterdir()) == []


def test_what_rotted_or_was_cut_is_not_intact(tmp_path, monkeypatch):
    files = []
    monkeypatch.setattr(base_module.os, "dup", lambda file: files.append(dup(file)) or files[-1])
    base = kept_base(model(), tmp_path)
    os.pwrite(files[0], b"\xff", 2 * CHUNK_ELEMENTS)
    assert not base.is_intact()
    os.ftruncate(files[0], 1000)
    assert not base.is_intact()
    with pytest.raises(Corrupt, match="end within tensor 'w'"):
        base.chunk("w", 0)


def test_without_room_on_the_disk_memory_holds_them(tmp_path, caplog):
    base = kept_base(model(), tmp_path / "missing")
    assert base.is_intact()
    assert base.chunk("w", 0).base is not None, "a view of what is in memory"
    assert "stay in memory" in caplog.text


async def test_a_publisher_with_a_scratch_directory_writes_the_same_versions(tmp_path):
    """Forty versions with anchors and squashed deltas: manifest for manifest."""
    stores = MemoryStore(), MemoryStore()
    plain = VersionPublisher(stores[0], PublisherConfig(anchor_every=5))
    frugal = VersionPublisher(stores[1], PublisherConfig(anchor_every=5, scratch=tmp_path))
    codes = RNG.integers(0x3F00, 0x3F80, 4096, np.uint16)
    bases = [None, None]
    for number in range(40):
        codes = codes.copy()
        codes[RNG.integers(0, 4096, 40)] ^= 1
        weights = {"w": WeightArray("BF16", (64, 64), codes.view(np.uint8))}
        done = [
            await publisher.publish(number, weights, run="r", base=base, ref="live")
            for publisher, base in zip((plain, frugal), bases, strict=True)
        ]
        assert (done[0].manifest, done[0].stored) == (done[1].manifest, done[1].stored)
        bases = [one.policy for one in done]
    assert stores[0].objects == stores[1].objects
