# pyright: basic, reportPrivateUsage=false, reportIncompatibleMethodOverride=false
"""The cache of compiled kernels: kept once per user and version of the kernels, for every clone, environment and wheel.

Numba's own cache lies beside the sources, so that every copy of them compiles again. This one lies in the user's cache directory, under
a hash of all kernel sources of a folder and of the compilers' versions; numba's index adds the kind of CPU and the types of the
arguments. What lies there is pickled code: a directory that is not this user's alone is not used. NUMBA_CACHE_DIR still wins.
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
"""How many versions of the kernels a user keeps; beyond that the one that was used longest ago is removed."""
_PACKAGE = Path(__file__).parents[2]
# of numba: they change the code
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_PATIENCE_S = 300.0  # how long another process may compile one kernel; then this one does, too
_NOTICE = "compiling kernels, once for this user and version: about a minute"
_NOWHERE = (
    "compiling kernels, for this process alone (no cache directory can be written; set XDG_CACHE_HOME): about a minute"
)


class _Notice:
    """Says once per process that kernels are compiled, to the log or, inside `announced`, to a listener."""

    def __init__(self) -> None:
        self._lock, self._said = threading.Lock(), False
        self.say: Callable[[str], None] = logger.info

    def give(self, line: str) -> None:
        with self._lock:
            said, self._said = self._said, True
        if not said:
            self.say(line)


_notice = _Notice()


@contextlib.contextmanager
def announced(say: Callable[[str], None]) -> Generator[None]:
    """Inside the block, `say` gets one line before the first kernel of this process is compiled; none if all are in the cache."""
    before, _notice.say = _notice.say, say
    try:
        yield
    finally:
        _notice.say = before


def digest(folder: Path) -> str:
    """A hash of all kernels of a folder: its sources, numba, llvmlite, and the switches of numba that change the code."""
    found = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    found.update(repr([getattr(config, switch, None) for switch in _SWITCHES]).encode())
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        found.update(f"\n{source.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:32]


@cache
def directory(folder: Path) -> Path | None:
    """Where this process keeps the compiled kernels of a folder, or None. Removes versions that were not used for long."""
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
        os.utime(place)  # used now
    if new:
        _remove_old(place)
    return place


def _remove_old(new: Path) -> None:
    with contextlib.suppress(OSError):  # another process removes them, too
        others = [place for place in new.parent.iterdir() if place != new]
        others.sort(key=lambda place: place.stat().st_mtime, reverse=True)
        for place in others[KEPT - 1 :]:
            shutil.rmtree(place, ignore_errors=True)


class KernelLocator(caching._CacheLocator):
    """Tells numba where the compiled form of one of our kernels lies."""

    def __init__(self, py_func: Any, folder: Path) -> None:
        self._line = py_func.__code__.co_firstlineno
        self._path = directory(folder)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> KernelLocator | None:
        """A locator for a function of Ostinato, None for any other function or with NUMBA_CACHE_DIR."""
        source = Path(py_file)
        named = getattr(config, "CACHE_DIR", "")
        if named or _PACKAGE not in source.parents or not source.exists():
            return None
        return cls(py_func, source.parent)

    def ensure_cache_path(self) -> None:
        """Nothing: the directory was made when it was looked up, and a cache that cannot be written is no error."""

    def get_cache_path(self) -> str:
        """The directory; the null device, in which no file can be, if there is none."""
        return os.devnull if self._path is None else str(self._path)

    def get_source_stamp(self) -> str:
        """The same for all: the sources are in the directory's name."""
        return "ostinato"

    def get_disambiguator(self) -> str:
        """The line of the function."""
        return str(self._line)


class KernelCacheFile(caching.IndexDataCacheFile):
    """Numba's file of the compiled forms of a function, for several processes at once. A damaged or unwritable one costs time, no more."""

    _turn: int | None = None  # the file that is locked while this process compiles

    def load(self, key: Any) -> Any:
        """The compiled form, or None. One of our kernels that is missing is about to be compiled, which is announced.

        Processes that start together would all compile the same: one does, and the others wait for what it saves.
        """
        if not self._ours:
            return super().load(key)
        if (found := self._found(key)) is not None:
            return found
        _notice.give(_NOWHERE if self._cache_path == os.devnull else _NOTICE)
        self._take_turn()
        if (found := self._found(key)) is not None:
            self._end_turn()
        return found

    def _found(self, key: Any) -> Any:
        with contextlib.suppress(Exception):  # a damaged file may raise anything
            return super().load(key)
        return None

    def _take_turn(self) -> None:
        """Wait until no other process compiles this kernel. A kernel needs others, but never in a circle, so nobody waits for ever."""
        if self._turn is not None:
            return
        with contextlib.suppress(OSError):
            turn = os.open(f"{self._index_path}.turn", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            end = time.monotonic() + _PATIENCE_S
            while time.monotonic() < end:
                try:
                    fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.05)
                else:
                    self._turn = turn
                    return
            os.close(turn)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(turn, fcntl.LOCK_UN)  # a forked child may hold the file open, too
            os.close(turn)

    def save(self, key: Any, data: Any) -> None:
        """Save a compiled form. Numba numbers the forms of a function by an index that two processes could write at once."""
        if not self._ours:
            super().save(key, data)
            return
        try:
            with contextlib.suppress(OSError), self._alone():
                try:
                    self._load_index()
                except Exception:  # noqa: BLE001 (a damaged file may raise anything)
                    self._forget_forms()
                    self._save_index({})
                super().save(key, data)
        finally:
            self._end_turn()

    def _forget_forms(self) -> None:
        """Remove this function's compiled forms: a new index numbers from 1, and would name old ones."""
        stem = os.path.basename(self._index_path).removesuffix(".nbi")
        for form in Path(self._cache_path).glob(f"{glob.escape(stem)}.*.nbc"):
            form.unlink(missing_ok=True)

    @property
    def _ours(self) -> bool:
        return self._source_stamp == "ostinato"

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        lock = os.open(os.path.join(self._cache_path, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold the file open, too
            os.close(lock)


def install() -> None:
    """Have numba keep the kernels here that are decorated from now on. Idempotent."""
    locators: list[Any] = caching.CacheImpl._locator_classes
    if KernelLocator not in locators:
        locators.insert(0, KernelLocator)
        caching.IndexDataCacheFile = KernelCacheFile
