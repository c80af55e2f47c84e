"""`ostinato watch`: what becomes of the lines that an agent wrote. The client package does the work; this installs the agents' hooks."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from rich.console import Console

from ostinato.core.errors import BadConfig, Conflict, NotFound
from ostinato.launch.commands.connecting import files
from ostinato.launch.commands.connecting.agents import Scope, Surroundings
from ostinato.launch.commands.connecting.asking import agreed, say, show
from ostinato.launch.commands.connecting.hooks import HOOKS, Hook, package
from ostinato.launch.commands.connecting.masking import diff

_KEEP = "before-ostinato-watch"


def watch(directory: Path, url: str | None, *, once: bool, interval_s: float, console: Console) -> int:
    """Follow the working tree that contains a directory until interrupted. Returns 0, or 1 if `once` could not send all that waits.

    Raises:
        BadConfig: the client's package is not installed, there is no working tree, it cannot be read or written, or the URL is invalid.
        Conflict: another watcher has the working tree.
    """
    package()
    from ostinato_client.watch.delivery import KEY_VARIABLE, known_url
    from ostinato_client.watch.git import GitError
    from ostinato_client.watch.running import watch as run
    from ostinato_client.watch.state import Held

    def line(text: str) -> None:
        say(console, [text])

    try:
        return run(
            directory,
            url or known_url(os.environ),
            os.environ.get(KEY_VARIABLE),
            once=once,
            interval_s=interval_s,
            out=console.file,
            say=line,
        )
    except Held as error:
        raise Conflict(str(error)) from error
    except (GitError, ValueError, OSError, sqlite3.Error) as error:
        raise BadConfig(str(error)) from error


def install(name: str, scope: Scope, at: Surroundings, console: Console, *, yes: bool) -> None:
    """Install an agent's hook, once a person has agreed, and enable it in this repository. Raises BadConfig, Conflict, StorageFull."""
    hook, connected, own = _look(name, scope, at)
    try:
        text = hook.put(connected.text)
        before = None if connected.backup is None else hook.put(connected.backup.before)
    except BadConfig as error:
        raise BadConfig(f"{connected.path}: {error}") from error
    show(console, diff(str(connected.path), connected.text, text, None))
    if text == connected.text:
        say(console, ["nothing to change: the hook is there already"])
    elif not agreed(console, "write this?", yes=yes):
        return
    elif connected.ours:
        files.amend(connected, text, before)
    else:
        files.write(own, text, secret=False)
    scoped = " --scope project" if scope == "project" else ""
    say(console, [f"`ostinato watch --install {name} --undo{scoped}` removes it", *_opened(at)])


def undo(name: str, scope: Scope, at: Surroundings, console: Console, *, yes: bool) -> None:
    """Remove an agent's hook: restore the file, or only take the hook out if it was changed since. Raises NotFound, and as `install`."""
    hook, connected, own = _look(name, scope, at)
    if own.text is None or hook.taken(own.text) == own.text:
        raise NotFound(f"{own.path}: nothing to undo, the hook is not in it")
    text = own.backup.before if own.ours and own.backup is not None else hook.taken(own.text)
    show(console, diff(str(own.path), own.text, text, None))
    if not agreed(console, "write this?", yes=yes):
        return
    if own.ours:
        files.undo(own)
    else:
        before = None if connected.backup is None else connected.backup.before
        files.amend(connected, text, None if before is None else hook.taken(before))
        own.kept.unlink(missing_ok=True)
    say(console, [f"{own.path} no longer contains the hook"])


def _look(name: str, scope: Scope, at: Surroundings) -> tuple[Hook, files.SettingsFile, files.SettingsFile]:
    """The hook, and its file twice: with the backup of `ostinato connect`, and with the backup of this command."""
    hook = HOOKS[name]
    path, within = hook.places[scope](at), at.directory if scope == "project" else None
    return hook, files.look(path, within=within), files.look(path, within=within, keep=_KEEP)


def _opened(at: Surroundings) -> list[str]:
    """Enable the hooks in this repository, since they write only where a repository is watched. Returns what to tell the person."""
    from ostinato_client.watch.git import GitError, Repository

    try:
        found = Repository.at(at.directory)
    except GitError:
        return ["run `ostinato watch` in each repository to follow"]
    (found.common / "ostinato").mkdir(mode=0o700, exist_ok=True)
    return [
        f"edits in {found.root} are kept for `ostinato watch` from now on; run it there, and in each other repository to follow"
    ]
