"""FSDP2's reduce-scatter over gloo: each rank is sent its own part of the gradients, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 20  # elements that are sent at once, and the size of the buffer in which they arrive


class DirectReduceScatter:
    """For FSDP2's `set_custom_reduce_scatter`: each rank sums its own part of a flat tensor, which all other ranks send to it.

    gloo has no reduce-scatter: torch copies the tensor, sums all of the copy on every rank, and keeps a part of it. That takes as much
    memory as the gradients again, and twice the traffic. Parts are added in the same order every time, so the same ranks get the same bits.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for the inputs or the outputs of a call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [N] with the sum of all ranks' ``input_tensor[N * rank : N * (rank + 1)]``."""
        assert op == dist.ReduceOp.SUM, f"gradients are summed over the ranks, and {op} was asked for"
        assert not async_op
        count, rank = group.size(), group.rank()
        parts = input_tensor.chunk(count)
        output_tensor.copy_(parts[rank])
        arrived = torch.empty(min(_CHUNK, len(output_tensor)), dtype=input_tensor.dtype)
        for away in range(1, count):
            to, source = (rank + away) % count, (rank - away) % count
            for given, total in zip(parts[to].split(_CHUNK), output_tensor.split(_CHUNK), strict=True):
                sent = cast("dist.Work", dist.isend(given, group=group, group_dst=to))
                dist.recv(arrived[: len(total)], group=group, group_src=source)
                total += arrived[: len(total)]
                sent.wait()
