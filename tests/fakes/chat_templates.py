"""Chat templates in the style of well-known models, on the tiny tokenizer with these models' control tokens."""

import json
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from ostinato.testing.tiny import tiny_model

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {%- set function = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
THINKING = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n"
)
LLAMA = """
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + function.name + '", "parameters": ' + function.arguments | tojson + '}<|eom_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('no id') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
HARMONY = """
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}
        {%- for name, spec in tool.function.parameters.properties.items() %}
            {{- name + ': ' + (spec.type if spec.type == 'string' else spec | tojson) + ',\\n' }}
        {%- endfor %}
        {{- '}) => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- set ns.name = call.name %}
            {{- '<|start|>assistant' }}
            {%- if message.reasoning_content %}
                {{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|><|start|>assistant' }}
            {%- endif %}
            {{- '<|channel|>commentary to=functions.' + call.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
            {%- set ns.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('Message has tool role, but there was no previous call!') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
XML = """
{%- for tool in tools or [] %}
    {{- '<|im_start|>system\\n<tool>' + tool.function.name + ': ' + tool.function.description }}
    {%- for key in tool.function.parameters %}
        {{- '\\n<' ~ key ~ '>' ~ tool.function.parameters[key] ~ '</' ~ key ~ '>' }}
    {%- endfor %}
    {{- '</tool><|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for tool_call in message.tool_calls %}
        {{- '<function=' + tool_call.function.name + '>' }}
        {%- for name, value in tool_call.function.arguments | items %}{{- name ~ '=' ~ value }}{%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Style:
    """A template, the tokens it needs beyond ChatML's, and an assistant's call in its format (`called`), without its end token `end`."""

    template: str
    tokens: tuple[str, ...] = ()
    stops: tuple[str, ...] = ("<|im_end|>",)
    called: str = ""
    end: str = "<|im_end|>"


_CALLED = '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'
STYLES = {
    "qwen": Style(QWEN, ("<tool_call>", "</tool_call>", "<think>", "</think>"), called=_CALLED),
    "thinking": Style(
        THINKING,
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        called=f"Why not?\n</think>\n\n{_CALLED}",
    ),
    "llama": Style(
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        stops=("<|eot_id|>", "<|eom_id|>"),
        called='{"name": "read", "parameters": {"path": "calc.py"}}',
        end="<|eom_id|>",
    ),
    "mistral": Style(
        MISTRAL,
        (
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        called='[TOOL_CALLS] [{"name": "read", "arguments": {"path": "calc.py"}, "id": "abcdefghi"}]',
    ),
    "harmony": Style(
        HARMONY,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        stops=("<|return|>", "<|call|>"),
        called='<|channel|>commentary to=functions.read<|message|>{"path": "calc.py"}',
        end="<|call|>",
    ),
    "xml": Style(XML, called="<function=read>path=calc.py"),
    "hermes text": Style("", called=_CALLED),
}


def styled_model(path, style):
    """A tiny model directory with this template. An empty template keeps the tiny model's own, which knows no tools."""
    tiny_model(path, layers=1)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in style.tokens])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.get_vocab_size()}))
    ids = [tokenizer.token_to_id(token) for token in style.stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    if style.template:
        (path / "chat_template.jinja").write_text(style.template)
    return path
