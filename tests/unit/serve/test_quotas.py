import asyncio

import pytest
from gateway_world import ADMIN, eventually, world
from hypothesis import given
from hypothesis import strategies as st
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadRequest, OstinatoError, Unavailable
from ostinato.core.fair_share import Bucket
from ostinato.serve.config import SHARED, QuotaConfig, ServeConfig
from ostinato.serve.quotas import QuotaExceeded, Quotas, in_force, quota_of
from ostinato.testing.engine import FakeEngine


def quotas(tenants=("acme", "bolt"), clock=lambda: 0.0, **config):
    return Quotas(ServeConfig(**config), tenants, clock, lambda tenant, reason: None)


async def test_a_tenants_looks_at_its_metrics_are_bounded_and_an_operators_are_not():
    async with world(api_keys=("acme:sk-acme-0123456789", "bolt:sk-bolt-0123456789"), admin_key=ADMIN) as w:
        acme, bolt = w.key("sk-acme-0123456789"), w.key("sk-bolt-0123456789")
        assert [(await w.get("/metrics", acme))[0] for _ in range(61)] == [200] * 60 + [429]
        assert (await w.get("/metrics", bolt))[0] == 200
        assert {(await w.get("/metrics", w.key(ADMIN)))[0] for _ in range(61)} == {200}
        w.now += 1.0
        assert (await w.get("/metrics", acme))[0] == 200


def test_a_bucket_fills_with_time_and_says_when_to_come_again():
    bucket = Bucket(rate=2.0, size=4.0, now=0.0)
    assert [bucket.take(1.0, now=0.0) for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert bucket.take(1.0, now=0.5) == 0.0
    assert bucket.take(4.0, now=1.0) == pytest.approx(1.5)
    assert bucket.take(100.0, now=10.0) == 0.0, "more than it ever holds can be had when it is full"
    assert bucket.take(1.0, now=10.0) == pytest.approx(48.5), "and is paid off by the time that follows"
    assert bucket.take(1.0, now=5.0) > 0.0, "a clock that goes back gives nothing"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 10)), max_size=40))
def test_a_bucket_never_gives_more_than_its_rate(steps):
    bucket, now, taken = Bucket(rate=2.0, size=5.0, now=0.0), 0.0, 0.0
    for wait, amount in steps:
        now += wait
        if bucket.take(amount, now) == 0.0:
            taken += amount
            assert taken - amount <= 5.0 + 2.0 * now + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=60))
def test_every_tenant_always_finds_its_kept_share_free(asks):
    """A sixth of the places for each of three, whatever the others have taken."""
    limits = quotas(tenants="abc", max_inflight=36)
    open_, held = dict.fromkeys("abc", 0), []
    for tenant, samples, ends in asks:
        places = limits.places(tenant, samples)
        try:
            places.__enter__()
        except OstinatoError:
            pass
        else:
            open_[tenant] += samples
            held.append((tenant, samples, places))
        assert sum(open_.values()) <= 36
        for name in "abc":
            if open_[name] < 6:
                with limits.places(name, 6 - open_[name]):
                    pass
        if ends and held:
            tenant, samples, places = held.pop(0)
            places.__exit__(None, None, None)
            open_[tenant] -= samples


def test_several_tenants_share_a_server_by_default_and_one_has_it_to_itself():
    wide = QuotaConfig()
    alone, several = ServeConfig(), ("acme", "bolt", "default")
    assert quota_of(alone, "acme", ("acme", "default")) == quota_of(alone, "default", several) == wide
    assert quota_of(alone, "acme", several) == quota_of(alone, "bolt", several) == SHARED
    own = ServeConfig(tenant_quotas={"acme": QuotaConfig(burst=7)}, quota=QuotaConfig(burst=9))
    assert [quota_of(own, name, several).burst for name in several] == [7, 9, 9]
    said = in_force(ServeConfig(tenant_quotas={"zoo": wide}), ("acme", "bolt", "core", "dune", "zoo", "default"))
    assert said.startswith(
        "acme, bolt, core and 1 more: 50 calls a second (200 at once), 64 samples in progress, 500 events and 8 MiB"
    )
    assert "20,000 MB a day; default, zoo: 5,000 calls a second" in said


def test_what_a_tenant_sends_in_a_day_is_bounded():
    now = 0.0
    limits = quotas(clock=lambda: now, quota=QuotaConfig(bytes_per_s=1e6, mb_per_day=10.0))
    for _ in range(10):
        limits.count_bytes("acme", 999_000)
        now += 4.0
    with pytest.raises(QuotaExceeded, match=r"10 MB of request bodies a day \(serve\.quota\.mb_per_day\)") as caught:
        limits.count_bytes("acme", 999_000)
    limits.count_bytes("bolt", 999_000)
    now += caught.value.retry_after_s + 1.0
    limits.count_bytes("acme", 999_000)


def test_one_tenant_alone_has_all_places():
    limits = quotas(tenants=["acme"], max_inflight=8)
    with limits.places("acme", 8), pytest.raises(Unavailable), limits.places("acme", 1):
        pass
    with limits.places("acme", 8):
        pass


def test_a_call_that_could_never_run_is_a_mistake_not_a_wait():
    for config in ({"quota": QuotaConfig(max_n=4)}, {"quota": QuotaConfig(open_samples=4)}, {"max_inflight": 5}):
        with pytest.raises(BadRequest, match="at most 4") as caught, quotas(**config).places("acme", 5):
            pass
        assert caught.value.field == "n"


def test_tokens_are_held_and_what_was_not_used_is_given_back():
    now = 0.0
    limits = quotas(clock=lambda: now, quota=QuotaConfig(tokens_per_minute=600))
    limits.hold_tokens("acme", 500)
    with pytest.raises(QuotaExceeded) as caught:
        limits.hold_tokens("acme", 200)
    assert (caught.value.kind, caught.value.retry_after_s) == ("tokens", pytest.approx(10.0))
    limits.hold_tokens("bolt", 600)
    limits.give_back_tokens("acme", 400)
    limits.hold_tokens("acme", 200)
    now = 6.0
    limits.hold_tokens("acme", 300)


async def test_too_many_calls_a_second_are_told_when_to_come_again():
    quota = {"calls_per_s": 2.0, "burst": 3}
    async with world(quota=quota) as w:
        statuses = [(await w.chat())[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        _, headers, body = await w.chat()
        assert body["error"] == {
            "message": "Rate limit reached: more than 2 calls a second (serve.quota.calls_per_s). Please try again in 0.5s.",
            "type": "requests",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "500")
        w.now += 0.5
        assert (await w.chat())[0] == 200
        _, page = await w.get("/metrics")
        assert 'ostinato_refusals_total{reason="rate_limit_exceeded",tenant="default"} 2.0' in page


async def test_the_rate_is_looked_at_before_the_body_is_read():
    async with world(quota={"calls_per_s": 1.0, "burst": 1}, real=True) as w:
        await w.chat()
        reader, writer = await asyncio.open_connection(*w.address())
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 1000\r\n\r\n".encode())  # and the body never comes
        async with asyncio.timeout(PATIENT_S):
            assert b" 429 " in await reader.readline()
        writer.close()


async def test_events_are_counted_before_any_is_looked_at():
    event = {"id": "s", "target": "t:0", "name": "accepted", "value": True, "source": "human"}
    flawed = [event] * 999 + [{}]
    async with world(quota={"events_per_s": 1.0}) as w:
        assert [(await w.post("/v1/feedback", flawed))[0] for _ in range(2)] == [400, 429]
    async with world(quota={"events_per_s": 1.0}) as w:
        assert (await w.post("/v1/feedback", [event] * 1000))[0] == 202, "as many as a call may have"
        status, headers, body = await w.post("/v1/feedback", data=b"{never looked at")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "serve.quota.events_per_s" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/feedback"])
async def test_bytes_are_counted_before_they_are_looked_at(path):
    async with world(quota={"bytes_per_s": 1000.0}) as w:
        assert (await w.post(path, data=b"{" * 3000))[0] == 400
        status, headers, body = await w.post(path, data=b"{" * 3000)
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "2")
        assert "serve.quota.bytes_per_s" in body["error"]["message"]
        w.now += 2
        assert (await w.post(path, data=b"{" * 3000))[0] == 400


async def test_bytes_whose_number_is_not_said_are_counted_as_they_come():
    sent = 0

    async def pieces():
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b" " * 1000

    async with world(quota={"bytes_per_s": 1000.0}) as w:
        assert (await w.post("/v1/feedback", data=pieces()))[0] == 429
        assert sent < 10_000


async def test_a_body_larger_than_the_burst_is_paid_off_afterwards_and_no_more_than_is_ever_read():
    async with world(quota={"bytes_per_s": 1000.0}, max_body_bytes=10_000) as w:
        assert (await w.chat(messages=[{"role": "user", "content": "x" * 3000}] * 3))[0] == 400, (
            "too long for the context"
        )
        assert (await w.chat())[1]["retry-after"] == "6", "the debt, and a body more"
        w.now += 60
        head = {"content-length": str(10**12), "content-type": "application/json"}
        assert (await w.http.post("/v1/feedback", content=b"x", headers=head)).status_code == 400
        w.now += 161
        assert (await w.chat())[0] == 200


async def test_bytes_that_are_announced_are_not_waited_for():
    async with world(quota={"bytes_per_s": 1000.0}, real=True) as w:
        await w.post("/v1/feedback", data=b"{" * 4000)
        reader, writer = await asyncio.open_connection(*w.address())
        head = "POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 1000\r\n\r\n".encode())  # and the body never comes
        async with asyncio.timeout(PATIENT_S):
            assert b" 429 " in await reader.readline()
        writer.close()


@in_virtual_time
async def test_open_samples_count_n():
    engine = FakeEngine(lambda r: "hello", delay_s=0.02)
    async with world(engine=engine, quota={"open_samples": 4}) as w:
        first = asyncio.create_task(w.chat(n=3))
        await eventually(lambda: engine.running)
        status, _, body = await w.chat(n=2)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await w.chat(n=1))[0] == 200
        assert (await first)[0] == 200
        status, _, body = await w.chat(n=5)
        assert (status, body["error"]["param"]) == (400, "n")


async def test_a_minutes_tokens_are_prompt_and_answer():
    async with world(quota={"tokens_per_minute": 100}) as w:
        _, _, body = await w.chat(max_tokens=90)
        used = body["usage"]["total_tokens"]
        assert used < 20
        status, headers, body = await w.chat(max_tokens=90)
        assert (status, body["error"]["type"]) == (429, "tokens")
        w.now += float(headers["retry-after-ms"]) / 1000
        assert (await w.chat(max_tokens=90))[0] == 200


async def test_text_that_cannot_fit_is_refused_without_being_tokenised():
    async with world(max_chars_per_token=4) as w:
        tokenised = []
        original = w.renderer.encode
        w.renderer.encode = lambda text: tokenised.append(text) or original(text)
        for path, body in (
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]}),
            ("/v1/completions", {"model": "m", "prompt": "x" * 20_000}),
        ):
            status, _, answer = await w.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert "serve.max_chars_per_token" in answer["error"]["message"]
        assert not tokenised
