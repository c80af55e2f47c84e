"""Several servers for one slot: who is asked, how a version comes to all of them, and what happens while one of them fails."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm
from tests.unit.engine.test_vllm import SCRIPT, ask, collect, runs, until_well, version
from tests.unit.engine.test_vllm_servers import quick_looks, until  # noqa: F401 (a fixture)

from ostinato.core.errors import Corrupt, Unavailable
from ostinato.core.records import Finish
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.fleet import Replica


def fleet(count, slow_s=0.0):
    fakes = [TokenVllm(SCRIPT) for _ in range(count)]
    for fake in fakes:
        fake.slow_s = slow_s
    return fakes


def asked(fakes):
    return [len(fake.requests) for fake in fakes]


def prompt(text, **rest):
    request = ask(**rest)
    return type(request)(**{name: getattr(request, name) for name in request.__slots__} | {"prompt_ids": tuple(text)})


async def test_a_slot_is_served_by_as_many_servers_as_it_wants_and_the_others_stay_free():
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        assert [fake.label for fake in fakes] == ["hash1", "hash1", "default"]
        await engine.load("canary", version(2))
        assert [fake.label for fake in fakes] == ["hash1", "hash1", "hash2"]
        await engine.load("live", version(2))  # what the canary's server serves already, and one of its own
        assert Counter(fake.label for fake in fakes) == {"hash2": 2, "hash1": 1}


async def test_requests_are_spread_and_equal_prompts_meet():
    fakes = fleet(2, slow_s=0.005)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        await asyncio.gather(*(collect(engine, prompt(b"%d" % i, max_tokens=10)) for i in range(16)))
        assert min(asked(fakes)) >= 6, "1.25 times the mean is the bound"
        before = asked(fakes)
        for _ in range(6):
            await collect(engine, prompt(b"the same again", max_tokens=2))
        assert sorted(b - a for a, b in zip(before, asked(fakes), strict=True)) == [0, 6]


async def test_a_turn_is_never_split_over_servers():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        await collect(engine, ask(n=5, max_tokens=3))
        assert sorted(asked(fakes)) == [0, 1]


async def test_a_version_rolls_over_the_servers_and_every_stream_lives_with_each_tokens_version():
    fakes, paused = fleet(2, slow_s=0.004), []
    for fake in fakes:
        honest = fake._pause

        def pause(body, honest=honest):
            answer = honest(body)
            paused.append(sum(each.paused for each in fakes))
            return answer

        fake._pause = pause
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        tasks = [asyncio.create_task(collect(engine, prompt(b"%d" % i, n=2))) for i in range(8)]
        while min(asked(fakes)) == 0 or engine.stats()["steps"] < 30:
            await asyncio.sleep(0.002)
        swap = await engine.load("live", version(2))
        answers = await asyncio.gather(*tasks)
        assert engine.stats()["swaps"] == 4
    assert (swap.streams, engine._fleet.slots["live"].number) == (16, 2)
    assert paused == [1] * 4, "never both"
    assert [runs(chunks) for chunks in answers] == [[1, 2]] * 8
    assert all(chunk.finish in (None, Finish.LENGTH) for chunks in answers for chunk in chunks)


async def test_a_server_in_the_middle_of_a_swap_gets_nothing_new_and_the_slot_moves_with_the_last():
    fakes, go_on, within = fleet(2), asyncio.Event(), asyncio.Event()
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.swap

        async def swap(policy, loaded):
            within.set()
            await go_on.wait()
            return await honest(policy, loaded)

        driver.swap = swap
        loading = asyncio.create_task(engine.load("live", version(2)))
        await within.wait()
        answers = [await collect(engine, prompt(b"%d" % i, max_tokens=2)) for i in range(8)]
        assert asked(fakes) == [0, 8]
        assert engine.slots()["live"].number == 1
        go_on.set()
        await loading
        assert engine.slots()["live"].number == 2
        assert {chunk.policy.number for chunks in answers for chunk in chunks} <= {1, 2}


async def test_a_version_that_one_server_refuses_pauses_nobody():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))

        async def stage(policy):
            raise Corrupt("a damaged object")

        engine._servers[1].driver.stage = stage
        calls = [len(fake.calls) for fake in fakes]
        with pytest.raises(Corrupt, match="damaged"):
            await engine.load("live", version(2))
        assert all("pause" not in fake.calls[at:] for fake, at in zip(fakes, calls, strict=True))
        assert [fake.label for fake in fakes] == ["hash1"] * 2
        assert engine.slots()["live"].number == 1


async def test_one_that_is_away_gets_the_version_before_it_is_asked_again(quick_looks):  # noqa: F811
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        fakes[0].down = True
        await engine.load("live", version(2))
        assert engine.slots()["live"].number == 2
        for i in range(4):
            assert runs(await collect(engine, prompt(b"%d" % i, max_tokens=2))) == [2]
        assert asked(fakes) == [0, 4]
        fakes[0].forget()
        fakes[0].down = False
        await until_well(engine)
        assert fakes[0].label == "hash2"
        before = asked(fakes)
        for fake in fakes:
            fake.slow_s = 0.005
        answers = await asyncio.gather(*(collect(engine, prompt(b"%d" % i, max_tokens=10)) for i in range(16)))
        assert [runs(chunks) for chunks in answers] == [[2]] * 16
        assert min(b - a for a, b in zip(before, asked(fakes), strict=True)) >= 6, "1.25 times the mean is the bound"


async def test_a_version_that_another_slots_server_has_is_served_from_there_while_ones_own_is_away():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("canary", version(2))
        fakes[1].down = True
        await engine.load("live", version(2))
        assert runs(await collect(engine, ask(max_tokens=2))) == [2]
        assert fakes[0].calls.count("update_weights") == 1


async def test_a_free_server_steps_in_for_one_that_is_away_and_is_not_kept_when_it_is_back(quick_looks):  # noqa: F811
    fakes = fleet(2)
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(1))
        fakes[0].down = True
        await until(lambda: fakes[1].label == "hash1")
        await until(lambda: not engine._fleet.replicas[0].slots)
        assert runs(await collect(engine, ask(max_tokens=2))) == [1]
        fakes[0].down = False
        await until_well(engine)
        fakes[1].down = True  # and the other way round: the first holds the version still
        await until(lambda: engine._fleet.replicas[0].slots == {"live"})
        assert runs(await collect(engine, ask(max_tokens=2))) == [1]
        assert fakes[0].calls.count("update_weights") == 1
        fakes[1].down = False
        await until_well(engine)
        await until(lambda: not engine._fleet.replicas[1].slots)
        await engine.load("canary", version(2))
        assert [fake.label for fake in fakes] == ["hash1", "hash2"]


# ---- a request whose server fails


async def test_a_request_that_failed_before_its_first_token_is_asked_of_another_server_under_the_same_seed():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        whole = await collect(engine, ask(max_tokens=5, n=2, seed=7))
        (home,) = (fake for fake in fakes if fake.requests)
        home.cut_after = 0
        again = await collect(engine, ask(max_tokens=5, n=2, seed=7))
        assert again == whole
        assert engine.stats()["retries"] == 1
        assert [len(fake.requests) for fake in (home, *(f for f in fakes if f is not home))] == [2, 1]
        bodies = [fake.requests[-1] for fake in fakes]
        assert bodies[0] == bodies[1]


async def test_without_a_seed_of_its_own_it_keeps_the_one_that_it_was_given_first():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        for fake in fakes:
            fake.cut_after = 0
        with pytest.raises(Unavailable):
            await collect(engine, ask(max_tokens=5))
        first, second = (fake.requests for fake in fakes)
        assert first == second


@pytest.mark.parametrize("after", [1, 2, 7])
async def test_after_the_first_token_nobody_else_is_asked(after):
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        for fake in fakes:
            fake.cut_after = after
        chunks = await collect(engine, ask(n=2))
        assert sorted(asked(fakes)) == [0, 1]
        assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.ERROR] * 2
        assert sum(len(chunk.ids) for chunk in chunks) == after
        assert engine.stats()["retries"] == 0


async def test_a_request_that_ends_servers_does_not_end_them_all():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 4}) as engine:
        await engine.load("live", version(1))
        for fake in fakes:
            fake.cut_after = 0
        with pytest.raises(Unavailable):
            await collect(engine, ask())
        assert sorted(asked(fakes)) == [0, 0, 1, 1]


async def test_a_server_that_answers_twice_is_heard_once():
    fakes = fleet(2)
    for fake in fakes:
        fake.twice = True
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        chunks = await collect(engine, ask(n=2, max_tokens=4))
        assert Counter(chunk.index for chunk in chunks for _ in chunk.ids) == {0: 4, 1: 4}
        assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.LENGTH] * 2
        assert sorted(asked(fakes)) == [0, 1]
        assert engine.stats()["servers_well"] == 2


async def test_what_a_server_refuses_is_not_asked_of_another():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        with pytest.raises(Exception, match="Invalid grammar"):
            await collect(engine, ask(grammar="no grammar"))
        assert engine.stats()["retries"] == 0
        assert engine.stats()["servers_well"] == 2


async def test_scores_are_asked_of_another_server_too():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        wanted = await engine.score("live", [1, 2, 3], 1)
        next(fake for fake in fakes if fake.requests).down = True
        assert await engine.score("live", [1, 2, 3], 1) == wanted
        alive = next(fake for fake in fakes if not fake.down)
        await engine.score("live", [1, 2, 3], 1, "acme")
        assert len({each["cache_salt"] for each in alive.requests[-2:]}) == 2, "tenants share no prefix"


# ---- draining


async def test_a_server_that_drains_gets_nothing_new_ends_what_is_open_and_is_left_out_of_swaps(quick_looks):  # noqa: F811
    fakes, draining = fleet(2, slow_s=0.01), set()
    async with vllm_engine(*fakes, replicas={"live": 2}, draining=draining) as engine:
        await engine.load("live", version(1))
        tasks = [asyncio.create_task(collect(engine, prompt(b"%d" % i, max_tokens=60))) for i in range(4)]
        await until(lambda: min(asked(fakes)) > 0)
        assert engine.stats()["servers_draining"] == 0
        draining.add(engine._servers[0].url + "/")
        await until(lambda: engine.stats()["draining_open"] > 0)
        assert engine.stats()["servers_draining"] == 1
        before = asked(fakes)[0]
        await asyncio.gather(*(collect(engine, prompt(b"new %d" % i, max_tokens=2)) for i in range(6)))
        assert asked(fakes)[0] == before
        await engine.load("live", version(2))
        answers = await asyncio.gather(*tasks)
        assert {chunks[-1].finish for chunks in answers} == {Finish.LENGTH}
        assert engine.stats()["draining_open"] == 0
        assert [fake.label for fake in fakes] == ["hash1", "hash2"]
        draining.clear()
        await until(lambda: fakes[0].label == "hash2")


async def test_a_list_of_draining_servers_that_cannot_be_read_sets_no_server_aside(quick_looks):  # noqa: F811
    class Listed(set):
        readable, tries = True, 0

        def __iter__(self):
            self.tries += 1
            if not self.readable:
                raise PermissionError(13, "Permission denied")
            return super().__iter__()

    fakes, draining = fleet(2), Listed()
    async with vllm_engine(*fakes, replicas={"live": 2}, draining=draining) as engine:
        await engine.load("live", version(1))
        draining.add(engine._servers[0].url)
        await until(lambda: engine.stats()["servers_draining"] == 1)
        draining.readable, draining.tries = False, 0
        await until(lambda: draining.tries > 8)
        stats, before = engine.stats(), asked(fakes)
        assert (stats["servers_well"], stats["servers_draining"]) == (2, 1)
        await collect(engine, prompt(b"new", max_tokens=2))
        assert asked(fakes) == [before[0], before[1] + 1]


async def test_the_last_server_of_a_slot_goes_on_until_a_free_one_has_its_version(quick_looks):  # noqa: F811
    fakes, draining, go_on = fleet(2), set(), asyncio.Event()
    async with vllm_engine(*fakes, draining=draining) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[1].driver
        honest = driver.swap

        async def swap(policy, loaded):
            await go_on.wait()
            return await honest(policy, loaded)

        driver.swap = swap
        draining.add(engine._servers[0].url)
        await until(lambda: engine._fleet.replicas[0].draining)
        await collect(engine, ask(max_tokens=2))
        go_on.set()
        await until(lambda: fakes[1].label == "hash1" and engine._fleet.replicas[1].slots)
        await until(lambda: not engine._fleet.replicas[0].slots)
        await collect(engine, ask(max_tokens=2))
        assert asked(fakes) == [1, 1]


def test_a_server_is_looked_at_at_once_and_then_later_and_later():
    replica, waits = Replica(None), []
    for _ in range(12):
        replica.set_aside()
        waits.append(replica.backoff_s(1.0))
    assert waits[:4] == [0.0, 1.0, 2.0, 4.0]
    assert all(a <= b for a, b in pairwise(waits))
    assert waits[-1] == 60.0


def test_a_slot_cannot_want_more_servers_than_there_are():
    with pytest.raises(ValueError, match=r"engine\.replicas"):
        EngineConfig(kind="vllm", urls=("http://a",), replicas={"live": 2})
