"""A person sees, sets and clears their own dials; nobody else does, and what cannot be set is refused by name."""

import asyncio

import pytest
from tests.unit.adapt.people import cache_at
from tests.unit.serve.gateway_world import ADMIN, V0, V1, world
from tests.unit.serve.test_adapted_calls import BASIS, SteeringEngine
from tests.virtual_time import in_virtual_time

from ostinato.adapt.config import AdaptConfig, TenantAdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.arm_assignment import Dealing
from ostinato.core.records import Consent, SteeringBasis
from ostinato.core.steering import Basis, DialSet
from ostinato.serve.config import PrivacyConfig
from ostinato.testing.log import MemoryLog
from ostinato_client import sign_user

ACME, BOLT = "sk-acme-0123456789", "sk-bolt-0123456789"
SECRET, SECRET_OF_BOLT = "the secret of acme", "the secret of bolt"
KEYS = {"api_keys": (f"acme:{ACME}", f"bolt:{BOLT}"), "user_keys": (f"acme:{SECRET}", f"bolt:{SECRET_OF_BOLT}")}
SIGNED = AdaptConfig(mode="dials", holdout=0.0)
DECLARED = AdaptConfig(mode="dials", users="declared", holdout=0.0)


def signed(user="ann", key=ACME, secret=SECRET, now=1000.0, **more):
    signature = {} if secret is None else {"x-ostinato-user-signature": sign_user(secret, user, now=now)}
    return {"x-api-key": key, "x-ostinato-user": user, **signature, **more}


def adapted(log, tmp_path, config=SIGNED):
    return DialAdaptation(log, cache_at(tmp_path), config)


async def log_with(*bases):
    log = MemoryLog()
    await log.append(*(SteeringBasis.of(basis, at=1.0) for basis in bases))
    return log


async def call(w, method, headers, body=None):
    reply = await w.http.request(method, "/v1/adaptation", headers=headers, json=body)
    return reply.status_code, reply.json()


def dial(told, name):
    return next(each for each in told["dials"] if each["name"] == name)


async def test_a_person_sets_a_dial_and_their_next_answer_leans_by_it(tmp_path):
    log = await log_with(BASIS)
    adaptation = adapted(log, tmp_path)
    async with world(engine=SteeringEngine(lambda _: "hello"), log=log, adaptation=adaptation, **KEYS) as w:
        status, told = await call(w, "GET", signed())
        assert (status, told["user"], told["active"], told["off"], told["ratings"]) == (200, "ann", True, None, 0)
        brief = dial(told, "brief")
        assert (brief["value"], brief["set"], brief["words"]) == (0.0, None, "not known yet")
        assert brief["low"] == -brief["high"] < -1
        status, told = await call(w, "PUT", signed(), {"brief": 0.5, "lists": -1})
        assert status == 200
        assert (dial(told, "brief")["set"], dial(told, "lists")["set"]) == (0.5, -1.0)
        assert dial(told, "lists")["words"] == "fewer lists, set by hand"
        assert dial(told, "brief")["low"] > 0.35
        await w.chat(signed(), user="ann")
        assert log.turns()[-1].steered.dials == pytest.approx((0.5, -1.0), abs=1e-4)
        for user in ("bob", "ann"):  # acme's bob, and bolt's ann
            key, secret = (ACME, SECRET) if user == "bob" else (BOLT, SECRET_OF_BOLT)
            assert dial((await call(w, "GET", signed(user, key, secret)))[1], "brief")["set"] is None
            await w.chat(signed(user, key, secret), user=user)
            assert log.turns()[-1].steered.dials == (0.0, 0.0)
        status, told = await call(w, "PUT", signed(), {"brief": None})
        assert (dial(told, "brief")["set"], dial(told, "lists")["set"]) == (None, -1.0)
        status, told = await call(w, "DELETE", signed())
        assert [each["set"] for each in told["dials"]] == [None, None]
        assert told["last_reset"] is not None
        await w.chat(signed(), user="ann")
        assert log.turns()[-1].steered.dials == (0.0, 0.0)


async def test_ratings_are_told_in_words_and_gone_after_a_reset(tmp_path):
    log = await log_with(BASIS)
    adaptation = adapted(log, tmp_path, DECLARED)
    async with world(engine=SteeringEngine(lambda _: "hello"), log=log, adaptation=adaptation) as w:
        ann = {"x-ostinato-user": "ann"}
        assert (await call(w, "GET", ann))[1]["active"]  # the basis was read
        for number in range(30):
            w.now += 1.0
            await w.chat(user="ann")
            await w.feedback(log.turns()[-1].id, id=f"s{number}", value=False)
        w.now += 1.0
        told = (await call(w, "GET", ann))[1]
        assert (told["ratings"], told["nats"]) == (30, pytest.approx(29 * 0.04, abs=1e-3)), (
            "spent since the first rating"
        )
        assert dial(told, "brief")["value"] < 0
        told = (await call(w, "DELETE", ann))[1]
        assert (told["ratings"], dial(told, "brief")["value"]) == (0, 0.0)
        await w.feedback(log.turns()[-1].id, id="late", value=False)
        assert (await call(w, "GET", ann))[1]["ratings"] == 0
        w.now += 1.0
        await w.chat(user="ann")
        await w.feedback(log.turns()[-1].id, id="new")
        assert (await call(w, "GET", ann))[1]["ratings"] == 1


async def test_only_the_person_with_their_signature(tmp_path):
    log = await log_with(BASIS)
    async with world(log=log, adaptation=adapted(log, tmp_path), admin_keys=(ADMIN,), **KEYS) as w:
        wrong = [
            signed(secret=None),
            signed(secret=None, **{"x-ostinato-key": ADMIN}),  # an operator has `ostinato adapt`
            signed(secret=SECRET_OF_BOLT),
            signed(key=BOLT),
            signed(now=-9999.0),
            signed("bob") | {"x-ostinato-user": "ann"},
            signed(key="sk-nobody-0123456789"),
        ]
        for headers in wrong:
            for method, body in (("GET", None), ("PUT", {"brief": 1}), ("DELETE", None)):
                status, told = await call(w, method, headers, body)
                assert (status, told["error"]["code"]) == (401, "unauthorized"), (headers, method)
        for user in ("", "anonymous"):
            assert (await call(w, "GET", signed() | {"x-ostinato-user": user}))[0] == 400
        assert not [row for row in log.rows if isinstance(row, DialSet)]


async def test_what_cannot_be_set_is_refused_by_name_and_nothing_is_written(tmp_path):
    old = Basis(names=("brief", "commas"), tokens_M=BASIS.tokens_M, directions_KM=BASIS.directions_KM, weights=V1.hash)
    log = await log_with(old, BASIS)
    async with world(log=log, adaptation=adapted(log, tmp_path), **KEYS) as w:
        for body, field in (
            ({"brief": 3.1}, "brief"),
            ({"lists": -1e300}, "lists"),
            ({"brief": 0.5, "lists": 10**400}, "lists"),
            ({"commas": 0.5}, "commas"),  # of an earlier basis
            ({"brief": 0.5, "Lists": 0.5}, "Lists"),
            ({"brief": "0.5"}, "brief"),
            ({"brief": True}, "brief"),
            ({"brief": [0.5]}, "brief"),
            ({"": None}, ""),
        ):
            status, told = await call(w, "PUT", signed(), body)
            assert (status, told["error"]["param"]) == (400, field), body
        assert "it has brief, lists" in (await call(w, "PUT", signed(), {"commas": 0.5}))[1]["error"]["message"]
        assert "not an object" in (await call(w, "PUT", signed(), {"brief": {}}))[1]["error"]["message"]
        for data in (b'{"brief": NaN}', b'{"brief": Infinity}', b"{}", b"[]", b"0.5", b'"brief"', b""):
            assert await put(w, data) == 400, data
        assert not [row for row in log.rows if isinstance(row, DialSet)]


async def put(w, data):
    headers = {"content-type": "application/json", **signed()}
    reply = await w.http.put("/v1/adaptation", content=data, headers=headers)
    return reply.status_code


async def test_who_has_no_dials_is_told_why_and_what_changes_it(tmp_path):
    async with world(**KEYS) as w:
        for method, body in (("GET", None), ("PUT", {"brief": 1}), ("DELETE", None)):
            status, told = await call(w, method, signed(), body)
            assert (status, told["error"]["code"]) == (404, "not_found")
            assert "adapt.mode" in told["error"]["message"]
    off = SIGNED.model_copy(update={"tenants": {"acme": TenantAdaptConfig(prior="off")}})
    cases = [
        ("tenant", off, {}, (BASIS,), 403),
        ("consent", SIGNED, {"privacy": PrivacyConfig(train=Consent.AGGREGATE)}, (BASIS,), 403),
        ("holdout", SIGNED.model_copy(update={"holdout": 1.0}), {}, (BASIS,), 200),
        ("basis", SIGNED, {}, (), 404),
    ]
    for reason, config, more, bases, code in cases:
        log = await log_with(*bases)
        async with world(log=log, adaptation=adapted(log, tmp_path / reason, config), **more, **KEYS) as w:
            status, told = await call(w, "GET", signed())
            assert (status, told["active"], told["off"]["reason"]) == (200, False, reason)
            assert told["off"]["message"]
            assert (await call(w, "PUT", signed(), {"brief": 1}))[0] == code, reason
            assert (await call(w, "DELETE", signed()))[0] == 200
            rows = [row for row in log.rows if isinstance(row, DialSet)]
            assert len(rows) == (2 if reason == "holdout" else 1), (
                "where nothing would be kept nothing is set, but all can be forgotten"
            )
            assert rows[-1].dials == {}
            if reason == "tenant":
                assert (await call(w, "GET", signed("ann", BOLT, SECRET_OF_BOLT)))[1]["active"]


async def test_a_persons_own_refusal_counts_at_once(tmp_path):
    log = await log_with(BASIS)
    async with world(log=log, adaptation=adapted(log, tmp_path), **KEYS) as w:
        assert (await call(w, "PUT", signed(), {"brief": 1}))[0] == 200
        refusal = {"user": "ann", "train": "aggregate"}
        assert (await w.http.put("/v1/consent", json=refusal, headers=signed())).status_code == 200
        status, told = await call(w, "PUT", signed(), {"brief": 1})
        assert (status, told["error"]["code"]) == (403, "dials_off")
        assert "/v1/consent" in told["error"]["message"]
        told = (await call(w, "GET", signed()))[1]
        assert (told["off"]["reason"], dial(told, "brief")["set"]) == ("consent", None)


async def test_while_two_releases_are_compared_it_says_so_and_keeps_what_is_set(tmp_path):
    log = await log_with(BASIS)
    engine = SteeringEngine(slots={"live": V0, "canary": V1})
    async with world(engine=engine, log=log, adaptation=adapted(log, tmp_path), **KEYS) as w:
        w.app.deal(Dealing(salt="a", canary=0.5))
        status, told = await call(w, "PUT", signed(), {"brief": 0.7})
        assert (status, told["active"], told["off"]["reason"], dial(told, "brief")["set"]) == (200, False, "trial", 0.7)
        w.app.deal(None)
        assert (await call(w, "GET", signed()))[1]["active"]


async def test_another_gateway_and_one_that_starts_anew_agree(tmp_path):
    log = await log_with(BASIS)
    one, other = (adapted(log, tmp_path / name) for name in ("one", "other"))
    async with world(log=log, adaptation=one, **KEYS) as w, world(log=log, adaptation=other, **KEYS) as v:
        await call(w, "PUT", signed(), {"brief": 0.7})
        expected = await call(v, "GET", signed())
        assert dial(expected[1], "brief")["set"] == 0.7
        await call(v, "PUT", signed(), {"lists": 0.2})
        assert await call(w, "GET", signed()) == await call(v, "GET", signed())
    async with world(log=log, adaptation=adapted(log, tmp_path / "third"), **KEYS) as w:
        told = (await call(w, "GET", signed()))[1]
        assert [each["set"] for each in told["dials"]] == [0.7, 0.2]


class Hanging(MemoryLog):
    """A log that takes no more rows once it hangs."""

    hangs = False

    async def append(self, *rows):
        if self.hangs and rows:
            await asyncio.Event().wait()
        return await super().append(*rows)


@in_virtual_time
async def test_a_log_that_hangs_or_is_full_is_told_in_time_and_nothing_was_set(tmp_path):
    log = Hanging()
    await log.append(SteeringBasis.of(BASIS, at=1.0))
    async with world(log=log, adaptation=adapted(log, tmp_path), store_timeout_s=0.5, **KEYS) as w:
        log.full = True
        assert (await call(w, "PUT", signed(), {"brief": 1}))[0] == 507
        log.full, log.hangs = False, True
        status, told = await call(w, "PUT", signed(), {"brief": 1})
        assert (status, "send it again" in told["error"]["message"]) == (503, True)
        log.hangs = False
        assert dial((await call(w, "GET", signed()))[1], "brief")["set"] is None


async def test_a_flood_of_settings_meets_the_quota(tmp_path):
    log = await log_with(BASIS)
    quota = {"events_per_s": 1.0}
    async with world(log=log, adaptation=adapted(log, tmp_path), quota=quota, **KEYS) as w:
        w.app._parts.quotas.count_events("acme", 997)  # of a thousand
        codes = [(await call(w, "PUT", signed(), {"brief": 1}))[0] for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        assert (await call(w, "DELETE", signed()))[0] == 429
        assert len([row for row in log.rows if isinstance(row, DialSet)]) == 3
        assert (await call(w, "GET", signed("ann", BOLT, SECRET_OF_BOLT)))[0] == 200


async def test_a_page_may_ask_for_all_methods(tmp_path):
    async with world(allowed_hosts=("shop.example.org",)) as w:
        asked = {"origin": "https://shop.example.org", "access-control-request-method": "PUT"}
        reply = await w.http.request("OPTIONS", "/v1/adaptation", headers=asked)
        told = set(reply.headers["access-control-allow-methods"].replace(" ", "").split(","))
        assert told >= {"GET", "PUT", "DELETE"}
