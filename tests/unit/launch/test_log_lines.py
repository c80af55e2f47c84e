"""What `ostinato log` prints is one line a row and no command to a terminal, whatever names a row carries."""

from dataclasses import replace

import pytest

from ostinato.core.records import Quarantine
from ostinato.launch.commands.log import line
from ostinato.testing.records import a_signal, a_turn

FORGED = "ann\nsignal     chatcmpl-9:0  rejected=1\r\x1b[2J\x9b1A\u2028\u202e"


@pytest.mark.parametrize(
    "row",
    [
        a_turn(user=FORGED),
        a_turn(FORGED),
        replace(a_turn(), text=FORGED),
        a_signal(a_turn(), id=FORGED),
        Quarantine(turn="t:0", reason=f"reward_failed: ValueError: {FORGED}", at=1.0),
    ],
)
def test_no_name_breaks_its_line(row):
    said = line(row)
    assert said.isprintable(), said
    assert "\\x1b[2J" in said, "it is shown, spelled out"
    assert "ann" in line(a_turn(user="ann"))


def test_letters_of_every_script_stay_as_they_are():
    assert "Jürgen 陳 🎻" in line(a_turn(user="Jürgen 陳 🎻"))
