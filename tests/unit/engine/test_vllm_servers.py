"""What the engine over vLLM servers does about servers that restart, hang, fail half-way or talk nonsense."""

import asyncio
import contextlib

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm
from tests.unit.engine.test_vllm import SCRIPT, ask, collect, runs, until_well, version

from ostinato.core.errors import NotFetched, Unavailable
from ostinato.core.records import Finish
from ostinato.engine.vllm.server import ServerClient


async def until(what):
    async with asyncio.timeout(PATIENT_S):
        while not what():
            await asyncio.sleep(0.005)


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr("ostinato.engine.vllm.fleet._CHECK_S", 0.01)


async def test_a_server_that_was_started_again_gets_its_weights_back(quick_looks):
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        fake.forget()
        await until(lambda: fake.label == "hash1")
        await until_well(engine)
        chunks = await collect(engine, ask(max_tokens=3))
    assert (chunks[-1].finish, runs(chunks)) == (Finish.LENGTH, [1])


async def test_a_server_that_was_started_again_is_not_asked_while_it_fetches_its_weights(quick_looks):
    fakes, go_on, asked = [TokenVllm(SCRIPT) for _ in range(2)], asyncio.Event(), asyncio.Event()
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.stage

        async def stage(policy):
            asked.set()
            await go_on.wait()
            return await honest(policy)

        driver.stage = stage
        fakes[0].forget()
        await asyncio.wait_for(asked.wait(), PATIENT_S)
        for _ in range(4):
            chunks = await collect(engine, ask(max_tokens=2))
            assert (chunks[-1].finish, runs(chunks)) == (Finish.LENGTH, [1])
        assert (len(fakes[0].requests), len(fakes[1].requests)) == (0, 4)
        go_on.set()
        await until(lambda: fakes[0].label == "hash1")
        await until(lambda: len(engine._fleet.candidates("live")) == 2)


async def test_nobody_waits_for_the_download_of_a_server_that_was_started_again_before_it_loaded(quick_looks):
    fakes, go_on, asked = [TokenVllm(SCRIPT) for _ in range(3)], asyncio.Event(), []
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        await engine.load("canary", version(3))
        driver = engine._servers[1].driver
        honest = driver.stage

        async def stage(policy):
            asked.append(policy)
            if len(asked) > 1:
                await go_on.wait()
            seconds = await honest(policy)
            if len(asked) == 1:
                fakes[1].forget()
            return seconds

        driver.stage = stage
        async with asyncio.timeout(PATIENT_S):
            await engine.load("live", version(2))
            await engine.load("canary", version(4))
        assert [fake.label for fake in fakes] == ["hash2", "default", "hash4"]
        await until(lambda: len(asked) == 2)
        async with asyncio.timeout(PATIENT_S):
            await engine.load("canary", version(5))
        assert (asked, fakes[1].label, fakes[2].label) == ([version(2).policy] * 2, "default", "hash5")
        go_on.set()
        await until(lambda: fakes[1].label == "hash2")


async def test_a_server_that_answers_after_a_newer_version_came_does_not_fetch_the_old_one(quick_looks):
    fakes, looked, loaded, asked = [TokenVllm(SCRIPT) for _ in range(2)], asyncio.Event(), asyncio.Event(), []
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        replica = engine._fleet.replicas[1]
        driver = replica.server.driver
        honest_stage, honest_served = driver.stage, driver.served

        async def stage(policy):
            asked.append(policy)
            seconds = await honest_stage(policy)
            if len(asked) == 1:
                fakes[1].forget()
                await looked.wait()
            return seconds

        async def served():
            if not replica.well:  # it was found without its weights and is about to be given them
                looked.set()
                await loaded.wait()
            return await honest_served()

        driver.stage, driver.served = stage, served
        async with asyncio.timeout(PATIENT_S):
            await engine.load("live", version(2))
        loaded.set()
        await until(lambda: fakes[1].label == "hash2")
    assert set(asked) == {version(2).policy}


async def test_a_version_whose_only_server_lost_it_is_fetched_again_before_it_is_loaded(quick_looks):
    fakes, go_on, asked = [TokenVllm(SCRIPT) for _ in range(2)], asyncio.Event(), []
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(1))
        await engine.load("canary", version(3))
        driver = engine._servers[0].driver
        honest = driver.stage

        async def stage(policy):
            asked.append(policy)
            if len(asked) > 1:
                await go_on.wait()
            seconds = await honest(policy)
            if len(asked) == 1:
                fakes[0].forget()
            return seconds

        driver.stage = stage
        loading = asyncio.create_task(engine.load("live", version(2)))
        await until(lambda: len(asked) == 2)
        fakes[1].forget()
        await until(lambda: fakes[1].label == "hash3")  # what is looked after meanwhile does not wait for it
        assert not loading.done()
        go_on.set()
        assert (await loading).policy == version(2).policy
        assert fakes[0].label == "hash2"
        assert asked == [version(2).policy] * 3  # the last by the swap itself, which finds it there


async def test_a_server_that_hangs_holds_up_no_other(quick_looks, monkeypatch, caplog):
    monkeypatch.setattr("ostinato.engine.vllm.fleet._REPORT_S", 0.5)
    fakes, never = [TokenVllm(SCRIPT), TokenVllm(SCRIPT)], asyncio.Event()
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(1))
        await engine.load("canary", version(2))
        hanging, hanging_url, asked = engine._servers[0].driver, engine._servers[0].url, []
        honest = hanging.served

        async def served():
            asked.append(1)
            await never.wait()

        hanging.served = served
        await until(lambda: asked)
        async with asyncio.timeout(PATIENT_S):
            await engine.load("canary", version(3))
        fakes[1].forget()
        await until(lambda: fakes[1].label == "hash3")
        await until(lambda: len(asked) > 2)
        assert caplog.text.count(f"{hanging_url} does not say what it serves") == 1
        assert runs(await collect(engine, ask(max_tokens=2))) == [1], "it may be slow only: it is asked all the same"
        hanging.served = honest
        fakes[0].forget()
        await until(lambda: fakes[0].label == "hash1")


async def test_what_a_server_said_before_a_swap_is_not_believed_after_it(quick_looks):
    """The answer of one that was started again is under way while it is given another version: it is not given the old one."""
    fake, asked, go_on = TokenVllm(SCRIPT), asyncio.Event(), asyncio.Event()
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.served

        async def slow():
            label = await honest()
            asked.set()
            await go_on.wait()
            return label

        fake.forget()
        driver.served = slow
        await asyncio.wait_for(asked.wait(), PATIENT_S)
        driver.served = honest
        loading = asyncio.create_task(engine.load("live", version(2)))
        await until(lambda: fake.label == "hash2")
        go_on.set()
        await loading
        calls = len(fake.calls)
        await until(lambda: fake.calls[calls:].count("weight_info") > 2)
        assert fake.label == "hash2"
        assert "pause" not in fake.calls[calls:]


async def test_a_server_that_answers_nonsense_is_looked_at_again(quick_looks, caplog):
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest, asked = driver.served, []

        async def served():
            asked.append(1)
            return {}["weight_version"]

        driver.served = served
        await until(lambda: len(asked) > 2)
        assert caplog.text.count("Traceback") == 1
        driver.served = honest
        fake.forget()
        await until(lambda: fake.label == "hash1")


async def test_an_engine_that_no_longer_looks_after_its_servers_says_so():
    async with vllm_engine(TokenVllm(SCRIPT)) as engine:
        await engine.load("live", version(1))
        engine._watch.cancel()
        await asyncio.gather(engine._watch, return_exceptions=True)
        with pytest.raises(Unavailable, match="not running"):
            engine.stats()


async def test_a_stream_that_is_not_understood_ends(caplog):
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        server = engine._servers[0]
        honest = server.tokens

        async def tokens(body):
            async with contextlib.aclosing(honest(body)) as choices:
                yield await anext(choices)
            raise KeyError("choices")

        server.tokens = tokens
        async with asyncio.timeout(PATIENT_S):
            chunks = await collect(engine, ask())
        assert [chunk.finish for chunk in chunks] == [None, Finish.ERROR]
        assert "not understood: KeyError('choices')" in caplog.text


async def test_a_swap_that_fails_after_the_load_leaves_nobody_believing_in_the_old_version():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.swap

        async def swap(policy, loaded):
            await honest(policy, loaded)
            raise Unavailable("paused and cannot be resumed")

        driver.swap = swap
        with pytest.raises(Unavailable, match="cannot be resumed"):
            await engine.load("live", version(2))
        driver.swap = honest
        await engine.load("live", version(1))
        assert (fake.label, engine.slots()["live"].number) == ("hash1", 1)


async def test_a_swap_that_did_not_end_well_is_tried_again(quick_looks):
    """By who looks after the server too: what was delivered once, nobody delivers again."""
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest, failed = driver.swap, []

        async def swap(policy, loaded):
            await honest(policy, loaded)
            fake.paused, driver.swap = True, honest
            failed.append(policy)
            raise Unavailable("paused and cannot be resumed")

        driver.swap = swap
        fake.forget()
        await until(lambda: failed and engine._fleet.replicas[0].sure)
        assert engine._fleet.replicas[0].policy.hash == fake.label == "hash1"
        assert not fake.paused


@pytest.fixture
def away(monkeypatch):
    """The second server does not answer as long as this set is not empty."""
    absent, order, honest = {"second"}, {}, ServerClient.context

    async def context(self, within_s):
        if order.setdefault(self.url, len(order)) == 1 and absent:
            await asyncio.sleep(min(within_s, 0.3))
            raise Unavailable(f"{self.url} cannot be reached")
        return await honest(self, within_s)

    monkeypatch.setattr(ServerClient, "context", context)
    monkeypatch.setattr("ostinato.engine.vllm.server._GRACE_S", 0.05)
    return absent


async def test_a_server_that_is_away_at_the_start_holds_nobody_up_and_is_used_once_it_answers(quick_looks, away):
    fakes = [TokenVllm(SCRIPT) for _ in range(2)]
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        assert (await collect(engine, ask(max_tokens=2)))[-1].finish is Finish.LENGTH
        assert [fake.label for fake in fakes] == ["hash1", "default"]
        with pytest.raises(Unavailable):
            await engine.load("canary", version(2))
        away.clear()
        await until(lambda: fakes[1].label == "hash1")
        await until(lambda: len(engine._fleet.candidates("live")) == 2)


@pytest.mark.parametrize("unlike", [{"context": 100}, {"backend": "xgrammar"}])
async def test_a_late_server_that_is_unlike_the_others_is_not_used(quick_looks, away, caplog, unlike):
    fakes = [TokenVllm(SCRIPT), TokenVllm(SCRIPT, **unlike)]
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        away.clear()
        await until(lambda: "restart the gateway to use it" in caplog.text)
        assert engine._fleet.replicas[1].absent
        assert (fakes[1].label, engine.capabilities().follows_grammars) == ("default", True)


async def test_a_server_that_cannot_reach_the_store_keeps_no_version_from_the_others(quick_looks):
    fakes = [TokenVllm(SCRIPT) for _ in range(2)]
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))
        driver = engine._servers[0].driver
        honest = driver.stage

        async def stage(policy):
            raise NotFetched("the bucket cannot be used now")

        driver.stage = stage
        await engine.load("live", version(2))
        assert [fake.label for fake in fakes] == ["hash1", "hash2"]
        for _ in range(4):
            assert runs(await collect(engine, ask(max_tokens=2))) == [2]
        driver.stage = honest
        await until(lambda: fakes[0].label == "hash2")
        await until_well(engine)


async def test_a_version_that_no_server_can_fetch_changes_nothing():
    fakes = [TokenVllm(SCRIPT) for _ in range(2)]
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(1))

        async def stage(policy):
            raise NotFetched("the bucket cannot be used now")

        for server in engine._servers:
            server.driver.stage = stage
        with pytest.raises(NotFetched):
            await engine.load("live", version(2))
        assert all(replica.well for replica in engine._fleet.replicas)
        assert runs(await collect(engine, ask(max_tokens=2))) == [1]
