"""Communication between the ranks of one training run, besides FSDP2's own. Plain tensors and bytes, never objects.

gloo's connections end with the process at the other end, so a killed rank causes an error in every other rank at its next call. NCCL,
over which FSDP2 exchanges what is on GPUs, does not notice it: see `trainer`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ostinato.core.errors import BadConfig
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.train.config import TrainConfig
from ostinato.train.microbatch import Microbatch, idle_microbatch
from ostinato.train.ranks import Ranks
from ostinato.train.sharding.balance import balanced, rounds
from ostinato.train.sharding.context import ContextGroup, flat_bytes

_PATIENCE = timedelta(hours=1)  # timeout of a collective: longer than any rank computes between two of them
_GPU_PATIENCE = timedelta(minutes=10)  # the same between GPUs, which exchange only within a micro-batch


def check_ranks(config: TrainConfig, backend: ComputeBackend) -> None:
    """Raise BadConfig if the ranks of `config` cannot compute with this backend on this machine."""
    if backend.kernels == "torch" and config.context_ranks > 1:
        raise BadConfig(
            f"train.context_ranks is {config.context_ranks}, and ranks compute a micro-batch together by our own kernels only, which are "
            'for the CPU: set train.context_ranks = 1, or model.device = "cpu" and model.kernels = "own"'
        )
    if backend.device == "cpu":
        return
    if backend.device != "cuda":
        raise BadConfig(
            f'train.ranks is {config.ranks}, and model.device names one GPU, "{backend.device}": set model.device = "cuda", with '
            "which each rank has the GPU of its number, or train.ranks = 1"
        )
    if config.ranks > (found := torch.cuda.device_count()):
        raise BadConfig(
            f"train.ranks is {config.ranks}, and torch sees {found} CUDA GPU{'s' * (found != 1)} here: each rank needs one of its own; set "
            f"train.ranks = {max(1, found)}"
        )


class RankGroup(Ranks):
    """This process as one of several ranks.

    `mesh`: the devices over which FSDP2 divides the weights, one for each rank; `backend`: this rank's.

    `context`: the neighbours that compute each micro-batch together with this rank. Weights are divided over all ranks regardless of
    contexts: a two-dimensional mesh would keep a copy of them, with gradients and moments, for each rank of a context.

    Example::

        group = RankGroup.join(rank=1, count=4, store=store, context_ranks=2)  # with rank 0; 2 and 3 are the other context
        group.any(False)  # whether it is so on any rank
        group.close()
    """

    def __init__(self, rank: int, count: int, context: ContextGroup, mesh: DeviceMesh, backend: ComputeBackend) -> None:
        self.rank, self.count, self.context, self.mesh, self.backend = rank, count, context, mesh, backend

    @classmethod
    def join(
        cls, *, rank: int, count: int, store: dist.TCPStore, context_ranks: int = 1, backend: ComputeBackend = OWN
    ) -> RankGroup:
        """Join the group as a rank; blocks until all ranks have joined. A process may be in one group at a time.

        `backend`: that of all ranks. On "cuda" each rank has the GPU of its number.
        """
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # all ranks are on this machine
        dist.init_process_group("gloo", rank=rank, world_size=count, store=store, timeout=_PATIENCE)
        own: dist.ProcessGroup | None = None
        for first in range(0, count if context_ranks > 1 else 0, context_ranks):  # every rank must create every group
            neighbours = list(range(first, first + context_ranks))
            made = cast("dist.ProcessGroup", dist.new_group(neighbours, timeout=_PATIENCE))
            own = made if rank in neighbours else own
        context = ContextGroup(rank % context_ranks, context_ranks, own)
        if backend.device == "cpu":
            return cls(rank, count, context, init_device_mesh("cpu", (count,)), backend)
        torch.cuda.set_device(rank)
        exchange = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=_GPU_PATIENCE))
        mesh = DeviceMesh.from_group(exchange, "cuda")
        return cls(rank, count, context, mesh, replace(backend, device=f"cuda:{rank}"))

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    # ------------------------------------------------------------ division of a step's work

    def shares(self, work: Sequence[Microbatch]) -> list[list[int]]:
        """Return the indices of each context's micro-batches, with about equally many tokens for each context."""
        return balanced([item.packed.tokens for item in work], self.count // self.context.count)

    def share(self, work: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the micro-batches of this rank's context, padded with idle ones to the number of the busiest context."""
        shares = self.shares(work)
        mine = [work[index] for index in shares[self._own_share]]
        return mine + [idle_microbatch() for _ in range(rounds(shares) - len(mine))]

    def any(self, mine: bool) -> bool:
        """Return True if `mine` is True on any rank."""
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def exchange(
        self, work: Sequence[Microbatch], mine: Sequence[Tensor], *, each: int, extra: int = 0
    ) -> list[Tensor]:
        """Return one fp32 tensor for each micro-batch, from the first of the ranks that computed it; they all have the same."""
        found: list[Tensor] = [torch.empty(0)] * len(work)
        for number, share in enumerate(self.shares(work)):
            if not share:
                continue
            sizes = [each * len(work[index].turns_M) + extra for index in share]
            flat = torch.cat([tensor.float() for tensor in mine[: len(share)]]) if number == self._own_share else None
            block = torch.empty(sum(sizes)) if flat is None else flat
            dist.broadcast(block, number * self.context.count)
            for index, values in zip(share, block.split(sizes), strict=True):
                found[index] = values
        return found

    @property
    def _own_share(self) -> int:
        return self.rank // self.context.count

    # ------------------------------------------------------------ numbers, bytes, rows

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, the same bits on each."""
        dist.all_reduce(mine)
        return mine

    def gather(self, said: bytes) -> list[bytes]:
        """Return the bytes of every rank, on every rank, in rank order."""
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
        """Send a tensor to another rank, which must call `receive`."""
        dist.send(flat_bytes(tensor.contiguous()), rank)

    def receive(self, into: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with the one that another rank sends."""
        dist.recv(flat_bytes(into), rank)
