"""Whatever is sampled, and however it arrives: calls come back as they were written, and nothing that is no call is lost."""
# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others

import json
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.conversation import Tool
from ostinato.core.records import MAX_PARSED_CALLS
from ostinato.model.answer_reader import Reader, format_for

STRING = {"type": "string"}
TOOLS = [Tool(name="edit", parameters={"properties": {"a": STRING, "b": STRING}})]
FAMILIES = {  # what tells the chat template, and around a call's JSON
    "hermes": ("<tool_call> <think>", '<tool_call>\n{"name": "edit", "arguments": ', "}\n</tool_call>"),
    "llama": ("<|python_tag|>", '{"name": "edit", "parameters": ', "}"),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "edit", "arguments": ', "}]"),
    "mistral by name": ("[TOOL_CALLS]", "[TOOL_CALLS]edit[ARGS]", ""),
    "harmony": (
        "<|channel|> <|message|>",
        "<|channel|>commentary to=functions.edit <|constrain|>json<|message|>",
        "<|call|>",
    ),
    "kimi": (
        "<|tool_call_argument_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜> ```json <think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek later": (
        "<｜tool▁calls▁begin｜> <think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}
TAGGED = {  # what tells the chat template, around a call, and around a key and a value
    "qwen coder": (
        "<tool_call> <function= <think>",
        ("<tool_call>\n<function=edit>\n", "</function>\n</tool_call>"),
        ("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm": (
        "<tool_call> <arg_key> <think>",
        ("<tool_call>edit\n", "</tool_call>"),
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
}
PARTS = [
    '"',
    "\\",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    "|",
    "é",
    "漢",
    "\u2028",
    "😀",
    "<tool_call>",
    "<think>",
    "x",
    " ",
]
STRINGS = st.text(max_size=8) | st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
CUTS = st.lists(st.integers(0, 400), max_size=12)
TEXTS = st.lists(st.sampled_from([part for part in PARTS if "<" not in part and "{" not in part]), max_size=6).map(
    "".join
)


def pieces_of(template, sampled, cuts, tools=TOOLS):
    """(kind, value) of each piece, neighbours of one kind joined."""
    return read(template, sampled, cuts, tools)[0]


def read(template, sampled, cuts, tools=TOOLS):
    """The pieces of `pieces_of`, and the calls with their places."""
    reader = Reader(format_for(template, ()), tools=tools, turn="chatcmpl-3f:0")
    ends = [*sorted(min(cut, len(sampled)) for cut in cuts), len(sampled)]
    parts = [sampled[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    joined = []
    for piece in [piece for part in parts for piece in reader.feed(part)] + reader.finish():
        kind = "call" if piece.call is not None else "text" if piece.text else "reasoning"
        if joined and kind != "call" and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + piece.text + piece.reasoning)
        else:
            joined.append((kind, piece.call or piece.text + piece.reasoning))
    return joined, reader.parsed_calls()


def tagged(family, values):
    template, (head, tail), (key, between, end) = TAGGED[family]
    return template, head + "".join(f"{key}{name}{between}{value}{end}" for name, value in values.items()) + tail


@given(st.sampled_from([*FAMILIES]), st.dictionaries(STRINGS, VALUES, max_size=3), TEXTS, CUTS)
@settings(deadline=None, max_examples=200)
def test_any_arguments_come_back_wherever_the_stream_is_cut(family, arguments, before, cuts):
    template, head, tail = FAMILIES[family]
    sampled = before + head + json.dumps(arguments, ensure_ascii=False) + tail
    *texts, (kind, call) = pieces_of(template, sampled, cuts)
    assert kind == "call"
    assert (call.name, json.loads(call.arguments)) == ("edit", arguments)
    assert "".join(text for _, text in texts) == before.rstrip()


@given(
    st.sampled_from([*TAGGED]),
    st.dictionaries(st.sampled_from(["a", "b"]), STRINGS),
    CUTS,
)
@settings(deadline=None, max_examples=200)
def test_any_strings_come_back_between_tags(family, values, cuts):
    template, sampled = tagged(family, values)
    ((kind, call),) = pieces_of(template, sampled, cuts)
    assert kind == "call"
    assert json.loads(call.arguments) == values


@st.composite
def soups(draw):
    """A family, and its delimiters, whole calls and halves of them in any order."""
    family = draw(st.sampled_from([*FAMILIES, *TAGGED]))
    if family in TAGGED:
        template, call = tagged(family, {"a": "1"})
        marks = [*TAGGED[family][1], *TAGGED[family][2]]
    else:
        template, head, tail = FAMILIES[family]
        call = head + "{}" + tail
        marks = [head, tail, "{}", '{"a": '] if tail else [head, "{}"]
    half = len(call) // 2
    stuff = st.sampled_from([*marks, call, call[:half], call[half:], *PARTS, "<think>", "</think>"])
    return family, template, "".join(draw(st.lists(stuff, max_size=12)))


@given(soups(), CUTS)
@settings(deadline=None, max_examples=400)
def test_where_an_answer_is_cut_changes_nothing(soup, cuts):
    _, template, sampled = soup
    assert pieces_of(template, sampled, cuts) == pieces_of(template, sampled, [])


@given(soups(), CUTS)
@settings(deadline=None, max_examples=400)
def test_each_call_that_was_returned_has_its_place_and_malformed_ones_were_returned_as_text(soup, cuts):
    _, template, sampled = soup
    pieces, calls = read(template, sampled, cuts)
    assert calls == read(template, sampled, [])[1], "where an answer is cut changes nothing"
    assert [call.name for call in calls if call.name] == [call.name for kind, call in pieces if kind == "call"]
    places = sorted({(call.start, call.end) for call in calls})
    assert [(call.start, call.end) for call in calls] == sorted((call.start, call.end) for call in calls)
    assert all(one[1] <= two[0] for one, two in pairwise(places))
    assert all(0 <= start < end <= len(sampled) for start, end in places)
    text = "".join(text for kind, text in pieces if kind != "call")
    assert all(sampled[call.start : call.end].strip() in text for call in calls if not call.name)


@given(
    st.lists(st.tuples(st.sampled_from(["whole", "malformed"]), st.integers(1, 400)), max_size=4),
    st.booleans(),
    CUTS,
)
@settings(deadline=None, max_examples=60)
def test_of_many_calls_the_first_are_noted_in_order(runs, is_cut, cuts):
    """And all are returned, however many."""
    template, head, tail = FAMILIES["hermes"]
    written = {"whole": head + "{}" + tail, "malformed": "<tool_call>{</tool_call>"}
    kinds = [kind for kind, count in runs for _ in range(count)] + ["whole"] * 3
    sampled = "".join(written[kind] for kind in kinds) + ("<tool_call>{" if is_cut else "")
    pieces, calls = read(template, sampled, cuts)
    names = ["edit" if kind == "whole" else "" for kind in kinds] + [""] * is_cut
    assert [call.name for call in calls] == names[:MAX_PARSED_CALLS]
    places = [0, *accumulate(len(written[kind]) for kind in kinds)]
    assert [call.start for call in calls] == places[: len(names)][:MAX_PARSED_CALLS]
    assert sum(kind == "call" for kind, _ in pieces) == kinds.count("whole")


@given(soups())
@settings(deadline=None, max_examples=400)
def test_what_is_no_call_and_no_reasoning_comes_as_it_was_sampled(soup):
    _, template, sampled = soup
    pieces = pieces_of(template, sampled, range(len(sampled)))
    if "<think>" not in sampled and all(kind == "text" for kind, _ in pieces):
        assert "".join(text for _, text in pieces) == sampled


@given(soups())
@settings(deadline=None, max_examples=200)
def test_without_tools_nothing_is_a_call_and_nothing_is_lost(soup):
    _, template, sampled = soup
    pieces, calls = read(template, sampled.replace("<think>", ""), [], tools=())
    assert calls == []
    assert pieces in ([], [("text", sampled.replace("<think>", ""))])
