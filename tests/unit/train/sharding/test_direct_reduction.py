"""Reduce-scatter among real processes: each gets the sum of its own part, with the same bits every time; a lost one ends the rest."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.train.sharding.policy import _CHUNK

PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from ostinato.train.sharding.policy import DirectReduceScatter
rank, count, port, size, turns = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.TCPStore("127.0.0.1", port), timeout=timedelta(seconds=300))
reduce = DirectReduceScatter()
for turn in range(turns):
    whole = torch.randn(size * count, generator=torch.Generator().manual_seed(rank))
    part = reduce.allocate((size,), dtype=whole.dtype, device=whole.device)
    reduce(part, whole, dist.group.WORLD, dist.ReduceOp.SUM)
    print(turn, hash(part.numpy().tobytes()), float(part.double().sum()), flush=True)
    if turn == 1 and turns > 2 and rank == 0:
        sys.stdin.read()
every = sum(torch.randn(size * count, generator=torch.Generator().manual_seed(each)).double() for each in range(count))
print(float((part - every.chunk(count)[rank]).abs().max()))
"""


def started(count: int, size: int, turns: int) -> tuple[dist.TCPStore, list[subprocess.Popen[str]]]:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WHOLE_PROGRAM_S)
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return store, [
        FORK_SERVER.popen(
            [sys.executable, "-c", PROGRAM, rank, count, store.port, size, turns],
            text=True,
            env={"GLOO_SOCKET_IFNAME": "lo"},
            **pipes,
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3])
def test_each_rank_has_the_sum_of_its_part_with_the_same_bits_every_time(count: int):
    store, processes = started(count, _CHUNK + 77, turns=2)
    for process in processes:
        said, error = process.communicate(timeout=WHOLE_PROGRAM_S)
        assert process.returncode == 0, error
        first, again, apart = said.splitlines()
        assert first.split()[1:] == again.split()[1:]
        assert float(apart) < 1e-6
    del store


def test_a_lost_rank_ends_the_others_with_an_error():
    store, (waiting, *others) = started(3, 1000, turns=1000)
    assert waiting.stdout is not None
    assert [waiting.stdout.readline()[:1] for _ in range(2)] == ["0", "1"]
    waiting.kill()
    for process in others:
        _, error = process.communicate(timeout=WHOLE_PROGRAM_S)
        assert process.returncode != 0
        assert "onnection" in error, "what `ShardedTrainer` takes for a lost rank"
    waiting.communicate()
    del store
