"""A coroutine behaves under the fair loop as it does without it, and who takes much of the loop's time waits for who takes little."""

import asyncio
from contextlib import suppress

import pytest
from gateway_world import world

from ostinato.serve.fair_loop import FairLoop, LoopRounds

QUANTUM_S = 1.0


class Clock:
    """Processor time that passes when a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loop(clock):
    return FairLoop(QUANTUM_S, clock)


# ------------------------------------------------------------ rounds


def test_who_used_its_part_waits_until_it_owes_nothing():
    rounds = LoopRounds(QUANTUM_S)
    assert rounds.may_go("a")
    rounds.charge("a", 2.5)
    assert not rounds.may_go("a")
    rounds.wait("a", "step")
    assert [rounds.begin() for _ in range(3)] == [[], ["step"], []]
    assert rounds.may_go("a")


def test_parts_are_not_saved_up():
    rounds = LoopRounds(QUANTUM_S)
    rounds.charge("a", 0.5)
    for _ in range(10):
        rounds.begin()
    rounds.charge("a", 1.0)
    assert not rounds.may_go("a")


def test_of_short_steps_as_many_go_on_as_the_part_allows():
    rounds = LoopRounds(QUANTUM_S)
    for _ in range(100):
        rounds.charge("a", 0.25)
    while not rounds.may_go("a"):
        rounds.begin()
    rounds.charge("a", 5.0)
    for step in range(10):
        rounds.wait("a", step)
    going = []
    while not going:
        going = rounds.begin()
    assert 1 <= len(going) < 10
    assert going == [*range(len(going))], "in their order"


def test_alone_nobody_waits_and_nothing_is_owed_for_long():
    rounds = LoopRounds(QUANTUM_S)
    rounds.charge("a", 1_000.0)
    assert rounds.may_go("a", alone=True)
    rounds.wait("a", "step")
    assert not rounds.may_go("a", alone=True), "its others are not passed over"
    passed = 0
    while "step" not in rounds.begin():
        passed += 1
    assert passed <= 20


async def test_alone_a_busy_owner_is_not_held_up(clock):
    loop, order = FairLoop(QUANTUM_S, clock), []

    async def steps(number):
        for _ in range(3):
            clock.now += 5.0
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(_awaited(loop.run("only", steps(number))) for number in range(3)))
    assert order == [0, 1, 2] * 3, "as without it"


# ------------------------------------------------------------ coroutines


async def test_results_errors_and_cancellations_pass_through(loop):
    async def works():
        await asyncio.sleep(0)
        return 7

    async def fails():
        await asyncio.sleep(0)
        raise KeyError("no")

    met = []

    async def waits():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            met.append("cancelled")
            await asyncio.sleep(0)
            met.append("cleaned up")
            raise

    assert await loop.run("a", works()) == 7
    with pytest.raises(KeyError):
        await loop.run("a", fails())
    task = asyncio.ensure_future(_awaited(loop.run("a", waits())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert met == ["cancelled", "cleaned up"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await loop.run("a", waits())


async def _awaited(work):
    return await work


async def test_who_is_cancelled_before_its_turn_does_not_keep_it_from_others(loop, clock):
    async def step(takes):
        clock.now += takes
        await asyncio.sleep(0)
        return "done"

    assert await loop.run("b", step(0.0)) == "done"
    assert await loop.run("a", step(5.0)) == "done"
    gone = asyncio.ensure_future(_awaited(loop.run("a", step(0.0))))
    stays = asyncio.ensure_future(_awaited(loop.run("a", step(0.0))))
    await asyncio.sleep(0)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    assert gone.cancelled()
    assert await stays == "done"


async def test_few_short_steps_pass_many_long_ones(loop, clock):
    order = []

    async def steps(owner, number, count, takes):
        for _ in range(count):
            clock.now += takes
            order.append(owner)
            await asyncio.sleep(0)

    await loop.run("few", steps("few", 0, 1, 0.1))
    order.clear()
    many = [loop.run("many", steps("many", number, 5, 3.0)) for number in range(20)]
    await asyncio.gather(*map(_awaited, [*many, loop.run("few", steps("few", 0, 5, 0.1))]))
    last = len(order) - 1 - order[::-1].index("few")
    assert order[: last + 1].count("many") <= 5, "at most a step of the others for each of its own"
    assert order.count("many") == 100, "and all of them are done"


async def test_without_the_fair_loop_they_would_not():
    order = []

    async def steps(owner, count):
        for _ in range(count):
            order.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*(steps("many", 5) for _ in range(20)), steps("few", 5))
    last = len(order) - 1 - order[::-1].index("few")
    assert order[: last + 1].count("many") == 100


async def test_nothing_is_kept_of_whoever_is_done_and_the_loop_is_left_alone(loop, clock):
    async def step():
        clock.now += 3.0

    await loop.run("first", step())
    for number in range(50):
        await loop.run(f"address {number}", step())
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(loop._rounds) == 0
    assert loop._next is None


# ------------------------------------------------------------ the gateway


class Noted(FairLoop):
    """Notes whose requests it runs."""

    def __init__(self):
        super().__init__()
        self.owners = []

    def run(self, owner, work):
        self.owners.append(owner)
        return super().run(owner, work)


ACME, EVIL = "sk-acme-0123456789", "sk-evil-0123456789"
KEYS = ("acme:" + ACME, "evil:" + EVIL)


async def test_requests_take_the_time_of_their_tenant_and_without_a_key_of_their_address():
    async with world(api_keys=KEYS) as w:
        w.app._shares = noted = Noted()
        assert (await w.chat(headers=w.key(ACME)))[0] == 200
        assert (await w.get("/v1/models", headers=w.key(EVIL)))[0] == 200
        for key in ("sk-wrong-1-0123456789", "sk-wrong-2-0123456789"):
            assert (await w.get("/v1/models", headers=w.key(key)))[0] == 401
        acme, evil, *strange = noted.owners
        assert (acme, evil) == ("tenant acme", "tenant evil")
        assert len({*strange}) == 1, "other wrong keys are no other sender"
        assert not strange[0].startswith("tenant")


async def test_a_tenant_that_owes_time_is_answered_all_the_same():
    async with world(api_keys=KEYS) as w:
        w.app._shares._rounds.charge("tenant evil", 0.01)
        answers = await asyncio.gather(*(w.chat(headers=w.key(key)) for key in (ACME, EVIL, ACME, EVIL)))
        assert [status for status, _, _ in answers] == [200] * 4
