"""Context parallelism: each rank computes its own tokens of a micro-batch, and its queries attend to the keys of all ranks.

Everything but attention concerns single tokens, so a rank runs the whole model on its own tokens only. In each layer keys and values are
gathered, as in Llama 3's training (2407.21783, 3.3.2), and their gradients come back summed over all ranks' queries. A ring, which
would pass them on piece by piece, would have to combine partial softmaxes, which round differently from the engine's. It would save only
memory for the keys and values of one layer, which are few with grouped queries. Until the backward pass a rank keeps only its own.

Data flow: packed tree -> `ContextShare` (which rank has which token) -> its part as a `PackedBatch`, run as any other with
`ContextAttention` -> its log-probabilities -> those of all ranks, in the order of the whole, on every rank. So every rank computes the same
loss, to the bit, and autograd gives each rank its own tokens' part of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ostinato.model.logit_edits import Edit, Edits
from ostinato.train.packing import Ints, PackedBatch
from ostinato.train.sharding.balance import dealt
from ostinato.train.tree_attention import Layout


class ContextGroup:
    """The ranks that compute a micro-batch together; `rank` counts within the group. `group` None: this rank alone."""

    def __init__(self, rank: int, count: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.count, self._group = rank, count, group

    def gather(self, mine: Tensor) -> Tensor:
        """Gather [R, ...] of each rank into [count * R, ...] in the order of the ranks, bit for bit."""
        found = torch.empty((self.count * len(mine), *mine.shape[1:]), dtype=mine.dtype)
        dist.all_gather(list(flat_bytes(found).chunk(self.count)), flat_bytes(mine.contiguous()), self._group)
        return found

    def own_sum(self, parts: Tensor) -> Tensor:
        """Sum [count * R, ...] over the ranks, in rank order, and return this rank's own [R, ...] of it."""
        found = torch.empty_like(parts)
        dist.all_to_all_single(flat_bytes(found), flat_bytes(parts), group=self._group)
        first, *others = found.chunk(self.count)
        for other in others:
            first += other
        return first.clone()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory. Raises RuntimeError for one that is not contiguous."""
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShare:
    """The division of a micro-batch of N tokens and M predictions over ranks, as one rank sees it.

    `own_N`: its tokens, ascending; each rank computes `rows` rows, including padding. `places_N`: each token's row when the rows of all
    ranks are concatenated. `own_M`: the predictions made from its tokens, ascending; each rank returns `predictions` of them, including
    padding. `places_M`: each prediction's place when those of all ranks are concatenated.

    Example: 3 tokens of which the last two predict, on 2 ranks: ``rows=2``, ``predictions=1``; the first rank has
    ``own_N=[0, 2]``, ``own_M=[1]``; both have ``places_N=[0, 2, 1]``, ``places_M=[1, 0]``.
    """

    own_N: Ints
    places_N: Ints
    rows: int
    own_M: Ints
    places_M: Ints
    predictions: int

    @classmethod
    def of(cls, packed: PackedBatch, rank: int, count: int) -> ContextShare:
        """Return this rank's share; the division is the same on every rank, balanced by the keys that each token's attention reads."""
        tokens = dealt(packed.positions_N + 1, count)
        owners_N = np.empty(packed.tokens, np.int64)
        for owner, own in enumerate(tokens):
            owners_N[own] = owner
        predicted = [np.flatnonzero(owners_N[packed.rows_M] == owner) for owner in range(count)]
        rows, predictions = max(map(len, tokens)), max(1, *map(len, predicted))
        return cls(
            own_N=tokens[rank],
            places_N=_padded_places(tokens, rows),
            rows=rows,
            own_M=predicted[rank],
            places_M=_padded_places(predicted, predictions),
            predictions=predictions,
        )

    def part(self, packed: PackedBatch) -> PackedBatch:
        """Return this rank's rows and predictions, for code that reads ids, positions and targets. A rank without predictions makes a dummy
        one, so that it takes part in the others' backward pass.
        """
        padding = (0, self.rows - len(self.own_N))
        rows_M = np.searchsorted(self.own_N, packed.rows_M[self.own_M])
        alone = (0, 0 if len(rows_M) else 1)
        return replace(
            packed,
            ids_N=np.pad(packed.ids_N[self.own_N], padding),
            positions_N=np.pad(packed.positions_N[self.own_N], padding),
            ends_N=np.pad(packed.ends_N[self.own_N], padding),  # still in the whole tree's numbering
            rows_M=np.pad(rows_M, alone),
            targets_M=np.pad(packed.targets_M[self.own_M], alone),
            turns_M=np.pad(packed.turns_M[self.own_M], alone),
        )

    def temperatures(self, temperatures_M: Tensor) -> Tensor:
        """Return the temperatures of this rank's predictions."""
        return temperatures_M[torch.from_numpy(self.own_M)] if len(self.own_M) else torch.ones(1)

    def edits(self, edits: Edits) -> Edits:
        """Return the edits of this rank's predictions, numbered within them."""

        def own(start: int, stop: int) -> Mapping[int, Edit]:
            chosen = self.own_M[start:stop]
            if not len(chosen):
                return {}
            # one request for the whole range, because each request replays a turn from its start
            found = edits(int(chosen[0]), int(chosen[-1]) + 1)
            return {at: found[where] for at, where in enumerate(chosen.tolist(), start) if where in found}

        return own

    def all_logprobs(self, context: ContextGroup, own: Tensor) -> Tensor:
        """Convert this rank's log-probabilities to those of all ranks [M], under autograd."""
        return _GatherLogprobs.apply(own, self, context)  # pyright: ignore[reportReturnType]


def _padded_places(parts: list[Ints], size: int) -> Ints:
    """Return the place of each item when the parts, each padded to `size`, are concatenated."""
    places = np.empty(sum(map(len, parts)), np.int64)
    for number, part in enumerate(parts):
        places[part] = number * size + np.arange(len(part))
    return places


class _GatherLogprobs(torch.autograd.Function):
    """All ranks compute the same loss from all log-probabilities, so each takes the gradient of its own, and none is sent."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, share: ContextShare, context: ContextGroup) -> Tensor:
        ctx.share, ctx.size = share, len(own)
        return context.gather(F.pad(own, (0, share.predictions - len(own))))[torch.from_numpy(share.places_M)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mine = grads[0][torch.from_numpy(ctx.share.own_M)]
        return F.pad(mine, (0, ctx.size - len(mine))), None, None


class ContextAttention:
    """The model's `attend` for this rank's rows of a micro-batch, like `TreeAttention` for all rows. All ranks must call it equally often.

    `keep`: keep the gathered keys and values until the backward pass, if it follows at once because activations are recomputed.
    """

    def __init__(self, layout: Layout, share: ContextShare, context: ContextGroup, *, keep: bool) -> None:
        self._layout = layout.part(share.own_N, share.places_N)
        self._context, self._keep = context, keep

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Map [R, H, D] of this rank's rows to [R, H, D]."""
        del layer
        return _GatheredAttention.apply(q, k, v, scale, window, self._layout, self._context, self._keep)  # pyright: ignore[reportReturnType]


class _GatheredAttention(torch.autograd.Function):
    """Attention of this rank's queries over the keys and values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int,
        layout: Layout,
        context: ContextGroup,
        keep: bool,
    ) -> Tensor:
        all_k, all_v = context.gather(k), context.gather(v)
        out, lse = layout.forward(q, all_k, all_v, scale, window)
        ctx.save_for_backward(q, *((all_k, all_v) if keep else (k, v)), out, lse)
        ctx.rest = scale, window, layout, context, keep
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        scale, window, layout, context, keep = ctx.rest
        dtype = k.dtype
        if not keep:
            k, v = context.gather(k), context.gather(v)
        # summed in fp32 over all ranks and rounded once, as in one process
        dq, dk, dv = layout.backward(q, k, v, out, lse, grads[0], scale, window, torch.float32)
        dk, dv = (context.own_sum(x).to(dtype) for x in (dk, dv))
        return dq, dk, dv, None, None, None, None, None
