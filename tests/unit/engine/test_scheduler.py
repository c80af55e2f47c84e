"""What the scheduler's book-keeping costs, and whose prefixes it shares."""

import sys
from dataclasses import replace

import pytest

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.engine.embedded.blocks import BlockPool
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


def sample(number, *, salt="", kind=Generation, length=6):
    request = Generate(
        id=f"r{number}", slot="live", prompt_ids=(1,) * length, sampling=Sampling(max_tokens=4), cache_salt=salt
    )
    return kind(request=request, index=0, seed=0, ids=list(request.prompt_ids), policy=V1)


def step(scheduler):
    work = scheduler.plan()
    for piece in work:
        scheduler.advance(piece)
        if piece.last:
            scheduler.fork(piece.sample)
            piece.sample.ids.append(2)
            if piece.sample.sampled == 4:
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
