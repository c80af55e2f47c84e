"""Whatever arrives in Anthropic's dialect is a request or refused by name; whatever is answered can be read back."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.conversation import Message, Piece, Role, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.records import Finish
from ostinato.serve.dialects.anthropic import MessagesRequest, parse_count, parse_messages
from ostinato.serve.dialects.anthropic_reply import Messages
from ostinato.serve.dialects.dialect import Counts, Heading, Tokens, Whole

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=8
)
WORDS = st.text(max_size=5)
TEXT = WORDS | VALUES


def block(type, optional=None, **fields):
    return st.fixed_dictionaries({"type": st.just(type), **fields}, optional=optional or {})


NAMES = st.text(min_size=1, max_size=5)
TEXT_BLOCKS = block("text", text=WORDS)
RESULT = WORDS | st.lists(TEXT_BLOCKS | block("tool_reference", tool_name=NAMES), max_size=2)
USER_BLOCKS = TEXT_BLOCKS | block("tool_result", {"is_error": st.booleans()}, tool_use_id=NAMES, content=RESULT)
ASSISTANT_BLOCKS = (
    TEXT_BLOCKS
    | block("thinking", thinking=WORDS, signature=WORDS)
    | block("redacted_thinking", data=WORDS)
    | block("tool_use", id=NAMES, name=NAMES, input=st.dictionaries(WORDS, VALUES, max_size=2))
)


def good(role, blocks):
    content = WORDS | st.lists(blocks, min_size=1, max_size=3)
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


GOOD_MESSAGES = good("user", USER_BLOCKS) | good("assistant", ASSISTANT_BLOCKS) | good("system", TEXT_BLOCKS)
TYPES = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "document", "server_tool_use", ""])
BAD_BLOCKS = st.fixed_dictionaries(
    {"type": TYPES | VALUES},
    optional={"text": TEXT, "thinking": TEXT, "id": TEXT, "name": TEXT, "input": VALUES, "content": TEXT, "zzz": TEXT},
)
ROLES = st.sampled_from(["user", "assistant", "system"])
BAD_MESSAGES = st.fixed_dictionaries(
    {"role": ROLES | TEXT, "content": st.lists(USER_BLOCKS | ASSISTANT_BLOCKS | BAD_BLOCKS, max_size=3) | VALUES}
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": WORDS, "input_schema": st.dictionaries(WORDS, VALUES, max_size=2) | VALUES},
        optional={"type": st.sampled_from(["custom", "bash_20250124"]) | VALUES, "description": TEXT, "strict": VALUES},
    )
    | VALUES,
    max_size=2,
)
USERS = st.dictionaries(st.sampled_from(["account_uuid", "device_id", "session_id"]), TEXT, max_size=3).map(json.dumps)
FIELDS = [*MessagesRequest.model_fields, "top_k", "thinking", "mcp_servers", "container", "output_format", "zzz"]


@st.composite
def near_valid(draw):
    messages = GOOD_MESSAGES if draw(st.booleans()) else GOOD_MESSAGES | BAD_MESSAGES | VALUES
    body = {"model": "m", "max_tokens": 5, "messages": draw(st.lists(messages, min_size=1, max_size=4))}
    optional = {
        "system": RESULT | VALUES,
        "metadata": st.fixed_dictionaries({"user_id": USERS | TEXT}),
        "tools": TOOLS | VALUES,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "none", "any"]) | VALUES}),
        draw(st.sampled_from(FIELDS)): VALUES,
    }
    changed = draw(st.sets(st.sampled_from([*optional]), max_size=2))
    return body | {name: draw(optional[name]) for name in sorted(changed)}


@settings(max_examples=400)
@given(near_valid() | VALUES)
def test_any_json_is_a_request_or_refused_by_name(body):
    try:
        request = parse_messages(body)
    except BadRequest:
        return
    conversation = request.conversation
    assert (request.model, request.budget) == (body["model"], body["max_tokens"])
    assert conversation.messages
    assert conversation.continued == (conversation.messages[-1].role is Role.ASSISTANT)
    assert all(call.values() is not None for message in conversation.messages for call in message.calls)
    roles = [message.role for message in conversation.messages]
    assert all(role is not after or role is Role.TOOL for role, after in pairwise(roles))
    assert request.sampling(3).max_tokens == 3
    assert parse_count(body).conversation == conversation


@settings(max_examples=300)
@given(st.lists(USER_BLOCKS, min_size=1, max_size=6))
def test_nothing_that_a_user_says_is_lost_or_moved(blocks):
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    got = parse_messages(body).conversation.messages
    assert [m.answers for m in got if m.role is Role.TOOL] == [b["tool_use_id"] for b in blocks if "tool_use_id" in b]
    texts = "".join(each["text"] if each["type"] == "text" else result(each["content"]) for each in blocks)
    assert texts.replace("\n", "") == "".join(message.text for message in got).replace("\n", "")


def result(content):
    return content if isinstance(content, str) else "".join(part.get("text", part.get("tool_name")) for part in content)


CALLS = st.builds(
    lambda name, values: Piece(call=ToolCall(id="call_3f_0_0", name=name, arguments=json.dumps(values))),
    st.text(min_size=1, max_size=5),
    st.dictionaries(WORDS, st.integers() | WORDS, max_size=2),
)
PIECES = st.builds(lambda text: Piece(text=text), WORDS) | st.builds(lambda text: Piece(reasoning=text), WORDS) | CALLS


@settings(max_examples=300)
@given(st.lists(st.lists(PIECES, max_size=3), max_size=5))
def test_a_stream_and_a_body_tell_the_same_answer_and_it_can_be_sent_back(chunks):
    head = Heading(id="msg-3f", created=1.0, model="m", choices=1, prompt_tokens=1, count_usage=True)
    pieces, counts = [piece for chunk in chunks for piece in chunk], Counts(prompt=1, answer=2)
    message = Message(
        role=Role.ASSISTANT,
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=tuple(piece.call for piece in pieces if piece.call is not None),
    )
    whole = Whole(message=message, tokens=Tokens([1], [0.0]), finish=Finish.STOP)
    body = json.loads(Messages(head).body([whole], counts, {}))["content"]
    out = Messages(head)
    data = out.opening() + "".join(out.delta(0, chunk, Tokens([1], [0.0])) for chunk in chunks)
    data += out.ending(0, Finish.STOP, "", (counts, {}))
    for content in (body, streamed(data)):
        said = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "ok"},
        ]
        back = parse_messages({"model": "m", "max_tokens": 5, "messages": said}).conversation.messages
        spoken = [each for each in back if each.role is Role.ASSISTANT]
        got = spoken[0] if spoken else Message(role=Role.ASSISTANT)
        assert (got.text, got.reasoning) == (message.text, message.reasoning)
        assert [(c.name, c.values()) for c in got.calls] == [(c.name, c.values()) for c in message.calls]


def streamed(data):
    """The blocks that a client makes of a stream; fails for events out of order."""
    content, open_block = [], None
    for event in data.removesuffix("\n\n").split("\n\n"):
        value = json.loads(event.partition("\ndata: ")[2])
        match value["type"]:
            case "content_block_start":
                assert open_block is None
                assert value["index"] == len(content)
                open_block, given_json = value["content_block"], ""
                content.append(open_block)
            case "content_block_delta":
                assert value["index"] == len(content) - 1
                for field, part in value["delta"].items():
                    if field == "partial_json":
                        given_json += part
                    elif field != "type":
                        open_block[field] += part
            case "content_block_stop":
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(given_json)
                open_block = None
    assert open_block is None
    assert content
    return content
