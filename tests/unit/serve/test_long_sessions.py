"""A long session in each dialect: every call goes on from the one before, and training computes hardly more than the session's tokens."""

import itertools
import json

import pytest
from gateway_world import world

from ostinato.core.records import Branch
from ostinato.testing.engine import FakeEngine
from ostinato.testing.renderer import ByteRenderer
from ostinato.train.config import TrainConfig
from ostinato.train.packing import TokenTurn, microbatches, pack

TURNS = 60
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}


def chat(history):
    tools = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
    return "/v1/chat/completions", {"messages": history, "tools": tools}


def chat_more(body):
    said = body["choices"][0]["message"]
    (call,) = said["tool_calls"]
    # as agents send it back: the arguments laid out anew
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    kept = {"role": "assistant", "content": said["content"], "tool_calls": [call]}
    return [kept, {"role": "tool", "tool_call_id": call["id"], "content": "written"}]


def messages(history):
    tools = [{"name": "write", "input_schema": SCHEMA}]
    return "/v1/messages", {"messages": history, "tools": tools, "max_tokens": 1000}


def messages_more(body):
    use = next(block for block in body["content"] if block["type"] == "tool_use")
    use["input"] = dict(reversed(use["input"].items()))
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "written"}
    return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]


def responses(history):
    tools = [{"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}]
    return "/v1/responses", {"input": history, "tools": tools}


def responses_more(body):
    call = body["output"][-1]["call_id"]
    return [*body["output"], {"type": "function_call_output", "call_id": call, "output": "written"}]


@pytest.mark.parametrize(("make", "more"), [(chat, chat_more), (messages, messages_more), (responses, responses_more)])
async def test_a_session_is_one_chain_of_tokens(make, more):
    numbers = itertools.count()

    def script(_):
        arguments = {"path": f"part{next(numbers)}.py", "text": 'print("a")\n' * 3}
        return f"Let me write it.\n<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments})}\n</tool_call>"

    history = [{"role": "user", "content": "Write sixty parts."}]
    async with world(
        engine=FakeEngine(script, context=100_000), renderer=ByteRenderer(context=100_000), default_max_tokens=1000
    ) as w:
        for _ in range(TURNS):
            path, fields = make(history)
            status, _, body = await w.post(path, {"model": "m", **fields})
            assert status == 200, body
            history += more(body)
        turns = w.log.turns()
    assert len({turn.episode for turn in turns}) == 1
    assert {turn.branch for turn in turns} == {Branch.NONE}
    for before, turn in itertools.pairwise(turns):
        known = before.prompt_ids + before.sampled_ids
        assert (turn.parent, turn.prompt_ids[: len(known)]) == (before.id, known)
    paths, config = [TokenTurn(prompt=turn.prompt_ids, sampled=turn.sampled_ids) for turn in turns], TrainConfig()
    batches = microbatches(paths, config.microbatch_tokens, largest=config.largest_microbatch)
    assert sum(pack([paths[i] for i in batch]).tokens for batch in batches) <= 1.1 * pack(paths).tokens
