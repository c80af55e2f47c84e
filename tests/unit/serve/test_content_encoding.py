"""Compressed requests are taken in the encodings that clients use, and unpacked to a bounded length."""

import gzip
import json
import tracemalloc
import zlib

import pytest
import zstandard
from gateway_world import ASK, world
from tests.growth import grows_with_its_input

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.serve.config import QuotaConfig
from ostinato.serve.wire.body import unpacking


def streamed(data):
    """zstd as it is written without knowing the length beforehand."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
    " zstd ": streamed,
}


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_compressed_request_is_answered(encoding, path):
    async with world() as w:
        data = PACKED[encoding](json.dumps({**ASK, "max_tokens": 4}).encode())
        status, _, body = await w.post(path, data=data, headers={"content-encoding": encoding.strip()})
        assert status == 200, body


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "zstd,gzip", "snappy", "x" * 300])
async def test_an_unknown_encoding_is_refused_by_name(encoding):
    async with world() as w:
        status, _, body = await w.post("/v1/chat/completions", ASK, headers={"content-encoding": encoding})
        assert status == 415
        assert repr(encoding[:200]) in body["error"]["message"]
        assert (await w.post("/v1/messages", ASK, headers={"content-encoding": encoding}))[0] == 415


@pytest.mark.parametrize("encoding", PACKED)
def test_what_is_unpacked_is_bounded(encoding):
    pack, unpack = PACKED[encoding], unpacking({b"content-encoding": encoding.encode()}, 1000)
    assert unpack(pack(b"x" * 1000)) == b"x" * 1000

    def refuse(bomb):
        with pytest.raises(TooLarge):
            unpack(bomb)

    assert grows_with_its_input(refuse, pack(b"x" * 1001), pack(b"x" * 50_000_000))
    for broken in (b"", b"x", pack(b"x" * 500)[:-1], pack(b"x") + b"y", pack(b"x") * 2):
        with pytest.raises(BadRequest):
            unpack(broken)


def test_a_body_that_is_not_compressed_is_left_alone():
    assert unpacking({}, 10) is None
    assert unpacking({b"content-encoding": b"identity"}, 10) is None


async def test_a_tenant_pays_for_what_is_unpacked():
    async with world(quota=QuotaConfig(bytes_per_s=15_000)) as w:
        body = json.dumps({**ASK, "messages": [{"role": "user", "content": "x" * 40_000}], "max_tokens": 1}).encode()
        for expected in (True, False):
            status, _, _ = await w.post(
                "/v1/chat/completions", data=gzip.compress(body), headers={"content-encoding": "gzip"}
            )
            assert (status != 429) is expected


def test_a_zstd_frame_that_lies_about_its_length_is_not_unpacked():
    """A thousand blocks of 128 KiB of one byte each, in a frame that declares 1.5 MB."""
    head = (0xFD2FB528).to_bytes(4, "little") + bytes([0b10000000, 0b00111000]) + (1_500_000).to_bytes(4, "little")
    block = ((128 * 1024) << 3 | 0b010).to_bytes(3, "little") + b"x"
    last = (1 << 3 | 0b011).to_bytes(3, "little") + b"x"
    lying = head + 1_000 * block + last
    assert zstandard.frame_content_size(lying) == 1_500_000
    tracemalloc.start()
    with pytest.raises((TooLarge, BadRequest)):
        unpacking({b"content-encoding": b"zstd"}, 2 * 2**20)(lying)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20
