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
    monkeypatch.setattr(priority, "_ADJUST_S", 0.01)  # of real waiting, and between two looks
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


async def test_what_is_seen_of_people_is_not_kept_where_no_machine_ever_calls(clock):
    people = PeopleFirst(1.0, 10.0, 30.0, clock=clock)
    for _ in range(1_000):
        with people.person() as person:
            clock.now += 0.5
            person.first()
            clock.now += 0.5
            person.last(64)
    assert max(len(people._waits), len(people._speeds)) <= 11


@pytest.mark.parametrize("targets", [(1.0, 0.0), (0.0, 100.0)])
async def test_a_tenth_is_of_the_calls_and_not_of_all_that_is_seen_of_them(clock, targets):
    people = PeopleFirst(*targets, 1e9, clock=clock)
    for number in range(20):
        slow = number % 7 == 0  # 3 of 20
        with people.person() as person:
            clock.now += 1.5 if slow else 0.1
            person.first()
            clock.now += 0.5 if slow else 0.0
            person.last(41)
    assert await through(people)
    assert await through(people) is None


async def test_a_call_that_is_answered_twice_waited_once_and_its_speed_is_each_answers_own(clock):
    people = PeopleFirst(1.0, 10.0, 1e9, clock=clock)
    with people.person() as person:
        person.first()
        clock.now += 4
        person.last(41)
        clock.now += 60  # the next answer is asked for, and begins
        person.first()
        clock.now += 4
        person.last(41)
    assert all([await through(people) for _ in range(3)])


@pytest.mark.parametrize("limit", [{"first_token_s": 0.5}, {"tokens_per_s": 1e-6}])
async def test_a_call_that_begins_with_a_summary_is_answered_while_machines_give_way(limit):
    said = iter(["Done: the parser is mended.", "Going on."])
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 900}}
    asked = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Mend the parser. " * 60}]}
    engine = FakeEngine(lambda request: next(said))
    async with world(engine=engine, compaction_least_tokens=256, **limit) as w:
        status, _, body = await w.post("/v1/messages", asked | {"context_management": {"edits": [edit]}})
        assert status == 200, body
        assert body["content"][1] == {"type": "text", "text": "Going on."}


async def test_without_a_limit_nothing_is_counted(clock):
    people = PeopleFirst(0.0, 0.0, 30.0, clock=clock)
    with people.person():
        clock.now += 1e6
        assert all([await through(people) for _ in range(20)])
    assert not people._asking


async def test_worlds_calls_wait_at_the_gateway_and_take_no_place_meanwhile(monkeypatch):
    monkeypatch.setattr(priority, "_ADJUST_S", 0.02)
    monkeypatch.setattr(priority, "_WINDOW_S", 0.1)
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
