"""Unpacks an archive in memory: nothing of it touches the disk, no link is followed, and its size is bounded."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO

from ostinato.core.errors import BadRequest, Corrupt, TooLarge

FILE_BYTES, ALL_BYTES, MOST_FILES = 8 << 20, 64 << 20, 8000
_HEADERS = 2048  # bytes of a tar that a file may take beyond its content
_PACKED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, UnicodeDecodeError, OverflowError, EOFError, OSError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""What the standard library raises for a damaged archive, or for data that is no archive."""


def check_sha256(data: bytes, digest: str, name: str) -> None:
    """Raise Corrupt unless the bytes have the SHA-256 `digest`."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest.lower():
        raise Corrupt(
            f"{name}: has SHA-256 {found}, promised was {digest}; fetch it again, or do not trust where it came from"
        )


def _inside(name: str) -> str:
    """The normalized path. Raises BadRequest if it leads out of the archive."""
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or "\0" in name
        or not path.parts
        or ":" in path.parts[0]
    ):
        raise BadRequest(f"archive: the path {name!r} leads out of it; do not use this archive", field="archive")
    return str(path)


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    unpacked = next((opened(io.BytesIO(data)) for magic, opened in _PACKED if data.startswith(magic)), io.BytesIO(data))
    with tarfile.open(fileobj=_Bounded(unpacked), mode="r|") as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
        for entry in archive:
            if entry.isdir():
                continue
            name = _inside(entry.name)
            if entry.isreg():
                if entry.size > FILE_BYTES:
                    raise TooLarge(f"archive: {name} has {entry.size} bytes, {FILE_BYTES} allowed", field="archive")
                opened = archive.extractfile(entry)
                assert opened is not None  # a regular file
                yield name, opened.read(FILE_BYTES + 1)


class _Bounded:
    """Limits how many unpacked bytes of a tar are read, because tarfile holds an extended header whole, whatever length it states."""

    def __init__(self, unpacked: IO[bytes]) -> None:
        self._unpacked = unpacked
        self._left = ALL_BYTES + MOST_FILES * _HEADERS

    def read(self, size: int) -> bytes:
        data = self._unpacked.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge("archive: its headers are larger than what it may hold", field="archive")
        return data


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    if data.count(b"PK\1\2") > 2 * MOST_FILES:  # checked before zipfile makes an object for each entry
        raise TooLarge(f"archive: more than {MOST_FILES} files", field="archive")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or (entry.external_attr >> 28) == 0xA:  # a symbolic link
                continue
            name = _inside(entry.filename)
            with archive.open(entry) as opened:
                content = opened.read(FILE_BYTES + 1)  # the size that the entry states is not trusted
            if len(content) > FILE_BYTES:
                raise TooLarge(f"archive: {name} has more than {FILE_BYTES} bytes", field="archive")
            yield name, content


def unpack(data: bytes, name: str) -> dict[str, bytes]:
    """Path -> bytes of the regular files of a .tar.gz, .tar.bz2, .tar.xz, .zip or .whl. Links and devices are left out.

    Raises:
        BadRequest: a path leads out of the archive, or the data is not a readable archive.
        TooLarge: a file over 8 MiB, over 64 MiB in total, or more than 8000 files.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        for path, content in (_zip if name.endswith((".zip", ".whl")) else _tar)(data):
            total += len(content)
            files[path] = content
            if total > ALL_BYTES or len(files) > MOST_FILES:
                raise TooLarge(f"{name}: more than {ALL_BYTES >> 20} MiB or {MOST_FILES} files", field="archive")
    except _DAMAGE as error:
        raise BadRequest(f"{name}: not an archive that can be read: {error}", field="archive") from error
    return files


def without_top(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a source distribution's only top directory, with paths relative to it. Raises BadRequest unless there is exactly one."""
    tops = {path.partition("/")[0] for path in files}
    if len(tops) != 1 or any("/" not in path for path in files):
        raise BadRequest(
            f"archive: a source distribution holds one directory, this one {sorted(tops)[:5]}", field="archive"
        )
    return {path.partition("/")[2]: data for path, data in files.items()}
