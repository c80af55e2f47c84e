import asyncio
from datetime import UTC, datetime

import pytest
from ostinato.client import AsyncOstinato, Ostinato

from ostinato.core.errors import BadConfig, BadRequest, TooLarge, Unauthorized, Unavailable
from ostinato.core.records import Source
from ostinato.serve.config import ServeConfig
from ostinato.serve.feedback import parse_feedback
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

EVENT = {"id": "s1", "target": "R:2", "name": "accepted", "value": True, "source": "human"}
KEY = "sk-0123456789abcdef"


def parse(body, tenant="default"):
    return parse_feedback(body, tenant=tenant, now=1000.0)


def test_values_times_and_targets():
    (signal,) = parse(EVENT | {"value": False, "occurred_at": 5, "comment": "c", "correction": "d", "retracts": "s0"})
    assert (signal.turn, signal.value, signal.occurred_at, signal.received_at) == ("R:2", 0.0, 5.0, 1000.0)
    assert (signal.comment, signal.correction, signal.retracts, signal.source) == ("c", "d", "s0", Source.HUMAN)
    assert parse(EVENT | {"value": -2.5, "target": "R"})[0].turn == "R:0"
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00"):
        assert parse(EVENT | {"occurred_at": text})[0].occurred_at == noon
    assert parse(EVENT)[0].occurred_at == 1000.0
    assert parse({k: v for k, v in EVENT.items() if k != "value"} | {"retracts": "s0"})[0].value == 0.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"id": None}, "id"),
        ({"target": 5}, "target"),
        ({"name": "has space"}, "name"),
        ({"value": "yes"}, "value"),
        ({"value": None}, "value"),
        ({"value": float("inf")}, "value"),
        ({"value": 10**400}, "value"),
        ({"source": "robot"}, "source"),
        ({"occurred_at": "yesterday"}, "occurred_at"),
        ({"occurred_at": -1}, "occurred_at"),
        ({"occurred_at": 1e300}, "occurred_at"),
        ({"occurred_at": True}, "occurred_at"),
        ({"valeu": 1}, "valeu"),
    ],
)
def test_a_bad_field_is_named_alone_and_in_a_list(change, field):
    with pytest.raises(BadRequest) as caught:
        parse(EVENT | change)
    assert caught.value.field == field
    with pytest.raises(BadRequest) as caught:
        parse([EVENT, EVENT | change])
    assert caught.value.field == f"[1].{field}"


def test_a_list_is_bounded():
    assert len(parse([EVENT] * 1000)) == 1000
    with pytest.raises(TooLarge):
        parse([EVENT] * 1001)
    for bad in ([], 5, "x", None, [5]):
        with pytest.raises(BadRequest):
            parse(bad)


def test_one_tenants_id_cannot_shadow_anothers():
    ids = {parse(EVENT | {"retracts": "s0"}, tenant)[0].id for tenant in ("default", "acme", "evil")}
    assert ids == {"s1", "acme/s1", "evil/s1"}
    assert parse(EVENT | {"retracts": "s0"}, "acme")[0].retracts == "acme/s0"


class Flaky:
    """Answers the first requests with 503, or takes them and then drops the connection."""

    def __init__(self, app, failures, *, after):
        self.app, self.left, self.after = app, failures, after

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or self.left == 0:
            await self.app(scope, receive, send)
            return
        self.left -= 1

        async def nowhere(message):
            pass

        if self.after:  # the event is stored, the client never hears of it
            await self.app(scope, receive, nowhere)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def app(log, *keys):
    config = ServeConfig(api_keys=keys)
    return create_app(
        engine=FakeEngine(), renderer=ByteRenderer(), log=log, config=config, clock=lambda: 1000.0, model_name="m"
    )


async def test_both_clients_retry_with_one_id_and_count_once():
    log = MemoryLog()
    async with serving(Flaky(app(log), 2, after=True)) as url:
        sent = await asyncio.to_thread(Ostinato(url).feedback, "R", "accepted", True)
        async with AsyncOstinato(url + "/v1/") as client:
            other = await client.feedback("R:1", "undone", 0.5, source="code", occurred_at=3.0, comment="c")
    first, second = log.signals()
    assert (first.id, first.turn, first.name, first.value, first.source) == (sent, "R:0", "accepted", 1.0, Source.HUMAN)
    assert (second.id, second.turn, second.occurred_at, second.source) == (other, "R:1", 3.0, Source.CODE)


async def test_clients_say_what_is_wrong_and_give_up_in_time():
    log = MemoryLog()
    async with serving(app(log, KEY)) as url:
        with pytest.raises(Unauthorized):
            await asyncio.to_thread(Ostinato(url).feedback, "R", "accepted", True)
        with pytest.raises(BadRequest, match="name") as caught:
            await asyncio.to_thread(Ostinato(url, KEY).feedback, "R", "not a name", True)
        assert caught.value.field == "name"
        async with AsyncOstinato(url, KEY, deadline_s=0.3) as client:
            log.full = True
            with pytest.raises(Unavailable, match="507"):
                await client.feedback("R", "accepted", True)
    with pytest.raises(Unavailable, match=r"0\.2 s"):
        await asyncio.to_thread(Ostinato(url, KEY, deadline_s=0.2).feedback, "R", "accepted", True)
    async with AsyncOstinato(url, KEY, deadline_s=0.2) as client:
        with pytest.raises(Unavailable):
            await client.feedback("R", "accepted", True)
    with pytest.raises(BadConfig):
        Ostinato("file:///etc/passwd")
