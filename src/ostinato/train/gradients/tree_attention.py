"""Attention over a packed token tree: the `Attend` that the trainer hands to the model.

The forward pass lays the tree out in blocks and calls the kernel that the engine calls, so its bits are the engine's. The backward pass
is torch: each run of queries gathers the keys it may read, the runs of a bucket are one batched matrix product, and key
gradients, which add up over every run below a shared prefix, are summed in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.model.paged import Blocks, Entry, Places, Reads
from ostinato.train.batch.packing import Bucket, Ints, Packed, blocks, runs

BLOCK = 32
"""Tokens per block; any multiple of 16 gives the same bits."""


class _Layout:
    """One bucket as torch indices. B blocks, Q queries, K keys each."""

    __slots__ = ("bias_BQK", "distance_BQK", "keys", "padded", "places", "queries", "real", "shape")

    def __init__(self, bucket: Bucket, positions_N: Ints, device: torch.device) -> None:
        self.shape = bucket.allowed_BQK.shape
        self.queries = torch.from_numpy(bucket.queries_BQ).flatten().to(device)
        self.keys = torch.from_numpy(bucket.keys_BK).flatten().to(device)
        self.real = torch.from_numpy(bucket.real_BQ).flatten().nonzero().flatten().to(device)
        self.padded = (~torch.from_numpy(bucket.real_BQ)).nonzero().to(device)
        self.places = self.queries[self.real]
        allowed = torch.from_numpy(bucket.allowed_BQK).to(device)
        self.distance_BQK = torch.from_numpy(
            (positions_N[bucket.queries_BQ][:, :, None] - positions_N[bucket.keys_BK][:, None]).astype(np.int32)
        ).to(device)
        self.bias_BQK = torch.zeros(self.shape, device=device).masked_fill_(~allowed, float("-inf"))


class _Paged:
    """The tree laid out in the kernel's blocks: full blocks of a shared prefix stand once, the block at a branch once per branch."""

    __slots__ = ("blocks", "places", "reads")

    def __init__(self, packed: Packed) -> None:
        entries: list[Entry] = []
        known: dict[int, int] = {}  # last token of a full block -> the block: its ancestors are the rest of it
        tokens: list[Ints] = []
        blocks: list[Ints] = []
        offsets: list[Ints] = []
        used = 0
        for run in runs(packed):
            table: list[int] = []
            for start in range(0, len(run.path), BLOCK):
                inside = run.path[start : start + BLOCK]
                block = known.get(int(inside[-1])) if len(inside) == BLOCK else None
                if block is None:
                    block, used = used, used + 1
                    tokens.append(inside)
                    blocks.append(np.full(len(inside), block))
                    offsets.append(np.arange(len(inside)))
                    if len(inside) == BLOCK:
                        known[int(inside[-1])] = block
                table.append(block)
            entries.append(Entry(start=run.position, end=len(run.path), blocks=table))
        self.blocks = used
        self.places = Places(np.concatenate(tokens), np.concatenate(blocks), np.concatenate(offsets))
        self.reads = Reads(entries, BLOCK)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """[N, H, D] and the log-sum-exp [N, H]."""
        held = Blocks(self.blocks, k.shape[1], BLOCK, k.shape[2], k.dtype)
        held.write(k, v, self.places)
        return self.reads.attend(q, held, scale, window)


class TreeAttention:
    """Callable as the model's `attend`: ``(layer, q[N,H,D], k[N,KV,D], v[N,KV,D], scale, window) -> [N,H,D]``, under autograd.

    Example: ``hidden(model, ids_N, positions_N, TreeAttention(packed))``.
    """

    def __init__(self, packed: Packed, *, queries: int = 64, device: torch.device | None = None) -> None:
        self.paged = _Paged(packed)
        self._make = partial(_layouts, packed, queries, device or torch.device("cpu"))
        self._layouts: list[_Layout] = []

    @property
    def layouts(self) -> list[_Layout]:
        """What the backward pass needs; made when it first asks."""
        self._layouts = self._layouts or self._make()
        return self._layouts

    def forget(self) -> None:
        """Give back the memory that a backward pass took: 8 bytes per query and key, and its indices. The next one makes it again."""
        self._layouts = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """The same for every layer; `layer` is part of the seam and not used."""
        del layer
        result: Tensor = _Tree.apply(q, k, v, scale, window, self)  # pyright: ignore[reportAssignmentType]
        return result

    __call__ = attend


def _layouts(packed: Packed, queries: int, device: torch.device) -> list[_Layout]:
    return [_Layout(bucket, packed.positions_N, device) for bucket in blocks(packed.ends_N, queries=queries)]


def _queries(x: Tensor, layout: _Layout, kv: int) -> Tensor:
    """[N,H,D] -> [B*KV, G*Q, D]: the G query heads of a key head become rows, which makes the products larger."""
    B, Q, _ = layout.shape
    _, H, D = x.shape
    return x[layout.queries].view(B, Q, kv, H // kv, D).permute(0, 2, 3, 1, 4).reshape(B * kv, H // kv * Q, D)


def _keys(x: Tensor, layout: _Layout) -> Tensor:
    """[N,KV,D] -> [B*KV, K, D]."""
    B, _, K = layout.shape
    _, kv, D = x.shape
    return x[layout.keys].view(B, K, kv, D).transpose(1, 2).reshape(B * kv, K, D)


def _rows(x: Tensor, layout: _Layout, kv: int) -> Tensor:
    """[B*KV, G*Q, D] -> [B*Q, H, D]: undoes `_queries`, padded queries included."""
    B, Q, _ = layout.shape
    D = x.shape[-1]
    groups = x.shape[1] // Q
    return x.view(B, kv, groups, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, kv * groups, D)


def _add_keys(total: Tensor, x: Tensor, layout: _Layout) -> None:
    """Add [B*KV, K, D] into the fp32 [N,KV,D] at the keys' tokens."""
    B, _, K = layout.shape
    _, kv, D = total.shape
    total.index_add_(0, layout.keys, x.view(B, kv, K, D).transpose(1, 2).reshape(B * K, kv, D).float())


class _Tree(torch.autograd.Function):
    """The kernel forward and an explicit backward that rebuilds the weights from the kept log-sum-exp.

    Dao 2022 (2205.14135), eq. for dS: P * (dP - rowsum(dO * O)).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, tree: TreeAttention) -> Tensor:
        out, lse = tree.paged.attend(q, k, v, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.window, ctx.tree = scale, window, tree
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        kv = k.shape[1]
        dq = torch.zeros_like(q)  # padding behind the tree gets no gradient
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros_like(dk)
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for layout in ctx.tree.layouts:
            keys = _keys(k, layout)
            queries = _queries(q, layout, kv)
            p = _weights(queries, keys, _queries(lse[..., None], layout, kv), layout, ctx.scale, ctx.window)
            do = _queries(grad, layout, kv)
            low = p.to(q.dtype)
            _add_keys(dv, torch.bmm(low.transpose(1, 2), do), layout)
            dp = torch.bmm(do, _keys(v, layout).transpose(1, 2))
            ds = dp.float().sub_(_queries(delta, layout, kv)).mul_(p).mul_(ctx.scale).to(q.dtype)
            dq[layout.places] = _rows(torch.bmm(ds, keys), layout, kv)[layout.real]
            _add_keys(dk, torch.bmm(ds.transpose(1, 2), queries), layout)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _weights(q: Tensor, k: Tensor, lse: Tensor, layout: _Layout, scale: float, window: int) -> Tensor:
    """exp(score - lse) in fp32, [B*KV, G*Q, K]; 0 for what a query does not read and for padded queries."""
    B, Q, K = layout.shape
    p = torch.bmm(q.float() * scale, k.float().transpose(1, 2)).sub_(lse)
    bias = layout.bias_BQK
    if window:
        bias = bias.masked_fill(layout.distance_BQK >= window, float("-inf"))
    p.view(B, -1, Q, K).add_(bias[:, None])
    p.exp_()
    if len(layout.padded):  # a padded query repeats a real one and must not send a gradient to any key
        p.view(B, -1, Q, K)[layout.padded[:, 0], :, layout.padded[:, 1]] = 0
    return p
