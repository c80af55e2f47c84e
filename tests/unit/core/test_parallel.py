import asyncio

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.parallel import for_each


async def test_each_item_is_worked_on_once_and_so_many_at_a_time():
    now, most, done = 0, 0, list[int]()

    async def work(item: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        done.append(item)

    await for_each(iter(range(20)), 3, work)
    assert (sorted(done), most) == ([*range(20)], 3)
    await for_each([], 3, work)


async def test_the_first_failure_is_raised_when_all_have_stopped():
    running, forever = set[int](), asyncio.Event()

    async def work(item: int) -> None:
        running.add(item)
        try:
            if item == 2:
                raise LookupError("refused")
            await forever.wait()
        finally:
            running.discard(item)

    with pytest.raises(LookupError, match="refused"):
        async with asyncio.timeout(PATIENT_S):
            await for_each(range(9), 4, work)
    assert not running
