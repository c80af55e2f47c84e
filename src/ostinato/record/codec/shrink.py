"""zstd for blobs too short to compress on their own, with dictionaries trained on a segment's first rows.

A dictionary is stored in the segment that it was trained on, and is dropped with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from queue import SimpleQueue

import zstandard

_MAGIC = b"\x28\xb5\x2f\xfd"  # the first bytes of every zstd frame; not stored
# first byte of a blob: uncompressed, or compressed without a dictionary; from 2 on, a dictionary's number
_STORED, _PLAIN = 0, 1
_LEVEL = 3
_MAX_BLOB = 1 << 30  # bytes; no database takes a larger one


class Use(StrEnum):
    """The kind of data that a dictionary is trained on and used for."""

    ROWS = "rows"  # JSON
    TOKENS = "tokens"
    TEXT = "text"


Dictionaries = Mapping[int, tuple[Use, bytes]]


class Shrinker:
    """Compresses and decompresses the blobs of one segment. Used by one thread at a time.

    `load` reads the segment's dictionaries. It is called when a blob names an unknown one.
    """

    def __init__(self, load: Callable[[], Dictionaries]) -> None:
        self._load = load
        self._known: dict[Use, tuple[int, zstandard.ZstdCompressionDict]] = {}
        self._packers: dict[int, zstandard.ZstdCompressor] = {}
        self._unpackers = {_PLAIN: zstandard.ZstdDecompressor()}

    def refresh(self) -> None:
        """Load the segment's dictionaries, and compress from now on with the oldest one for each use."""
        for number, (use, body) in sorted(self._load().items()):
            if number not in self._unpackers:
                known = zstandard.ZstdCompressionDict(body)
                self._unpackers[number] = zstandard.ZstdDecompressor(dict_data=known)
                self._known.setdefault(use, (number, known))

    def has(self, use: Use) -> bool:
        """Return True if there is a dictionary for this use."""
        return use in self._known

    def pack(self, use: Use, plain: bytes) -> bytes:
        """Return the blob of `plain`: compressed if that is smaller, else stored as it is."""
        number, known = self._known.get(use, (_PLAIN, None))
        # created lazily: digesting a dictionary takes time, and most segments are only read
        if number not in self._packers:
            self._packers[number] = _compressor(known)
        packed = self._packers[number].compress(plain)
        if len(packed) - len(_MAGIC) < len(plain):
            return bytes([number]) + packed[len(_MAGIC) :]
        return bytes([_STORED]) + plain

    def unpack(self, blob: bytes) -> bytes:
        """The inverse of `pack`. Raises ValueError for a damaged blob or a missing dictionary."""
        number = blob[0]
        if number == _STORED:
            return blob[1:]
        if number not in self._unpackers:
            self.refresh()
        if number not in self._unpackers:
            raise ValueError(f"packed bytes need dictionary {number}, which is missing")
        return decompress(_MAGIC + blob[1:], _MAX_BLOB, self._unpackers[number])


def decompress(frame: bytes, most: int, unpacker: zstandard.ZstdDecompressor | None = None) -> bytes:
    """Return the content of a zstd frame that states its size.

    Raises ValueError if it is damaged, or states more than `most` bytes: then before memory is allocated.
    """
    try:
        if zstandard.frame_content_size(frame) > most:
            raise ValueError(f"packed bytes state a size of more than {most} bytes")
        return (unpacker or zstandard.ZstdDecompressor()).decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"packed bytes cannot be read: {error}") from error


def _compressor(dictionary: zstandard.ZstdCompressionDict | None) -> zstandard.ZstdCompressor:
    settings = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    if dictionary is None:
        return zstandard.ZstdCompressor(compression_params=settings)
    dictionary.precompute_compress(compression_params=settings)
    return zstandard.ZstdCompressor(compression_params=settings, dict_data=dictionary)


# ---------------------------------------------------------------- training


SAMPLES = 1500
"""Blobs that a dictionary is trained on."""

_DICTIONARY_BYTES: Mapping[Use, int] = {Use.ROWS: 16 << 10, Use.TOKENS: 64 << 10, Use.TEXT: 64 << 10}
_SAMPLE_BYTES = 4096  # used of each sample


@dataclass(slots=True)
class Training:
    """Collects samples of what a segment stores, and trains its dictionaries in background threads. Used by one thread at a time."""

    _samples: dict[Use, list[bytes]] = field(default_factory=dict[Use, list[bytes]])
    _begun: dict[Use, threading.Thread] = field(default_factory=dict[Use, threading.Thread])
    _trained: SimpleQueue[tuple[Use, bytes]] = field(default_factory=SimpleQueue[tuple[Use, bytes]])

    def saw(self, use: Use, plain: bytes) -> None:
        """Collect a sample; once there are enough, start training."""
        if use in self._begun:
            return
        samples = self._samples.setdefault(use, [])
        samples.append(plain[:_SAMPLE_BYTES])
        if len(samples) >= SAMPLES:
            self._begun[use] = threading.Thread(target=self._train, args=(use, self._samples.pop(use)), daemon=True)
            self._begun[use].start()

    def take(self) -> dict[Use, bytes]:
        """Return the dictionaries that were finished since the last call."""
        return dict(self._trained.get() for _ in range(self._trained.qsize()))

    def _train(self, use: Use, samples: list[bytes]) -> None:
        try:
            trained = zstandard.train_dictionary(_DICTIONARY_BYTES[use], list(samples), k=128, d=8)
        except zstandard.ZstdError:  # the samples have nothing in common, so this use gets no dictionary
            return
        self._trained.put((use, trained.as_bytes()))
