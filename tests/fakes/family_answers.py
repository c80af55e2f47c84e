# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others
"""Answers of models of all families, character for character as their published chat templates write them."""

import json
from dataclasses import replace
from functools import cache

from ostinato.core.conversation import Tool
from ostinato.core.records import Turn
from ostinato.model.answer_reader import Format, Reader, format_for
from ostinato.testing.records import a_turn

SCHEMA = {"properties": {"path": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}}}
TOOLS = [Tool(name="edit", parameters=SCHEMA), Tool(name="read", parameters=SCHEMA)]
EDIT = ("edit", {"path": "a", "count": 3})
READ = ("read", {"path": "b"})
J_EDIT, J_READ = json.dumps(EDIT[1]), json.dumps(READ[1])

TEMPLATES = {  # the marks by which each family's chat template is recognised
    "hermes": "<tool_call>",
    "qwen3": "<tool_call> <think>",
    "qwen3-coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "qwen3.5": "<tool_call>\n<function=example_function_name> <think>",
    "glm-4.5": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think>",
    "llama-3.1": '{"name": function name, "parameters": dictionary} <|python_tag|>',
    "mistral": "[TOOL_CALLS]",
    "gpt-oss": "<|channel|>analysis<|message|>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>",
    "deepseek-r1": "<｜tool▁calls▁begin｜>\n```json\n <think>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁sep｜> <think>",
}
ANSWERS = [  # family, sampled text, message text, reasoning, calls
    (
        "hermes",  # the arguments first, and a space behind the region
        f'\n<tool_call>\n{{ "arguments": {J_EDIT}, "name": "edit"}}\n</tool_call> ',
        "",
        "",
        [EDIT],
    ),
    (
        "qwen3",
        f'<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{{"name": "edit", "arguments": {J_EDIT}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "read", "arguments": {J_READ}}}\n</tool_call>',
        "Look.",
        "Hm.",
        [EDIT, READ],
    ),
    ("qwen3", "<think>\n\n</think>\n\nYes.", "Yes.", "", []),
    (
        "qwen3-coder",
        "Look.\n\n<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=read>\n<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>",
        "Look.",
        "",
        [EDIT, READ],
    ),
    (
        "qwen3.5",
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=read>\n</function>\n</tool_call>",
        "",
        "Hm.",
        [("read", {})],
    ),
    (
        "glm-4.5",
        "\n<think>Hm.</think>\nLook.\n<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Look.",
        "Hm.",
        [EDIT],
    ),
    (
        "glm-4.5",  # as GLM 4.7 and 5 write it, on one line
        "<tool_call>edit<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>count</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>read<arg_key>path</arg_key><arg_value>b</arg_value></tool_call>",
        "",
        "",
        [EDIT, READ],
    ),
    ("llama-3.1", f'{{"name": "edit", "parameters": {J_EDIT}}}', "", "", [EDIT]),
    ("llama-3.1", f'<|python_tag|>{{"name": "edit", "parameters": {J_EDIT}}}', "", "", [EDIT]),
    (
        "mistral",  # the template of Nemo adds an id; Small 3.1 puts a space before the list
        f'[TOOL_CALLS] [{{"name": "edit", "arguments": {J_EDIT}, "id": "abcdefgh0"}}, {{"name": "read", "arguments": {J_READ}}}]',
        "",
        "",
        [EDIT, READ],
    ),
    ("mistral", f"Look.[TOOL_CALLS]edit[ARGS]{J_EDIT}[TOOL_CALLS]read[ARGS]{J_READ}", "Look.", "", [EDIT, READ]),
    (
        "mistral",
        f"[TOOL_CALLS]edit[CALL_ID]abcdefgh0[ARGS]{J_EDIT}[TOOL_CALLS]read[CALL_ID]abcdefgh1[ARGS]{J_READ}",
        "",
        "",
        [EDIT, READ],
    ),
    (
        "gpt-oss",  # as its template writes a call, and as the model does
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.edit<|channel|>commentary json<|message|>"
        + J_EDIT,
        "",
        "Hm.",
        [EDIT],
    ),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>Look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{J_EDIT}<|call|>",
        "Look.",
        "",
        [EDIT],
    ),
    ("gpt-oss", "<|channel|>final<|message|>Yes.<|return|>", "Yes.", "", []),
    (
        "kimi-k2",
        "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
        f"{J_EDIT}<|tool_call_end|><|tool_call_begin|>functions.read:1<|tool_call_argument_begin|>{J_READ}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Look.",
        "",
        [EDIT, READ],
    ),
    (
        "deepseek-r1",
        f"Hm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n{J_EDIT}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{J_READ}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "Hm.",
        [EDIT, READ],
    ),
    (
        "deepseek-v3.1",
        f"Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{J_EDIT}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>read<｜tool▁sep｜>{J_READ}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Look.",
        "",
        [EDIT, READ],
    ),
]


@cache
def _format(family: str) -> Format:
    return format_for(TEMPLATES[family], ())


def answered(text: str, family: str = "hermes", **fields: object) -> Turn:
    """A turn with this text, whose calls are parsed as the gateway does for a model of this family."""
    reader = Reader(_format(family), tools=TOOLS, turn="t:0")
    reader.feed(text)
    reader.finish()
    return replace(a_turn(**fields), text=text, calls=tuple(reader.parsed_calls()))
