"""The command line: `ostinato COMMAND --help` explains each."""

from ostinato.cli.commands import app, main

__all__ = ["app", "main"]
