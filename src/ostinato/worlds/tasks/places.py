"""Validates paths in untrusted files, and reads and hashes the directories that they name.

Every path in a taskset is validated here before it is used on disk or in a sandbox. Only `directory_below` follows links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ostinato.core.errors import BadConfig

MAX_PATH_BYTES = 1024
MAX_ENTRIES = 200_000
MAX_TREE_BYTES = 4 * 2**30
_MAX_DEPTH = 64


def check_inside(path: str) -> str:
    """Return the path if it is relative and normalized, with forward slashes, so that it cannot lead out of its directory.

    Raises BadConfig. Example: ``check_inside("src/calc.py") == "src/calc.py"``; "/etc/passwd", "a/../b", "./a" and "a//b" are refused.
    """
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts):
        raise BadConfig(f"the path {path!r} must be relative, with no empty part, '.' or '..' in it")
    if "\\" in path or any(ord(sign) < 32 or ord(sign) == 127 for sign in path):
        raise BadConfig(f"the path {path!r} must hold no backslash and no control character")
    if len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES or any(
        len(part.encode("utf-8", "replace")) > 255 for part in parts
    ):
        raise BadConfig(f"the path {path[:80]!r}... is longer than {MAX_PATH_BYTES} bytes, or a part of it than 255")
    if len(parts) > _MAX_DEPTH:
        raise BadConfig(f"the path {path[:80]!r}... has more than {_MAX_DEPTH} parts")
    return path


def check_tree(paths: Iterable[str]) -> None:
    """Raise BadConfig unless these can all be files of one directory: every path is valid, and none is below another."""
    known = set(paths)
    for path in known:
        check_inside(path)
        parts = path.split("/")
        for end in range(1, len(parts)):
            if (above := "/".join(parts[:end])) in known:
                raise BadConfig(f"{above!r} is a file, and {path!r} would be inside it; rename one")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """An entry of a directory: a file with its size in bytes, or a symbolic link with its target.

    Example: ``DirectoryEntry(path="calc.py", size=40, executable=False, link=None)``
    """

    path: str
    size: int
    executable: bool
    link: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A directory's entries, sorted by the paths' bytes, and the BLAKE3 hash of its names, contents, links and executable bits.

    Example: ``Tree(hash="9f2c...", entries=(DirectoryEntry(path="calc.py", size=40, executable=False, link=None),))``
    """

    hash: str
    entries: tuple[DirectoryEntry, ...]


def read_tree(root: Path, *, most_bytes: int = MAX_TREE_BYTES, most_entries: int = MAX_ENTRIES) -> Tree:
    """List and hash everything below a directory. Links are listed, never followed.

    Raises BadConfig if it is not a directory, is too large or unreadable, or contains anything but files, directories and links.
    """
    digest, entries, total = blake3(), list[DirectoryEntry](), 0
    for entry in sorted(_walk(root, ""), key=lambda each: os.fsencode(each.path)):
        entries.append(entry)
        total += entry.size
        if len(entries) > most_entries or total > most_bytes:
            raise BadConfig(
                f"the directory {root} holds more than {most_entries} files or {most_bytes} bytes; make it smaller"
            )
        digest.update(f"{len(os.fsencode(entry.path))} {entry.size} {entry.executable:d} ".encode())
        digest.update(os.fsencode(entry.path))
        if entry.link is None:
            digest.update(b" file ")
            _hash_file(root / entry.path, digest, entry.size)
        else:
            target = os.fsencode(entry.link)
            digest.update(b" link %d " % len(target) + target)
    return Tree(hash=digest.hexdigest(), entries=tuple(entries))


def read_plain(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises BadConfig, also for a link, a directory or a device."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadConfig(f"{path} is not an ordinary file; put one there")
            data = file.read(most + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadConfig(f"{path} is a symbolic link; name the file that it points to") from error
        raise BadConfig(f"{path} cannot be read ({error.strerror})") from error
    if len(data) > most:
        raise BadConfig(f"{path} is larger than {most} bytes; make it smaller")
    return data


def directory_below(root: Path, name: str) -> Path:
    """Resolve a relative name, links included, to a directory below `root`. Raises BadConfig if it is not a directory or is outside."""
    check_inside(name)
    home = root.resolve()
    place = (home / name).resolve()
    if not place.is_relative_to(home):
        raise BadConfig(f"{name!r} leads out of {home}; put the directory there")
    if not place.is_dir():
        raise BadConfig(f"{name!r} is not a directory below {home}; put one there")
    return place


def _walk(root: Path, below: str) -> Iterator[DirectoryEntry]:
    if below.count("/") > _MAX_DEPTH:
        raise BadConfig(f"the directory {root / below} is nested deeper than {_MAX_DEPTH}; make it flatter")
    try:
        with os.scandir(root / below if below else root) as listing:
            for each in listing:
                path = f"{below}/{each.name}" if below else each.name
                if each.is_symlink():
                    yield DirectoryEntry(path=path, size=0, executable=False, link=os.readlink(each.path))
                elif each.is_dir(follow_symlinks=False):
                    yield from _walk(root, path)
                elif each.is_file(follow_symlinks=False):
                    about = each.stat(follow_symlinks=False)
                    yield DirectoryEntry(
                        path=path, size=about.st_size, executable=bool(about.st_mode & 0o111), link=None
                    )
                else:
                    raise BadConfig(f"{each.path} is neither a file, a directory nor a link; remove it")
    except OSError as error:
        raise BadConfig(f"the directory {root / below} cannot be read ({error.strerror})") from error


def _hash_file(path: Path, digest: blake3, size: int) -> None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            remaining = size
            while remaining and (part := file.read(min(remaining, 1 << 20))):
                digest.update(part)
                remaining -= len(part)
    except OSError as error:
        raise BadConfig(f"{path} cannot be read ({error.strerror})") from error
    if remaining:
        raise BadConfig(f"{path} became shorter while it was read; nothing may write there")
