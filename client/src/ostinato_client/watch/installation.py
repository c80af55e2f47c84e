"""Installs the hooks that tell the watcher what a tool call wrote: where each agent keeps its hooks, and what goes into that file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ostinato_client.connect import settings_files
from ostinato_client.connect.agent_settings import AGENTS, Json, Scope, Surroundings, edited_json
from ostinato_client.connect.errors import BadConfig, NotFound
from ostinato_client.connect.settings_files import diff
from ostinato_client.connect.terminal import Terminal
from ostinato_client.watch.git import GitError, Repository

MODULE = "ostinato_client.watch.hook"
_TOOLS = "Edit|MultiEdit|Write"
_PACKAGE = Path(__file__).resolve().parent
_KEEP = "before-ostinato-watch"
_CURSOR = (
    "--install cursor: Cursor's hooks do not name the call that made an edit, so its lines could be credited by a guess only. "
    "Nothing is installed"
)


@dataclass(frozen=True)
class Hook:
    """An agent's hook.

    Attributes:
        places: the file for each scope.
        put: given the file's text, or None, returns the text with the hook in it.
        taken: given the text, returns it without the hook; None: nothing is left. A file that is as it was written is restored instead.
    """

    places: Mapping[Scope, Callable[[Surroundings], Path]]
    put: Callable[[str | None], str]
    taken: Callable[[str], str | None]


def command() -> str:
    """The command that Claude Code runs. Python is isolated, so that it imports no module of the repository that the agent works in."""
    python = shlex.quote(sys.executable)
    look = "import ostinato_client.watch as found; print(found.__file__)"
    words = [sys.executable, "-I", "-c", look]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    if Path(found).parent == _PACKAGE:
        return f"{python} -I -m {MODULE}"
    code = f"import runpy, sys; sys.path.insert(0, {str(_PACKAGE.parent.parent)!r}); runpy.run_module({MODULE!r}, run_name='__main__')"
    return f"{python} -I -c {shlex.quote(code)}"


def _claude_code(text: str | None) -> str:
    entry = {"matcher": _TOOLS, "hooks": [{"type": "command", "command": command(), "timeout": 10}]}

    def change(there: Json) -> Json:
        hooks = _object(there, "hooks")
        return {**there, "hooks": {**hooks, "PostToolUse": [*_others(hooks), entry]}}

    return edited_json(text, change)


def _without_claude_code(text: str) -> str | None:
    def change(there: Json) -> Json:
        hooks = _object(there, "hooks")
        left = {**hooks, "PostToolUse": _others(hooks)}
        left = {name: value for name, value in left.items() if value or name != "PostToolUse"}
        new = {**there, "hooks": left}
        return {name: value for name, value in new.items() if value or name != "hooks"}

    left = edited_json(text, change)
    return None if left.strip() == "{}" else left


def _object(there: Json, name: str) -> Json:
    value = there.get(name, {})
    if not isinstance(value, dict):
        raise BadConfig(f"{name} is no JSON object; mend it")
    return cast(Json, value)


def _others(hooks: Json) -> list[Any]:
    """The entries that are not ours."""
    entries = hooks.get("PostToolUse", [])
    if not isinstance(entries, list):
        raise BadConfig("hooks.PostToolUse is no JSON list; mend it")
    return [entry for entry in cast(list[Any], entries) if MODULE not in str(entry)]


def _opencode(text: str | None) -> str:
    return (_PACKAGE / "opencode.js").read_text("utf-8")


HOOKS: Mapping[str, Hook] = {
    "claude-code": Hook(places=AGENTS["claude-code"].places, put=_claude_code, taken=_without_claude_code),
    "opencode": Hook(
        places={
            "user": lambda at: at.configs("opencode") / "plugins" / "ostinato-watch.js",
            "project": lambda at: at.directory / ".opencode" / "plugins" / "ostinato-watch.js",
        },
        put=_opencode,
        taken=lambda text: None,
    ),
}


def change_hook(
    name: str, scope: Scope, at: Surroundings, terminal: Terminal, *, undone: bool, yes: bool, program: str
) -> None:
    """Install an agent's hook, or remove it (`undone`). Raises what `install` and `undo` raise, and BadConfig for Cursor.

    `program`: the command as it was typed, such as "ostinato watch".
    """
    if name == "cursor":
        raise BadConfig(_CURSOR)
    if undone:
        undo(name, scope, at, terminal, yes=yes)
    else:
        install(name, scope, at, terminal, yes=yes, program=program)


def install(name: str, scope: Scope, at: Surroundings, terminal: Terminal, *, yes: bool, program: str) -> None:
    """Install an agent's hook, once a person has agreed, and enable it in this repository. Raises BadConfig, Conflict, StorageFull."""
    hook, connected, own = _look(name, scope, at)
    try:
        text = hook.put(connected.text)
        before = None if connected.backup is None else hook.put(connected.backup.before)
    except BadConfig as error:
        raise BadConfig(f"{connected.path}: {error}") from error
    terminal.show(diff(str(connected.path), connected.text, text, None))
    if text == connected.text:
        terminal.say(["nothing to change: the hook is there already"])
    elif not terminal.agreed("write this?", yes=yes):
        return
    elif connected.ours:
        settings_files.amend(connected, text, before)
    else:
        settings_files.write(own, text, secret=False)
    scoped = " --scope project" if scope == "project" else ""
    terminal.say([f"`{program} --install {name} --undo{scoped}` removes it", *_opened(at, program)])


def undo(name: str, scope: Scope, at: Surroundings, terminal: Terminal, *, yes: bool) -> None:
    """Remove an agent's hook: restore the file, or only take the hook out if it was changed since. Raises NotFound, and as `install`."""
    hook, connected, own = _look(name, scope, at)
    if own.text is None or hook.taken(own.text) == own.text:
        raise NotFound(f"{own.path}: nothing to undo, the hook is not in it")
    text = own.backup.before if own.ours and own.backup is not None else hook.taken(own.text)
    terminal.show(diff(str(own.path), own.text, text, None))
    if not terminal.agreed("write this?", yes=yes):
        return
    if own.ours:
        settings_files.undo(own)
    else:
        before = None if connected.backup is None else connected.backup.before
        settings_files.amend(connected, text, None if before is None else hook.taken(before))
        own.kept.unlink(missing_ok=True)
    terminal.say([f"{own.path} no longer contains the hook"])


def _look(
    name: str, scope: Scope, at: Surroundings
) -> tuple[Hook, settings_files.SettingsFile, settings_files.SettingsFile]:
    """The hook, and its file twice: with the backup of `ostinato-connect`, and with the backup of this command."""
    hook = HOOKS[name]
    path, within = hook.places[scope](at), at.directory if scope == "project" else None
    return hook, settings_files.look(path, within=within), settings_files.look(path, within=within, keep=_KEEP)


def _opened(at: Surroundings, program: str) -> list[str]:
    """Enable the hooks in this repository, since they write only where a repository is watched. Returns what to tell the person."""
    try:
        found = Repository.at(at.directory)
    except GitError:
        return [f"run `{program}` in each repository to follow"]
    (found.common / "ostinato").mkdir(mode=0o700, exist_ok=True)
    return [
        f"edits in {found.root} are kept for `{program}` from now on; run it there, and in each other repository to follow"
    ]
