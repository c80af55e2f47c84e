"""Calls of machines give way while people wait too long, a few at a time, and never for ever."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.unit.serve.gateway_world import ADMIN, V0, world

from ostinato.serve import priority
from ostinato.serve.priority import PeopleFirst
from ostinato.testing.engine import FakeEngine


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(priority, "_EACH_S", 0.01)  # of real waiting, and between two looks
    return Clock()


HELD = []


@pytest.fixture(autouse=True)
async def ended():
    yield
    for stack in HELD:
        await stack.aclose()
    HELD.clear()


async def through(people, left_s=None):
    """A machine's call that has begun; or None, if it still waits after a while."""
    stack = AsyncExitStack()
    HELD.append(stack)  # one that is forgotten ends
    entering = asyncio.create_task(stack.enter_async_context(people.machine(left_s)))
    done, _ = await asyncio.wait({entering}, timeout=0.1)
    if done:
        return stack
    entering.cancel()
    with suppress(asyncio.CancelledError):
        await entering
    return None


async def test_while_nobody_waits_every_call_goes_on(clock):
    people = PeopleFirst(1.0, 0.0, 30.0, clock=clock)
    calls = [await through(people) for _ in range(50)]
    assert all(calls)
    with people.person() as person:
        clock.now += 0.9
        person.first()
    assert await through(people)


async def test_people_who_still_wait_halve_what_is_let_through_each_time(clock):
    people = PeopleFirst(1.0, 0.0, 1e9, clock=clock)
    calls = [await through(people) for _ in range(8)]
    with people.person():
        clock.now += 1.1
        assert await through(people) is None, "8 are under way, 4 may be"
        for call in calls[:4]:
            await call.aclose()
        clock.now += 0.02
        assert await through(people) is None, "4 are under way, 2 may be"
        for call in calls[4:8]:
            await call.aclose()
        clock.now += 0.02
        assert await through(people), "one always may"
        clock.now += 0.02
        assert await through(people) is None


async def test_it_grows_by_one_each_time_once_people_wait_no_longer(clock):
    people = PeopleFirst(1.0, 0.0, 1e9, clock=clock)
    with people.person() as person:
        clock.now += 1.5
        assert await through(people)
        person.first()
    clock.now += 11  # what was seen then is of long ago
    assert await through(people), "2 may"
    assert await through(people) is None
    clock.now += 0.02
    assert await through(people), "3 may"


async def test_one_late_answer_among_many_is_nobodys_fault(clock):
    people = PeopleFirst(1.0, 0.0, 1e9, clock=clock)
    for wait_s in (*[0.1] * 10, 1.5):
        with people.person() as person:
            clock.now += wait_s
            person.first()
    assert await through(people)
    assert await through(people)
    for _ in range(2):
        with people.person() as person:
            clock.now += 1.5
            person.first()
    assert await through(people) is None


@pytest.mark.parametrize(("patience_s", "left_s"), [(5.0, None), (1e9, 20.0)])
async def test_a_call_waits_no_longer_than_its_patience_or_a_quarter_of_its_time(clock, patience_s, left_s):
    people = PeopleFirst(1.0, 0.0, patience_s, clock=clock)
    with people.person():
        clock.now += 2
        assert await through(people)
        async with AsyncExitStack() as stack:
            waiting = asyncio.create_task(stack.enter_async_context(people.machine(left_s)))
            await asyncio.sleep(0.03)
            clock.now += 4.9
            await asyncio.sleep(0.03)
            assert not waiting.done()
            clock.now += 0.2
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                await waiting


async def test_a_person_who_left_or_was_answered_counts_once(clock):
    people = PeopleFirst(1.0, 0.0, 1e9, clock=clock)
    with people.person() as person:
        person.first()
        clock.now += 5
    with suppress(RuntimeError), people.person():
        clock.now += 5
        raise RuntimeError("left")
    assert all([await through(people) for _ in range(3)])


async def test_people_who_get_the_rest_too_slowly_count_too_but_not_by_a_word(clock):
    people = PeopleFirst(0.0, 10.0, 1e9, clock=clock)
    with people.person() as person:
        clock.now += 1e3
        person.first()
        clock.now += 4
        person.last(4)
    with people.person() as person:
        person.first()
        clock.now += 4
        person.last(41)
    assert await through(people)
    with people.person() as person:
        person.first()
        clock.now += 4
        person.last(40)
    assert await through(people) is None


async def test_without_a_limit_nothing_is_counted(clock):
    people = PeopleFirst(0.0, 0.0, 30.0, clock=clock)
    with people.person():
        clock.now += 1e6
        assert all([await through(people) for _ in range(20)])
    assert not people._asking


async def test_worlds_calls_wait_at_the_gateway_and_take_no_place_meanwhile(monkeypatch):
    monkeypatch.setattr(priority, "_EACH_S", 0.02)
    monkeypatch.setattr(priority, "_LATELY_S", 0.1)
    asked, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def generate(self, request):
            asked.set()
            await go.wait()
            async for chunk in super().generate(request):
                yield chunk

    engine = Slow(lambda request: "hello", slots={"live": V0, "world": V0})
    headers = {"X-Ostinato-Key": ADMIN, "X-Ostinato-Slot": "world"}
    async with world(engine=engine, admin_key=ADMIN, first_token_s=0.05) as w:
        person = asyncio.create_task(w.chat())
        await asyncio.wait_for(asked.wait(), WHOLE_PROGRAM_S)
        await asyncio.sleep(0.1)  # longer than a person should wait
        worlds = [asyncio.create_task(w.chat(headers)) for _ in range(3)]
        numbers = ""
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while "ostinato_calls_giving_way 2.0" not in numbers:
                await asyncio.sleep(0.02)
                numbers = (await w.get("/metrics", headers={"X-Ostinato-Key": ADMIN}))[1]
        assert "ostinato_inflight 2.0" in numbers, "the person's call and one of the world's"
        go.set()
        assert (await person)[0] == 200
        assert [reply[0] for reply in await asyncio.gather(*worlds)] == [200] * 3
        numbers = (await w.get("/metrics", headers={"X-Ostinato-Key": ADMIN}))[1]
        assert "ostinato_calls_giving_way 0.0" in numbers
