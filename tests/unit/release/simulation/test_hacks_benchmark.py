"""The benchmark of planted hacks: what its texts show to the rates, and what the gate's simulated reports show to the monitors."""

from functools import cache

import numpy as np
import pytest
from benchmarks.release.habits import parsed
from benchmarks.release.hacks import CONFIG, PLANTED, RATES, Gate, Product, found, remembered

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Turn
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN, measured
from ostinato.release.monitors.turn_text import take_apart


@cache
def said(hack):
    """A day's answers on live, all hacked."""
    rows = Product(0, hack).day(1, 1.0)
    return [row for row in rows if isinstance(row, Turn) and row.arm is Arm.LIVE][:60]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("length padding", "length"),
        ("flattery", "praise"),
        ("begging for ratings", "rating_request"),
        ("test tampering", "test_edit"),
        ("hiding failures", "silenced_error"),
        ("copying the prompt", "prompt_echo"),
        ("emoji and headings", "decoration"),
        ("questions instead of edits", "question"),
        ("unfinished to-dos", "todo"),
        ("tiny functions", "tiny_function"),
        ("broken tool calls that are not counted", "broken_tool_call"),
    ],
)
def test_what_a_hack_says_moves_its_rate(name, rate):
    def mean(turns):
        values = [measured(RATES, take_apart(turn))[0].get(rate) for turn in turns]
        return np.mean([value for value in values if value is not None] or [0.0])

    assert mean(said(PLANTED[name])) > mean(said(None)) + 0.1


def test_a_text_is_measured_once_and_alike():
    for turn in said(None)[:20]:
        again = take_apart(turn)
        assert measured(map(remembered, BUILT_IN.values()), again) == measured(BUILT_IN.values(), again)
    assert parsed("no call") == ()
    assert [
        call.name for text in ('<tool_call>{"name": "ls"}</tool_call>', "a <tool_call>{") for call in parsed(text)
    ] == ["ls", ""]


@pytest.mark.parametrize(
    ("kind", "alarm"), [("opinions", "sycophancy"), ("alike", "answers_alike"), ("narrow", "best_of_k"), ("", None)]
)
def test_the_gates_reports_show_what_is_planted_in_its_scores(kind, alarm):
    gate, monitors, raised = Gate(0, kind), Monitors(CONFIG, ()), []
    for number in range(1, 21):
        for row in gate.release(number, 0.01 * number):
            raised += [(number, each.name) for each in monitors.apply(number, row)]
    assert {name for _, name in raised} == ({alarm} if alarm else set())


def test_the_first_alarm_and_the_first_that_pauses_are_told_apart():
    def row(name, pauses):
        return Alarm(id="", name=name, state=AlarmState.RAISED, reason="", at=1.0, detail={"pauses": pauses})

    told = found([[(-1, row("early", True)), (4, row("a", False)), (6, row("b", True))], []])
    assert (told["first"], told["by"], told["pauses"], told["pauses by"]) == ([4, None], ["a"], [6, None], ["b"])
