import json
import re
import tracemalloc

import numpy as np
import pytest
import zstandard

from ostinato.core.errors import BadRequest, Corrupt
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.manifest import about, canonical, parse, plain, stored, to_bytes


def weights(value: float):
    data = np.full(64, value, np.float32)
    data[0] = 1.0
    return {
        "b.w": WeightArray("F32", (8, 8), data.view(np.uint8)),
        "a": WeightArray("F32", (), data[:1].view(np.uint8)),
    }


async def documents():
    """A full snapshot's manifest and a delta's, as plain JSON."""
    store = MemoryStore()
    publisher = VersionPublisher(store)
    full = await publisher.publish(0, weights(0.5), run="r", base=None, meta={"loss": 0.25, "note": "é"})
    delta = await publisher.publish(1, weights(0.75), run="r", base=full.policy)
    return [json.loads(plain(store.objects[done.manifest])) for done in (full, delta)]


async def test_bytes_are_canonical_and_come_back_equal():
    for document in await documents():
        data = canonical(document)
        assert to_bytes(parse(data)) == data
        assert b" " not in data
        assert list(document) == sorted(document)


async def test_a_manifest_names_its_policy_parent_and_kind():
    full, delta = (parse(canonical(document)) for document in await documents())
    assert (full.kind, full.links, full.parent, full.meta) == ("full", 0, None, {"loss": 0.25, "note": "é"})
    assert (delta.kind, delta.links, delta.policy.number) == ("delta", 1, 1)
    assert [chunk.codec for tensor in delta.tensors for chunk in tensor.chunks] == ["equal", "xor-planes-zstd"]
    assert full.full_bytes == 65 * 4


def change(path, value):
    def apply(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        document[last] = value

    return apply


TENSOR = ("tensors", 1)
CHUNK = (*TENSOR, "chunks", 0)
HASH = "0" * 64


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (change(["format"], "ostinato-weights/1"), "format"),
        (change(["run"], ""), "run"),
        (change(["run"], "a\0b"), "run"),
        (change(["number"], -1), "number"),
        (change(["number"], "1"), "number"),
        (change(["number"], True), "number"),
        (change(["number"], 1 << 60), "number"),
        (change(["parent"], "../../etc/passwd"), "parent"),
        (change(["parent"], None), "parent"),
        (change(["links"], 0), "links"),
        (change(["links"], 10**9), "links"),
        (change(["kind"], "full"), "links"),
        (change(["root"], HASH), "root"),
        (change(["tensors"], []), "tensors"),
        (change(["surprise"], 1), "surprise"),
        (change(["meta"], {"x": [1]}), "meta"),
        (change(["meta"], {f"k{i}": 1 for i in range(65)}), "meta"),
        (change(["payload_bytes"], 1), "payload_bytes"),
        (change([*TENSOR, "name"], "../../b.w"), "name"),
        (change([*TENSOR, "name"], "b/../../w"), "name"),
        (change([*TENSOR, "name"], "b\0w"), "name"),
        (change([*TENSOR, "name"], "b\\w"), "name"),
        (change([*TENSOR, "name"], "a"), "tensors"),
        (change(["tensors", 0, "name"], "z"), "tensors"),
        (change(["tensors", 0, "name"], "/a"), "name"),
        (change([*TENSOR, "dtype"], "FLOAT"), "dtype"),
        (change([*TENSOR, "dtype"], "F64"), "root"),
        (change([*TENSOR, "shape"], [8, 9]), "elements"),
        (change([*TENSOR, "shape"], [8, -8]), "shape"),
        (change([*TENSOR, "shape"], [1 << 40, 1 << 40]), "chunks"),
        (change([*TENSOR, "shape"], [1] * 9), "shape"),
        (change([*TENSOR, "shape"], [1 << 41]), "shape"),
        (change([*TENSOR, "shape"], [0]), "chunks"),
        (change([*TENSOR, "shape"], [4, 16]), "root"),
        (change([*TENSOR, "chunks"], []), "chunks"),
        (change([*CHUNK, "codec"], "pickle"), "codec"),
        (change([*CHUNK, "codec"], "equal"), "length"),
        (change([*CHUNK, "object"], None), "length"),
        (change([*CHUNK, "object"], "../" + "0" * 61), "object"),
        (change([*CHUNK, "object"], HASH + "\n"), "object"),
        (change([*CHUNK, "offset"], -1), "offset"),
        (change([*CHUNK, "length"], 0), "length"),
        (change([*CHUNK, "length"], 257), "length"),
        (change([*CHUNK, "elements"], 63), "elements"),
        (change([*CHUNK, "elements"], 1 << 50), "elements"),
        (change([*CHUNK, "result"], HASH), "root"),
    ],
)
async def test_a_manifest_that_was_tampered_with_is_corrupt_and_names_the_field(edit, field):
    document = (await documents())[1]
    edit(document)
    with pytest.raises(Corrupt, match=rf"m1: field [a-z0-9_.]*{field}"):
        parse(canonical(document), "m1")


async def test_xor_cannot_stand_in_a_full_snapshot():
    document = (await documents())[0]
    document["tensors"][1]["chunks"][0]["codec"] = "xor-planes-zstd"
    with pytest.raises(Corrupt, match="is not allowed in a full snapshot"):
        parse(canonical(document))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data + b"\n",
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data.replace(b'{"anchor"', b'{"anchor":null,"anchor"', 1),
        lambda data: data[:-1],
        lambda data: b"\xff" + data,
        lambda data: b"[" * 100_000,
        lambda data: b'{"a":' * 100_000,
        lambda data: b"",
        lambda data: b"null",
        lambda data: b"NaN",
        lambda data: data.replace(b"0.25", b"NaN"),
        lambda data: data.replace(b"0.25", b"1e999"),
        lambda data: data.replace(b'"number":0', b'"number":' + b"9" * 10_000),
        lambda data: data.replace("é".encode(), b"\\ud800"),
    ],
)
async def test_anything_but_the_canonical_bytes_is_corrupt(spoil):
    data = canonical((await documents())[0])
    with pytest.raises(Corrupt):
        parse(spoil(data))


async def test_a_manifest_under_another_hash_is_refused():
    store = MemoryStore()
    done = await VersionPublisher(store).publish(0, weights(0.5), run="r", base=None)
    other = await VersionPublisher(store).publish(1, weights(0.25), run="r", base=None)
    store.objects[done.manifest] = store.objects[other.manifest]
    with pytest.raises(Corrupt, match=done.manifest):
        await Manifests(store).read(done.manifest)


async def test_a_stored_manifest_is_small_and_comes_back():
    manifest = parse(canonical((await documents())[1]))
    data = stored(manifest)
    assert data == stored(manifest)
    assert len(data) < len(to_bytes(manifest))
    assert parse(plain(data)) == manifest


@pytest.mark.parametrize(
    "data",
    [
        zstandard.ZstdCompressor().compress(bytes(1 << 27)),  # a bomb
        zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"),
        zstandard.ZstdCompressor().compress(b"{}")[:-1],
        zstandard.ZstdCompressor().compress(b"{}") + b"x",
        zstandard.FRAME_HEADER,
        zstandard.FRAME_HEADER + b"garbage",
    ],
)
def test_what_does_not_decompress_is_corrupt(data):
    with pytest.raises(Corrupt, match="m7"):
        plain(data, "m7")


def tensors(count: int) -> bytes:
    """A document of as many of the densest tensors that there can be."""
    one = '{"chunks":[],"dtype":"U8","name":"%05d","shape":[0,1,1,1,1,1,1,1]}'
    return ('{"tensors":[' + ",".join(one % at for at in range(count)) + "]}").encode()


async def test_the_densest_manifest_is_not_refused_for_its_density():
    document = (await documents())[0] | json.loads(tensors(4000))
    document["payload_bytes"] = 0
    with pytest.raises(Corrupt, match="field root"):
        parse(canonical(document))


@pytest.mark.parametrize(
    ("unit", "mark"),
    [(b"1,", ","), (b'[],"00000000000",', "["), (b'{},"0000000000000",', "{"), (b'{"a":1},', '":'), (b"1111 ,", " ")],
)
def test_a_document_denser_than_any_manifest_is_refused_before_it_is_read(unit, mark):
    data = b'{"tensors":[' + unit * (4_000_000 // len(unit)) + b"0]}"
    assert len(zstandard.compress(data)) < 2000
    with pytest.raises(Corrupt, match=re.escape(f"has {mark!r} more often")):
        parse(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"zz":[' + b"1111," * 50_000 + b"1]}", "Field required"),
        (b'{"tensors":[' + b'"aaaaaaaaaaaaaaaa",' * 50_000 + b'""]}', "Field required"),
        (b"{" + b",".join(b'"%015d":1' % at for at in range(50_000)) + b"}", "more than 16 keys"),
        (b'{"meta":{' + b",".join(b'"%015d":null' % at for at in range(50_000)) + b"}}", "Field required"),
        (tensors(4_000), "Field required"),
        (b'{"number":' + b"9" * 1_000_000 + b"}", "Invalid JSON"),
    ],
)
def test_what_is_wrong_with_a_document_takes_little_memory_to_say(data, message):
    """Errors used to hold a copy of all that they were about, each."""
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=message):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data)
    finally:
        tracemalloc.stop()


def test_what_a_publisher_says_is_bounded_as_its_readers_bound_it():
    assert about("r", 1, {"note": "," * 60_000}).meta["note"] == "," * 60_000
    with pytest.raises(BadRequest, match="meta"):
        about("r", 1, {"note": "x" * 70_000})
    with pytest.raises(BadRequest, match="meta"):
        about("r", 1, {f"k{at}": 1 for at in range(65)})
