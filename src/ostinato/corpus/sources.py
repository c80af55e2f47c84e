"""Sources of files: a directory, this interpreter's standard library, an unpacked source distribution. Runs no code, follows no links."""

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

_PASSED_OVER = {
    "__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist", "_vendor", "_vendored", "vendor", "vendored",
    "third_party", "extern", "_extern", "externals", "venv", "__phello__",
}  # fmt: skip
"""Directories of generated files, or of third-party files that may be under another licence."""
_TESTS = {"test", "tests", "idle_test"}
Read = Callable[[int], bytes]
"""Reads at most this many of a file's first bytes. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """A source before its files are judged: its licence, whether that is permissive, and its files, which are not read yet.

    Example: ``SourceFiles(name="tabulate-0.10.0", licence="MIT", permissive=True, files=[("tabulate.py", lambda most: b"..."[:most])])``
    """

    name: str
    licence: str
    permissive: bool
    files: Iterable[tuple[str, Read]]
    sha256: str = ""


def stdlib_source() -> SourceFiles:
    """The standard library of the running interpreter, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return SourceFiles(
        name=f"stdlib-{platform.python_version()}",
        licence="PSF-2.0",
        permissive=True,
        files=_walked(root, _PASSED_OVER | _TESTS),
    )


def directory_source(root: Path) -> SourceFiles:
    """A directory. Its PKG-INFO or pyproject.toml states the licence; with neither, it counts as the user's own ("own")."""
    if not root.is_dir():
        raise BadRequest(f"{root}: no such directory", field="source")
    licence, permissive = "own", True
    if (root / "PKG-INFO").is_file():
        licence, permissive = permissive_licence(core_metadata((root / "PKG-INFO").read_bytes()))
    elif (root / "pyproject.toml").is_file():
        licence, permissive = permissive_licence(_project_metadata((root / "pyproject.toml").read_bytes()))
    return SourceFiles(
        name=root.resolve().name, licence=licence, permissive=permissive, files=_walked(root, _PASSED_OVER)
    )


def archive_source(files: Mapping[str, bytes], name: str, sha256: str) -> SourceFiles:
    """An unpacked source distribution, with paths relative to its top directory. Raises BadRequest without a PKG-INFO."""
    if "PKG-INFO" not in files:
        raise BadRequest(f"{name}: no PKG-INFO at the top; is this a source distribution?", field="source")
    metadata = core_metadata(files["PKG-INFO"])
    licence, permissive = permissive_licence(metadata)
    kept = [(path, _held(data)) for path, data in sorted(files.items()) if not _passed_over(path, _PASSED_OVER)]
    stated = "-".join((*metadata.get("Name", ())[:1], *metadata.get("Version", ())[:1]))
    return SourceFiles(name=stated or name, licence=licence, permissive=permissive, files=kept, sha256=sha256)


def core_metadata(data: bytes) -> Mapping[str, Sequence[str]]:
    """The fields of a PKG-INFO or METADATA file: name -> values."""
    message = Parser().parsestr(data.decode("utf-8", "replace"), headersonly=True)
    return {name: [str(value) for value in message.get_all(name, [])] for name in set(message.keys())}


def _project_metadata(data: bytes) -> Mapping[str, Sequence[str]]:
    """The licence fields of a pyproject.toml, as core metadata names them (PEP 621, 639)."""
    try:
        project = tomllib.loads(data.decode()).get("project")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(project, dict):
        return {}
    stated, classifiers = project.get("license"), project.get("classifiers")
    found = {"Classifier": [str(each) for each in classifiers] if isinstance(classifiers, list) else []}
    if isinstance(stated, str):
        found["License-Expression"] = [stated]
    elif isinstance(stated, dict) and "text" in stated:
        found["License"] = [str(cast("dict[str, Any]", stated)["text"])]
    return found


def _passed_over(path: str, names: set[str]) -> bool:
    parts = PurePosixPath(path).parts[:-1]
    return any(part in names or part.startswith(".") or part.endswith(".egg-info") for part in parts)


def _held(data: bytes) -> Read:
    return lambda most: data[:most]


def _walked(root: Path, passed_over: set[str]) -> Iterator[tuple[str, Read]]:
    """Regular files below `root` in the order of their paths. Links are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not _passed_over(f"{name}/x", passed_over))
        for name in sorted(files):
            path = Path(directory) / name
            if _is_regular(path):
                yield path.relative_to(root).as_posix(), partial(_start_of, path)


def _is_regular(path: Path) -> bool:
    """Also True where that cannot be known: whoever reads the file meets the error, and counts it."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True


def _start_of(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)
