"""The codec is lossless for any bits, and no bytes at all make a decoder or parser do anything but refuse."""

import asyncio
import contextlib
import copy
import json
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.delta import codec as delta
from ostinato.weights.delta.bits import nth
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.version.content import hash_of
from ostinato.weights.version.manifest import canonical, parse, plain, to_bytes

STRANGE = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x3F80]
CODES = st.one_of(st.sampled_from(STRANGE), st.integers(0, 0xFFFF))
DTYPES = st.sampled_from(["U8", "BF16", "F16", "U16", "F32", "F64"])


def decoded(codec, old, payload, size, dtype="BF16"):
    target = np.zeros(size, np.uint8) if old is None else old.copy()
    delta.decode(codec, target, payload, dtype=dtype, old=old is not None)
    return target


@given(st.lists(st.tuples(CODES, CODES), max_size=300), st.integers(1, 3))
def test_any_bf16_codes_to_any_others(pairs, level):
    old, new = (np.array([pair[k] for pair in pairs], np.uint16).view(np.uint8) for k in (0, 1))
    coded = delta.encode(old, new, dtype="BF16", level=level)
    assert decoded(coded.codec, old, coded.payload, new.size).tobytes() == new.tobytes()
    assert len(coded.payload) <= new.size


@given(
    st.lists(CODES, min_size=64, max_size=400),
    st.dictionaries(st.integers(0, 399), st.tuples(st.integers(-3, 3), st.integers(0, 14))),
    st.sampled_from(["BF16", "F16"]),
)
def test_any_steps_from_any_codes(codes, steps, dtype):
    """Few changes, near and far: what the codec for 16-bit floats takes, tails of blocks included."""
    old = np.array(codes, np.uint16)
    new = old.copy()
    for at, (step, power) in steps.items():
        new[at % len(new)] = (int(new[at % len(new)]) + (step << power)) & 0xFFFF
    coded = delta.encode(old.view(np.uint8), new.view(np.uint8), dtype=dtype)
    assert decoded(coded.codec, old.view(np.uint8), coded.payload, 2 * len(new), dtype).tobytes() == new.tobytes()


@given(hnp.arrays(np.uint64, st.integers(0, 64)), hnp.arrays(np.uint64, st.integers(0, 64)), DTYPES, st.booleans())
def test_any_bytes_of_any_element_size(one, two, dtype, alone):
    size = min(one.size, two.size)
    old, new = None if alone else one[:size].view(np.uint8), two[:size].view(np.uint8)
    coded = delta.encode(old, new, dtype=dtype)
    assert decoded(coded.codec, old, coded.payload, new.size, dtype).tobytes() == new.tobytes()


@given(st.sampled_from([*sorted(delta.CODECS), "other"]), st.binary(max_size=400), st.integers(0, 4000), DTYPES)
def test_any_payload_is_decoded_or_refused_in_bounded_memory(codec, payload, size, dtype):
    tracemalloc.start()
    try:
        decoded(codec, np.arange(size, dtype=np.uint16).view(np.uint8)[:size], payload, size, dtype)
    except Corrupt:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 18


@given(st.data())
def test_a_damaged_payload_is_refused_or_stays_in_its_place(data):
    old = np.arange(600, dtype=np.uint16)
    new = old.copy()
    new[:: data.draw(st.sampled_from([1, 7, 50]))] += 1
    coded = delta.encode(old.view(np.uint8), new.view(np.uint8), dtype="BF16")
    payload = bytearray(coded.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Corrupt):
        decoded(coded.codec, old.view(np.uint8), bytes(payload), 1200)


def _published() -> tuple[MemoryStore, list[bytes]]:
    async def publish():
        store = MemoryStore()
        publisher = VersionPublisher(store)
        base, manifests = None, []
        for number in range(3):
            data = np.arange(400, dtype=np.uint16) + number
            weights = {name: WeightArray("U16", (20, 20), data.view(np.uint8)) for name in ("a.w", "b/w")}
            done = await publisher.publish(number, weights, run="r", base=base, ref="live", meta={"x": 0.5})
            base = done.policy
            manifests.append(plain(store.objects[done.manifest]))
        return store, manifests

    return asyncio.run(publish())


STORE, MANIFESTS = _published()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["..", "/", "a" * 64, "full", "BF16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=2000))
def test_any_bytes_are_no_manifest(data):
    refused_or_canonical(data)


@given(JSON)
def test_any_json_is_no_manifest(value):
    refused_or_canonical(json.dumps(value).encode())


def refused_or_canonical(data: bytes) -> None:
    """Parsing either refuses as Corrupt or gives a manifest that spells exactly these bytes."""
    try:
        manifest = parse(data)
    except Corrupt:
        return
    assert to_bytes(manifest) == data


@given(st.data())
def test_a_manifest_with_bytes_changed_is_refused_or_means_what_it_says(data):
    document = bytearray(data.draw(st.sampled_from(MANIFESTS)))
    for _ in range(data.draw(st.integers(1, 5))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    refused_or_canonical(bytes(document))


def places(value, path=()):
    """The path of every value inside a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@settings(max_examples=200)
@given(st.data())
def test_a_follower_given_any_edited_manifest_refuses_or_returns_the_promised_bytes(data):
    """The edited manifest is stored under its own hash and its ref moved there: only the parser and the hashes protect."""
    document = json.loads(data.draw(st.sampled_from(MANIFESTS)))
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(sorted(places(document), key=str)))
        target = document
        for key in parents:
            target = target[key]
        target[last] = data.draw(JSON | st.sampled_from(sorted(STORE.objects)))
    try:
        edited = canonical(document)
    except (ValueError, TypeError):
        return
    store = copy.deepcopy(STORE)
    name = hash_of(edited)
    store.objects[name] = edited
    store.links["live"] = name

    async def fetch():
        follower = Follower(store)
        policy = await follower.resolve("live")
        assert policy is not None
        assert policy.hash in {parse(manifest).root for manifest in MANIFESTS}
        weights = await follower.fetch(policy)
        assert set(weights) == {"a.w", "b/w"}

    with contextlib.suppress(NotFound, Corrupt):
        asyncio.run(fetch())


@given(st.integers(1, 2**64 - 1), st.sampled_from([0, 2**64 - 1, 0xFF << 56, 0x8080808080808080, 0x0101010101010101]))
def test_the_nth_set_bit_is_found_in_any_word(word, pattern):
    for each in (word, word | pattern, (word & pattern) or 1):
        places = [place for place in range(64) if each >> place & 1]
        assert [nth(np.uint64(each), n) for n in range(len(places))] == places
