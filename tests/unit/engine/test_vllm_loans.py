"""Replicas of the live slot that sample rollouts for a while: nobody is answered by another slot's version, and nothing is lost."""

import asyncio
from dataclasses import replace

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm
from tests.unit.engine.test_vllm import SCRIPT, ask, collect, runs, until_well, version
from tests.unit.engine.test_vllm_servers import quick_looks, until  # noqa: F401 (a fixture)

from ostinato.core.errors import NotFound, Overloaded, Unavailable
from ostinato.core.records import Finish
from ostinato.engine.vllm.loans import LendingState

pytestmark = pytest.mark.usefixtures("quick_looks")
LIVE, WORLD = 1, 7


def prompt(text, **rest):
    return replace(ask(**rest), prompt_ids=tuple(text.encode()))


def fleet(count, slow_s=0.0):
    fakes = [TokenVllm(SCRIPT) for _ in range(count)]
    for fake in fakes:
        fake.slow_s = slow_s
    return fakes


async def loaded(engine):
    await engine.load("live", version(LIVE))
    await engine.load("world", version(WORLD))


def lender(engine, fakes):
    """The fake behind the replica that is lent."""
    (at,) = (at for at, each in enumerate(engine._fleet.replicas) if each.loan is not None)
    return fakes[at], engine._fleet.replicas[at]


async def arrived(replica, slot):
    await until(lambda: replica.slots == {slot} and not replica.swapping)


async def many(engine, slot, count, **rest):
    return await asyncio.gather(*(collect(engine, prompt(f"{slot} {i}", slot=slot, **rest)) for i in range(count)))


async def test_a_lent_replica_samples_rollouts_with_their_version_and_people_stay_with_theirs():
    fakes = fleet(4, slow_s=0.002)
    async with vllm_engine(*fakes, replicas={"live": 3}) as engine:
        await loaded(engine)
        assert engine.loans.lend(1) == 1
        await until(lambda: sum(fake.label == f"hash{WORLD}" for fake in fakes) == 2)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        assert engine.loans.standing() == LendingState(serving=2, lent=1, returning=0)
        before = len(fake.requests)
        people, rollouts = await asyncio.gather(
            many(engine, "live", 12, max_tokens=8), many(engine, "world", 12, max_tokens=8)
        )
        assert [runs(each) for each in people] == [[LIVE]] * 12
        assert [runs(each) for each in rollouts] == [[WORLD]] * 12
        worlds = {bytes(body["token_ids"])[:5] for body in fake.requests[before:]}
        assert worlds == {b"world"}, "no person's request goes there"
        stats = engine.stats()
        assert 0 < stats["lent_tokens"] < 96
        assert (stats["servers_lent"], stats["lent_seconds"] > 0, stats["lent_cut"]) == (1, True, 0)


async def test_it_goes_only_once_what_people_have_open_there_has_ended():
    fakes = fleet(3, slow_s=0.01)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        open_ones = [asyncio.create_task(collect(engine, prompt(f"live {i}", max_tokens=60))) for i in range(6)]
        await until(lambda: sum(fake.open for fake in fakes) == 6)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        assert fake.open > 0
        while fake.open > 1:  # the last one ends between two looks
            assert fake.label == f"hash{LIVE}"
            assert not replica.slots
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*open_ones)
        assert {(each[-1].finish, *runs(each)) for each in answers} == {(Finish.LENGTH, LIVE)}
        await arrived(replica, "world")


async def test_one_that_has_not_gone_yet_is_back_at_once_with_what_is_open_there():
    fakes = fleet(3, slow_s=0.01)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        open_ones = [asyncio.create_task(collect(engine, prompt(f"live {i}", max_tokens=60))) for i in range(6)]
        await until(lambda: sum(fake.open for fake in fakes) == 6)
        swaps = [fake.calls.count("update_weights") for fake in fakes]
        engine.loans.lend(1)
        assert engine.loans.standing() == LendingState(serving=1, lent=1, returning=0)
        assert engine.loans.give_back(5, end_s=0.0) == 1
        await until(lambda: engine.loans.standing() == LendingState(serving=2, lent=0, returning=0))
        assert sum(fake.open for fake in fakes) == 6
        answers = await asyncio.gather(*open_ones)
        assert {each[-1].finish for each in answers} == {Finish.LENGTH}
        assert [fake.calls.count("update_weights") for fake in fakes] == swaps


async def test_one_whose_change_of_weights_failed_half_way_answers_nobody_before_it_was_given_its_version_again():
    """The workers hold the rollouts' weights under the label of people's, and the server is wanted back meanwhile."""
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        for fake in fakes:
            fake.fail["finish_weight_update"] = "the answer is lost"
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await until(
            lambda: "finish_weight_update" not in fake.fail
        )  # it failed: the new weights are in, the label is not
        given = fake.calls.count("update_weights")
        engine.loans.give_back(1, end_s=0.0)
        await until(lambda: replica.loan is None and replica.slots == {"live"} and replica.usable)
        assert fake.calls.count("update_weights") > given, "it was given people's weights again"
        people = await many(engine, "live", 8, max_tokens=4)
        assert [runs(each) for each in people] == [[LIVE]] * 8


async def lent_with_rollouts(engine, fakes, count=8, **rest):
    """Rollouts open on a lent replica and on their own one."""
    await loaded(engine)
    engine.loans.lend(1)
    fake, replica = lender(engine, fakes)
    await arrived(replica, "world")
    tasks = [asyncio.create_task(collect(engine, prompt(f"world {i}", slot="world", **rest))) for i in range(count)]
    await until(lambda: fake.open > 1)
    return fake, replica, tasks


async def test_what_ends_in_time_is_not_cut_off_and_then_people_are_answered_there_again():
    fakes = fleet(3, slow_s=0.005)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        fake, replica, tasks = await lent_with_rollouts(engine, fakes, max_tokens=40)
        engine.loans.give_back(1, end_s=PATIENT_S)
        standing = engine.loans.standing()
        assert (standing.serving, standing.lent, standing.returning, standing.open) == (1, 0, 1, 8)
        before = len(fake.requests)
        late = await collect(engine, prompt("world late", slot="world", max_tokens=2))
        assert (runs(late), len(fake.requests)) == ([WORLD], before), "nothing new goes there"
        answers = await asyncio.gather(*tasks)
        assert {(each[-1].finish, *runs(each)) for each in answers} == {(Finish.LENGTH, WORLD)}
        await arrived(replica, "live")
        assert (fake.label, replica.loan, engine.stats()["lent_cut"]) == (f"hash{LIVE}", None, 0)
        answers = await many(engine, "live", 12, max_tokens=8)
        assert [runs(each) for each in answers] == [[LIVE]] * 12
        assert len(fake.requests) > before


async def test_what_does_not_end_in_time_is_cut_off_and_no_token_of_it_is_of_another_version():
    fakes = fleet(3, slow_s=0.01)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        fake, replica, tasks = await lent_with_rollouts(engine, fakes, max_tokens=110)
        await until(lambda: engine.stats()["lent_tokens"] > 20)
        there = fake.open
        engine.loans.give_back(1, end_s=0.1)
        await arrived(replica, "live")
        answers = await asyncio.gather(*tasks)
        ends = [each[-1].finish for each in answers]
        assert (ends.count(Finish.ERROR), ends.count(Finish.LENGTH)) == (there, 8 - there)
        assert {number for each in answers for number in runs(each)} == {WORLD}
        assert engine.stats()["lent_cut"] == there
        assert engine.stats()["servers_well"] == 3, "it did not fail"


async def test_a_rollout_without_a_token_yet_is_asked_of_another_server_under_the_same_seed():
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        fake.slow_s = 0.5  # no token for a while
        tasks = [
            asyncio.create_task(collect(engine, prompt(f"world {i}", slot="world", max_tokens=5))) for i in range(4)
        ]
        await until(lambda: fake.open > 0)
        engine.loans.give_back(1, end_s=0.0)
        await until(lambda: fake.open == 0)
        answers = await asyncio.gather(*tasks)
        assert {(each[-1].finish, sum(len(chunk.ids) for chunk in each), *runs(each)) for each in answers} == {
            (Finish.LENGTH, 5, WORLD)
        }
        assert engine.stats()["retries"] > 0
        assert engine.stats()["lent_cut"] == 0, "nothing was lost"
        seeds = {}
        for each in fakes:
            for body in each.requests:
                seeds.setdefault(bytes(body["token_ids"]), set()).add(body["sampling_params"]["seed"])
        assert all(len(of) == 1 for of in seeds.values())


async def test_new_versions_come_to_the_lent_one_of_its_slot_only_and_it_comes_back_to_the_newest():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 3}) as engine:
        await loaded(engine)
        engine.loans.lend(2)
        for each in engine._fleet.replicas:
            if each.loan is not None:
                await arrived(each, "world")
        await engine.load("world", version(8))
        await engine.load("live", version(2))
        assert sorted(fake.label for fake in fakes) == ["hash2", "hash8", "hash8", "hash8"]
        assert engine.loans.give_back(1, end_s=0.0) == 1
        await until(lambda: sorted(fake.label for fake in fakes) == ["hash2", "hash2", "hash8", "hash8"])
        await engine.load("live", version(8))  # rollouts' own version is shipped: the lent one is still not people's
        lent = next(each for each in engine._fleet.replicas if each.loan is not None and each.loan.stage == "lent")
        assert lent.slots == {"world"}
        engine.loans.give_back(1, end_s=0.0)
        await until(lambda: engine.loans.standing().returning == 0)
        assert [runs(each) for each in await many(engine, "live", 9, max_tokens=2)] == [[8]] * 9


async def test_the_last_replica_stays_and_nobody_is_lent_to_rollouts_that_have_no_weights():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 3}) as engine:
        await engine.load("live", version(LIVE))
        assert engine.loans.lend(3) == 0
        await engine.load("world", version(WORLD))
        assert engine.loans.lend(9) == 2
        assert engine.loans.lend(1) == 0
        assert engine.loans.give_back(9, end_s=0.0) == 2
        assert engine.loans.give_back(9, end_s=0.0) == 0


async def test_a_lent_server_that_is_started_again_gets_its_slots_version_and_one_that_is_away_comes_back_later():
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        fake.forget()
        await until(lambda: fake.label == f"hash{WORLD}")
        await until_well(engine)
        fake.down = True
        await until(lambda: not replica.well)
        engine.loans.give_back(1, end_s=0.0)
        assert [runs(each) for each in await many(engine, "live", 4, max_tokens=2)] == [[LIVE]] * 4
        assert engine.loans.standing() == LendingState(serving=1, lent=0, returning=0), "nobody may count on it"
        assert replica.loan is not None
        fake.down = False
        await arrived(replica, "live")
        await until_well(engine)
        assert fake.label == f"hash{LIVE}"


async def test_one_that_drains_is_not_counted_as_coming_back():
    fakes, draining = fleet(3, slow_s=0.01), []
    async with vllm_engine(*fakes, replicas={"live": 2}, draining=draining) as engine:
        _, replica, tasks = await lent_with_rollouts(engine, fakes, max_tokens=60)
        draining.append(replica.server.url)
        engine.loans.give_back(1, end_s=0.3)
        await until(lambda: replica.draining)
        assert engine.loans.standing().returning == 0
        await asyncio.gather(*tasks)


def held_up(engine, policy):
    """Servers other than those lent fetch this version until they are told otherwise; the event is set once one does."""
    begun, go = asyncio.Event(), asyncio.Event()
    for each in engine._fleet.replicas:

        async def stage(wanted, each=each, honest=each.server.driver.stage):
            if wanted == policy and each.loan is None:
                begun.set()
                await go.wait()
            return await honest(wanted)

        each.server.driver.stage = stage
    return begun, go


async def test_a_return_does_not_wait_for_what_other_servers_download():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 3}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        begun, go = held_up(engine, version(8).policy)
        loading = asyncio.create_task(engine.load("world", version(8)))
        await begun.wait()
        engine.loans.give_back(1, end_s=0.0)
        await arrived(replica, "live")
        assert (fake.label, loading.done()) == (f"hash{LIVE}", False)
        go.set()
        await loading
        assert replica.slots == {"live"}
        assert sorted(each.label for each in fakes) == ["hash1", "hash1", "hash1", "hash8"]


async def test_one_that_comes_back_while_a_release_is_fetched_gets_it_too_and_answers_by_nothing_older():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 3}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        begun, go = held_up(engine, version(2).policy)
        loading = asyncio.create_task(engine.load("live", version(2)))
        await begun.wait()
        engine.loans.give_back(1, end_s=0.0)
        await arrived(replica, "live")
        go.set()
        await loading
        assert {tuple(runs(each)) for each in await many(engine, "live", 9, max_tokens=2)} == {(2,)}
        await until(lambda: fake.label == "hash2" and "live" in replica.slots)


async def test_a_free_server_that_fetches_for_one_slot_is_not_taken_for_another():
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(LIVE))
        begun, go = held_up(engine, version(WORLD).policy)
        loading = asyncio.create_task(engine.load("world", version(WORLD)))
        await begun.wait()
        engine._fleet.replicas[0].draining = True
        other = next(each for each in engine._fleet.replicas if not each.slots)
        for _ in range(20):
            assert engine._fleet._due(other) is None
            await asyncio.sleep(0.005)
        go.set()
        await loading
        assert other.slots == {"world"}


async def test_a_canary_takes_no_replica_that_is_lent_or_on_its_way():
    fakes = fleet(4)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        _, replica = lender(engine, fakes)
        await engine.load("canary", version(3))
        await arrived(replica, "world")
        assert sorted(fake.label for fake in fakes) == ["hash1", "hash3", "hash7", "hash7"]


@pytest.mark.parametrize("error", [KeyError("results"), TimeoutError()])
async def test_a_server_that_answers_nonsense_while_it_goes_or_comes_back_is_not_left_on_its_way(error):
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        left = {"world": 1, "live": 1}
        for server in engine._servers:

            async def stage(policy, honest=server.driver.stage):
                slot = "live" if policy.number == LIVE else "world"
                left[slot] -= 1
                if left[slot] == 0:
                    raise error
                return await honest(policy)

            server.driver.stage = stage
        engine.loans.lend(1)
        _, replica = lender(engine, fakes)
        await arrived(replica, "world")
        engine.loans.give_back(1, end_s=0.0)
        await arrived(replica, "live")
        assert max(left.values()) < 1, "both were refused once"


async def test_an_engine_that_is_closed_leaves_no_changeover_behind(monkeypatch):
    fakes, fetching = fleet(3, slow_s=0.005), asyncio.Event()

    async def stage(policy):
        fetching.set()
        await asyncio.Event().wait()

    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        fake, replica, tasks = await lent_with_rollouts(engine, fakes, max_tokens=110)
        fake.held = True  # what is open there does not end
        monkeypatch.setattr(replica.server.driver, "stage", stage)
        engine.loans.give_back(1, end_s=PATIENT_S)
        async with asyncio.timeout(PATIENT_S):
            await fetching.wait()
        await engine.close()
        for _ in range(20):  # turns of the loop in which what was cancelled ends
            await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if "fetch" in repr(task.get_coro())] == []
        await asyncio.gather(*tasks)


def scores(engine, slot, count):
    return [asyncio.create_task(engine.score(slot, [1, 2, 3 + i], 1)) for i in range(count)]


async def test_it_goes_only_once_what_people_have_scored_there_has_ended():
    fakes, looks = fleet(3), 0
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        wanted = await asyncio.gather(*scores(engine, "live", 8))
        running = engine.loans._running

        def counted(slot):
            nonlocal looks
            looks += 1
            return running(slot)

        engine.loans._running = counted
        for fake in fakes:
            fake.held = True
        tasks = scores(engine, "live", 8)
        await until(lambda: sum(fake.open for fake in fakes) == 8)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        begun = looks
        await until(lambda: replica.loan.stage == "lent" or looks > begun + 3)
        seen = fake.open > 0, replica.loan.stage, fake.label
        for each in fakes:
            each.held = False
        assert seen == (True, "leaving", f"hash{LIVE}")
        assert await asyncio.gather(*tasks) == wanted
        await arrived(replica, "world")
        assert engine.stats()["running"] == 0


async def test_a_score_that_does_not_end_in_time_is_asked_of_another_server():
    fakes = fleet(3)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await loaded(engine)
        engine.loans.lend(1)
        fake, replica = lender(engine, fakes)
        await arrived(replica, "world")
        wanted = await asyncio.gather(*scores(engine, "world", 8))
        fake.held = True
        tasks = scores(engine, "world", 8)
        await until(lambda: fake.open > 0 and engine.stats()["running"] == fake.open)
        others = sum(len(each.requests) for each in fakes if each is not fake)
        there = fake.open
        engine.loans.give_back(1, end_s=0.0)
        try:
            async with asyncio.timeout(PATIENT_S):
                assert await asyncio.gather(*tasks) == wanted
        finally:
            fake.held = False
        assert sum(len(each.requests) for each in fakes if each is not fake) == others + there
        assert (engine.stats()["servers_well"], engine.stats()["lent_cut"]) == (3, 0), "nothing failed or was lost"
        await arrived(replica, "live")


async def test_a_score_counts_against_the_samples_that_may_be_open_at_once():
    (fake,) = fakes = fleet(1)
    async with vllm_engine(*fakes, max_waiting=1) as engine:
        await engine.load("live", version(LIVE))
        fake.held = True
        (first,) = scores(engine, "live", 1)
        await until(lambda: fake.open == 1)
        second = asyncio.create_task(engine.score("live", [1, 2, 3], 1))
        await until(lambda: second.done() or fake.open == 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        fake.held = False
        with pytest.raises(Overloaded):
            await second
        assert engine.stats()["running"] == 0
        assert len(await engine.score("live", [1, 2, 3], 1)) == 2


async def test_a_score_ends_with_its_slot():
    (fake,) = fakes = fleet(1)
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(LIVE))
        fake.held = True
        (task,) = scores(engine, "live", 1)
        await until(lambda: fake.open == 1)
        await engine.unload("live")
        with pytest.raises(NotFound):
            await asyncio.wait_for(task, PATIENT_S)
        assert engine.stats()["running"] == 0
        fake.held = False


async def test_a_score_ends_with_its_engine():
    (fake,) = fakes = fleet(1)
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(LIVE))
        fake.held = True
        (task,) = scores(engine, "live", 1)
        await until(lambda: fake.open == 1)
        await engine.close()
        with pytest.raises(Unavailable, match="not running"):
            await asyncio.wait_for(task, PATIENT_S)
        fake.held = False


async def test_a_score_at_a_server_that_holds_nobody_knows_what_is_asked_of_another():
    fakes = fleet(2)
    async with vllm_engine(*fakes, replicas={"live": 2}) as engine:
        await engine.load("live", version(LIVE))
        wanted = await asyncio.gather(*scores(engine, "live", 8))
        for fake in fakes:
            fake.held = True
        tasks = scores(engine, "live", 8)
        await until(lambda: sum(fake.open for fake in fakes) == 8)
        engine._fleet._lose(engine._fleet.replicas[0])
        await until(lambda: fakes[1].open == 8)
        fakes[1].held = False
        async with asyncio.timeout(PATIENT_S):
            assert await asyncio.gather(*tasks) == wanted
        fakes[0].held = False
