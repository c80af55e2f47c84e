"""A cache of measurements of this machine: each in a JSON file whose name is a hash of everything that the measurement depends on.

A file that is unreadable, damaged or another user's costs a new measurement, never an error. Processes that start together agree on one
value: one measures while the others wait for it; if they race, the first to write wins.
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
"""Environment variables that disable CPU instructions or change the order of additions."""
PLACE = "machine"
"""The cache's directory, inside the user's cache or a run's directory."""
_LIBRARIES = ("torch", "numba", "llvmlite", "transformers", "numpy")
_FORMAT = 1  # of the files
_MAX_BYTES = 1 << 20  # of a file
_TRANSIENT_S = 3600.0  # lifetime of a value that is not `lasting`
_LOCK_WAIT_S = 600.0  # how long another process may measure before this one measures, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Generic[T]):
    """A measurement of this machine, when it was made (Unix seconds), and the file that caches it; None if nothing could be written.

    Example: ``Measured(value=1.8, at=1795838000.0, file=Path("/home/ann/.cache/ostinato/machine/speed-0f3a.json"))``
    """

    value: T
    at: float
    file: Path | None


class _Kept(BaseModel, frozen=True, extra="forbid"):
    """The content of a file. `parts` is the whole cache key, to tell apart two keys with one hash."""

    format: int
    parts: dict[str, Any]
    at: float
    value: Any


def places(config: Config) -> tuple[Path, ...]:
    """Return the cache's directories, preferred first: in the user's cache, and in the run's directory if it exists."""
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
    """Return what `measure` returned when first called for these `parts` on this machine: read from the cache, or measured now and cached.

    `form` is the value's type, a dataclass or anything else that pydantic can read back. The machine's own parts (`machine`) are added to
    the key. A cached value that is not `usable` is measured again. So is one that is not `lasting`, such as a busy machine's, after an
    hour, which is long enough for processes that start together to agree. Raises only what `measure` raises.
    """
    full: dict[str, Any] = json.loads(json.dumps({**machine(), **parts}))  # in the form in which it is read back
    name = _name(kind, full)
    if (known := _KNOWN.get((str(where[0]), name))) is not None:
        return cast("Measured[T]", known)
    adapter: TypeAdapter[T] = TypeAdapter(form)
    files = [place / name for place in where]

    def is_good(value: T, at: float) -> bool:
        return usable(value) and (lasting(value) or abs(wall_clock() - at) < _TRANSIENT_S)

    found = _read(files, full, adapter, is_good)
    if found is None:
        with _one_at_a_time(where, kind):
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
"""Values that this process has used. It keeps using them, whatever becomes of the files."""


def _name(kind: str, full: dict[str, Any]) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:16]}.json"


def forget(where: Sequence[Path]) -> None:
    """Empty the cache, so that the next start measures again."""
    _KNOWN.clear()
    for place in where:
        with contextlib.suppress(OSError):
            for path in place.glob("*.json"):
                path.unlink(missing_ok=True)


def _read(
    files: Sequence[Path], full: dict[str, Any], adapter: TypeAdapter[T], is_good: Callable[[T, float], bool]
) -> Measured[T] | None:
    for path in files:
        text = _read_own(path)
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


def _read_own(path: Path) -> bytes | None:
    """Return the content of a regular file that belongs to this user or to root; None otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(OSError):
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_uid in (os.geteuid(), 0) and about.st_size <= _MAX_BYTES:
            return file.read()
    return None


def _write(
    files: Sequence[Path],
    full: dict[str, Any],
    adapter: TypeAdapter[T],
    value: T,
    is_good: Callable[[T, float], bool],
) -> Measured[T]:
    """Write the value to the first writable directory. If another process wrote one first, return that."""
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
    """Create the file atomically. An existing file stays if it is good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except OSError:  # it exists, or the file system has no hard links
            if not is_good():
                os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


@contextlib.contextmanager
def _one_at_a_time(where: Sequence[Path], kind: str) -> Generator[None]:
    """Let one process measure at a time. Where no lock can be created, all measure, and the first to write wins."""
    with contextlib.ExitStack() as stack:
        for place in where:
            try:
                stack.enter_context(hold(place, kind, wait_s=_LOCK_WAIT_S))
            except StorageFull:
                continue
            except Conflict:
                pass
            break
        yield


# ---------------------------------------------------------------- the machine's part of the key


def machine() -> dict[str, object]:
    """Return what every measurement depends on: the CPU, the cores that this process may use, libraries, and our kernels' code."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "code": _code(),
    }


def cores() -> int:
    """Return how many cores this process may use: its CPU affinity, or fewer if its control group (cgroup) has a smaller quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, -(-int(quota) // int(period))))
    return bound


@lru_cache
def _cpu() -> dict[str, str]:
    """Return the CPU's name and flags."""
    found = {"machine": platform.machine(), "model name": platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not colon:  # end of the first processor; the others are alike
                break
            if name in ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part"):
                found[name] = value
            elif name in ("flags", "Features"):
                found["flags"] = " ".join(sorted(value.split()))
    return found


@lru_cache
def _code() -> str:
    """Return a hash of the model's and the engine's code, so that a changed kernel is measured again without a new version number."""
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
