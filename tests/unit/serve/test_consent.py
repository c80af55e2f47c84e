"""What may be done with a turn: the strictest of the operator's settings and the request decides before the first token."""

import asyncio
import itertools
from dataclasses import fields

import pytest
from gateway_world import ADMIN, V0, V1, eventually, world

from ostinato.core.errors import BadConfig
from ostinato.core.records import Consent, Finish, Signal, Turn
from ostinato.serve.config import PrivacyConfig
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog

NEVER, AGGREGATE, ADAPT, YES = Consent
ACME, BOLT = "sk-acme-0123456789", "sk-bolt-0123456789"
KEYS = {"api_keys": (f"acme:{ACME}", f"bolt:{BOLT}")}
SECRET = "quokkapatience"
READ = {"name": "read", "description": SECRET, "parameters": {"type": "object", "properties": {SECRET: {}}}}
CALL = f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{SECRET}"}}}}\n</tool_call>'
ASKED = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": SECRET}],
        "stop": [SECRET.upper()],
        "logit_bias": {"7": 1.5},
        "tools": [{"type": "function", "function": READ}],
        "metadata": {"note": SECRET},
        "logprobs": True,
        "top_p": 0.9,
        "n": 2,
    },
    "/v1/completions": {"prompt": SECRET, "max_tokens": 200},
    "/v1/responses": {"input": SECRET, "instructions": SECRET, "metadata": {"note": SECRET}},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 200, "stop_sequences": [SECRET]},
}


def train(level):
    return {} if level is None else {"x-ostinato-train": level}


def counting():
    numbers = itertools.count()
    return FakeEngine(lambda _: f"answer {next(numbers)}")


@pytest.mark.parametrize(("run", "tenant"), [*itertools.product(Consent, Consent)])
async def test_the_strictest_of_all_sources_counts(run, tenant):
    privacy = PrivacyConfig(train=run, tenants={"acme": tenant}, store_false=ADAPT)
    async with world(**KEYS, privacy=privacy) as w:
        for asked, store in itertools.product([None, *Consent], [None, True, False]):
            more = {} if store is None else {"store": store}
            for key, allowed in ((ACME, {run, tenant}), (BOLT, {run})):
                status, headers, _ = await w.chat(headers=w.key(key, **train(asked)), **more)
                assert status == 200
                named = allowed | ({asked} if asked else set()) | ({ADAPT} if store is False else set())
                strictest = next(level for level in (NEVER, AGGREGATE, ADAPT, YES) if level in named)
                assert w.log.turns()[-1].consent is strictest
                assert headers.get("x-ostinato-train") == (None if strictest is YES else strictest)


async def test_an_unknown_level_is_refused_by_name_and_nothing_is_sampled():
    async with world() as w:
        for said in ("no", "Never", "never, yes"):
            status, _, body = await w.chat(headers=train(said))
            assert (status, body["error"]["param"]) == (400, "X-Ostinato-Train")
            assert "never, aggregate, adapt, yes" in body["error"]["message"]
        status, _, body = await w.chat(store="no")
        assert (status, body["error"]["param"]) == (400, "store")
        assert not w.engine.requests


def test_a_level_for_a_tenant_without_a_key_is_refused_at_the_start():
    with pytest.raises(BadConfig, match=r"privacy\.tenants: no key belongs to a tenant 'bnak'"):
        asyncio.run(_start(KEYS, PrivacyConfig(tenants={"bnak": NEVER})))


async def _start(keys, privacy):
    async with world(**keys, privacy=privacy):
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_a_turn_that_must_not_be_kept_is_stored_without_a_word(path, stream):
    async with world(CALL) as w:
        for level in ("never", "yes"):
            status, _, body = await w.post(path, {"model": "m", "stream": stream, **ASKED[path]}, headers=train(level))
            assert status == 200
            assert stream or SECRET in str(body)  # its caller has the whole answer
        turns = w.log.turns()
        unkept, kept = turns[: len(turns) // 2], turns[len(turns) // 2 :]
        for turn, other in zip(unkept, kept, strict=True):
            assert (turn.consent, turn.redacted, turn.calls) == (NEVER, True, None)
            assert SECRET not in repr(turn)
            for name in ("prompt_ids", "sampled_ids", "logprobs", "text", "routes", "nucleus"):
                assert not getattr(turn, name)
            assert (turn.sampling.stop, turn.sampling.logit_bias, turn.sampling.grammar) == ((), (), "")
            assert turn.spans == other.spans  # counts remain
            assert (turn.finish, turn.user, turn.arm) == (other.finish, other.user, other.arm)
            assert SECRET in decode(other.prompt_ids), "the search finds what is kept"


def test_every_field_of_a_turn_is_either_erased_or_no_words():
    """A new field must be decided on: erased by `without_words`, or named here."""
    stays = "id episode parent user tenant arm propensity spans sampling finish started_at ended_at numerics group verified auto purpose"
    stays += " branch harness window consent secret"
    erased = "prompt_ids sampled_ids logprobs text routes nucleus calls steered _packed_prompt"
    assert {field.name for field in fields(Turn)} == {*stays.split(), *erased.split()}


async def test_words_about_it_are_not_kept_whenever_they_come():
    log = MemoryLog()
    engine = FakeEngine(lambda _: "hello", delay_s=0.01)
    async with world(engine=engine, log=log) as w:
        asked = asyncio.ensure_future(w.chat(headers={**train("never"), "idempotency-key": "k"}))
        await eventually(lambda: w.engine.requests)
        (turn,) = (f"{request.id}:0" for request in w.engine.requests)
        assert not log.turns()
        said = {"comment": SECRET, "correction": SECRET}
        assert await w.feedback(turn, id="early", **said) == "early"
        await asked
        assert [each.id for each in log.turns()] == [turn]
        assert await w.feedback(turn, id="later", **said) == "accepted"
        w.now += 1.0
        assert await w.feedback(turn, id="later", **said) == "repeated"
    async with world(log=log) as w:
        assert await w.feedback(turn, id="after a restart", **said) == "accepted"
        _, _, reply = await w.chat()
        assert await w.feedback(reply["ostinato"]["turns"][0], id="other", **said) == "accepted"
    signals = {row.id: row for row in log.rows if isinstance(row, Signal)}
    assert {id: (row.value, row.comment, row.correction) for id, row in signals.items()} == {
        **dict.fromkeys(("early", "later", "after a restart"), (1.0, None, None)),
        "other": (1.0, SECRET, SECRET),
    }


async def test_a_conversation_goes_on_after_it_from_the_words_that_are_sent():
    said = [{"role": "user", "content": "one"}]
    async with world(engine=counting()) as w:
        for level in ("yes", "never", "yes"):
            _, _, body = await w.chat(headers=train(level), messages=said, user="ann")
            said += [body["choices"][0]["message"], {"role": "user", "content": "and?"}]
        first, unkept, last = w.log.turns()
        assert unkept.parent == first.id  # it may go on from what is kept
        assert last.parent == first.id  # and nothing goes on from it
        assert "answer 1" in decode(last.prompt_ids)  # its own request said so


async def test_an_answer_that_is_not_kept_is_not_named_later():
    async with world(engine=counting()) as w:
        _, _, first = await w.post("/v1/responses", {"model": "m", "input": "one"})
        asked = {"model": "m", "input": "two", "previous_response_id": first["id"]}
        status, _, second = await w.post("/v1/responses", asked, headers=train("never"))
        assert status == 200
        status, _, body = await w.post("/v1/responses", asked | {"previous_response_id": second["id"]})
        assert (status, body["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_repeat_under_an_idempotency_key_is_answered_anew():
    log, headers = MemoryLog(), {"idempotency-key": "k", **train("never")}
    async with world(engine=counting(), log=log) as w:
        _, _, first = await w.chat(headers=headers)
        _, _, again = await w.chat(headers=headers)
    async with world(engine=FakeEngine(lambda _: "answer 2"), log=log) as w:
        _, _, third = await w.chat(headers=headers)
    said = [each["choices"][0]["message"]["content"] for each in (first, again, third)]
    assert said == ["answer 0", "answer 1", "answer 2"]
    assert len({turn.id for turn in log.turns()}) == 3
    assert all(turn.redacted for turn in log.turns())


async def test_calls_of_evaluations_and_rollouts_are_the_operators_own():
    engine = FakeEngine(lambda _: "hello", slots={"live": V0, "world": V1})
    privacy = PrivacyConfig(train=NEVER)
    async with world(engine=engine, admin_keys=(ADMIN,), privacy=privacy) as w:
        slot = {"x-ostinato-key": ADMIN, "x-ostinato-slot": "world"}
        await w.chat(headers=slot, store=False)  # a coding agent in a simulated world sends it, too
        await w.chat(headers={**slot, **train("aggregate")})
        await w.chat()
        assert [turn.consent for turn in w.log.turns()] == [YES, AGGREGATE, NEVER]


async def test_a_client_that_leaves_leaves_no_words():
    async with world(engine=FakeEngine(lambda _: SECRET, delay_s=0.01), real=True) as w:
        body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "stream": True}
        reader, writer = await w.connect(body, "x-ostinato-train: never")
        await reader.readuntil(b"content")
        writer.transport.abort()
        await eventually(lambda: w.log.turns())
        (turn,) = w.log.turns()
        assert turn.finish in (Finish.LEFT, Finish.ABORT)
        assert SECRET not in repr(turn)
        assert turn.redacted


async def test_next_messages_tell_nothing_of_it():
    said = [{"role": "user", "content": "Convert them."}]
    async with world(engine=counting(), next_message=True) as w:
        for level in ("yes", "never", "yes", "yes"):
            _, _, body = await w.chat(headers=train(level), messages=said, user="ann", temperature=1.0)
            said += [body["choices"][0]["message"], {"role": "user", "content": "No, that is wrong."}]
            w.now += 10.0
    turns = {turn.id: turn.consent for turn in w.log.turns()}
    about = [turns[row.turn] for row in w.log.rows if isinstance(row, Signal)]
    assert about == [YES]  # the third answer, by the fourth message: neither the never's answer nor the never's words


async def test_levels_are_counted():
    async with world() as w:
        for level in ("never", "never", "aggregate", "yes"):
            await w.chat(headers=train(level))
        _, page = await w.get("/metrics")
        counted = [line for line in page.splitlines() if line.startswith("ostinato_consent_turns_total")]
        assert {(line.split('"')[1], line.split()[-1]) for line in counted} == {
            ("never", "2.0"),
            ("aggregate", "1.0"),
            ("yes", "1.0"),
        }
