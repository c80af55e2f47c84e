"""Sources of corpus files: a directory, this interpreter's standard library, or an unpacked sdist. Runs no code and follows no links."""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ostinato.core.errors import BadRequest
from ostinato.corpus.filters import permissive_licence

_SKIPPED_DIRECTORIES = {
    "__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist", "_vendor", "_vendored", "vendor", "vendored",
    "third_party", "extern", "_extern", "externals", "venv", "__phello__",
}  # fmt: skip
"""Names of directories that are skipped: generated files, and vendored files that may be under another licence."""
_TEST_DIRECTORIES = {"test", "tests", "idle_test"}
Read = Callable[[int], bytes]
"""Reads at most the given number of bytes from a file's start. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """A source before filtering: its licence, whether that is permissive, and its files as (path, reader), not read yet.

    Example: ``SourceFiles(name="tabulate-0.10.0", licence="MIT", permissive=True, files=[("tabulate.py", lambda most: b"..."[:most])])``
    """

    name: str
    licence: str
    permissive: bool
    files: Iterable[tuple[str, Read]]
    sha256: str = ""


def stdlib_source() -> SourceFiles:
    """Return the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return SourceFiles(
        name=f"stdlib-{platform.python_version()}",
        licence="PSF-2.0",
        permissive=True,
        files=_walk(root, _SKIPPED_DIRECTORIES | _TEST_DIRECTORIES),
    )


def directory_source(root: Path) -> SourceFiles:
    """Return a directory as a source. Its PKG-INFO or pyproject.toml states the licence; without either it is "own", the user's code.

    Raises BadRequest if there is no such directory.
    """
    if not root.is_dir():
        raise BadRequest(f"{root}: no such directory", field="source")
    licence, permissive = "own", True
    if (root / "PKG-INFO").is_file():
        licence, permissive = permissive_licence(core_metadata((root / "PKG-INFO").read_bytes()))
    elif (root / "pyproject.toml").is_file():
        licence, permissive = permissive_licence(_project_metadata((root / "pyproject.toml").read_bytes()))
    return SourceFiles(
        name=root.resolve().name, licence=licence, permissive=permissive, files=_walk(root, _SKIPPED_DIRECTORIES)
    )


def archive_source(files: Mapping[str, bytes], name: str, sha256: str) -> SourceFiles:
    """Return an unpacked sdist as a source. `files`: path below its top directory -> content. Raises BadRequest without a PKG-INFO."""
    if "PKG-INFO" not in files:
        raise BadRequest(f"{name}: no PKG-INFO at the top; is this a source distribution?", field="source")
    metadata = core_metadata(files["PKG-INFO"])
    licence, permissive = permissive_licence(metadata)
    kept = [
        (path, _reader_of(data)) for path, data in sorted(files.items()) if not _is_skipped(path, _SKIPPED_DIRECTORIES)
    ]
    stated = "-".join((*metadata.get("Name", ())[:1], *metadata.get("Version", ())[:1]))
    return SourceFiles(name=stated or name, licence=licence, permissive=permissive, files=kept, sha256=sha256)


def core_metadata(data: bytes) -> Mapping[str, Sequence[str]]:
    """Parse a PKG-INFO or METADATA file into {field name: values}."""
    message = Parser().parsestr(data.decode("utf-8", "replace"), headersonly=True)
    return {name: [str(value) for value in message.get_all(name, [])] for name in set(message.keys())}


def _project_metadata(data: bytes) -> Mapping[str, Sequence[str]]:
    """Parse the licence fields of a pyproject.toml (PEP 621, 639), with the names of core metadata."""
    try:
        project = tomllib.loads(data.decode()).get("project")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(project, dict):
        return {}
    stated, classifiers = project.get("license"), project.get("classifiers")
    fields = {"Classifier": [str(each) for each in classifiers] if isinstance(classifiers, list) else []}
    if isinstance(stated, str):
        fields["License-Expression"] = [stated]
    elif isinstance(stated, dict) and "text" in stated:
        fields["License"] = [str(cast("dict[str, Any]", stated)["text"])]
    return fields


def _is_skipped(path: str, names: set[str]) -> bool:
    parts = PurePosixPath(path).parts[:-1]
    return any(part in names or part.startswith(".") or part.endswith(".egg-info") for part in parts)


def _reader_of(data: bytes) -> Read:
    return lambda most: data[:most]


def _walk(root: Path, skipped: set[str]) -> Iterator[tuple[str, Read]]:
    """Yield (path, reader) of the regular files below `root`, sorted within each directory. Links are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not _is_skipped(f"{name}/x", skipped))
        for name in sorted(files):
            path = Path(directory) / name
            if _is_regular(path):
                yield path.relative_to(root).as_posix(), partial(_read_start, path)


def _is_regular(path: Path) -> bool:
    """Return True for a regular file, and also if lstat fails: then reading the file fails, and the build counts it as unreadable."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True


def _read_start(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)
