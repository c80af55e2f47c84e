"""The tools of the reference harness: their schemas and descriptions for the model, and their implementation in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.conversation import Tool, ToolCall
from ostinato.core.errors import BadConfig, BadRequest, StorageFull, TooLarge
from ostinato.core.lines import whole_lines
from ostinato.core.sandbox import ExecResult
from ostinato.core.seams import Sandbox


def _schema(required: Mapping[str, str], **optional: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: {"type": "string", "description": about} for name, about in required.items()}
    return {
        "type": "object",
        "properties": {**texts, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


_PATH = "Relative to the working directory."
_LINE = {"type": "integer", "minimum": 1}

TOOLS = (
    Tool(
        name="read",
        description="Read a text file, or some of its lines.",
        parameters=_schema(
            {"path": _PATH},
            first={**_LINE, "description": "First line, counted from 1."},
            last={**_LINE, "description": "Last line."},
        ),
    ),
    Tool(
        name="write",
        description="Create or replace a file.",
        parameters=_schema({"path": _PATH, "text": "The whole new content."}),
    ),
    Tool(
        name="edit",
        description="Replace a text that occurs exactly once in a file.",
        parameters=_schema({"path": _PATH, "old": "The text, exactly as it stands there.", "new": "The new text."}),
    ),
    Tool(
        name="bash",
        description="Run a shell command; tells its output and exit code.",
        parameters=_schema({"command": "The command."}),
    ),
    Tool(
        name="python",
        description="Run a Python program; tells what it prints and its exit code.",
        parameters=_schema({"code": "The program."}),
    ),
    Tool(name="submit", description="Say that the task is done. Ends it.", parameters=_schema({})),
)

OFFERED = ("read", "write", "edit", "bash", "submit")
"""The names of the tools that the model gets by default."""

_BY_NAME = {tool.name: tool for tool in TOOLS}
_TYPES = {"string": str, "integer": int}
_MOST_LINES_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """A tool's result. `failed`: the call did not succeed.

    Example: ``ToolReply(text="there is no tool 'look'; there are read, write, edit, bash, submit", failed=True)``
    """

    text: str
    failed: bool = False


def cut_middle(text: str, most: int) -> str:
    """Return the text. If it has more than `most` characters, a note about how much is missing replaces its middle."""
    if len(text) <= most:
        return text
    head = (most + 1) // 2
    tail = most - head
    missing = text[head : len(text) - tail]
    note = f"\n[... {len(missing)} characters ({missing.count(chr(10))} line breaks) left out here ...]\n"
    return text[:head] + note + text[len(text) - tail :]


def replaced_once(text: str, old: str, new: str, path: str) -> str:
    """Replace `old`, which must occur exactly once in `text`. Raises BadRequest with a hint at the remedy."""
    if not old:
        raise BadRequest("old is empty: name the text to replace, or use write for a whole file", field="old")
    if old == new:
        raise BadRequest("old and new are the same: nothing would change", field="new")
    places, line, seen, at = list[int](), 1, 0, text.find(old)
    while at >= 0 and len(places) <= _MOST_LINES_NAMED:
        line, seen = line + text.count("\n", seen, at), at
        places.append(line)
        at = text.find(old, at + 1)
    if not places:
        near = _line_ignoring_indentation(text, old)
        hint = f" Without regard to indentation it is at line {near}." if near else ""
        raise BadRequest(
            f"old does not occur in {path}.{hint} Read the file and copy the text exactly, spaces and line breaks included.",
            field="old",
        )
    if len(places) > 1:
        lines = ", ".join(str(line) for line in places[:_MOST_LINES_NAMED])
        more = ", ..." if len(places) > _MOST_LINES_NAMED else ""
        times = max(len(places), text.count(old))
        raise BadRequest(
            f"old occurs {times} times in {path}, at lines {lines}{more}. Add lines around it until it occurs once.",
            field="old",
        )
    return text.replace(old, new, 1)


def _line_ignoring_indentation(text: str, old: str) -> int | None:
    """Return the line where `old` occurs if white space at both ends of lines is ignored, or None if it does not occur."""
    lines, sought = ["\n".join(line.strip() for line in each.split("\n")) for each in (text, old.strip("\n"))]
    at = f"\n{lines}\n".find(f"\n{sought}\n") if sought.strip() else -1
    return None if at < 0 else lines.count("\n", 0, at) + 1


def tools_named(names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools with these names, in this order. Raises BadConfig for an unknown name."""
    if missing := [name for name in names if name not in _BY_NAME]:
        raise BadConfig(f"there is no tool {missing[0]!r}; there are {', '.join(_BY_NAME)}")
    return tuple(_BY_NAME[name] for name in names)


def checked(call: ToolCall, offered: Sequence[str] = OFFERED) -> dict[str, Any]:
    """Return a call's arguments. Raises BadRequest for a tool that is not offered, and for arguments that do not match its schema."""
    if call.name not in offered:
        raise BadRequest(f"there is no tool {call.name!r}; there are {', '.join(offered)}")
    tool = _BY_NAME[call.name]
    values = call.values()
    if values is None:
        raise BadRequest(f"the arguments of {call.name} are not a JSON object: {call.arguments[:200]!r}")
    known = tool.parameters["properties"]
    takes = f"{call.name} takes {', '.join(known) or 'no arguments'}"
    for name in tool.parameters["required"]:
        if name not in values:
            raise BadRequest(f"{name} is missing; {takes}", field=name)
    for name, value in values.items():
        if name not in known:
            raise BadRequest(f"there is no argument {name!r}; {takes}", field=name)
        kind = known[name]["type"]
        if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
            raise BadRequest(f"{name} must be of type {kind}, not {value!r}"[:300], field=name)
    return values


async def use(call: ToolCall, sandbox: Sandbox, *, timeout: float, offered: Sequence[str] = OFFERED) -> ToolReply:
    """Execute a call. Errors that the call caused are returned as its result. Raises Unavailable if the sandbox is gone."""
    try:
        values = checked(call, offered)
        match call.name:
            case "read":
                return ToolReply(text=await _read(sandbox, values))
            case "write":
                data = values["text"].encode()
                await sandbox.write(values["path"], data)
                return ToolReply(text=f"wrote {len(data)} bytes to {values['path']}")
            case "edit":
                return ToolReply(text=await _edit(sandbox, values))
            case "bash":
                return await _run(sandbox, ["bash", "-c", "exec 2>&1\n" + values["command"]], timeout)
            case "python":
                return await _run(sandbox, ["python3", "-B", "-s", "-c", values["code"]], timeout)
            case _:
                return ToolReply(text="submitted")
    except TooLarge as error:
        return ToolReply(text=f"error: {error}; look at a part of it with bash (sed -n, head, tail)", failed=True)
    except (BadRequest, StorageFull) as error:
        return ToolReply(text=f"error: {error}", failed=True)
    except UnicodeError as error:
        return ToolReply(text=f"error: the arguments of {call.name} hold what is no text: {error}", failed=True)


async def _read(sandbox: Sandbox, values: Mapping[str, Any]) -> str:
    text = (await sandbox.read(values["path"])).decode("utf-8", "replace")
    if "first" not in values and "last" not in values:
        return text
    lines = whole_lines(text)
    first, last = values.get("first", 1), values.get("last", len(lines))
    if not 1 <= first <= min(last, len(lines)):
        raise BadRequest(f"lines {first} to {last}: {values['path']} has lines 1 to {len(lines)}", field="first")
    return "".join(lines[first - 1 : last])


async def _edit(sandbox: Sandbox, values: Mapping[str, Any]) -> str:
    path = values["path"]
    data = await sandbox.read(path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is no UTF-8 text; change it with bash", field="path") from error
    await sandbox.write(path, replaced_once(text, values["old"], values["new"], path).encode())
    return f"edited {path}"


async def _run(sandbox: Sandbox, argv: Sequence[str], timeout: float) -> ToolReply:
    result = await sandbox.exec(argv, timeout=timeout)
    output = (result.stdout + result.stderr).decode("utf-8", "replace")
    return ToolReply(text=f"{output.rstrip()}\n{_ending(result, timeout)}".lstrip(), failed=result.code != 0)


def _ending(result: ExecResult, timeout: float) -> str:
    reasons = {
        "timeout": f"killed after {timeout:.3g} s; run long programs in the background, with their output in a file",
        "output": "killed: it printed too much; send the output into a file",
        "memory": "killed: it used too much memory",
    }
    if result.killed_reason is not None:
        return f"[{reasons.get(result.killed_reason, 'killed')}]"
    return f"[exit {result.code}]"
