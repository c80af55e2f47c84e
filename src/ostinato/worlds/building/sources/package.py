"""Reads a source distribution's description of itself: name, version, modules, tests and requirements. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import PurePosixPath
from typing import Any

from ostinato.core.errors import BadRequest

_ROOTS = ("", "src/", "lib/", "python/", "Lib/")
_TEST_PLACES = {"tests", "test", "testing"}
_VENDORED = re.compile(
    r"(^|/)(_?vendor(ed)?|_?extern(al)?|third_party|_versioneer|versioneer|ez_setup|docs?|examples?|benchmarks?)(/|\.py$|$)"
)
_STRIPPED = re.compile(
    r"(^|/)(\.git|\.hg|__pycache__|build|dist|\.tox|\.nox|\.github|htmlcov|[^/]+\.egg-info)(/|$)|\.(pyc|pyo|orig|rej|patch|diff|so|whl)$"
)
_PYTEST_NEEDS = {"pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama"}
_TEST_EXTRAS = re.compile(r"^(tests?|testing|dev|develop|check)$")
_NOT_NEEDED = re.compile(
    r"^(pytest-cov|pytest-xdist|coverage|tox|nox|flake8|ruff|mypy|black|isort|pylint|pre-commit|sphinx|twine|build|wheel|setuptools"
    r"|hatch|bump|types-|pyright|furo|codecov|virtualenv|pytest-(ruff|black|mypy|flake8|enabler|checkdocs|codspeed|pycodestyle|benchmark|perf|randomly))"
)


def canonical(name: str) -> str:
    """A project's name as PyPI compares names (PEP 503): lower case, and "-" for any run of "-", "_" and "."."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """A package's stripped sources. `root` is the directory, with its slash, from which its modules are imported; "" for the top.

    Example: ``SourceTree(name="tabulate", version="0.10.0", files={"tabulate/__init__.py": b"..."}, root="", modules=("tabulate",),
    tests=("test",), requires=(), test_requires=("pytest",), metadata=b"Name: tabulate")``
    """

    name: str
    version: str
    files: Mapping[str, bytes]
    root: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    requires: tuple[str, ...]
    test_requires: tuple[str, ...]
    metadata: bytes

    def sources(self) -> dict[str, str]:
        """The files that a task may be about: path -> text. Tests, vendored code and files that are not UTF-8 are left out."""
        found: dict[str, str] = {}
        for path, data in self.files.items():
            inside = path[len(self.root) :] if path.startswith(self.root) else ""
            if not inside.endswith(".py") or inside.split("/")[0].removesuffix(".py") not in self.modules:
                continue
            if is_test(path) or _VENDORED.search(inside):
                continue
            try:
                found[path] = data.decode()
            except UnicodeDecodeError:
                continue
        return found


def is_test(path: str) -> bool:
    """True for a file that belongs to the tests."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    named = name == "conftest.py" or (name.startswith("test") and name.endswith(".py")) or name.endswith("_test.py")
    return named or any(part in _TEST_PLACES for part in parts[:-1])


def _requirements(metadata: Any, pyproject: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The requirements of the package and of its tests, as its metadata and pyproject.toml state them; nothing is run."""
    needed, testing = list[str](), list[str]()
    for line in metadata.get_all("Requires-Dist") or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker)
        if extra is None:
            needed.append(line)
        elif _TEST_EXTRAS.match(canonical(extra[1])):
            rest = re.sub(r"""\s*(and)?\s*\(?\s*extra\s*==\s*['"][^'"]+['"]\s*\)?\s*(and)?\s*""", "", marker).strip()
            testing.append(requirement.strip() + (f"; {rest}" if rest else ""))
    groups = pyproject.get("dependency-groups", {})
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if _TEST_EXTRAS.match(canonical(name)):
            testing += [each for each in group if isinstance(each, str)]
    wanted = [
        each for each in testing if not _NOT_NEEDED.match(canonical(re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0]))
    ]
    return needed, wanted


def _modules(files: Mapping[str, bytes], name: str) -> tuple[str, tuple[str, ...]]:
    """The import root and the names of the modules there: those named like the package if any, else others found there."""
    wanted = {canonical(name), canonical(name.removeprefix("python-")), canonical(name.removeprefix("py"))}
    for root in _ROOTS:
        here = {path[len(root) :] for path in files if path.startswith(root)}
        packages = {path.split("/")[0] for path in here if path.count("/") == 1 and path.endswith("/__init__.py")}
        single = {path.removesuffix(".py") for path in here if "/" not in path and path.endswith(".py")}
        found = {each for each in packages | single if canonical(each) in wanted}
        if not found and root:
            found = packages | single
        if not found:
            found = packages - _TEST_PLACES - {"docs", "examples", "benchmarks", "scripts", "tools"}
        if found:
            return root, tuple(sorted(found))
    raise BadRequest(f"{name}: no importable module found at the top, in src/ or in lib/", field="package")


def _test_places(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Directories and files with tests, none inside another."""
    places: list[str] = []
    for path in sorted(files):
        parts = PurePosixPath(path).parts
        at = next((n for n, part in enumerate(parts[:-1]) if part in _TEST_PLACES), None)
        base = parts[-1].startswith("test") or parts[-1].removesuffix(".py").endswith(("_test", "_tests"))
        if not (path.endswith(".py") and base) or _VENDORED.search(path):
            continue
        places.append("/".join(parts[: at + 1]) if at is not None else path)
    return tuple(dict.fromkeys(places))


def read_tree(files: Mapping[str, bytes], project: str) -> SourceTree:
    """Read an unpacked source distribution. Raises BadRequest, with the reason, if no tasks can be made of it."""
    if "PKG-INFO" not in files:
        raise BadRequest(f"{project}: no PKG-INFO at the top; is this a source distribution?", field="package")
    metadata = Parser().parsestr(files["PKG-INFO"].decode("utf-8", "replace"))
    name, version = str(metadata["Name"]), str(metadata["Version"])
    if canonical(name) in _PYTEST_NEEDS:
        raise BadRequest(
            f"{project}: pytest itself imports it, so a change would break the tests' own tool", field="package"
        )
    try:
        pyproject = tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        pyproject = {}
    kept = {path: data for path, data in files.items() if not _STRIPPED.search(path) and path != "PKG-INFO"}
    root, modules = _modules(kept, name)
    tests = _test_places(kept)
    if not tests:
        raise BadRequest(f"{project}: its source distribution has no tests", field="package")
    requires, test_requires = _requirements(metadata, pyproject)
    return SourceTree(
        name=name,
        version=version,
        files=kept,
        root=root,
        modules=modules,
        tests=tests,
        requires=tuple(requires),
        test_requires=tuple(test_requires),
        metadata=files["PKG-INFO"],
    )
