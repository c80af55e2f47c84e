"""The command line: `ostinato COMMAND --help` explains each."""

from ostinato.core.interpreter import collecting_rarely

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    with collecting_rarely():
        from ostinato.cli.commands import main as run

    run()
