"""Fetches a package's source distribution and its tests' wheels through pip, without running any of their code.

An archive is unpacked in memory: nothing is written to disk, links are not followed, and the size is bounded. The package's name, version,
modules, tests and requirements are read from its metadata and file names.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import struct
import sys
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ostinato.core.errors import BadRequest, Corrupt, TooLarge, Unavailable

# ---------------------------------------------------------------- unpacking


FILE_BYTES, ALL_BYTES, MAX_FILES = 8 << 20, 64 << 20, 8000
_HEADERS = 2048  # most bytes per file of a tar beyond its content
_PACKED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, UnicodeDecodeError, OverflowError, EOFError, OSError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""Exceptions that the standard library raises for a damaged archive, or for data that is not an archive."""


def check_sha256(data: bytes, digest: str, name: str) -> None:
    """Raise Corrupt unless the bytes have the SHA-256 `digest`."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest.lower():
        raise Corrupt(
            f"{name}: SHA-256 is {found}, but {digest} was expected; fetch it again, or do not trust its source"
        )


def _inside(name: str) -> str:
    """Return the normalized path. Raises BadRequest for a path that would escape the archive's directory."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or not path.parts or ".." in path.parts or ":" in path.parts[0]
    if outside or "\\" in name or "\0" in name:
        raise BadRequest(f"archive: the path {name!r} leads out of it; do not use this archive", field="archive")
    return str(path)


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    unpacked = next((opened(io.BytesIO(data)) for magic, opened in _PACKED if data.startswith(magic)), io.BytesIO(data))
    with tarfile.open(fileobj=_Bounded(unpacked), mode="r|") as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
        for entry in archive:
            if entry.isdir():
                continue
            name = _inside(entry.name)
            if entry.isreg():
                if entry.size > FILE_BYTES:
                    raise TooLarge(f"archive: {name} has {entry.size} bytes, {FILE_BYTES} allowed", field="archive")
                opened = archive.extractfile(entry)
                assert opened is not None  # a regular file
                yield name, opened.read(FILE_BYTES + 1)


class _Bounded:
    """Bounds the decompressed bytes of a tar that are read, because tarfile loads an extended header of any stated length into memory."""

    def __init__(self, unpacked: IO[bytes]) -> None:
        self._unpacked = unpacked
        self._left = ALL_BYTES + MAX_FILES * _HEADERS

    def read(self, size: int) -> bytes:
        data = self._unpacked.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge("archive: its headers are larger than the allowed size of all files", field="archive")
        return data


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    if data.count(b"PK\1\2") > 2 * MAX_FILES:  # checked before zipfile creates an object per entry
        raise TooLarge(f"archive: more than {MAX_FILES} files", field="archive")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or (entry.external_attr >> 28) == 0xA:  # a symbolic link
                continue
            name = _inside(entry.filename)
            with archive.open(entry) as opened:
                content = opened.read(FILE_BYTES + 1)  # the size that the entry states is not trusted
            if len(content) > FILE_BYTES:
                raise TooLarge(f"archive: {name} has more than {FILE_BYTES} bytes", field="archive")
            yield name, content


def unpack(data: bytes, name: str) -> dict[str, bytes]:
    """Return {path: content} of the regular files of a .tar.gz, .tar.bz2, .tar.xz, .zip or .whl. Links and devices are left out.

    Raises BadRequest if a path would escape the archive's directory or the archive is damaged, TooLarge beyond 8 MiB per file, 64 MiB in
    total, or 8000 files.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        for path, content in (_zip if name.endswith((".zip", ".whl")) else _tar)(data):
            total += len(content)
            files[path] = content
            if total > ALL_BYTES or len(files) > MAX_FILES:
                raise TooLarge(f"{name}: more than {ALL_BYTES >> 20} MiB or {MAX_FILES} files", field="archive")
    except _DAMAGE as error:
        raise BadRequest(f"{name}: not a readable archive: {error}", field="archive") from error
    return files


def without_top(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Strip a source distribution's single top directory from its paths. Raises BadRequest unless there is exactly one."""
    tops = {path.partition("/")[0] for path in files}
    if len(tops) != 1 or any("/" not in path for path in files):
        raise BadRequest(
            f"archive: a source distribution holds one directory, this one {sorted(tops)[:5]}", field="archive"
        )
    return {path.partition("/")[2]: data for path, data in files.items()}


# ---------------------------------------------------------------- downloads through pip


_PIP_SECONDS = 180.0
_LINK = Path(__file__).with_name("pip_link.py")
MAX_BYTES = 1 << 30
"""Limit on the total size of all wheels' files, which are kept in memory."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?\s*([<>=!~]=?[^;@]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedArchive:
    """An archive's bytes and file name. `sha256` is the hash stated by the package index; "" for a local file.

    Example: ``FetchedArchive(name="tabulate-0.10.0.tar.gz", data=b"...", sha256="e2cf...")``
    """

    name: str
    data: bytes
    sha256: str


async def _pip(*argv: str) -> str:
    """Run this interpreter with the arguments and return its stdout. Raises Unavailable for a timeout, or with stderr's last line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PIP_SECONDS):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise Unavailable(f"pip did not answer within {_PIP_SECONDS:.0f} s; is the index reachable?") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        errors = [
            line for line in err.decode("utf-8", "replace").splitlines() if line.strip() and "ignored" not in line
        ]
        raise Unavailable(
            f"pip failed: {errors[-1][:300] if errors else process.returncode}; check the package's name, its version and the network"
        )
    return out.decode()


def plain_requirement(text: str) -> bool:
    """Return True for a name with optional extras and versions; False for a path, a URL or a pip option."""
    return _REQUIREMENT.fullmatch(text.partition(";")[0].strip()) is not None


async def fetch_sdist(package: str) -> FetchedArchive:
    """Return the source distribution of a requirement such as "tabulate" or "tabulate==0.10.0", or read it from a path.

    Raises BadRequest if the text is neither, none is published, or the index states no SHA-256; Corrupt if the archive's hash differs;
    Unavailable if pip or its index failed.
    """
    path = Path(package)
    if package.endswith((".tar.gz", ".zip", ".tar.bz2", ".tar.xz")) and path.is_file():
        return FetchedArchive(name=path.name, data=path.read_bytes(), sha256="")
    if not plain_requirement(package) or ";" in package:
        raise BadRequest(
            f"{package!r}: name a package as in tabulate==0.10.0, or the path of a source distribution", field="package"
        )
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "archive"
        answer = json.loads((await _pip(str(_LINK), package, str(out))).strip().splitlines()[-1])
        if "error" in answer:
            raise BadRequest(f"{package}: {answer['error']}", field="package")
        data = out.read_bytes()
    if answer["algorithm"] != "sha256":
        raise BadRequest(f"{package}: the index states no SHA-256 for {answer['file']}", field="package")
    check_sha256(data, answer["hash"], answer["file"])
    return FetchedArchive(name=answer["file"], data=data, sha256=answer["hash"])


async def fetch_wheels(requirements: Sequence[str]) -> dict[str, bytes]:
    """Download wheels with their dependencies, and return {path in site-packages: content}. Nothing is built or run.

    Raises BadRequest if a requirement is not plain or the files exceed `MAX_BYTES`, Unavailable if pip found no wheels.
    """
    for each in requirements:
        if not plain_requirement(each):
            raise BadRequest(f"{each!r}: not a plain requirement", field="package")
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        await _pip("-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", directory, *requirements)
        for wheel in sorted(Path(directory).iterdir()):
            files |= installed(unpack(wheel.read_bytes(), wheel.name))
            if sum(map(len, files.values())) > MAX_BYTES:
                raise BadRequest(
                    f"the wheels of {', '.join(requirements)[:200]} hold more than {MAX_BYTES >> 20} MiB; ask for fewer",
                    field="package",
                )
    return files


def installed(wheel: dict[str, bytes]) -> dict[str, bytes]:
    """Map a wheel's files to their paths in site-packages, without scripts, data, and .pth files (which run in every interpreter)."""
    result: dict[str, bytes] = {}
    for path, data in wheel.items():
        top, _, rest = path.partition("/")
        if top.endswith(".data"):
            kind, _, path = rest.partition("/")
            if kind not in ("purelib", "platlib"):
                continue
        if not path.endswith(".pth"):
            result[path] = data
    return result


# ---------------------------------------------------------------- a package's metadata and layout


_ROOTS = ("", "src/", "lib/", "python/", "Lib/")
_NAME_OR_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")  # a name or a version, which becomes part of paths
_TEST_PLACES = {"tests", "test", "testing"}
_VENDORED = re.compile(
    r"(^|/)(_?vendor(ed)?|_?extern(al)?|third_party|_versioneer|versioneer|ez_setup|docs?|examples?|benchmarks?)(/|\.py$|$)"
)
_STRIPPED = re.compile(
    r"(^|/)(\.git|\.hg|__pycache__|build|dist|\.tox|\.nox|\.github|htmlcov|[^/]+\.egg-info)(/|$)|\.(pyc|pyo|orig|rej|patch|diff|so|whl)$"
)
_PYTEST_NEEDS = {"pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama"}
_TEST_EXTRAS = re.compile(r"^(tests?|testing|dev|develop|check)$")
_IRRELEVANT_TOOLS = re.compile(
    r"^(pytest-cov|pytest-xdist|coverage|tox|nox|flake8|ruff|mypy|black|isort|pylint|pre-commit|sphinx|twine|build|wheel|setuptools"
    r"|hatch|bump|types-|pyright|furo|codecov|virtualenv|pytest-(ruff|black|mypy|flake8|enabler|checkdocs|codspeed|pycodestyle|benchmark|perf|randomly))"
)


def canonical(name: str) -> str:
    """Normalize a project's name (PEP 503): lower case, and "-" for any run of "-", "_" and "."."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """A package's sources, without generated files. `root`: the directory, with a slash, from which modules are imported; "" for the top.

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
        """Return {path: text} of the files that tasks may be about, without tests, vendored code and files that are not UTF-8."""
        result: dict[str, str] = {}
        for path, data in self.files.items():
            inside = path[len(self.root) :] if path.startswith(self.root) else ""
            if not inside.endswith(".py") or inside.split("/")[0].removesuffix(".py") not in self.modules:
                continue
            if is_test(path) or _VENDORED.search(inside):
                continue
            try:
                result[path] = data.decode()
            except UnicodeDecodeError:
                continue
        return result


def is_test(path: str) -> bool:
    """Return True for a file that belongs to the tests."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    named = name == "conftest.py" or (name.startswith("test") and name.endswith(".py")) or name.endswith("_test.py")
    return named or any(part in _TEST_PLACES for part in parts[:-1])


def _requirements(metadata: Any, pyproject: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the requirements of the package and of its tests, from its metadata and pyproject.toml."""
    needed, testing = list[str](), list[str]()
    for line in metadata.get_all("Requires-Dist") or ():
        requirement, _, marker = " ".join(line.split()).partition(";")
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker)
        if extra is None:
            needed.append(line)
        elif _TEST_EXTRAS.match(canonical(extra[1])):
            rest = re.sub(r"""\s*(and)?\s*\(?\s*extra\s*==\s*['"][^'"]+['"]\s*\)?\s*(and)?\s*""", "", marker).strip()
            testing.append(requirement.strip() + (f"; {rest}" if rest else ""))
    groups = pyproject.get("dependency-groups", {})
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if _TEST_EXTRAS.match(canonical(name)) and isinstance(group, list):
            testing += [each for each in group if isinstance(each, str)]
    wanted = [
        each
        for each in testing
        if not _IRRELEVANT_TOOLS.match(canonical(re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0]))
    ]
    return needed, wanted


def _modules(files: Mapping[str, bytes], name: str) -> tuple[str, tuple[str, ...]]:
    """Return the import root and the names of its modules: those named like the package if there are any, else others found there."""
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
    """Return the directories and files with tests, none inside another."""
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
    """Parse an unpacked source distribution. Raises BadRequest, with the reason, if no tasks can be built from it."""
    if "PKG-INFO" not in files:
        raise BadRequest(f"{project}: no PKG-INFO at the top; is this a source distribution?", field="package")
    metadata = Parser().parsestr(files["PKG-INFO"].decode("utf-8", "replace"))
    name, version = str(metadata["Name"] or ""), str(metadata["Version"] or "")
    for field, text in (("Name", name), ("Version", version)):
        if not _NAME_OR_VERSION.fullmatch(text):
            raise BadRequest(f"{project}: PKG-INFO states the {field} {text[:80]!r}; do not use it", field="package")
    if canonical(name) in _PYTEST_NEEDS:
        raise BadRequest(
            f"{project}: pytest itself imports it, so a mutation would break the test runner", field="package"
        )
    try:
        pyproject = tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
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
