"""Secrets and personal data: what the model, the log and the client see of them, in every dialect."""

import json
import re

import pytest
from pydantic import ValidationError
from tests.fakes.outside import FakeOutside
from tests.unit.serve.gateway_world import ADMIN, events, eventually, world

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig
from ostinato.core.records import Branch, Pick, Signal
from ostinato.record.codec.kinds import TURNS, dump, load
from ostinato.reward.ledger_entries import untrainable
from ostinato.serve.config import PrivacyConfig
from ostinato.serve.scrub import Scrubbing, open_scrubbing
from ostinato.testing.engine import FakeEngine, decode, encode
from ostinato.testing.log import MemoryLog

MAIL, OTHER, PASSWORD = "ann.lee@example.com", "bob@example.org", 'Tr0ub4dor"&3'
TOLD = f"I am {MAIL}. Greet me."
PLACEHOLDER = re.compile("⟨[A-Z_]+_[0-9a-f]{8}⟩")
MASK, HOLD = PrivacyConfig(scrub="mask"), PrivacyConfig(scrub="hold")
SEND = {
    "type": "function",
    "function": {"name": "send", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}},
}


def masking(script, **more):
    """A gateway that masks. `script` gets the placeholders in the prompt, in order and each once."""
    seen = []

    def answer(request):
        text = decode([token for token in request.prompt_ids if token < 0xF8])
        seen.append(text)
        return script(list(dict.fromkeys(PLACEHOLDER.findall(text))))

    w = world(engine=FakeEngine(answer), privacy=MASK, admin_keys=(ADMIN,), **more)
    return w, seen


def everything(log):
    """All that the log holds, as text."""
    rows = [repr(row) for row in log.rows]
    return "\n".join([*rows, *(decode(turn.prompt_ids + turn.sampled_ids) for turn in log.turns())])


ASKS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOLD}]}),
    "system": ("/v1/chat/completions", {"messages": [{"role": "system", "content": TOLD}, {"role": "user", "content": "x"}]}),
    "completion": ("/v1/completions", {"prompt": TOLD}),
    "ids": ("/v1/completions", {"prompt": encode(TOLD)}),
    "responses": ("/v1/responses", {"input": TOLD}),
    "instructions": ("/v1/responses", {"input": "x", "instructions": TOLD}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": TOLD}]}),
    "blocks": (
        "/v1/messages",
        {"system": [{"type": "text", "text": TOLD}], "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ),
}  # fmt: skip


def said(path, body):
    """The text of an answer: as one body, or as a stream's events."""
    if isinstance(body, bytes):
        told = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
        pieces = []
        for event in told:
            for choice in event.get("choices", []):
                pieces.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
            if event.get("type") == "response.output_text.delta":
                pieces.append(event["delta"])
            if event.get("type") == "content_block_delta":
                pieces.append(event["delta"]["text"])
        return "".join(pieces)
    if path == "/v1/responses":
        return body["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return body["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ASKS)
async def test_the_model_and_the_log_see_placeholders_and_the_client_its_own_words(kind, stream):
    path, fields = ASKS[kind]
    masked, seen = masking(lambda found: f"Hello {found[0]}, ⟨, ⟨EMAIL_00000000⟩, ⟨EMAI")
    async with masked as w:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {"model": "m", limit: 200, "stream": stream, **fields}
        status, _, reply = await w.post(path, body)
        assert status == 200, reply
        assert said(path, reply) == f"Hello {MAIL}, ⟨, ⟨EMAIL_00000000⟩, ⟨EMAI"
        assert "ann.lee" not in seen[0] + everything(w.log)
        assert len(w.log.turns()) == 1
        assert PLACEHOLDER.search(w.log.turns()[0].text)
        assert len(next(iter(w.app._calls._items.values()))._memo._kept) == 0


async def test_arguments_of_calls_are_restored_as_json_and_masked_when_they_come_back():
    def script(found):
        mail, password = found[0], found[-1]
        if len(found) > 2:
            return "done"
        return f'Sent.<tool_call>\n{{"name": "send", "arguments": {{"to": "{mail}", "text": "p {password}"}}}}\n</tool_call>'

    masked, seen = masking(script)
    asked = [{"role": "user", "content": f"{TOLD} My password is {PASSWORD.replace(chr(34), '')}"}]
    async with masked as w:
        ask = {"tools": [SEND], "max_tokens": 300, "user": "ann"}
        _, _, body = await w.chat(messages=asked, **ask)
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"to": MAIL, "text": "p Tr0ub4dor&3"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"ok: {MAIL} {OTHER} Tr0ub4dor&3"}
        for path in (False, True):
            await w.chat(messages=[*asked, message, result], stream=path, **ask)
        first, second, third = w.log.turns()
        assert (second.parent, third.parent) == (first.id, first.id)
        assert (second.branch, third.branch) == (Branch.NONE, Branch.AGAIN)
        assert not any(value in "".join(seen) + everything(w.log) for value in (MAIL, OTHER, "Tr0ub4dor&3"))


async def test_a_value_with_quotes_is_escaped_where_the_answer_is_json():
    masked, _ = masking(lambda found: f'{{"to": "{found[0]}"}}')
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "send", "arguments": json.dumps({"password": PASSWORD})},
    }
    asked = [
        {"role": "user", "content": "log in"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"to": {"type": "string"}}}},
    }
    async with masked as w:
        for stream in (False, True):
            _, _, body = await w.chat(messages=asked, response_format=form, stream=stream, max_tokens=99)
            assert json.loads(said("/v1/chat/completions", body)) == {"to": PASSWORD}
        assert "Tr0ub4dor" not in everything(w.log)


async def test_a_conversation_goes_on_in_its_tokens_also_after_a_restart():
    log, asked = MemoryLog(), [{"role": "user", "content": TOLD}]
    masked, _ = masking(lambda found: f"Hello {found[0]}", log=log)
    async with masked as w:
        _, _, body = await w.chat(messages=asked, user="ann")
    asked += [body["choices"][0]["message"], {"role": "user", "content": "Again."}]
    masked, _ = masking(lambda found: f"Hello {found[0]}", log=log)
    async with masked as w:
        _, _, body = await w.chat(messages=asked, user="ann")
        assert body["choices"][0]["message"]["content"] == f"Hello {MAIL}"
        first, second = log.turns()
        assert second.parent == first.id
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


async def test_a_value_that_the_model_made_up_does_not_break_the_conversation():
    masked, _ = masking(lambda found: "Write to support@example.net")
    asked = [{"role": "user", "content": TOLD}]
    async with masked as w:
        _, _, body = await w.chat(messages=asked, user="ann")
        message = body["choices"][0]["message"]
        assert message["content"] == "Write to support@example.net"
        await w.chat(messages=[*asked, message, {"role": "user", "content": "Again."}], user="ann")
        first, second = w.log.turns()
        assert (second.parent, second.branch) == (first.id, Branch.NONE)


async def test_people_do_not_share_placeholders_and_one_cannot_read_anothers():
    told = []
    masked, seen = masking(lambda found: f"so: {found[0]} {told[0] if told else ''}")
    async with masked as w:
        _, _, first = await w.chat(messages=[{"role": "user", "content": TOLD}], user="ann", max_tokens=99)
        told.append(PLACEHOLDER.search(seen[0])[0])
        attack = f"I am {OTHER}. Repeat {told[0]}"
        _, _, body = await w.chat(messages=[{"role": "user", "content": attack}], user="bob", max_tokens=99)
        assert first["choices"][0]["message"]["content"] == f"so: {MAIL} "
        assert body["choices"][0]["message"]["content"] == f"so: {OTHER} {told[0]}"
        await w.chat(messages=[{"role": "user", "content": TOLD}], user="bob")
        assert PLACEHOLDER.search(seen[2])[0] != told[0]


async def test_log_probabilities_name_the_sampled_tokens_and_stop_strings_are_masked():
    masked, _ = masking(lambda found: f"Hi {found[0]} there")
    async with masked as w:
        asked = {"messages": [{"role": "user", "content": TOLD}], "max_tokens": 99}
        for stream in (False, True):
            _, _, body = await w.chat(logprobs=True, stream=stream, **asked)
            choices = [e["choices"][0] for e in events(body) if e != b"[DONE]"] if stream else body["choices"]
            logged = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content", [])]
            spelt = bytes(byte for token in logged for byte in token["bytes"]).decode()
            assert PLACEHOLDER.sub("*", spelt) == "Hi * there"
        await w.chat(stop=[MAIL], **asked)
        assert PLACEHOLDER.fullmatch(w.log.turns()[-1].sampling.stop[0])
        assert "ann.lee" not in everything(w.log)


async def test_a_named_response_and_a_repeated_call_restore_what_their_conversation_said():
    masked, seen = masking(lambda found: f"Hello {found[0]}")
    async with masked as w:
        _, _, first = await w.post("/v1/responses", {"model": "m", "input": TOLD})
        again = {"model": "m", "input": "Again.", "previous_response_id": first["id"]}
        for _ in range(2):
            _, headers, body = await w.post("/v1/responses", again, headers={"idempotency-key": "k"})
            assert body["output"][0]["content"][0]["text"] == f"Hello {MAIL}"
        assert headers["idempotent-replayed"] == "true"
        assert len(w.log.turns()) == 2
        assert "ann.lee" not in "".join(seen) + everything(w.log)


async def test_tools_and_forms_are_masked_and_counted_as_masked():
    masked, seen = masking(lambda found: f"{found[0]}")
    tool = {"type": "function", "function": {"name": "send", "description": f"Sends to {MAIL}.",
            "parameters": {"type": "object", "properties": {"to": {"enum": [MAIL]}}}}}  # fmt: skip
    async with masked as w:
        await w.chat(tools=[tool])
        assert "ann.lee" not in seen[0] + everything(w.log)
        count = {"model": "m", "messages": [{"role": "user", "content": TOLD}]}
        _, _, body = await w.post("/v1/messages/count_tokens", count)
        await w.post("/v1/messages", {**count, "max_tokens": 9})
        assert body["input_tokens"] == len(w.log.turns()[-1].prompt_ids)


class Far:
    """A dealer that always draws the outside arm."""

    def draw(self, available, place):
        return Pick(arm="far", odds={"far": 1.0})


async def test_outside_models_and_the_judge_get_placeholders():
    async with FakeOutside().serving() as fake:
        auto = {"arms": ({"name": "far", "url": fake.url, "model": "far-1"},)}
        masked, _ = masking(lambda _: "", dealer=Far(), auto=auto)
        async with masked as w:
            told = [{"role": "user", "content": TOLD}]
            await w.post("/v1/chat/completions", {"model": "auto", "messages": told})
            fake.text = f"Hello {PLACEHOLDER.search(fake.bodies[0]['messages'][0]['content'])[0]}"
            _, _, body = await w.post("/v1/chat/completions", {"model": "auto", "messages": told})
            assert body["choices"][0]["message"]["content"] == f"Hello {MAIL}"
        fake.text = json.dumps({"label": "complaint"})
        judge = {"url": fake.url, "model": "far-1"}
        masked, _ = masking(lambda found: f"Hello {found[0]}", next_message=True, judge=judge)
        async with masked as w:
            _, _, body = await w.chat(messages=told, user="ann")
            more = {"role": "user", "content": f"No, {MAIL} is wrong."}
            await w.chat(messages=[*told, body["choices"][0]["message"], more], user="ann")
            await eventually(lambda: len(fake.bodies) == 3)
        assert len(PLACEHOLDER.findall(json.dumps(fake.bodies, ensure_ascii=False))) >= 4
        assert "ann.lee" not in json.dumps(fake.bodies)


async def test_comments_and_corrections_get_the_placeholders_of_their_turn():
    masked, seen = masking(lambda found: f"Hello {found[0]}")
    async with masked as w:
        _, _, body = await w.chat(messages=[{"role": "user", "content": TOLD}], user="ann")
        event = {"comment": f"{MAIL} is I", "correction": f"Dear {MAIL}", "id": "s1"}
        early = await w.feedback("chatcmpl-00", **event, name="x")
        w.now += 1
        assert await w.feedback("chatcmpl-00", **event, name="x") == "repeated"
        assert await w.feedback(body["id"], **{**event, "id": "s2"}) == "accepted"
        w.now += 1
        assert await w.feedback(body["id"], **{**event, "id": "s2"}) == "repeated"
        assert await w.feedback(body["id"], **{**event, "id": "s2", "comment": "else"}) == "changed"
        strange, mine = [row for row in w.log.rows if isinstance(row, Signal)][:2]
        placeholder = PLACEHOLDER.search(seen[0])[0]
        assert (mine.comment, mine.correction) == (f"{placeholder} is I", f"Dear {placeholder}")
        assert early == "early"
        assert strange.comment != mine.comment
        assert "ann.lee" not in everything(w.log)


async def test_an_early_event_is_known_again_when_its_turn_is():
    masked, _ = masking(lambda found: "hi")
    log = MemoryLog()
    async with masked as w:
        _, _, body = await w.chat(messages=[{"role": "user", "content": TOLD}], user="ann")
        turn = w.log.turns()[0]
    masked, _ = masking(lambda found: "hi", log=log)
    async with masked as w:
        assert await w.feedback(body["id"], comment=TOLD) == "early"
        await log.append(turn)
        w.now += 1
        w.app._intake.turn(turn)
        assert await w.feedback(body["id"], comment=TOLD) == "repeated"


@pytest.mark.parametrize(
    ("told", "answer", "secret"),
    [(TOLD, "hello", True), ("I am Ann.", f"Is it {MAIL}?", True), ("I am Ann.", "hi", False)],
)
async def test_a_held_turn_is_as_it_was_and_is_not_learned_from(told, answer, secret):
    async with world(answer, privacy=HOLD, admin_keys=(ADMIN,)) as w:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": told}]}),
            ("/v1/completions", {"prompt": told, "max_tokens": 99}),
            ("/v1/completions", {"prompt": encode(told), "max_tokens": 99}),
        ):
            _, _, reply = await w.post(path, {"model": "m", **body})
            assert said(path, reply) == answer
            turn = w.log.turns()[-1]
            assert told in decode(turn.prompt_ids)
            assert turn.secret == secret
            assert untrainable(turn, 0.1) == ("secret" if secret else None)
        names = TURNS.body
        assert load(TURNS, names, json.loads(dump(TURNS, turn, names)))["secret"] == secret
        assert "secret" not in load(TURNS, names[:-1], json.loads(dump(TURNS, turn, names[:-1])))


async def test_without_scrubbing_nothing_is_looked_for():
    async with world("hello") as w:
        await w.chat(messages=[{"role": "user", "content": TOLD}])
        (turn,) = w.log.turns()
        assert TOLD in decode(turn.prompt_ids)
        assert not turn.secret


def test_what_is_wrong_in_the_settings_is_named():
    with pytest.raises(ValidationError, match=r"scrub_ignored(.|\n)*there is no kind 'MAIL'; choose from AWS_KEY_ID"):
        PrivacyConfig(scrub_ignored=("MAIL",))
    with pytest.raises(ValidationError, match="scrub"):
        PrivacyConfig(scrub="hide")
    with pytest.raises(BadConfig, match=r"serve\.admin_key"):
        open_scrubbing(MASK, "short")
    assert open_scrubbing(PrivacyConfig(), "short") is None


# ---------------------------------------------------------------- one request


def scrubber(user="ann", **config):
    return Scrubbing(PrivacyConfig(scrub="mask", **config), b"0123456789abcdef").person("acme", user)


def conversation(*texts):
    return Conversation(messages=tuple(Message(role=Role.USER, text=text) for text in texts))


def test_a_password_is_masked_wherever_it_stands_once_its_words_tell_it():
    one = scrubber()
    masked = one.conversation(conversation("use Hunter2x, Hunter2xy", 'password = "Hunter2x"', "run -p Hunter2x."))
    (placeholder,) = one.values
    first, second, third = (message.text for message in masked.messages)
    assert (first, second, third) == (
        f"use {placeholder}, Hunter2xy", f'password = "{placeholder}"', f"run -p {placeholder}."
    )  # fmt: skip


def test_what_holds_nothing_is_the_same_object():
    told = conversation("Version 3.11.7 of 2026-11-21, commit 9f8b2c1d4e5f60718293a4b5c6d7e8f901234567", "x" * 99)
    assert scrubber().conversation(told) is told


def test_kinds_can_be_left_alone():
    text = f"{MAIL} from 93.184.216.34"
    assert scrubber().text(text).endswith("from 93.184.216.34")
    assert scrubber(scrub_ignored=("EMAIL",)).text(text).startswith(MAIL)
    assert "93.184" not in scrubber(scrub_ignored=("EMAIL",)).text(text)


def test_two_values_with_one_tag_keep_apart():
    first, second = scrubber(), scrubber()
    placeholder = first.text(MAIL)
    second.values[placeholder] = OTHER
    longer = second.text(MAIL)
    assert longer.startswith(placeholder[:-1])
    assert len(longer) == len(placeholder) + 8
    assert second.values == {placeholder: OTHER, longer: MAIL}
    assert second.text(longer) == longer


def test_lone_surrogates_pass():
    text = f"\ud800 {MAIL} \udfff"
    masked = scrubber().text(text)
    assert (masked[0], masked[-1]) == ("\ud800", "\udfff")
    assert MAIL not in masked


async def test_a_summary_is_handed_over_with_its_values_and_masked_when_it_comes_back():
    masked, seen = masking(lambda found: f"Done so far: wrote to {found[0]}.")
    summarise = {"model": "m", "max_tokens": 200, "metadata": {"user_id": "ann"}, "compaction": {"type": "summarize"}}
    async with masked as w:
        talk = [{"role": "user", "content": TOLD}, {"role": "assistant", "content": "Hello."}]
        status, _, body = await w.post("/v1/messages", summarise | {"messages": talk})
        assert status == 200, body
        (block,) = body["content"]
        assert block["content"] == f"Done so far: wrote to {MAIL}."
        goes_on = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on."}]
        asked = {name: value for name, value in summarise.items() if name != "compaction"}
        status, _, body = await w.post("/v1/messages", asked | {"messages": goes_on})
        assert status == 200, body
        assert MAIL in body["content"][0]["text"]
        first, second = w.log.turns()
        assert second.window is not None
        assert second.window.begins_with == first.id
    assert MAIL not in everything(w.log)
    assert "wrote to ⟨EMAIL_" in seen[1]
