"""Refs under a fence: who lost its role between its look at a ref and its write moves nothing."""

import asyncio
import threading

import obstore
import pytest

from ostinato.core.errors import Conflict, LeaseLost
from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import hash_of

ONE, TWO, THREE = (hash_of(text) for text in (b"1", b"2", b"3"))


@pytest.fixture(params=["directory", "bucket"])
def open_store(request, tmp_path):
    """``open_store(fence)``: another process's view of one store."""
    inside = obstore.store.MemoryStore()

    def opened(*fence):
        named = {"fence": fence[0]} if fence else {}
        if request.param == "directory":
            return DirectoryStore(tmp_path / "store", **named)
        return BucketStore(BucketConfig(url="memory:///", renew_s=0), inside=inside, **named)

    return opened


def lost():
    raise LeaseLost("another process has the role")


async def test_a_stale_token_moves_makes_and_deletes_no_ref(open_store):
    await open_store().move_ref("live", None, ONE)
    stale = open_store(lost)
    for attempt in (
        stale.move_ref("live", ONE, TWO),
        stale.move_ref("candidate", None, TWO),
        stale.delete_ref("live", ONE),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert await stale.refs() == {"live": ONE}


async def test_a_conflict_is_told_before_the_fence_is_asked(open_store):
    await open_store().move_ref("live", None, ONE)
    with pytest.raises(Conflict, match="ref live is at"):
        await open_store(lost).move_ref("live", TWO, THREE)


async def test_who_pauses_after_it_was_let_through_does_not_write_over_what_its_successor_claimed(open_store):
    """The successor writes each ref again, as it is, before anything else: in a bucket the late write's condition fails, in a directory
    the successor waits for the late one and sees what it wrote.
    """
    await open_store().move_ref("live", None, ONE)
    asked, go_on = threading.Event(), threading.Event()

    def pause():
        asked.set()
        go_on.wait()

    late = asyncio.create_task(open_store(pause).move_ref("live", ONE, TWO))
    await asyncio.to_thread(asked.wait)
    successor = open_store()
    claiming = asyncio.create_task(successor.move_ref("live", ONE, ONE))
    if isinstance(successor, BucketStore):
        await claiming
        go_on.set()
        with pytest.raises(Conflict):
            await late
        assert await successor.read_ref("live") == ONE
    else:
        await asyncio.sleep(0.05)
        assert not claiming.done()
        go_on.set()
        await late
        with pytest.raises(Conflict):
            await claiming
        assert await successor.read_ref("live") == TWO
