"""The schema of a task file's line, its validation, and the conversion to and from a `Task`. Does no I/O.

A line has one of two forms: a task (`TaskRow`), or an evaluation suite's item (`SuiteRow`), the flat form of a held-out task with a single
answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, field_validator, model_validator

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadConfig
from ostinato.core.lines import one_line
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.tasks.places import check_inside, check_tree
from ostinato.worlds.tasks.task import Grading, KnownAnswer, Split, Task

MAX_FILES = 4096
ANSWER_S, GRADING_S = 120.0, 4.0
"""Default time limits of a suite's item in seconds: for the answer, and for grading."""

_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Stop = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class EncodedBytes(BaseModel, frozen=True, extra="forbid"):
    """The content of a file that is not UTF-8 text."""

    base64: str = Field(description="The bytes in base64 (RFC 4648, with padding).")

    @field_validator("base64")
    @classmethod
    def _check(cls, text: str) -> str:
        try:
            base64.b64decode(text, validate=True)
        except ValueError as error:
            raise ValueError(f"is not base64 ({error})") from None
        return text


def _check_files(files: dict[str, str | EncodedBytes]) -> dict[str, str | EncodedBytes]:
    _as_value_error(check_tree, files)
    return files


Files = Annotated[dict[str, str | EncodedBytes], Field(max_length=MAX_FILES), AfterValidator(_check_files)]


class CallRow(BaseModel, frozen=True, extra="forbid"):
    """A tool call in one of the task's messages."""

    id: _Id = Field(description="Id of the call, to which the tool's message refers.")
    name: _Id = Field(description="The tool's name.")
    arguments: str = Field(description="Arguments: JSON text of an object.")


class MessageRow(BaseModel, frozen=True, extra="forbid"):
    """One message of the task's prompt."""

    role: Role = Field(description="system, user, assistant or tool.")
    content: str = Field(description="The message's text.")
    reasoning: str = Field(default="", description="An assistant's reasoning.")
    calls: tuple[CallRow, ...] = Field(default=(), max_length=256, description="An assistant's tool calls.")
    answers: str = Field(default="", max_length=512, description="The id of the call that a tool's message answers.")
    failed: bool = Field(default=False, description="Whether the call failed.")


class LimitsRow(BaseModel, frozen=True, extra="forbid"):
    """The limits of the task's sandbox."""

    memory_mb: int = Field(default=256, ge=16, le=1 << 20, description="Memory in MiB.")
    disk_mb: int = Field(default=64, ge=1, le=1 << 20, description="Files that it may write, in MiB.")
    processes: int = Field(default=32, ge=1, le=1 << 16, description="Processes and threads.")
    open_files: int = Field(default=256, ge=8, le=1 << 16, description="Open files of each process.")
    output_bytes: int = Field(default=65536, ge=1, le=1 << 26, description="Bytes that one program may print.")


class WorldRow(BaseModel, frozen=True, extra="forbid"):
    """The sandbox in which the model works on a task."""

    layers: tuple[str, ...] = Field(
        default=(), max_length=128, description="Directories, relative to the taskset file; the last one is on top."
    )
    files: Files = Field(default_factory=dict, description="Path below workdir -> text, or {'base64': ...}.")
    workdir: str = Field(default="/work", pattern=r"^(/[A-Za-z0-9._-]+)+$", description="Directory of the files.")
    env: dict[str, str] = Field(default_factory=dict, max_length=256, description="Further environment variables.")
    hosts: tuple[str, ...] = Field(default=(), max_length=256, description="Hosts that may be reached, as 'host:port'.")
    limits: LimitsRow = Field(default=LimitsRow(), description="Limits of the sandbox.")

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            _as_value_error(check_inside, name)
        return names

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, path: str) -> str:
        _as_value_error(check_inside, path[1:])
        return path

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"{name!r} is not a variable: its name must be non-empty and without '=', and neither may contain NUL"
                )
        return env

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for each in hosts:
            name, _, port = each.rpartition(":")
            if not name or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
                raise ValueError(f"{each!r} is not 'host:port'")
        return hosts


class GradingRow(BaseModel, frozen=True, extra="forbid"):
    """How the outcome is graded."""

    grader: _Id = Field(description="The grader's name.")
    data: dict[str, JsonValue] = Field(default_factory=dict, description="The grader's own data.")
    hidden: Files = Field(default_factory=dict, description="Files that only the grader's own sandbox sees.")
    timeout_s: float = Field(default=60.0, gt=0, le=86_400, description="Longest grading, in seconds.")


class KnownRow(BaseModel, frozen=True, extra="forbid"):
    """A question with a known answer."""

    question: str = Field(min_length=1, max_length=4096, description="Question that is asked after each turn.")
    answer: str = Field(
        min_length=1,
        max_length=4096,
        description="The right answer, whose probability is measured. No rollout is shown it.",
    )


class TaskRow(BaseModel, frozen=True, extra="forbid"):
    """One line of a taskset file."""

    id: _Id = Field(description="Id, unique in the taskset.")
    family: _Id = Field(description="The kind of task; families are counted and held out as a whole.")
    messages: tuple[MessageRow, ...] = Field(
        min_length=1,
        max_length=1024,
        description="Messages that the model is given. If the last one is an assistant's, the answer continues it.",
    )
    grading: GradingRow = Field(description="How the outcome is graded.")
    world: WorldRow = Field(default=WorldRow(), description="The sandbox in which the task is worked on.")
    harness: _Id = Field(
        default="single", description="What runs the model on the task: single, repair, tools, agent or agent-NAME."
    )
    split: Split = Field(default=Split.TRAIN, description="train, held_out, or canary: a task that cannot be solved.")
    turns: int = Field(default=1, ge=1, le=10_000, description="Most calls of the model.")
    tokens: int = Field(default=512, ge=1, le=131_072, description="Most tokens of one answer.")
    stop: _Stop = Field(default=(), max_length=16, description="Strings before which an answer ends.")
    temperature: float | None = Field(
        default=None, ge=0.0, le=2.0, description="Sampling temperature; 0 is greedy. Null: worlds.temperature."
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus probability.")
    timeout_s: float = Field(default=600.0, gt=0, le=604_800, description="Longest rollout, in seconds.")
    about: dict[str, str] = Field(default_factory=dict, max_length=64, description="Notes for people.")
    known: KnownRow | None = Field(
        default=None, description="For `reward.belief`: a question about the task, and its answer."
    )

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, messages: tuple[MessageRow, ...]) -> tuple[MessageRow, ...]:
        for number, message in enumerate(messages):
            if message.role is not Role.ASSISTANT and (message.calls or message.reasoning):
                raise ValueError(f"[{number}]: only an assistant has calls and reasoning")
            if (message.role is Role.TOOL) != bool(message.answers):
                raise ValueError(f"[{number}]: a tool's message, and no other, names the call that it answers")
        return messages


class SuiteSampling(BaseModel, frozen=True, extra="forbid"):
    """Sampling parameters of a suite's item."""

    max_tokens: int = Field(default=256, ge=1, le=131_072, description="Longest answer, in tokens.")
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus probability.")
    stop: _Stop = Field(default=(), max_length=16, description="Strings before which an answer ends.")


class SuiteMessage(BaseModel, frozen=True, extra="forbid"):
    """One message of an item's prompt."""

    role: str = Field(pattern="^(system|user|assistant)$", description="system, user or assistant.")
    content: str = Field(description="Text of the message.")


class SuiteRow(BaseModel, frozen=True, extra="allow"):
    """One line of a suite: a prompt, sampling parameters, and a grader, whose own fields are extra fields (such as `head` and `tests`)."""

    id: _Id = Field(description="Id, unique in the suite.")
    family: _Id = Field(description="The group that the item belongs to.")
    messages: tuple[SuiteMessage, ...] = Field(min_length=1, max_length=1024, description="The conversation so far.")
    continue_final_message: bool = Field(default=False, description="The answer continues the last message's text.")
    sampling: SuiteSampling = Field(default=SuiteSampling(), description="How the answer is sampled.")
    grader: str = Field(min_length=1, max_length=64, description="Name of the function that scores the answer.")

    @model_validator(mode="after")
    def _check(self) -> SuiteRow:
        if misplaced := sorted({*(self.model_extra or {})} & {*TaskRow.model_fields}):
            raise ValueError(
                f"{', '.join(misplaced)}: belongs to a whole task, whose grader is in 'grading'; an item's 'sampling' has max_tokens, "
                "temperature, top_p and stop"
            )
        if self.continue_final_message != (self.messages[-1].role == "assistant"):
            raise ValueError(
                "continue_final_message: must be true if, and only if, the last message is the assistant's; "
                "set it to true, or end with the user's message"
            )
        return self


def parse_object(where: str, line: str) -> dict[str, Any]:
    """Parse a line as one JSON object, without duplicate keys or NaN and infinite numbers. Raises BadConfig that begins with `where`."""
    try:
        value = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=unrepeated)
    except (ValueError, RecursionError) as error:
        raise BadConfig(
            f"{where}: not JSON ({error}); each line must be one JSON object, without a list around them (jq -c '.[]' splits a list)"
        ) from error
    if not isinstance(value, dict):
        raise BadConfig(f"{where}: a {type(value).__name__}, not a JSON object; each line must be one task")
    return cast("dict[str, Any]", value)


def parse_row(where: str, line: str, *, answer_s: float = ANSWER_S, grading_s: float = GRADING_S) -> TaskRow:
    """Parse and validate a line. A suite's item, recognised by its field `grader`, is converted to a task's row.

    `answer_s`, `grading_s`: time limits of a suite's item for the answer and for grading, in seconds; other tasks state their own. Raises
    BadConfig that begins with `where` and names the field.
    """
    fields = parse_object(where, line)
    item = "grader" in fields and "grading" not in fields
    try:
        # strict validation of the JSON text, since in Python mode it would refuse lists for tuples
        if item:
            return _task_row(SuiteRow.model_validate_json(line, strict=True), answer_s, grading_s)
        return TaskRow.model_validate_json(line, strict=True)
    except ValidationError as error:
        raise BadConfig(f"{where}, {_describe_error(error, SuiteRow if item else TaskRow)}") from error


def _task_row(item: SuiteRow, answer_s: float, grading_s: float) -> TaskRow:
    return TaskRow(
        id=item.id,
        family=item.family,
        messages=tuple(MessageRow(role=Role(each.role), content=each.content) for each in item.messages),
        grading=GradingRow(grader=item.grader, data=dict(item.model_extra or {}), timeout_s=grading_s),
        split=Split.HELD_OUT,
        tokens=item.sampling.max_tokens,
        stop=item.sampling.stop,
        temperature=item.sampling.temperature,
        top_p=item.sampling.top_p,
        timeout_s=answer_s,
    )


def check_row(where: str, task: Task, layers: Mapping[str, str]) -> TaskRow:
    """Convert a task to a row, validated like one that was read. `layers`: directory -> the name to write. Raises BadConfig."""
    try:
        fields = asdict(task)
        spec, grading = fields.pop("spec"), fields["grading"]
        del spec["mounts"]
        fields["world"] = spec | {
            "layers": [layers[name] for name in spec["layers"]],
            "files": _encode_files(spec["files"]),
        }
        grading["hidden"] = _encode_files(grading["hidden"])
        fields["messages"] = [_message_fields(message) for message in task.messages]
        text = json.dumps(fields, allow_nan=False, ensure_ascii=False)
        text.encode()
        return TaskRow.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise BadConfig(f"{where}, {_describe_error(error)}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadConfig(
            f"{where}: {error}; a task may contain only JSON types, and its strings only valid Unicode"
        ) from error


def task_of(row: TaskRow, layers: Mapping[str, Path]) -> Task:
    """Convert a row to a task. `layers`: name in the row -> directory."""
    world, grading = row.world, row.grading
    return Task(
        id=row.id,
        family=row.family,
        messages=tuple(_message(message) for message in row.messages),
        grading=Grading(
            grader=grading.grader,
            data=cast("dict[str, Any]", grading.data),
            hidden=_decode_files(grading.hidden),
            timeout_s=grading.timeout_s,
        ),
        spec=SandboxSpec(
            layers=tuple(str(layers[name]) for name in world.layers),
            files=_decode_files(world.files),
            workdir=world.workdir,
            env=dict(world.env),
            hosts=world.hosts,
            limits=Limits(**world.limits.model_dump()),
        ),
        harness=row.harness,
        split=row.split,
        turns=row.turns,
        tokens=row.tokens,
        stop=row.stop,
        temperature=row.temperature,
        top_p=row.top_p,
        timeout_s=row.timeout_s,
        about=dict(row.about),
        known=row.known and KnownAnswer(question=row.known.question, answer=row.known.answer),
    )


def hashed_fields(row: TaskRow) -> dict[str, Any]:
    """Return the fields that a taskset's hash covers. Fields added later count only if they are set, so that older hashes stay valid."""
    fields = row.model_dump(mode="json")
    for name in ("temperature", "top_p", "known"):
        if fields[name] == TaskRow.model_fields[name].default:
            del fields[name]
    return fields


def line_of(row: TaskRow) -> str:
    """Serialise a row as a line, without fields that have their default value."""
    return one_line(json.dumps(row.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False))


def _message(row: MessageRow) -> Message:
    return Message(
        role=row.role,
        text=row.content,
        reasoning=row.reasoning,
        calls=tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in row.calls),
        answers=row.answers,
        failed=row.failed,
    )


def _message_fields(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls]
    content = {"role": message.role, "content": message.text, "reasoning": message.reasoning}
    return {**content, "calls": calls, "answers": message.answers, "failed": message.failed}


def _encode_files(files: Mapping[str, bytes]) -> dict[str, Any]:
    def one(data: bytes) -> str | dict[str, str]:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}

    return {path: one(data) for path, data in files.items()}


def _decode_files(files: Mapping[str, str | EncodedBytes]) -> dict[str, bytes]:
    return {
        path: text.encode() if isinstance(text, str) else base64.b64decode(text.base64) for path, text in files.items()
    }


def _as_value_error(check: Any, value: Any) -> None:
    """Run a check and turn its BadConfig into a ValueError, so that pydantic names the field."""
    try:
        check(value)
    except BadConfig as error:
        raise ValueError(str(error)) from None


def _describe_error(error: ValidationError, form: type[BaseModel] = TaskRow) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "(task)"
    match first["type"]:
        case "missing":
            return f"field {field!r} is missing"
        case "extra_forbidden":
            known = ", ".join(_siblings(form, first["loc"]))
            return f"field {field!r}: there is no such field" + (f"; known fields: {known}" if known else "")
        case _:
            return f"field {field!r}: {first['msg'].removeprefix('Value error, ')}"


def _siblings(form: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Return the known fields at the position of an unknown field in a row."""
    model = form
    for part in place[:-1]:
        if isinstance(part, int):
            continue
        known = {
            "messages": MessageRow if form is TaskRow else SuiteMessage,
            "grading": GradingRow,
            "world": WorldRow,
            "limits": LimitsRow,
            "calls": CallRow,
            "sampling": SuiteSampling,
        }
        if part not in known:
            return []
        model = known[part]
    return list(model.model_fields)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if (value := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large for a float")
    return value


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON; an `object_pairs_hook` for `json.loads`. Raises ValueError for a duplicate key."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} occurs twice in one object")
        result[name] = value
    return result
