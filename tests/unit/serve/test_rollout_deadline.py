"""What only rollouts ask: an answer within the time that is left, and the probability of a known answer."""

import asyncio
import json
import math

import pytest
from gateway_world import ADMIN, ASK, V0, events, eventually, world
from tests.fakes.stalling_engine import Stalls

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Arm, Finish
from ostinato.engine.config import EngineConfig
from ostinato.testing.engine import FakeEngine
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.tasks.task import KnownAnswer

WORLD = {"x-ostinato-key": ADMIN, "x-ostinato-slot": "world"}
PRODUCT = "product-0123456789abcdef"


def gateway(engine, **more):
    return world(engine=engine, admin_keys=[ADMIN], api_keys=[f"acme:{PRODUCT}"], **more)


async def asked(w, path="/v1/chat/completions", body=ASK, **more):
    """An answer that was cut after it had begun: a busy machine is given more time to begin."""
    for left in (300, 3_000, 30_000):
        status, headers, said = await w.post(path, {**body, **more}, headers={**WORLD, "x-ostinato-left-ms": f"{left}"})
        if status != 504 and b"deadline_passed" not in (said if isinstance(said, bytes) else b""):
            return status, headers, said
    raise AssertionError(said)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_its_time_ended_is_kept_with_all_that_was_sampled(stream):
    async with gateway(Stalls(3)) as w:
        status, _, said = await asked(w, stream=stream)
        (turn,) = w.log.turns()
        assert status == 200
        assert (turn.finish, turn.finish.trainable, turn.text) == (Finish.DEADLINE, True, "hel")
        assert len(turn.sampled_ids) == len(turn.logprobs) == 3
        assert [span.tokens for span in turn.spans] == [3]
        last = events(said)[-2] if stream else said
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["ostinato"]["deadline"] == [turn.id]
        assert w.engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/messages", {"model": "m", "max_tokens": 99, "messages": ASK["messages"]}, "max_tokens"),
        ("/v1/responses", {"model": "m", "input": "hi"}, "incomplete"),
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 99}, "length"),
    ],
)
async def test_every_dialect_says_so_in_its_own_words(path, body, says, stream):
    async with gateway(Stalls(3)) as w:
        status, _, said = await asked(w, path, body, stream=stream)
        assert status == 200
        text = said.decode() if isinstance(said, bytes) else json.dumps(said)
        assert f'"{says}"' in text
        (turn,) = w.log.turns()
        assert turn.finish is Finish.DEADLINE
        assert f'"deadline":["{turn.id}"]' in text.replace(": ", ":")


async def test_of_several_answers_those_that_were_cut_are_named():
    class OneEnds(Stalls):
        async def generate(self, request):
            ended = False
            async for chunk in super().generate(request):
                if chunk.index == 1 or not ended:
                    yield (
                        chunk
                        if chunk.index
                        else type(chunk)(
                            index=0,
                            ids=chunk.ids,
                            logprobs=chunk.logprobs,
                            policy=V0,
                            text=chunk.text,
                            finish=Finish.STOP,
                        )
                    )
                ended = ended or chunk.index == 0

    async with gateway(OneEnds(3)) as w:
        _, _, said = await asked(w, n=2)
        assert [choice["finish_reason"] for choice in said["choices"]] == ["stop", "length"]
        assert said["ostinato"]["deadline"] == [said["ostinato"]["turns"][1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left", ["0", "150"])
async def test_where_nothing_was_said_in_time_there_is_no_turn(left, stream):
    async with gateway(Stalls(0)) as w:
        status, _, said = await w.chat({**WORLD, "x-ostinato-left-ms": left}, stream=stream)
        assert (status, said["error"]["code"]) == (504, "deadline_passed")
        assert w.log.rows == []
        assert (w.engine.running, len(w.engine.requests)) == (0, int(left != "0"))


async def test_a_stream_that_has_shown_signs_of_life_ends_with_the_error():
    async with gateway(Stalls(0), heartbeat_s=0.02, real=True) as w:
        status, _, raw = await w.chat({**WORLD, "x-ostinato-left-ms": "400"}, stream=True)
        assert (status, events(raw)[-1]["error"]["code"]) == (200, "deadline_passed")
        assert w.log.rows == []


async def test_the_same_call_again_gets_the_same_answer_and_hears_the_same_of_it():
    async with gateway(Stalls(3)) as w:
        bodies = []
        for left in ("1000", "10000", "100000", "999999999"):  # a busy machine may not even begin in the first
            headers = {**WORLD, "x-ostinato-left-ms": left, "idempotency-key": "k"}
            status, _, body = await w.chat(headers)
            bodies += [body] * (status == 200)
            if len(bodies) == 2:
                break
        assert bodies[0] == bodies[1]
        assert len(w.log.turns()) == 1
        assert bodies[0]["ostinato"]["deadline"] == [w.log.turns()[0].id]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {PRODUCT}"},
        {"authorization": f"Bearer {PRODUCT}", "x-ostinato-slot": "world"},
        {"authorization": f"Bearer {PRODUCT}", "x-ostinato-episode": "e"},
        {"x-ostinato-key": ADMIN},
    ],
)
async def test_who_names_no_slot_is_refused_and_nothing_is_sampled(headers):
    """A person's turn that somebody's clock cuts would be learned from as if the model had ended it."""
    async with gateway(Stalls(3)) as w:
        status, _, said = await w.chat({**headers, "x-ostinato-left-ms": "5000"})
        assert (status, said["error"]["code"]) == (401, "unauthorized")
        assert (w.engine.requests, w.log.rows) == ([], [])


async def test_nor_may_anybody_where_no_keys_are_asked_for():
    async with world(engine=Stalls(3)) as w:
        assert (await w.chat({"x-ostinato-left-ms": "5000"}))[0] == 401
        assert w.engine.requests == []


@pytest.mark.parametrize("left", ["-1", "NaN", "inf", "1e3", "0.5", "5 5", "1000000000", "9" * 400, "\u0665"])
async def test_what_is_no_time_is_refused(left):
    async with gateway(FakeEngine(slots={"live": V0, "world": V0})) as w:
        raw = {name: value.encode() for name, value in {**WORLD, "x-ostinato-left-ms": left}.items()}
        status, _, said = await w.chat(raw)
        assert (status, said["error"]["param"]) == (400, "X-Ostinato-Left-Ms")
        assert w.engine.requests == []


async def test_the_longest_time_changes_nothing():
    async with gateway(FakeEngine(lambda _: "hello", slots={"live": V0, "world": V0})) as w:
        status, _, said = await w.chat({**WORLD, "x-ostinato-left-ms": "999999999"})
        assert (status, said["choices"][0]["finish_reason"]) == (200, "stop")
        assert "deadline" not in said["ostinato"]
        assert w.engine.requests[0].within_s == pytest.approx(999_999, abs=60)


async def test_a_wall_clock_that_jumps_is_not_asked():
    async with gateway(Stalls(3)) as w:
        w.engine.tokens = 100
        for jump in (1e9, -2e9):
            w.now += jump
            status, _, said = await w.chat({**WORLD, "x-ostinato-left-ms": "60000"})
            assert (status, said["choices"][0]["finish_reason"]) == (200, "stop")
            assert 0 < w.engine.requests[-1].within_s <= 60


async def test_many_that_end_at_once_all_end():
    async with gateway(Stalls(3), real=True) as w:
        said = await asyncio.gather(*(asked(w) for _ in range(60)))
        assert {status for status, _, _ in said} == {200}
        turns = w.log.turns()
        assert len(turns) == 60
        assert {turn.finish for turn in turns} == {Finish.DEADLINE}
        assert w.engine.running == 0


# ---------------------------------------------------------------- the probability of a known answer

SCORE = "/v1/worlds/score"
LIVE = {**WORLD, "x-ostinato-slot": "live"}


async def test_an_answer_is_scored_behind_its_conversation_by_the_slots_weights_and_nothing_is_kept():
    class Scores(FakeEngine):
        async def score(self, slot, ids, start, cache_salt=""):
            self.scored = slot, tuple(ids), start, cache_salt
            return await super().score(slot, ids, start)

    async with gateway(Scores()) as w:
        status, _, said = await w.post(SCORE, {**ASK, "max_tokens": 1, "answer": "yes"}, headers=LIVE)
        assert status == 200, said
        prompt = tuple(w.renderer.chat(Conversation(messages=(Message(role=Role.USER, text="hi"),))))
        answer = tuple(w.renderer.encode("yes"))
        assert w.engine.scored == ("live", prompt + answer, len(prompt), "default")
        assert said == {"logprobs": await FakeEngine.score(w.engine, *w.engine.scored)}
        assert not w.log.turns()


@pytest.mark.parametrize(
    ("headers", "body", "status", "names"),
    [
        ({"x-api-key": PRODUCT}, {"answer": "yes"}, 400, "X-Ostinato-Slot"),
        ({"x-api-key": PRODUCT, "x-ostinato-slot": "world"}, {"answer": "yes"}, 401, "X-Ostinato-Slot"),
        ({"x-ostinato-key": ADMIN}, {"answer": "yes"}, 400, "X-Ostinato-Slot"),
        ({**WORLD, "x-ostinato-slot": "nowhere"}, {"answer": "yes"}, 404, "nowhere"),
        (WORLD, {}, 400, "answer"),
        (WORLD, {"answer": ""}, 400, "answer"),
        (WORLD, {"answer": "yes", "messages": []}, 400, "messages"),
        (WORLD, {"answer": "yes" * 5_000}, 400, "context"),
        (WORLD, {"answer": "yes", "colour": 1}, 400, "colour"),
    ],
)
async def test_who_may_not_score_or_asks_wrongly_is_told_why(headers, body, status, names):
    async with gateway(FakeEngine()) as w:
        found, _, said = await w.post(SCORE, {**ASK, **body}, headers=headers)
        assert found == status, said
        assert names in json.dumps(said)


async def test_what_a_rollout_asks_comes_back_as_the_mean_probability_of_a_token():
    known = KnownAnswer(question="Which?", answer="ab")
    async with gateway(FakeEngine(), real=True) as w, WorldGateway(w.url, ADMIN, slot="live") as asked:
        for messages in ((), (Message(role=Role.USER, text="hi"),), (Message(role=Role.ASSISTANT, text="hm"),)):
            found = await asked.belief(messages, known)
            logprobs = await w.engine.score("live", [0, *w.renderer.encode("ab")], 1)
            assert found == pytest.approx(math.exp(sum(logprobs) / len(logprobs)))
            assert 0 < found < 1
        with pytest.raises(BadRequest, match="maximum context"):
            await asked.belief((Message(role=Role.USER, text="x" * 9_000),), known)


async def test_a_rollouts_beliefs_compute_what_is_new_in_its_conversation(tmp_path):
    config, known = EngineConfig(kv_tokens=4096, block=16), KnownAnswer(question="Which?", answer="ab")
    said = [Message(role=Role.ASSISTANT if n % 2 else Role.USER, text=f"{n}" * (40 if n else 300)) for n in range(9)]
    async with tiny_engine(tmp_path, config, context=1024) as tiny:
        await tiny.engine.load(Arm.WORLD, tiny_snapshot(tmp_path, 1, seed=0))
        async with gateway(tiny.engine, renderer=tiny.renderer, real=True) as w, WorldGateway(w.url, ADMIN) as asked:
            await asked.model("e", group=None, harness="h").ask(said[:1], max_tokens=1)
            for at in range(2, 10):
                await asked.belief(said[:at], known)
        hits = tiny.engine.stats()["prefix_hit_tokens"]
    whole = len(tiny.renderer.chat(Conversation(messages=tuple(said))))
    prompts = [len(tiny.renderer.chat(Conversation(messages=tuple(said[:at])))) for at in range(2, 10)]
    assert sum(prompts) > 4 * whole
    assert sum(prompts) - hits < whole, "the conversation not even once: a turn had its beginning"


async def test_a_score_ends_with_its_client():
    class Waits(FakeEngine):
        begun = ended = False

        async def score(self, slot, ids, start, cache_salt=""):
            self.begun = True
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True

    async with gateway(Waits(), real=True) as w:
        call = asyncio.create_task(w.post(SCORE, {**ASK, "max_tokens": 1, "answer": "yes"}, headers=LIVE))
        await eventually(lambda: w.engine.begun)
        assert not w.engine.ended
        call.cancel()
        await eventually(lambda: w.engine.ended)
