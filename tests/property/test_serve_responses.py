from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.responses import ResponsesRequest, parse_responses

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(max_size=5) | VALUES
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": TEXT}), max_size=2
)
TYPES = ["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from([*TYPES, "additional_tools", "item_reference"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer", "x"]),
        **dict.fromkeys(("id", "call_id", "name", "arguments", "input", "summary", "tools"), TEXT),
        **dict.fromkeys(("content", "output"), PARTS | TEXT),
    },
)
TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "x"])},
    optional=dict.fromkeys(("name", "description", "parameters", "format", "strict"), TEXT),
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.lists(ITEMS | VALUES, max_size=4) | VALUES},
    optional={
        **{name: VALUES for name in [*ResponsesRequest.model_fields, "store", "zzz"] if name not in ("model", "input")},
        "tools": st.lists(TOOLS, max_size=2) | VALUES,
    },
)


@given(BODIES | VALUES)
def test_any_body_is_a_request_or_a_bad_request(body):
    try:
        request = parse_responses(body)
    except BadRequest:
        return
    assert request.conversation.messages or request.refers
    assert request.sampling(5).max_tokens == 5


@given(st.lists(ITEMS, min_size=1, max_size=6))
def test_messages_of_one_role_are_never_neighbours_but_results(items):
    try:
        messages = parse_responses({"model": "m", "input": items}).conversation.messages
    except BadRequest:
        return
    roles = [message.role for message in messages]
    assert all(one is not other or one == "tool" for one, other in pairwise(roles))
