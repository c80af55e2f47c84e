"""What may be done with a turn: the strictest of the operator's settings and the request decides before the first token."""

import asyncio
import itertools
from dataclasses import fields

import pytest
from gateway_world import ADMIN, V0, V1, eventually, world
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadConfig, BadRequest, Unavailable
from ostinato.core.notices import Forgotten
from ostinato.core.records import Consent, ConsentGiven, Finish, Signal, Turn
from ostinato.serve.config import PrivacyConfig
from ostinato.serve.feedback import intake
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato_client import sign_user

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
    erased = "prompt_ids sampled_ids logprobs text routes nucleus calls steered style _packed_prompt"
    assert {field.name for field in fields(Turn)} == {*stays.split(), *erased.split()}


@in_virtual_time
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


@in_virtual_time
@pytest.mark.parametrize("key", [ADMIN, BOLT])
async def test_nobody_elses_words_about_it_are_kept(key):
    engine = FakeEngine(lambda _: "hello", delay_s=0.01)
    async with world(engine=engine, admin_keys=(ADMIN,), **KEYS) as w:
        asked = asyncio.ensure_future(w.chat(headers=w.key(ACME, **train("never"))))
        await eventually(lambda: w.engine.requests)
        (turn,) = (f"{request.id}:0" for request in w.engine.requests)
        said = {"key": key, "comment": SECRET, "correction": SECRET}
        assert not w.log.turns()
        assert await w.feedback(turn, id="s1", **said) == "early"
        await asked
        assert await w.feedback(turn, id="s2", **said) == "early"
        _, headers, _ = await w.chat(headers=w.key(ACME))
        assert await w.feedback(headers["x-ostinato-turn"], id="s3", **said) == "early"
        told = {row.id: (row.comment, row.correction) for row in w.log.rows if isinstance(row, Signal)}
        assert told == {"s1": (None, None), "s2": (None, None), "s3": (SECRET, SECRET)}


@in_virtual_time
async def test_no_other_tenant_can_have_words_about_it_kept(monkeypatch):
    class Picky(FakeEngine):
        async def generate(self, request):
            if request.n == 2:
                raise BadRequest("no")
            async for chunk in super().generate(request):
                yield chunk

    monkeypatch.setattr(intake, "_MAX_PENDING", 4)
    monkeypatch.setattr(intake, "_MIN_PENDING", 1)
    async with world(engine=Picky(lambda _: "hello", delay_s=0.01), **KEYS) as w:
        asked = asyncio.ensure_future(w.chat(headers=w.key(ACME, **train("never"))))
        await eventually(lambda: w.engine.requests)
        (turn,) = (f"{request.id}:0" for request in w.engine.requests)
        for _ in range(3):  # of which no turn comes
            assert (await w.chat(headers=w.key(BOLT, **train("never")), n=2))[0] == 400
        assert await w.feedback(turn, key=ACME, id="s1", comment=SECRET) == "early"
        await asked
        assert await w.feedback(turn, key=ACME, id="s2", comment=SECRET) == "accepted"
        assert [row.comment for row in w.log.rows if isinstance(row, Signal)] == [None, None]


async def test_of_many_tenants_no_more_turns_are_remembered_than_of_one(monkeypatch):
    monkeypatch.setattr(intake, "_MAX_PENDING", 200)
    monkeypatch.setattr(intake, "_MIN_PENDING", 1)
    tenants = [f"t{number}" for number in range(50)]
    async with world(api_keys=tuple(f"{tenant}:sk-{tenant}-0123456789" for tenant in tenants)) as w:
        kept = w.app._intake
        for tenant in tenants:
            kept.drop_text_of(tenant, [f"{tenant}-{number}:0" for number in range(100)])
        counts = [len(kept._pending[tenant]) for tenant in tenants]
        assert len(kept._unkept) == sum(counts) <= 200
        assert min(counts) > 1


async def test_words_about_it_are_not_kept_once_it_is_no_longer_remembered(monkeypatch):
    monkeypatch.setattr(intake, "_MAX_TURNS", 2)
    async with world(**KEYS) as w:
        _, headers, _ = await w.chat(headers=w.key(ACME, **train("never")))
        for _ in range(3):
            await w.chat(headers=w.key(BOLT))
        assert not w.app._intake._unkept
        assert await w.feedback(headers["x-ostinato-turn"], key=ACME, comment=SECRET) == "accepted"
        assert [row.comment for row in w.log.rows if isinstance(row, Signal)] == [None]


async def test_what_another_tenant_is_told_of_it_is_what_a_turn_that_does_not_exist_gets():
    async with world(**KEYS) as w:
        _, headers, _ = await w.chat(headers=w.key(ACME, **train("never")))
        told = []
        for id, target in (("s1", headers["x-ostinato-turn"]), ("s2", "chatcmpl-0123456789abcdef0123456789abcdef:0")):
            told.append([])
            for said in ({"comment": "one"}, {"comment": "another"}, {"name": "rejected"}):
                told[-1].append(await w.feedback(target, key=BOLT, id=id, **said))
                w.now += 1.0
        assert told == [["early", "repeated", "changed"]] * 2  # of words that are not stored nothing is compared


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


# ---------------------------------------------------------------- a person's recorded choice


SECRET_OF_ACME = "the secret of acme"


async def choose(w, user, level, key=ACME, **headers):
    reply = await w.http.put("/v1/consent", json={"user": user, "train": level}, headers=w.key(key, **headers))
    return reply.status_code, reply.json()


async def chosen(w, user, key=ACME):
    reply = await w.http.get("/v1/consent", headers=w.key(key, **{"x-ostinato-user": user}))
    assert reply.status_code == 200
    return reply.json()


async def test_a_persons_choice_counts_from_the_next_turn_on_for_that_person_alone():
    log = MemoryLog()
    async with world(**KEYS, log=log) as w:
        await w.chat(headers=w.key(ACME), user="ann")
        assert await choose(w, "ann", "aggregate") == (
            200,
            {"user": "ann", "train": "aggregate", "applied": "aggregate"},
        )
        for key, user in ((ACME, "ann"), (ACME, "bob"), (BOLT, "ann")):
            await w.chat(headers=w.key(key), user=user)
        await w.chat(headers=w.key(ACME, **train("never")), user="ann")
        assert [turn.consent for turn in log.turns()] == [YES, AGGREGATE, YES, YES, NEVER]
        assert (await chosen(w, "ann", BOLT))["train"] == "yes"
        assert await choose(w, "ann", "aggregate") == await choose(w, "ann", "aggregate")
    assert len([row for row in log.rows if isinstance(row, ConsentGiven)]) == 1, "a repeat makes no row"
    async with world(**KEYS, log=log, privacy=PrivacyConfig(tenants={"acme": NEVER})) as w:  # after a restart
        assert await chosen(w, "ann") == {"user": "ann", "train": "aggregate", "applied": "never"}


@pytest.mark.parametrize(
    "user", ["\u0639\u0644\u06cc\u200c\u0631\u0636\u0627", "\U0001f469\u200d\U0001f4bb", "山田\u3000太郎"]
)
async def test_whoever_can_be_named_in_a_body_can_be_named_in_a_header(user):
    async with world(**KEYS) as w:
        assert (await choose(w, user, "adapt"))[0] == 200
        assert (await chosen(w, user.encode()))["user"] == user
        assert (await w.chat(headers=w.key(ACME, **{"x-ostinato-user": user.encode()})))[0] == 200
        assert [(turn.user, turn.consent) for turn in w.log.turns()] == [(user, ADAPT)]


async def test_only_the_user_or_an_operator_takes_a_refusal_back():
    keys = {**KEYS, "user_keys": (f"acme:{SECRET_OF_ACME}",)}
    async with world(**keys, admin_keys=(ADMIN,)) as w:
        assert (await choose(w, "ann", "aggregate"))[0] == 200
        assert (await choose(w, "ann", "never"))[0] == 200  # stricter
        signed = {"x-ostinato-user-signature": sign_user(SECRET_OF_ACME, "ann", now=w.now)}
        for wrong in ({}, {"x-ostinato-user-signature": sign_user(SECRET_OF_ACME, "bob", now=w.now)}):
            status, body = await choose(w, "ann", "yes", **wrong)
            assert (status, body["error"]["code"]) == (401, "unauthorized")
            assert "X-Ostinato-User-Signature" in body["error"]["message"]
        assert (await chosen(w, "ann"))["train"] == "never"
        assert (await choose(w, "ann", "adapt", **signed))[1]["train"] == "adapt"
        status, body = await choose(w, "ann", "yes", **{"x-ostinato-key": ADMIN})
        assert (status, body["train"]) == (200, "yes")
        await w.chat(headers=w.key(ACME), user="ann")
        assert w.log.turns()[-1].consent is YES


class AtOnce(MemoryLog):
    """Another gateway records `never` for the person in the instant in which a looser choice is written."""

    def __init__(self):
        super().__init__()
        self.other = None

    async def append(self, *rows):
        if any(isinstance(row, ConsentGiven) and row.level is ADAPT for row in rows) and self.other is not None:
            other, self.other = self.other, None
            assert await other.add(rows[0].person, NEVER, 1.0)
        return await super().append(*rows)


@pytest.mark.parametrize("signed", [True, False])
async def test_of_two_choices_in_one_instant_the_looser_does_not_slip_behind_the_stricter(signed):
    """The later one in the log counts on every gateway; it is checked against the one before it, although nobody knew that when it came."""
    log, keys = AtOnce(), {**KEYS, "user_keys": (f"acme:{SECRET_OF_ACME}",)}
    async with world(**keys, log=log) as one, world(**keys, log=log) as two:
        log.other = two.app._choices
        await log.other.refresh()
        headers = {"x-ostinato-user-signature": sign_user(SECRET_OF_ACME, "ann", now=one.now)} if signed else {}
        assert (await choose(one, "ann", "adapt", **headers))[0] == (200 if signed else 401)
        for w in (one, two):
            await w.app._choices.refresh()
        told = [w.app._choices.of(("acme", "ann")) for w in (one, two)]
        assert told == [ADAPT if signed else NEVER] * 2
        levels = [row.level for row in log.rows if isinstance(row, ConsentGiven)]
        assert levels == ([NEVER, ADAPT] if signed else [NEVER])


async def test_choices_that_are_recorded_at_once_are_the_same_on_every_gateway():
    log = MemoryLog()
    async with world(**KEYS, log=log) as one, world(**KEYS, log=log) as two:
        wishes = [(w, level) for w in (one, two) for level in ("adapt", "aggregate", "never")]
        await asyncio.gather(*(choose(w, "ann", level) for w, level in wishes))
        for w in (one, two):
            await w.app._choices.refresh()
        assert [w.app._choices.of(("acme", "ann")) for w in (one, two)] == [NEVER] * 2
        levels = [row.level for row in log.rows if isinstance(row, ConsentGiven)]
        assert levels == sorted(levels, key=list(Consent).index, reverse=True), "each stricter than the one before"


async def test_a_choice_that_cannot_be_recorded_is_refused_by_name():
    async with world(**KEYS) as w:
        for body, field in (
            ({"user": "ann", "train": "no"}, "train"),
            ({"user": "", "train": "never"}, "user"),
            ({"user": "anonymous", "train": "never"}, "user"),
            ({"user": "ann"}, "train"),
            ({"user": "ann", "train": "never", "level": 1}, "level"),
        ):
            reply = await w.http.put("/v1/consent", json=body, headers=w.key(ACME))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert (await w.http.get("/v1/consent", headers=w.key(ACME))).status_code == 400
        assert (await choose(w, "ann", "never", key="sk-nobody-0123456789"))[0] == 401
        assert not w.log.rows


async def test_what_another_gateway_records_is_heard():
    log = MemoryLog()
    async with world(log=log) as one, world(log=log) as other:
        await choose(one, "ann", "never", key=None)
        await other.app._choices.refresh()  # as it does each second
        await other.chat(user="ann")
    assert [turn.consent for turn in log.turns()] == [NEVER]


class Unreadable(MemoryLog):
    """A log whose rows about consent cannot be read."""

    broken = True
    error = Unavailable("away")

    async def read(self, after, kinds):
        if self.broken and ConsentGiven in kinds:
            raise self.error
        async for item in super().read(after, kinds):
            yield item


async def test_nobody_is_taken_to_agree_while_the_log_cannot_tell():
    log = Unreadable()
    await log.append(ConsentGiven(id="c", tenant="default", user="ann", level=NEVER, at=1.0))
    async with world(log=log) as w:
        for user in ("ann", "bob"):
            assert (await w.chat(user=user))[0] == 200
        log.broken = False
        await w.app._choices.refresh()
        for user in ("ann", "bob"):
            assert (await w.chat(user=user))[0] == 200
    assert [turn.consent for turn in log.turns()] == [NEVER, NEVER, NEVER, Consent.YES]


@in_virtual_time
async def test_no_failure_of_a_look_ends_the_following():
    log = Unreadable()
    log.broken = False
    async with world(log=log) as w:
        log.broken, log.error = True, RuntimeError("a fault of ours")
        await asyncio.sleep(5)
        log.broken = False
        await log.append(ConsentGiven(id="c", tenant="default", user="ann", level=NEVER, at=1.0))
        await eventually(lambda: w.app._choices.of(("default", "ann")) is NEVER)


async def test_a_page_may_ask_for_both_methods():
    async with world(allowed_hosts=("shop.example.org",)) as w:
        asked = {"origin": "https://shop.example.org", "access-control-request-method": "PUT"}
        reply = await w.http.request("OPTIONS", "/v1/consent", headers=asked)
        assert set(reply.headers["access-control-allow-methods"].replace(" ", "").split(",")) >= {"GET", "PUT"}


@pytest.mark.parametrize("gone", ["ann", None])
async def test_of_who_was_forgotten_a_running_gateway_keeps_no_conversation(gone):
    """Of others of the tenant, and of the same name elsewhere, it keeps theirs."""
    async with world(engine=counting(), **KEYS, next_message=True) as w:

        async def turns_of(key, user, said):
            _, _, body = await w.chat(headers=w.key(key), messages=said, user=user)
            said += [body["choices"][0]["message"], {"role": "user", "content": "And now?"}]
            return w.log.turns()[-1]

        async def response(key, user, before):
            asked = {"model": "m", "input": f"I am {user}", "user": user}
            more = {} if before is None else {"previous_response_id": before}
            status, _, body = await w.post("/v1/responses", {**asked, **more}, headers=w.key(key))
            return status, body.get("id")

        people = [(ACME, "ann"), (ACME, "bob"), (BOLT, "ann")]
        said = {each: [{"role": "user", "content": "Convert them."}] for each in people}
        first = {each: await turns_of(*each, said[each]) for each in people}
        kept = {each: (await response(*each, None))[1] for each in people}
        await w.log.append(Forgotten(id="g", tenant="acme", user=gone, key=1, at=9.0))
        assert (await w.get("/v1/consent", {"x-ostinato-user": "bob", **w.key(ACME)}))[0] == 200  # it reads the log
        for each in people:
            forgotten = each == (ACME, "ann") or (gone is None and each[0] == ACME)
            second = await turns_of(*each, said[each])
            assert (second.parent, second.episode == first[each].episode) == (
                (None, False) if forgotten else (first[each].id, True)
            )
            assert (await response(*each, kept[each]))[0] == (400 if forgotten else 200)
