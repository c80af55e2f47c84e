"""What the scheduler's book-keeping costs, whose prefixes it shares, and who makes room for whom."""

import sys
from dataclasses import replace

import pytest

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.kv import BlockPool
from ostinato.engine.embedded.scheduler import Generation, Scheduler

V1 = PolicyVersion(number=1, hash="v1")
ROWS = 8


class Counted(Generation):
    """Counts comparisons, which a search through a list makes out of sight."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other

    __hash__ = object.__hash__


def sample(number, *, salt="", kind=Generation, length=6, tokens=4):
    request = Generate(
        id=f"r{number}", slot="live", prompt_ids=(1,) * length, sampling=Sampling(max_tokens=tokens), cache_salt=salt
    )
    return kind(request=request, index=0, seed=0, ids=list(request.prompt_ids), policy=V1)


def step(scheduler):
    work = scheduler.plan()
    for piece in work:
        scheduler.advance(piece)
        if piece.last:
            scheduler.fork(piece.sample)
            piece.sample.ids.append(2)
            if piece.sample.sampled == piece.sample.request.sampling.max_tokens:
                scheduler.remove(piece.sample)
    return work


def operations(run):
    """Lines executed and samples compared by `run`."""
    lines, Counted.compared = 0, 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return lines + Counted.compared


def filled(requests, n=1):
    scheduler = Scheduler(BlockPool(4096), block=16, rows=ROWS, chunk=64)
    for number in range(requests):
        leader, *others = [sample(number, kind=Counted) for _ in range(n)]
        for other in others:
            other.leader = leader
        scheduler.add([leader, *others])
    return scheduler


def drain(scheduler):
    while step(scheduler):
        pass
    assert scheduler.queued == 0


@pytest.mark.parametrize("n", [1, 4])
def test_a_step_costs_the_same_whether_32_or_256_requests_wait(n):
    few, many = filled(32, n), filled(256, n)
    for scheduler in (few, many):
        step(scheduler)
    assert operations(lambda: step(many)) <= 1.1 * operations(lambda: step(few))


@pytest.mark.parametrize("n", [1, 4])
def test_serving_eight_times_the_requests_costs_eight_times_as_much(n):
    few, many = (operations(lambda count=count: drain(filled(count, n))) for count in (32, 256))
    assert many <= 8.8 * few


def test_a_cancelled_queue_costs_no_more_than_its_length():
    def cancel(count):
        scheduler = filled(count)
        waiting = scheduler.samples()
        return operations(lambda: [scheduler.remove(one) for one in reversed(waiting)])

    assert cancel(256) <= 8.8 * cancel(32)


@pytest.mark.parametrize(("salt", "shared"), [("acme", 32), ("evil", 0), ("", 0)])
def test_a_prefix_is_shared_under_the_same_salt_only(salt, shared):
    scheduler = Scheduler(BlockPool(64), block=16, rows=ROWS, chunk=64)
    first = sample(0, salt="acme", length=40)
    scheduler.add([first])
    step(scheduler)
    scheduler.add([sample(1, salt=salt, length=40)])
    step(scheduler)
    assert scheduler.prefix_hits == shared


def test_a_salt_is_not_mistaken_for_a_version():
    """The key of (policy "v1", salt "x") is not that of (policy "v1x", no salt)."""
    scheduler = Scheduler(BlockPool(64), block=16, rows=ROWS, chunk=64)
    scheduler.add([sample(0, salt="x", length=40)])
    step(scheduler)
    other = sample(1, length=40)
    other.policy = replace(V1, hash="v1x")
    scheduler.add([other])
    step(scheduler)
    assert scheduler.prefix_hits == 0


def crowded(*, rows, blocks=4096, many, length=6, tokens=1000):
    """A scheduler in which one client has `many` samples running."""
    scheduler = Scheduler(BlockPool(blocks), block=16, rows=rows, chunk=64)
    crowd = [sample(number, salt="many", length=length, tokens=tokens) for number in range(many)]
    scheduler.add(crowd)
    while len(scheduler.running) < many:
        assert step(scheduler)
    return scheduler, crowd


def test_whoever_runs_nothing_gets_a_row_of_whoever_has_all_of_them():
    scheduler, crowd = crowded(rows=8, many=8)
    few = sample(100, salt="few", tokens=20)
    scheduler.add([few])
    step(scheduler)
    assert few in scheduler.running
    assert crowd[-1] not in scheduler.running, "the youngest made room"
    for _ in range(19):
        step(scheduler)
    assert (few.sampled, scheduler.preemptions) == (20, 1), "who made room does not take it back"
    step(scheduler)
    assert set(scheduler.running) == set(crowd), "and goes on when there is room"


def test_an_asker_with_one_row_keeps_it():
    scheduler = Scheduler(BlockPool(64), block=16, rows=2, chunk=64)
    scheduler.add([sample(0, salt="ann"), sample(1, salt="bob"), sample(2, salt="carl")])
    for _ in range(4):
        step(scheduler)
        assert scheduler.preemptions == 0
    step(scheduler)
    assert [each.client for each in scheduler.running] == ["carl"]


def test_every_newcomer_gets_a_row_before_anyone_has_two():
    scheduler, crowd = crowded(rows=4, many=4)
    scheduler.add([sample(number, salt=f"client {number}", tokens=50) for number in range(100, 106)])
    for _ in range(10):
        step(scheduler)
    assert len({each.client for each in scheduler.running}) == 4
    assert (crowd[0] in scheduler.running, scheduler.preemptions) == (True, 3)


def test_when_blocks_run_out_whoever_has_most_running_makes_room_and_not_the_newcomer():
    scheduler, crowd = crowded(rows=16, blocks=13, many=6, length=10, tokens=40)
    few = sample(100, salt="few", length=10, tokens=40)
    scheduler.add([few])
    while few.sampled < 40:
        assert step(scheduler)
        assert few in scheduler.running or few.sampled == 40
    assert scheduler.preemptions > 0
    drain(scheduler)
    assert [each.sampled for each in crowd] == [40] * 6


def test_when_all_blocks_are_taken_whoever_has_most_running_makes_room_for_a_newcomer():
    scheduler, crowd = crowded(rows=16, blocks=18, many=6, length=30, tokens=30)
    while scheduler.pool.available > 6:
        step(scheduler)
    few = sample(100, salt="few", length=60)
    scheduler.add([few])
    step(scheduler)
    step(scheduler)
    assert few in scheduler.running
    assert 0 < scheduler.preemptions < len(crowd), "no more make room than must"
    drain(scheduler)
    assert [each.sampled for each in crowd] == [30] * 6


def test_a_step_with_all_rows_taken_costs_the_same_however_many_askers_wait():
    few, many = (Scheduler(BlockPool(4096), block=16, rows=ROWS, chunk=64) for _ in range(2))
    for scheduler, clients in ((few, 32), (many, 256)):
        scheduler.add([sample(number, salt=f"client {number}", tokens=100) for number in range(clients)])
        step(scheduler)
        step(scheduler)
    assert operations(lambda: step(many)) <= 1.1 * operations(lambda: step(few))


def test_a_cache_that_holds_no_block_is_refused_when_it_is_set():
    """It would refuse every request, and say that this model holds 0 tokens."""
    assert EngineConfig(kv_tokens=64, block=64).kv_tokens == 64
    with pytest.raises(ValueError, match=r"kv_tokens = 64 hold no block of 128"):
        EngineConfig(kv_tokens=64, block=128)
