"""Directories that sandboxes overlay: named by a hash of their content, written once, shared by every task of a package."""

from __future__ import annotations

import os
import py_compile
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

SITE = f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def layer_hash(files: Mapping[str, bytes]) -> str:
    """BLAKE3 of the paths and bytes."""
    digest = blake3()
    for path, data in sorted(files.items()):
        digest.update(f"{len(path.encode())} {len(data)} {path}".encode() + data)
    return digest.hexdigest()


def write_layer(directory: Path, label: str, files: Mapping[str, bytes], *, compiled: bool) -> Path:
    """Write a layer with these files below `directory` and return its path; an existing layer is reused.

    `compiled` puts bytecode beside the sources (compiled, not run), which Python loads without checking the source again.
    """
    place = directory / f"{label}-{layer_hash(files)[:16]}"
    if place.is_dir():
        return place
    directory.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=".half-", dir=directory))
    try:
        for path, data in files.items():
            target = half / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if compiled and path.endswith(".py"):
                unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(target), dfile=path, invalidation_mode=unchecked, quiet=2)
        for folder, _, names in os.walk(half):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)
        half.rename(place)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return place
