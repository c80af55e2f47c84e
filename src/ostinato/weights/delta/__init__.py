"""The lossless codec of one chunk of a tensor: `encode` and `decode`."""

# first, so that its cache of compiled kernels holds for those of this package, too
import ostinato.model.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ostinato.weights.delta.codec import (
    CODECS,
    EQUAL,
    MAX_CHUNK_BYTES,
    NEEDS_OLD,
    PLANES,
    RAW,
    STEPS,
    XOR,
    Bytes,
    Coded,
    changed_elements,
    decode,
    encode,
)

__all__ = [
    "CODECS",
    "EQUAL",
    "MAX_CHUNK_BYTES",
    "NEEDS_OLD",
    "PLANES",
    "RAW",
    "STEPS",
    "XOR",
    "Bytes",
    "Coded",
    "changed_elements",
    "decode",
    "encode",
]
