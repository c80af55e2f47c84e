"""Schemas that would end or hold up whoever compiles them are refused before the compiler sees them."""

import pytest

from ostinato.core.conversation import Conversation, Demand, Message, Role, Tool
from ostinato.core.errors import BadRequest
from ostinato.model.answers.bounds import MOST_STEPS, check_schema
from ostinato.model.answers.demands import grammar_of
from ostinato.testing.renderer import ByteRenderer


def chain(length, *, within=lambda ref: ref, last=None):
    """a0 -> a1 -> ... -> the last."""
    definitions = {f"a{i}": within({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": last or {"type": "string"}}}


WITHIN = [lambda ref: ref, lambda ref: {"allOf": [ref]}, lambda ref: {"type": "object", "properties": {"x": ref}}]


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("length", [MOST_STEPS, 2_500, 30_000])
def test_references_that_lead_on_too_far_are_refused(length, within):
    with pytest.raises(BadRequest, match="references"):
        check_schema(chain(length, within=within))


@pytest.mark.parametrize("within", WITHIN)
def test_those_that_do_not_are_taken_and_circles_too(within):
    check_schema(chain(MOST_STEPS - 1, within=within))
    check_schema(chain(10, within=within, last={"$ref": "#/$defs/a0"}))
    with pytest.raises(BadRequest, match="references"):
        check_schema(chain(2_500, within=within, last={"$ref": "#/$defs/a0"}))


def test_a_chain_that_is_entered_at_its_end_first_is_measured_whole():
    schema = chain(2_500)
    schema["properties"] = {f"p{i}": {"$ref": f"#/$defs/a{2_500 - 30 * i}"} for i in range(80)}
    with pytest.raises(BadRequest, match="references"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"patternProperties": {f"^{i}": {} for i in range(17)}}, "17 patternProperties"),
        ({"anyOf": [{"enum": ["ok"]}, {"type": "integer", "multipleOf": 99_991}]}, "multipleOf of 99991"),
        ({"multipleOf": 1e-9}, "multipleOf of 1e-09"),
    ],
)
def test_what_costs_too_much_is_named(schema, said):
    with pytest.raises(BadRequest, match=said):
        check_schema({"type": "object", "properties": {"x": schema}})


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": 7},
        {"$ref": "#/nowhere/0/x"},
        {"$ref": "http://x/y#z"},
        {"multipleOf": 0.01},
        {"properties": {"$ref": {"type": "string"}}},
    ],
)
def test_ordinary_and_odd_ones_are_left_to_the_compiler(schema):
    check_schema(schema)


@pytest.mark.parametrize("calls", [False, True])
def test_formats_and_tools_are_checked_alike(calls):
    tools = (Tool(name="read", parameters=chain(2_500)),)
    demand = Demand(calls=("read",)) if calls else Demand(schema=chain(2_500))
    conversation = Conversation(messages=(Message(role=Role.USER, text="hi"),), tools=tools, demand=demand)
    with pytest.raises(BadRequest, match="references"):
        ByteRenderer().grammar(conversation)
    assert (
        grammar_of(Conversation(messages=conversation.messages, tools=tools), None, {}, thinks=False, opening="") == ""
    )
