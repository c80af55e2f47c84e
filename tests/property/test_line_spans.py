"""The lines of any call of any answer are found, and each token belongs to the line that it begins in."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.family_answers import TEMPLATES

from ostinato.core.conversation import Tool
from ostinato.core.errors import BadRequest
from ostinato.core.line_survival import line_spans
from ostinato.core.records import LineValues, Reward
from ostinato.model.answer_reader import Reader, format_for
from ostinato.reward.line_credit import discounted, token_starts, turn_lines
from ostinato.testing.records import a_turn

TOOLS = [Tool(name="write", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})]
PIECES = [
    "\n",
    "\n",
    "\\n",
    '"',
    "\\",
    '"content": "',
    "{",
    "}]",
    "\t",
    "é",
    "🙂",
    "\u2028",
    "\r",
    "x = 1",
    "    y",
    "\x0b",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join)
calls = st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=3)


def lines_in(text):
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def arguments(text, first):
    pairs = [("path", 'a "content": "b"\nc'), ("content", text)]
    return dict(pairs[::-1] if first else pairs)


def hermes(found, ascii_only):
    each = [json.dumps({"name": "write", "arguments": arguments(*call)}, ensure_ascii=ascii_only) for call in found]
    return "Look: \n" + "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in each)


def mistral(found, ascii_only):
    each = [{"name": "write", "arguments": arguments(*call)} for call in found]
    return "[TOOL_CALLS] " + json.dumps(each, ensure_ascii=ascii_only)


def answered(text, family="hermes"):
    reader = Reader(format_for(TEMPLATES[family], ()), tools=TOOLS, turn="chatcmpl-1:0")
    pieces = [*reader.feed(text), *reader.finish()]
    turn = replace(a_turn("chatcmpl-1:0"), text=text, calls=tuple(reader.parsed_calls()))
    return turn, [piece.call for piece in pieces if piece.call is not None]


def check(turn, made, unescape):
    for number, call in enumerate(made):
        for argument, value in json.loads(call.arguments).items():
            lines = lines_in(value)
            spans = line_spans(turn, number, argument, len(lines))
            said = [unescape(turn.text[start:end]) for start, end in spans]
            assert [one.removesuffix("\n") for one in said] == lines
            assert all(one.endswith("\n") for one in said[:-1])
            for wrong in (len(lines) + 1, len(lines) - 1):
                with pytest.raises(BadRequest):
                    line_spans(turn, number, argument, wrong)
    with pytest.raises(BadRequest, match="none of number"):
        line_spans(turn, len(made), "content", 1)


@given(calls, st.booleans(), st.sampled_from([hermes, mistral]))
def test_lines_of_calls_in_json(found, ascii_only, written):
    turn, made = answered(written(found, ascii_only), "hermes" if written is hermes else "mistral")
    assert [json.loads(call.arguments)["content"] for call in made] == [text for text, _ in found]
    check(turn, made, lambda part: json.loads(f'"{part}"', strict=False))


@given(
    st.lists(texts.filter(lambda text: text == text.strip()), min_size=1, max_size=2),
    st.sampled_from(["qwen3-coder", "glm-4.5"]),
)
def test_lines_of_calls_in_tags(found, family):
    if family == "glm-4.5":
        body = "".join(
            f"<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
            for text in found
        )
    else:
        body = "".join(
            f"<tool_call>\n<function=write>\n<parameter=content>\n{text}\n</parameter>\n</function>\n</tool_call>\n"
            for text in found
        )
    turn, made = answered(body, family)
    if len(made) == len(found):
        check(turn, made, str)


@given(calls, st.booleans(), st.data())
def test_a_token_belongs_to_the_line_that_it_begins_in(found, ascii_only, data):
    turn, made = answered(hermes(found, ascii_only))
    raw = turn.text.encode()
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=60))})
    pieces = [raw[a:b] for a, b in pairwise(cuts)]  # cuts may split a character or an escape
    turn = replace(turn, sampled_ids=tuple(range(len(pieces))))
    starts = token_starts(turn, pieces.__getitem__)
    assert starts == [len(raw[:cut].decode(errors="ignore")) for cut in cuts[:-1]]
    values = []
    for number, call in enumerate(made):
        size = len(lines_in(json.loads(call.arguments)["content"]))
        runs = tuple((line, line, float(data.draw(st.integers(-3, 3)))) for line in range(1, size + 1))
        values.append(LineValues(call=number, argument="content", lines=size, runs=runs))
    reward = Reward(turn=turn.id, value=0.0, function="f@1", signals=(), at=0.0, lines=tuple(values))
    known = dict(turn_lines(turn, reward, pieces.__getitem__).known)
    expected = {
        token: discounted(text)[line]
        for text in values
        for line, (start, end) in enumerate(line_spans(turn, text.call, "content", text.lines), 1)
        for token, at in enumerate(starts)
        if start <= at < end
    }
    assert known == expected
    assert turn_lines(turn, reward, lambda token: b"?").known == (), "tokens that do not spell the text are left alone"
