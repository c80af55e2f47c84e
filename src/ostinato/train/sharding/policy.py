"""The compute model sharded over ranks by FSDP2: each layer's weights are gathered only for that layer's passes.

Data flow: the architecture without memory (meta device) -> `fully_shard` -> memory for this rank's rows -> those rows of the model's
safetensors files. No rank ever holds more of the model than its rows and one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig, BadWeights
from ostinato.model.backend import mark
from ostinato.model.checkpoint_validation import weight_files
from ostinato.model.load import check_directory, empty_model
from ostinato.model.logit_edits import Edits
from ostinato.model.norms import RMSNorm, rms_normed
from ostinato.model.tensors import named_tensors
from ostinato.train.config import TrainConfig
from ostinato.train.linear_gradients import embedding_lookup, is_plain_embedding
from ostinato.train.packing import PackedBatch
from ostinato.train.policy import Policy, served_dtypes
from ostinato.train.sharding.balance import rows_of
from ostinato.train.sharding.context import ContextAttention, ContextShare
from ostinato.train.sharding.group import RankGroup
from ostinato.train.tree_attention import TreeAttention

# ---------------------------------------------------------------- gradient reduction


_CHUNK = 1 << 20  # elements sent at once, and the size of the receive buffer


class DirectReduceScatter:
    """For FSDP2's `set_custom_reduce_scatter`: each rank sums its own part of a flat tensor, which all other ranks send to it.

    gloo has no reduce-scatter: torch copies the tensor, sums all of the copy on every rank, and keeps a part of it. That takes the memory
    of the gradients a second time, and twice the traffic. Parts are added in a fixed order, so the same ranks get the same bits.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the inputs or the outputs of a call."""
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


# ---------------------------------------------------------------- sharded policy


class ShardedPolicy(Policy):
    """A `Policy` whose passes all ranks run together, each over its own micro-batch, or over its own tokens of its context's micro-batch.

    The parameters are fp32 DTensors, divided by rows; a pass computes in `dtype` and gathers one layer at a time in it.

    Raises BadConfig for an architecture that keeps some of its weights in another dtype than the rest, or whose files store them in
    another form, and BadWeights.
    """

    def __init__(self, path: Path, dtype: torch.dtype, config: TrainConfig, group: RankGroup) -> None:
        check_directory(path)
        on_host = replace(group.backend, device="cpu")
        computed = empty_model(path, dtype, backend=on_host)
        served = served_dtypes(computed, path, dtype, config)
        kinds = {parameter.dtype for parameter in computed.parameters()}
        if kinds != {dtype}:
            raise BadConfig(
                f"train.ranks: this model keeps weights in {sorted(map(str, kinds))}: it trains on one rank only"
            )
        self._context = group.context
        model = empty_model(path, torch.float32, backend=on_host)
        mark(model, group.backend)
        _drop_memory(model)
        self._set_up(model, served, config)
        self._row_bytes = self._row_bytes * dtype.itemsize // torch.float32.itemsize
        for module in model.modules():
            if isinstance(module, RMSNorm):
                cast("Any", module).forward = partial(_normed, module)
            elif is_plain_embedding(module):
                cast("Any", module).forward = partial(_embedded, module)
        self._whole = _shard(_WholeModel(model), self._layers, dtype, group)
        self._whole._apply(partial(_with_memory, device=group.backend.device))
        _read_rows(model, path, dtype, group)

    def logprobs(
        self, packed: PackedBatch, attend: TreeAttention, temperatures_M: Tensor, edits: Edits | None = None
    ) -> Tensor:
        """Return what `Policy.logprobs` does; every rank of a context gets all of them. All ranks must call it the same number of times."""
        context = self._context
        if context.count == 1:
            compute = super().logprobs
            return self._whole(lambda: compute(packed, attend, temperatures_M, edits))
        share = ContextShare.of(packed, context.rank, context.count)
        own = ContextAttention(attend.layout, share, context, keep=self._recomputes(share.rows))
        rest = share.temperatures(temperatures_M), edits and share.edits(edits)
        return share.all_logprobs(context, self._whole(lambda: self._compute(share.part(packed), own, *rest)))


class _WholeModel(nn.Module):
    """Runs a function over the model as its own forward pass, so that the weights outside the layers are gathered meanwhile."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def _shard(whole: _WholeModel, layers: list[nn.Module], dtype: torch.dtype, group: RankGroup) -> Any:
    """Apply FSDP2 to each layer, and to the rest. Gradients are summed over the ranks in fp32, not averaged."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*layers, whole):
        # reshard after the forward pass, too: the next pass must not find weights gathered before other weights were put in
        divided: Any = fully_shard(module, mesh=group.mesh, mp_policy=policy, reshard_after_forward=True)
        divided.set_gradient_divide_factor(1.0)
        divided.set_force_sum_reduction_for_comms(True)
        if group.backend.device == "cpu":
            divided.set_custom_reduce_scatter(DirectReduceScatter())
    return whole


def _with_memory(tensor: Tensor, device: str) -> Tensor:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _normed(module: RMSNorm, x: Tensor) -> Tensor:
    """Normalise with a copy of the weight: numpy would keep a view of it, and FSDP2 cannot free memory with such a view."""
    return rms_normed(x, module.weight.clone(), module.eps, zero_centered=module.zero_centered)


def _embedded(module: nn.Embedding, ids: Tensor) -> Tensor:
    return embedding_lookup(ids, cast("nn.Parameter", module.weight), module.padding_idx)


def _drop_memory(model: nn.Module) -> None:
    """Replace parameters by ones without memory, keeping tied ones tied. Buffers stay: they are small, and computed at construction."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in empty:
                empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
            setattr(module, name, empty[id(parameter)])


def _read_rows(model: nn.Module, path: Path, dtype: torch.dtype, group: RankGroup) -> None:
    """Fill this rank's rows from the directory's safetensors files. Raises BadConfig if a tensor is stored in another form, BadWeights if
    it has a wrong shape or is not finite.
    """
    wanted = named_tensors(cast("PreTrainedModel", model))
    with torch.no_grad():
        for file in weight_files(path):
            try:
                with safe_open(file, "pt") as stored:
                    for name in set(stored.keys()) & wanted.keys():
                        _fill(name, wanted.pop(name), stored.get_slice(name), dtype, group)
            except SafetensorError as error:
                raise BadWeights(f"{path}: {error}") from error
    if wanted:
        raise BadConfig(
            f"train.ranks: the files in {path} have no tensor {sorted(wanted)[0]!r} in the form that the model computes with, as those of "
            "mixtures of experts, which are put together when a model is loaded whole: train it on one rank"
        )


def _fill(name: str, tensor: Tensor, stored: Any, dtype: torch.dtype, group: RankGroup) -> None:
    """Fill a tensor with values rounded to the compute dtype, as `load_model` does."""
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise BadWeights(f"tensor {name!r} has shape {tuple(stored.get_shape())}; the model's is {tuple(tensor.shape)}")
    if isinstance(tensor, DTensor):
        first, last = rows_of(len(tensor), group.count, group.rank)
        values, into = stored[first:last], tensor.to_local()
    else:
        values, into = stored[:], tensor
    if not bool(torch.isfinite(values).all()):
        raise BadWeights(f"tensor {name!r} holds NaN or infinity")
    into.copy_(values.to(dtype))
