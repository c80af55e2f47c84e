"""Reads Harbor task folders as tasks.

Features that our sandboxes do not support are refused by name. Nothing in a folder is run, and links are not followed. WORKDIR, COPY and
ENV of a Dockerfile are applied without building an image. The folder's original texts are kept in `Grading.data["harbor"]`, and its files
in `Grading.hidden`, from which its test script is run.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.tasks.places import check_inside, read_plain, read_tree
from ostinato.worlds.tasks.rows import parse_row, task_of
from ostinato.worlds.tasks.task import Grading, Task, Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

# ---------------------------------------------------------------- the Dockerfile


_INERT = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD", "ARG")
_BUILT = ("RUN", "SHELL", "USER")


@dataclass(slots=True, kw_only=True)
class Image:
    """The effect of a Dockerfile: the working directory ("" if none is named), files by absolute path, environment variables.

    Example: ``Image(workdir="/app", files={"/app/calc.py": b"..."}, env={"LANG": "C.UTF-8"})``
    """

    workdir: str = ""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    env: dict[str, str] = field(default_factory=dict[str, str])


def read_dockerfile(text: str, context: Mapping[str, bytes], *, built: bool) -> Image:
    """Interpret the WORKDIR, COPY and ENV instructions of a Dockerfile. `context`: the other files of its directory.

    `built`: layers already contain the results of RUN lines; otherwise such a line is refused. Raises BadConfig, which names the line.
    """
    image = Image()
    for number, word, rest in _instructions(text):
        where = f"environment/Dockerfile, line {number}"
        if word == "WORKDIR":
            image.workdir = posixpath.normpath(posixpath.join(image.workdir or "/", _literal(where, rest)))
        elif word == "COPY":
            _copy(where, rest, context, image)
        elif word == "ENV":
            image.env |= _image_variables(where, rest)
        elif word in _BUILT:
            if not built:
                raise BadConfig(
                    f"{where}: {word} needs an image to be built; unpack the built image into directories, and give them as layers"
                )
        elif word not in _INERT:
            raise BadConfig(f"{where}: {word} is not supported; use WORKDIR, COPY and ENV only")
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


def _literal(where: str, text: str) -> str:
    if "$" in text or not text:
        raise BadConfig(f"{where}: {text!r} must be written out, without variables")
    return text


def _words(where: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadConfig(f"{where}: {error}") from error


def _copy(where: str, rest: str, context: Mapping[str, bytes], image: Image) -> None:
    words = _words(where, _literal(where, rest))
    words = [word for word in words if not re.match(r"--(chown|chmod)=", word)]
    if len(words) < 2 or any(word.startswith(("--", "[")) for word in words):
        raise BadConfig(f"{where}: COPY {rest!r} must name files of the directory, and a destination")
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


def _image_variables(where: str, rest: str) -> dict[str, str]:
    words = _words(where, _literal(where, rest))
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    pairs = [word.partition("=") for word in words]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadConfig(f"{where}: ENV {rest!r} must be NAME=value")
    return {name: value for name, _, value in pairs}


# ---------------------------------------------------------------- task folders


CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "environment/Dockerfile"
OWN = "ostinato"
MAX_FOLDER_BYTES = 64 * 2**20
_TURNS, _TOKENS = 50, 4096  # most model calls, and most tokens per call; Harbor's tasks state neither
Json = Mapping[str, Any]
# fields that would change the task and are not supported here
_UNSUPPORTED = {
    "": ("steps", "artifacts"),
    "environment": ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck", "memory", "storage"),
    "verifier": ("user", "environment", "collect", "network_mode", "allowed_hosts"),
    "agent": ("user", "network_mode", "allowed_hosts"),
}
_TABLES = ("task", "metadata", "verifier", "agent", "environment", "solution")
_KNOWN = ("schema_version", "version", "source", "multi_step_reward_strategy", "steps", "artifacts", *_TABLES)
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


def load_harbor(directory: Path, *, layers: tuple[str, ...] = (), offline: bool = False) -> Taskset:
    """Read a directory of task folders, or one task folder, as a taskset.

    `layers`: directories with the content of the tasks' images; without them, a task whose image must be built is refused. `offline`: tasks
    with unrestricted network access get no network, instead of being refused. Raises BadConfig, which names the folder, the field and the
    remedy.
    """
    if (directory / CONFIG).is_file():
        folders = [directory]
    else:
        folders = sorted(
            path for path in directory.glob("*") if path.is_dir() and not path.is_symlink() and (path / CONFIG).exists()
        )
    if not folders:
        raise BadConfig(f"{directory} contains no Harbor task: no folder in it has a {CONFIG}")
    tasks = [harbor_task(folder, layers=layers, offline=offline) for folder in folders]
    return taskset_of(directory.resolve().name, tasks)


def harbor_task(folder: Path, *, layers: tuple[str, ...] = (), offline: bool = False) -> Task:
    """Read one task folder. Arguments and errors are those of `load_harbor`."""
    try:
        files = read_folder(folder)
        config = _config(files)
        own = _table(config, "metadata").get(OWN)
        if own is not None:
            return _own_task(files, own)
        return _task(folder.resolve().name, files, config, layers, offline)
    except BadConfig as error:
        raise BadConfig(f"Harbor task {folder}: {error}") from error


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return {path: content} of every file of a task folder. Raises BadConfig for links, and for more than 64 MiB."""
    tree = read_tree(folder, most_bytes=MAX_FOLDER_BYTES, most_entries=4096)
    for entry in tree.entries:
        check_inside(entry.path)
        if entry.link is not None:
            raise BadConfig(f"{entry.path} is a link, and links are not followed; put the file itself there")
    return {entry.path: read_plain(folder / entry.path, MAX_FOLDER_BYTES) for entry in tree.entries}


def _task(name: str, files: Mapping[str, bytes], config: Json, layers: tuple[str, ...], offline: bool) -> Task:
    _check_supported(config)
    package, metadata = _table(config, "task"), _table(config, "metadata")
    environment, verifier, agent = (_table(config, part) for part in ("environment", "verifier", "agent"))
    if environment.get("docker_image") is not None and not layers:
        raise BadConfig(
            "environment.docker_image: images are not pulled; unpack the image into directories, and give them as layers"
        )
    if "tests/test.sh" not in files:
        raise BadConfig("tests/test.sh is missing, so the task cannot be graded")
    image = Image()
    if DOCKERFILE in files:
        context = {
            path[12:]: data for path, data in files.items() if path.startswith("environment/") and path != DOCKERFILE
        }
        image = read_dockerfile(_decoded(files, DOCKERFILE), context, built=bool(layers))
    elif not layers:
        raise BadConfig(f"{DOCKERFILE} is missing; give layers with the files that the task needs")
    return Task(
        id=str(package.get("name", name)),
        family=str(metadata.get("category", "harbor")),
        messages=(Message(role=Role.USER, text=_instruction(files)),),
        spec=_spec(environment, image, layers, offline),
        grading=Grading(
            grader="harbor",
            data={
                "harbor": {CONFIG: _decoded(files, CONFIG), INSTRUCTION: _decoded(files, INSTRUCTION)},
                "env": _variables("verifier.env", verifier),
            },
            hidden={path: data for path, data in files.items() if path not in (CONFIG, INSTRUCTION)},
            timeout_s=_seconds("verifier.timeout_sec", verifier.get("timeout_sec"), 600.0),
        ),
        harness="tools",
        turns=_TURNS,
        tokens=_TOKENS,
        timeout_s=_seconds("agent.timeout_sec", agent.get("timeout_sec"), 3600.0),
        about={key: value for key, value in metadata.items() if isinstance(value, str)},
    )


def _spec(environment: Json, image: Image, layers: tuple[str, ...], offline: bool) -> SandboxSpec:
    workdir = environment.get("workdir") or image.workdir
    if not isinstance(workdir, str) or workdir in ("", "/"):
        raise BadConfig("environment.workdir: neither this field nor the Dockerfile sets a working directory; name one")
    workdir, placed = posixpath.normpath(workdir), dict[str, bytes]()
    for path, data in image.files.items():
        if not path.startswith(f"{workdir}/"):
            raise BadConfig(
                f"{DOCKERFILE}: {path} is outside {workdir}; a sandbox accepts only files below its working directory"
            )
        placed[posixpath.relpath(path, workdir)] = data
    limits = Limits()
    return SandboxSpec(
        layers=layers,
        files=placed,
        workdir=workdir,
        env=image.env | _variables("environment.env", environment),
        hosts=_hosts(environment, offline),
        limits=Limits(
            memory_mb=_size("environment.memory_mb", environment.get("memory_mb"), limits.memory_mb),
            disk_mb=_size("environment.storage_mb", environment.get("storage_mb"), limits.disk_mb),
        ),
    )


def _hosts(environment: Json, offline: bool) -> tuple[str, ...]:
    mode = environment.get("network_mode")
    if mode is None and environment.get("allow_internet") is False:
        mode = "no-network"
    if mode == "no-network":
        return ()
    if mode == "allowlist":
        names = environment.get("allowed_hosts") or []
        if not isinstance(names, list):
            raise BadConfig("environment.allowed_hosts must be a list of names of hosts")
        for each in names:
            if not isinstance(each, str) or "*" in each or "/" in each or ":" in each:
                raise BadConfig(f"environment.allowed_hosts: {each!r} must be the name of one host")
        return tuple(f"{each}:{port}" for each in names for port in (443, 80))
    if not offline:
        raise BadConfig("environment.network_mode: 'public' is not supported; name hosts, or read it with offline=True")
    return ()


def _own_task(files: Mapping[str, bytes], own: Any) -> Task:
    """Read one of our own tasks that was exported as a Harbor folder: its row, with its files from the folder."""
    if not isinstance(own, dict) or not isinstance(own.get("row"), str):
        raise BadConfig(f"metadata.{OWN}.row is missing; it was not written by Ostinato")
    row = parse_row(f"metadata.{OWN}.row", own["row"])
    if row.world.layers:
        raise BadConfig(f"metadata.{OWN}.row names layers, which a Harbor folder cannot contain; remove them")
    task = task_of(row, {})
    spec, grading = task.spec, task.grading
    return replace(
        task,
        spec=replace(spec, files=below(files, "environment/files/")),
        grading=replace(grading, hidden=below(files, "tests/hidden/")),
    )


def below(files: Mapping[str, bytes], place: str) -> dict[str, bytes]:
    """Return the files below the path prefix `place`, with paths relative to it."""
    return {path[len(place) :]: data for path, data in files.items() if path.startswith(place)}


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = tomllib.loads(_decoded(files, CONFIG))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadConfig(f"{CONFIG}: not TOML ({error})") from error
    for key in config:
        if key not in _KNOWN:
            raise BadConfig(f"{CONFIG}: unknown key {key!r}; Harbor 0.25.0 has {', '.join(_KNOWN)}")
    return config


def _check_supported(config: Json) -> None:
    for part, names in _UNSUPPORTED.items():
        table = _table(config, part) if part else config
        for name in names:
            if table.get(name):
                where = f"{part}.{name}" if part else name
                raise BadConfig(f"{where} is not supported; remove it if the task works without it")
    if str(_table(config, "environment").get("os", "linux")).lower() != "linux":
        raise BadConfig("environment.os: sandboxes are Linux")


def _table(config: Json, name: str) -> Json:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise BadConfig(f"{CONFIG}: {name} must be a table")
    return cast("Json", table)


def _variables(where: str, table: Json) -> dict[str, str]:
    env = table.get("env", {})
    if not isinstance(env, dict):
        raise BadConfig(f"{where} must be a table")
    for name, value in cast("dict[str, Any]", env).items():
        if not isinstance(value, str):
            raise BadConfig(f"{where}.{name} must be a string")
        if "${" in value:
            raise BadConfig(f"{where}.{name}: variables of the host are never read; write the value out")
    return dict(cast("dict[str, str]", env))


def _instruction(files: Mapping[str, bytes]) -> str:
    """Return the instruction without the canary lines at its start, which Harbor does not show either."""
    lines = _decoded(files, INSTRUCTION).split("\n")
    first = 0
    while first < len(lines) and _CANARY.match(lines[first].strip()):
        first += 1
    while first < len(lines) and not lines[first].strip():
        first += 1
    return "\n".join(lines[first:])


def _decoded(files: Mapping[str, bytes], path: str) -> str:
    try:
        return files[path].decode("utf-8-sig")
    except KeyError:
        raise BadConfig(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 at byte {error.start}") from error


def _seconds(where: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise BadConfig(f"{where} must be a number of seconds")
    return float(value)


def _size(where: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadConfig(f"{where} must be a whole number of MiB")
    return value
