"""Auto through the gateway: arms here and outside, what is logged of them, and what one arm's failure does to the others."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from gateway_world import ASK, V0, V1, comments, events, eventually, world
from pydantic import ValidationError
from tests.deadlines import PATIENT_S
from tests.fakes.conversations import talk
from tests.fakes.outside import FakeOutside

from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, Finish, Pick, Sampling
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.router import Router
from ostinato.reward.ledger_entries import needs_reward, untrainable
from ostinato.serve import outside_models
from ostinato.serve.auto_deals import Deals
from ostinato.serve.config import AutoArm, ServeConfig
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

AUTO = {"model": "auto"}


class Order:
    """A dealer that draws from even odds, but always the first of `wanted` that is there."""

    def __init__(self, *wanted):
        self.wanted = list(wanted)

    def draw(self, available, place):
        there = [arm for arm in self.wanted if arm in available]
        return Pick(arm=there[0], odds=dict.fromkeys(sorted(available), 1 / len(available))) if there else None


def arms_of(outside, **options):
    far = {"name": "far", "url": outside.url, "model": "far-1", "prompt_price": 2.0, "answer_price": 8.0, **options}
    return ({"name": "live", "slot": "live"}, {"name": "frozen", "slot": "control"}, far)


def an_engine(script="hello"):
    return FakeEngine(lambda _: script, slots={"live": V1, "control": V0})


@pytest.fixture
async def outside():
    async with FakeOutside().serving() as fake:
        yield fake


def auto_world(outside, *order, log=None, engine=None, auto=None, **arm):
    dealer = order[0] if len(order) == 1 and not isinstance(order[0], str) else Order(*(order or ("far", "live")))
    auto = {"arms": arms_of(outside, **arm), "failures": 2, "rest_s": 0.2, **(auto or {})}
    return world(engine=engine or an_engine(), log=log, dealer=dealer, auto=auto)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("space", ["", " "])
def test_a_stream_is_read_with_and_without_the_space_that_may_stand_in_it(space, end):
    """Servers on Spring write none."""
    said = f'data:{space}{{"choices":[{{"index":0,"delta":{{"content":"hi"}}}}]}}{end}'
    assert outside_models.read_outside(said.encode()).choices[0].delta.content == "hi"
    for line in (f"data:{space}[DONE]", ": waiting", "event: message", ""):
        assert outside_models.read_outside(f"{line}{end}".encode()) is None


async def test_a_finish_reason_of_no_letters_ends_no_answer(outside):
    """Ollama and others in Go wrote it until a choice ended."""
    going = {"index": 0, "delta": {"content": "from "}, "finish_reason": ""}
    ended = {"index": 0, "delta": {"content": "afar"}, "finish_reason": "stop"}
    outside.raw = "".join(f"data: {json.dumps({'choices': [each]})}\n\n" for each in (going, ended)).encode()
    async with auto_world(outside) as w:
        _, headers, body = await w.chat(**AUTO)
        assert (headers["x-ostinato-auto"], body["choices"][0]["message"]["content"]) == ("far", "from afar")


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_from_outside_streams_through_and_is_recorded_as_far_as_it_is_known(outside, stream):
    async with auto_world(outside) as w:
        status, headers, body = await w.chat(**AUTO, stream=stream, user="ann")
        assert status == 200
        if stream:
            said = events(body)
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in said[:-1] if e["choices"])
            assert (text, said[0]["model"], said[-1]) == ("from afar", "auto", b"[DONE]")
        else:
            assert body["choices"][0]["message"]["content"] == "from afar"
            assert body["usage"] == {"prompt_tokens": 40, "completion_tokens": 10, "total_tokens": 50}
            assert body["ostinato"]["auto"] == "far"
        assert headers["x-ostinato-auto"] == "far"
        assert "x-ostinato-weights" not in headers
        (turn,) = w.log.turns()
        assert (turn.arm, turn.text, turn.finish) == (Arm.OUTSIDE, "from afar", Finish.STOP)
        assert (turn.sampled_ids, turn.logprobs, turn.spans, turn.numerics) == ((), (), (), "")
        assert turn.auto == Pick(
            arm="far", odds=pytest.approx({"live": 1 / 3, "frozen": 1 / 3, "far": 1 / 3}), cost=160e-6
        )
        assert turn.propensity == turn.auto.odds["far"]


async def test_what_came_from_outside_gets_a_reward_and_is_never_trained_on(outside):
    async with auto_world(outside) as w:
        await w.chat(**AUTO)
        (turn,) = w.log.turns()
        assert needs_reward(turn)
        assert untrainable(turn, 0.0) == "arm:outside"
        assert await w.feedback(turn.id) == "accepted"


async def test_a_slots_answer_is_an_ordinary_turn_with_its_draw(outside):
    async with auto_world(outside, "live") as w:
        status, _, body = await w.chat(**AUTO)
        (turn,) = w.log.turns()
        assert status == 200
        assert (turn.arm, turn.text, turn.auto.arm, turn.auto.cost) == (Arm.LIVE, "hello", "live", 0.0)
        assert untrainable(turn, 0.0) is None
        assert {span.policy for span in turn.spans} == {V1}
        assert body["ostinato"]["arm"] == "live"
        assert outside.bodies == []


async def test_several_choices_share_what_was_counted(outside):
    async with auto_world(outside) as w:
        _, _, body = await w.chat(**AUTO, n=2)
        assert [choice["message"]["content"] for choice in body["choices"]] == ["from afar"] * 2
        assert body["usage"]["completion_tokens"] == 20
        assert [turn.auto.cost for turn in w.log.turns()] == [pytest.approx((40 / 2 * 2 + 10 * 8) / 1e6)] * 2


async def test_without_a_count_there_is_no_cost(outside):
    outside.usage_missing = True
    async with auto_world(outside) as w:
        assert (await w.chat(**AUTO))[0] == 200
        assert w.log.turns()[0].auto.cost is None


async def test_the_outside_learns_what_is_asked_and_not_by_whom(outside, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "sk-far")
    async with auto_world(outside, key_env="FAR_KEY", budget_field="max_completion_tokens") as w:
        await w.chat(**AUTO, user="ann", temperature=0.5, max_tokens=77, stop=["x"], seed=3)
        assert outside.bodies == [
            {
                "model": "far-1",
                "messages": ASK["messages"],
                "max_completion_tokens": 77,
                "temperature": 0.5,
                "top_p": 1.0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "stop": ["x"],
                "seed": 3,
            }
        ]
        assert outside.headers[0]["Authorization"] == "Bearer sk-far"
        assert "ann" not in json.dumps(outside.headers)
        assert w.log.turns()[0].sampling.seed == 3


# ---------------------------------------------------------------- episodes


async def test_an_episode_keeps_its_arm_and_its_propensity(outside):
    async with auto_world(outside, order := Order("far", "live")) as w:
        await w.chat(**AUTO, headers={"x-ostinato-episode": "e1"})
        order.wanted = ["live"]
        await w.chat(**AUTO, headers={"x-ostinato-episode": "e1"})
        await w.chat(**AUTO, headers={"x-ostinato-episode": "e2"})
        assert [turn.auto.arm for turn in w.log.turns()] == ["far", "far", "live"]
        first, second, _ = w.log.turns()
        assert first.propensity == second.propensity


@pytest.mark.parametrize("arm", ["far", "live"])
async def test_a_conversation_that_goes_on_is_the_same_episode(outside, arm):
    async with auto_world(outside, order := Order(arm)) as w:
        _, _, body = await w.chat(**AUTO, user="ann")
        order.wanted = ["frozen"]
        said = body["choices"][0]["message"]["content"]
        more = [*ASK["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        status, _, _ = await w.chat(**AUTO, user="ann", messages=more)
        first, second = w.log.turns()
        assert status == 200
        assert (second.episode, second.auto.arm) == (first.episode, arm)
        assert second.parent == (first.id if arm == "live" else None)


async def test_an_answer_from_outside_that_was_cut_is_not_taken_for_ids(outside):
    """Its tokens are unknown: the follow-up is rendered from the text, whoever answers it."""
    outside.finish = "length"
    async with auto_world(outside, order := Order("far")) as w:
        await w.chat(**AUTO, user="ann", headers={"x-ostinato-episode": "e"})
        order.wanted = ["live"]
        outside.status = 500
        more = [*ASK["messages"], {"role": "assistant", "content": "from afar"}, {"role": "user", "content": "and?"}]
        for _ in range(3):
            await w.chat(**AUTO, user="ann", messages=more, headers={"x-ostinato-episode": "e"})
        last = w.log.turns()[-1]
        assert last.auto.arm == "live"
        assert list(last.prompt_ids) == w.renderer.chat(talk(*more))


async def test_a_new_process_keeps_an_episodes_arm(outside):
    log = MemoryLog()
    headers = {"x-ostinato-episode": "e1"}
    async with auto_world(outside, "far", log=log) as w:
        await w.chat(**AUTO, headers=headers)
    async with auto_world(outside, "live", log=log) as w:
        await w.chat(**AUTO, headers=headers)
        assert [turn.auto.arm for turn in w.log.turns()] == ["far", "far"]


async def test_one_tenants_episode_is_not_anothers(outside):
    keys = ("acme:sk-0123456789abcdef", "bell:sk-fedcba9876543210")
    auto = {"arms": arms_of(outside)}
    async with world(engine=an_engine(), dealer=(order := Order("far")), auto=auto, api_keys=keys) as w:
        await w.chat(**AUTO, headers={"x-api-key": keys[0][5:], "x-ostinato-episode": "e"})
        order.wanted = ["live"]
        await w.chat(**AUTO, headers={"x-api-key": keys[1][5:], "x-ostinato-episode": "e"})
        assert [(turn.tenant, turn.auto.arm) for turn in w.log.turns()] == [("acme", "far"), ("bell", "live")]


async def test_no_tenants_episodes_drive_out_anothers(outside):
    keys = ("acme:sk-0123456789abcdef", "bell:sk-fedcba9876543210")
    auto = {"arms": arms_of(outside), "episodes": 4}
    async with world(engine=an_engine(), dealer=(order := Order("far")), auto=auto, api_keys=keys) as w:
        await w.chat(**AUTO, headers={"x-api-key": keys[0][5:], "x-ostinato-episode": "e"})
        order.wanted = ["live"]
        for number in range(8):
            await w.chat(**AUTO, headers={"x-api-key": keys[1][5:], "x-ostinato-episode": f"{number}"})
        await w.chat(**AUTO, headers={"x-api-key": keys[0][5:], "x-ostinato-episode": "e"})
        assert w.log.turns()[-1].auto.arm == "far"
        order.wanted = ["far"]
        for number in (0, 7):  # a tenant's own oldest ones are dealt anew
            await w.chat(**AUTO, headers={"x-api-key": keys[1][5:], "x-ostinato-episode": f"{number}"})
        assert [turn.auto.arm for turn in w.log.turns()[-2:]] == ["far", "live"]


async def test_a_tenant_that_an_arm_is_not_for_is_never_dealt_it(outside):
    keys = ("acme:sk-0123456789abcdef", "bell:sk-fedcba9876543210")
    auto = {"arms": arms_of(outside, tenants=("acme",))}
    async with world(engine=an_engine(), dealer=Order("far", "live"), auto=auto, api_keys=keys) as w:
        await w.chat(**AUTO, headers={"x-api-key": keys[1][5:]})
        assert outside.bodies == []
        assert w.log.turns()[0].auto.odds == {"frozen": 0.5, "live": 0.5}


# ---------------------------------------------------------------- repeats


async def test_a_repeat_under_a_key_gets_the_answer_from_the_log(outside):
    async with auto_world(outside) as w:
        replies = [await w.chat(**AUTO, headers={"idempotency-key": "k"}) for _ in range(2)]
        assert [body["choices"][0]["message"]["content"] for _, _, body in replies] == ["from afar"] * 2
        assert replies[1][1]["idempotent-replayed"] == "true"
        assert len(outside.bodies) == len(w.log.turns()) == 1


# ---------------------------------------------------------------- failures


FAILURES = {
    "refused": {"status": 500},
    "a bad key": {"status": 401},
    "redirected": {"status": 307},
    "cut off": {"cut": True},
    "silent": {"stall": True},
    "nonsense": {"raw": b"data: {nonsense\n\n"},
    "no end": {"raw": b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'},
    "an error in the stream": {"raw": b'data: {"error": {"message": "overloaded"}}\n\n'},
    "another's choice": {"raw": b'data: {"choices": [{"index": 7, "delta": {"content": "hi"}}]}\n\n'},
    "endless": {"text": "x" * 5000},
    "a page": {"kind": "text/html"},
    "a count beyond measure": {
        "raw": b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1%b}}\n\n' % (b"0" * 400)
    },
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_arm_answers_what_the_outside_cannot_if_nothing_was_said_yet(outside, how, stream):
    for name, value in FAILURES[how].items():
        setattr(outside, name, value)
    async with auto_world(outside, silence_s=0.3 if outside.stall else PATIENT_S) as w:
        status, headers, body = await w.chat(**AUTO, max_tokens=8, stream=stream)
        assert status == 200
        first, *more = w.log.turns()
        assert (first.finish, first.arm, first.auto.arm, first.auto.cost) == (Finish.ERROR, Arm.OUTSIDE, "far", None)
        if stream and first.text:
            assert events(body)[-1]["error"]["code"] == "outside_failed"
            assert more == [], "half an answer is not answered again"
            return
        (second,) = more
        assert headers["x-ostinato-auto"] == "live"
        assert headers["x-ostinato-turn"] == second.id
        assert (second.finish, second.auto.arm, second.episode) == (Finish.STOP, "live", first.episode)
        assert second.auto.odds == {"frozen": 0.5, "live": 0.5}
        assert second.propensity == 0.5
        assert 'ostinato_auto_passed_on_total{arm="far",tenant="default"} 1.0' in (await w.get("/metrics"))[1]
        router = Router(["live", "frozen", "far"], RouterConfig())
        for turn in (first, second):
            router.apply(turn)
        assert [view.failed for view in router.views()] == [0, 0, 1]


async def test_another_arm_answers_also_while_machines_give_way_to_people(outside):
    outside.cut = True
    dealer = Order("far", "live")
    async with world(engine=an_engine(), dealer=dealer, auto={"arms": arms_of(outside)}, first_token_s=0.5) as w:
        status, _, body = await w.chat(**AUTO, max_tokens=8)
        assert (status, [turn.auto.arm for turn in w.log.turns()]) == (200, ["far", "live"]), body


async def test_a_slow_outside_is_waited_for_with_a_comment_and_another_arm_answers_all_the_same(outside):
    outside.gate = asyncio.Event()
    auto = {"arms": arms_of(outside, silence_s=0.3)}
    async with world(engine=an_engine(), dealer=Order("far", "live"), auto=auto, heartbeat_s=0.05) as w:
        status, headers, body = await w.chat(**AUTO, stream=True)
        outside.gate.set()
        assert status == 200
        assert comments(body)
        assert "x-ostinato-turn" not in headers, "who answers was not known when the head was sent"
        assert events(body)[-2]["ostinato"]["auto"] == "live"
        assert [turn.auto.arm for turn in w.log.turns()] == ["far", "live"]


async def test_a_repeat_under_a_key_gets_the_answer_of_the_arm_that_gave_one(outside):
    outside.status = 500
    async with auto_world(outside) as w:
        replies = [await w.chat(**AUTO, headers={"idempotency-key": "k"}) for _ in range(2)]
        assert [body["choices"][0]["message"]["content"] for _, _, body in replies] == ["hello"] * 2
        assert replies[1][1]["idempotent-replayed"] == "true"
        assert len(outside.bodies) == 1
        assert len(w.log.turns()) == 2


async def test_a_key_is_told_to_nobody_but_the_outside(outside, monkeypatch, caplog):
    monkeypatch.setenv("FAR_KEY", "sk-far-secret")
    caplog.set_level("DEBUG")
    async with auto_world(outside, key_env="FAR_KEY") as w:
        said = [await w.chat(**AUTO)]
        for how in (*FAILURES.values(), {"finish": "sk-far-secret"}, {"kind": "text/sk-far-secret"}):
            said += [await failing(w, outside, how)]
        said += [await w.get("/metrics"), w.log.rows, caplog.text]
    assert outside.headers[0]["Authorization"] == "Bearer sk-far-secret"
    assert caplog.text
    assert "sk-far" not in repr(said)


async def failing(w, outside, how):
    before = {name: getattr(outside, name) for name in how}
    for name, value in how.items():
        if name != "stall":  # it would be waited for
            setattr(outside, name, value)
    said = await w.chat(**AUTO)
    for name, value in before.items():
        setattr(outside, name, value)
    return said


@pytest.mark.parametrize("how", FAILURES)
async def test_a_failure_outside_with_nobody_else_is_an_error_with_a_turn_that_says_so(outside, how):
    for name, value in FAILURES[how].items():
        setattr(outside, name, value)
    async with auto_world(outside, "far", silence_s=0.3 if outside.stall else PATIENT_S) as w:
        status, _, body = await w.chat(**AUTO, max_tokens=4)
        assert (status, body["error"]["code"]) == (502, "outside_failed")
        assert outside.url not in json.dumps(body)
        assert "sk-secret" not in json.dumps(body)
        (turn,) = w.log.turns()
        assert (turn.finish, turn.arm, turn.auto.arm, turn.auto.cost) == (Finish.ERROR, Arm.OUTSIDE, "far", None)
        assert not needs_reward(turn)


async def test_an_arm_that_fails_is_left_alone_and_its_share_goes_to_the_others_truthfully(outside, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(outside_models, "_now", lambda: now)
    outside.status = 503
    async with auto_world(outside, "far", "live") as w:
        assert [(await w.chat(**AUTO))[0] for _ in range(4)] == [200] * 4
        assert len(outside.bodies) == 2, "then it was left alone"
        turns = w.log.turns()
        assert [turn.auto.arm for turn in turns] == ["far", "live", "far", "live", "live", "live"]
        for turn in turns:
            there = {"far", "frozen", "live"} if turn.auto.arm == "far" else {"frozen", "live"}
            assert turn.auto.odds == pytest.approx(dict.fromkeys(sorted(there), 1 / len(there)))
        outside.status = 200
        now += 0.25
        assert (await w.chat(**AUTO))[0] == 200
        assert w.log.turns()[-1].auto.arm == "far"


async def test_an_episode_whose_arm_is_left_alone_is_dealt_another(outside, monkeypatch):
    monkeypatch.setattr(outside_models, "_now", lambda: 1000.0)
    async with auto_world(outside, "far", "live") as w:
        headers = {"x-ostinato-episode": "e"}
        await w.chat(**AUTO, headers=headers)
        outside.status = 500
        for _ in range(2):
            await w.chat(**AUTO, headers=headers)
        outside.status = 200
        await w.chat(**AUTO, headers=headers)
        assert [turn.auto.arm for turn in w.log.turns()] == ["far", "far", "live", "live", "live"]


@asynccontextmanager
async def far_away(outside, breaker, **arm):
    """A function that asks the outside model."""
    far = outside_models.OutsideModel(
        AutoArm(name="far", url=outside.url, model="far-1", **arm), None, breaker, who="far"
    )
    asked = outside_models.OutsideQuery(conversation=talk(*ASK["messages"]), sampling=Sampling(max_tokens=8), n=1)
    await far.start()
    try:
        yield lambda: far.chunks(asked)
    finally:
        await far.close()


def a_breaker():
    return outside_models.Breaker(failures=1, rest_s=10.0, longest_s=10.0)


async def test_an_answer_is_read_to_its_end_without_its_client(outside):
    """Else slow readers keep all places, and have the model's service cut the connection, which takes the arm from everybody."""
    breaker, said = a_breaker(), []
    async with far_away(outside, breaker) as ask:
        async for chunk in ask():
            said.append(chunk.text)
            await eventually(lambda: breaker.open == 0)  # the client reads on once there is no connection
    assert ("".join(said), breaker.resting) == ("from afar", False)


async def test_a_model_that_takes_too_long_is_left_alone(outside):
    outside.pace, breaker = asyncio.Semaphore(0), a_breaker()
    async with far_away(outside, breaker, longest_s=0.2) as ask:
        with pytest.raises(outside_models.OutsideFailed):
            [chunk async for chunk in ask()]
    assert breaker.resting


async def test_a_client_that_leaves_ends_the_call_which_says_nothing_of_the_model(outside):
    outside.pace, breaker = asyncio.Semaphore(0), a_breaker()
    async with far_away(outside, breaker) as ask:
        chunks = ask()
        assert (await anext(chunks)).text == "fro"
        assert breaker.open == 1
        await chunks.aclose()
        assert (breaker.open, breaker.resting) == (0, False)
        await eventually(lambda: outside.left == 1)


async def test_questions_that_the_outside_will_not_answer_do_not_count_against_it(outside):
    """Else one tenant's bad requests would take the arm from everybody."""
    outside.status = 400
    async with auto_world(outside, "far") as w:
        assert [(await w.chat(**AUTO))[0] for _ in range(5)] == [502] * 5
        assert len(outside.bodies) == 5
        outside.status, outside.finish = 200, "content_filter"
        assert [(await w.chat(**AUTO))[0] for _ in range(3)] == [502] * 3
        assert len(outside.bodies) == 8


async def test_a_hanging_outside_holds_up_nobody_else(outside):
    outside.gate = asyncio.Event()
    async with auto_world(outside, "far", "live", max_open=2) as w:
        hanging = [asyncio.ensure_future(w.chat(**AUTO)) for _ in range(2)]
        await eventually(lambda: len(outside.bodies) == 2)
        assert (await w.chat(**AUTO))[2]["ostinato"]["auto"] == "live"
        assert (await w.chat())[0] == 200
        outside.gate.set()
        assert [(await call)[0] for call in hanging] == [200, 200]


async def test_a_client_that_leaves_ends_the_call_outside_and_blames_nobody(outside):
    outside.stall = True
    auto = {"arms": arms_of(outside), "failures": 1}
    async with world(engine=an_engine(), dealer=Order("far"), auto=auto, real=True) as w:
        for _ in range(2):
            reader, writer = await w.connect({**ASK, **AUTO, "stream": True})
            await reader.readuntil(b"fro")
            writer.close()
        await eventually(lambda: outside.left == 2)
        await eventually(lambda: len(w.log.turns()) == 2)
        assert {turn.finish for turn in w.log.turns()} == {Finish.LEFT}
        assert {turn.text for turn in w.log.turns()} == {"fro"}


async def test_an_engine_that_is_down_leaves_a_turn_where_auto_drew_it(outside):
    """A draw without a turn would make right propensities look wrong."""
    engine = an_engine()
    async with auto_world(outside, "live", engine=engine) as w:
        engine.down = True
        assert (await w.chat(**AUTO))[0] == 503
        assert [(turn.auto.arm, turn.finish) for turn in w.log.turns()] == [("live", Finish.ERROR)]
        assert (await w.chat())[0] == 503
        assert len(w.log.turns()) == 1


async def test_nobody_to_ask_is_said(outside):
    async with auto_world(outside, "none of these") as w:
        status, _, body = await w.chat(**AUTO)
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert w.log.turns() == []


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"logprobs": True}, "logprobs"), ({"continue_final_message": True}, "continue_final_message")],
)
async def test_what_not_every_arm_can_do_is_refused_before_the_draw(outside, fields, field):
    messages = [*ASK["messages"], {"role": "assistant", "content": "so"}]
    more = {"messages": messages, "add_generation_prompt": False} if field == "continue_final_message" else {}
    async with auto_world(outside) as w:
        status, _, body = await w.chat(**AUTO, **fields, **more)
        assert (status, body["error"]["param"]) == (400, field)
        assert w.log.turns() == outside.bodies == []


async def test_no_arm_is_drawn_for_a_call_whose_wish_for_adaptation_is_malformed(outside):
    """Its episode would be bound to an arm by a draw that has no turn."""
    draws = []

    class Counted(Order):
        def draw(self, available, place):
            draws.append(available)
            return super().draw(available, place)

    async with auto_world(outside, Counted("far")) as w:
        status, _, body = await w.chat({"x-ostinato-adapt": "maybe"}, **AUTO, user="ann")
        assert (status, body["error"]["param"], len(draws)) == (400, "X-Ostinato-Adapt", 0)
        assert (await w.chat(**AUTO, user="ann"))[0] == 200
        assert len(draws) == 1


async def test_completions_and_unknown_models_are_refused(outside):
    async with auto_world(outside) as w:
        status, _, body = await w.post("/v1/completions", {"model": "auto", "prompt": "hi"})
        assert (status, body["error"]["param"]) == (400, "model")
        assert (await w.chat(model="nobody"))[0] == 404
        assert (await w.chat(model="far-1"))[0] == 404, "nobody names the model outside"


async def test_auto_is_listed_and_only_where_it_has_arms(outside):
    async with auto_world(outside) as w:
        assert [card["id"] for card in json.loads((await w.get("/v1/models"))[1])["data"]] == ["m", "auto"]
        assert (await w.get("/v1/models/auto"))[0] == 200
    async with world() as w:
        assert (await w.get("/v1/models/auto"))[0] == 404
        assert (await w.chat(**AUTO))[0] == 404


async def test_the_routers_shares_are_what_is_drawn_and_logged(outside):
    """The real router behind the real gateway: every logged propensity is the router's, and the draws come up as often."""
    router = Router(["live", "frozen", "far"], RouterConfig(low=0.0))
    for i in range(200):
        router.measure("live", ("default", f"u{i}"), "reward", float(i % 10 < 6))
        router.measure("far", ("default", f"u{i}"), "reward", float(i % 10 < 5))
        router.measure("frozen", ("default", f"u{i}"), "reward", float(i % 10 < 3))
    odds = dict(router.odds(["live", "frozen", "far"]))
    async with auto_world(outside, router) as w:
        for _ in range(150):
            await w.chat(**AUTO)
        turns = w.log.turns()
        assert all(turn.auto.odds == odds and turn.propensity == odds[turn.auto.arm] for turn in turns)
        for turn in turns:
            router.apply(turn)
        assert not router.propensities.wrong(0.001)
        assert 0.5 < sum(turn.auto.arm == "live" for turn in turns) / 150 < 1.0


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "arm",
    [
        {"name": "a"},
        {"name": "a", "slot": "live", "url": "http://x/v1", "model": "m"},
        {"name": "a", "url": "http://x/v1"},
        {"name": "a", "url": "ftp://x/v1", "model": "m"},
        {"name": "a", "url": "http://u:p@x/v1", "model": "m"},
        {"name": "A b", "slot": "live"},
    ],
)
def test_arms_that_make_no_sense_are_refused(arm):
    with pytest.raises(ValidationError):
        AutoArm(**arm)


def test_two_arms_of_one_name_or_slot_are_refused():
    for second in ({"name": "a", "slot": "control"}, {"name": "b", "slot": "live"}):
        with pytest.raises(ValidationError, match="the same name or the same slot"):
            ServeConfig(auto={"arms": ({"name": "a", "slot": "live"}, second)})


async def test_a_missing_key_or_dealer_or_a_name_that_is_taken_is_said_at_the_start(outside):
    config = ServeConfig(auto={"arms": arms_of(outside, key_env="NOBODY_SET_THIS")})
    with pytest.raises(BadConfig, match="NOBODY_SET_THIS"):
        Deals(config.auto, Order("far"))
    with pytest.raises(BadConfig, match="dealer"):
        async with world(auto={"arms": arms_of(outside)}):
            pass
    with pytest.raises(BadConfig, match="own"):
        async with auto_world(outside, auto={"name": "m"}):
            pass


async def test_old_turns_without_a_draw_are_read_as_before(outside):
    log = MemoryLog()
    async with world(log=log) as w:
        await w.chat(user="ann")
    assert [turn.auto for turn in log.turns()] == [None]
    async with auto_world(outside, "live", log=log) as w:
        assert (await w.chat(**AUTO, user="ann"))[0] == 200
        assert replace(w.log.turns()[1], auto=None) != w.log.turns()[1]
