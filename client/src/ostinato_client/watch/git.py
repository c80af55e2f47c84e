"""The watcher's git queries: plumbing commands only, so that nothing that a repository configures is run.

No external diff, text conversion, filter, hook, file system monitor, pager or remote helper: each git process gets settings and an
environment of its own. Paths are given after ``--`` or not at all, are taken literally, and are returned ended by a zero byte.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_OURS = (
    "git", "--no-pager", "--no-optional-locks", "--literal-pathspecs", "--no-replace-objects",
    "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false", "-c", "core.untrackedCache=false",
    "-c", "protocol.allow=never", "-c", "submodule.recurse=false",
)  # fmt: skip
_LONGEST_S = 60.0
_BUSY = ("rebase-merge", "rebase-apply", "sequencer", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG")
_MOST_COMMITS = 50
_MOST_PATHS = 500  # on one command line


class GitError(Exception):
    """Git could not be run, or it refused; the message is git's."""


@dataclass(frozen=True)
class Head:
    """Where a working tree is: the commit (None before the first), and the branch's full name (None if it is detached)."""

    commit: str | None
    branch: str | None


class Repository:
    """A working tree and its git directory.

    Example: ``Repository.at(Path.cwd()).head()``
    """

    def __init__(self, root: Path, directory: Path, common: Path) -> None:
        self.root = root
        self.directory = directory
        self.common = common

    @staticmethod
    def at(place: Path) -> Repository:
        """The repository that a directory is in. Raises GitError if there is none, or none with a working tree."""
        try:
            root, directory, common = (
                _run(place, "rev-parse", *words).decode(errors="surrogateescape")[:-1]
                for words in (["--show-toplevel"], ["--absolute-git-dir"], ["--git-common-dir"])
            )
        except GitError as error:
            if "not a git repository" not in str(error):
                raise
            raise GitError(
                f"{place.absolute()} is not a git repository, nor in one; name one with --repository"
            ) from error
        if not root:
            raise GitError(f"{place} is in a repository without a working tree; there is nothing to watch")
        return Repository(Path(os.path.realpath(root)), Path(directory), Path(os.path.join(place, common)).resolve())

    def head(self) -> Head:
        """Where the working tree is now."""
        branch = _run(self.root, "symbolic-ref", "-q", "HEAD", fine=(0, 1)).decode(errors="surrogateescape")
        return Head(self.commit("HEAD"), branch.rstrip("\n") or None)

    def commit(self, name: str) -> str | None:
        """The commit that a name stands for; None if there is none."""
        words = ("rev-parse", "-q", "--verify", "--end-of-options", f"{name}^{{commit}}")
        return _run(self.root, *words, fine=(0, 1, 128)).decode().strip() or None

    def busy(self) -> bool:
        """True in the middle of a rebase, merge or the like, when the files' contents are not final."""
        return any((self.directory / name).exists() for name in _BUSY)

    def contains(self, commit: str, other: str) -> bool:
        """True if a commit is `other` or comes after it."""
        words = ("merge-base", "--is-ancestor", other, commit)
        try:
            _run(self.root, *words)
        except GitError:  # 1: it is not; 128: one of them is gone
            return False
        return True

    def since(self, new: str, old: str) -> list[tuple[str, float]]:
        """The commits after `old` up to `new` with their times, oldest first, along first parents; `new` alone if history was rewritten."""
        return self._dated(f"{old}..{new}") if self.contains(new, old) else self._dated(new)[-1:]

    def after(self, new: str, moment: float) -> list[tuple[str, float]]:
        """The commits up to `new` that were made after a moment (Unix seconds), as `since` gives them."""
        return [(commit, at) for commit, at in self._dated(new) if at > moment]

    def _dated(self, commits: str) -> list[tuple[str, float]]:
        words = ("--timestamp", "--first-parent", f"--max-count={_MOST_COMMITS}", "--end-of-options", commits)
        rows = _run(self.root, "rev-list", *words).decode().splitlines()
        return [(commit, float(at)) for at, commit in map(str.split, rows)][::-1]

    def contents(self, commit: str, paths: Iterable[str], longest: int) -> dict[str, bytes]:
        """A commit's contents under these paths, except those that are no plain file or are longer than `longest` bytes."""
        wanted = list(dict.fromkeys(paths))
        blobs: dict[str, bytes] = {}
        for start in range(0, len(wanted), _MOST_PATHS):
            rows = _run(
                self.root, "ls-tree", "-z", "-l", "--full-tree", commit, "--", *wanted[start : start + _MOST_PATHS]
            )
            for row in rows.split(b"\0"):
                what, _, path = row.partition(b"\t")
                fields = what.split()
                if len(fields) == 4 and fields[0].startswith(b"100") and int(fields[3]) <= longest:
                    blobs[os.fsdecode(path)] = fields[2]
        texts = self._blobs(list(dict.fromkeys(blobs.values())))
        return {path: texts[blob] for path, blob in blobs.items() if blob in texts}

    def _blobs(self, names: list[bytes]) -> dict[bytes, bytes]:
        """The contents of blobs by their names."""
        data = _run(self.root, "cat-file", "--batch", said=b"".join(name + b"\n" for name in names)) if names else b""
        found: dict[bytes, bytes] = {}
        at = 0
        while at < len(data):
            end = data.index(b"\n", at)
            name, kind, *size = data[at:end].split()
            at = end + 1
            if kind != b"missing":
                found[name] = data[at : at + int(size[0])]
                at += int(size[0]) + 1
        return found

    def arrivals(self, old: str | None, new: str | None) -> list[str]:
        """Paths that a file may have been renamed to: not tracked so far, newly tracked, or new in `new` since `old`."""
        found = _run(self.root, "ls-files", "-z", "--others", "--exclude-standard")
        if new is not None:
            names = ("-r", "-z", "--no-renames", "--no-ext-diff", "--no-textconv", "--name-only", "--diff-filter=A")
            found += _run(self.root, "diff-index", "--cached", *names, new)
            if old is not None and old != new and self.commit(old):
                found += _run(self.root, "diff-tree", *names, old, new)
        return list(dict.fromkeys(os.fsdecode(path) for path in found.split(b"\0") if path))


def _run(place: Path, *words: str, fine: Sequence[int] = (0,), said: bytes = b"") -> bytes:
    """Git's output, given `said` on its standard input. Raises GitError."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {
        "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "",
        "GIT_LITERAL_PATHSPECS": "1", "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [*_OURS, "-C", str(place), *words],
            env=env, input=said, capture_output=True, timeout=_LONGEST_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise GitError("there is no git on this machine's PATH; install it") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {words[0]} did not answer within {_LONGEST_S:g} s") from None
    if done.returncode not in fine:
        raise GitError(done.stderr.decode(errors="replace").strip() or f"git {words[0]} ended with {done.returncode}")
    return done.stdout
