"""What the demo prints after its terminal was closed is lost, and nothing else is; and what a command says of a full disk."""

import errno
import io
import os

import pytest
from rich.console import Console
from rich.live import Live

from ostinato.cli import commands
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_refuses_what_a_command_writes_is_a_line_and_no_traceback(code, monkeypatch):
    def refused(**_):
        raise OSError(code, os.strerror(code), "draining")

    said = io.StringIO()
    monkeypatch.setattr(commands, "app", refused)
    monkeypatch.setattr(commands, "console", Console(file=said))
    with pytest.raises(SystemExit) as ended:
        commands.run_command()
    assert ended.value.code == 2
    assert said.getvalue() == f"error [Errno {code}] {os.strerror(code)}: 'draining'\n"


def test_an_error_of_another_file_keeps_its_traceback(monkeypatch):
    def broken(**_):
        raise OSError(errno.ENOTDIR, "Not a directory")

    monkeypatch.setattr(commands, "app", broken)
    with pytest.raises(NotADirectoryError):
        commands.run_command()
