"""Two gateways of two hosts on one log in Postgres: people use both at once, and one desk accounts for every turn once."""

import asyncio
import itertools
from contextlib import AsyncExitStack

import aiohttp
from tests.contract.test_log import read
from tests.oracles.turn_accounting import recount

from ostinato.core.records import PolicyVersion, Reward, Signal, Turn
from ostinato.record.postgres.log import PostgresLog
from ostinato.reward.config import RewardConfig
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import asker_of
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

NOW = 1_800_000_000.0


async def host(stack, name, record):
    """A gateway over a log of its own; its answers name it, and no two are alike."""
    counter = itertools.count()
    engine = FakeEngine(
        lambda request: f"{name} {next(counter)}", slots={"live": PolicyVersion(number=0, hash="fake0")}, context=4096
    )
    log = stack.enter_context(PostgresLog.open(record))
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(context=4096),
        log=log,
        config=ServeConfig(),
        clock=lambda: NOW,
        model_name="m",
    )
    url = await stack.enter_async_context(serving(app))
    return await stack.enter_async_context(aiohttp.ClientSession(url))


async def ask(session, user, **headers):
    body = {"model": "m", "user": user, "messages": [{"role": "user", "content": "say"}], "temperature": 1.0}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        reply = await response.json()
        if response.status != 200:
            return response.status, None
        return reply["choices"][0]["message"]["content"], reply["ostinato"]["turns"][0]


async def tell(session, turn, name="accepted"):
    event = {"id": f"of {turn}", "target": turn, "name": name, "value": True, "source": "human"}
    async with session.post("/v1/feedback", json=event) as response:
        assert response.status == 202


async def test_two_gateways_lose_double_and_confuse_nothing(in_postgres):
    record = in_postgres(segment_rows=60)
    async with AsyncExitStack() as stack:
        hosts = [await host(stack, name, record) for name in ("one", "two")]

        async def person(number):
            here, there = hosts[number % 2], hosts[1 - number % 2]
            said, turn = await ask(here, f"u{number}")
            # the same event comes to both gateways, as from a client that tries the other one after a timeout
            await asyncio.gather(tell(there, turn), tell(here, turn))
            return turn, said

        acked = dict(await asyncio.gather(*map(person, range(40))))
        assert len(acked) == 40
        key = {"Idempotency-Key": "the same"}
        both = await asyncio.gather(*(ask(session, "u0", **key) for session in hosts))
        again = [await ask(session, "u0", **key) for session in hosts]
        assert again[0] == again[1]  # one answer, whichever gateway is asked
        assert all(answer == again[0] or answer[0] == 409 for answer in both), both
        acked[again[0][1]] = again[0][0]
    with PostgresLog.open(record) as log:
        rows = [row for _, row in await read(log)]
        turns = [row for row in rows if isinstance(row, Turn)]
        assert {turn.id: turn.text for turn in turns} == acked
        assert len(turns) == 41
        signals = [row.turn for row in rows if isinstance(row, Signal)]
        assert sorted(signals) == sorted(acked.keys() - {again[0][1]})
        config = RewardConfig(options={"window": 60.0})
        asker = asker_of(config)
        await asker.open()
        try:
            desk = RewardDesk(log, asker, lambda: NOW + 3600, config)
            await desk.poll()
            await desk.poll()
        finally:
            await asker.close()
        rewards = [row.turn async for _, row in log.read(0, {Reward}) if isinstance(row, Reward)]
        assert len(rewards) == len(set(rewards))
        assert set(rewards) >= set(signals)
        found = await recount(log)
        assert found.balanced, found


async def test_an_item_that_one_gateway_answered_can_be_referred_to_at_the_other(in_postgres):
    record = in_postgres()
    async with AsyncExitStack() as stack:
        here, there = [await host(stack, name, record) for name in ("one", "two")]

        async def respond(session, user, *items):
            body = {"model": "m", "user": user, "input": [*items, {"role": "user", "content": "say"}]}
            async with session.post("/v1/responses", json=body) as response:
                return response.status, await response.json()

        _, first = await respond(here, "ann")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        status, second = await respond(there, "ann", reference)
        assert (status, second["output"][0]["content"][0]["text"]) == (200, "two 0")
        assert (await respond(there, "bob", reference))[0] == 404
    with PostgresLog.open(record) as log:
        _, continued = [row for _, row in await read(log) if isinstance(row, Turn)]
        assert "one 0" in ByteRenderer().decode(continued.prompt_ids)
