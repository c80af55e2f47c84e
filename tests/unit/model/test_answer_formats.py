"""The formats of the families, in the very characters that their published chat templates write."""
# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others

import json

import pytest
from tests.fakes.family_answers import ANSWERS, J_EDIT, TEMPLATES, TOOLS

from ostinato.model.answer_reader import Reader, format_for

OPENINGS = {"deepseek-r1": "<think>\n"}  # what the prompt writes of the answer


def read(family, parts):
    format = format_for(TEMPLATES[family], ())
    reader = Reader(format, tools=TOOLS, turn="chatcmpl-3f:0", opening=OPENINGS.get(family, ""))
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    return (
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [(piece.call.name, json.loads(piece.call.arguments)) for piece in pieces if piece.call is not None],
    )


@pytest.mark.parametrize(("family", "sampled", "text", "reasoning", "calls"), ANSWERS)
def test_an_answer_is_read_as_its_family_writes_it(family, sampled, text, reasoning, calls):
    for parts in ([sampled], [*sampled]):
        found = read(family, parts)
        assert (found[0].strip(), found[1], found[2]) == (text, reasoning, calls)


@pytest.mark.parametrize(("family", "sampled", "text", "reasoning", "calls"), ANSWERS)
def test_a_call_is_seen_to_open_before_its_name_is_written(family, sampled, text, reasoning, calls):
    format = format_for(TEMPLATES[family], ())
    ends = [end for end in range(1, len(sampled) + 1) if format.opens_call(sampled[max(0, end - 64) : end])]
    assert bool(ends) == bool(calls)
    assert not calls or calls[0][0] in sampled[ends[0] - 1 :]


@pytest.mark.parametrize("family", ["hermes", "kimi-k2", "deepseek-v3.1", "mistral"])
def test_the_delimiters_of_other_families_are_text(family):
    others = [answer for other, answer, *_ in ANSWERS if other in ("qwen3-coder", "glm-4.5", "llama-3.1")]
    for answer in (answer for answer in others if "<think>" not in answer):
        assert read(family, [*answer]) == (answer, "", [])


@pytest.mark.parametrize(
    ("family", "control"),
    [
        ("qwen3", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        (
            "glm-4.5",
            ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>"],
        ),
        ("llama-3.1", ["<|python_tag|>"]),
        ("mistral", ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]),
        ("gpt-oss", ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]),
        (
            "kimi-k2",
            [
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ],
        ),
        ("deepseek-v3.1", ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]),
    ],
)
def test_control_tokens_that_delimit_stay_visible(family, control):
    assert format_for(TEMPLATES[family], [*control, "<|im_start|>"]).markers == {*control}


def test_a_string_that_closes_its_own_region_leaves_the_answer_as_it_was_sampled():
    sampled = '<tool_call>\n{"name": "edit", "arguments": {"path": "</tool_call>"}}\n</tool_call>'
    assert read("hermes", [*sampled]) == (sampled, "", [])


def test_a_string_may_open_a_region():
    for family in ("hermes", "qwen3"):
        sampled = '<tool_call>\n{"name": "edit", "arguments": {"path": "<tool_call> <think>"}}\n</tool_call>'
        assert read(family, [*sampled]) == ("", "", [("edit", {"path": "<tool_call> <think>"})])


def test_llama_is_known_without_its_python_tag():
    template = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert format_for(template, ()).calls == format_for(TEMPLATES["llama-3.1"], ()).calls


def test_the_ends_of_calls_and_finals_stay_visible():
    control = ["<|call|>", "<|return|>", "<|end|>"]
    assert format_for(TEMPLATES["gpt-oss"], control).markers == {*control}


# ---------------------------------------------------------------- templates that tokenizers declare

CODER = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
LLAMA = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|eot_id\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|eot_id\|>\s*"},
    },
}


def read_declared(declared, parts, ends=()):
    reader = Reader(format_for("", ends, declared, ends), tools=TOOLS, turn="chatcmpl-3f:0")
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    return "".join(piece.text for piece in pieces), [piece.call.name for piece in pieces if piece.call is not None]


def test_a_closing_tag_that_a_declared_body_keeps_is_no_junk():
    written = "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n{}</function>\n</tool_call>"
    assert read_declared(CODER, [*written.format("")]) == ("", ["edit"])
    assert read_declared(CODER, [*written.format("x")]) == (written.format("x"), [])


def test_the_end_token_closes_a_call_though_it_is_not_shown():
    for written in (f'{{"name": "edit", "parameters": {J_EDIT}}}', f'{{"name": "edit", "parameters": {J_EDIT}'):
        calls = ["edit"] if written.endswith("}}") else []
        assert read_declared(LLAMA, [*written], ["<|eot_id|>"]) == ("" if calls else written, calls)
        assert read_declared(LLAMA, [*written]) == (written, [])


def test_what_only_ends_the_text_is_no_marker():
    assert format_for("", ["<|im_start|>", "<|im_end|>"], CODER).markers == frozenset()


def test_a_declared_region_that_any_text_may_begin_is_not_followed():
    field = {"open_pattern": r"(?=[\s\S]*?</think>)", "close": "</think>"}
    declared = {**CODER, "fields": {**CODER["fields"], "reasoning_content": field}}
    assert format_for(TEMPLATES["qwen3.5"], (), declared) == format_for(TEMPLATES["qwen3.5"], ())
