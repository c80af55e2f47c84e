"""Reads what a Dockerfile sets up, as far as a sandbox can do the same without building an image. Nothing of it is run."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of
from ostinato.worlds.tasks.places import check_inside

_INERT = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD", "ARG")
_BUILT = ("RUN", "SHELL", "USER")


@dataclass(slots=True, kw_only=True)
class Image:
    """What a Dockerfile sets up: the working directory ("" if none is named), files by absolute path, variables.

    Example: ``Image(workdir="/app", files={"/app/calc.py": b"..."}, env={"LANG": "C.UTF-8"})``
    """

    workdir: str = ""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    env: dict[str, str] = field(default_factory=dict[str, str])


def read_dockerfile(text: str, context: Mapping[str, bytes], *, built: bool) -> Image:
    """Read the WORKDIR, COPY and ENV instructions of a Dockerfile.

    Args:
        text: the Dockerfile.
        context: the other files of its directory.
        built: the results of RUN lines are in layers already; otherwise such a line is refused.

    Raises BadConfig naming the line.
    """
    image = Image()
    for number, word, rest in _instructions(text):
        where = f"environment/Dockerfile, line {number}"
        if word == "WORKDIR":
            image.workdir = posixpath.normpath(posixpath.join(image.workdir or "/", _plain(where, rest)))
        elif word == "COPY":
            _copy(where, rest, context, image)
        elif word == "ENV":
            image.env |= _variables(where, rest)
        elif word in _BUILT:
            if not built:
                raise BadConfig(
                    f"{where}: {word} needs an image to be built; build it into directories, and give them as layers"
                )
        elif word not in _INERT:
            raise BadConfig(f"{where}: {word} cannot be done in a sandbox; copy files and set variables only")
    return image


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    began, joined = 0, ""
    for number, line in enumerate(lines_of(text), start=1):
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        began = began if joined else number
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        word, _, rest = joined.strip().partition(" ")
        yield began, word.upper(), rest.strip()
        joined = ""
    if joined:
        raise BadConfig(f"environment/Dockerfile, line {began}: it ends in the middle of an instruction")


def _plain(where: str, text: str) -> str:
    if "$" in text or not text:
        raise BadConfig(f"{where}: {text!r} must be written out, without variables")
    return text


def _words(where: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadConfig(f"{where}: {error}") from error


def _copy(where: str, rest: str, context: Mapping[str, bytes], image: Image) -> None:
    words = _words(where, _plain(where, rest))
    words = [word for word in words if not re.match(r"--(chown|chmod)=", word)]
    if len(words) < 2 or any(word.startswith(("--", "[")) for word in words):
        raise BadConfig(f"{where}: COPY {rest!r} must name files of the directory, and where they go")
    *sources, to = words
    target = posixpath.normpath(posixpath.join(image.workdir or "/", to))
    into = to.endswith("/") or to in (".", "./") or len(sources) > 1
    for source in sources:
        name = posixpath.normpath(source.lstrip("/"))
        name = "" if name == "." else check_inside(name)
        if name in context:
            image.files[posixpath.join(target, posixpath.basename(name)) if into else target] = context[name]
            continue
        below = {path: data for path, data in context.items() if not name or path.startswith(f"{name}/")}
        if not below:
            raise BadConfig(f"{where}: {source!r} is not in environment/")
        for path, data in below.items():
            image.files[posixpath.join(target, path[len(name) + 1 :] if name else path)] = data


def _variables(where: str, rest: str) -> dict[str, str]:
    words = _words(where, _plain(where, rest))
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    pairs = [word.partition("=") for word in words]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadConfig(f"{where}: ENV {rest!r} must be NAME=value")
    return {name: value for name, _, value in pairs}
