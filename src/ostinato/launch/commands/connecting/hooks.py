"""The hooks that tell `ostinato watch` what a tool call wrote: where each agent keeps its hooks, and what goes into that file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ostinato.core.errors import BadConfig
from ostinato.launch.commands.connecting.agents import Scope, Surroundings
from ostinato.launch.commands.connecting.forms import Json, edited_json

MODULE = "ostinato_client.watch.hook"
_TOOLS = "Edit|MultiEdit|Write"


@dataclass(frozen=True, slots=True, kw_only=True)
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


def package() -> Path:
    """The client package's directory. Raises BadConfig if it is not installed."""
    try:
        import ostinato_client.watch as watch
    except ImportError as error:
        raise BadConfig("this needs the client's package beside this one: pip install 'ostinato[watch]'") from error
    return Path(watch.__file__ or "").resolve().parent


def command() -> str:
    """The command that Claude Code runs. Python is isolated, so that it imports no module of the repository that the agent works in."""
    python, place = shlex.quote(sys.executable), package()
    look = "import ostinato_client.watch as found; print(found.__file__)"
    words = [sys.executable, "-I", "-c", look]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    if Path(found).parent == place:
        return f"{python} -I -m {MODULE}"
    code = f"import runpy, sys; sys.path.insert(0, {str(place.parent.parent)!r}); runpy.run_module({MODULE!r}, run_name='__main__')"
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
    return (package() / "opencode.js").read_text("utf-8")


HOOKS: Mapping[str, Hook] = {
    "claude-code": Hook(
        places={
            "user": lambda at: at.named("CLAUDE_CONFIG_DIR", lambda: at.home / ".claude") / "settings.json",
            "project": lambda at: at.directory / ".claude" / "settings.local.json",
        },
        put=_claude_code,
        taken=_without_claude_code,
    ),
    "opencode": Hook(
        places={
            "user": lambda at: at.configs("opencode") / "plugins" / "ostinato-watch.js",
            "project": lambda at: at.directory / ".opencode" / "plugins" / "ostinato-watch.js",
        },
        put=_opencode,
        taken=lambda text: None,
    ),
}
