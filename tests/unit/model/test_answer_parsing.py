"""What a model said, read while it is sampled, in the way of each family."""

import json
from functools import cache

import pytest
from tests.grids import covering
from tests.growth import TIMES, grows_with_its_input

from ostinato.core.conversation import Tool, call_id
from ostinato.core.errors import BadConfig
from ostinato.core.records import MAX_PARSED_CALLS, ParsedCall
from ostinato.model.answer_reader import HERMES, Reader, format_for

TOOLS = [
    Tool(
        name="edit",
        parameters={
            "properties": {
                "path": {"type": "string"},
                "count": {"type": "integer"},
                "deep": {"type": ["object", "null"]},
                "all": {"type": "boolean"},
            }
        },
    ),
    Tool(name="read"),
]
NASTY = {
    "path": 'a "quoted" \\ path\n<b> {brace} é 漢 \u2028',
    "count": 3,
    "deep": {"list": [1, 2.5, None], "text": "]}"},
    "all": True,
}


def as_json(name, values, key="arguments"):
    return json.dumps({"name": name, key: values}, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls)


def qwen_coder(*calls):
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in values.items())
        + "</function>\n</tool_call>"
        for name, values in calls
    )


def glm(*calls):
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in values.items())
        + "</tool_call>"
        for name, values in calls
    )


def llama(call):
    return as_json(*call, key="parameters")


def mistral(*calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": v} for n, v in calls], ensure_ascii=False)


def mistral_by_name(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values, ensure_ascii=False)}" for name, values in calls)


def harmony(call):
    name, values = call
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + json.dumps(values, ensure_ascii=False)


def kimi(*calls):
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(values, ensure_ascii=False)}<|tool_call_end|>"
        for i, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def deepseek(*calls):
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"  # noqa: RUF001  # as the model writes them
        f"{json.dumps(values, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"  # noqa: RUF001  # the same
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"  # noqa: RUF001  # the same


def deepseek_later(*calls):
    each = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"  # noqa: RUF001  # the same
        f"{json.dumps(values, ensure_ascii=False)}<｜tool▁call▁end｜>"  # noqa: RUF001  # the same
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"  # noqa: RUF001  # the same


_THINKS = "{{ '<think>' }}"
FAMILIES = {
    "hermes": ("<tool_call>" + _THINKS, hermes),
    "qwen coder": ("<tool_call> <function=" + _THINKS, qwen_coder),
    "glm": ("<tool_call> <arg_key>" + _THINKS, glm),
    "llama": ("<|python_tag|>", llama),
    "mistral": ("[TOOL_CALLS]", mistral),
    "mistral by name": ("[TOOL_CALLS]", mistral_by_name),
    "harmony": ("<|channel|> <|message|>", harmony),
    "kimi": ("<|tool_call_argument_begin|>", kimi),
    "deepseek": ("<｜tool▁calls▁begin｜> ```json" + _THINKS, deepseek),  # noqa: RUF001  # the same
    "deepseek later": ("<｜tool▁calls▁begin｜>" + _THINKS, deepseek_later),  # noqa: RUF001  # the same
}
ONE_AT_A_TIME = ("llama", "harmony")


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def read(format, parts, *, tools=TOOLS, opening=""):
    """Text, reasoning and (name, arguments) of what was fed in these parts."""
    reader = Reader(format, tools=tools, turn="chatcmpl-3f:0", opening=opening)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    calls = [piece.call for piece in pieces if piece.call is not None]
    assert [call.id for call in calls] == [call_id("chatcmpl-3f:0", i) for i in range(len(calls))]
    assert all(bool(piece.text) + bool(piece.reasoning) + bool(piece.call) == 1 for piece in pieces)
    return (
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@cache
def format_of(name):
    return format_for(FAMILIES[name][0], ())


def test_nasty_arguments_come_back_as_they_were_written(family):
    written = FAMILIES[family][1](("edit", NASTY))
    assert read(format_of(family), [written]) == ("", "", [("edit", NASTY)])


def test_every_cut_of_the_stream_reads_the_same(family):
    write = FAMILIES[family][1]
    calls = [("edit", NASTY), ("read", {"path": "b.py"})][: 1 if family in ONE_AT_A_TIME else 2]
    text = "Let me look." if family != "harmony" else "<|channel|>final<|message|>Let me look.<|end|>"
    whole = text + write(*calls)
    expected = ("Let me look.", "", calls)
    assert read(format_of(family), [whole]) == expected
    assert read(format_of(family), [*whole]) == expected
    for cut in range(1, len(whole)):
        assert read(format_of(family), [whole[:cut], whole[cut:]]) == expected


def test_an_answer_that_ends_within_a_call_is_text(family):
    whole = FAMILIES[family][1](("edit", NASTY))
    for end in range(1, len(whole) - 40):
        text, _, calls = read(format_of(family), [whole[:end]])
        assert calls == []
        assert text == whole[:end]


@pytest.mark.parametrize("name", ["hermes", "qwen coder", "glm", "deepseek"])
def test_reasoning_is_told_from_the_answer(name):
    answer = f"<think>\nWhy not?\n\nYes.\n</think>\n\nHere:\n\n{FAMILIES[name][1](('read', {'path': 'a'}))}\n"
    for parts in ([answer], [*answer]):
        assert read(format_of(name), parts) == ("Here:", "Why not?\n\nYes.", [("read", {"path": "a"})])
    begun = answer.removeprefix("<think>\n")
    assert read(format_of(name), [*begun], opening="<think>\n")[1] == "Why not?\n\nYes."
    assert read(format_of(name), [answer], tools=())[1] == "Why not?\n\nYes."


def test_harmony_has_a_channel_for_each():
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read(format_of("harmony"), [*said]) == ("Yes.", "Hm.", [])


BROKEN = [
    "<tool_call>\n{'name': 'edit'}\n</tool_call>",
    '<tool_call>{"name": "edit"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "edit", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "edit", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "edit", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>" + "[" * 20_000 + "</tool_call>",
    "<tool_call>\n\n",
    "</tool_call> <tool_call",
    " \n text with space around \n",
]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_cannot_be_read_is_shown_as_it_was_sampled(broken):
    for parts in ([broken], [*broken]):
        assert read(HERMES, parts) == (broken, "", [])
    call = hermes(("read", {"path": "a"}))
    text, _, calls = read(HERMES, [broken + call])
    assert (text, calls) == (broken.rstrip(), [("read", {"path": "a"})]) or (text, calls) == (broken + call, [])


@pytest.mark.parametrize("junk", ["x", "<parameter=a>1</parameter", "<function=b>"])
def test_junk_between_parameters_is_no_call(junk):
    written = qwen_coder(("edit", {"path": "a"})).replace("</function>", f"{junk}</function>")
    assert read(format_of("qwen coder"), [written]) == (written, "", [])


def test_half_a_surrogate_pair_stays_an_escape():
    reader = Reader(HERMES, tools=TOOLS, turn="chatcmpl-3f:0")
    written = '<tool_call>{"name": "edit", "arguments": {"path": "\\ud800é"}}</tool_call>'
    (piece,) = [*reader.feed(written), *reader.finish()]
    assert piece.call.arguments.encode() == b'{"path": "\\ud800\\u00e9"}'


def test_without_tools_a_call_is_text():
    written = "Look: " + hermes(("read", {"path": "a"}))
    assert read(HERMES, [*written], tools=()) == (written, "", [])


@pytest.mark.parametrize("name", ["qwen coder", "kimi"])
def test_of_a_mark_that_is_repeated_the_first_are_noted(name):
    format = format_of(name)
    (mark,) = format.marks
    reader = Reader(format, tools=TOOLS, turn="chatcmpl-3f:0")
    for _ in range(4):
        reader.feed(mark * 1_000)
    reader.finish()
    places = range(0, MAX_PARSED_CALLS * len(mark), len(mark))
    assert reader.parsed_calls() == [ParsedCall(name="", start=at, end=at + len(mark)) for at in places]


def test_a_json_format_keeps_the_types_that_the_model_wrote():
    assert read(HERMES, [hermes(("edit", {"count": "3", "path": 4}))])[2] == [("edit", {"count": "3", "path": 4})]


@pytest.mark.parametrize(
    ("written", "read_as"),
    [("3", 3), ("3.0", 3), ("three", "three"), ("true", "true"), ("3.5", "3.5"), ("", "")],
)
def test_a_schema_gives_types_where_the_format_has_none(written, read_as):
    assert read(format_of("glm"), [glm(("edit", {"count": written}))])[2] == [("edit", {"count": read_as})]


def test_the_markers_are_the_control_tokens_among_the_delimiters():
    control = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|fim_middle|>"]
    assert format_for(FAMILIES["hermes"][0], control).markers == {*control[:4]}
    assert "<|channel|>" in format_for("<|channel|> <|message|>", ["<|channel|>", "<|call|>"]).markers


def test_what_the_tokenizer_declares_comes_first():
    declared = {
        "start_anchor": "<bot>",
        "fields": {"content": {}, "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True}},
    }
    format = format_for("<tool_call>", ["<<"], declared)
    assert read(format, ["a<<" + as_json("read", {}) + ">>"]) == ("a", "", [("read", {})])
    assert format.markers == {"<<"}
    with pytest.raises(BadConfig, match="response_template"):
        format_for("", (), {"fields": {}})


LONG = {
    "text": ("", "a", 64_000),
    "markers": ("", "<tool_call>", 10_000),
    "unclosed": ("<tool_call>", "a", 64_000),
    "beginnings": ("", "<", 64_000),
    "space": ("", "\n", 64_000),
    "braces": ("", "{", 64_000),
}


@pytest.mark.parametrize(("family", "long"), covering([*FAMILIES], [*LONG], diagonals=2))
def test_a_long_answer_takes_time_as_it_is_long(family, long):
    start, piece, count = LONG[long]

    def parse(answer):
        text, _, calls = read(format_of(family), [answer[i : i + 4] for i in range(0, len(answer), 4)])
        assert (text, calls) == (answer, [])

    assert grows_with_its_input(parse, start + piece * (count // TIMES), start + piece * count)


@pytest.mark.parametrize(
    ("name", "start", "piece", "count", "end"),
    [
        ("qwen coder", "<function=f>", "<parameter=a>", 5000, "</function>"),
        ("glm", "f", "<arg_key>a</arg_key><arg_value>", 3000, ""),
        ("glm", "f<arg_key>", "<arg_key>a", 8000, ""),
    ],
)
def test_a_hostile_body_takes_time_as_it_is_long(name, start, piece, count, end):
    def parse(times):
        written = f"<tool_call>{start}{piece * times}{end}</tool_call>"
        assert read(format_of(name), [written]) == (written, "", [])

    assert grows_with_its_input(parse, count // TIMES, count)
