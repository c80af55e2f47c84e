#!/usr/bin/env python
"""Run a command with secrets that lie in files: in the configuration, where that has no place for a file's name, or in the environment.

Nothing secret stands on a command line, where other users of the machine would see it. The configuration with the secrets in it is written
to a directory that only its owner can enter, and the command gets ``--config`` with its name; without --lines and --text the file stays
as it is. Directories of commands that have ended are removed by the next one.

Example::

    with-secrets --config ostinato.toml --lines serve.user_keys=/run/secrets/user_keys --text serve.admin_key=/run/secrets/admin_key \
        --env OSTINATO_LOG_PASSWORD=/run/secrets/log_password -- ostinato up
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ostinato.config import load, put, read_file
from ostinato.core.errors import BadConfig


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as NAME=FILE")
    return name, Path(path)


def _secret(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"the secret {path} cannot be read by user {os.getuid()}: {error}") from error
    if not text:
        raise BadConfig(f"the secret {path} is empty")
    return text


_PREFIX = "with-secrets-"


def _sweep() -> None:
    """Remove what earlier commands left: a container that starts again keeps its files, and gives its processes the same numbers."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            named, seen = re.match(rf"{_PREFIX}(\d+)-", path.name), path.lstat()
            if named and stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not _alive(int(named[1])):
                shutil.rmtree(path)


def _alive(pid: int) -> bool:
    """Whether another process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return pid != os.getpid()


def prepared(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command to run and what to add to its environment. Raises BadConfig for a secret or a configuration that cannot be used."""
    parser = argparse.ArgumentParser(description="Run a command with secrets from files.")
    parser.add_argument("--config", type=Path, required=True, help="the configuration without its secrets")
    parser.add_argument("--lines", type=_named, action="append", default=[], help="KEY=FILE: a list, an item each line")
    parser.add_argument("--text", type=_named, action="append", default=[], help="KEY=FILE: one value")
    parser.add_argument("--env", type=_named, action="append", default=[], help="NAME=FILE: a variable")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    asked = parser.parse_args(arguments)
    environment = {name: _secret(path) for name, path in asked.env}
    config: Path = asked.config
    if asked.lines or asked.text:
        tree = read_file(config)
        for key, path in asked.lines:
            put(tree, key.split("."), [line.strip() for line in _secret(path).splitlines() if line.strip()])
        for key, path in asked.text:
            put(tree, key.split("."), _secret(path))
        _sweep()
        # a directory of its owner alone, named after this process, which becomes the command
        config = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")) / "ostinato.json"
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(tree, file)
    load(config)
    return [*asked.command, "--config", str(config)], environment


def main() -> None:
    """Become the command."""
    try:
        command, environment = prepared(sys.argv[1:])
    except BadConfig as error:
        sys.exit(f"with-secrets: {error}")
    os.environ.update(environment)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
