"""A cache of what was measured on this machine: each figure in a JSON file under a key that hashes all it depends on.

A file that cannot be read, is damaged, or belongs to somebody else costs a measurement, never an error. Processes that start together
agree: one measures while the others wait for it, and whoever writes first wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

import ostinato
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict, StorageFull
from ostinato.core.places import expanded
from ostinato.record.roles import hold

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

SWITCHES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT",
)  # fmt: skip
"""Environment variables that mask instructions, or choose another order of additions."""
PLACE = "machine"
"""The directory with the figures, in the user's cache or in a run's directory."""
_LIBRARIES = ("torch", "numba", "llvmlite", "transformers", "numpy")
_FORMAT = 1  # of the files
_MOST_BYTES = 1 << 20
_BRIEF_S = 3600.0  # how long a figure is believed that does not last
_PATIENCE_S = 600.0  # how long another process may measure before this one measures, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Generic[T]):
    """A figure of this machine, when it was measured (Unix seconds), and the file that keeps it; None: nothing could be written.

    Example: ``Measured(value=1.8, at=1795838000.0, file=Path("/home/ann/.cache/ostinato/machine/speed-0f3a.json"))``
    """

    value: T
    at: float
    file: Path | None


class _Kept(BaseModel, frozen=True, extra="forbid"):
    """What a file holds. `parts` is the key in full, so that two keys with one hash are told apart."""

    format: int
    parts: dict[str, Any]
    at: float
    value: Any


def places(config: Config) -> tuple[Path, ...]:
    """Where figures are kept, the best place first: the user's cache, or, where that cannot be written, a run that was started."""
    run = config.run.directory
    return (expanded(config.model.cache) / PLACE, *([run / PLACE] if run.is_dir() else []))


def measured(
    where: Sequence[Path],
    kind: str,
    parts: Mapping[str, object],
    measure: Callable[[], T],
    form: type[T],
    *,
    usable: Callable[[T], bool] = lambda _: True,
    lasting: Callable[[T], bool] = lambda _: True,
) -> Measured[T]:
    """What `measure` returned on this machine when it was first asked for these `parts`: read from a file, or measured now and kept.

    `form` is the type of the figure, a dataclass or anything else that pydantic can read back. The parts of the machine itself are added
    (`machine`). A kept figure that is not `usable` is measured again; so is one that is not `lasting`, such as a busy machine's, after an
    hour: long enough for the processes of a start to agree. Raises only what `measure` raises.
    """
    full: dict[str, Any] = json.loads(json.dumps({**machine(), **parts}))  # as it will be read back
    name = _name(kind, full)
    if (known := _KNOWN.get((str(where[0]), name))) is not None:
        return cast("Measured[T]", known)
    adapter: TypeAdapter[T] = TypeAdapter(form)
    files = [place / name for place in where]

    def is_good(value: T, at: float) -> bool:
        return usable(value) and (lasting(value) or abs(wall_clock() - at) < _BRIEF_S)

    found = _read(files, full, adapter, is_good)
    if found is None:
        with _alone(where, kind):
            found = _read(files, full, adapter, is_good) or _write(files, full, adapter, measure(), is_good)
        if found.file is None:
            _LOG.warning(
                "what was measured on this machine cannot be kept in %s, so each process measures again; set model.cache to a directory "
                "of yours",
                " or ".join(map(str, where)),
            )
    _KNOWN[str(where[0]), name] = found
    return found


_KNOWN: dict[tuple[str, str], Measured[Any]] = {}
"""What this process has used. It goes on using it, whatever becomes of the file."""


def _name(kind: str, full: dict[str, Any]) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:16]}.json"


def forget(where: Sequence[Path]) -> None:
    """Remove everything that is kept, so that the next start measures again."""
    _KNOWN.clear()
    for place in where:
        with contextlib.suppress(OSError):
            for path in place.glob("*.json"):
                path.unlink(missing_ok=True)


def _read(
    files: Sequence[Path], full: dict[str, Any], adapter: TypeAdapter[T], is_good: Callable[[T, float], bool]
) -> Measured[T] | None:
    for path in files:
        text = _own(path)
        if text is None:
            continue
        with contextlib.suppress(ValidationError):
            kept = _Kept.model_validate_json(text)
            if kept.format == _FORMAT and kept.parts == full:
                value = adapter.validate_json(json.dumps(kept.value), strict=True)
                if not is_good(value, kept.at):
                    continue
                return Measured(value=value, at=kept.at, file=path)
    return None


def _own(path: Path) -> bytes | None:
    """The content of a plain file of this user's, or the system's; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(OSError):
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_uid in (os.geteuid(), 0) and about.st_size <= _MOST_BYTES:
            return file.read()
    return None


def _write(
    files: Sequence[Path],
    full: dict[str, Any],
    adapter: TypeAdapter[T],
    value: T,
    is_good: Callable[[T, float], bool],
) -> Measured[T]:
    """Keep the value in the first place that can be written; if another process was quicker, return its value instead."""
    now = wall_clock()
    kept = _Kept(format=_FORMAT, parts=full, at=now, value=adapter.dump_python(value, mode="json"))
    for path in files:
        try:
            _put(path, kept.model_dump_json(indent=1), lambda at=path: _read([at], full, adapter, is_good) is not None)
        except OSError:
            continue
        return _read([path], full, adapter, is_good) or Measured(value=value, at=now, file=None)
    return Measured(value=value, at=now, file=None)


def _put(path: Path, text: str, is_good: Callable[[], bool]) -> None:
    """Create the file whole. One that is there already stays if it is good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except OSError:  # it exists, or the file system has no links
            if not is_good():
                os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


@contextlib.contextmanager
def _alone(where: Sequence[Path], kind: str) -> Generator[None]:
    """Let one process measure at a time. Where no lock can be had, all do, and the first to write wins."""
    with contextlib.ExitStack() as stack:
        for place in where:
            try:
                stack.enter_context(hold(place, kind, wait_s=_PATIENCE_S))
            except StorageFull:
                continue
            except Conflict:
                pass
            break
        yield


# ---------------------------------------------------------------- the machine


def machine() -> dict[str, object]:
    """What every figure depends on: the CPU, the cores that this process may use, libraries, and the code of our kernels."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "code": _code(),
    }


def cores() -> int:
    """How many cores this process may use: those it is bound to, or fewer if its control group allows it less time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, -(-int(quota) // int(period))))
    return bound


@lru_cache
def _cpu() -> dict[str, str]:
    """The CPU's name and its flags."""
    found = {"machine": platform.machine(), "model name": platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not colon:  # the next processor is alike
                break
            if name in ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part"):
                found[name] = value
            elif name in ("flags", "Features"):
                found["flags"] = " ".join(sorted(value.split()))
    return found


@lru_cache
def _code() -> str:
    """A hash of the model's and the engine's code, so that a changed kernel is measured again even without a new version number."""
    root, digest = Path(ostinato.__file__).parent, hashlib.sha256(ostinato.__version__.encode())
    for room in ("model", "engine"):
        for path in sorted((root / room).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
