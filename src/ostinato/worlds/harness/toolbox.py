"""The tools of the reference harness: what the model is told of them, and what they do in a sandbox.

Whatever the model gets wrong is an answer that says what to do instead; nothing of it is an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ostinato.core.conversation import Tool, ToolCall
from ostinato.core.errors import BadRequest, NotFound, StorageFull, TooLarge
from ostinato.core.seams import Sandbox

MOST_FILE_BYTES = 1 << 20
_PATH = {"type": "string", "description": "Relative to the working directory."}


def _tool(name: str, description: str, required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Tool:
    schema = {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": [*required],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=schema)


_LINE = {"type": "integer", "minimum": 1}
TOOLS = (
    _tool(
        "read",
        "Read a text file; lines are numbered.",
        {"path": _PATH},
        {
            "first": {**_LINE, "description": "First line, 1 by default."},
            "lines": {**_LINE, "description": "How many lines."},
        },
    ),
    _tool("write", "Write a whole file; one that is there is replaced.", {"path": _PATH, "text": {"type": "string"}}),
    _tool(
        "edit",
        "Replace a text that occurs exactly once in a file.",
        {"path": _PATH, "old": {"type": "string"}, "new": {"type": "string"}},
    ),
    _tool(
        "bash",
        "Run a command in the working directory; its output and exit code come back.",
        {"command": {"type": "string"}},
    ),
    _tool("submit", "Say that the work is done. Nothing can be done after it.", {}),
)
SUBMIT = "submit"
_BY_NAME = {tool.name: tool for tool in TOOLS}


class BadCall(Exception):
    """A call that could not be done; the text is for the model."""


def cut(text: str, most: int) -> str:
    """The text, or its beginning and its end with a note between them. `most` is in characters, the note's own not counted."""
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - head
    end = text[len(text) - tail :]
    return f"{text[:head]}\n[... {len(text) - most} characters left out here ...]\n{end}"


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """A call's arguments, as its tool wants them. Raises BadCall."""
    tool = _BY_NAME.get(call.name)
    if tool is None:
        raise BadCall(f"there is no tool {call.name[:80]!r}; there are {', '.join(_BY_NAME)}")
    values = call.values()
    if values is None:
        raise BadCall(f"the arguments of {tool.name} are not a JSON object; send one with {_signature(tool)}")
    properties: dict[str, Any] = tool.parameters["properties"]
    for name in tool.parameters["required"]:
        if name not in values:
            raise BadCall(f"{tool.name} needs {name!r}; send {_signature(tool)}")
    for name, value in values.items():
        if name not in properties:
            raise BadCall(f"{tool.name} takes no {name[:80]!r}; send {_signature(tool)}")
        _check_value(tool.name, name, value, properties[name]["type"])
    return values


def _check_value(tool: str, name: str, value: Any, wanted: str) -> None:
    if wanted == "integer":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadCall(f"{name!r} of {tool} must be a whole number from 1 on")
    elif not isinstance(value, str):
        raise BadCall(f"{name!r} of {tool} must be a string")
    elif any("\ud800" <= sign <= "\udfff" for sign in value):
        raise BadCall(f"{name!r} of {tool} holds half a character; send whole ones")


def _signature(tool: Tool) -> str:
    required = tool.parameters["required"]
    names = [name if name in required else f"{name} (may be left out)" for name in tool.parameters["properties"]]
    return ", ".join(names) or "no arguments: {}"


class Toolbox:
    """Does what the model calls for, in one sandbox.

    Args:
        sandbox: where.
        command_s: longest run of one command, in seconds.
        shell: what runs a command, which is its last argument.
    """

    def __init__(self, sandbox: Sandbox, *, command_s: float, shell: tuple[str, ...] = ("bash", "-c")) -> None:
        self._sandbox, self._command_s, self._shell = sandbox, command_s, shell
        self._does: dict[str, Callable[..., Awaitable[str]]] = {
            "read": self._read,
            "write": self._write,
            "edit": self._edit,
            "bash": self._bash,
        }

    async def do(self, call: ToolCall) -> str:
        """What came of a call. Raises BadCall; Unavailable if the sandbox is gone."""
        values = arguments_of(call)
        try:
            return await self._does[call.name](**values)
        except (BadRequest, StorageFull) as error:
            raise BadCall(str(error)) from error

    async def _text(self, path: str) -> str:
        try:
            return (await self._sandbox.read(path, most=MOST_FILE_BYTES)).decode()
        except NotFound as error:
            raise BadCall(f"there is no file {path!r}; look with bash, or write it") from error
        except TooLarge as error:
            raise BadCall(f"{path!r} is larger than {MOST_FILE_BYTES} bytes; look at parts of it with bash") from error
        except UnicodeDecodeError as error:
            raise BadCall(f"{path!r} is not text; look at it with bash") from error

    async def _read(self, path: str, first: int = 1, lines: int | None = None) -> str:
        every = (await self._text(path)).splitlines()
        shown = every[first - 1 : None if lines is None else first - 1 + lines]
        if not shown:
            raise (
                BadCall(f"{path!r} has {len(every)} lines; there is none from {first} on")
                if every
                else BadCall(f"{path!r} is empty")
            )
        return "\n".join(f"{number}\t{line}" for number, line in enumerate(shown, start=first))

    async def _write(self, path: str, text: str) -> str:
        data = text.encode()
        await self._sandbox.write(path, data)
        return f"wrote {len(data)} bytes to {path}"

    async def _edit(self, path: str, old: str, new: str) -> str:
        if not old:
            raise BadCall("old is empty; say which text is to be replaced, or use write")
        if old == new:
            raise BadCall("old and new are the same; nothing would change")
        text = await self._text(path)
        found = text.count(old)
        if found == 0:
            loosely = " ".join(old.split()) in " ".join(text.split())
            hint = (
                "it is there with other spaces or line breaks" if loosely else "read the file and copy the text exactly"
            )
            raise BadCall(f"old does not occur in {path!r}; {hint}")
        if found > 1:
            at = [number for number, line in enumerate(text.split("\n"), start=1) if old.split("\n")[0] in line][:5]
            raise BadCall(f"old occurs {found} times in {path!r} (lines {at}); give more of the text around it")
        await self._sandbox.write(path, text.replace(old, new).encode())
        return f"edited {path}"

    async def _bash(self, command: str) -> str:
        if "\0" in command:
            raise BadCall("command holds a NUL; leave it out")
        result = await self._sandbox.exec([*self._shell, command], timeout=self._command_s)
        parts = [part.decode(errors="replace").rstrip("\n") for part in (result.stdout, result.stderr)]
        ending = {
            "timeout": f"killed after {self._command_s:g} seconds",
            "output": "killed: it printed too much",
            "memory": "killed: it took too much memory",
        }.get(result.killed_reason or "", f"exit code {result.code}")
        return "\n".join([*filter(None, parts), f"[{ending}]"])
