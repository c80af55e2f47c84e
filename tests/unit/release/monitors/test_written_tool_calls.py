"""The calls of an answer as the monitors see them: which, the gateway says; their arguments are read from the text."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.family_answers import ANSWERS, TEMPLATES, answered
from tests.growth import grows_with_its_input

from ostinato.core.records import ParsedCall
from ostinato.release.monitors.turn_text import LONGEST, take_apart
from ostinato.testing.records import a_turn

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
    seen = take_apart(answered(sampled, family))
    assert (seen.knows_calls, seen.broken_calls) == (True, 0)
    assert [call.name for call in seen.calls] == [name for name, _ in calls]
    for call, (_, arguments) in zip(seen.calls, calls, strict=True):
        told = {name: value if isinstance(value, str) else json.dumps(value) for name, value in call.arguments.items()}
        assert told == {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()
        }
    assert '"count"' not in "\n".join(seen.prose)


@pytest.mark.parametrize(("family", "sampled", "calls"), [each for each in WHOLE if each[2] and each[2][-1][1]])
def test_a_call_that_was_cut_is_broken(family, sampled, calls):
    """In the middle of the last call's arguments, as an answer that ran into its length is."""
    at = max(sampled.rfind("path"), sampled.rfind("count"))
    seen = take_apart(answered(sampled[: at + 2], family))
    assert seen.broken_calls == 1
    assert len(seen.calls) < len(calls)


@pytest.mark.parametrize("family", ["qwen3-coder", "glm-4.5", "kimi-k2", "deepseek-r1", "deepseek-v3.1", "gpt-oss"])
def test_a_call_in_another_form_than_the_familys_is_broken(family):
    """The beginning of a call is there, and what must follow is not: the client gets it as text."""
    begun = next(sampled for name, sampled, calls in WHOLE if name == family and calls)
    begins = {"gpt-oss": " to=functions.", "kimi-k2": "<|tool_call_begin|>", "glm-4.5": "<tool_call>"}.get(family)
    begins = begins or ("<tool_call>" if "<tool_call>" in begun else "<\uff5ctool\u2581call\u2581begin\uff5c>")
    seen = take_apart(answered(f'Look. {begins}<{{"name": "edit", "arguments": {{}}}}', family))
    assert (seen.broken_calls, seen.calls) == (1, ())


@pytest.mark.parametrize("family", [*TEMPLATES])
@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 3}', "Use the ARGS list.", "a <tool_calls> b", "[1, 2]", "pass to=functions", "plain"],
)
def test_what_is_no_call_is_text(text, family):
    turn = answered(text, family)
    assert turn.calls == ()
    assert take_apart(turn).prose == (text,)


def test_calls_far_behind_are_counted_and_their_arguments_are_not_read():
    call = '<tool_call>{"name": "edit", "arguments": {"path": "a"}}</tool_call>'
    seen = take_apart(answered("x" * (LONGEST - 20) + call + call + "<tool_call>"))
    assert [(call.name, call.arguments) for call in seen.calls] == [("edit", {}), ("edit", {})]
    assert (seen.broken_calls, seen.prose) == (1, ("x" * (LONGEST - 20),))


@given(
    st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30).map("".join),
    st.lists(st.tuples(st.sampled_from(["", "edit", "a"]), st.integers(0, 60), st.integers(0, 60)), max_size=5),
)
@example("<arg_key>", [("edit", 0, 9), ("edit", 0, 9)])
def test_any_text_is_taken_apart(text, places):
    calls = tuple(ParsedCall(name=name, start=start, end=end) for name, start, end in places)
    seen = take_apart(replace(a_turn(), text=text, calls=calls))
    assert all(call.name and isinstance(call.arguments, dict) for call in seen.calls)
    assert seen.broken_calls + len(seen.calls) == len(calls)


@pytest.mark.parametrize("mark", MARKS)
def test_no_text_costs_more_than_a_look_at_each_character(mark):
    def answers(length):
        turn = replace(a_turn(), text=mark * (length // len(mark)))
        whole = ParsedCall(name="a", start=0, end=len(turn.text))
        pairs = tuple(ParsedCall(name="a", start=at, end=at + 2) for at in range(0, length, 2))
        return [replace(turn, calls=calls) for calls in ((whole,), pairs, (whole,) * (length // 40))]

    assert grows_with_its_input(lambda turns: [take_apart(turn) for turn in turns], answers(5_000), answers(40_000))
