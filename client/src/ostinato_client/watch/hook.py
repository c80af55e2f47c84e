"""The hook that Claude Code calls after an edit: `python -m ostinato_client.watch.hook`, with the hook's JSON on standard input.

It appends one line to the spool of the repository that the file is in, if that is watched. It prints nothing, and no error in it may
stop the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato_client.watch import files
from ostinato_client.watch.spool import Edit, append

_LONGEST = 64 * 1024 * 1024
_TOOLS = ("Edit", "MultiEdit", "Write")


def edit_of(payload: Mapping[str, Any], disk: str, now: float) -> Edit | None:
    """The edit that a `PostToolUse` hook reports; None if it reports something else.

    Args:
        payload: the hook's JSON.
        disk: the file's present text.
        now: Unix seconds.
    """
    told, response, call = payload.get("tool_input"), payload.get("tool_response"), payload.get("tool_use_id")
    if payload.get("tool_name") not in _TOOLS or not isinstance(told, dict) or not isinstance(response, dict):
        return None
    file, before = told.get("file_path"), response.get("originalFile")
    if (
        not isinstance(file, str)
        or not isinstance(call, str)
        or response.get("type", "update") not in ("create", "update")
    ):
        return None
    if before is None and response.get("type") == "create":
        before = ""
    before = before if isinstance(before, str) else None
    if response.get("userModified"):
        # a person changed the call before it ran: the text that it asked for is the call's, the rest is the person's
        asked = _asked(told, before)
        if asked is None or asked == disk:
            return None
        return Edit("claude-code", call, file, before, asked, now, _placed(told, before, asked))
    return Edit("claude-code", call, file, before, disk, now, _placed(told, before, disk))


def _placed(told: Mapping[str, Any], before: str | None, after: str) -> tuple[str, int, int] | None:
    """The argument that holds what the call wrote, the line of the file that it begins in, and its lines; None unless that is certain."""
    if isinstance(told.get("content"), str):
        return ("content", 0, files.count_lines(after)) if told["content"] == after else None
    old, new = told.get("old_string"), told.get("new_string")
    if before is None or not isinstance(old, str) or not isinstance(new, str) or not old or before.count(old) != 1:
        return None
    begins = before[: before.index(old)].count("\n")
    return ("new_string", begins, files.count_lines(new)) if before.replace(old, new) == after else None


def _asked(told: Mapping[str, Any], before: str | None) -> str | None:
    """The file as the call asked for it; None if that is unknown."""
    if isinstance(told.get("content"), str):
        return told["content"]
    old, new = told.get("old_string"), told.get("new_string")
    if before is None or not isinstance(old, str) or not isinstance(new, str) or not old or old not in before:
        return None
    return before.replace(old, new) if told.get("replace_all") else before.replace(old, new, 1)


def watched(file: Path) -> Path | None:
    """The directory of the spool for edits of a file; None if the file is in no watched repository."""
    for place in file.parents:
        dot_git = place / ".git"
        if dot_git.is_dir():
            return _opened(dot_git, dot_git)
        if dot_git.is_file():  # a worktree's or a submodule's
            kind, _, where = dot_git.read_text("utf-8").strip().partition(": ")
            directory = (place / where).resolve()
            if kind != "gitdir" or not (directory / "HEAD").is_file():
                return None
            common = directory / "commondir"
            return _opened(directory, directory / common.read_text("utf-8").strip() if common.is_file() else directory)
    return None


def _opened(directory: Path, common: Path) -> Path | None:
    if not (common / "ostinato").is_dir() and not (directory / "ostinato").is_dir():
        return None
    (directory / "ostinato").mkdir(mode=0o700, exist_ok=True)
    return directory / "ostinato"


def main() -> None:
    """Read the payload, and write the line."""
    payload = json.loads(sys.stdin.buffer.read(_LONGEST))
    file = Path(os.path.realpath(payload["tool_input"]["file_path"]))
    directory = watched(file)
    if directory is None:
        return
    with file.open("rb") as opened:
        data = opened.read(files.LONGEST + 1)
    if len(data) > files.LONGEST or b"\0" in data:
        return
    now = time.time()  # noqa: TID251 (a package of its own: no Clock here)
    edit = edit_of(payload, data.decode(errors="replace"), now)
    if edit is not None:
        append(directory, edit)


if __name__ == "__main__":
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        main()
