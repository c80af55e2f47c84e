"""What somebody did for a task, read from a file: a trajectory in ATIF-v1.8 (Agent Trajectory Interchange Format), or a unified diff.

A step of a trajectory is a system, user or agent message; the results of an agent's tool calls are the observation of its step. Data that
ATIF has no field for (why the rollout ended, changed files, turn ids, arguments that are not an object) is under `extra`, with the key
"ostinato", without which a trajectory cannot be graded. A diff is applied strictly: each hunk must fit exactly at the line that it states.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.harness.rollout import Ended, Rollout

SCHEMA = "ATIF-v1.8"
OWN = "ostinato"
_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "agent": Role.ASSISTANT}


def rollout_of(trajectory: Any) -> Rollout:
    """The rollout that a trajectory tells. Raises BadConfig for one without Ostinato's data under `extra`, or an incomplete one."""
    try:
        if trajectory["schema_version"] != SCHEMA:
            raise BadConfig(f"schema_version is {trajectory['schema_version']!r}; {SCHEMA} is read")
        own = trajectory["extra"][OWN]
        return Rollout(
            task=_text(own["task"]),
            harness=_text(trajectory["agent"]["extra"][OWN]["harness"]),
            ended=Ended(own["ended"]),
            messages=tuple(message for step in trajectory["steps"] for message in _messages(step)),
            turns=tuple(_text(turn) for turn in own["turns"]),
            changes=tuple(_read_change(change) for change in own["changes"]),
            effort={_text(name): float(value) for name, value in trajectory["final_metrics"]["extra"][OWN].items()},
            detail=dict(own["detail"]),
        )
    except BadConfig:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadConfig(f"the trajectory was not written by Ostinato, or is not whole: {error!r}") from error


def _messages(step: Mapping[str, Any]) -> list[Message]:
    found: list[Message] = []
    if not step.get("extra", {}).get(OWN, {}).get("result"):
        calls = tuple(_read_call(call) for call in step.get("tool_calls", ()))
        reasoning = step.get("reasoning_content", "")
        role = _ROLES[step["source"]]
        found.append(Message(role=role, text=_text(step["message"]), reasoning=_text(reasoning), calls=calls))
    for result in step.get("observation", {}).get("results", ()):
        own = result["extra"][OWN]
        answers, failed = _text(own["answers"]), bool(own["failed"])
        found.append(Message(role=Role.TOOL, text=_text(result["content"]), answers=answers, failed=failed))
    return found


def _read_call(call: Mapping[str, Any]) -> ToolCall:
    own = call.get("extra", {}).get(OWN)
    arguments = json.dumps(call["arguments"]) if own is None else _text(own["arguments"])
    return ToolCall(id=_text(call["tool_call_id"]), name=_text(call["function_name"]), arguments=arguments)


def _read_change(change: Mapping[str, Any]) -> Change:
    data = base64.b64decode(_text(change["base64"]), validate=True)
    kind, executable = ChangeKind(change["kind"]), bool(change["executable"])
    return Change(path=_text(change["path"]), kind=kind, data=data, executable=executable)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadConfig(f"the trajectory was not written by Ostinato, or is not whole: {str(value)[:80]!r} is no text")
    return value


# ---------------------------------------------------------------- unified diffs

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


def patched(diff: str, original: Callable[[str], bytes | None]) -> tuple[Change, ...]:
    """The changes that a diff describes, as `git diff` or `diff -u` writes it.

    Args:
        diff: with or without git's prefixes a/ and b/.
        original: a file's bytes, None if there is no such file.

    Raises BadRequest with the file and the line where it does not fit.
    """
    lines, at, found = diff.split("\n"), 0, list[Change]()
    while at < len(lines):
        if not (lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")):
            at += 1
            continue
        old, new = _name(lines[at]), _name(lines[at + 1])
        path = old if new is None else new
        if path is None or (new is not None and old not in (None, new)):
            raise BadRequest(f"the diff says {lines[at]!r} and {lines[at + 1]!r}: a file is renamed; write it as two")
        before = None if old is None else original(path)
        if old is not None and before is None:
            raise BadRequest(f"{path}: the diff changes it, and the task has no such file")
        text, at = _applied(path, (before or b"").decode("utf-8", "surrogateescape"), lines, at + 2)
        kind = ChangeKind.DELETED if new is None else ChangeKind.WRITTEN
        data = b"" if new is None else text.encode("utf-8", "surrogateescape")
        found.append(Change(path=path, kind=kind, data=data))
    if not found:
        raise BadRequest("there is no unified diff in it: no lines --- and +++")
    return tuple(found)


def _name(line: str) -> str | None:
    name = line[4:].split("\t")[0].strip()
    return None if name == "/dev/null" else re.sub(r"^[ab]/", "", name)


def _applied(path: str, text: str, lines: list[str], at: int) -> tuple[str, int]:
    """A file after its hunks, and the index of the diff's next line. Of a hunk, only the lines that its header counts are read."""
    before, made, taken, bare = text.split("\n"), list[str](), 0, set[str]()
    while at < len(lines) and (hunk := _HUNK.match(lines[at])):
        first, olds, news = int(hunk[1]), int(hunk[2] or 1), int(hunk[3] or 1)
        start = first - 1 if olds else first
        if start < taken:
            raise BadRequest(f"{path}: hunks of the diff overlap at line {first}")
        made, taken, at = [*made, *before[taken:start]], start, at + 1
        while olds > 0 or news > 0:
            line = lines[at] if at < len(lines) else ""
            sign, rest = (line[:1] or " "), line[1:]
            if sign not in " -+":
                raise BadRequest(f"{path}: {line!r} stands in a hunk of the diff")
            if sign != "+":
                if taken >= len(before) or before[taken] != rest:
                    raise BadRequest(f"{path}, line {taken + 1}: the diff does not fit; it has {rest!r}")
                taken, olds = taken + 1, olds - 1
            if sign != "-":
                made.append(rest)
                news -= 1
            at += 1
            if at < len(lines) and lines[at] == _NO_NEWLINE:
                bare |= {"-", "+"} if sign == " " else {sign}
                at += 1
    whole = "\n".join([*made, *before[taken:]])
    if bare == {"-"}:  # the old file ended without a line break, and the new one does not
        whole += "\n"
    return whole.removesuffix("\n") if bare == {"+"} else whole, at
