"""Schemas that would end or hold up whoever compiles them are refused before the compiler sees them."""

import pytest

from ostinato.core.conversation import Conversation, Demand, Message, Role, Tool
from ostinato.core.errors import BadRequest
from ostinato.model.response_constraints import check_schema, grammar_of
from ostinato.testing.renderer import ByteRenderer


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"patternProperties": {f"^{i}": {} for i in range(17)}}, "17 patternProperties"),
        ({"anyOf": [{"enum": ["ok"]}, {"type": "integer", "multipleOf": 99_991}]}, "multipleOf of 99991"),
        ({"multipleOf": 1e-9}, "multipleOf of 1e-09"),
        ({"multipleOf": 10**400}, "multipleOf of 10000000000000000000; give"),
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
    dear = {"type": "object", "properties": {"x": {"multipleOf": 1e9}}}
    tools = (Tool(name="read", parameters=dear),)
    demand = Demand(calls=("read",)) if calls else Demand(schema=dear)
    conversation = Conversation(messages=(Message(role=Role.USER, text="hi"),), tools=tools, demand=demand)
    with pytest.raises(BadRequest, match="multipleOf"):
        ByteRenderer().grammar(conversation)
    assert (
        grammar_of(Conversation(messages=conversation.messages, tools=tools), None, {}, thinks=False, opening="") == ""
    )
