"""Dtypes, chunks and hashes of weights, and the root hash that names a policy version. Pure; no torch.

The root is a two-level Merkle hash (BLAKE3-256): chunk bytes -> chunk hash; (name, dtype, shape, chunk hashes) -> leaf; leaves sorted by
name -> root. The chunk length is part of the format, so the root depends on the weights alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest, BadWeights
from ostinato.core.weights import CHUNK_ELEMENTS, ITEMSIZES, ChunkName, Form, WeightPart, Weights, chunks_of

MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 1 << 40
VERSIONS: Final = "version/"
"""Prefix of the refs that lead to versions. The rest of such a ref is the root."""

MAX_OBJECT_BYTES: Final = 1 << 30
"""Largest size of an object. A reader refuses a larger file before it reads it."""

MAX_LINKS: Final = 4096
"""Longest chain of deltas."""

# the bits of the magnitude, and the lowest magnitude that is not a finite number
_NOT_FINITE: Final[Mapping[str, tuple[int, int]]] = {
    "F8_E4M3": (0x7F, 0x7F),
    "F8_E5M2": (0x7F, 0x7C),
    "F16": (0x7FFF, 0x7C00),
    "BF16": (0x7FFF, 0x7F80),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_REF_PART: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,511}")

Hashes = Mapping[ChunkName, str]
"""The hash of each chunk."""


def hash_of(data: bytes | memoryview | NDArray[np.uint8]) -> str:
    """Return the BLAKE3-256 hash as 64 lowercase hex digits."""
    return blake3(data.data if isinstance(data, np.ndarray) else data).hexdigest()


def part_hash(data: bytes | memoryview) -> str:
    """Return the first half of `hash_of`, which identifies a payload inside an object."""
    return hash_of(data)[:32]


def is_hash(text: str) -> bool:
    """Return True for 64 lowercase hex digits."""
    return _HASH.fullmatch(text) is not None


def check_hash(text: str, field: str = "hash") -> str:
    """Return `text` if it is a hash, since nothing else may become part of a path. Raises BadRequest."""
    if not is_hash(text):
        raise BadRequest(f"{field}: {text[:80]!r} is not a hash; a hash is 64 lowercase hex digits", field=field)
    return text


def version_ref(root: str) -> str:
    """Return the ref that points to the manifest of a root. Raises BadRequest if `root` is not a hash."""
    return VERSIONS + check_hash(root)


def check_ref(ref: str) -> str:
    """Return `ref` if it is a ref name: parts of [a-z0-9._-] joined by "/", none starting with a dot. Raises BadRequest."""
    parts = ref.split("/")
    if len(ref) > 200 or ".." in ref or not all(_REF_PART.fullmatch(part) for part in parts):
        raise BadRequest(
            f"ref: {ref[:80]!r} is not a ref name; use parts of a-z, 0-9, '.', '_', '-' joined by '/', like 'live'",
            field="ref",
        )
    return ref


def is_tensor_name(name: str) -> bool:
    """Return True for names that are valid keys of a safetensors file and cannot be a path out of a directory."""
    return _NAME.fullmatch(name) is not None and ".." not in name and name != "__metadata__"


def chunk_sizes(elements: int) -> Iterator[int]:
    """Yield the number of elements of each chunk of a tensor."""
    for start in range(0, elements, CHUNK_ELEMENTS):
        yield min(CHUNK_ELEMENTS, elements - start)


def chunk_count(elements: int) -> int:
    """Return the number of chunks of a tensor, 0 for an empty tensor."""
    return -(-elements // CHUNK_ELEMENTS)


def part_of(weights: Weights | WeightPart) -> WeightPart:
    """Return all chunks of the weights, without copying. A part is returned as it is."""
    if isinstance(weights, WeightPart):
        return weights
    forms = {name: (array.dtype, array.shape) for name, array in weights.items()}
    return WeightPart(forms, dict(item for name, array in weights.items() for item in chunks_of(name, array)))


def full_bytes(weights: Weights | WeightPart) -> int:
    """Return the uncompressed size of all tensors in bytes, including chunks that a part does not hold."""
    return sum(math.prod(shape) * ITEMSIZES[dtype] for dtype, shape in part_of(weights).forms.values())


def hash_chunks(part: WeightPart) -> Hashes:
    """Return the hash of every chunk of the part."""
    return {at: hash_of(np.ascontiguousarray(chunk)) for at, chunk in part.chunks.items()}


def root_of(parts: Iterable[tuple[str, str, tuple[int, ...], tuple[str, ...]]]) -> str:
    """Return the Merkle root of (name, dtype, shape, chunk hashes) tuples, given in any order."""
    total = blake3(b"ostinato weights 1\n")
    for name, dtype, shape, hashes in sorted(parts):
        leaf = json.dumps([name, dtype, list(shape), list(hashes)], separators=(",", ":")).encode()
        total.update(blake3(leaf).digest())
    return total.hexdigest()


def weights_root(weights: Weights) -> str:
    """Return the hash that names these weights, `PolicyVersion.hash`. Any process that holds the weights can compute it.

    Example: ``weights_root(snapshot.weights) == snapshot.policy.hash``
    """
    part = part_of(weights)
    return root_of_chunks(part.forms, hash_chunks(part))


def root_of_chunks(forms: Mapping[str, Form], hashes: Hashes) -> str:
    """Return `root_of` the tensors with these dtypes and shapes. `hashes` must hold every chunk."""
    return root_of(
        (name, dtype, shape, tuple(hashes[name, index] for index in range(chunk_count(math.prod(shape)))))
        for name, (dtype, shape) in forms.items()
    )


def check_weights(weights: Weights | WeightPart, *, finite: bool = True) -> None:
    """Raise BadWeights for weights that must never be published: an unknown dtype, bytes that do not fill the shape, and, if `finite`, NaN
    or infinity.
    """
    if isinstance(weights, WeightPart):
        _check_part(weights)
    else:
        for name, array in weights.items():
            _check_form(name, array.dtype, array.shape)
            want = math.prod(array.shape) * ITEMSIZES[array.dtype]
            _check_bytes(f"shape {array.shape}", name, array.dtype, array.data, want)
    part = part_of(weights)
    if not part.forms:
        raise BadWeights("weights: there is no tensor; publish all tensors of the model")
    for (name, index), chunk in part.chunks.items() if finite else ():
        at = first_not_finite(part.forms[name][0], chunk)
        if at is not None:
            raise BadWeights(
                f"tensor {name!r}: element {index * CHUNK_ELEMENTS + at} is NaN or infinite; these weights are not published. "
                "Go back to the last good checkpoint and lower the learning rate"
            )


def _check_part(part: WeightPart) -> None:
    for name, (dtype, shape) in part.forms.items():
        _check_form(name, dtype, shape)
    for (name, index), chunk in part.chunks.items():
        sizes = list(chunk_sizes(math.prod(part.forms[name][1])))
        if not 0 <= index < len(sizes):
            raise BadWeights(f"tensor {name!r}: has no chunk {index}")
        dtype = part.forms[name][0]
        _check_bytes(f"chunk {index}", name, dtype, chunk, sizes[index] * ITEMSIZES[dtype])


def _check_form(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if not is_tensor_name(name):
        raise BadWeights(
            f"tensor {name[:80]!r}: not a tensor name; use letters, digits, '_', '.', ':', '-' and '/', no '..'"
        )
    if dtype not in ITEMSIZES:
        raise BadWeights(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEMSIZES)}")
    if len(shape) > MAX_RANK or any(side < 0 for side in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise BadWeights(
            f"tensor {name!r}: shape {shape} is not usable; at most {MAX_RANK} sides, {MAX_ELEMENTS} elements"
        )


def _check_bytes(what: str, name: str, dtype: str, data: NDArray[np.uint8], want: int) -> None:
    if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes != want:
        raise BadWeights(
            f"tensor {name!r}: {what} of {dtype} needs a flat uint8 array of {want} bytes, not {data.dtype} {data.shape}"
        )


def first_not_finite(dtype: str, data: NDArray[np.uint8]) -> int | None:
    """Return the index of the first NaN or infinity among the elements, or None. Integers are always finite."""
    if dtype not in _NOT_FINITE or not data.size:
        return None
    bits, limit = _NOT_FINITE[dtype]
    codes = np.ascontiguousarray(data).view(np.dtype(f"<u{ITEMSIZES[dtype]}"))
    bad = (codes & codes.dtype.type(bits)) >= codes.dtype.type(limit)
    return int(np.argmax(bad)) if bad.any() else None
