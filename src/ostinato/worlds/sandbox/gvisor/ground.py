"""Host directories of a gVisor backend: the root file system that all sandboxes see, runsc's state, and a directory for each sandbox."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import os
import py_compile
import shutil
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from ostinato.core.errors import BadRequest, SandboxRefused
from ostinato.worlds.sandbox.host import VERSION
from ostinato.worlds.sandbox.inside.view import ETC, SHOWN, SYSTEM, masks, python_parts
from ostinato.worlds.sandbox.launcher import compiled
from ostinato.worlds.sandbox.spec_validation import root_only_paths

NOBODY = 65534
_PREFIX = "ostinato-gvisor-"
_MAX_HIDDEN = 64
_PACKAGE = Path(__file__).parents[1]
_STATX = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((visibility("default")))
int statx(int fd, const char *path, int flags, unsigned mask, struct statx *found) {
    return (int)syscall(SYS_statx, fd, path, flags & ~AT_NO_AUTOMOUNT, mask, found);
}
"""


class Ground:
    """A temporary directory, locked while its process lives. Creating one first removes directories left by killed processes.

    `root` is the sandboxes' root file system, `state` is runsc's state directory, and `box` makes a directory for one sandbox.
    """

    def __init__(self) -> None:
        if sys.base_prefix.startswith("/tmp/"):
            raise SandboxRefused(
                f"the Python installation lies at {sys.base_prefix}, and sandboxes have a /tmp of their own; install Python elsewhere"
            )
        base = Path(tempfile.gettempdir())
        for left in base.glob(f"{_PREFIX}*"):
            _sweep(left)
        self.place, self._lock = _locked(base)
        self.root, self.state = self.place / "root", self.place / "state"
        self.state.mkdir(0o700)
        self._count = 0
        # cache: host directory -> the paths in it that only root may read
        self._closed: dict[str, list[str]] = {}
        self._build()

    def _build(self) -> None:
        for name in ("root/etc", "code", "local/bin", "empty"):
            (self.place / name).mkdir(parents=True)
        (self.place / "blank").touch()
        for path in SYSTEM:
            if os.path.islink(path):
                (self.root / path[1:]).symlink_to(os.readlink(path))
        for name, text in ETC.items():
            (self.root / "etc" / name).write_text(text)
        for name in SHOWN:
            source, target = Path("/etc", name), self.root / "etc" / name
            if source.is_symlink() or not source.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
            else:
                shutil.copyfile(source, target)
        for name in ("python", "python3"):
            (self.place / "local/bin" / name).symlink_to(f"{sys.base_prefix}/bin/python{VERSION}")
        ours = [
            *(_PACKAGE / "gvisor/inside").glob("*.py"),
            _PACKAGE / "inside/compare.py",
            _PACKAGE / "inside/kernel.py",
        ]
        for path in ours:
            shutil.copyfile(path, self.place / "code" / path.name)
        compileall.compile_dir(
            self.place / "code", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        self._show("root", "code", "local", "empty", "blank")

    def _show(self, *names: str) -> None:
        """Make directories readable for every host user, since programs may run as any of them, and writable for our own user alone."""
        for name in names:
            for directory, _, files in [*os.walk(self.place / name)] or [(str(self.place / name), [], [])]:
                for path in (directory, *(f"{directory}/{file}" for file in files)):
                    if not os.path.islink(path):
                        os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)

    def mend_statx(self) -> None:
        """Preload into every program a library that clears the statx flag unknown to this runsc. Raises SandboxRefused."""
        made = compiled("statx", {"statx.c": _STATX})
        shutil.copyfile(made, self.root / "etc/statx.so")
        (self.root / "etc/ld.so.preload").write_text("/etc/statx.so\n")
        self._show("root/etc")

    def shown(self) -> Iterator[tuple[str, str]]:
        """Yield the read-only mounts of every sandbox as (host path, path in the sandbox). Later mounts cover earlier ones."""
        prefix = sys.base_prefix
        for path in SYSTEM:
            if os.path.isdir(path) and not os.path.islink(path):
                yield path, path
        if os.path.isdir("/usr/local"):
            yield str(self.place / "local"), "/usr/local"
        if prefix != "/usr":
            for name in python_parts(prefix, VERSION):
                yield f"{prefix}/{name}", f"{prefix}/{name}"
        for path in masks(prefix, VERSION):
            hidden = path.startswith("/usr/local/") and prefix != "/usr/local"
            if os.path.isdir(path) and not hidden:
                yield str(self.place / "empty"), path

    def covers(self, mounts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield mounts that hide files only root may read, as (host path, path in the sandbox), for programs mapped to the host's root.

        `mounts` is as in a spec. Raises BadRequest if too many files must be hidden.
        """
        places = [*self.shown(), *((source, seen) for seen, source in mounts.items())]
        hidden_by = dict[str, str]()
        for number, (source, seen) in enumerate(places):
            if source not in self._closed:
                self._closed[source] = root_only_paths(source) if os.path.isdir(source) else []
            later = [f"{place}/" for _, place in places[number + 1 :]]
            for path in self._closed[source]:
                place = f"{seen}/{os.path.relpath(path, source)}"
                if not any(f"{place}/".startswith(other) for other in later):
                    hidden_by[place] = str(self.place / ("empty" if os.path.isdir(path) else "blank"))
        if len(hidden_by) > _MAX_HIDDEN:
            raise BadRequest(
                f"layers: they belong to root, and {len(hidden_by)} files visible in the sandbox may be read by root alone, such as "
                f"{min(hidden_by)!r}; give the layers to another user, or make the files readable for everybody",
                field="layers",
            )
        yield from ((source, place) for place, source in hidden_by.items())

    @contextlib.contextmanager
    def box(self) -> Generator[Path]:
        """Make a private directory for one sandbox, with a `ports` directory in it. Remove both at the end."""
        self._count += 1
        made = self.place / f"b{self._count}"
        for each in (made, made / "ports"):
            each.mkdir(0o700)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def close(self) -> None:
        """Remove all directories. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.place, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(base: Path) -> tuple[Path, int]:
    """Make a directory below `base`. Return it and the descriptor that holds its lock."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                return place, lock
            os.close(lock)  # another process swept it before it was locked


def _sweep(place: Path) -> None:
    """Remove a directory unless a live process holds its lock."""
    with contextlib.suppress(OSError):
        seen = place.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
            return
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(held)
