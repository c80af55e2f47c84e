"""Exports weights as a plain Hugging Face model directory, which any other tool can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.core.errors import NotFound
from ostinato.core.files import sync_directory
from ostinato.core.weights import ITEMSIZES, Weights
from ostinato.weights.store.disk import storage_refusals


def write_model(weights: Weights, directory: Path, files: Sequence[Path], notes: Mapping[str, str]) -> Path:
    """Write model.safetensors atomically, and copy `files` beside it. `notes` go into the file's metadata. Returns the file's path.

    Raises: StorageFull if the disk refuses; NotFound if one of `files` does not exist.
    """
    with storage_refusals(f"writing the model to {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            if not file.is_file():
                raise NotFound(f"{file} does not exist; name the model's config and tokenizer files", field="files")
            if file.resolve().parent != directory.resolve():
                shutil.copyfile(file, directory / file.name)
        target = directory / "model.safetensors"
        temporary = directory / f".model.safetensors.{os.getpid()}"
        try:
            _write_safetensors(weights, temporary, notes)
            os.replace(temporary, target)
            sync_directory(directory)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def files_beside(source: Path) -> list[Path]:
    """Return the files of a model directory that all its versions share: configuration, tokenizer and template, not the weights."""
    files = (
        path for path in source.iterdir() if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
    )
    return [path for path in files if "safetensors" not in path.name]


def _write_safetensors(weights: Weights, path: Path, notes: Mapping[str, str]) -> None:
    # wide dtypes first, which keeps every tensor aligned, in the same order as the safetensors library
    names = sorted(weights, key=lambda name: (-ITEMSIZES[weights[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    at = 0
    for name in names:
        array = weights[name]
        end = at + array.data.nbytes
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            file.write(weights[name].data.data)
        file.flush()
        os.fsync(file.fileno())
