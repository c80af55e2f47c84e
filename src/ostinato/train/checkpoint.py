"""Checkpoints: the trainer's whole state on disk: masters, AdamW moments, RNG, step, log cursor and an opaque dictionary.

Data flow: `PolicyTrainer.state` -> `save` -> one directory per checkpoint -> `load` -> `PolicyTrainer.restore`.

A checkpoint is a directory ``<step>-<hash>`` with two safetensors files for each rank that trained, and ``checkpoint.json``, which contains
the files' BLAKE3 hashes and which rows of the tensors they have. The hash in the directory's name is that of the JSON. A checkpoint is
written under another name, synced and renamed, and then `LATEST` is moved, so a kill at any instant leaves the previous checkpoint whole.
A checkpoint of any number of ranks can be read by any number. Nothing here runs code on load, which is why torch.distributed.checkpoint is
not used: its index is a pickle.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.core.files import REFUSALS, install_directory, private, sync_directory, write_atomic
from ostinato.train.ranks import ALONE, Joined, RankPart, Ranks

_log = logging.getLogger(__name__)

FORMAT = "ostinato-checkpoint@1"
SHARDED = "ostinato-checkpoint@2"
MANIFEST = "checkpoint.json"
"""The file that a complete checkpoint has."""
ALL = 1 << 30
"""A number of checkpoints that is never reached, to keep all of them."""
_LATEST = "LATEST"
_PARTIAL = ".partial-"
_NAME = re.compile(r"\d+-\w+")
_FILE = re.compile(r"(weights|optimizer)(-\d{5}-of-\d{5})?\.safetensors")
_HEADER_LIMIT = 16 << 20
_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "U8": np.uint8}

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The state that a resumed trainer needs to continue with the same bits.

    `weights`, `moments`: name -> fp32 (or uint8) array; on load they are read-only maps of the file. `cursor` is the log position up
    to which batches are in the weights; `extra` is JSON that belongs to the caller (a baseline's state, say). `part`: which rows of the
    tensors these are, if they belong to one of several ranks; the moments are then called ``exp_avg/<name>``. On load everything is whole.

    Example: ``Checkpoint(step=3, weights={"w": ...}, moments={"exp_avg": ..., "exp_avg_sq": ..., "rng": ...}, cursor=812)``
    """

    step: int
    weights: Arrays
    moments: Arrays
    cursor: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    part: RankPart | None = None

    def rows(
        self, kind: Literal["weights", "exp_avg", "exp_avg_sq"], name: str, first: int, last: int
    ) -> NDArray[np.float32]:
        """Return rows [first, last) of a parameter's masters or moments in a loaded checkpoint; only these are read."""
        if isinstance(self.weights, Joined) and isinstance(self.moments, Joined):
            return (
                self.weights.rows(name, first, last)
                if kind == "weights"
                else self.moments.rows(f"{kind}/{name}", first, last)
            )
        whole = self.weights[name]
        if kind != "weights":  # flat, in the order of the weights
            before = sum(array.size for array in list(self.weights.values())[: list(self.weights).index(name)])
            whole = self.moments[kind][before : before + whole.size].reshape(whole.shape)
        return whole[first:last]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of the whole."""
        return (
            {name: tuple(array.shape) for name, array in self.weights.items()}
            if self.part is None
            else dict(self.part.shapes)
        )


def save(directory: Path, checkpoint: Checkpoint, *, keep: int = 2, ranks: Ranks = ALONE) -> Path:
    """Write a checkpoint durably and point `LATEST` at it; all but the newest `keep` are removed. Returns its directory.

    All `ranks` call it together, each with its part. Raises StorageFull on all ranks if the disk refuses
    it; the earlier checkpoints stay as they were.
    """
    partial = directory / f"{_PARTIAL}{ranks.gather(str(os.getpid()).encode())[0].decode()}"
    final = partial
    with _all_or_none(ranks, partial, checkpoint.step):
        if ranks.rank == 0:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(directory)
            partial.mkdir(mode=0o700)
    files: dict[str, Any] = {}
    with _all_or_none(ranks, partial, checkpoint.step):
        suffix = f"-{ranks.rank + 1:05d}-of-{ranks.count:05d}" if checkpoint.part is not None else ""
        for name, arrays in (("weights", checkpoint.weights), ("optimizer", checkpoint.moments)):
            named = f"{name}{suffix}.safetensors"
            files[named] = _write_arrays(partial / named, arrays)
            if checkpoint.part is not None:
                files[named]["firsts"] = dict(checkpoint.part.firsts)
    said = ranks.gather(json.dumps(files).encode())
    with _all_or_none(ranks, partial, checkpoint.step):
        if ranks.rank == 0:
            final = _commit(
                directory, partial, checkpoint, {k: v for each in said for k, v in json.loads(each).items()}
            )
    if ranks.rank == 0:
        sweep(directory)
        for old in stored(directory)[keep:]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    return final


@contextlib.contextmanager
def _all_or_none(ranks: Ranks, partial: Path, step: int) -> Generator[None]:
    """Run a part of the write that succeeds on every rank or on none: one rank's disk error is raised on all."""
    failed: OSError | None = None
    try:
        yield
    except OSError as error:
        failed = error
    worst = max(ranks.gather(b"" if failed is None else json.dumps([failed.errno, str(failed)]).encode()), key=len)
    if not worst:
        return
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    number, why = json.loads(worst)
    if number in REFUSALS:
        raise StorageFull(
            f"checkpoint of step {step} was not written to {partial.parent}: {why}. "
            "Free some space, or repair the disk; earlier checkpoints are untouched."
        ) from failed
    raise failed or OSError(number, why)


def _commit(directory: Path, partial: Path, checkpoint: Checkpoint, files: Mapping[str, Any]) -> Path:
    """Write the manifest, rename the directory and move `LATEST`."""
    written: dict[str, Any] = {
        "format": FORMAT if checkpoint.part is None else SHARDED,
        "step": checkpoint.step,
        "cursor": checkpoint.cursor,
        "extra": dict(checkpoint.extra),
        "files": dict(files),
    }
    if checkpoint.part is not None:
        written["shapes"] = {name: list(shape) for name, shape in checkpoint.part.shapes.items()}
    body = json.dumps(written, sort_keys=checkpoint.part is None).encode()  # keeps the shapes in the parameters' order
    write_atomic(partial / MANIFEST, body, durable=True)
    final = directory / f"{checkpoint.step:08d}-{blake3(body).hexdigest()[:16]}"
    # the name contains the hash, so an existing directory is the same checkpoint, or a damaged copy of it
    if not _is_whole(final):
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    sync_directory(directory)
    write_atomic(directory / _LATEST, final.name, durable=True)
    return final


def load(directory: Path, ranks: Ranks = ALONE) -> Checkpoint | None:
    """Return the newest whole checkpoint, verified by hash, or None if there has never been one.

    All `ranks` call it together, verify a part of the files each, and load the same checkpoint. A torn or
    corrupt checkpoint is logged, and the one before it is loaded. Raises Corrupt if checkpoints exist and none is whole.
    """
    candidates = stored(directory)
    latest = directory / _LATEST
    if latest.exists():
        named = latest.read_text(errors="replace").strip()
        candidates.sort(key=lambda path: path.name != named)  # stable: LATEST first, then the newest
    problems: list[str] = []
    for candidate in candidates:
        found, wrong = None, ""
        try:
            found = _read(candidate, ranks)
        except Corrupt as error:
            wrong = str(error)
        wrong = next((said.decode() for said in ranks.gather(wrong.encode()) if said), "")
        if found is not None and not wrong:
            return found
        problems.append(f"{candidate.name}: {wrong}")
        _log.warning("checkpoint %s cannot be used, falling back to the one before: %s", candidate, wrong)
    if problems:
        raise Corrupt(
            f"no whole checkpoint in {directory} ({'; '.join(problems)}). Restore one from a backup, or remove the directory "
            "to train again from the first release."
        )
    return None


def thin(directory: Path, *, keep: int, every: int, ladder: int) -> None:
    """Remove all checkpoints but the newest `keep` and a ladder of older ones, up to `ladder` octaves behind the newest.

    With checkpoints every `every` steps, between 2^k and 2^(k+1) checkpoints back every 2^(k-1)-th stays: two per octave. So
    for any step within the ladder, the newest kept checkpoint before it is at most twice as far behind the newest as the step is.
    """
    found = stored(directory)
    steps = kept_steps([step_of(path) for path in found], keep=keep, every=every, ladder=ladder)
    for path in found:
        if step_of(path) not in steps:
            shutil.rmtree(path, ignore_errors=True)


def kept_steps(steps: Iterable[int], *, keep: int, every: int, ladder: int) -> set[int]:
    """Return the steps whose checkpoints stay. See `thin`.

    Example: ``kept_steps(range(0, 101, 5), keep=2, every=5, ladder=4) == {100, 95, 90, 85, 80, 70, 60, 40}``
    """
    newest_first = sorted(set(steps), reverse=True)
    kept = set(newest_first[:keep])
    for step in newest_first[keep:]:
        octave = (newest_first[0] // every - step // every).bit_length() - 1
        rung = step // every % (1 << max(0, octave - 1)) == 0 and step % every == 0
        if ladder and octave < ladder and rung:
            kept.add(step)
    return kept


def adopt(partial: Path) -> Path:
    """Turn a fetched checkpoint (`partial_of`) into a stored one, the newest from then on. Returns its directory. Raises Corrupt."""
    step, name = _read(partial, ALONE).step, partial.name.removeprefix(_PARTIAL)
    if not name.startswith(f"{step:08d}-"):
        raise Corrupt(f"a checkpoint of step {step} is called {name}")
    final = partial.with_name(name)
    # LATEST first, lest it point to an older checkpoint after a kill; until the rename it points to nothing
    write_atomic(final.with_name(_LATEST), final.name, durable=True)
    install_directory(partial, final)
    return final


def files_of(manifest: bytes) -> dict[str, int]:
    """Return the files named in a checkpoint's manifest, with their sizes in bytes. Raises Corrupt."""
    try:
        return {str(name): int(promised["bytes"]) for name, promised in json.loads(manifest)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"no manifest of a checkpoint: {error!r}") from error


def partial_of(directory: Path, name: str) -> Path:
    """Return the directory into which a checkpoint is fetched."""
    return directory / f"{_PARTIAL}{name}"


def stored(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, newest first. Another process may remove some meanwhile."""
    found: list[tuple[int, int, Path]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if _NAME.fullmatch(path.name) and path.is_dir():
                found.append((step_of(path), path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def newest_step(directory: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    return max((step_of(path) for path in stored(directory)), default=0)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name; 0 for another directory."""
    step = checkpoint.name.split("-")[0]
    return int(step) if step.isdecimal() else 0


def cursor_of(checkpoint: Path) -> int:
    """Return the log's newest row when a stored checkpoint was written; 0 for a damaged one, which no trainer resumes from."""
    try:
        return int(json.loads((checkpoint / MANIFEST).read_bytes())["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def sweep(directory: Path) -> None:
    """Remove the partial files and directories of killed writers."""
    for entry in directory.glob(f"{_PARTIAL}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    """Write a safetensors file, without the library writer's copy of all tensors. Returns its size and hash."""
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
    with open(path, "wb", buffering=0, opener=private) as file:
        for part in (len(text).to_bytes(8, "little"), text, *map(_bytes, arrays.values())):
            digest.update(part)
            size += len(part)
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return {"bytes": size, "blake3": digest.hexdigest()}


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _is_whole(path: Path) -> bool:
    try:
        _read(path, ALONE)
    except Corrupt:
        return False
    return True


def _read(path: Path, ranks: Ranks) -> Checkpoint:
    """Read a checkpoint. Each rank verifies its share of the files' hashes, and reads the others unverified. Raises Corrupt."""
    try:
        return _parsed(path, ranks)
    except Corrupt:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path.name} is no whole checkpoint: {error!r}") from error


def _parsed(path: Path, ranks: Ranks) -> Checkpoint:
    body = (path / MANIFEST).read_bytes()
    if path.name.split("-")[-1] != blake3(body).hexdigest()[:16]:
        raise Corrupt(f"{MANIFEST} does not have the hash in the directory's name")
    manifest = json.loads(body)
    if manifest.get("format") not in (FORMAT, SHARDED):
        raise Corrupt(f"format {manifest.get('format')!r} is not {FORMAT}: use the version of ostinato that wrote it")
    files = cast("dict[str, Any]", manifest["files"])
    if odd := [name for name in files if not _FILE.fullmatch(name)]:
        raise Corrupt(f"{MANIFEST} names {odd[0]!r}, which is no file of a checkpoint")
    arrays = {
        name: _read_arrays(path / name, promised, check=number % ranks.count == ranks.rank)
        for number, (name, promised) in enumerate(sorted(files.items()))
    }
    known = {"step": manifest["step"], "cursor": manifest["cursor"], "extra": manifest["extra"]}
    if manifest["format"] == FORMAT:
        return Checkpoint(weights=arrays["weights.safetensors"], moments=arrays["optimizer.safetensors"], **known)
    shapes = {name: tuple(shape) for name, shape in manifest["shapes"].items()}
    weights, moments = (
        _joined({name: (arrays[name], files[name]["firsts"]) for name in sorted(files) if name.startswith(kind)})
        for kind in ("weights-", "optimizer-")
    )
    return Checkpoint(
        weights=weights, moments=moments, part=RankPart(shapes=shapes, firsts=dict.fromkeys(shapes, 0)), **known
    )


def _joined(files: Mapping[str, tuple[dict[str, NDArray[Any]], Mapping[str, int]]]) -> Joined:
    """Join all files of one kind, each with its tensors' first rows. Arrays that every rank wrote whole are taken from the first file."""
    pieces: dict[str, list[tuple[int, NDArray[Any]]]] = {}
    for arrays, firsts in files.values():
        for name, array in arrays.items():
            first = firsts.get(name.removeprefix("exp_avg/").removeprefix("exp_avg_sq/"))
            if first is not None or name not in pieces:
                pieces.setdefault(name, []).append((first or 0, array))
    return Joined(pieces)


def _read_arrays(path: Path, promised: Mapping[str, Any], *, check: bool) -> dict[str, NDArray[Any]]:
    if path.stat().st_size != promised["bytes"]:
        raise Corrupt(f"{path.name} has {path.stat().st_size} bytes, not {promised['bytes']}")
    if check and _digest(path) != promised["blake3"]:
        raise Corrupt(f"{path.name} does not have its promised hash")
    data = np.memmap(path, np.uint8, "r")
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


def _digest(path: Path) -> str:
    """Return the file's hash. It is read, not mapped: mapped pages would count as this process's memory."""
    digest, block = blake3(max_threads=1), bytearray(1 << 22)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest()
