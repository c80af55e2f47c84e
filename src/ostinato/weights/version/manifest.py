"""The manifest of a version and its validating parser. A manifest is canonical JSON, compressed, stored as an object under its own hash.

It names its parent (the base of a delta), every tensor with its chunks, the location of each chunk's payload (object, offset, length), the
hash that each decoded chunk must have, and the root over all of them. Its routes are other manifests of the same root: a full snapshot, or
deltas over several versions at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import zstandard
from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import from_json

from ostinato.core.errors import BadRequest, Corrupt
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import ITEMSIZES
from ostinato.weights.delta.codec import CODECS, EQUAL, NEEDS_OLD
from ostinato.weights.version import content

FORMAT: Final = "ostinato-weights/3"
MAX_MANIFEST_BYTES: Final = 1 << 26
MAX_ROUTES: Final = 16
MAX_ABOUT_BYTES: Final = 1 << 16
"""Limit on the bytes of a caller's description of a version (`About`)."""

_MAX_KEYS: Final = 16
_DENSEST: Final = {
    b",": 5,
    b'":': 14,
    b"[": 28,
    b"{": 56,
    b" ": 1 << 30,
    b"\t": 1 << 30,
    b"\n": 1 << 30,
    b"\r": 1 << 30,
}
"""Outside of `About`, a manifest has each of these marks at most once per this many bytes. The densest case is a tensor without
elements.
"""

_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
_Part = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}\z")]
_Side = Annotated[int, Field(ge=0, le=content.MAX_ELEMENTS)]
_Count = Annotated[int, Field(ge=0, le=1 << 53)]
_Text = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]*\z")]
Meta = dict[_Text, str | int | float | bool | None]
# parsing stops at the first invalid item: a list of all errors would take many times the memory of the document
_First = FailFast()


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """Limit the number of keys, because each unknown key would add an error to memory."""
        if isinstance(value, dict) and len(value) > _MAX_KEYS:
            raise ValueError(f"has more than {_MAX_KEYS} keys")
        return value


class StoredChunk(_Strict):
    """The location of a chunk's payload, and the hash of the decoded chunk. `equal` chunks have no object.

    `payload`: the first half of the payload's own hash, which shows whether a range of an object arrived undamaged. `result`: the hash of
    the decoded chunk, which is authoritative.
    """

    codec: Annotated[str, Field(max_length=40)]
    object: _Hash | None
    offset: _Count
    length: _Count
    payload: _Part | None
    elements: Annotated[int, Field(ge=1, le=content.CHUNK_ELEMENTS)]
    result: _Hash


class Tensor(_Strict):
    """One tensor of the version."""

    name: Annotated[str, Field(max_length=512)]
    dtype: Annotated[str, Field(max_length=16)]
    shape: Annotated[tuple[_Side, ...], Field(max_length=content.MAX_RANK, strict=False), _First]
    chunks: Annotated[tuple[StoredChunk, ...], Field(strict=False), _First]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def results(self) -> tuple[str, ...]:
        """The hash of each decoded chunk."""
        return tuple(chunk.result for chunk in self.chunks)


class Route(_Strict):
    """Another route to the same root: from the version `base`, or from no weights (None). `bytes`: the size of its payloads."""

    manifest: _Hash
    base: _Hash | None
    bytes: _Count


class Signature(_Strict):
    """An Ed25519 signature over the manifest without this field (`signing`), and the signer's public key."""

    key: _Hash
    value: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}\z")]


class About(_Strict):
    """The publisher's description of a version. `numerics`: the id of the numerics contract that it was trained under, "" if unknown."""

    run: _Text
    number: _Count
    meta: Annotated[Meta, Field(max_length=64), _First]
    numerics: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*\z")]


class Manifest(About):
    """One version, or one of the routes to it.

    `links`: the number of deltas back to the nearest version with a full snapshot; `chain_bytes`: the size of their payloads; `anchor`: the
    manifest of that snapshot. A version with a full snapshot, its own or among its routes, has 0 links, because it needs no ancestor.
    """

    format: Literal["ostinato-weights/3"]
    parent: _Hash | None
    kind: Literal["full", "delta"]
    links: Annotated[int, Field(ge=0, le=content.MAX_LINKS)]
    payload_bytes: _Count
    chain_bytes: _Count
    anchor: _Hash | None
    root: _Hash
    signature: Signature | None
    routes: Annotated[tuple[Route, ...], Field(max_length=MAX_ROUTES, strict=False), _First]
    tensors: Annotated[tuple[Tensor, ...], Field(min_length=1, strict=False), _First]

    @property
    def policy(self) -> PolicyVersion:
        """The version that this manifest describes."""
        return PolicyVersion(number=self.number, hash=self.root)

    @property
    def full_bytes(self) -> int:
        """The size of the whole version, uncompressed."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def objects(self) -> dict[str, int]:
        """Return {object that holds payloads: its minimum length}."""
        need: dict[str, int] = {}
        for tensor in self.tensors:
            for chunk in tensor.chunks:
                if chunk.object is not None:
                    need[chunk.object] = max(need.get(chunk.object, 0), chunk.offset + chunk.length)
        return need


def canonical(value: Any) -> bytes:
    """Return canonical JSON (sorted keys, no spaces, UTF-8): one text per value, and so one hash per value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def about(run: str, number: int, meta: Mapping[str, Any] | None, numerics: str = "") -> About:
    """Validate the publisher's description, before anything is written. Raises BadRequest, naming the field."""
    try:
        described = About(run=run, number=number, meta=dict(meta or {}), numerics=numerics)
        size = len(canonical(described.model_dump()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(
            f"{field}: {first['msg']}; run is short text, meta holds text, numbers and booleans", field=field
        ) from None
    except UnicodeEncodeError:
        raise BadRequest("meta: holds text that is not Unicode (a lone surrogate)", field="meta") from None
    if size > MAX_ABOUT_BYTES:
        raise BadRequest(f"meta: {size} bytes with run and number; at most {MAX_ABOUT_BYTES} are kept", field="meta")
    return described


def to_bytes(manifest: Manifest) -> bytes:
    """Return the canonical bytes."""
    return canonical(manifest.model_dump(mode="json"))


def stored(manifest: Manifest) -> bytes:
    """Return the canonical bytes, compressed: the object whose hash is the manifest's name."""
    return zstandard.ZstdCompressor(level=9, write_content_size=True).compress(to_bytes(manifest))


def plain(data: bytes, where: str = "manifest") -> bytes:
    """Decompress a manifest, the inverse of `stored`. Bytes that are not a zstd frame are returned as they are.

    Raises Corrupt if the frame does not decompress, or declares too many bytes, which is checked before memory is allocated.
    """
    if not data.startswith(zstandard.FRAME_HEADER):
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_MANIFEST_BYTES:
            raise Corrupt(f"{where}: declares {size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{where}: does not decompress: {error}") from error


def parse(data: bytes, where: str = "manifest") -> Manifest:
    """Parse a manifest and check every field, including the root. `where` names the object in error messages.

    Raises Corrupt, naming the invalid field; then no part of the manifest may be used.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise Corrupt(f"{where}: {len(data)} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
    _check_density(data, where)
    try:
        # not model_validate_json, whose errors hold copies of the input
        manifest = Manifest.model_validate(from_json(data, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise Corrupt(f"{where}: field {field[:200]}: {first['msg'][:200]}; refused") from None
    except ValueError as error:
        raise Corrupt(f"{where}: field document: Invalid JSON: {str(error)[:200]}; refused") from None
    if to_bytes(manifest) != data:
        raise Corrupt(f"{where}: not in canonical form (sorted keys, no spaces, no repeated key); refused")
    _check(manifest, where)
    return manifest


def _check_density(data: bytes, where: str) -> None:
    """Raise Corrupt for text that is denser than any manifest, because parsed JSON takes up to a hundred times the memory of its text."""
    for mark, spacing in _DENSEST.items():
        if data.count(mark) > MAX_ABOUT_BYTES + len(data) // spacing:
            raise Corrupt(f"{where}: has {mark.decode()!r} more often than any manifest of {len(data)} bytes; refused")


def _check(manifest: Manifest, where: str) -> None:
    full = manifest.kind == "full"
    if not full and manifest.parent is None:
        raise Corrupt(f"{where}: field parent: a delta has none; refused")
    anchors = [route.manifest for route in manifest.routes if route.base is None]
    if (manifest.links == 0) is not (full or bool(anchors)) or (manifest.links == 0 and manifest.chain_bytes):
        raise Corrupt(
            f"{where}: field links: {manifest.links} does not fit its snapshot and {len(anchors)} full routes"
        )
    if full is not (manifest.anchor is None) or (anchors and manifest.anchor not in anchors):
        raise Corrupt(f"{where}: field anchor: {manifest.anchor} is not the full snapshot that its chain starts from")
    for index, tensor in enumerate(manifest.tensors):
        _check_tensor(tensor, f"{where}: field tensors.{index}", full)
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        raise Corrupt(f"{where}: field tensors: names repeat or are not sorted; refused")
    payload = sum(chunk.length for tensor in manifest.tensors for chunk in tensor.chunks)
    if payload != manifest.payload_bytes:
        raise Corrupt(f"{where}: field payload_bytes: {manifest.payload_bytes}, the chunks have {payload}; refused")
    root = content.root_of((tensor.name, tensor.dtype, tensor.shape, tensor.results) for tensor in manifest.tensors)
    if root != manifest.root:
        raise Corrupt(f"{where}: field root: {manifest.root}, the chunks give {root}; refused")


def _check_tensor(tensor: Tensor, where: str, full: bool) -> None:
    if not content.is_tensor_name(tensor.name):
        raise Corrupt(f"{where}.name: {tensor.name[:80]!r} is not a tensor name (no '..', no leading '/'); refused")
    if tensor.dtype not in ITEMSIZES:
        raise Corrupt(f"{where}.dtype: {tensor.dtype!r} is not one of {', '.join(ITEMSIZES)}; refused")
    elements = math.prod(tensor.shape)
    if elements > content.MAX_ELEMENTS or len(tensor.chunks) != content.chunk_count(elements):
        raise Corrupt(f"{where}.chunks: {len(tensor.chunks)} chunks cannot hold shape {tensor.shape}; refused")
    for at, (chunk, size) in enumerate(zip(tensor.chunks, content.chunk_sizes(elements), strict=True)):
        if chunk.elements != size:
            raise Corrupt(f"{where}.chunks.{at}.elements: {chunk.elements}, shape {tensor.shape} needs {size}; refused")
        _check_chunk(chunk, size * tensor.itemsize, f"{where}.chunks.{at}", full)


def _check_chunk(chunk: StoredChunk, nbytes: int, where: str, full: bool) -> None:
    if chunk.codec not in CODECS or (full and chunk.codec in NEEDS_OLD):
        raise Corrupt(
            f"{where}.codec: {chunk.codec!r} is not allowed in a {'full snapshot' if full else 'delta'}; refused"
        )
    empty = chunk.object is None and chunk.payload is None and chunk.offset == 0 and chunk.length == 0
    if empty is not (chunk.codec == EQUAL) or (
        not empty and (chunk.object is None or chunk.payload is None or not 0 < chunk.length <= nbytes)
    ):
        raise Corrupt(f"{where}.length: {chunk.length} bytes of {chunk.codec!r} payload for {nbytes} bytes; refused")
