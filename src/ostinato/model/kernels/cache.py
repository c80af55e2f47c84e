# pyright: basic, reportPrivateUsage=false, reportIncompatibleMethodOverride=false
"""The cache of compiled kernels, shared per user by all clones, environments and wheels with the same kernels.

Numba's own cache is beside the sources, so every copy of them compiles again. This one is in the user's cache directory, under a hash of
all kernel sources of a folder and of the compilers' versions; numba's index adds the kind of CPU and the types of the arguments. It holds
pickled code, so a directory that is not private to this user is not used. NUMBA_CACHE_DIR takes precedence.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching, config

from ostinato.core.errors import BadConfig
from ostinato.core.places import cache_directory, private_directory

logger = logging.getLogger(__name__)

KEPT = 8
"""The number of kernel versions kept per user; beyond it, the least recently used one is removed."""
_PACKAGE = Path(__file__).parents[2]
# numba's settings that change the generated code
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_MAX_WAIT_S = 300.0  # longest wait for another process that compiles the same kernel
_NOTICE = "compiling kernels, once for this user and version: about a minute"
_NOT_CACHED_NOTICE = (
    "compiling kernels, for this process alone (no cache directory can be written; set XDG_CACHE_HOME): about a minute"
)


class _Notice:
    """Reports once per process that kernels are being compiled: to the log, or inside `announced` to a listener."""

    def __init__(self) -> None:
        self._lock, self._given = threading.Lock(), False
        self.say: Callable[[str], None] = logger.info

    def give(self, line: str) -> None:
        with self._lock:
            given, self._given = self._given, True
        if not given:
            self.say(line)


_notice = _Notice()


@contextlib.contextmanager
def announced(say: Callable[[str], None]) -> Generator[None]:
    """Inside the context, call `say` with one line before this process compiles its first kernel; never if all are in the cache."""
    before, _notice.say = _notice.say, say
    try:
        yield
    finally:
        _notice.say = before


def digest(folder: Path) -> str:
    """Return a hash of all kernels of a folder: its sources, numba, llvmlite, and numba's settings that change the generated code."""
    hashed = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    hashed.update(repr([getattr(config, switch, None) for switch in _SWITCHES]).encode())
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        hashed.update(f"\n{source.name} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()[:32]


@cache
def directory(folder: Path) -> Path | None:
    """Return the cache directory for the compiled kernels of a folder, or None. Removes the least recently used versions."""
    try:
        base = cache_directory()
    except BadConfig:
        return None
    if not private_directory(base / "kernels"):
        return None
    place = base / "kernels" / digest(folder)
    new = not place.exists()
    if not private_directory(place):
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # marks it as recently used
    if new:
        _remove_old(place)
    return place


def _remove_old(new: Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove them at the same time
        others = [place for place in new.parent.iterdir() if place != new]
        others.sort(key=lambda place: place.stat().st_mtime, reverse=True)
        for place in others[KEPT - 1 :]:
            shutil.rmtree(place, ignore_errors=True)


class KernelLocator(caching._CacheLocator):
    """Tells numba where the compiled form of one of our kernels is cached."""

    def __init__(self, py_func: Any, folder: Path) -> None:
        self._line = py_func.__code__.co_firstlineno
        self._path = directory(folder)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> KernelLocator | None:
        """Return a locator for one of our functions; None for any other function, or with NUMBA_CACHE_DIR."""
        source = Path(py_file)
        named = getattr(config, "CACHE_DIR", "")
        if named or _PACKAGE not in source.parents or not source.exists():
            return None
        return cls(py_func, source.parent)

    def ensure_cache_path(self) -> None:
        """Do nothing: `directory` has created it, and a cache that cannot be written is no error."""

    def get_cache_path(self) -> str:
        """Return the directory; if there is none, the null device, in which no file can exist."""
        return os.devnull if self._path is None else str(self._path)

    def get_source_stamp(self) -> str:
        """Return a constant: the directory's name already depends on the sources."""
        return "ostinato"

    def get_disambiguator(self) -> str:
        """Return the line of the function."""
        return str(self._line)


class KernelCacheFile(caching.IndexDataCacheFile):
    """Numba's cache file of a function's compiled forms, for concurrent processes. A damaged or unwritable file only costs time."""

    _compile_lock: int | None = None  # the descriptor of the file that is locked while this process compiles

    def load(self, key: Any) -> Any:
        """Load the compiled form; None if it must be compiled, which is announced for our kernels.

        Of several processes that need the same kernel, one compiles it; the others wait here and load its result.
        """
        if not self._ours:
            return super().load(key)
        if (form := self._load_form(key)) is not None:
            return form
        _notice.give(_NOT_CACHED_NOTICE if self._cache_path == os.devnull else _NOTICE)
        self._lock_compilation()
        if (form := self._load_form(key)) is not None:
            self._unlock_compilation()
        return form

    def _load_form(self, key: Any) -> Any:
        with contextlib.suppress(Exception):  # a damaged file may raise anything
            return super().load(key)
        return None

    def _lock_compilation(self) -> None:
        """Wait until no other process compiles this kernel. Kernels call each other without cycles, so there is no deadlock."""
        if self._compile_lock is not None:
            return
        with contextlib.suppress(OSError):
            lock = os.open(f"{self._index_path}.turn", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            end = time.monotonic() + _MAX_WAIT_S
            while time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.05)
                else:
                    self._compile_lock = lock
                    return
            os.close(lock)

    def _unlock_compilation(self) -> None:
        lock, self._compile_lock = self._compile_lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # explicit, because a forked child may hold the file open
            os.close(lock)

    def save(self, key: Any, data: Any) -> None:
        """Save a compiled form under a lock: numba numbers a function's forms in an index that two processes could write at once."""
        if not self._ours:
            super().save(key, data)
            return
        try:
            with contextlib.suppress(OSError), self._locked():
                try:
                    self._load_index()
                except Exception:  # noqa: BLE001 (a damaged file may raise anything)
                    self._forget_forms()
                    self._save_index({})
                super().save(key, data)
        finally:
            self._unlock_compilation()

    def _forget_forms(self) -> None:
        """Remove this function's compiled forms, because a new index counts from 1 and would refer to old ones."""
        stem = os.path.basename(self._index_path).removesuffix(".nbi")
        for form in Path(self._cache_path).glob(f"{glob.escape(stem)}.*.nbc"):
            form.unlink(missing_ok=True)

    @property
    def _ours(self) -> bool:
        return self._source_stamp == "ostinato"

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        lock = os.open(os.path.join(self._cache_path, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # explicit, because a forked child may hold the file open
            os.close(lock)


def install() -> None:
    """Make numba use this cache for all of our kernels that are decorated from now on. Idempotent."""
    locators: list[Any] = caching.CacheImpl._locator_classes
    if KernelLocator not in locators:
        locators.insert(0, KernelLocator)
        caching.IndexDataCacheFile = KernelCacheFile
