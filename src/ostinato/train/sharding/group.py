"""The ranks of one training run: what they tell each other beside FSDP2's own traffic. Plain tensors and bytes, never objects.

gloo's connections end with the process at the other end, so that a rank that was killed is an error in every other at its next call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.train.batch.microbatch import Microbatch, idle_microbatch
from ostinato.train.sharding.balance import balanced, rounds

_PATIENCE = timedelta(hours=1)  # of one collective: longer than any rank computes between two


class RankGroup:
    """This process's place among the ranks, and the loop's `Ranks` over them.

    Example::

        group = RankGroup.join(rank=1, count=2, port=29500)
        group.any(False)  # whether it is so on any rank
        group.close()
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, *, rank: int, count: int, store: dist.TCPStore) -> RankGroup:
        """Become a rank of this process's group; blocks until all are there. A process is in one group at a time."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        dist.init_process_group("gloo", rank=rank, world_size=count, store=store, timeout=_PATIENCE)
        return cls(rank, count)

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()

    # ------------------------------------------------------------ a step's work

    def shares(self, work: Sequence[Microbatch]) -> list[list[int]]:
        """Each rank's micro-batches by number, of about as many tokens."""
        return balanced([item.packed.tokens for item in work], self.count)

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """This rank's, and as many that teach nothing as make it the number that the busiest has."""
        shares = self.shares(work)
        mine = [work[index] for index in shares[self.rank]]
        return mine + [idle_microbatch() for _ in range(rounds(shares) - len(mine))]

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """One tensor of fp32 for each micro-batch, from the rank that computed it."""
        shares = self.shares(work)
        found: list[Tensor] = [torch.empty(0)] * len(work)
        for rank, share in enumerate(shares):
            if not share:
                continue
            sizes = [each * len(work[index].turns_M) + extra for index in share]
            flat = torch.cat([tensor.float() for tensor in mine[: len(share)]]) if rank == self.rank else None
            block = torch.empty(sum(sizes)) if flat is None else flat
            dist.broadcast(block, rank)
            for index, values in zip(share, block.split(sizes), strict=True):
                found[index] = values
        return found

    # ------------------------------------------------------------ numbers, bytes, rows

    def total(self, mine: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits on each."""
        dist.all_reduce(mine)
        return mine

    def gather(self, said: bytes) -> list[bytes]:
        """What every rank says, on every rank, in the order of the ranks."""
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(said)]))
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        if said:
            padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def send(self, tensor: Tensor, rank: int) -> None:
        """To another rank, which receives it."""
        dist.send(_flat_bytes(tensor), rank)

    def receive(self, into: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with what another rank sends."""
        dist.recv(_flat_bytes(into), rank)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
