"""Log-probabilities of sampled tokens under the output head, as the sampler computes them, and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ostinato.model.devices.softmax import TensorLogprobs
from ostinato.model.kernels.gradients import logprob_gradient
from ostinato.model.logit_edits import Edit, Edits, edit_logits
from ostinato.model.logprobs import RowSoftmax
from ostinato.model.paged import array
from ostinato.model.threads import split

_CHUNK = 512  # rows that the head is run on at once


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(edited logits / T)[target]. The edits and, in the backward pass, the gradient overwrite the logits in place.

    Biases are constants and forbidden tokens have no probability, so the gradient is that of the edited logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor, edits: Mapping[int, Edit]
    ) -> Tensor:
        edit_logits(logits_MV, edits)
        normal = RowSoftmax.of(logits_MV, temperatures_M)
        ctx.save_for_backward(logits_MV, targets_M, temperatures_M, normal.log_totals())
        return normal.logprobs(targets_M.numpy())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_MV, targets_M, temperatures_M, totals_M = ctx.saved_tensors
        out_MV = logits_MV if logits_MV.is_contiguous() else logits_MV.contiguous()
        every = (
            array(out_MV),
            temperatures_M.float().numpy(),
            totals_M.numpy(),
            targets_M.numpy(),
            grads[0].contiguous().numpy(),
        )
        split(len(out_MV), lambda a, b: logprob_gradient(*(x[a:b] for x in every)))
        return out_MV, None, None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_MD: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    edits: Edits | None = None,
    *,
    keep: bool = True,
    kernels: Literal["own", "torch"] = "own",
) -> Tensor:
    """fp32 log-probability of each sampled token under softmax(head(hidden) / temperature), under autograd; one backward pass.

    `head` maps [m, D] to fresh logits [m, V], which may be overwritten. With `keep` all logits stay in memory until the backward pass;
    otherwise that pass runs the head again, and only one chunk of logits is in memory at a time. `edits`: the changes made to
    the logits of some of the M tokens before they were drawn. `kernels`: "torch" computes on any device, on which all tensors must be.
    """
    function = _TokenLogprobs if kernels == "own" else TensorLogprobs

    def chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor, start: int) -> Tensor:
        own = {} if edits is None else {at - start: edit for at, edit in edits(start, start + len(targets)).items()}
        return function.apply(head(hidden), targets, temperatures, own)  # pyright: ignore[reportReturnType]

    parts: list[Tensor] = []
    for start in range(0, len(targets_M), _CHUNK):
        part = slice(start, start + _CHUNK)
        args = (hidden_MD[part], targets_M[part], temperatures_M[part], start)
        again = torch.is_grad_enabled() and not keep
        made = checkpoint(chunk, *args, use_reentrant=False, preserve_rng_state=False) if again else chunk(*args)
        parts.append(made)  # pyright: ignore[reportArgumentType]
    return torch.cat(parts)
