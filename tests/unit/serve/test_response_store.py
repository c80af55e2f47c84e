"""`previous_response_id`: a call that names an answer goes on from it, in the very tokens that were sampled."""

import itertools

import pytest
from gateway_world import world

from ostinato.core.records import Branch
from ostinato.testing.engine import FakeEngine

READ = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path":   "calc.py"}}\n</tool_call>'


async def ask(w, input, headers=None, **fields):
    status, _, body = await w.post("/v1/responses", {"model": "m", "input": input, **fields}, headers=headers)
    return status, body


def numbered():
    """An engine whose answers differ."""
    count = itertools.count()
    return FakeEngine(lambda _: f"answer {next(count)}")


async def test_an_answer_that_is_named_goes_on_as_the_whole_input_would():
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one")
        _, second = await ask(w, "two", previous_response_id=first["id"])
        status, _ = await ask(w, "three", previous_response_id=second["id"])
        assert status == 200
        a, b, c = w.log.turns()
        said = ["one", "answer 0", "two", "answer 1", "three"]
        whole = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        await ask(w, whole)
        d = w.log.turns()[-1]
        assert c.prompt_ids == d.prompt_ids
        assert b.prompt_ids[: len(a.prompt_ids + a.sampled_ids)] == a.prompt_ids + a.sampled_ids


async def test_the_tokens_of_a_call_are_used_again_and_its_result_needs_nothing_but_its_id():
    answers = iter([CALL, "It adds."])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        _, first = await ask(w, "what does it do?", tools=[READ], user="ann")
        (call,) = (item for item in first["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a + b"}
        status, _ = await ask(w, [result], tools=[READ], user="ann", previous_response_id=first["id"])
        assert status == 200
        a, b = w.log.turns()
        assert (b.parent, b.branch, b.episode) == (a.id, Branch.NONE, a.episode)
        assert b.prompt_ids[: len(a.prompt_ids + a.sampled_ids)] == a.prompt_ids + a.sampled_ids


async def test_one_answer_can_be_gone_on_from_twice():
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one", user="ann")
        for text in ("left", "right"):
            assert (await ask(w, text, user="ann", previous_response_id=first["id"]))[0] == 200
        _, left, right = w.log.turns()
        assert left.parent == right.parent
        assert right.branch is Branch.PARALLEL


async def test_instructions_are_those_of_the_call():
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one", instructions="Be short.")
        await ask(w, "two", instructions="Be long.", previous_response_id=first["id"])
        whole = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "answer 0"}]
        await ask(w, [*whole, {"role": "user", "content": "two"}], instructions="Be long.")
        assert w.log.turns()[1].prompt_ids == w.log.turns()[2].prompt_ids


@pytest.mark.parametrize("fields", [{"store": False}, {"max_output_tokens": 4}, {}])
async def test_what_is_kept(fields):
    """A cut answer is kept like a whole one; with `store` false, none."""
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one", **fields)
        status, body = await ask(w, "two", previous_response_id=first["id"])
        if "store" not in fields:
            assert status == 200, body
            return
        assert status == 400
        assert body["error"]["code"] == "previous_response_not_found"
        assert body["error"]["param"] == "previous_response_id"
        assert len(w.log.turns()) == 1


async def test_another_tenant_does_not_find_it():
    acme, bolt = "sk-acme-0123456789", "sk-bolt-0123456789"
    async with world(engine=numbered(), api_keys=(f"acme:{acme}", f"bolt:{bolt}")) as w:
        _, first = await ask(w, "one", headers=w.key(acme))
        assert (await ask(w, "two", headers=w.key(bolt), previous_response_id=first["id"]))[0] == 400
        assert (await ask(w, "two", headers=w.key(acme), previous_response_id=first["id"]))[0] == 200


async def test_the_least_recently_used_make_room():
    async with world(engine=numbered(), previous_chars=20_000) as w:
        _, old = await ask(w, "old")
        _, used = await ask(w, "used")
        for i in range(20):
            await ask(w, f"other {i}")
            status, used = await ask(w, "go on", previous_response_id=used["id"]) if i % 4 == 0 else (200, used)
            assert status == 200
        assert (await ask(w, "on", previous_response_id=old["id"]))[0] == 400


async def test_nothing_is_kept_without_room():
    async with world(engine=numbered(), previous_chars=0) as w:
        _, first = await ask(w, "one")
        assert (await ask(w, "two", previous_response_id=first["id"]))[0] == 400
