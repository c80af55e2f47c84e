"""`item_reference`: an input item that names one of an earlier answer is read as if its client had sent that item back."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from tests.unit.serve.gateway_world import world
from tests.unit.serve.test_scrub import MAIL, TOLD, everything, masking

from ostinato.core.conversation import CompactionBlock, Message, Piece, Role, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.notices import Forgotten
from ostinato.core.records import Finish
from ostinato.serve.calls import response_store
from ostinato.serve.calls.response_store import ItemGone, PreviousGone, ResponseStore
from ostinato.serve.dialects.dialect import Counts, Heading, Tokens, Whole
from ostinato.serve.dialects.responses import Responses, compaction_answer, parse_compact, parse_responses
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.testing.renderer import ByteRenderer

READ = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
LOOK = 'Let me look.\n<tool_call>\n{"name": "read", "arguments": {"path":   "calc.py"}}\n</tool_call>'
ASKED = {"role": "user", "content": "what does it do?"}
ACME, BOLT = "sk-acme-0123456789", "sk-bolt-0123456789"
KEYS = {"api_keys": (f"acme:{ACME}", f"bolt:{BOLT}")}


def reference(item):
    return {"type": "item_reference", "id": item["id"] if isinstance(item, dict) else item}


def numbered(*first):
    """An engine whose answers differ."""
    said = itertools.chain(first, (f"answer {i}" for i in itertools.count()))
    return FakeEngine(lambda _: next(said))


async def ask(w, input, headers=None, **fields):
    status, _, body = await w.post("/v1/responses", {"model": "m", "input": input, **fields}, headers=headers)
    if isinstance(body, bytes):  # a stream
        body = json.loads(body.decode().strip().split("\n")[-1].removeprefix("data: "))["response"]
    return status, body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_references_continues_the_sampled_ids_as_whole_items_would(stream):
    """Text by reference and calls whole, as the AI SDK sends them, and all by reference, as its releases before did."""
    said = {"tools": [READ], "user": "ann", "stream": stream}
    prompts = []
    for form in ("whole", "both", "references"):
        async with world(engine=numbered(LOOK, "It adds.")) as w:
            _, first = await ask(w, [ASKED], **said)
            text, call = first["output"]
            sent = {
                "whole": [text, call],
                "both": [reference(text), call],
                "references": [*map(reference, [text, call])],
            }
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a + b"}
            steps = [ASKED, *sent[form], result]
            status, second = await ask(w, steps, **said)
            assert status == 200, second
            (more,) = second["output"]
            go_on = {"role": "user", "content": "And then?"}
            status, third = await ask(w, [*steps, more if form == "whole" else reference(more), go_on], **said)
            assert status == 200, third
            a, b, c = w.log.turns()
            assert (b.parent, c.parent) == (a.id, b.id)
            known = a.prompt_ids + a.sampled_ids
            assert b.prompt_ids[: len(known)] == known
            # ids of calls differ between gateways
            prompts.append([re.sub(r"call_\w+", "call", decode(each.prompt_ids)) for each in (b, c)])
    assert prompts[0] == prompts[1] == prompts[2]


async def test_the_type_of_a_reference_may_be_left_out():
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one")
        status, body = await ask(w, [{"id": first["output"][0]["id"]}, {"role": "user", "content": "two"}])
        assert status == 200, body
        assert "answer 0" in decode(w.log.turns()[1].prompt_ids)


HEADING = Heading(id="resp-7", created=0.0, model="m", choices=1, prompt_tokens=1, count_usage=True)
CALLED = ToolCall(id="call_1", name="read", arguments='{"path": "a"}')
PIECES = [
    Piece(reasoning="Hm, "),
    Piece(reasoning="a file."),
    Piece(text="I read "),
    Piece(text="it."),
    Piece(call=CALLED),
    Piece(text="Then I go on."),
]
SAID = Message(role=Role.ASSISTANT, reasoning="Hm, a file.", text="I read it.Then I go on.", calls=(CALLED,))


def stored(store, *, stream):
    """The ids of the items of an answer that is kept."""
    request = parse_responses({"model": "m", "input": "look", "tools": [READ]})
    writer = Responses(HEADING, request.offered, request.repeated, request.told)
    if stream:
        writer.opening()
        writer.delta(0, PIECES, Tokens((), ()))
    else:
        writer.body([Whole(message=SAID, tokens=Tokens((), ()), finish=Finish.STOP)], Counts(prompt=1, answer=1), {})
    store.keep(request, a_turn(id="resp-7:0", user="ann", finish=Finish.STOP), SAID)
    if stream:  # the end is written after the turn is stored
        writer.ending(0, Finish.STOP, "", (Counts(prompt=1, answer=1), {}))
    return [item["id"] for item in request.told["resp-7"]]


def named(store, *ids, user="ann"):
    input = [*map(reference, ids), {"role": "user", "content": "go on"}]
    return store.conversation(parse_responses({"model": "m", "input": input}), user).messages[:-1]


def test_each_item_of_an_answer_is_what_it_said():
    store = ResponseStore(100_000)
    thought, text, call, rest = stored(store, stream=True)
    assert named(store, thought, text, call, rest) == (SAID,)
    assert named(store, rest) == (Message(role=Role.ASSISTANT, text="Then I go on."),)
    assert named(store, thought, call) == (Message(role=Role.ASSISTANT, reasoning="Hm, a file.", calls=(CALLED,)),)
    thought, text, call = stored(store, stream=False)
    assert named(store, thought, text, call) == (SAID,)
    assert named(store, call) == (Message(role=Role.ASSISTANT, calls=(CALLED,)),)


def test_an_item_that_is_there_already_is_not_repeated():
    store = ResponseStore(100_000)
    _, text, *_ = stored(store, stream=True)
    assert named(store, text, text) == named(store, text)
    more = {"input": [reference(text), {"role": "user", "content": "go on"}], "previous_response_id": "resp-7"}
    on = store.conversation(parse_responses({"model": "m", **more}), "ann").messages
    assert [message.text for message in on] == ["look", SAID.text, "go on"]


def test_a_part_of_the_memory_is_for_items_which_outlive_what_was_asked():
    store = ResponseStore(40_000)
    for number in range(6):
        request = parse_responses({"model": "m", "input": "long " * 5_000})
        writer = Responses(replace(HEADING, id=f"resp-{number}"), told=request.told)
        said = Message(role=Role.ASSISTANT, text=f"answer {number}")
        writer.body([Whole(message=said, tokens=Tokens((), ()), finish=Finish.STOP)], Counts(prompt=1, answer=1), {})
        store.keep(request, a_turn(id=f"resp-{number}:0", user="ann", finish=Finish.STOP), said)
    assert [message.text for message in named(store, "msg_resp-0_0", "msg_resp-5_0")] == ["answer 0answer 5"]
    first = parse_responses({"model": "m", "input": "on", "previous_response_id": "resp-0"})
    with pytest.raises(PreviousGone):
        store.conversation(first, "ann")
    for number in range(20):
        stored(store, stream=False)
        request = parse_responses({"model": "m", "input": "x"})
        Responses(replace(HEADING, id=f"other-{number}"), told=request.told)
        store.keep(request, a_turn(id=f"other-{number}:0", user="ann", finish=Finish.STOP), SAID)
    with pytest.raises(ItemGone):
        named(store, "msg_resp-0_0")


async def refused(w, input, headers=None, **fields):
    """The message of the error for an item that is not there, without the item's id."""
    turns = len(w.log.turns())
    status, body = await ask(w, input, headers, **fields)
    error = body["error"]
    assert (status, error["type"], error["param"]) == (404, "invalid_request_error", "input")
    assert (error["code"], len(w.log.turns())) == ("item_not_found", turns)
    gone = next(item["id"] for item in input if item.get("type") == "item_reference")
    assert error["message"].startswith(
        f"Item with id '{gone}' not found. Items are not persisted when `store` is set to false"
    )
    return error["message"].replace(gone, "")


async def test_what_is_not_there_and_what_is_somebody_elses_are_told_alike():
    async with world(engine=numbered(), **KEYS) as w:
        acme, bolt = w.key(ACME), w.key(BOLT)
        _, first = await ask(w, "a secret", acme, user="ann")
        theirs = [reference(first["output"][0]), {"role": "user", "content": "what was it?"}]
        unknown = [reference("msg_resp-3f_0"), *theirs[1:]]
        told = {
            await refused(w, theirs, bolt, user="ann"),  # another tenant
            await refused(w, theirs, acme, user="bob"),
            await refused(w, theirs, acme),
            await refused(w, unknown, acme, user="ann"),
            await refused(w, [reference(first["output"][0]["id"][:-1] + "7"), *theirs[1:]], acme, user="ann"),
            await refused(w, [reference(first["id"]), *theirs[1:]], acme, user="ann"),
            await refused(w, [reference("x"), *theirs[1:]], acme, user="ann"),
        }
        assert len(told) == 1
        assert (await ask(w, theirs, acme, user="ann"))[0] == 200


@pytest.mark.parametrize("headers", [{}, {"x-ostinato-train": "never"}])
async def test_what_is_not_to_be_kept_cannot_be_referred_to(headers):
    async with world(engine=numbered()) as w:
        fields = {} if headers else {"store": False}
        _, first = await ask(w, "one", headers, **fields)
        await refused(w, [reference(first["output"][0]), {"role": "user", "content": "two"}])


async def test_a_call_that_keeps_nothing_may_refer_to_what_is_kept():
    engine = numbered()
    async with world(engine=engine) as w:
        _, first = await ask(w, "one")
        more = [reference(first["output"][0]), {"role": "user", "content": "two"}]
        assert (await ask(w, more, store=False))[0] == 200
        assert "answer 0" in decode(engine.requests[-1].prompt_ids)


async def test_an_answer_with_references_can_be_named_whole():
    async with world(engine=numbered()) as w:
        _, first = await ask(w, "one", user="ann")
        more = [{"role": "user", "content": "one"}, reference(first["output"][0]), {"role": "user", "content": "two"}]
        _, second = await ask(w, more, user="ann")
        status, _ = await ask(w, "three", previous_response_id=second["id"], user="ann")
        assert status == 200
        first, second, third = w.log.turns()
        assert (second.parent, third.parent) == (first.id, second.id)
        known = second.prompt_ids + second.sampled_ids
        assert third.prompt_ids[: len(known)] == known


@pytest.mark.parametrize("gone", ["ann", None])
async def test_of_who_was_forgotten_no_item_is_left(gone):
    async with world(engine=numbered(), **KEYS) as w:
        people = [(ACME, "ann"), (ACME, "bob"), (BOLT, "ann")]
        kept = {(key, user): (await ask(w, f"I am {user}", w.key(key), user=user))[1] for key, user in people}
        await w.log.append(Forgotten(id="g", tenant="acme", user=gone, key=1, at=w.now))
        assert (await w.get("/v1/consent", {"x-ostinato-user": "bob", **w.key(ACME)}))[0] == 200  # it reads the log
        for (key, user), response in kept.items():
            more = [reference(response["output"][0]), {"role": "user", "content": "who am I?"}]
            if key == ACME and gone in (user, None):
                await refused(w, more, w.key(key), user=user)
            else:
                assert (await ask(w, more, w.key(key), user=user))[0] == 200


async def test_values_that_were_masked_are_put_back_and_masked_again():
    masked, seen = masking(lambda found: f"Hello {found[0]}")
    async with masked as w:
        _, first = await ask(w, TOLD)
        (item,) = first["output"]
        assert item["content"][0]["text"] == f"Hello {MAIL}"
        status, second = await ask(w, [reference(item), {"role": "user", "content": "Again."}])
        assert (status, second["output"][0]["content"][0]["text"]) == (200, f"Hello {MAIL}")
        assert MAIL not in "".join(seen) + everything(w.log)


async def test_a_summary_is_referred_to_like_any_item():
    """The AI SDK keeps the item of a compaction and refers to it, behind all that it replaces."""
    said = "Done: the parser is mended."
    async with world(engine=numbered("Mended.", said)) as w:
        _, first = await ask(w, "Mend it.", user="ann")
        trigger = {"type": "compaction_trigger"}
        status, second = await ask(
            w, [{"role": "user", "content": "Mend it."}, reference(first["output"][0]), trigger], user="ann"
        )
        assert status == 200, second
        (summary,) = second["output"]
        assert summary["type"] == "compaction"
        go_on = {"role": "user", "content": "Go on."}
        status, _ = await ask(w, [reference(first["output"][0]), reference(summary), go_on], user="ann")
        assert status == 200
        _, wrote, after = w.log.turns()
        assert after.window.begins_with == wrote.id
        assert (said in decode(after.prompt_ids), "Mended." in decode(after.prompt_ids)) == (True, False)


async def test_of_a_compacted_input_the_summary_alone_may_be_referred_to():
    async with world(engine=numbered("Mended.", "Done.")) as w:
        _, _, body = await w.post("/v1/responses/compact", {"model": "m", "input": [ASKED]})
        said, summary = body["output"]
        go_on = {"role": "user", "content": "Go on."}
        await refused(w, [reference(said), reference(summary), go_on])
        await refused(w, [reference(said), go_on], previous_response_id=body["id"])
        status, answer = await ask(w, [said, reference(summary), go_on])
        assert status == 200, answer


def test_of_a_compacted_input_the_summary_alone_is_held():
    store, held = ResponseStore(40_000), 0
    block = CompactionBlock(content="Done.", token="signed")
    for number in range(9):
        request = parse_compact({"model": "m", "input": "long " * 200_000})
        heading = replace(HEADING, id=f"resp-{number}")
        store.keep_block(request, heading.id, "ann", block)
        body = compaction_answer(request, heading, block, Counts(prompt=1, answer=1), {})
        assert len(json.loads(body)["output"]) == 2
        held += len(json.dumps(request.told))
    assert held < 10_000


def an_answer(store, number, input, **fields):
    """Keep an answer to ann, as a call of hers with this input gets it."""
    request = parse_responses({"model": "m", "input": input, **fields})
    store.conversation(request, "ann")
    said = Message(role=Role.ASSISTANT, text=f"answer {number}")
    writer = Responses(replace(HEADING, id=f"resp-{number}"), told=request.told)
    writer.body([Whole(message=said, tokens=Tokens((), ()), finish=Finish.STOP)], Counts(prompt=1, answer=1), {})
    store.keep(request, a_turn(id=f"resp-{number}:0", user="ann", finish=Finish.STOP), said)


def continued(store, number, user, *items):
    input = [*items, {"role": "user", "content": "go on"}]
    request = parse_responses({"model": "m", "input": input, "previous_response_id": f"resp-{number}"})
    return [message.text for message in store.conversation(request, user).messages]


@pytest.mark.parametrize("user", ["ann", "bob", ""])
def test_an_answer_that_is_kept_needs_no_item(user):
    store = ResponseStore(40_000)
    an_answer(store, 0, "one")
    an_answer(store, 1, [reference("msg_resp-0_0"), {"role": "user", "content": "two"}])
    for number in range(2, 22):
        an_answer(store, number, "other")
        whole = continued(store, 1, user)
        assert whole == ["answer 0", "two", "answer 1", "go on"]
    with pytest.raises(ItemGone):
        named(store, "msg_resp-0_0")


def test_what_an_answer_referred_to_is_counted_and_there_already():
    store = ResponseStore(40_000)
    an_answer(store, 0, "one")
    an_answer(store, 1, [reference("msg_resp-0_0"), {"role": "user", "content": "two"}])
    again = continued(store, 1, "ann", reference("msg_resp-0_0"))
    assert again == ["answer 0", "two", "answer 1", "go on"]
    long = ResponseStore(40_000)
    request = parse_responses({"model": "m", "input": "x"})
    said = Message(role=Role.ASSISTANT, text="y" * 6_000)
    writer = Responses(replace(HEADING, id="resp-0"), told=request.told)
    writer.body([Whole(message=said, tokens=Tokens((), ()), finish=Finish.STOP)], Counts(prompt=1, answer=1), {})
    long.keep(request, a_turn(id="resp-0:0", user="ann", finish=Finish.STOP), said)
    for number in range(1, 5):  # each holds the 6,000 characters, and 30,000 are the room
        an_answer(long, number, [reference("msg_resp-0_0"), {"role": "user", "content": "two"}])
    with pytest.raises(PreviousGone):
        continued(long, 1, "ann")
    assert continued(long, 4, "ann")[-1] == "go on"


@pytest.mark.parametrize(
    ("id", "user"), [("msg_resp-0_7", "ann"), ("x_resp-0_0", "ann"), ("cmp_resp-0", "ann"), ("msg_resp-0_0", "bob")]
)
def test_an_item_that_is_not_there_or_somebody_elses_is_refused_beside_its_answer_too(id, user):
    store = ResponseStore(40_000)
    an_answer(store, 0, "one")
    assert continued(store, 0, "ann", reference("msg_resp-0_0")) == ["one", "answer 0", "go on"]
    with pytest.raises(ItemGone):
        continued(store, 0, user, reference(id))


async def test_a_repeated_call_that_refers_to_items_is_answered_after_a_restart():
    log, key = MemoryLog(), {"idempotency-key": "k"}
    async with world(engine=numbered(), log=log) as w:
        _, first = await ask(w, "one")
        more = [reference(first["output"][0]), {"role": "user", "content": "two"}]
        status, second = await ask(w, more, key)
        assert status == 200
    async with world(engine=numbered(), log=log) as w:
        status, again = await ask(w, more, key)
        assert (status, again["output"], len(log.turns())) == (200, second["output"], 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["both", "references"])
async def test_a_loop_of_references_goes_on_after_a_restart(stream, form):
    """The second gateway has the log alone; it continues the sampled ids as the first would have."""
    log, said = MemoryLog(), {"tools": [READ], "user": "ann", "stream": stream}
    async with world(engine=numbered(LOOK), log=log) as w:
        _, first = await ask(w, [ASKED], **said)
    text, call = first["output"]
    sent = {"both": [reference(text), call], "references": [*map(reference, [text, call])]}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a + b"}
    async with world(engine=numbered("It adds."), log=log) as w:
        status, body = await ask(w, [ASKED, *sent[form], result], **said)
        assert status == 200, body
    one, two = log.turns()
    known = one.prompt_ids + one.sampled_ids
    assert (two.parent, two.prompt_ids[: len(known)]) == (one.id, known)


async def test_items_that_were_dropped_from_memory_are_read_again():
    async with world(engine=numbered(), previous_chars=20_000) as w:
        answers = [(await ask(w, f"question {number}"))[1] for number in range(30)]
        more = [*(reference(answer["output"][0]) for answer in answers[:2]), {"role": "user", "content": "go on"}]
        status, body = await ask(w, more)
        assert status == 200, body
        prompt = decode(w.log.turns()[-1].prompt_ids)
        assert ("answer 0answer 1" in prompt, "question" in prompt) == (True, False)


async def test_after_a_restart_too_what_is_somebody_elses_is_not_there():
    log = MemoryLog()
    async with world(engine=numbered(), log=log, **KEYS) as w:
        _, first = await ask(w, "a secret", w.key(ACME), user="ann")
    theirs = [reference(first["output"][0]), {"role": "user", "content": "what was it?"}]
    async with world(engine=numbered(), log=log, **KEYS) as w:
        acme, bolt = w.key(ACME), w.key(BOLT)
        unknown = [reference("msg_resp-3f_0"), *theirs[1:]]
        told = {
            await refused(w, theirs, bolt, user="ann"),  # another tenant
            await refused(w, theirs, acme, user="bob"),
            await refused(w, theirs, acme),
            await refused(w, unknown, acme, user="ann"),
            await refused(w, [reference(first["output"][0]["id"][:-1] + "7"), *theirs[1:]], acme, user="ann"),
        }
        assert len(told) == 1
        assert (await ask(w, theirs, acme, user="ann"))[0] == 200


async def test_after_a_restart_values_stay_masked():
    log = MemoryLog()
    masked, _ = masking(lambda found: f"Dear {found[0]}", log=log)
    async with masked as w:
        _, first = await ask(w, TOLD)
    masked, seen = masking(lambda found: "Dear me", log=log)
    async with masked as w:
        status, body = await ask(w, [reference(first["output"][0]), {"role": "user", "content": "Again."}])
        assert status == 200, body
        assert ("Dear" in seen[0], MAIL in "".join(seen) + everything(log)) == (True, False)


ACT = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_text_behind_a_call_is_read_again_as_it_was_told(stream):
    """A stream tells of it as an item of its own, a body does not."""
    log, said = MemoryLog(), {"tools": [READ], "stream": stream}
    async with world(engine=numbered(f"I see. {ACT} Then I go on."), log=log) as w:
        _, first = await ask(w, [ASKED], **said)
    items = first["output"]
    assert [item["type"] for item in items] == ["message", "function_call", *(["message"] if stream else [])]
    async with world(engine=numbered("Done."), log=log) as w:
        texts = [item for item in items if item["type"] == "message"]
        status, body = await ask(w, [ASKED, *map(reference, texts), {"role": "user", "content": "and?"}], **said)
        assert status == 200, body
        assert re.search(r"I see\. *Then I go on\.", decode(log.turns()[-1].prompt_ids))


@pytest.mark.parametrize("now", [{}, {"tools": [{**READ, "name": "write"}]}, {"tools": [READ], "tool_choice": "none"}])
async def test_calls_are_parsed_again_whatever_tools_are_offered_now(now):
    log = MemoryLog()
    async with world(engine=numbered(ACT), log=log) as w:
        _, first = await ask(w, [ASKED], tools=[READ])
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a + b"}
    async with world(engine=numbered("It adds."), log=log) as w:
        status, body = await ask(w, [ASKED, reference(call), result], **now)
        assert status == 200, body
        assert re.search(r'"path": *"a"', decode(log.turns()[-1].prompt_ids))


async def test_what_looked_like_a_call_where_no_tool_was_offered_stays_text():
    log = MemoryLog()
    async with world(engine=numbered(ACT), log=log) as w:
        _, first = await ask(w, [ASKED])
    (item,) = first["output"]
    assert item["type"] == "message"
    async with world(engine=numbered(), log=log) as w:
        status, body = await ask(w, [ASKED, reference(item), {"role": "user", "content": "and?"}], tools=[READ])
        assert status == 200, body
        assert ACT in decode(log.turns()[-1].prompt_ids)


async def test_no_call_reads_more_answers_from_the_log_than_it_may(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_RESTORED", 2)
    log = MemoryLog()
    async with world(engine=numbered(), log=log) as w:
        first, second, third = [(await ask(w, f"question {number}"))[1]["output"][0] for number in range(3)]
    on = {"role": "user", "content": "go on"}
    async with world(engine=numbered(), log=log) as w:
        status, body = await ask(w, [*map(reference, (first, second, third)), on])
        assert (status, third["id"] in body["error"]["message"]) == (404, True)
        assert (await ask(w, [*map(reference, (first, second, third)), on]))[
            0
        ] == 200  # the first two are in memory now


@pytest.mark.parametrize(
    ("item", "field"), [({"id": ""}, "input[0].id"), ({"id": 7}, "input[0].id"), ({}, "input[0].id")]
)
def test_a_reference_without_an_id_is_refused(item, field):
    with pytest.raises(BadRequest) as caught:
        parse_responses({"model": "m", "input": [{"type": "item_reference", **item}]})
    assert caught.value.field == field


async def test_references_to_nothing_leave_nothing_to_answer():
    async with world("") as w:
        _, first = await ask(w, "one")
        status, body = await ask(w, [reference(first["output"][0])])
        assert (status, body["error"]["param"]) == (400, "input")


def test_an_answer_that_is_forgotten_while_it_is_read_again_is_not_held():
    """It is parsed on a thread, beside the event loop on which people are forgotten."""
    store, request = ResponseStore(100_000), parse_responses({"model": "m", "input": "look"})
    turn = a_turn(id="resp-7:0", user="ann", text="a secret", calls=())

    class Forgetting(ByteRenderer):
        def reader(self, conversation, turn_id):
            store.forget(Forgotten(id="g", tenant="default", user="ann", key=1, at=turn.started_at + 1))
            return super().reader(conversation, turn_id)

    store.restore(turn, ["msg_resp-7_0"], request, ByteRenderer())
    assert named(store, "msg_resp-7_0") == (Message(role=Role.ASSISTANT, text="a secret"),)
    store.restore(turn, ["msg_resp-7_0"], request, Forgetting())
    with pytest.raises(ItemGone):
        named(store, "msg_resp-7_0")
