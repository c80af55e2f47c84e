"""Reads the rows of a verifiers taskset (0.4.0) as tasks.

A row is the wire form of verifiers' `TaskData`, one JSON object a line, as in its traces (`trace.task.data`). What a verifiers task *does*
(setup, rewards, tools) is Python code of its package, none of which is imported here. So the row states the task's messages, and the
caller states how it is graded. A requirement of a row that a sandbox here does not meet is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadConfig
from ostinato.core.sandboxing import Limits, SandboxSpec
from ostinato.worlds.tasks.places import read_plain
from ostinato.worlds.tasks.rows import parse_object
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import MOST_TASKSET_BYTES, taskset_of

Row = Mapping[str, Any]
_REFUSED = ("image", "agent_user", "skills", "network_block", "artifacts")
_MESSAGE = {
    "system": ("content",),
    "user": ("content",),
    "assistant": ("content", "reasoning_content", "tool_calls", "provider_state"),
    "tool": ("content", "tool_call_id", "name"),
}


def load_verifiers(
    path: Path,
    grading: Callable[[Row], Grading],
    *,
    family: str = "verifiers",
    harness: str = "single",
    split: Split = Split.TRAIN,
    turns: int = 1,
    tokens: int = 512,
    offline: bool = False,
) -> Taskset:
    """A file of rows as a taskset, named after the file.

    Args:
        path: JSONL of `TaskData` rows.
        grading: makes a task's grading from the row's own fields, such as an answer.
        family: the tasks' family.
        harness: the tasks' harness.
        split: what they may be used for.
        turns: the most model calls.
        tokens: most tokens of one answer.
        offline: rows with unrestricted network access get no network, instead of being refused.

    Raises BadConfig naming the line, the field and the remedy.
    """
    try:
        text = read_plain(path, MOST_TASKSET_BYTES).decode()
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    tasks: list[Task] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        row = parse_object(where, line)
        try:
            spec = _spec(row, offline)
            tasks.append(
                Task(
                    id=str(_first_of(row, "id", "name", "idx", default=len(tasks))),
                    family=family,
                    messages=_messages(row),
                    grading=grading(row),
                    spec=spec,
                    harness=harness,
                    split=split,
                    turns=turns,
                    tokens=tokens,
                    timeout_s=_number("timeout.agent", _table(row, "timeout").get("agent"), 600.0),
                    about={key: str(row[key]) for key in ("name", "description") if row.get(key)},
                )
            )
        except BadConfig as error:
            raise BadConfig(f"{where}: {error}") from error
    return taskset_of(path.stem, tasks)


def _spec(row: Row, offline: bool) -> SandboxSpec:
    for name in _REFUSED:
        if row.get(name):
            raise BadConfig(f"{name} cannot be had here; take it out if the task does without")
    timeout, resources = _table(row, "timeout"), _table(row, "resources")
    if resources.get("gpu"):
        raise BadConfig("resources.gpu: a sandbox has none")
    for name in ("setup", "finalize"):
        if timeout.get(name):
            raise BadConfig(f"timeout.{name}: the task's own code is not run here, so it has no {name}")
    limits = Limits()
    return SandboxSpec(
        workdir=str(row.get("workdir") or "/work"),
        hosts=_hosts(row, offline),
        limits=Limits(
            memory_mb=round(1024 * _number("resources.memory", resources.get("memory"), limits.memory_mb / 1024)),
            disk_mb=round(1024 * _number("resources.disk", resources.get("disk"), limits.disk_mb / 1024)),
        ),
    )


def _hosts(row: Row, offline: bool) -> tuple[str, ...]:
    allowed = row.get("network_allow", ["*"])
    if not isinstance(allowed, list) or not all(isinstance(each, str) for each in allowed):
        raise BadConfig("network_allow must be a list of names")
    if "*" in allowed:
        if not offline:
            raise BadConfig("network_allow: '*' cannot be had here; name hosts, or read it with offline=True")
        allowed = []
    hosts: list[str] = []
    for each in cast("list[str]", allowed):
        if "*" in each or "/" in each:
            raise BadConfig(f"network_allow: {each!r} must be the name of one host")
        hosts += [each] if ":" in each else [f"{each}:443", f"{each}:80"]
    return tuple(hosts)


def _messages(row: Row) -> tuple[Message, ...]:
    system, prompt = row.get("system_prompt"), row.get("prompt")
    found = [Message(role=Role.SYSTEM, text=_text("system_prompt", system))] if system else []
    if isinstance(prompt, str):
        return (*found, Message(role=Role.USER, text=prompt))
    if not isinstance(prompt, list) or not prompt:
        raise BadConfig("prompt is missing: a task whose user speaks first is not worked on here")
    return (*found, *(_message(f"prompt.{number}", message) for number, message in enumerate(prompt)))


def _message(where: str, message: Any) -> Message:
    said = cast("dict[str, Any]", message if isinstance(message, dict) else {})
    role = said.get("role")
    if not isinstance(role, str) or role not in _MESSAGE:
        raise BadConfig(f"{where}.role must be one of {', '.join(_MESSAGE)}")
    for name, value in said.items():
        if name not in ("role", *_MESSAGE[role]) or (name == "provider_state" and value):
            raise BadConfig(f"{where}.{name} cannot be shown to a model here; take it out")
    calls: list[ToolCall] = []
    given = said.get("tool_calls") or []
    if not isinstance(given, list):
        raise BadConfig(f"{where}.tool_calls must be a list")
    for number, call in enumerate(cast("list[Any]", given)):
        at = f"{where}.tool_calls.{number}"
        if not isinstance(call, dict) or call.get("type", "function") != "function" or call.get("namespace"):
            raise BadConfig(f"{at}: only calls of functions can be shown")
        calls.append(ToolCall(**{name: _text(f"{at}.{name}", call.get(name)) for name in ("id", "name", "arguments")}))
    return Message(
        role=Role(role),
        text=_content(f"{where}.content", said.get("content")),
        reasoning=_text(f"{where}.reasoning_content", said.get("reasoning_content") or ""),
        calls=tuple(calls),
        answers=_text(f"{where}.tool_call_id", said.get("tool_call_id", "")),
    )


def _content(where: str, content: Any) -> str:
    if not isinstance(content, list):
        return _text(where, content or "")
    for part in cast("list[Any]", content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadConfig(f"{where}: only text can be shown; a task with images is not worked on here")
    return "\n".join(_text(where, part.get("text")) for part in cast("list[dict[str, Any]]", content))


def _first_of(row: Row, *names: str, default: int) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def _table(row: Row, name: str) -> Row:
    table = row.get(name) or {}
    if not isinstance(table, dict):
        raise BadConfig(f"{name} must be an object")
    return cast("Row", table)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadConfig(f"{where} must be text")
    return value


def _number(where: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise BadConfig(f"{where} must be a number above 0")
    return float(value)
