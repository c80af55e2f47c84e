"""Gets a package's source distribution and the wheels that its tests need through pip, without running any of their code."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.worlds.building.sources.unpack import check_sha256, unpack

_PIP_SECONDS = 180.0
_LINK = Path(__file__).with_name("pip_link.py")
MOST_BYTES = 1 << 30
"""Of all files of the wheels that a task asks for: they are held in memory."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?\s*([<>=!~]=?[^;@]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedArchive:
    """An archive's bytes and file name; `sha256` is the hash that its index states, "" if no index does.

    Example: ``FetchedArchive(name="tabulate-0.10.0.tar.gz", data=b"...", sha256="e2cf...")``
    """

    name: str
    data: bytes
    sha256: str


async def _pip(*argv: str) -> str:
    """Run this interpreter with the arguments and return its stdout. Raises Unavailable, on failure with the last line of stderr."""
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
        said = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip() and "ignored" not in line]
        raise Unavailable(f"pip failed: {said[-1][:300] if said else process.returncode}")
    return out.decode()


def plain_requirement(text: str) -> bool:
    """True for a name with optional extras and versions; False for a path, a URL or a pip option."""
    return _REQUIREMENT.fullmatch(text.partition(";")[0].strip()) is not None


async def fetch_sdist(package: str) -> FetchedArchive:
    """The source distribution of a requirement such as "tabulate" or "tabulate==0.10.0", or of a path to one.

    Raises:
        BadRequest: `package` is neither, no source distribution is published, or the index states no SHA-256 for it.
        Corrupt: the archive does not have the SHA-256 that the index states.
        Unavailable: pip or its index failed.
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
    """The files that installing these puts into site-packages, scripts left out: path -> bytes. Wheels only; nothing is built or run.

    Raises:
        BadRequest: a requirement is not a plain one, or the files of all wheels together have more than `MOST_BYTES`.
        Unavailable: pip found no wheels for them.
    """
    for each in requirements:
        if not plain_requirement(each):
            raise BadRequest(f"{each!r}: not a plain requirement", field="package")
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        await _pip("-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", directory, *requirements)
        for wheel in sorted(Path(directory).iterdir()):
            files |= installed(unpack(wheel.read_bytes(), wheel.name))
            if sum(map(len, files.values())) > MOST_BYTES:
                raise BadRequest(
                    f"the wheels of {', '.join(requirements)[:200]} hold more than {MOST_BYTES >> 20} MiB; ask for fewer",
                    field="package",
                )
    return files


def installed(wheel: dict[str, bytes]) -> dict[str, bytes]:
    """A wheel's files at their paths in site-packages. Scripts, data and .pth files, which run in every interpreter, are left out."""
    found: dict[str, bytes] = {}
    for path, data in wheel.items():
        top, _, rest = path.partition("/")
        if top.endswith(".data"):
            kind, _, path = rest.partition("/")
            if kind not in ("purelib", "platlib"):
                continue
        if not path.endswith(".pth"):
            found[path] = data
    return found
