"""The compute model as a policy: packed token trees in, log-probabilities of their sampled tokens out, with or without gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ostinato.model.attention import Attend, hidden, logits
from ostinato.model.devices.backend import OWN, ComputeBackend, backend_of
from ostinato.model.load import empty_model, load_model
from ostinato.model.logit_edits import Edits
from ostinato.model.tensors import named_tensors
from ostinato.train.batch.packing import PackedBatch
from ostinato.train.config import TrainConfig
from ostinato.train.gradients.head import token_logprobs
from ostinato.train.gradients.masked_tree import MaskedTree
from ostinato.train.gradients.products import selected
from ostinato.train.gradients.tree_attention import TreeAttention

KEPT_LOGITS = 256 << 20
"""Bytes of a micro-batch's logits up to which they are kept for the backward pass; beyond it the head runs again, chunk by chunk."""


class Policy:
    """A model's forward pass over packed trees, by the engine's arithmetic.

    Args:
        path: the model's directory.
        dtype: the dtype it computes in.
        config: the dtype it is published in, and the number of tokens above which activations are recomputed in the backward pass.
        backend: the device and the kernels it computes with.
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
        self._run(model, served_dtypes(model, path, dtype, config), config)

    def _run(self, model: PreTrainedModel, served: Mapping[str, torch.dtype], config: TrainConfig) -> None:
        self.model, self.served, self._recompute_tokens = model, served, config.recompute_tokens
        self._layers = _recomputable(model)
        self._head = partial(logits, model)
        head = cast("nn.Linear", model.get_output_embeddings())
        self._row_bytes = head.out_features * head.weight.element_size()

    def logprobs(
        self, packed: PackedBatch, attend: TreeAttention, temperatures_M: Tensor, edits: Edits | None = None
    ) -> Tensor:
        """[M], fp32, on the host: log-probability of each sampled token at its turn's temperature, under autograd if gradients are on.

        `edits`: the sampler's changes to the logits of some of the tokens.
        """
        seen = attend if backend_of(self.model).kernels == "own" else MaskedTree(attend, self.model.device)
        return self._compute(packed, seen, temperatures_M, edits)

    def _compute(self, packed: PackedBatch, attend: Attend, temperatures_M: Tensor, edits: Edits | None) -> Tensor:
        device, kernels = self.model.device, backend_of(self.model).kernels
        arrays = (packed.ids_N, packed.positions_N, packed.rows_M, packed.targets_M)
        ids_N, positions_N, chosen_M, targets_M = (torch.from_numpy(array).to(device) for array in arrays)
        for layer in self._layers:
            layer.training = self._recomputes(packed.tokens)
        states_ND = hidden(self.model, ids_N, positions_N, attend)
        rows_MD = selected(states_ND, chosen_M)
        keep = len(rows_MD) * self._row_bytes <= KEPT_LOGITS
        temperatures_M = temperatures_M.to(device)
        made_M = token_logprobs(self._head, rows_MD, targets_M, temperatures_M, edits, keep=keep, kernels=kernels)
        return made_M.cpu()

    def _recomputes(self, tokens: int) -> bool:
        """Whether the activations of this many tokens are recomputed in the backward pass."""
        return tokens > self._recompute_tokens


def served_dtypes(
    model: PreTrainedModel, path: Path, dtype: torch.dtype, config: TrainConfig
) -> dict[str, torch.dtype]:
    """The dtype of each tensor in an engine that serves in `config.publish`: some stay in fp32 regardless of the rest."""
    served = torch.bfloat16 if config.publish == "bf16" else torch.float32
    like = model if dtype == served else empty_model(path, served, backend=replace(backend_of(model), device="cpu"))
    return {name: tensor.dtype for name, tensor in named_tensors(like).items()}


def _recomputable(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, set up to keep only their input for the backward pass while they (not their submodules) are in training mode."""
    # transformers 5.22 added the first name, and 6 removes the second
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
