"""Computes a box's diff: compares its own overlay layers with its original files, path by path. Uses descriptors and follows no link.

Only files that the box itself wrote are examined, so the cost depends on the changes and not on the workspace's size. Files count as
changes, directories do not. A copy that equals its original (chmod and touch copy whole files up) is not a change unless it became, or
ceased to be, executable.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import sys
from collections.abc import Iterator, Sequence

WRITTEN, DELETED, LINK, OTHER = range(4)
HEAD = struct.Struct("<BBHIQ")  # kind, executable, 0, bytes of the path, bytes of data
PART = 1 << 20
# most bytes of one changed file, and of all; files beyond this are listed without content
MAX_FILE, MAX_BYTES = 8 << 20, 32 << 20
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def entries(root: int, path: str) -> list[str]:
    """Return the names in a directory below an open one; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        directory = os.open(path or ".", DIRECTORY, dir_fd=root)
        try:
            return os.listdir(directory)
        finally:
            os.close(directory)
    return []


def lstat(directory: int, path: str) -> os.stat_result | None:
    """Return the lstat of a path, or None if nothing is there."""
    with contextlib.suppress(OSError):
        return os.stat(path, dir_fd=directory, follow_symlinks=False)
    return None


def walk(root: int, path: str) -> Iterator[str]:
    """Yield every path at or below `path` that is not a directory."""
    seen = lstat(root, path) if path else os.stat(root)
    if seen is None:
        return
    if not stat.S_ISDIR(seen.st_mode):
        yield path
        return
    for name in entries(root, path):
        yield from walk(root, f"{path}/{name}" if path else name)


def touched(layer: int, base: int, path: str = "") -> Iterator[str]:
    """Yield the paths that a layer affects: its own files, and original files below directories that it replaced or removed."""
    for name in entries(layer, path):
        inner = f"{path}/{name}" if path else name
        seen = lstat(layer, inner)
        if seen is not None and stat.S_ISDIR(seen.st_mode):
            if opaque(layer, inner):
                yield from walk(base, inner)
            before = lstat(base, inner)
            if before is not None and not stat.S_ISDIR(before.st_mode):
                yield inner
            yield from touched(layer, base, inner)
        else:
            yield inner
            yield from walk(base, inner)


def opaque(layer: int, path: str) -> bool:
    """Return True for an opaque directory, which hides its content in lower layers."""
    with contextlib.suppress(OSError):
        fd = os.open(path, DIRECTORY, dir_fd=layer)
        try:
            for kind in ("user", "trusted"):
                with contextlib.suppress(OSError):
                    if os.getxattr(fd, f"{kind}.overlay.opaque") in (b"y", b"x"):
                        return True
        finally:
            os.close(fd)
    return False


def same_bytes(one: int, other: int) -> bool:
    """Return True if two open files have the same content."""
    at = 0
    while True:
        part = os.pread(one, PART, at)
        if part != os.pread(other, PART, at):
            return False
        if not part:
            return True
        at += len(part)


def unchanged(now: int, base: int, path: str, seen: os.stat_result, before: os.stat_result | None) -> bool:
    """Return True if a file has its original content and executable bit."""
    if before is None or not stat.S_ISREG(before.st_mode) or before.st_size != seen.st_size:
        return False
    if (before.st_mode ^ seen.st_mode) & 0o100:
        return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    one = os.open(path, flags, dir_fd=now)
    try:
        other = os.open(path, flags, dir_fd=base)
        try:
            return same_bytes(one, other)
        finally:
            os.close(other)
    finally:
        os.close(one)


def write_record(out: int, kind: int, path: str, data: bytes = b"") -> None:
    """Append one change record whose data is in memory."""
    name = os.fsencode(path)
    os.write(out, HEAD.pack(kind, 0, 0, len(name), len(data)) + name + data)


def write_file(out: int, now: int, path: str, seen: os.stat_result) -> None:
    """Append one file's record. The header is written last, since the size may change while the file is read."""
    name, start = os.fsencode(path), os.lseek(out, 0, os.SEEK_CUR)
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=now)
    size = 0
    try:
        os.lseek(out, start + HEAD.size, os.SEEK_SET)
        os.write(out, name)
        while size < seen.st_size and (part := os.pread(file, min(PART, seen.st_size - size), size)):
            size += os.write(out, part)
    finally:
        os.close(file)
    os.pwrite(out, HEAD.pack(WRITTEN, bool(seen.st_mode & 0o100), 0, len(name), size), start)


def write_regular(
    out: int, now: int, base: int, path: str, seen: os.stat_result, before: os.stat_result | None
) -> None:
    """Append a file if it changed, but only its name if it is too large: huge sparse files are free to create."""
    if seen.st_size > MAX_FILE or os.lseek(out, 0, os.SEEK_CUR) + seen.st_size > MAX_BYTES:
        write_record(out, OTHER, path)
    elif not unchanged(now, base, path, seen, before):
        write_file(out, now, path, seen)


def write_change(out: int, now: int, base: int, path: str) -> None:
    """Append the record of one path, if it changed."""
    seen, before = lstat(now, path), lstat(base, path)
    if seen is None:
        if before is not None and not stat.S_ISDIR(before.st_mode):
            write_record(out, DELETED, path)
    elif stat.S_ISREG(seen.st_mode):
        write_regular(out, now, base, path, seen, before)
    elif stat.S_ISLNK(seen.st_mode):
        target = os.readlink(path, dir_fd=now)
        if before is None or not stat.S_ISLNK(before.st_mode) or os.readlink(path, dir_fd=base) != target:
            write_record(out, LINK, path, os.fsencode(target))
    elif stat.S_ISDIR(seen.st_mode):
        if before is not None and not stat.S_ISDIR(before.st_mode):
            write_record(out, DELETED, path)
    elif before is None or stat.S_IFMT(before.st_mode) != stat.S_IFMT(seen.st_mode):
        write_record(out, OTHER, path)


def write_changes(out: int, base: int, now: int, layers: Sequence[int]) -> None:
    """Write all changes, sorted by path, as records `HEAD` + path + data.

    `out`, `base` (original files), `now` (the workspace) and `layers` (the box's own) are descriptors.
    """
    sys.setrecursionlimit(20_000)  # a path of 4096 bytes has up to 2048 directories
    paths = {path for layer in layers for path in touched(layer, base)}
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # removed while it was read
            write_change(out, now, base, path)
