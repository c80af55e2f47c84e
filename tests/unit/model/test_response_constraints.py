"""What is demanded of an answer comes out in the model's own format, whatever the model would rather say."""

import json
import random

import numpy as np
import pytest

from ostinato.core.conversation import Conversation, Demand, Message, Role, Tool
from ostinato.core.errors import BadRequest
from ostinato.model.answer_reader import Reader, format_for
from ostinato.model.renderer import HFRenderer
from ostinato.model.response_constraints import grammar_of
from ostinato.testing.tiny import tiny_model

TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen3": "<tool_call> <think>",
    "llama-3.1": '{"name": function name, "parameters": dictionary} <|python_tag|>',
    "mistral": "[TOOL_CALLS]",
    "mistral-by-name": "[TOOL_CALLS] [ARGS]",
    "gpt-oss": "<|channel|>analysis<|message|>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>",
    "deepseek-r1": "<｜tool▁calls▁begin｜>\n```json\n <think>",  # noqa: RUF001
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁sep｜> <think>",  # noqa: RUF001
}
PATH = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 4},
        "lines": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = (Tool(name="read", parameters=PATH), Tool(name="edit", parameters=PATH))
SAID = (Message(role=Role.USER, text="Look."),)
STOP = 258


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return HFRenderer(tiny_model(tmp_path_factory.mktemp("tiny")))


def spoken(renderer, grammar, seed, longest=600):
    """An answer of a model that takes any allowed token alike, or ends if it may."""
    matcher, chance, ids = renderer.grammars.matcher(grammar), random.Random(seed), []
    while len(ids) < longest:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        tokens = np.flatnonzero(np.unpackbits(mask, count=renderer.vocab_size, bitorder="little")).tolist()
        token = STOP if STOP in tokens else chance.choice(tokens)
        if token == STOP:
            return renderer.decode(ids)
        assert matcher.consume_token(token)
        ids.append(token)
    raise AssertionError(f"no end: {renderer.decode(ids)!r}")


def wanted(conversation, family, *, opening="", control=None):
    format = format_for(TEMPLATES[family], control or ())
    return grammar_of(
        conversation, format.wording, control or {}, thinks=bool(format.reasoning), opening=opening
    ), format


def read(format, text, opening=""):
    reader = Reader(format, tools=TOOLS, turn="chatcmpl-1:0", opening=opening)
    return [*reader.feed(text), *reader.finish()]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("seed", range(5))
def test_a_demanded_call_is_read_as_one(renderer, family, seed):
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(calls=("read", "edit"), several=False))
    grammar, format = wanted(asked, family)
    # what it thinks first has no end of its own: only the answer behind it is asked for here
    grammar = grammar.replace(grammar.splitlines()[0], "start: answer")
    pieces = read(format, spoken(renderer, grammar, seed))
    assert "".join(piece.text for piece in pieces) == ""
    (call,) = [piece.call for piece in pieces if piece.call]
    assert call.name in ("read", "edit")
    values = json.loads(call.arguments)
    assert len(values["path"]) <= 4
    assert {*values} <= {"path", "lines"}
    assert {*values.get("lines", ())} <= {1, 2}


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-by-name", "deepseek-r1", "deepseek-v3.1"])
def test_several_calls_may_follow_each_other(renderer, family):
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(calls=("read",)))
    grammar, format = wanted(asked, family)
    matcher = renderer.grammars.matcher(grammar)
    wording = format.wording
    call = wording.call.replace("NAME", "read").replace("ARGUMENTS", '{"path": "a"}')
    said = wording.calls[0] + call + wording.several + call + wording.calls[1]
    assert matcher.consume_tokens(renderer.encode(said))
    assert matcher.is_accepting()
    assert len([piece for piece in read(format, said) if piece.call]) == 2


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_model_may_think_first_and_no_text_stands_beside_the_call(renderer, family):
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(calls=("read",)))
    grammar, format = wanted(asked, family)
    wording = format.wording
    call = (
        wording.calls[0] + wording.call.replace("NAME", "read").replace("ARGUMENTS", '{"path": "a"}') + wording.calls[1]
    )
    begin, end = wording.thought
    for said, taken in ((call, True), (f"{begin}Hm </th{end}{call}", bool(format.reasoning)), (f"Sure. {call}", False)):
        matcher = renderer.grammars.matcher(grammar)
        assert (matcher.validate_tokens(renderer.encode(said)) == len(renderer.encode(said))) is taken, said


def test_a_template_that_begins_the_thinking_has_it_ended(renderer):
    asked = Conversation(messages=SAID, demand=Demand(schema={"type": "object", "maxProperties": 0}))
    grammar, _ = wanted(asked, "qwen3", opening="<think>\n")
    matcher = renderer.grammars.matcher(grammar)
    assert matcher.consume_tokens(renderer.encode("So {</think>\n\n{}"))
    assert matcher.is_accepting()
    assert (
        renderer.grammars.matcher(grammar).validate_tokens(renderer.encode("{}")) == 2
    )  # still thinking: it may not end here
    matcher = renderer.grammars.matcher(grammar)
    matcher.consume_tokens(renderer.encode("{}"))
    assert not matcher.is_accepting()


def test_text_of_a_schema_or_a_call(renderer):
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(schema={"enum": [1]}, calls=("read",)))
    grammar, format = wanted(asked, "hermes")
    call = format.wording.call.replace("NAME", "read").replace("ARGUMENTS", '{"path": "a"}')
    for said in ("1", call):
        matcher = renderer.grammars.matcher(grammar)
        assert matcher.consume_tokens(renderer.encode(said))
        assert matcher.is_accepting()


def test_a_json_text_is_one_line_without_free_space(renderer):
    grammar, _ = wanted(Conversation(messages=SAID, demand=Demand(schema={"type": "array"})), "hermes")
    for said, taken in (("[1, 2]", 6), ("[1,2]", 5), ("[1,\n2]", 3), ("[1,  2]", 4), ("[ 1]", 1), ("\n[", 0)):
        assert renderer.grammars.matcher(grammar).validate_tokens(renderer.encode(said)) == taken, said


def test_control_tokens_are_demanded_by_id():
    control = {"[TOOL_CALLS]": 7, "[ARGS]": 9}
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(calls=("read",)))
    grammar, _ = wanted(asked, "mistral-by-name", control=control)
    assert 'call0: <[7]> "read" <[9]> values0' in grammar


def test_names_are_no_part_of_the_grammars_language(renderer):
    nasty = Tool(name='a" | "b\n\\', parameters={})
    asked = Conversation(messages=SAID, tools=(nasty,), demand=Demand(calls=(nasty.name,), several=False))
    grammar, format = wanted(asked, "hermes")
    matcher = renderer.grammars.matcher(grammar)
    said = format.wording.call.replace("NAME", json.dumps(nasty.name)[1:-1]).replace("ARGUMENTS", "{}")
    assert matcher.consume_tokens(renderer.encode(said))
    assert [piece.call.name for piece in read(format, said)] == [nasty.name.strip()]


@pytest.mark.parametrize("family", ["qwen3-coder", "glm-4.5"])
def test_who_writes_no_json_cannot_be_made_to_call(family):
    template = {"qwen3-coder": "<tool_call>\n<function=", "glm-4.5": "<tool_call>\n<arg_key>"}[family]
    format = format_for(template, ())
    asked = Conversation(messages=SAID, tools=TOOLS, demand=Demand(calls=("read",)))
    with pytest.raises(BadRequest, match="send 'auto'"):
        grammar_of(asked, format.wording, {}, thinks=False, opening="")
    schema = Conversation(messages=SAID, demand=Demand(schema={"type": "object"}))
    assert "%json" in grammar_of(schema, format.wording, {}, thinks=False, opening="")


@pytest.mark.parametrize("family", TEMPLATES)
def test_where_calls_are_forbidden_any_text_may_be_said_but_no_call(renderer, family):
    format = format_for(TEMPLATES[family], ())
    conversation = Conversation(messages=SAID, tools=TOOLS, demand=Demand(forbidden=True))
    grammar = grammar_of(conversation, format.wording, {}, thinks=False, opening="", opener=format.opener)
    begin, end = format.wording.calls
    call = f"{begin}{format.wording.call.replace('NAME', 'read').replace('ARGUMENTS', '{}')}{end}"
    reader = Reader(format, tools=TOOLS, turn="t:0")
    assert [piece.call.name for piece in [*reader.feed(call), *reader.finish()] if piece.call] == ["read"]
    before = format.wording.text
    for text in ("", "Look: {1} [x]\n", 'about "name" and <tool> calls'):
        assert renderer.fulfils(grammar, renderer.encode(before + text)), text
        assert not renderer.fulfils(grammar, renderer.encode(before + text + call)), text


def test_a_declared_template_names_the_beginning_of_its_calls():
    call = {"open": "[call/", "close": "]", "content": "json", "repeats": True}
    declared = {"start_anchor": "assistant", "fields": {"content": {}, "tool_calls": call}}
    assert format_for("", (), declared).opener == r"\[call\/"


def test_nothing_is_demanded_of_an_answer_that_goes_on():
    asked = Conversation(messages=SAID, continued=True, demand=Demand(schema={}))
    with pytest.raises(BadRequest, match="continues a message"):
        grammar_of(asked, None, {}, thinks=False, opening="")
