"""Faults on demand: a disk that fails or kills at the n-th system call, a store that drops, truncates or flips the data it returns; and
whole sequences of changes, cut off at each call."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest

from ostinato.core.errors import NotFound, OstinatoError, StorageFull
from ostinato.core.seams import WeightStore
from ostinato.weights.store.disk import Disk


class FaultyDisk(Disk):
    """A disk whose `fail_at`-th call (from 1) fails with `code`, or kills the process with signal 9 if `kill` is set.

    A failing write has already written half of its data. `calls` lists the calls made; `sticky` makes all later calls fail
    too. Example: ``DirectoryStore(root, FaultyDisk(fail_at=7))``
    """

    def __init__(self, fail_at: int = 0, code: int = errno.ENOSPC, *, kill: bool = False, sticky: bool = False) -> None:
        self.fail_at = fail_at
        self.calls: list[tuple[str, str]] = []
        self._code = code
        self._kill = kill
        self.sticky = sticky

    def _fails(self, call: str, what: object) -> bool:
        self.calls.append((call, str(what)))
        return len(self.calls) == self.fail_at or (self.sticky and 0 < self.fail_at < len(self.calls))

    def _fail(self) -> OSError:
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return OSError(self._code, os.strerror(self._code))

    def create(self, path: Path) -> int:
        if self._fails("create", path):
            raise self._fail()
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        if self._fails("write", _kind_of(fd)):
            super().write(fd, data[: len(data) // 2])
            raise self._fail()
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        if self._fails("fsync", _kind_of(fd)):
            raise self._fail()
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        if self._fails("rename", f"{source} -> {target}"):
            raise self._fail()
        super().rename(source, target)

    def mkdir(self, path: Path) -> None:
        if self._fails("mkdir", path):
            raise self._fail()
        super().mkdir(path)

    def touch(self, path: Path) -> None:
        if self._fails("touch", path):
            raise self._fail()
        super().touch(path)

    def unlink(self, path: Path) -> None:
        if self._fails("unlink", path):
            raise self._fail()
        super().unlink(path)


def _kind_of(fd: int) -> str:
    return "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"


def truncated(data: bytes) -> bytes:
    """The first half."""
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """The data with one bit in the middle flipped."""
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0x10
    return bytes(damaged)


def dropped(data: bytes) -> bytes:
    """Raise NotFound, as if the object were missing."""
    raise NotFound(f"an object of {len(data)} bytes was dropped by a test", field="hash")


class FaultyStore:
    """A weight store that damages the `fail_get`-th read with `damage`, and refuses the `fail_put`-th write (from 1; 0: never).

    The damage happens behind the store's own check, like a bad cable or memory. A put or a ref's move counts as a write.
    Example: ``Follower(FaultyStore(store, fail_get=2, damage=flipped))``
    """

    def __init__(
        self, inner: WeightStore, *, fail_get: int = 0, fail_put: int = 0, damage: Callable[[bytes], bytes] = dropped
    ) -> None:
        self.inner = inner
        self.fail_get = fail_get
        self.fail_put = fail_put
        self.gets = 0
        self.puts = 0
        self._damage = damage

    async def put(self, data: bytes | memoryview) -> str:
        self._count_put()
        return await self.inner.put(data)

    async def get(self, hash: str) -> bytes:
        self.gets += 1
        data = await self.inner.get(hash)
        return self._damage(data) if self.gets == self.fail_get else data

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        self.gets += 1
        data = await self.inner.get_range(hash, start, length)
        return self._damage(data) if self.gets == self.fail_get else data

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        self._count_put()
        await self.inner.move_ref(ref, old, new)

    async def read_ref(self, ref: str) -> str | None:
        return await self.inner.read_ref(ref)

    def _count_put(self) -> None:
        self.puts += 1
        if self.puts == self.fail_put:
            raise StorageFull("the store was told by a test to refuse this write")


# ---------------------------------------------------------------- every call of a sequence


class Killed(BaseException):
    """The process ends here: nothing that would follow is done, clean-up included."""


class Cut:
    """The calls by which Python changes files inside `cutting`: the `at`-th is refused with `code`, or, if that is None, it and all later
    ones kill. SQLite's own calls are not among them.
    """

    def __init__(self, at: int, code: int | None) -> None:
        self.at, self.code, self.calls = at, code, 0

    @property
    def reached(self) -> bool:
        """True if there were so many calls."""
        return self.calls >= self.at

    def count(self, call: str, what: object) -> None:
        self.calls += 1
        if self.code is None and self.reached:
            raise Killed(f"{call} {what}")
        if self.calls == self.at:
            raise OSError(self.code, os.strerror(self.code or 0), str(what))


_CHANGES = ("fsync", "rename", "replace", "mkdir", "link", "unlink", "rmdir", "truncate")


@contextmanager
def cutting(at: int, code: int | None) -> Generator[Cut]:
    """Inside the block a `Cut` is in force."""
    cut = Cut(at, code)

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                cut.count(name, args[0])
            return real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in (*_CHANGES, "open"):
            patched.setattr(os, name, counted(name, getattr(os, name)))
        yield cut


def cut_everywhere(
    act: Callable[[], object], again: Callable[[], object], check: Callable[[], object], prepare: Callable[[], object]
) -> int:
    """Cut `act` off at each of its calls, by a full disk, by one that fails and by a kill: each time `prepare`, `act`, then `check`, which
    must hold for what is left, then `again`. Returns how many calls were cut.
    """
    cuts = 0
    for code in (errno.ENOSPC, errno.EIO, None):
        at, reached = 0, True
        while reached:
            at += 1
            prepare()
            with catch_warnings(), cutting(at, code) as cut, suppress(OSError, OstinatoError, Killed):
                simplefilter("ignore", ResourceWarning)  # whoever is killed closes no file
                act()
            reached = cut.reached
            cuts += reached
            check()
            again()
    return cuts
