"""The codec's size and bits, and every way in which stored routes can be wrong."""

import struct
import zlib
from itertools import combinations
from math import comb

import numpy as np
import pytest

from ostinato.core.errors import BadRoutes
from ostinato.core.routes import check, decode, encode, size

SHAPE = {"experts": 128, "layers": 48, "top_k": 8}


def _skewed(tokens, layers=48, experts=128, top_k=8, seed=0):
    """Routes of a router with favourites: Zipf popularity per layer, and neighbours that like the same experts."""
    source = np.random.default_rng(seed)
    favour = -1.2 * np.log(1.0 + np.argsort(source.random((layers, experts)), axis=-1))
    drift = np.cumsum(0.3 * source.standard_normal((tokens, layers, experts)), axis=0)
    noise = source.gumbel(size=(tokens, layers, experts))
    return np.argsort(-(favour + 0.3 * drift + noise), axis=-1)[..., :top_k]


def _sealed(tail):
    """Bytes with a right checksum: what a hostile or careless writer could make."""
    return b"ORT1" + struct.pack("<I", zlib.crc32(tail)) + tail


def _reason(function, *args, **more):
    with pytest.raises(BadRoutes) as error:
        function(*args, **more)
    return error.value.reason


def test_a_token_of_48_layers_takes_at_most_250_bytes():
    ids = _skewed(200)
    counts = np.sort(np.bincount(ids[:, 0].reshape(-1), minlength=128))
    assert counts[-16:].sum() > 3 * counts[:64].sum()  # skewed indeed
    data = encode(ids, 128)
    assert len(data) == size(200, 48, 8, 128) == 18 + 200 * 246
    assert len(data) / 200 <= 250
    np.testing.assert_array_equal(decode(data, **SHAPE, tokens=200), np.sort(ids, axis=-1))


@pytest.mark.parametrize(
    ("experts", "top_k", "bits"),
    [
        (128, 8, 41),
        (256, 8, 49),
        (64, 8, 33),
        (8, 2, 5),
        (6, 6, 1),
        (1, 1, 1),
        (512, 10, 72),
        (512, 22, 158),
        (64, 60, 20),
    ],
)
def test_bits_per_set(experts, top_k, bits):
    assert size(8, 1, top_k, experts) == 18 + bits
    source = np.random.default_rng(top_k)
    ids = np.argsort(source.random((40, 3, experts)), axis=-1)[..., :top_k]
    ids[0, 0] = range(experts - top_k, experts)
    out = decode(encode(ids, experts), experts=experts, layers=3, top_k=top_k, tokens=40)
    np.testing.assert_array_equal(out, np.sort(ids, axis=-1))
    assert out.dtype == (np.uint8 if experts <= 256 else np.int16)


def test_every_set_has_its_own_rank():
    sets = np.array(list(combinations(range(9), 4)))[:, None, :]
    assert len(sets) == comb(9, 4)
    np.testing.assert_array_equal(decode(encode(sets, 9)), sets)
    assert len({encode(np.stack([one, sets[-1]]), 9) for one in sets}) == len(sets)


def test_these_bytes_stay_readable():
    """A stored turn must still decode in later versions."""
    ids = np.array([[[0, 1, 4], [2, 3, 4]], [[7, 5, 1], [0, 2, 6]], [[1, 2, 3], [5, 6, 7]]])
    data = encode(ids, 8)
    assert data.hex() == "4f525431f57ff2b30300000002000300080044e256c30d"
    np.testing.assert_array_equal(decode(data), np.sort(ids, axis=-1))


def test_one_damaged_byte_anywhere_is_found():
    data = encode(_skewed(3, layers=2), 128)
    for at in range(len(data)):
        for flip in (1, 0x80):
            broken = bytearray(data)
            broken[at] ^= flip
            assert _reason(decode, bytes(broken)) in {"corrupt", "truncated"}


def test_missing_and_truncated_bytes():
    data = encode(_skewed(3, layers=2), 128)
    assert _reason(decode, b"") == "missing"
    assert _reason(decode, data[:10]) == "corrupt"
    assert {_reason(decode, data[:end]) for end in range(18, len(data))} == {"truncated"}
    assert _reason(decode, data + b"\0") == "corrupt"
    assert _reason(decode, data, tokens=4) == "truncated"
    assert decode(data, tokens=2).shape == (3, 2, 8)


@pytest.mark.parametrize("name", ["experts", "layers", "top_k"])
def test_routes_of_another_model_are_stale(name):
    ids = _skewed(3, layers=2)
    expected = {"experts": 128, "layers": 2, "top_k": 8}
    wrong = {**expected, name: expected[name] + 1}
    assert _reason(decode, encode(ids, 128), **wrong) == "stale"
    assert decode(encode(ids, 128), **expected).shape == ids.shape
    if name != "experts":
        assert _reason(check, ids, **wrong) == "stale"


def test_lengths_that_lie_allocate_nothing():
    for tokens, layers, top_k, experts in [
        (2**32 - 1, 48, 8, 128),
        (2**32 - 1, 65535, 65535, 65535),
        (2**32 - 1, 4096, 64, 64),
        (1, 1, 9, 8),
        (0, 48, 8, 128),
        (1, 0, 8, 128),
        (1, 1, 0, 8),
    ]:
        tail = struct.pack("<IHHH", tokens, layers, top_k, experts)
        assert _reason(decode, _sealed(tail)) in {"corrupt", "truncated"}
        assert _reason(decode, _sealed(tail + bytes(246))) in {"corrupt", "truncated"}


def test_ranks_beyond_the_last_and_loose_bits_are_found_behind_a_right_checksum():
    head = struct.pack("<IHHH", 1, 1, 2, 8)  # C(8, 2) = 28 sets in 5 bits
    assert decode(_sealed(head + bytes([27]))).tolist() == [[[6, 7]]]
    assert _reason(decode, _sealed(head + bytes([28]))) == "corrupt"
    assert _reason(decode, _sealed(head + bytes([27 | 32]))) == "corrupt"


def test_overlapping_parts_are_found_behind_a_right_checksum():
    ids = np.arange(10).reshape(1, 1, 10) + 100
    data = bytearray(encode(ids, 512))
    data[-2:] = struct.pack("<H", 100)  # the tenth expert, stored apart: now below the ninth
    assert _reason(decode, _sealed(bytes(data[8:]))) == "corrupt"


@pytest.mark.parametrize("function", [lambda ids: encode(ids, 128), lambda ids: check(ids, **SHAPE)])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: ids[:0], "missing"),
        (lambda ids: ids[0], "corrupt"),
        (lambda ids: ids.astype(float), "corrupt"),
        (lambda ids: ids + 128, "stale"),
        (lambda ids: ids - 1, "stale"),
        (np.zeros_like, "zero"),
        (lambda ids: np.concatenate([ids[:-1], 0 * ids[-1:]]), "zero"),
        (lambda ids: np.zeros_like(ids) + np.arange(8), "zero"),
        (lambda ids: ids[..., [0, 1, 2, 3, 4, 5, 6, 6]], "repeated"),
    ],
)
def test_routes_that_no_router_chose_are_refused_with_a_reason(function, change, reason):
    ids = _skewed(3)
    function(ids)
    assert _reason(function, change(ids)) == reason


def test_check_wants_as_many_tokens_as_the_turn():
    assert _reason(check, None, **SHAPE) == "missing"
    check(_skewed(3), **SHAPE, tokens=3)
    check(_skewed(3), **SHAPE, tokens=2)
    assert _reason(check, _skewed(3), **SHAPE, tokens=4) == "truncated"


def test_the_first_experts_may_be_the_chosen_ones_where_that_happens_by_chance():
    first = np.array([[[0, 1]]])
    check(first, experts=4, layers=1, top_k=2)
    check(np.tile(np.arange(6), (100, 2, 1)), experts=6, layers=2, top_k=6)  # all of them, always
