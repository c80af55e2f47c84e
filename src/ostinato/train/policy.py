"""The compute model as a policy: packed token trees in, log-probabilities of their sampled tokens out, with or without gradients.

Contains the log-probabilities of sampled tokens under the output head, as the sampler computes them, with their gradient, and attention
over a packed token tree with torch's operations, on any device; `tree_attention` does the same with our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ostinato.model.attention import Attend, hidden, logits
from ostinato.model.backend import OWN, ComputeBackend, backend_of
from ostinato.model.cpu import split
from ostinato.model.device_attention import tree
from ostinato.model.kernels.gradients import logprob_gradient
from ostinato.model.load import empty_model, load_model
from ostinato.model.logit_edits import Edit, Edits, edit_logits
from ostinato.model.logprobs import RowSoftmax, TensorLogprobs
from ostinato.model.paged import array
from ostinato.model.tensors import named_tensors
from ostinato.train.config import TrainConfig
from ostinato.train.linear_gradients import select_rows
from ostinato.train.packing import PackedBatch
from ostinato.train.tree_attention import TreeAttention

# ---------------------------------------------------------------- attention by torch


class MaskedTree:
    """The model's `attend` for the tree of a `TreeAttention`, whose `on_layer` is called before each layer, forward and backward."""

    def __init__(self, attend: TreeAttention, device: torch.device) -> None:
        packed, self._on_layer = attend.packed, attend.on_layer
        self._attend = tree(*(torch.from_numpy(x).to(device) for x in (packed.ends_N, packed.positions_N)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]."""
        del layer
        self._on_layer()
        out = self._attend(q, k, v, scale, window)
        return _BackwardCallback.apply(out, self._on_layer)  # pyright: ignore[reportReturnType]


class _BackwardCallback(torch.autograd.Function):
    """The identity, with a callback in the backward pass; an exception from the callback ends the pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call()
        return grads[0], None


# ---------------------------------------------------------------- output head


_CHUNK = 512  # rows per call of the head


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(edited logits / T)[target]. The edits, unless they widen the logits, and in the backward pass the gradient
    overwrite them in place.

    Biases are constants and forbidden tokens have no probability, so the gradient is that of the edited logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor, edits: Mapping[int, Edit]
    ) -> Tensor:
        ctx.dtype = logits_MV.dtype
        logits_MV, _ = edit_logits(logits_MV, edits)
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
        return out_MV.to(ctx.dtype), None, None, None


class _HintDivergence(torch.autograd.Function):
    """KL(teacher || student) of each token's whole distribution; 0 where the teacher finds the sampled token no less likely.

    The teacher is a constant, so the gradient with respect to the student's logits is (student - teacher) / T: at most 2 / T in sum,
    whatever the hint. The edits may overwrite the logits; they are constants, as in `_TokenLogprobs`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_MV: Tensor,
        teacher_MV: Tensor,
        targets_M: Tensor,
        temperatures_M: Tensor,
        edits: Mapping[int, Edit],
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype = student_MV.dtype
        student_MV, teacher_MV = (
            (edit_logits(x, edits)[0].float() / temperatures_M[:, None]).log_softmax(-1)
            for x in (student_MV, teacher_MV)
        )
        open_M = (teacher_MV - student_MV).gather(1, targets_M[:, None])[:, 0] < 0
        chances_MV = teacher_MV.exp()
        # both are -inf where an edit forbids a token
        nats_MV = torch.where(chances_MV > 0, chances_MV * (teacher_MV - student_MV), 0.0)
        ctx.save_for_backward((student_MV.exp_() - chances_MV) * (open_M / temperatures_M)[:, None])
        ctx.mark_non_differentiable(open_M)
        return nats_MV.sum(-1) * open_M, open_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes_MV,) = ctx.saved_tensors
        return (slopes_MV * grads[0][:, None]).to(ctx.dtype), None, None, None, None


def hint_divergence(
    head: Callable[[Tensor], Tensor],
    student_MD: Tensor,
    teacher_MD: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    edits: Edits | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [M], fp32: each sampled token's KL(teacher || student) over the whole vocabulary, differentiable in the student alone; and
    [M], bool: True where the teacher finds the token less likely than the student. Elsewhere the divergence is 0.

    Both distributions are under the same `edits` of logits. The logits of `_CHUNK` tokens at a time are in memory.
    """

    def chunk(hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        part = slice(start, start + len(hidden))
        own = {} if edits is None else {at - start: edit for at, edit in edits(start, part.stop).items()}
        with torch.no_grad():
            teacher_MV = head(teacher_MD[part])
        return _HintDivergence.apply(head(hidden), teacher_MV, targets_M[part], temperatures_M[part], own)  # pyright: ignore[reportReturnType]

    parts = [
        cast(
            "tuple[Tensor, Tensor]",
            checkpoint(chunk, student_MD[at : at + _CHUNK], at, use_reentrant=False, preserve_rng_state=False),
        )
        for at in range(0, len(targets_M), _CHUNK)
    ]
    nats, opened = zip(*parts, strict=True)
    return torch.cat(nats), torch.cat(opened)


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
    """Return the fp32 log-probability of each sampled token under softmax(head(hidden) / temperature), under autograd; one backward pass.

    `head` maps [m, D] to fresh logits [m, V], which may be overwritten. With `keep` all logits stay in memory until the backward pass;
    otherwise that pass runs the head again, and only one chunk of logits is in memory at a time. `edits`: the changes made to
    the logits of some of the M tokens before they were sampled. `kernels`: "torch" works on any device, which all tensors must be on.
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


# ---------------------------------------------------------------- the policy


KEPT_LOGITS = 256 << 20
"""Most bytes of a micro-batch's logits that are kept for the backward pass; beyond it the head runs again, chunk by chunk."""


class Policy:
    """A model's forward pass over packed trees, with the engine's arithmetic.

    Args:
        path: the model's directory.
        dtype: the compute dtype.
        config: the published dtype, and the number of tokens above which activations are recomputed in the backward pass.
        backend: the device and the kernels.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        config: TrainConfig,
        backend: ComputeBackend = OWN,
    ) -> None:
        # eval mode: dropout would make the trainer's policy differ from the sampler's
        model = load_model(path, dtype, backend=backend)
        self._set_up(model, served_dtypes(model, path, dtype, config), config)

    def _set_up(self, model: PreTrainedModel, served: Mapping[str, torch.dtype], config: TrainConfig) -> None:
        self.model, self.served, self._recompute_tokens = model, served, config.recompute_tokens
        self._layers = _recomputable(model)
        self._head = partial(logits, model)
        head = cast("nn.Linear", model.get_output_embeddings())
        self._row_bytes = head.out_features * head.weight.element_size()

    def logprobs(
        self, packed: PackedBatch, attend: TreeAttention, temperatures_M: Tensor, edits: Edits | None = None
    ) -> Tensor:
        """Return [M], fp32, on the host: each sampled token's log-probability at its turn's temperature, under autograd if enabled.

        `edits`: the sampler's changes to the logits of some of the tokens.
        """
        return self._compute(packed, self._attention(attend), temperatures_M, edits)

    def _compute(self, packed: PackedBatch, attend: Attend, temperatures_M: Tensor, edits: Edits | None) -> Tensor:
        device, kernels = self.model.device, backend_of(self.model).kernels
        rows_MD, targets_M = self._states_and_targets(packed, attend)
        keep = len(rows_MD) * self._row_bytes <= KEPT_LOGITS
        temperatures_M = temperatures_M.to(device)
        made_M = token_logprobs(self._head, rows_MD, targets_M, temperatures_M, edits, keep=keep, kernels=kernels)
        return made_M.cpu()

    def _states_and_targets(self, packed: PackedBatch, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return the states [M, D] from which the sampled tokens are predicted, and these tokens [M], on the model's device."""
        arrays = (packed.ids_N, packed.positions_N, packed.rows_M, packed.targets_M)
        ids_N, positions_N, chosen_M, targets_M = (torch.from_numpy(array).to(self.model.device) for array in arrays)
        for layer in self._layers:
            layer.training = self._recomputes(packed.tokens)
        return select_rows(hidden(self.model, ids_N, positions_N, attend), chosen_M), targets_M

    @torch.no_grad()
    def states(self, packed: PackedBatch, attend: TreeAttention) -> Tensor:
        """Return [M, D], fp32, on the host: the final hidden states from which the sampled tokens are predicted."""
        return self._states_and_targets(packed, self._attention(attend))[0].float().cpu()

    def hint_divergence(
        self,
        packed: PackedBatch,
        attend: TreeAttention,
        hinted: TreeAttention,
        temperatures_M: Tensor,
        edits: Edits | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the function `hint_divergence`; on the host. `hinted`: the same sampled tokens behind prompts with hints, for the teacher."""
        with torch.no_grad():
            teacher_MD, _ = self._states_and_targets(hinted.packed, self._attention(hinted))
        student_MD, targets_M = self._states_and_targets(packed, self._attention(attend))
        temperatures_M = temperatures_M.to(self.model.device)
        found = hint_divergence(self._head, student_MD, teacher_MD, targets_M, temperatures_M, edits)
        return found[0].cpu(), found[1].cpu()

    def _attention(self, attend: TreeAttention) -> Attend:
        return attend if backend_of(self.model).kernels == "own" else MaskedTree(attend, self.model.device)

    def _recomputes(self, tokens: int) -> bool:
        """Return True if the activations of this many tokens are recomputed in the backward pass."""
        return tokens > self._recompute_tokens


def served_dtypes(
    model: PreTrainedModel, path: Path, dtype: torch.dtype, config: TrainConfig
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in an engine that serves in `config.publish`: some stay in fp32 in any case."""
    served = torch.float32 if config.publish == "fp32" else torch.bfloat16
    like = model if dtype == served else empty_model(path, served, backend=replace(backend_of(model), device="cpu"))
    return {name: tensor.dtype for name, tensor in named_tensors(like).items()}


def _recomputable(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers, set up to keep only their input for the backward pass while they (not their submodules) are in training mode."""
    # transformers 5.22 added the first name, and 6 removes the second
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
