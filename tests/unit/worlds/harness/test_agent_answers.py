"""What is read of an answer, and what a request becomes: pure, and sure of nothing that an agent says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.conversation import CompactionBlock, Message, Piece, Role
from ostinato.core.records import Finish
from ostinato.serve.dialects.anthropic_reply import Messages
from ostinato.serve.dialects.dialect import Compacted, Counts, Heading, Tokens, Whole
from ostinato.serve.dialects.responses import Responses
from ostinato.worlds.harness.relay import passed_headers, read_agent_answer, ruled_request, tool_results

DIALECTS = ["chat", "messages", "responses"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["ostinato", "turns", "spans", "choices", "response", "content", "input", "messages", "role", "type", "output"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(DIALECTS), JSON, st.booleans())
def test_no_answer_and_no_request_breaks_the_reading(dialect, value, streamed):
    text = json.dumps(value).encode()
    read_agent_answer(dialect, b"data: " + text + b"\n\n" if streamed else text)
    if isinstance(value, dict):
        tool_results(dialect, value)


def test_an_answer_that_was_cut_is_none():
    whole = json.dumps({"choices": [], "ostinato": {"turns": ["t:0"], "spans": [[0, "h", 3]]}}).encode()
    assert read_agent_answer("chat", whole).tokens == 3
    assert all(read_agent_answer("chat", whole[:size]) is None for size in range(len(whole)))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("writer", "dialect"), [(Messages, "messages"), (Responses, "responses")])
def test_an_answer_that_begins_with_a_summary_is_read(writer, dialect, streamed):
    block = CompactionBlock(content="Done so far.", token="t")
    heading = Heading(
        id="x-1",
        created=0.0,
        model="m",
        choices=1,
        prompt_tokens=5,
        count_usage=True,
        compacted=Compacted(block=block, counts=Counts(prompt=9, answer=4)),
    )
    made, counts = writer(heading), Counts(prompt=5, answer=3)
    told = {"turns": ["x-1-1:0"], "spans": [[0, "h", 3]], "window": {"number": 1, "begins_with": "x-1:0"}}
    if streamed:
        text = made.opening() + made.delta(0, [Piece(text="Go on.")], Tokens((), ()))
        data = (text + made.ending(0, Finish.STOP, "", (counts, told))).encode()
    else:
        said = Message(role=Role.ASSISTANT, text="Go on.")
        data = made.body([Whole(message=said, tokens=Tokens((), ()), finish=Finish.STOP)], counts, told)
    answer = read_agent_answer(dialect, data)
    assert (answer.turn, answer.message.text, answer.tokens, answer.window) == ("x-1-1:0", "Go on.", 3, 1)


def test_a_text_that_looks_like_our_word_is_text():
    said = {"message": {"content": '"ostinato":{"turns":["other:0"],"spans":[]}'}}
    assert read_agent_answer("chat", json.dumps({"choices": [said]}).encode()) is None


@pytest.mark.parametrize(
    ("dialect", "asked", "field", "tokens"),
    [
        ("chat", {}, "max_tokens", 64),
        ("chat", {"max_tokens": 8}, "max_tokens", 8),
        ("chat", {"max_tokens": None}, "max_tokens", 64),
        ("chat", {"max_completion_tokens": 900}, "max_completion_tokens", 64),
        ("messages", {"max_tokens": 128000}, "max_tokens", 64),
        ("responses", {}, "max_output_tokens", 64),
    ],
)
def test_an_answers_budget_is_the_smaller(dialect, asked, field, tokens):
    hostile = {"temperature": 0, "top_p": 0.1, "seed": 1, "n": 9, "user": "ann", "metadata": {"user_id": "ann"}}
    ruled = ruled_request(dialect, hostile | asked, model="m", temperature=0.7, tokens=tokens if asked == {} else 64)
    assert ruled[field] == tokens
    assert (ruled["model"], ruled["temperature"]) == ("m", 0.7)
    assert not ruled.keys() & {"top_p", "seed", "n"}
    if dialect == "messages":
        assert ruled["metadata"] == {"user_id": "world"}
    else:
        assert (ruled["user"], "metadata" in ruled) == ("world", False)


def test_only_headers_that_tell_side_calls_apart_pass():
    given = {"Authorization": "Bearer x", "X-Ostinato-Slot": "live", "Session-Id": "s", "Forwarded": "for=1"}
    given |= {"x-codex-turn-metadata": "x" * 5000, "x-openai-subagent": "é"}
    assert passed_headers(given) == {"session-id": "s"}
