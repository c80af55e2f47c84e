import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard

from ostinato.core.errors import Corrupt
from ostinato.weights.delta import codec as delta
from ostinato.weights.delta import encoder

# bf16 codes that break careless codecs: +-0, +-inf, quiet and signalling NaNs with payloads, subnormals, the extremes.
STRANGE = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FC1, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F]


def bits(codes) -> np.ndarray:
    return np.asarray(codes, np.uint16).view(np.uint8)


def decoded(codec, old, payload, size, dtype="BF16"):
    """The target stands between two guards, which must stay as they are."""
    room = np.full(size + 512, 0xA5, np.uint8)
    target = room[256 : 256 + size]
    if old is not None:
        target[:] = old
    delta.decode(codec, target, payload, dtype=dtype, old=old is not None)
    assert (room[:256] == 0xA5).all()
    assert (room[256 + size :] == 0xA5).all()
    return target


def round_trip(old, new, dtype="BF16"):
    coded = delta.encode(old, new, dtype=dtype)
    assert decoded(coded.codec, old, coded.payload, new.size, dtype).tobytes() == new.tobytes()
    return coded


def stepped(old, share, seed=0):
    """bf16 codes of which `share` moved by one or two steps of their last place."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    where = rng.random(old.size) < share
    new[where] += rng.choice(np.array([1, -1, 2], np.int64), where.sum()).astype(np.uint16)
    return new


def test_every_strange_code_to_every_other_comes_back_bit_for_bit():
    old, new = np.meshgrid(STRANGE, STRANGE)
    round_trip(bits(old.ravel()), bits(new.ravel()))


def test_all_65536_codes_against_their_neighbours_and_as_a_full_snapshot():
    codes = np.arange(65536, dtype=np.uint16)
    for shift in (1, 2, 32768):
        round_trip(bits(codes), bits(np.roll(codes, shift)))
    round_trip(None, bits(codes))


def test_minus_zero_and_another_nan_payload_count_as_changes():
    old, new = bits([0x0000, 0x7FC0, 0x3F80]), bits([0x8000, 0x7FC1, 0x3F80])
    assert round_trip(old, new).codec != delta.EQUAL
    assert delta.changed_elements(old, new, 2) == 2


def test_unchanged_is_empty_even_for_nan():
    coded = round_trip(bits([0x7FC1] * 100), bits([0x7FC1] * 100))
    assert coded == delta.Coded(delta.EQUAL, b"")


def test_a_sparse_change_is_small_and_a_full_change_never_exceeds_the_raw_bytes():
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.1, 1 << 18).astype(np.float32).view(np.uint32) >> 16
    new = old.copy()
    new[rng.choice(old.size, old.size // 100, replace=False)] ^= 1
    sparse = round_trip(bits(old), bits(new))
    assert sparse.codec == delta.STEPS
    assert len(sparse.payload) < bits(new).size / 90
    assert round_trip(bits(old), bits(new), "U16").codec == delta.XOR
    noise = round_trip(bits(old), rng.integers(0, 256, bits(old).size, np.uint8))
    assert noise.codec == delta.RAW
    assert len(noise.payload) == bits(old).size


def test_other_weights_are_coded_alone_when_that_is_smaller():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 1 << 16, np.uint8)
    assert round_trip(old, np.full(1 << 16, 7, np.uint8)).codec == delta.PLANES


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F16", "F32", "F64"])
def test_every_element_size_and_the_empty_chunk(dtype):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 8 * 37, np.uint8)
    new = old.copy()
    new[::29] += 1
    round_trip(old, new, dtype)
    round_trip(None, np.zeros(8 * 37, np.uint8), dtype)
    round_trip(None, np.zeros(0, np.uint8), dtype)


def test_a_frame_that_declares_other_sizes_is_refused_before_it_is_decoded():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(Corrupt, match="declares 67108864"):
        decoded(delta.PLANES, None, bomb, 64)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    with pytest.raises(Corrupt, match="declares"):
        decoded(delta.PLANES, None, silent, 64)


def test_a_frame_that_lies_about_its_size_is_refused():
    honest = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    at = honest.index(200)  # the one-byte content size in the frame header
    honest[at] = 100
    with pytest.raises(Corrupt):
        decoded(delta.PLANES, None, bytes(honest), 100, "U8")


@pytest.mark.parametrize(
    ("codec", "old", "payload", "size"),
    [
        ("lz77", None, b"", 4),
        (delta.EQUAL, None, b"", 4),
        (delta.EQUAL, bits([1, 2]), b"x", 4),
        (delta.XOR, None, b"", 4),
        (delta.RAW, None, b"abc", 4),
        (delta.RAW, None, b"abc", 3),  # not a multiple of the element
        (delta.STEPS, None, b"", 4),
        (delta.STEPS, bits([1, 2]), b"", 4),
        (delta.STEPS, bits([1, 2]), b"\xff" * 40, 4),
        (delta.PLANES, None, b"", 4),
        (delta.PLANES, None, zstandard.ZstdCompressor().compress(b"abcd") + b"tail", 4),
        (delta.PLANES, None, b"", delta.MAX_CHUNK_BYTES * 2),
    ],
)
def test_bad_payloads_are_corrupt(codec, old, payload, size):
    with pytest.raises(Corrupt):
        decoded(codec, old, payload, size)


def test_encode_refuses_what_is_not_one_chunk():
    with pytest.raises(ValueError, match="same shape"):
        delta.encode(bits([1]), bits([1, 2]), dtype="BF16")
    with pytest.raises(ValueError, match="multiple"):
        delta.encode(None, np.zeros(3, np.uint8), dtype="BF16")


@pytest.mark.parametrize("codec", [delta.PLANES, delta.XOR])
@pytest.mark.parametrize("size", [0, 8])
def test_a_frame_to_be_skipped_is_no_payload_and_takes_no_memory_for_its_length(codec, size):
    payload = b"\x50\x2a\x4d\x18" + b"\xff\xff\xff\x7f" + zstandard.compress(bytes(size))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="does not start with a zstd frame"):
            decoded(codec, None if codec == delta.PLANES else np.zeros(size, np.uint8), payload, size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_steps_are_for_16_bit_floats_only():
    with pytest.raises(Corrupt, match="BF16 and F16"):
        decoded(delta.STEPS, bits([1, 2]), b"\0" * 8, 4, "U16")


@pytest.mark.parametrize("size", [64, 65, 127, 128, 1000, 40_003])
@pytest.mark.parametrize("share", [0.0003, 0.01, 0.07, 0.2])
def test_steps_of_any_density_and_length_come_back(size, share):
    rng = np.random.default_rng(size)
    old = (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = stepped(old, share)
    coded = round_trip(bits(old), bits(new))
    if size > 4000 and share < 0.1:
        assert coded.codec == delta.STEPS


def test_a_change_in_the_first_and_the_last_element_of_each_class():
    old = np.repeat(np.arange(1, 255, dtype=np.uint16) << 7, 200)  # 254 exponents: more than there are classes
    for step in (1, -1, 300):
        new = old.copy()
        new[::200] += np.uint16(step & 0xFFFF)
        new[199::200] -= np.uint16(step & 0xFFFF)
        assert round_trip(bits(old), bits(new)).codec == delta.STEPS


def test_long_gaps_and_long_steps_are_escaped():
    old = np.full(1 << 21, 0x3C00, np.uint16)
    new = old.copy()
    new[-1], new[[5, 6]] = 0xFFFF, 0x8000
    assert round_trip(bits(old), bits(new)).codec == delta.STEPS


def test_every_one_bit_damage_of_a_steps_payload_is_refused_or_stays_inside():
    rng = np.random.default_rng(3)
    old = (rng.normal(0, 0.02, 3000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    coded = delta.encode(bits(old), bits(stepped(old, 0.02)), dtype="BF16")
    assert coded.codec == delta.STEPS
    refused = 0
    for bit in range(8 * len(coded.payload)):
        payload = bytearray(coded.payload)
        payload[bit // 8] ^= 1 << bit % 8
        try:
            decoded(delta.STEPS, bits(old), bytes(payload), 6000)
        except Corrupt:
            refused += 1
    assert refused
    for length in range(len(coded.payload)):
        with pytest.raises(Corrupt):
            decoded(delta.STEPS, bits(old), coded.payload[:length], 6000)
    with pytest.raises(Corrupt, match="goes on"):
        decoded(delta.STEPS, bits(old), coded.payload + b"\0", 6000)


def test_steps_onto_another_base_are_refused_or_give_other_bytes():
    """The hash of the result decides in the store; here nothing may be written outside."""
    rng = np.random.default_rng(4)
    old = (rng.normal(0, 0.02, 3000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    coded = delta.encode(bits(old), bits(stepped(old, 0.02)), dtype="BF16")
    for other in (np.zeros_like(old), np.full_like(old, 0xFFFF), rng.permutation(old)):
        with contextlib.suppress(Corrupt):
            decoded(delta.STEPS, bits(other), coded.payload, 6000)


def test_the_longest_steps_there_are():
    for one, other in ((0x7F80, 0xBF80), (0x7FFF, 0xFFFF), (0xFFFF, 0x7FFF), (0x0000, 0x8000)):
        old = np.zeros(300, np.uint16)
        old[7] = one
        new = old.copy()
        new[7] = other
        assert round_trip(bits(old), bits(new)).codec == delta.STEPS


def test_a_stream_longer_than_usual_is_written_again_with_more_room(monkeypatch):
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 40_000).astype(np.uint16)
    new = old.copy()
    new[rng.choice(old.size, 4000, replace=False)] += 1
    usual = encoder.encode(old, new, 7)
    assert usual is not None
    assert len(usual) * 8 > 8192
    monkeypatch.setattr(encoder, "_USUAL_BITS", 0)
    assert encoder.encode(old, new, 7) == usual
