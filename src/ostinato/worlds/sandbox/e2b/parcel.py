"""What is sent to a new machine: the helper, and one archive of layers, mounts and files, in parts."""

from __future__ import annotations

import functools
import io
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ostinato.core.errors import BadRequest
from ostinato.core.sandboxing import SandboxSpec
from ostinato.worlds.sandbox.spec_validation import pack_files

_HERE = Path(__file__).parent
_SHARED = ("inside/compare.py", "inside/kernel.py", *(f"gvisor/inside/{name}.py" for name in (
    "become", "crowd", "files", "frames", "place", "ports", "programs", "serve"
)))  # fmt: skip
_IN_MEMORY = 8 << 20
_PART = 16 << 20  # most bytes of one request


@functools.cache
def helper() -> bytes:
    """The zip of modules that the machine's python3 runs."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*(_HERE / "inside").glob("*.py"), *(_HERE.parent / name for name in _SHARED)):
            if path.name != "__init__.py":
                archive.writestr(path.name, path.read_text())
    return made.getvalue()


def parcel(spec: SandboxSpec, owner: int) -> IO[bytes] | None:
    """The archive, rewound, and on disk if it is large; None if there is nothing to send. Layers and mounts in it belong to `owner`.

    Sockets and device files of a layer or mount are left out. Raises BadRequest for a layer or mount that cannot be read.
    """
    if not (spec.layers or spec.mounts or spec.files):
        return None
    made: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(
            fileobj=made, mode="w:gz", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape", compresslevel=1
        ) as tar:  # fmt: skip
            for number, layer in enumerate(spec.layers):
                _add(tar, "layers", layer, f"layers/{number}", owner)
            for number, source in enumerate(spec.mounts.values()):
                _add(tar, "mounts", source, f"mounts/{number}", owner)
            if spec.files:
                blob = pack_files(spec.files)
                member = tarfile.TarInfo("files")
                member.size = len(blob)
                tar.addfile(member, io.BytesIO(blob))
        made.seek(0)
    except BaseException:
        made.close()
        raise
    return made


def _add(tar: tarfile.TarFile, field: str, source: str, name: str, owner: int) -> None:
    def given(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.isdev() and not member.isfifo():
            return None
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        member.mode |= stat.S_IRWXU if member.isdir() else stat.S_IRUSR
        return member

    try:
        tar.add(Path(source).resolve(), name, filter=given)
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise BadRequest(f"{field}: {source!r} cannot be sent ({error})", field=field) from error


def parts(archive: IO[bytes]) -> Iterator[bytes]:
    """The archive's bytes in parts, one for each request."""
    while part := archive.read(_PART):
        yield part
