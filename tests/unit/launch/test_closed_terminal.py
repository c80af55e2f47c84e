"""What the demo prints after its terminal was closed is lost, and nothing else is."""

import errno
import io

import pytest
from rich.console import Console
from rich.live import Live

from ostinato.launch.commands.demo import outlast_terminal


class Closing(io.StringIO):
    """A terminal that refuses every word once it is `gone`."""

    gone = False

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def flush(self):
        self.write("")


def print_while_it_closes(terminal, console):
    with console.status("starting"):
        console.print("begun")
    with Live(console=console) as live:
        terminal.gone = True
        live.update("some figures")
    console.print("report")


def test_a_closed_terminal_costs_only_what_is_printed():
    terminal = Closing()
    console = Console(file=terminal, force_terminal=True, width=80)
    outlast_terminal(console)
    assert console.is_terminal
    print_while_it_closes(terminal, console)
    assert "begun" in terminal.getvalue()
    assert "report" not in terminal.getvalue()


def test_control_without_it_the_same_prints_raise():
    terminal = Closing()
    with pytest.raises(OSError, match="Input/output"):
        print_while_it_closes(terminal, Console(file=terminal, force_terminal=True, width=80))
