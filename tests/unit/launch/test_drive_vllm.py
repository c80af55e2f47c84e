"""The driver against vLLM's control plane without a model: it pauses last, resumes always, and believes nobody."""

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.vllm import FakeVllm

from ostinato.core.errors import Conflict, Corrupt, NotFetched, Unavailable
from ostinato.core.weights import WeightArray
from ostinato.testing.serving import serving
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.follow.staging import Staging
from ostinato.weights.publish.publisher import VersionPublisher

UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


def model(seed):
    data = np.random.default_rng(seed).integers(0, 200, 64, dtype=np.uint8)
    return {"w": WeightArray("U8", (64,), data)}


async def publish(store, count):
    publisher, base, found = VersionPublisher(store), None, []
    for number in range(count):
        done = await publisher.publish(number, model(number), run="r", base=base, ref="live")
        base = done.policy
        found.append(done.policy)
    return found


@asynccontextmanager
async def driven(store, workers=1, trusted=(), **options):
    staging = Staging(store)
    fake = FakeVllm(staging, workers)
    async with (
        serving(fake.app) as url,
        VllmFollower(
            url, Follower(store, FollowerConfig(trusted=trusted)), {"url": "s"}, poll_s=0.002, **options
        ) as vllm,
    ):
        yield fake, vllm
    staging.close()


async def test_a_swap_fetches_first_then_pauses_verifies_and_resumes():
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store, workers=2) as (fake, vllm):
        assert await vllm.served() == "default"
        swap = await vllm.swap(policy)
        assert (fake.label, fake.served, fake.paused) == (policy.hash, [policy.hash] * 2, False)
        steps = [call for call in fake.calls if call not in ("collective_rpc", "weight_info")]
        assert steps == ["init_weight_transfer_engine", "pause", *UPDATE, "reset_prefix_cache", "resume"]
        assert fake.calls.index("collective_rpc") < fake.calls.index("pause")
        assert 0 < swap.load_s < swap.pause_s


async def test_two_drivers_may_bring_the_same_version_to_a_server_at_once():
    store = MemoryStore()
    async with (
        driven(store) as (fake, vllm),
        VllmFollower(vllm._url, vllm._follower, {"url": "s"}, poll_s=0.002) as other,
    ):
        for policy in await publish(store, 12):
            await asyncio.gather(vllm.swap(policy), other.swap(policy))
            assert (fake.label, fake.served, fake.active, fake.paused) == (policy.hash, [policy.hash], False, False)


async def test_a_store_that_is_away_says_nothing_against_the_version(monkeypatch):
    store = MemoryStore()
    one, two = await publish(store, 2)
    async with driven(store) as (fake, vllm):
        await vllm.swap(one)

        async def away(hash):
            raise Unavailable("the bucket cannot be used now")

        with monkeypatch.context() as broken:
            broken.setattr(store, "get", away)
            with pytest.raises(NotFetched, match="the bucket cannot be used now"):
                await vllm.swap(two)
        assert (fake.label, fake.calls.count("pause")) == (one.hash, 1)
        await vllm.swap(two)
        assert fake.label == two.hash


async def test_a_server_whose_engine_hangs_is_not_waited_for_long(monkeypatch):
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):
        go_on, honest = threading.Event(), fake._collective_rpc

        def hangs(body):
            go_on.wait(PATIENT_S)
            return honest(body)

        fake._collective_rpc = hangs
        with monkeypatch.context() as hasty:
            hasty.setattr("ostinato.weights.follow.drive._QUERY_S", 0.1)
            async with asyncio.timeout(PATIENT_S):
                with pytest.raises(Unavailable, match="TimeoutError"):
                    await vllm.swap(policy)
        go_on.set()
        await vllm.swap(policy)
        assert fake.label == policy.hash


async def test_keeping_the_cache_is_a_choice():
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store, kv="keep") as (fake, vllm):
        await vllm.swap(policy)
        assert "reset_prefix_cache" not in fake.calls


async def test_a_damaged_version_is_refused_without_a_pause():
    store = MemoryStore()
    first, second = await publish(store, 2)
    async with driven(store) as (fake, vllm):
        await vllm.swap(first)
        for name in store.objects:
            store.objects[name] = b"rotten"
        fake.calls.clear()
        with pytest.raises(Corrupt, match="keeps its weights"):
            await vllm.swap(second)
        assert "pause" not in fake.calls
        assert (fake.label, fake.served) == (first.hash, [first.hash])


async def test_what_no_trusted_key_signed_does_not_reach_the_server():
    store = MemoryStore()
    await publish(store, 1)
    async with driven(store, trusted=("0" * 64,)) as (fake, vllm):
        refused = asyncio.Event()
        errors = []

        def report(ref, error):
            errors.append(str(error))
            refused.set()

        task = asyncio.create_task(vllm.follow("live", print, report, interval_s=0.005))
        await asyncio.wait_for(refused.wait(), PATIENT_S)
        task.cancel()
        assert "signed by nobody" in errors[0]
        assert fake.calls == []


@pytest.mark.parametrize("step", ["pause", *UPDATE[:2], "reset_prefix_cache"])
async def test_it_resumes_whichever_step_fails_and_the_next_swap_arrives(step):
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):
        fake.fail[step] = "out of luck"
        with pytest.raises(Unavailable, match=r"(?s)out of luck"):
            await vllm.swap(policy)
        assert fake.paused is False
        assert fake.calls[-1] == "resume"
        await vllm.swap(policy)
        assert (fake.label, fake.paused, fake.active) == (policy.hash, False, False)


@pytest.mark.parametrize("down", [False, True], ids=["the workers say so", "nobody can be asked"])
async def test_it_stays_paused_where_new_weights_may_be_in_under_the_old_name(down):
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):

        def lost(body):
            fake.down = down
            raise RuntimeError("out of luck")

        finish, fake._finish_weight_update = fake._finish_weight_update, lost
        with pytest.raises(Conflict, match=r"(?s)may hold .* out of luck"):
            await vllm.swap(policy)
        assert (fake.served, fake.paused) == ([policy.hash], True)
        fake._finish_weight_update, fake.down = finish, False
        await vllm.swap(policy)
        assert (fake.label, fake.paused, fake.active) == (policy.hash, False, False)


async def test_a_resume_that_fails_is_tried_again():
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):
        fake.fail["resume"] = "not now"
        await vllm.swap(policy)
        assert fake.paused is False


@pytest.mark.parametrize(
    "harm",
    [
        lambda fake: setattr(fake, "_finish_weight_update", lambda body: setattr(fake, "label", "another") or {}),
        lambda fake: setattr(fake, "broken", "restart this server"),
        lambda fake: setattr(fake, "_update_weights", lambda body: fake.served.__setitem__(0, "0" * 64) or {}),
    ],
    ids=["the label is another's", "a worker is broken", "workers differ"],
)
async def test_nobody_is_answered_by_unknown_weights(harm):
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store, workers=2) as (fake, vllm):
        harm(fake)
        with pytest.raises(Conflict):
            await vllm.swap(policy)
        assert fake.paused is True


async def test_it_follows_a_ref_and_takes_over_what_a_killed_driver_left():
    store = MemoryStore()
    first, second = await publish(store, 2)
    async with driven(store) as (fake, vllm):
        fake.paused = fake.active = True  # killed between start and update
        swaps, errors = [], []
        task = asyncio.create_task(
            vllm.follow("live", swaps.append, lambda ref, error: errors.append(error), interval_s=0.005)
        )
        async with asyncio.timeout(PATIENT_S):
            while fake.label != second.hash or fake.paused:
                await asyncio.sleep(0.005)
            await store.move_ref("live", second.hash, first.hash)
            while len(swaps) < 2:
                await asyncio.sleep(0.005)
            fake.label, fake.served = "default", [""]  # the server was restarted
            while len(swaps) < 3:
                await asyncio.sleep(0.005)
        task.cancel()
        assert [swap.policy for swap in swaps] == [second, first, first]
        assert (fake.paused, errors) == (False, [])


async def test_a_paused_server_that_serves_the_version_is_resumed():
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):
        fake.label, fake.served, fake.paused = policy.hash, [policy.hash], True
        task = asyncio.create_task(vllm.follow("live", print, interval_s=0.005))
        async with asyncio.timeout(PATIENT_S):
            while fake.paused:
                await asyncio.sleep(0.005)
        task.cancel()
        assert "update_weights" not in fake.calls
        assert fake.calls.index("reset_prefix_cache") < fake.calls.index("resume")


async def followed(vllm):
    """Swaps and errors until the first swap."""
    swaps, errors = [], []
    task = asyncio.create_task(
        vllm.follow("live", swaps.append, lambda ref, error: errors.append(str(error)), interval_s=0.005)
    )
    async with asyncio.timeout(PATIENT_S):
        while not swaps:
            await asyncio.sleep(0.005)
    task.cancel()
    return swaps, errors


async def test_a_cache_that_was_kept_by_accident_is_dropped_at_the_next_look():
    store = MemoryStore()
    await publish(store, 1)
    async with driven(store) as (fake, vllm):
        fake.fail["reset_prefix_cache"] = "busy"
        _, errors = await followed(vllm)
        assert "busy" in errors[0]
        assert fake.calls.count("reset_prefix_cache") == 2


async def test_an_error_is_reported_once_and_tried_again():
    store = MemoryStore()
    policy = (await publish(store, 1))[0]
    async with driven(store) as (fake, vllm):
        fake.fail["init_weight_transfer_engine"] = "first"
        swaps, errors = await followed(vllm)
        assert len(errors) == 1
        assert "first" in errors[0]
        assert swaps[0].policy == policy
