"""An archive's files, in memory: nothing of it touches the disk, no link is followed, and its size is bounded."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from ostinato.core.errors import BadRequest, Corrupt, TooLarge

FILE_BYTES, ALL_BYTES, MOST_FILES = 8 << 20, 64 << 20, 8000


def check_sha256(data: bytes, digest: str, name: str) -> None:
    """Raise Corrupt unless the bytes have the SHA-256 that was promised."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest.lower():
        raise Corrupt(
            f"{name}: has SHA-256 {found}, promised was {digest}; fetch it again, or do not trust where it came from"
        )


def _inside(name: str) -> str:
    """The path as it may be written. Raises BadRequest for one that leads out."""
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
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as archive:
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


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or (entry.external_attr >> 28) == 0xA:  # a symbolic link
                continue
            name = _inside(entry.filename)
            with archive.open(entry) as opened:
                content = opened.read(FILE_BYTES + 1)  # the size that the entry states is not believed
            if len(content) > FILE_BYTES:
                raise TooLarge(f"archive: {name} has more than {FILE_BYTES} bytes", field="archive")
            yield name, content


def unpack(data: bytes, name: str) -> dict[str, bytes]:
    """Path -> bytes of the regular files of a .tar.gz, .tar.bz2, .tar.xz, .zip or .whl. Links and devices are left out.

    Raises:
        BadRequest: a path that leads out of the archive, or not an archive.
        TooLarge: a file beyond 8 MiB, all beyond 64 MiB, or more than 8000 files.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        for path, content in (_zip if name.endswith((".zip", ".whl")) else _tar)(data):
            total += len(content)
            files[path] = content
            if total > ALL_BYTES or len(files) > MOST_FILES:
                raise TooLarge(f"{name}: more than {ALL_BYTES >> 20} MiB or {MOST_FILES} files", field="archive")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise BadRequest(f"{name}: not an archive that can be read: {error}", field="archive") from error
    return files


def without_top(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of the one directory that a source distribution holds, named from there. Raises BadRequest if it is not one."""
    tops = {path.partition("/")[0] for path in files}
    if len(tops) != 1 or any("/" not in path for path in files):
        raise BadRequest(
            f"archive: a source distribution holds one directory, this one {sorted(tops)[:5]}", field="archive"
        )
    return {path.partition("/")[2]: data for path, data in files.items()}
