"""Attention over a packed token tree: the `Attend` that the trainer hands to the model.

Data flow: `packing.blocks` -> `TreeAttention` -> called by the model once per layer. Each run of queries gathers the keys it may
read, and the runs of a bucket are one batched matrix product. Scores and softmax are fp32 whatever the compute dtype, because
rounding scores to bf16 is what moves a trainer's logprobs away from the engine's. The backward pass is written out: under autograd
the same graph costs 1.5 times as much, and key gradients, which add up over every run below a shared prefix, are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.train.packing import Bucket, Packed, blocks


class _Layout:
    """One bucket as torch indices. B blocks, Q queries, K keys each."""

    __slots__ = ("bias_BQK", "keys", "padded", "places", "queries", "real", "shape")

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.shape = bucket.allowed_BQK.shape
        self.queries = torch.from_numpy(bucket.queries_BQ).flatten().to(device)
        self.keys = torch.from_numpy(bucket.keys_BK).flatten().to(device)
        self.real = torch.from_numpy(bucket.real_BQ).flatten().nonzero().flatten().to(device)
        self.padded = (~torch.from_numpy(bucket.real_BQ)).nonzero().to(device)
        self.places = self.queries[self.real]
        allowed = torch.from_numpy(bucket.allowed_BQK).to(device)
        self.bias_BQK = torch.zeros(self.shape, device=device).masked_fill_(~allowed, float("-inf"))


class TreeAttention:
    """Callable as the model's `attend`: ``(layer, q[N,H,D], k[N,KV,D], v[N,KV,D], scale) -> [N,H,D]``, under autograd.

    Example: ``hidden(model, ids_N, positions_N, TreeAttention(packed))``.
    """

    def __init__(self, packed: Packed, *, queries: int = 64, device: torch.device | None = None) -> None:
        where = device or torch.device("cpu")
        self._layouts = [_Layout(bucket, where) for bucket in blocks(packed.ends_N, queries=queries)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The same for every layer; `layer` is part of the seam and not used."""
        del layer
        result: Tensor = _Tree.apply(q, k, v, scale, self._layouts)  # pyright: ignore[reportAssignmentType]
        return result

    __call__ = attend


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
    """Softmax attention with an explicit backward (Dao 2022, 2205.14135, eq. for dS: P * (dP - rowsum(dO * O)))."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, layouts: Sequence[_Layout]) -> Tensor:
        kv = k.shape[1]
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for layout in layouts:
            B, Q, K = layout.shape
            scores = torch.bmm(_queries(q, layout, kv).float() * scale, _keys(k, layout).float().transpose(1, 2))
            scores.view(B, -1, Q, K).add_(layout.bias_BQK[:, None])
            p = torch.softmax(scores, -1).to(q.dtype)
            if len(layout.padded):  # a padded query repeats a real one and must not send a gradient to any key
                p.view(B, -1, Q, K)[layout.padded[:, 0], :, layout.padded[:, 1]] = 0
            out[layout.places] = _rows(torch.bmm(p, _keys(v, layout)), layout, kv)[layout.real]
            kept.append(p)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.scale, ctx.layouts = scale, layouts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, *kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        kv = k.shape[1]
        dq = torch.empty_like(q)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros_like(dk)
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for layout, p in zip(ctx.layouts, kept, strict=True):
            do = _queries(grad, layout, kv)
            _add_keys(dv, torch.bmm(p.transpose(1, 2), do), layout)
            dp = torch.bmm(do, _keys(v, layout).transpose(1, 2))
            ds = dp.float().sub_(_queries(delta, layout, kv)).mul_(p).mul_(ctx.scale).to(q.dtype)
            dq[layout.places] = _rows(torch.bmm(ds, _keys(k, layout)), layout, kv)[layout.real]
            _add_keys(dk, torch.bmm(ds.transpose(1, 2), _queries(q, layout, kv)), layout)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None
