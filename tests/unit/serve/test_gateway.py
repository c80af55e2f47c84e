import asyncio
import json
from dataclasses import replace

import pytest
from gateway_world import ADMIN, ASK, V0, V1, HeldLog, events, eventually, world
from tests.deadlines import PATIENT_S
from tests.fakes.conversations import talk
from tests.virtual_time import in_virtual_time

from ostinato.core.arm_assignment import Dealing
from ostinato.core.errors import Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.records import Arm, Finish
from ostinato.testing.engine import CONTRACT, STOP_ID, FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer


class Routed(FakeEngine):
    """Sends made-up routes with the last chunk, as the engine does for a model with experts."""

    async def generate(self, request):
        async for chunk in super().generate(request):
            yield chunk if chunk.finish is None else replace(chunk, routes=b"routes of %d" % chunk.index)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choices_routes_and_the_contract_are_stored_with_its_turn(stream):
    async with world(engine=Routed(lambda _: "hello")) as w:
        status, headers, _ = await w.chat(n=2, stream=stream)
        assert status == 200
        assert headers["x-ostinato-numerics"] == CONTRACT.id
        assert sorted((turn.id[-1], turn.routes, turn.numerics) for turn in w.log.turns()) == [
            ("0", b"routes of 0", CONTRACT.id),
            ("1", b"routes of 1", CONTRACT.id),
        ]


async def test_an_engine_of_unknown_arithmetic_stamps_nothing():
    engine = FakeEngine(lambda _: "hello")
    engine.numerics = lambda: ""
    async with world(engine=engine) as w:
        _, headers, _ = await w.chat()
        assert "x-ostinato-numerics" not in headers
        assert w.log.turns()[0].numerics == ""


async def test_a_chat_answer_names_its_turn_policy_weights_and_arm():
    async with world() as w:
        status, headers, body = await w.chat(user="u1", max_tokens=20, seed=5, temperature=0.5, top_p=0.9)
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "hello"
        assert body["choices"][0]["finish_reason"] == "stop"
        turn = w.log.turns()[0]
        assert turn.id == body["id"] + ":0" == headers["x-ostinato-turn"]
        assert (headers["x-ostinato-policy"], headers["x-ostinato-weights"]) == ("0", "fake0")
        assert headers["x-ostinato-arm"] == "live"
        assert headers["x-ostinato-numerics"] == turn.numerics == CONTRACT.id
        assert body["ostinato"] == {
            "turns": [turn.id],
            "episode": turn.episode,
            "arm": "live",
            "spans": [[0, "fake0", 6]],
        }
        assert body["usage"] == {
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": 6,
            "total_tokens": len(turn.prompt_ids) + 6,
        }
        assert turn.prompt_ids == tuple(ByteRenderer().chat(talk(*ASK["messages"])))
        assert turn.sampled_ids == (*b"hello", STOP_ID)
        assert len(turn.logprobs) == 6
        assert turn.user == "u1"
        assert (turn.sampling.seed, turn.sampling.temperature, turn.sampling.top_p) == (5, 0.5, 0.9)
        assert (turn.arm, turn.propensity, turn.finish) == (Arm.LIVE, 1.0, Finish.STOP)


async def test_the_engines_own_seed_is_recorded():
    async with world() as w:
        await w.chat()
        assert w.log.turns()[0].sampling.seed == 1  # the fake numbers its requests


async def test_a_stream_ends_with_the_turn_and_done():
    async with world() as w:
        status, headers, raw = await w.chat(stream=True, stream_options={"include_usage": True})
        got = events(raw)
        assert status == 200
        assert got[-1] == b"[DONE]"
        assert "".join(c["delta"].get("content", "") for e in got[:-1] for c in e["choices"]) == "hello"
        assert got[0]["choices"][0]["delta"]["role"] == "assistant"
        assert got[-2]["usage"]["completion_tokens"] == 6
        assert got[-2]["ostinato"]["turns"] == [headers["x-ostinato-turn"]]
        assert headers["x-ostinato-policy"] == "0"


async def test_without_usage_the_last_event_carries_the_turn():
    async with world() as w:
        _, _, raw = await w.chat(stream=True)
        last = events(raw)[-2]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["ostinato"]["spans"] == [[0, "fake0", 6]]


async def test_the_turn_is_durable_before_the_end_is_shown():
    log = HeldLog()
    async with world(log=log, real=True) as w:
        shown = []

        async def read():
            async with w.http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as reply:
                async for line in reply.aiter_lines():
                    shown.append((line, len(log.turns())))

        reading = asyncio.create_task(read())
        await asyncio.wait_for(log.asked.wait(), PATIENT_S)
        await eventually(lambda: any('"content":"h"' in line for line, _ in shown))  # text needs no stored turn
        await asyncio.sleep(0.1)  # in which the end would come, were it not held
        log.go.set()
        await reading
        ends = [turns for line, turns in shown if '"finish_reason":"stop"' in line or "[DONE]" in line]
        assert ends == [1, 1], "the end was shown before the turn was in the log"


async def test_three_choices_are_three_turns():
    async with world() as w:
        _, headers, body = await w.chat(n=3)
        assert headers["x-ostinato-turn"] == ",".join(f"{body['id']}:{i}" for i in range(3))
        assert [t.id for t in w.log.turns()] == body["ostinato"]["turns"]
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 18
        _, _, raw = await w.chat(n=3, stream=True)
        got = events(raw)[:-1]
        assert sum(c["finish_reason"] == "stop" for e in got for c in e["choices"]) == 3
        assert len(got[-1]["ostinato"]["turns"]) == 3
        assert len(w.log.turns()) == 6


async def test_stop_and_length():
    async with world("one\ntwo") as w:
        _, _, body = await w.chat(stop="\n")
        assert body["choices"][0]["message"]["content"] == "one"
        _, _, body = await w.chat(max_completion_tokens=2)
        assert body["choices"][0]["finish_reason"] == "length"
        assert w.log.turns()[-1].finish is Finish.LENGTH


async def test_logprobs_have_openais_shape():
    async with world("ab") as w:
        _, _, body = await w.chat(logprobs=True)
        content = body["choices"][0]["logprobs"]["content"]
        assert [(c["token"], c["bytes"]) for c in content] == [("a", [97]), ("b", [98]), ("", [])]
        assert [c["logprob"] for c in content] == pytest.approx(w.log.turns()[0].logprobs)
        _, _, body = await w.post("/v1/completions", {"model": "m", "prompt": "x", "logprobs": 0})
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", ""]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert len(logprobs["token_logprobs"]) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_a_split_character_are_each_tokens_own(stream):
    async with world("né") as w:
        _, _, body = await w.chat(logprobs=True, stream=stream)
        if stream:
            choices = [choice for event in events(body)[:-1] for choice in event["choices"] if choice["logprobs"]]
            content = [each for choice in choices for each in choice["logprobs"]["content"]]
        else:
            content = body["choices"][0]["logprobs"]["content"]
        assert [each["bytes"] for each in content[:3]] == [[110], [195], [169]]
        assert bytes(byte for each in content for byte in each["bytes"]).decode() == "né"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tokens_offset_is_its_place_in_the_text(stream):
    async with world("aéb") as w:
        _, _, body = await w.post(
            "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 9, "logprobs": 0, "stream": stream}
        )
        answers = [body] if not stream else [event for event in events(body) if event != b"[DONE]"]
        logged = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
        told = [pair for each in logged for pair in zip(each["tokens"], each["text_offset"], strict=True)]
        assert told == [("a", 0), ("\ufffd", 1), ("\ufffd", 1), ("b", 2), ("", 3)], "both bytes make one character"


async def test_completions_take_text_or_ids_and_stream():
    async with world() as w:
        for prompt in ("xy", [120, 121], ["xy"], [[120, 121]]):
            status, _, body = await w.post("/v1/completions", {"model": "m", "prompt": prompt})
            assert (status, body["choices"][0]["text"]) == (200, "hello")
            assert w.log.turns()[-1].prompt_ids == (120, 121)
        _, _, raw = await w.post("/v1/completions", {"model": "m", "prompt": "xy", "stream": True})
        assert "".join(e["choices"][0]["text"] for e in events(raw)[:-1]) == "hello"
        for bad in ("", [], [99999], ["a", "b"]):
            status, _, body = await w.post("/v1/completions", {"model": "m", "prompt": bad})
            assert (status, body["error"]["param"]) == (400, "prompt")


async def test_a_prefilled_assistant_message_is_continued():
    async with world() as w:
        messages = [{"role": "user", "content": "write f"}, {"role": "assistant", "content": "def f():"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        status, _, body = await w.chat(messages=messages, user="u", **extra)
        assert status == 200
        assert w.log.turns()[0].prompt_ids[-8:] == tuple(b"def f():")
        whole = [messages[0], {"role": "assistant", "content": "def f():hello"}, {"role": "user", "content": "more"}]
        await w.chat(messages=whole, user="u")
        first, second = w.log.turns()
        assert second.parent == first.id
        status, _, body = await w.chat(messages=messages, continue_final_message=True)
        assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_a_follow_up_reuses_the_sampled_ids():
    async with world() as w:
        await w.chat(headers={"x-ostinato-episode": "e7"}, user="u")
        more = [*ASK["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
        await w.chat(messages=more, user="u")
        first, second = w.log.turns()
        known = first.prompt_ids + first.sampled_ids
        assert second.prompt_ids[: len(known)] == known
        assert tuple(ByteRenderer().chat(talk(*more)))[: len(known)] != known, "the text must retokenise differently"
        assert (second.parent, second.episode) == (first.id, "e7")


async def test_sessions_survive_a_restart():
    log = MemoryLog()
    async with world(log=log) as w:
        await w.chat(user="u")
    async with world(log=log) as w:
        more = [*ASK["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
        await w.chat(messages=more, user="u")
        first, second = log.turns()
        assert second.parent == first.id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_disk_is_never_a_finished_answer(stream):
    async with world() as w:
        w.log.full = True
        status, _, body = await w.chat(stream=stream)
        if stream:
            got = events(body)
            assert got[-1]["error"]["code"] == "storage_full"
            assert not any(c.get("finish_reason") for e in got for c in e.get("choices", []))
        else:
            assert (status, body["error"]["code"]) == (507, "storage_full")
        w.log.full = False
        assert (await w.chat())[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_failure_is_an_error_and_an_untrainable_turn(stream):
    async with world(engine=FakeEngine(lambda r: "hello", fail_after=2)) as w:
        status, _, body = await w.chat(stream=stream)
        if stream:
            assert events(body)[-1]["error"]["code"] == "engine_error"
        else:
            assert (status, body["error"]["type"]) == (500, "server_error")
        (turn,) = w.log.turns()
        assert (turn.finish, len(turn.sampled_ids)) == (Finish.ERROR, 2)


class Broken(FakeEngine):
    async def generate(self, request):
        yield Chunk(index=0, ids=(104,), logprobs=(-0.1,), policy=V0, text="h")
        raise RuntimeError("secret text of the engine")


class Silent(FakeEngine):
    async def generate(self, request):
        await asyncio.sleep(60)
        yield Chunk(index=0, ids=(), logprobs=(), policy=V0, text="")


class Short(FakeEngine):
    async def generate(self, request):
        yield Chunk(index=0, ids=(104,), logprobs=(-0.1,), policy=V0, text="h")


class NotANumber(FakeEngine):
    async def generate(self, request):
        yield Chunk(index=0, ids=(104,), logprobs=(float("nan"),), policy=V0, text="h")


@pytest.mark.parametrize(("engine", "sampled"), [(Broken, 1), (Silent, 0), (Short, 1), (NotANumber, 0)])
@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_every_way_an_engine_breaks_ends_the_answer(engine, sampled, stream):
    async with world(engine=engine(), chunk_timeout_s=0.05) as w:
        status, _, body = await w.chat(stream=stream)
        assert "secret" not in str(body)
        assert status == 500 or "error" in events(body)[-1]
        (turn,) = w.log.turns()
        assert (turn.finish, len(turn.sampled_ids)) == (Finish.ERROR, sampled)


async def test_a_refusing_engine_leaves_no_turn():
    engine = FakeEngine()
    engine.down = True
    async with world(engine=engine) as w:
        status, headers, body = await w.chat()
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, Unavailable.code, "1")
        assert not w.log.turns()


async def test_a_swap_in_the_middle_is_recorded_token_by_token():
    class Swapping(FakeEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                if sum(len(c) for c in [chunk.ids]) and chunk.ids == (101,):
                    self._slots["live"] = V1

    async with world(engine=Swapping(lambda r: "hello")) as w:
        _, headers, body = await w.chat()
        assert body["ostinato"]["spans"] == [[0, "fake0", 2], [1, "fake1", 4]]
        assert headers["x-ostinato-policy"] == "0"
        assert [v.number for v in w.log.turns()[0].versions_T()] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_vanished_client_stops_the_engine_and_leaves_what_was_sampled(stream):
    engine = FakeEngine(lambda r: "x" * 2000, delay_s=0.005)
    async with world(engine=engine, default_max_tokens=3000, real=True) as w:
        _, writer = await w.connect({**ASK, "stream": stream})
        await eventually(lambda: engine.stats()["tokens"] > 3)
        writer.close()
        await eventually(lambda: w.log.turns())
        assert engine.running == 0
        assert engine.cancelled == 1
        assert w.log.turns()[0].finish is (Finish.LEFT if stream else Finish.ABORT)
        assert 0 < len(w.log.turns()[0].sampled_ids) < 2000


class Flood(FakeEngine):
    async def generate(self, request):
        self.running += 1
        try:
            for _ in range(2_000):
                await asyncio.sleep(0)
                yield Chunk(index=0, ids=(104,), logprobs=(-0.1,), policy=V0, text="x" * 20_000)
        finally:
            self.running -= 1


async def test_a_client_that_does_not_read_is_given_up():
    engine = Flood()
    async with world(engine=engine, send_timeout_s=0.2, real=True) as w:
        reader, writer = await w.connect({**ASK, "stream": True})
        reader._transport.pause_reading()
        await eventually(lambda: w.log.turns())
        assert w.log.turns()[0].finish is Finish.ABORT
        assert len(w.log.turns()[0].sampled_ids) < 2_000
        assert engine.running == 0
        writer.transport.abort()


async def test_bad_input_gets_a_clear_answer():
    async with world(max_body_bytes=10_000) as w:
        path = "/v1/chat/completions"
        cases = [
            (b'{"model": "m", ', 400, "line 1"),
            (b"[" * 10_000, 400, "deeper"),
            (b'{"a":' * 1_500 + b"1" + b"}" * 1_500, 400, "deeper"),
            (b'{"model": "\xff"}', 400, "UTF-8"),
            (b'{"model": NaN}', 400, "NaN"),
            (b'{"model": "\\ud800"}', 400, "surrogate"),
            (b"[1]", 400, "object"),
            (
                b'{"model": "m", "messages": [{"role":"user","content":"x"}], "seed": ' + b"9" * 5000 + b"}",
                400,
                "digits",
            ),
        ]
        for data, status, text in cases:
            got, _, body = await w.post(path, data=data)
            assert got == status, (data[:40], body)
            assert text in body["error"]["message"], body
        got, _, body = await w.post(path, ASK | {"model": "gpt"})
        assert (got, body["error"]["code"]) == (404, "model_not_found")
        got, _, body = await w.post(path, ASK, headers={"content-type": "text/plain"})
        assert got == 400
        got, _, body = await w.post(path, ASK, headers={"content-encoding": "gzip"})
        assert got == 400
        assert not w.log.rows


async def test_a_long_body_is_refused_and_not_held():
    async with world(real=True) as w:
        status, _, body = await w.post("/v1/chat/completions", data=b" " * 10_000_000)
        assert (status, body["error"]["code"]) == (413, "too_large")
        assert (await w.chat())[0] == 200


async def test_a_body_that_never_comes_is_given_up():
    async with world(body_timeout_s=0.05, real=True) as w:

        async def drip():
            yield b"{"
            await asyncio.sleep(0.3)

        head = {"content-type": "application/json"}
        reply = await w.http.post("/v1/feedback", content=drip(), headers=head)
        assert reply.status_code == 400


async def test_the_context_is_a_bound_with_numbers():
    async with world(renderer=ByteRenderer(context=50)) as w:
        status, _, body = await w.chat(messages=[{"role": "user", "content": "x" * 60}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "63" in body["error"]["message"]
        assert "50" in body["error"]["message"]
        assert w.log.turns() == []


async def test_an_answer_may_have_what_the_context_has_left_if_that_is_of_use():
    async with world("x" * 200, renderer=ByteRenderer(context=160)) as w:
        for asked, got in ((20, 20), (155, 155), (128_000, 155)):
            _, _, body = await w.chat(max_tokens=asked)
            assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (got, "length")
        for room, status in ((10, 200), (9, 400)):
            assert (await w.chat(messages=[{"role": "user", "content": "x" * (157 - room)}], max_tokens=500))[
                0
            ] == status


async def test_unknown_paths_and_methods_are_json_errors():
    async with world() as w:
        assert (await w.post("/v1/nothing", {}))[0] == 404
        status, text = await w.get("/v1/chat/completions")
        assert (status, json.loads(text)["error"]["code"]) == (405, "method_not_allowed")


async def test_models_and_health_and_metrics():
    async with world() as w:
        assert json.loads((await w.get("/v1/models"))[1])["data"][0]["id"] == "m"
        assert (await w.get("/v1/models/m"))[0] == 200
        assert (await w.get("/v1/models/x"))[0] == 404
        status, text = await w.get("/health")
        assert (status, json.loads(text)["slots"]) == (200, {"live": {"number": 0, "hash": "fake0"}})
        await w.chat()
        page = (await w.get("/metrics"))[1]
        assert 'ostinato_turns_total{arm="live",finish="stop",tenant="default"} 1.0' in page
        assert 'ostinato_requests_total{route="/v1/chat/completions",status="200"} 1.0' in page
        assert "ostinato_engine_tokens 6.0" in page


@in_virtual_time
async def test_at_most_so_many_calls_at_once():
    async with world(engine=FakeEngine(lambda r: "hello", delay_s=0.05), max_inflight=1) as w:
        first = asyncio.create_task(w.chat())
        await eventually(lambda: w.engine.running)
        assert (await w.chat())[0] == 503
        assert (await first)[0] == 200


async def test_arms_are_dealt_and_recorded():
    slots = {"live": V1, "control": V0}
    async with world(engine=FakeEngine(lambda r: "x", slots=slots), control_share=0.5) as w:
        for i in range(40):
            _, headers, body = await w.chat(user=f"u{i}")
            assert headers["x-ostinato-policy"] == {"live": "1", "control": "0"}[body["ostinato"]["arm"]]
        arms = {t.arm: t.propensity for t in w.log.turns()}
        assert arms == {Arm.LIVE: 0.5, Arm.CONTROL: 0.5}


async def test_a_trial_is_dealt_while_the_gateway_runs_and_ends_again():
    slots = {"live": V0, "canary": V1, "previous": V0}
    async with world(engine=FakeEngine(lambda r: "x", slots=slots)) as w:
        for dealing, arm in (
            (Dealing(salt="a", canary=1.0), "canary"),
            (Dealing(salt="a", previous=1.0), "previous"),
            (None, "live"),
        ):
            w.app.deal(dealing)
            _, headers, body = await w.chat(user="ann")
            assert (headers["x-ostinato-arm"], body["ostinato"]["arm"]) == (arm, arm)
        assert [turn.arm.value for turn in w.log.turns()] == ["canary", "previous", "live"]


async def test_a_slot_needs_the_admin_key():
    slots = {"live": V0, "candidate": V1}
    async with world(engine=FakeEngine(slots=slots), admin_key=ADMIN) as w:
        for key in ({}, {"x-ostinato-key": "wrong-0123456789abc"}):
            assert (await w.chat(headers={"x-ostinato-slot": "candidate", **key}))[0] == 401
        assert not w.log.rows
        for key in ({"x-ostinato-key": ADMIN}, {"authorization": f"Bearer {ADMIN}"}):
            status, headers, _ = await w.chat(headers={"x-ostinato-slot": "candidate", **key})
            assert (status, headers["x-ostinato-arm"], headers["x-ostinato-policy"]) == (200, "eval", "1")
        assert {t.arm for t in w.log.turns()} == {Arm.EVAL}
        assert (await w.chat(headers={"x-ostinato-slot": "nope", "x-ostinato-key": ADMIN}))[0] == 404


async def test_the_operators_key_and_the_runs_own_both_name_a_slot():
    engine = FakeEngine(slots={"live": V0, "candidate": V1})
    async with world(engine=engine, admin_key=ADMIN, admin_keys=["the-runs-own-0123456789"]) as w:
        for key in (ADMIN, "the-runs-own-0123456789"):
            headers = {"x-ostinato-slot": "candidate", "x-ostinato-key": key}
            assert (await w.chat(headers=headers))[0] == 200
        headers = {"x-ostinato-slot": "candidate", "x-ostinato-key": "none-of-both-0123456789"}
        assert (await w.chat(headers=headers))[0] == 401


async def test_keys_guard_everything_but_health():
    key = "acme:sk-0123456789abcdef"
    async with world(api_keys=(key,)) as w:
        status, _, body = await w.chat()
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert (await w.post("/v1/feedback", {}))[0] == 401
        assert (await w.get("/metrics"))[0] == 401
        assert (await w.get("/v1/models"))[0] == 401
        assert (await w.get("/health"))[0] == 200
        good = {"x-api-key": "sk-0123456789abcdef"}
        assert (await w.chat(headers=good))[0] == 200
        assert w.log.turns()[0].tenant == "acme"
        assert (await w.get("/metrics", headers=good))[0] == 200


async def test_only_answers_to_an_evaluation_are_drawn_in_pairs():
    """A version's answers are compared with another's from one seed; people's and rollouts' are not."""
    async with world(engine=FakeEngine(slots={"live": V0, "world": V0, "evaluation": V1}), admin_key=ADMIN) as w:
        for slot in ("evaluation", "world", "live"):
            assert (await w.chat(headers={"x-ostinato-slot": slot, "x-ostinato-key": ADMIN}))[0] == 200
        assert (await w.chat())[0] == 200
        assert [request.paired for request in w.engine.requests] == [True, False, True, False]


async def test_a_gateway_whose_caller_fails_leaves_nothing_running():
    before = asyncio.all_tasks()
    with pytest.raises(InterruptedError):
        async with world():
            raise InterruptedError
    left = asyncio.all_tasks() - before
    assert not [task for task in left if not task.cancelling()], left
