"""Inputs for the fuzzing campaign of run.py: real payloads, manifests and stores, and mutations of them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard
from tests.examinations.fuzz.seeds import payloads, published
from tests.examinations.fuzz.targets import Case

from ostinato.core.weights import ITEMSIZES
from ostinato.weights.delta import codec as delta
from ostinato.weights.version.content import VERSIONS, hash_of, root_of
from ostinato.weights.version.manifest import MAX_MANIFEST_BYTES, canonical

DTYPES = tuple(ITEMSIZES)
ODD_NUMBERS = (
    0,
    1,
    -1,
    2,
    255,
    2**16,
    2**31,
    2**32 - 1,
    2**40 + 1,
    2**53,
    2**53 + 1,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
)
ODD_TEXTS = (
    "",
    "..",
    "/",
    "a/../b",
    "\0",
    "é",
    "x" * 600,
    "full",
    "delta",
    "BF16",
    "steps",
    "0" * 64,
    "f" * 64,
    "F" * 64,
)
_LARGEST = 1 << 21  # most bytes in a case


class Source:
    """Makes cases from one seed. `keep` adds a case that ended in a new way to the corpus, to be mutated further."""

    def __init__(self, seed: int, kinds: tuple[str, ...] = ("decode", "manifest", "follow")) -> None:
        self._draw = random.Random(seed)
        self._payloads = [list(group) for group in payloads(seed)]
        self._store, self._documents = asyncio.run(published())
        self._corpus: dict[str, list[Case]] = {kind: [] for kind in kinds}
        weights = {"decode": 70, "manifest": 22, "follow": 8}
        self._kinds, self._weights = kinds, [weights[kind] for kind in kinds]

    def keep(self, case: Case) -> None:
        kept = self._corpus[case.kind]
        if sum(map(len, case.blobs)) < 1 << 16 and "repeat" not in case.about:
            kept.append(case)
            del kept[:-256]

    def next(self) -> Case:
        kind = self._draw.choices(self._kinds, self._weights)[0]
        known = self._corpus[kind]
        from_corpus = bool(known) and self._draw.random() < 0.4
        make: dict[str, Callable[[Case | None], Case]] = {
            "decode": self._decode,
            "manifest": self._manifest,
            "follow": self._follow,
        }
        return make[kind](self._draw.choice(known) if from_corpus else None)

    # ------------------------------------------------------------ payloads

    def _payload(self) -> Case:
        """A random payload. Half of them are of 16-bit floats, which have a codec of their own."""
        return self._draw.choice(self._payloads[self._draw.random() < 0.5])

    def _decode(self, known: Case | None) -> Case:
        draw = self._draw
        case = known or self._payload()
        about, (payload, old) = dict(case.about), case.blobs
        what = draw.random()
        if what < 0.45:
            payload = self._bytes(payload, self._payload().blobs[0])
        elif what < 0.6:
            payload = self._frame(payload, len(old))
        elif what < 0.75:
            about["codec"], payload = delta.STEPS, steps_like(draw)
        elif what < 0.8:
            payload = draw.randbytes(draw.choice((0, 1, 8, 40, 3000)))
        if draw.random() < 0.15:
            about["dtype"] = draw.choice(DTYPES)
        if draw.random() < 0.1:
            about["codec"] = draw.choice([*sorted(delta.CODECS), "other", ""])
        if draw.random() < 0.1:
            about["old"] = not about["old"]
        if draw.random() < 0.2:
            old = self._bytes(old, old)[: 1 << 18]
        if draw.random() < 0.1:
            old = old[: draw.choice((0, 1, 2, 127, 128, 129, len(old) // 2))]
        about["at_end"] = draw.random() < 0.5
        about["declared"] = 2 * len(old)
        return Case("decode", about, [payload[:_LARGEST], old])

    def _bytes(self, data: bytes, other: bytes) -> bytes:
        draw, made = self._draw, bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
            at = draw.randrange(len(made)) if made else 0
            near = min(at, 24) if draw.random() < 0.4 else at  # headers are at the start
            match draw.randrange(8):
                case 0 if made:
                    made[near] ^= 1 << draw.randrange(8)
                case 1 if made:
                    made[near] = draw.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, draw.randrange(256)))
                case 2:
                    del made[at:]
                case 3:
                    made += draw.randbytes(draw.choice((1, 8, 64)))
                case 4:
                    del made[at : at + draw.randrange(1, 64)]
                case 5:
                    made[at:at] = made[at : at + draw.randrange(1, 256)]
                case 6 if other:
                    start = draw.randrange(len(other))
                    made[at:] = other[start : start + draw.randrange(1, 4096)]
                case _:
                    made[near : near + 8] = draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(
                        8, "little"
                    )
        return bytes(made)

    def _frame(self, payload: bytes, size: int) -> bytes:
        """A well-formed zstd frame that declares or holds something else."""
        draw = self._draw
        held = draw.choice((size, size + 1, max(0, size - 1), 2 * size, 1 << 20))
        match draw.randrange(7):
            case 0:
                return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
            case 1:
                return zstandard.ZstdCompressor().compress(bytes(held))
            case 2:  # declares `size`, holds more: single segment, 8 bytes of content size
                blocks = b"".join((b"\x02\x00\x10\x00",) * draw.choice((1, 9, 4000)))  # 128 KiB of one byte each
                return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + blocks + b"\x01\x00\x00"
            case 3:
                return (
                    b"\x28\xb5\x2f\xfd"
                    + b"\xe0"
                    + draw.choice((2**62, 2**64 - 1, 2**33)).to_bytes(8, "little")
                    + payload[:64]
                )
            case 4:
                return b"\x50\x2a\x4d\x18" + draw.choice((4, 2**32 - 1)).to_bytes(4, "little") + b"abcd" + payload
            case 5:
                return payload + payload
            case _:
                return zstandard.ZstdCompressor(level=1).compress(self._bytes(bytes(size), payload)[:_LARGEST])

    # ------------------------------------------------------------ manifests

    def _manifest(self, known: Case | None) -> Case:
        draw = self._draw
        if known is not None:
            data = self._bytes(known.blobs[0], draw.choice(self._documents))
            return Case("manifest", {"declared": declared(data)}, [data])
        if draw.random() < 0.04:
            return self._swollen()
        data = self._edited(draw.choice(self._documents))
        match draw.randrange(6):
            case 0:
                data = self._bytes(data, draw.choice(self._documents))
            case 1:
                data = zstandard.ZstdCompressor(level=1).compress(data)
            case 2:
                data = self._bytes(zstandard.ZstdCompressor(level=1).compress(data), data)
            case 3:
                data = self._frame(data, len(data))
            case _:
                pass
        return Case("manifest", {"declared": declared(data)}, [data[:_LARGEST]])

    def _swollen(self) -> Case:
        """A manifest with a great many copies of one item, plain or as a compression bomb of a few kilobytes."""
        draw = self._draw
        size = draw.choice((1 << 16, 1 << 18, 1 << 20, 1 << 22))
        unit = draw.choice(SWELLING)
        document = json.loads(draw.choice(self._documents))
        field, opened, closed = draw.choice(PLACES)
        body = unit * (size // len(unit))
        if opened == "{":
            body = b",".join(b'"%d":%b' % (i, unit.rstrip(b",") or b"0") for i in range(size // (len(unit) + 9))) + b","
        text = canonical({**document, field: "@"}).replace(b'"@"', opened.encode() + body + b"0" + closed.encode())
        if opened == "{":
            text = text.replace(b",0}", b"}")
        if draw.random() < 0.05:
            return Case(
                "manifest", {"repeat": (MAX_MANIFEST_BYTES >> 10) + 1, "declared": MAX_MANIFEST_BYTES}, [text[:1024]]
            )
        data = zstandard.ZstdCompressor(level=1).compress(text)
        return Case("manifest", {"declared": len(text)}, [data])

    def _edited(self, data: bytes) -> bytes:
        """A document with some fields changed, in canonical form if possible, and sometimes with its root and sums corrected."""
        draw, document = self._draw, json.loads(data)
        for _ in range(draw.choice((1, 1, 2, 3))):
            places = list(_places(json.loads(data)))
            *parents, last = draw.choice(list(_places(document)))
            target = document
            for key in parents:
                target = target[key]
            if draw.random() < 0.1:
                document["routes"] = [self._route() for _ in range(draw.choice((0, 1, 2, 16, 17)))]
            else:
                self._edit(target, last, json.loads(data), draw.choice(places))
        if draw.random() < 0.4:
            _repair(document)
        try:
            return canonical(document)
        except (ValueError, TypeError, RecursionError):
            return json.dumps(document, allow_nan=True).encode()

    def _edit(self, target: Any, last: Any, found: Any, other: tuple[Any, ...]) -> None:
        """Change one value: delete it, or make it odd, nested, repeated, or the document's value at `other`."""
        draw = self._draw
        match draw.randrange(8):
            case 0 if isinstance(target, dict):
                del target[last]
            case 1 if isinstance(target, dict):
                target[draw.choice(("routes", "base", "links", "x", "codec"))] = draw.choice(ODD_NUMBERS)
            case 2:
                target[last] = _nested(draw.choice((3, 50, 190, 900)))
            case 3:
                for key in other:
                    found = found[key]
                target[last] = found
            case 4 if isinstance(target[last], list):
                target[last] = target[last] * draw.choice((0, 2, 40))
            case 5 | 6:
                target[last] = draw.choice(ODD_NUMBERS)
            case _:
                target[last] = draw.choice((*ODD_TEXTS, None, True, [], {}))

    def _route(self) -> dict[str, Any]:
        draw = self._draw
        names = [*self._store.objects, *self._store.links.values(), "0" * 64, None]
        return {"manifest": draw.choice(names), "base": draw.choice(names), "bytes": draw.choice((0, 1, 2**53, -1))}

    # ------------------------------------------------------------ stores

    def _follow(self, known: Case | None) -> Case:
        """A store with objects corrupted under their own names, or with edited manifests stored under new names that refs point to."""
        draw = self._draw
        if known is None:
            objects, links = dict(self._store.objects), dict(self._store.links)
        else:
            objects, links = dict(zip(known.about["names"], known.blobs, strict=True)), dict(known.about["links"])
        for _ in range(draw.choice((1, 1, 2, 3))):
            name = draw.choice(list(objects))
            match draw.randrange(6):
                case 0:
                    objects[name] = self._bytes(objects[name], objects[draw.choice(list(objects))])
                case 1:
                    del objects[name]
                case 2:
                    objects[name] = objects[draw.choice(list(objects))]
                case 3:
                    links[draw.choice(list(links))] = draw.choice([*objects, *links.values(), "x", "0" * 64])
                case _:
                    edited = self._edited(draw.choice(self._documents))
                    data = zstandard.ZstdCompressor(level=1).compress(edited) if draw.random() < 0.5 else edited
                    made = hash_of(data)
                    objects[made] = data
                    root = _root(edited)
                    for ref in ("live", VERSIONS + root):
                        if draw.random() < 0.8:
                            links[ref] = made
        ref = draw.choice(("live", "live", "live", *links, "../x", ""))
        before = draw.choice((None, *links))  # the version that the follower fetches first, if possible
        about = {"names": list(objects), "links": links, "ref": ref, "before": before, "declared": 1 << 24}
        return Case("follow", about, list(objects.values()))


SWELLING = (
    b"1,",
    b"{},",
    b"[],",
    b'"",',
    b"null,",
    b'{"a":1},',
    b"[1,2],",
    b'"' + b"x" * 90 + b'",',
    b"1e9,",
    b"-1,",
    b"true,",
)
PLACES = (
    ("tensors", "[", "]"),
    ("routes", "[", "]"),
    ("meta", "{", "}"),
    ("zz", "[", "]"),
    ("tensors", '[{"shape":[', "]}]"),
)


def declared(data: bytes) -> int:
    """The size that a manifest declares, up to the limit that its readers accept."""
    if not data.startswith(zstandard.FRAME_HEADER):
        return len(data)
    try:
        return min(max(zstandard.frame_content_size(data), 0), MAX_MANIFEST_BYTES)
    except zstandard.ZstdError:
        return len(data)


def steps_like(draw: random.Random) -> bytes:
    """A stream in the layout of the codec for 16-bit floats: headers, gaps, signs and lengths, with boundary values."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend((value >> i) & 1 for i in range(count))

    def gamma(value: int) -> None:
        size = (value + 1).bit_length() - 1
        put(1 << size, size + 1)
        put((value + 1) & ((1 << size) - 1), size)

    classes = draw.choice((0, 1, 1, 2, 3, 24, 25, 31))
    put(classes, 5)
    for _ in range(classes):
        gamma(draw.choice((0, 0, 1, 100, 255, 256, 2**15, 2**31 - 2)))
        gamma(draw.choice((0, 0, 1, 8, 254, 255, 2**16)))
        gamma(draw.choice((0, 0, 3, 63, 300, 2**20, 2**31 - 2)))
        put(draw.choice((0, 1, 3, 8, 24, 31)), 5)
        put(draw.choice((0, 0, 1, 3, 24, 31)), 5)
    for _ in range(draw.choice((0, 4, 200, 3000))):
        put(draw.choice((0, 1, 3, 2**24 - 1, 2**32 - 1, draw.getrandbits(32))), draw.choice((1, 2, 5, 8, 32)))
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
    return packed[: draw.choice((len(packed), len(packed), max(1, len(packed) // 2)))]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        if len(path) < 6:
            yield from _places(inner, (*path, key))


def _nested(depth: int) -> Any:
    value: Any = 0
    for at in range(depth):
        value = [value] if at % 2 else {"a": value}
    return value


def _root(document: bytes) -> str:
    try:
        return str(json.loads(document)["root"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "0" * 64


def _repair(document: dict[str, Any]) -> None:
    """Correct sums and root to match the rest of the document, so that errors are met deeper inside the reader."""
    tensors: Any = copy.copy(document.get("tensors"))
    try:
        document["payload_bytes"] = sum(chunk["length"] for tensor in tensors for chunk in tensor["chunks"])
        document["root"] = root_of(
            (t["name"], t["dtype"], tuple(t["shape"]), tuple(chunk["result"] for chunk in t["chunks"])) for t in tensors
        )
    except (TypeError, KeyError, AttributeError):
        return
