"""What commands print of texts that others wrote: a terminal obeys none of it."""

import io

import pytest
from rich.console import Console

from ostinato.launch.views.screen import say


def said(words):
    out = io.StringIO()
    say(Console(file=out, force_terminal=True, color_system=None, width=20), words)
    return out.getvalue()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\x9b2Jb", r"a\x9b2Jb"),
        ("paid\rowed", r"paid\rowed"),
        ("a\x08b\x7f\0", r"a\x08b\x7f\x00"),
        ("user\u202egpj.exe", r"user\u202egpj.exe"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_python_writes_it(words, shown):
    assert said(words) == f"{shown}\n"


def test_lines_markup_and_letters_stay_as_they_are():
    assert said("one\n\ntwo [bold]é 字[/]") == "one\n\ntwo [bold]é 字[/]\n"
    assert (
        said("a line that is longer than the terminal is wide") == "a line that is longer than the terminal is wide\n"
    )
