"""Which calls the lending guard hears of: those at the engine, from when it is asked."""

import asyncio

from tests.unit.serve.gateway_world import ADMIN, V0, eventually, world

from ostinato.testing.engine import FakeEngine


class Held(FakeEngine):
    """Says nothing until it may."""

    def __init__(self):
        super().__init__(lambda request: "hello", slots={"live": V0, "world": V0})
        self.go = asyncio.Event()

    async def generate(self, request):
        await self.go.wait()
        async for chunk in super().generate(request):
            yield chunk


async def test_a_refused_call_counts_no_answers():
    async with world(max_inflight=4) as w:
        assert (await w.chat(n=8))[0] >= 400
        assert w.app.state.waits.answers == 0
        assert (await w.chat(n=2))[0] == 200
        assert w.app.state.waits.answers == 2


async def test_a_repeat_that_waits_for_its_first_try_is_not_late():
    engine = Held()
    async with world(engine=engine) as w:
        waits = w.app.state.waits
        tries = [asyncio.create_task(w.chat({"Idempotency-Key": "k"})) for _ in range(3)]
        await eventually(lambda: len(waits._waiting) == 1)
        await asyncio.sleep(0.05)
        assert len(waits._waiting) == 1
        engine.go.set()
        assert {reply[0] for reply in await asyncio.gather(*tries)} == {200}
        assert waits.answers == 1


async def test_a_call_of_another_slot_is_nobodys_wait():
    engine = Held()
    async with world(engine=engine, admin_keys=[ADMIN]) as w:
        call = asyncio.create_task(w.chat({"X-Ostinato-Key": ADMIN, "X-Ostinato-Slot": "world"}))
        person = asyncio.create_task(w.chat({"X-Ostinato-User": "u1"}))
        await eventually(lambda: len(w.app.state.waits._waiting) == 1)
        engine.go.set()
        await asyncio.gather(call, person)
        assert w.app.state.waits.answers == 1
