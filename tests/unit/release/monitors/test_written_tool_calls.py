"""Calls as whoever watches finds them in texts, against what the gateway reads by each family's format."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.family_answers import ANSWERS

from ostinato.release.monitors.turn_text import MOST_CALLS, written_calls

WHOLE = [(family, sampled, calls) for family, sampled, _, _, calls in ANSWERS]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "{",
]
MARKS += [
    "to=functions.",
    "<|message|>",
    "<|call|>",
    "<|python_tag|>",
    '{"name": "a", "parameters": {}}',
    "}",
    "[",
    "]",
    "a",
    " ",
]


@pytest.mark.parametrize(("family", "sampled", "calls"), WHOLE)
def test_calls_of_every_family_are_found(family, sampled, calls):
    found, broken, rest = written_calls(sampled)
    assert broken == 0
    assert [call.name for call in found] == [name for name, _ in calls]
    for call, (_, arguments) in zip(found, calls, strict=True):
        told = {name: value if isinstance(value, str) else json.dumps(value) for name, value in call.arguments.items()}
        assert told == {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()
        }
    assert '"count"' not in rest


@pytest.mark.parametrize(("family", "sampled", "calls"), [each for each in WHOLE if each[2] and each[2][-1][1]])
def test_a_call_that_was_cut_is_broken(family, sampled, calls):
    """In the middle of the last call's arguments, as an answer that ran into its length is."""
    at = max(sampled.rfind("path"), sampled.rfind("count"))
    found, broken, _ = written_calls(sampled[: at + 2])
    assert broken == 1
    assert len(found) < len(calls)


@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 3}', "Use the ARGS list.", "a <tool_calls> b", "[1, 2]", "pass to=functions", "plain"],
)
def test_what_is_no_call_is_text(text):
    assert written_calls(text) == ([], 0, text)


@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30).map("".join))
def test_any_text_is_taken_apart(text):
    found, broken, rest = written_calls(text)
    assert len(rest) <= len(text)
    assert all(call.name and isinstance(call.arguments, dict) for call in found)
    assert broken <= MOST_CALLS


@pytest.mark.parametrize("mark", MARKS)
def test_no_text_costs_more_than_a_look_at_each_character(mark):
    began = time.process_time()
    written_calls(mark * (40_000 // len(mark)))
    written_calls("<tool_call><function=a>" + mark * (40_000 // len(mark)) + "</tool_call>")
    assert time.process_time() - began < 0.5
