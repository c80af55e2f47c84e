"""Any routes survive the codec; no bytes make it do anything but answer or raise BadRoutes."""

import struct
import zlib
from math import comb, log2

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import BadRoutes
from ostinato.core.routes import check, decode, encode, size


@st.composite
def shapes(draw):
    experts = draw(st.sampled_from([1, 2, 3, 8, 60, 64, 128, 255, 256, 257, 512, 1024]) | st.integers(1, 600))
    top_k = draw(st.integers(1, min(experts, 24)))
    return draw(st.integers(1, 40)), draw(st.integers(1, 5)), top_k, experts


def _routes(shape, seed):
    tokens, layers, top_k, experts = shape
    chosen = np.argsort(np.random.default_rng(seed).random((tokens, layers, experts)), axis=-1)
    chosen[-1, -1] = np.arange(experts)[::-1]  # the last set of all: the largest rank
    return chosen[..., :top_k]


@given(shapes(), st.integers(0, 2**32 - 1))
def test_round_trip(shape, seed):
    tokens, layers, top_k, experts = shape
    ids = _routes(shape, seed)
    data = encode(ids, experts)
    expected = {"experts": experts, "layers": layers, "top_k": top_k, "tokens": tokens}
    out = decode(data, **expected)
    np.testing.assert_array_equal(out, np.sort(ids, axis=-1))
    check(out, **expected)
    assert len(data) == size(tokens, layers, top_k, experts)
    assert encode(out, experts) == data  # one form only
    assert encode(ids[..., ::-1].astype(np.uint16), experts) == data
    whole = comb(experts, top_k)
    if whole < 2**63:
        assert len(data) <= 18 + 1 + tokens * layers * max(1.0, np.ceil(log2(whole))) / 8


@given(st.binary(max_size=80))
def test_any_bytes(data):
    for candidate in (data, b"ORT1" + data, b"ORT1" + struct.pack("<I", zlib.crc32(data)) + data):
        _answers_or_raises(candidate)


@given(shapes().filter(lambda shape: shape[0] * shape[1] < 20), st.data())
def test_any_payload_behind_a_right_header(shape, data):
    tokens, layers, top_k, experts = shape
    length = size(tokens, layers, top_k, experts) - 18
    payload = data.draw(st.binary(min_size=length, max_size=length))
    tail = struct.pack("<IHHH", tokens, layers, top_k, experts) + payload
    _answers_or_raises(b"ORT1" + struct.pack("<I", zlib.crc32(tail)) + tail)


def _answers_or_raises(data):
    ids, reason = _attempt(decode, data)
    if ids is None:
        assert reason in {"missing", "corrupt", "truncated"}
        return
    again, reason = _attempt(encode, ids, struct.unpack_from("<H", data, 16)[0])
    assert again == data or reason == "zero"  # what is accepted is exactly what would have been written


def _attempt(function, *args):
    try:
        return function(*args), None
    except BadRoutes as error:
        return None, error.reason
