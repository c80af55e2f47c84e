"""What a request repeats of a conversation is read once, and reads the same as if it were new."""

import json
import threading
import tracemalloc

import msgspec
import pytest
from gateway_world import world
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects import anthropic, openai, responses
from ostinato.serve.dialects.anthropic import _read
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.items import ItemCache, LruCache, joined
from ostinato.serve.dialects.responses import parse_responses
from ostinato.serve.wire.body import parse_json

USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"b": 1.0, "a": "é"}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image", "source": {}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, {"type": "text", "text": "I do."}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}]},
]
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
]
INPUT = [
    {"role": "user", "content": "Look."},
    {"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    {"type": "web_search_call"},
]
BODIES = {
    "messages": (anthropic.parse_messages, {"model": "m", "max_tokens": 9, "messages": MESSAGES}, "messages"),
    "chat": (openai.parse_chat, {"model": "m", "messages": CHAT}, "messages"),
    "responses": (responses.parse_responses, {"model": "m", "input": INPUT}, "input"),
}


class Counting:
    """A reader of items that counts what it reads."""

    def __init__(self):
        self.read = 0

    def __call__(self, item, where, omissions):
        self.read += 1
        omissions.add("image")
        return [Message(role=Role.USER, text=item["text"])]


@pytest.mark.parametrize("name", BODIES)
def test_a_request_is_read_the_same_from_what_is_known(name):
    parse, body, _ = BODIES[name]
    items = ItemCache(1_000_000)
    plain, first, again = parse(body), parse(body, items), parse(body, items)
    assert first.conversation == plain.conversation == again.conversation
    assert first.omitted == plain.omitted == again.omitted
    assert [message.digest for message in again.conversation.messages] == [
        message.digest for message in plain.conversation.messages
    ]


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_item_is_named_by_its_place_each_time(name):
    parse, body, field = BODIES[name]
    items = ItemCache(1_000_000)
    for place in (1, 3):
        wrong = body | {field: [*[body[field][0]] * place, {"role": "nobody", "content": "?"}]}
        with pytest.raises(BadRequest) as found:
            parse(wrong, items)
        assert found.value.field.startswith(f"{field}[{place}]")


@pytest.mark.parametrize("name", BODIES)
def test_items_that_were_left_as_text_read_the_same(name):
    parse, body, field = BODIES[name]
    data = json.dumps(body).encode()
    apart = parse_json(data, depth=64, values=1_000, unread=("messages", "input"))
    assert all(isinstance(item, msgspec.Raw) for item in apart[field])
    for items in (None, ItemCache(1_000_000)):
        for _ in range(2):
            assert parse(apart, items).conversation == parse(body).conversation
            assert parse(apart, items).omitted == parse(body).omitted


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages": 1, "a": [2]}',
        b'{"messages": {"a": 1}, "messages": [], "model": "m"}',
        b'[{"messages": [1]}]',
        b' {"n": 1e2, "text": "\\u00e9", "deep": {"messages": [1]}}',
        b"1",
        b"null",
    ],
)
def test_a_body_of_another_shape_is_read_whole(data):
    assert parse_json(data, depth=64, values=1_000, unread=("messages",)) == json.loads(data)


def test_parts_of_one_answer_are_the_same_message_each_time():
    items = ItemCache(1_000_000)
    data = json.dumps({"model": "m", "instructions": "Be brief.", "input": INPUT}).encode()
    first, again = (
        parse_responses(parse_json(data, depth=64, values=1_000, unread=("input",)), items).conversation.messages
        for _ in range(2)
    )
    assert [(each.role, each.text, each.reasoning, len(each.calls)) for each in first] == [
        (Role.SYSTEM, "Be brief.", "", 0),
        (Role.USER, "Look.", "", 0),
        (Role.ASSISTANT, "I do.", "So.", 1),
        (Role.TOOL, "seen", "", 0),
    ]
    assert [one is other for one, other in zip(first, again, strict=True)] == [False, True, True, True]


def test_other_parts_are_another_message():
    items, parts = ItemCache(1_000_000), [Message(role=Role.USER, text=text) for text in "abc"]
    told = [message.text for _ in range(2) for pair in (parts[:2], parts[1:]) for message in joined(pair, items)]
    assert told == ["a\nb", "b\nc"] * 2


WRONG = [
    b'"content": "\xff"',
    b'"content": "\xff"}], "messages": [{"role": "user", "content": "hi"',
    b'"content": "\\ud800"',
    b'"content": "\\q"',
    b'"content": tru',
    b'"content": NaN',
    b'"content": "a\nb"',
    b'"content": 1' + b"0" * 400 + b".5e9999",
    b'"content": "a",',
    b'"content" "a"',
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_malformed_in_an_item_is_told_as_if_the_body_were_read_whole(wrong):
    data = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "user", ' + wrong + b"}]}"
    async with world() as w:
        for path, body in (("/v1/chat/completions", data), ("/v1/responses", data.replace(b"messages", b"input"))):
            with pytest.raises(BadRequest) as told:
                parse_json(body, depth=64, values=1_000)
            status, _, answer = await w.post(path, data=body)
            assert (status, answer["error"]["message"]) == (400, str(told.value))


def test_an_item_is_read_once_by_each_reader():
    items, reader, other = ItemCache(1_000_000), Counting(), Counting()
    for _ in range(3):
        omissions = Omissions()
        (message,) = items.read(reader, {"text": "hi"}, "messages[0]", omissions)
        assert message.text == "hi"
        assert omissions.words == ["image"]
    items.read(other, {"text": "hi"}, "messages[0]", Omissions())
    assert (reader.read, other.read) == (1, 1)


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0, False), ("1", 1), (None, False), ([], {}), (0.0, -0.0)])
def test_items_that_only_python_calls_equal_are_two(pair):
    items, reader = ItemCache(1_000_000), Counting()
    for value in pair:
        items.read(reader, {"text": "hi", "n": value}, "messages[0]", Omissions())
    assert reader.read == 2


HEAVY = {
    "many results": [{"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": "ok"} for i in range(500)],
    "many calls": [{"type": "tool_use", "id": f"toolu_{i}", "name": "f", "input": {}} for i in range(500)],
    "an emoji": [{"type": "text", "text": "a" * 200_000 + "\N{GRINNING FACE}"}],
    "plain": [{"type": "text", "text": "a" * 200_000}],
}


@pytest.mark.parametrize("heavy", HEAVY)
def test_what_is_kept_takes_no_more_memory_than_its_budget(heavy):
    budget = 2_000_000 if heavy.startswith("many") else 8_000_000  # of ten messages or more
    items, role = ItemCache(budget), "assistant" if heavy == "many calls" else "user"
    tracemalloc.start()
    for number in range(40):
        item = {"role": role, "content": [*HEAVY[heavy], {"type": "text", "text": f"{number}"}]}
        data = json.dumps({"messages": [item]}).encode()
        apart = parse_json(data, depth=64, values=100_000, unread=("messages",))
        items.read(_read, apart["messages"][0], "messages[0]", Omissions())
    del item, data, apart
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert budget / 5 < held < 1.15 * budget


def test_nothing_is_kept_without_a_budget():
    items, reader = ItemCache(), Counting()
    for _ in range(2):
        items.read(reader, {"text": "hi"}, "messages[0]", Omissions())
    assert reader.read == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=60))
def test_a_memo_holds_the_most_recently_used_within_its_budget(steps):
    memo, kept = LruCache[int, int](20), dict[int, tuple[int, int]]()
    for number, (key, cost) in enumerate(steps):
        if cost % 2:
            expected = kept.pop(key, None)
            if expected is not None:
                kept[key] = expected
            assert memo.get(key) == (None if expected is None else expected[0])
            continue
        memo.put(key, number, cost=cost)
        kept.pop(key, None)
        kept[key] = (number, cost)
        while sum(each for _, each in kept.values()) > 20:
            del kept[next(iter(kept))]
    assert {key: memo.get(key) for key in range(10)} == {key: kept.get(key, (None, 0))[0] for key in range(10)}


def test_what_costs_more_than_everything_may_is_not_kept_and_drops_nothing():
    memo = LruCache[str, int](10)
    memo.put("a", 1, cost=10)
    memo.put("b", 2, cost=11)
    assert (memo.get("a"), memo.get("b")) == (1, None)


def test_what_is_dropped_makes_room():
    memo = LruCache[int, int](10)
    for number in range(5):
        memo.put(number, number, cost=2)
    memo.drop(lambda value: value % 2 == 0)
    assert [memo.get(number) for number in range(5)] == [None, 1, None, 3, None]
    memo.put(7, 7, cost=6)
    assert [memo.get(number) for number in (1, 3, 7)] == [1, 3, 7]


def test_threads_may_share_a_memo():
    memo, wrong = LruCache[int, int](50), []

    def use(start):
        for number in range(3_000):
            key = (start + number) % 30
            found = memo.get(key)
            if found is None:
                memo.put(key, key, cost=5)
            elif found != key:
                wrong.append(found)

    threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
