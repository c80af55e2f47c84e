"""Filters a rollout's file changes down to those that may count in grading.

An outcome is graded in a separate sandbox, which gets only changes to sources that the task names: nothing that runs before the tests,
configures or replaces them, or is not human-readable text. Changes that are left out are reported, and those that look like an attack on
the grader are marked as suspect.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ostinato.core.sandbox import Change, ChangeKind

_PATH_BYTES = 1000  # a longer path is no real source, and no sandbox could be started with it
_CONFIGURES = {
    "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml", ".coveragerc",
}  # fmt: skip
_STARTS_FIRST = {"sitecustomize.py", "usercustomize.py", "pyvenv.cfg"}
_COMPILED = {".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".o", ".a", ".egg", ".whl", ".zip"}
_CACHES = {
    "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".git", ".hg", ".cache", ".tox", ".nox",
}  # fmt: skip
_TEST_FOLDERS = {"test", "tests"}
_TEST_FILE = re.compile(r"(test_.*|.*_test|tests?)\.py")
_RUNNER = {
    "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "xdist", "pytest_asyncio", "hypothesis", "exceptiongroup",
}  # fmt: skip
_METADATA = re.compile(r".*\.(egg-info|dist-info|egg-link|pth)")
_HOOKED = re.compile(
    rb"pytest_runtest|pytest_pyfunc_call|pytest_collection|pytest_sessionfinish|pytest_report|pytest_ignore_collect|hookwrapper|"
    rb"hookimpl|TestReport|CallInfo|outcome|exitstatus|autouse|monkeypatch|_exit|sys\.exit|skip|xfail|__eq__|builtins|setattr|addopts|"
    rb"deselect|python_files|python_functions|testpaths|norecursedirs|collect_ignore|assert"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSources:
    """Rules for what may count: globs of sources (`**` stands for any number of directories), import roots, the grader's test files, and
    size limits.

    A path that `sources` names without a wildcard may be named like a test or a known module, unless it is one of `tests`.

    Example: ``CountedSources(sources=("src/**/*.py",), roots=("src",), tests=("tests/test_calc.py",))``
    """

    sources: tuple[str, ...] = ("**/*.py",)
    roots: tuple[str, ...] = (".",)
    tests: tuple[str, ...] = ()
    file_bytes: int = 1 << 18
    total_bytes: int = 1 << 21
    files: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A change that does not count, and why. `suspect`: the kind of cheating that it looks like; empty for what honest work leaves behind.

    Example: ``LeftOut(path="conftest.py", why="configures the tests", suspect="hooks into the test runner")``
    """

    path: str
    why: str
    suspect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredChanges:
    """The changes that count, sorted by path, and those that do not.

    Example: ``FilteredChanges(kept=(change,), left_out=(LeftOut(path="notes.md", why="no source of the task"),))``
    """

    kept: tuple[Change, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def suspects(self) -> tuple[str, ...]:
        """The changes that look like cheating, described for people."""
        return tuple(f"{each.suspect}: {each.path}" for each in self.left_out if each.suspect)


def filter_changes(changes: Sequence[Change], counted: CountedSources) -> FilteredChanges:
    """Separate the changes that may count from the others.

    If a path was changed several times, the last change is used. Changes are taken in path order; one that would exceed `files` or
    `total_bytes` is left out.
    """
    kept: list[Change] = []
    left_out: list[LeftOut] = []
    total = 0
    for change in sorted({change.path: change for change in changes}.values(), key=lambda change: change.path):
        fault = _fault(change, counted)
        if fault is None and (len(kept) >= counted.files or total + len(change.data) > counted.total_bytes):
            fault = f"more than {counted.files} files or {counted.total_bytes} bytes", ""
        if fault is not None:
            why, suspect = fault
            left_out.append(LeftOut(path=change.path, why=why, suspect=suspect))
            continue
        total += len(change.data)
        kept.append(change)
    return FilteredChanges(kept=tuple(kept), left_out=tuple(left_out))


def matches(path: str, globs: Iterable[str]) -> bool:
    """Return True if one of the globs matches the path. `**` stands for any number of directories; `*` and `?` do not match "/".

    Example: ``matches("src/a/b.py", ["src/**/*.py"])``
    """
    return any(_pattern(glob).fullmatch(path) for glob in globs)


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    pattern = ""
    for part in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", glob):
        pattern += {"**/": r"(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part) or re.escape(part)
    return re.compile(pattern)


Fault = tuple[str, str]
"""Why a change may not count, and the kind of cheating that it looks like, as in `LeftOut`."""


def _fault(change: Change, counted: CountedSources) -> Fault | None:
    """Return why a change may not count, or None if it may."""
    path = change.path
    if not _is_inside(path):
        return "outside of the working directory", "reaches outside"
    if len(path.encode("utf-8", "surrogatepass")) > _PATH_BYTES:
        return f"a path of more than {_PATH_BYTES} bytes", ""
    if change.kind is ChangeKind.LINK:
        target = change.data.decode("utf-8", "replace")
        outside = target.startswith("/") or ".." in target.split("/")
        return "a link", "links to a place outside" if outside else ""
    if change.kind is ChangeKind.OTHER:
        return "neither a file nor a link", ""
    if fault := _auto_loaded(change, counted) or _is_test(change, counted) or _is_not_text(change):
        return fault
    if not matches(path, counted.sources):
        return "no source of the task", ""
    if len(change.data) > counted.file_bytes:
        return f"larger than {counted.file_bytes} bytes", ""
    return None


def _is_inside(path: str) -> bool:
    """Return True for a normalized relative path."""
    return "\0" not in path and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))


def _auto_loaded(change: Change, counted: CountedSources) -> Fault | None:
    """Reject files that Python or the test runner loads automatically."""
    parts = change.path.split("/")
    name = parts[-1]
    if name in _STARTS_FIRST or any(part.endswith(".pth") for part in parts):
        return "runs before everything", "runs before the tests"
    if name == "conftest.py" or name in _CONFIGURES:
        hooked = change.kind is ChangeKind.WRITTEN and _HOOKED.search(change.data) is not None and name == "conftest.py"
        return "configures the tests", "hooks into the test runner" if hooked else ""
    if any(_METADATA.fullmatch(part) for part in parts):
        return "metadata of a package", "registers itself with the test runner"
    if change.path in counted.sources:
        return None
    shadowed = _module(change.path, counted.roots)
    if shadowed in sys.stdlib_module_names or shadowed in _RUNNER:
        return f"takes the place of the module {shadowed}", "takes a module's place"
    return None


def _module(path: str, roots: Iterable[str]) -> str:
    """Return the top-level module that a path belongs to, below the deepest matching import root, or "" if it belongs to none."""
    for root in sorted(map(posixpath.normpath, roots), key=len, reverse=True):
        below = path if root == "." else path.removeprefix(f"{root}/")
        if root == "." or below != path:
            first, slash, _ = below.partition("/")
            return first.split(".", 1)[0] if slash or first.endswith(".py") else ""
    return ""


def _is_test(change: Change, counted: CountedSources) -> Fault | None:
    """Reject tests, because the grader uses its own."""
    *folders, name = change.path.split("/")
    if change.path in counted.tests:
        gone = change.kind is ChangeKind.DELETED
        return "a test of the grader's", "deleted a test" if gone else "changed a test"
    if change.path not in counted.sources and (_TEST_FILE.fullmatch(name) or _TEST_FOLDERS & set(folders)):
        return "a test", ""
    return None


def _is_not_text(change: Change) -> Fault | None:
    """Reject caches, compiled files and binary data."""
    parts = change.path.split("/")
    if _CACHES & set(parts):
        return "a cache", ""
    if f".{parts[-1].rpartition('.')[2]}" in _COMPILED:
        return "compiled", "brings compiled code"
    if b"\0" in change.data:
        return "no text", ""
    return None
