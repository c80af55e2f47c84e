"""Two tenants on one server, one of whom means ill."""

import asyncio
import json

import pytest
from gateway_world import ADMIN, ASK, V0, V1, eventually, world
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadConfig
from ostinato.core.records import Reward
from ostinato.testing.engine import FakeEngine

ACME, EVIL = "sk-acme-0123456789", "sk-evil-0123456789"
KEYS = ("acme:" + ACME, "evil:" + EVIL)


def talk(answer):
    return [*ASK["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]


async def turn_of(w, key, **fields):
    status, _, body = await w.chat(headers=w.key(key), **fields)
    assert status == 200, body
    return body["ostinato"]["turns"][0]


async def test_a_signal_carries_its_senders_tenant_and_its_own_id():
    async with world(api_keys=KEYS) as w:
        turn = await turn_of(w, ACME)
        assert await w.feedback(turn, ACME, id="acme/s1") == "accepted"
        assert await w.feedback(turn, EVIL, id="acme/s1") == "early"
        assert await w.feedback(turn, EVIL, id="s1") == "early"
        assert await w.feedback(turn, ACME, id="s1") == "accepted"
        assert [(s.tenant, s.id) for s in w.log.signals()] == [
            ("acme", "acme/s1"),
            ("evil", "acme/s1"),
            ("evil", "s1"),
            ("acme", "s1"),
        ]


async def test_no_answer_tells_whether_another_tenants_turn_exists():
    async with world(api_keys=KEYS) as w:
        turn = await turn_of(w, ACME)
        await w.log.append(Reward(turn=turn, value=1.0, function="f@1", signals=(), at=1.0))

        async def answers(target, id):
            event = {"id": id, "target": target, "name": "rejected", "value": True, "source": "human"}
            first = await w.post("/v1/feedback", event, headers=w.key(EVIL))
            again = await w.post("/v1/feedback", event | {"value": False}, headers=w.key(EVIL))
            back = await w.post("/v1/feedback", event | {"id": id + "r", "retracts": id}, headers=w.key(EVIL))
            return [(status, body["status"]) for status, _, body in (first, again, back)]

        assert await answers(turn, "one") == await answers("chatcmpl-nothing:0", "two")
        assert await w.feedback(turn, ACME, id="own") == "late"
        _, page = await w.get("/metrics", headers=w.key(EVIL))
        assert "foreign" not in page
        _, page = await w.get("/metrics", headers={"x-ostinato-key": ADMIN, **w.key(EVIL)})
        assert "foreign" not in page
    async with world(api_keys=KEYS, admin_key=ADMIN) as w:
        turn = await turn_of(w, ACME)
        await w.feedback(turn, EVIL)
        _, page = await w.get("/metrics", headers={"x-ostinato-key": ADMIN})
        assert 'ostinato_feedback_foreign_total{sender="evil"} 1.0' in page


async def test_conversations_and_arms_are_the_tenants_own():
    engine = FakeEngine(lambda r: "hello", slots={"live": V1, "control": V0})
    async with world(engine=engine, api_keys=KEYS, control_share=0.5) as w:
        for i in range(40):
            for key in (ACME, EVIL):
                await turn_of(w, key, user=f"u{i}")
        arms = {(turn.tenant, turn.user): turn.arm for turn in w.log.turns()}
        assert any(arms["acme", f"u{i}"] is not arms["evil", f"u{i}"] for i in range(40))
        before = w.log.turns()
        for key in (ACME, EVIL):
            await turn_of(w, key, user="u1", messages=talk("hello"))
        parents = {turn.tenant: turn.parent for turn in w.log.turns()[len(before) :]}
        own = {turn.tenant: turn.id for turn in before if turn.user == "u1"}
        assert parents == own
        await turn_of(w, EVIL, user="nobody else", messages=talk("hello"))
        assert w.log.turns()[-1].parent is None


async def test_another_tenants_episode_joins_nothing():
    async with world(api_keys=KEYS) as w:
        await turn_of(w, ACME, user="ann")
        stolen = {"x-ostinato-episode": w.log.turns()[0].episode}
        for user in ("ann", ""):
            await w.chat(headers=w.key(EVIL, **stolen), user=user, messages=talk("hello"))
            assert w.log.turns()[-1].parent is None


async def test_prompts_are_cached_apart():
    async with world(api_keys=KEYS) as w:
        await turn_of(w, ACME)
        await turn_of(w, EVIL)
        assert [request.cache_salt for request in w.engine.requests] == ["acme", "evil"]


async def test_a_tenant_sees_its_own_numbers_only():
    async with world(api_keys=KEYS, admin_key=ADMIN) as w:
        for _ in range(3):
            await turn_of(w, ACME)
        await turn_of(w, EVIL)
        _, page = await w.get("/metrics", headers=w.key(EVIL))
        samples = [line for line in page.splitlines() if not line.startswith("#")]
        assert samples
        assert all('tenant="evil"' in line for line in samples)
        assert 'ostinato_turns_total{arm="live",finish="stop",tenant="evil"} 1.0' in page
        assert "engine" not in page
        _, whole = await w.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})
        assert 'ostinato_turns_total{arm="live",finish="stop",tenant="acme"} 3.0' in whole
        assert "ostinato_engine_tokens" in whole


@in_virtual_time
async def test_one_tenants_crowd_leaves_room_for_the_other():
    engine = FakeEngine(lambda r: "hello", delay_s=0.02)
    async with world(engine=engine, api_keys=KEYS, max_inflight=24) as w:
        crowd = [asyncio.create_task(w.chat(headers=w.key(EVIL), n=4)) for _ in range(12)]
        await eventually(lambda: engine.running)
        status, _, body = await w.chat(headers=w.key(ACME))
        assert status == 200, body
        statuses = [(await task)[0] for task in crowd]
        assert sorted(set(statuses)) == [200, 503]
        assert statuses.count(200) == 4, "3 tenants: an eighth each is kept, so one of them has 24 - 2 * 4 places"
        assert (await w.chat(headers=w.key(EVIL)))[0] == 200


async def test_a_flood_of_feedback_is_bounded_for_its_sender_only():
    quotas = {"evil": {"events_per_s": 1}}
    async with world(api_keys=KEYS, tenant_quotas=quotas) as w:
        events = [{"id": f"s{i}", "target": "x", "name": "n", "value": 1, "source": "code"} for i in range(1000)]
        assert (await w.post("/v1/feedback", events, headers=w.key(EVIL)))[0] == 202
        status, headers, body = await w.post("/v1/feedback", events, headers=w.key(EVIL))
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        w.now += 1
        status, headers, body = await w.post("/v1/feedback", events, headers=w.key(EVIL))
        assert (status, headers["retry-after"]) == (429, "999"), "so many are not to be had sooner"
        assert (await w.post("/v1/feedback", events[:1], headers=w.key(EVIL)))[0] == 202, "and asking cost nothing"
        assert (await w.post("/v1/feedback", events, headers=w.key(ACME)))[0] == 202


@pytest.mark.parametrize("header", ["x-ostinato-user", "x-ostinato-episode", "x-ostinato-group", "idempotency-key"])
async def test_no_header_of_one_tenant_reaches_a_row_of_the_other(header):
    async with world(api_keys=KEYS) as w:
        for key in (ACME, EVIL):
            await turn_of(w, key)
            await w.chat(headers=w.key(key, **{header: "same"}))
        acme = [turn for turn in w.log.turns() if turn.tenant == "acme"]
        evil = [turn for turn in w.log.turns() if turn.tenant == "evil"]
        assert len(acme) == len(evil) == 2
        assert not {turn.id for turn in acme} & {turn.id for turn in evil}
        assert not {turn.id for turn in acme} & {turn.parent for turn in evil}


async def test_a_slot_of_weights_is_no_tenants_to_name():
    engine = FakeEngine(slots={"live": V0, "candidate": V1})
    async with world(engine=engine, api_keys=KEYS, admin_key=ADMIN) as w:
        status, _, body = await w.chat(headers=w.key(EVIL, **{"x-ostinato-slot": "candidate"}))
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert json.dumps(body).count(ADMIN) == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tenant_quotas": {"acne": {"calls_per_s": 1}}}, r"serve\.tenant_quotas: .* 'acne'; did you mean 'acme'\?"),
        ({"sampling": {"bold": {"temperature": 1.0}}}, r"serve\.sampling: .* 'bold'; did you mean 'bolt'\?"),
        ({"sampling": {"zzz": {}}}, r"'zzz'; known are acme, bolt, default\."),
        ({"tenant_quotas": {"*": {}}}, r"serve\.tenant_quotas: .* '\*'"),
        ({"judge": {"tenants": ["acne"]}}, r"serve\.judge\.tenants: .* 'acne'; did you mean 'acme'\?"),
        (
            {"auto": {"arms": [{"name": "live", "slot": "live", "tenants": ["acne"]}]}},
            r"serve\.auto\.arms: tenants: .* 'acne'; did you mean 'acme'\?",
        ),
    ],
)
async def test_settings_of_a_tenant_without_a_key_are_refused(settings, why):
    with pytest.raises(BadConfig, match=why):
        async with world(api_keys=["acme:0123456789abcdef", "bolt:fedcba9876543210"], **settings):
            pass


async def test_settings_of_all_and_of_the_default_tenant_need_no_key():
    async with world(sampling={"*": {"temperature": 1.0}}, tenant_quotas={"default": {"calls_per_s": 1}}):
        pass
