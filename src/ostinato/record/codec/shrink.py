"""zstd for what is too short to be compressed by itself: with a dictionary that is trained on a segment's own first rows.

A dictionary lies in the segment that it was trained in, so it goes when the segment goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from queue import SimpleQueue

import zstandard

_MAGIC = b"\x28\xb5\x2f\xfd"  # every frame's first bytes, left out
_STORED, _PLAIN = 0, 1  # a blob's first byte; from 2 on: a dictionary's number
_LEVEL = 3


class Use(StrEnum):
    """What a dictionary is for: what is compressed with it should resemble what it was trained on."""

    ROWS = "rows"  # JSON
    TOKENS = "tokens"
    TEXT = "text"


Dictionaries = Mapping[int, tuple[Use, bytes]]


class Shrinker:
    """Packs and unpacks the blobs of one segment. Used by one thread at a time.

    `load` reads the segment's dictionaries; it is called when a blob names one that is not known yet.
    """

    def __init__(self, load: Callable[[], Dictionaries]) -> None:
        self._load = load
        self._known: dict[Use, tuple[int, zstandard.ZstdCompressionDict]] = {}
        self._packers: dict[int, zstandard.ZstdCompressor] = {}
        self._unpackers = {_PLAIN: zstandard.ZstdDecompressor()}

    def refresh(self) -> None:
        """Learn the dictionaries that the segment has now, and use the oldest for each use."""
        for number, (use, body) in sorted(self._load().items()):
            if number not in self._unpackers:
                known = zstandard.ZstdCompressionDict(body)
                self._unpackers[number] = zstandard.ZstdDecompressor(dict_data=known)
                self._known.setdefault(use, (number, known))

    def has(self, use: Use) -> bool:
        """True if there is a dictionary for this."""
        return use in self._known

    def pack(self, use: Use, plain: bytes) -> bytes:
        """The smaller of compressed and stored."""
        number, known = self._known.get(use, (_PLAIN, None))
        if number not in self._packers:  # made late: digesting a dictionary takes time, and most segments are only read
            self._packers[number] = _compressor(known)
        packed = self._packers[number].compress(plain)
        if len(packed) - len(_MAGIC) < len(plain):
            return bytes([number]) + packed[len(_MAGIC) :]
        return bytes([_STORED]) + plain

    def unpack(self, blob: bytes) -> bytes:
        """The inverse of `pack`. Raises ValueError for a damaged blob, or one whose dictionary is not there."""
        number = blob[0]
        if number == _STORED:
            return blob[1:]
        if number not in self._unpackers:
            self.refresh()
        try:
            return self._unpackers[number].decompress(_MAGIC + blob[1:])
        except (KeyError, zstandard.ZstdError) as error:
            raise ValueError(f"packed bytes cannot be read: {error!r}") from error


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
"""So many blobs a dictionary is trained on."""

_SIZES: Mapping[Use, int] = {Use.ROWS: 16 << 10, Use.TOKENS: 64 << 10, Use.TEXT: 64 << 10}
_LONGEST = 4096  # bytes of a sample that are looked at


@dataclass(slots=True)
class Training:
    """Collects what a segment packs, and trains its dictionaries in a thread of its own. Used by one thread at a time."""

    _samples: dict[Use, list[bytes]] = field(default_factory=dict[Use, list[bytes]])
    _begun: dict[Use, threading.Thread] = field(default_factory=dict[Use, threading.Thread])
    _trained: SimpleQueue[tuple[Use, bytes]] = field(default_factory=SimpleQueue[tuple[Use, bytes]])

    def saw(self, use: Use, plain: bytes) -> None:
        """Take a sample, until there are enough."""
        if use in self._begun:
            return
        samples = self._samples.setdefault(use, [])
        samples.append(plain[:_LONGEST])
        if len(samples) >= SAMPLES:
            self._begun[use] = threading.Thread(target=self._train, args=(use, self._samples.pop(use)), daemon=True)
            self._begun[use].start()

    def take(self) -> dict[Use, bytes]:
        """The dictionaries that were finished since the last call."""
        return dict(self._trained.get() for _ in range(self._trained.qsize()))

    def _train(self, use: Use, samples: list[bytes]) -> None:
        try:
            trained = zstandard.train_dictionary(_SIZES[use], list(samples), k=128, d=8)
        except zstandard.ZstdError:  # what was collected has nothing in common: rows are packed without
            return
        self._trained.put((use, trained.as_bytes()))
