"""A Dockerfile as stages of steps, with its arguments and variables filled in: as much of the format as deploy/Dockerfile uses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_SILENT = {"EXPOSE", "STOPSIGNAL"}
_KNOWN = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "HEALTHCHECK", "CMD"} | _SILENT


@dataclass
class Step:
    """One instruction as it stood when it was reached.

    Example: ``Step("RUN", "pip install .", directory="/build", user="0:0", environment={"PATH": "/bin"})``.
    """

    kind: str
    text: str
    directory: str
    user: str
    environment: dict[str, str]

    def words(self) -> list[str]:
        """The words of a COPY, options first, or of a CMD in its list form."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclass
class Stage:
    """What stands between one FROM and the next. `command` and `health` are those of the image: argument lists."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)
    user: str = "0:0"
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """The kind and the rest of each instruction, continued lines joined, comments left out. Raises ValueError for an unknown kind."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[tuple[str, str]] = []
    for line in filter(str.strip, joined.splitlines()):
        kind, _, rest = line.strip().partition(" ")
        if kind not in _KNOWN:
            raise ValueError(f"this examination does not know the instruction {kind}")
        found.append((kind, rest.strip()))
    return found


def filled(text: str, values: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced; a name without a value becomes nothing, as Docker does."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: values.get(m[1] or m[2], ""), text)


def stages(text: str, arguments: Mapping[str, str], image: Mapping[str, str]) -> list[Stage]:
    """The stages of a Dockerfile.

    Args:
        text: the file's.
        arguments: what `--build-arg` would give.
        image: the variables that the base images set.
    """
    found: list[Stage] = []
    outside: dict[str, str] = {}
    inside: dict[str, str] = {}
    for kind, rest in instructions(text):
        if kind == "ARG":
            name, _, default = rest.partition("=")
            (inside if found else outside)[name] = arguments.get(name, filled(default, outside))
        elif kind == "FROM":
            words = filled(rest, outside).split()
            found.append(Stage(words[0], words[2] if len(words) == 3 else "", environment=dict(image)))
            inside = {}
        else:
            _add(found[-1], kind, rest, inside)
    return found


def _add(stage: Stage, kind: str, rest: str, arguments: Mapping[str, str]) -> None:
    values = {**arguments, **stage.environment}
    if kind == "ENV":
        stage.environment.update(part.partition("=")[::2] for part in shlex.split(filled(rest, values)))
    elif kind == "USER":
        stage.user = filled(rest, values)
    elif kind == "CMD":
        stage.command = json.loads(rest)
    elif kind == "HEALTHCHECK":
        stage.health = json.loads(rest.partition(" CMD ")[2])
    elif kind not in _SILENT:
        if kind == "WORKDIR":
            stage.directory = filled(rest, values)
        text = rest if kind == "RUN" else filled(rest, values)  # a RUN's shell fills in its own
        stage.steps.append(Step(kind, text, stage.directory, stage.user, dict(values)))
