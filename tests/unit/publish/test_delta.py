import numpy as np
import pytest
import zstandard

from ostinato.core.errors import Corrupt
from ostinato.publish import delta

# bf16 codes that break careless codecs: +-0, +-inf, quiet and signalling NaNs with payloads, subnormals, the extremes.
STRANGE = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FC1, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F]


def bits(codes) -> np.ndarray:
    return np.asarray(codes, np.uint16).view(np.uint8)


def round_trip(old, new, itemsize=2):
    coded = delta.encode(old, new, itemsize=itemsize)
    back = delta.decode(coded.codec, old, coded.payload, size=new.size, itemsize=itemsize)
    assert back.tobytes() == new.tobytes()
    return coded


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
    assert sparse.codec == delta.XOR
    assert len(sparse.payload) < bits(new).size / 40
    noise = round_trip(bits(old), rng.integers(0, 256, bits(old).size, np.uint8))
    assert noise.codec == delta.RAW
    assert len(noise.payload) == bits(old).size


def test_other_weights_are_coded_alone_when_that_is_smaller():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 1 << 16, np.uint8)
    assert round_trip(old, np.full(1 << 16, 7, np.uint8)).codec == delta.PLANES


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_element_size_and_the_empty_chunk(itemsize):
    rng = np.random.default_rng(itemsize)
    old = rng.integers(0, 256, 8 * 37, np.uint8)
    new = old.copy()
    new[::29] += 1
    round_trip(old, new, itemsize)
    round_trip(None, np.zeros(8 * 37, np.uint8), itemsize)
    round_trip(None, np.zeros(0, np.uint8), itemsize)


def test_a_frame_that_declares_other_sizes_is_refused_before_it_is_decoded():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(Corrupt, match="declares 67108864"):
        delta.decode(delta.PLANES, None, bomb, size=64, itemsize=2)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    with pytest.raises(Corrupt, match="declares"):
        delta.decode(delta.PLANES, None, silent, size=64, itemsize=2)


def test_a_frame_that_lies_about_its_size_is_refused():
    honest = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    at = honest.index(200)  # the one-byte content size in the frame header
    honest[at] = 100
    with pytest.raises(Corrupt):
        delta.decode(delta.PLANES, None, bytes(honest), size=100, itemsize=1)


@pytest.mark.parametrize(
    ("codec", "old", "payload", "size"),
    [
        ("lz77", None, b"", 4),
        (delta.EQUAL, None, b"", 4),
        (delta.EQUAL, bits([1, 2]), b"x", 4),
        (delta.EQUAL, bits([1]), b"", 4),
        (delta.XOR, None, b"", 4),
        (delta.RAW, None, b"abc", 4),
        (delta.RAW, None, b"abc", 3),  # not a multiple of the element
        (delta.RAW, None, b"", -2),
        (delta.PLANES, None, b"", 4),
        (delta.PLANES, None, zstandard.ZstdCompressor().compress(b"abcd") + b"tail", 4),
        (delta.PLANES, None, b"", delta.MAX_CHUNK_BYTES * 2),
    ],
)
def test_bad_payloads_are_corrupt(codec, old, payload, size):
    with pytest.raises(Corrupt):
        delta.decode(codec, old, payload, size=size, itemsize=2)


def test_encode_refuses_what_is_not_one_chunk():
    with pytest.raises(ValueError, match="same shape"):
        delta.encode(bits([1]), bits([1, 2]), itemsize=2)
    with pytest.raises(ValueError, match="multiple"):
        delta.encode(None, np.zeros(3, np.uint8), itemsize=2)
