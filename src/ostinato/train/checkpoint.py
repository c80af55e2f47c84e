"""The trainer's whole state on disk: masters, AdamW moments, RNG, step, log cursor and an opaque dictionary.

Data flow: `PolicyTrainer.state` -> `save` -> one directory per checkpoint -> `load` -> `PolicyTrainer.restore`.

A checkpoint is a directory ``<step>-<hash>`` with two safetensors files and ``checkpoint.json``, which holds the files' BLAKE3 hashes;
the directory's name holds the hash of that JSON. It is written under another name, synced, renamed, and then `LATEST` is moved, so
a kill at any instant leaves the previous checkpoint whole. Nothing here runs code on load.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt, StorageFull

_log = logging.getLogger(__name__)

FORMAT = "ostinato-checkpoint@1"
_MANIFEST = "checkpoint.json"
_LATEST = "LATEST"
_PARTIAL = ".partial-"
_HEADER_LIMIT = 16 << 20
_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "U8": np.uint8}

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a resumed trainer needs to go on with the same bits.

    `weights`, `moments`: name -> fp32 (or uint8) array; on load they are read-only maps of the file. `cursor` is the log position up
    to which batches are in the weights; `extra` is JSON that belongs to the caller (a baseline's state, say).

    Example: ``Checkpoint(step=3, weights={"w": ...}, moments={"exp_avg": ..., "exp_avg_sq": ..., "rng": ...}, cursor=812)``
    """

    step: int
    weights: Arrays
    moments: Arrays
    cursor: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def save(directory: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Write durably and point `LATEST` at it; checkpoints other than the newest `keep` are removed. Returns its directory.

    Raises StorageFull if the disk refuses: the earlier checkpoints stay as they were.
    """
    partial = directory / f"{_PARTIAL}{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        partial.mkdir()
        files = {
            name: _write_arrays(partial / name, arrays)
            for name, arrays in (
                ("weights.safetensors", checkpoint.weights),
                ("optimizer.safetensors", checkpoint.moments),
            )
        }
        body = json.dumps(
            {
                "format": FORMAT,
                "step": checkpoint.step,
                "cursor": checkpoint.cursor,
                "extra": dict(checkpoint.extra),
                "files": files,
            },
            sort_keys=True,
        ).encode()
        _write(partial / _MANIFEST, body)
        _sync(partial)
        final = directory / f"{checkpoint.step:08d}-{blake3(body).hexdigest()[:16]}"
        if not final.exists():  # the same name means the same bytes: a step that was taken again after a crash
            partial.rename(final)
        _sync(directory)
        _point(directory, final.name)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFull(
                f"checkpoint of step {checkpoint.step} was not written to {directory}: {error.strerror}. "
                "Free some space; earlier checkpoints are untouched."
            ) from error
        raise
    _sweep(directory)
    for old in _found(directory)[keep:]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint, verified by hash, or None if there has never been one.

    A torn or corrupt checkpoint is reported and the one before it is taken. Raises Corrupt if checkpoints exist and none is whole.
    """
    candidates = _found(directory)
    latest = directory / _LATEST
    if latest.exists():
        named = latest.read_text(errors="replace").strip()
        candidates.sort(key=lambda path: path.name != named)  # stable: LATEST first, then the newest
    problems: list[str] = []
    for candidate in candidates:
        try:
            found = _read(candidate)
        except (Corrupt, OSError) as error:
            problems.append(f"{candidate.name}: {error}")
            _log.warning("checkpoint %s cannot be used, falling back to the one before: %s", candidate, error)
            continue
        return found
    if problems:
        raise Corrupt(
            f"no whole checkpoint in {directory} ({'; '.join(problems)}). Restore one from a backup, or remove the directory "
            "to train again from the first release."
        )
    return None


def _found(directory: Path) -> list[Path]:
    """Complete directories, newest first."""
    if not directory.is_dir():
        return []
    names = [entry for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(names, key=lambda path: (path.name.split("-")[0], path.stat().st_mtime_ns), reverse=True)


def _sweep(directory: Path) -> None:
    """Remove what killed writers left."""
    for entry in directory.glob(f"{_PARTIAL}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _point(directory: Path, name: str) -> None:
    partial = directory / f"{_PARTIAL}latest"
    _write(partial, name.encode())
    partial.replace(directory / _LATEST)
    _sync(directory)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    """A safetensors file, without the copy of all tensors that the library's writer makes. Returns its size and hash."""
    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = blake3(max_threads=1)
    size = 0
    with path.open("wb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text, *(_bytes(array) for array in arrays.values())):
            digest.update(part)
            size += len(part)
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return {"bytes": size, "blake3": digest.hexdigest()}


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read(path: Path) -> Checkpoint:
    body = (path / _MANIFEST).read_bytes()
    if path.name.split("-")[-1] != blake3(body).hexdigest()[:16]:
        raise Corrupt(f"{_MANIFEST} does not have the hash in the directory's name")
    manifest = json.loads(body)
    if manifest.get("format") != FORMAT:
        raise Corrupt(f"format {manifest.get('format')!r} is not {FORMAT}: use the version of ostinato that wrote it")
    files = manifest["files"]
    return Checkpoint(
        step=manifest["step"],
        cursor=manifest["cursor"],
        extra=manifest["extra"],
        weights=_read_arrays(path / "weights.safetensors", files["weights.safetensors"]),
        moments=_read_arrays(path / "optimizer.safetensors", files["optimizer.safetensors"]),
    )


def _read_arrays(path: Path, promised: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    if path.stat().st_size != promised["bytes"]:
        raise Corrupt(f"{path.name} has {path.stat().st_size} bytes, not {promised['bytes']}")
    data = np.memmap(path, np.uint8, "r")
    if blake3(data.data, max_threads=1).hexdigest() != promised["blake3"]:
        raise Corrupt(f"{path.name} does not have its promised hash")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_HEADER_LIMIT, len(data) - 8):
        raise Corrupt(f"{path.name} has an impossible header length")
    header = json.loads(data[8 : 8 + length].tobytes())
    arrays: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        arrays[name] = (
            data[8 + length + start : 8 + length + stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        )
    return arrays
