"""Master weights sharded over ranks: every tensor by its rows, with the gradients and moments of those rows.

The masters are FSDP2's own fp32 parameters if the weights that it gathers, rounded to the compute dtype, equal the published ones. If
the two differ, or while other weights are in the compute model, the masters are kept in separate memory.

Publishing assigns each chunk to a rank, and sends the pieces there: a chunk is divided if it contains rows of several ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ostinato.core.errors import BadWeights
from ostinato.core.weights import (
    CHUNK_ELEMENTS,
    ITEMSIZES,
    ChunkName,
    Form,
    WeightArray,
    WeightPart,
    Weights,
    chunks_of,
)
from ostinato.model.tensors import bytes_of, dtype_name, named_tensors, put_array, values_of
from ostinato.train.checkpoint import Arrays, Checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.masters import MOMENTS, adamw, inner_product, sum_of_squares
from ostinato.train.ranks import RankPart
from ostinato.train.sharding.balance import rows_of
from ostinato.train.sharding.group import RankGroup
from ostinato.train.sharding.policy import ShardedPolicy

# ---------------------------------------------------------------- assigning chunks to ranks


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Elements [`first`, `last`) of a tensor, owned by `rank`: a whole chunk, or a part of one."""

    rank: int
    first: int
    last: int


def pieces_of(shape: tuple[int, ...], ranks: int) -> list[list[TensorPiece]]:
    """Return the pieces of each chunk of a tensor that is divided by rows, in order.

    Example: 5 rows of 2^20 elements on 2 ranks are three chunks: rows 0 and 1, rows 2 of the first and 3 of the second rank, row 4.
    """
    total, width = math.prod(shape), math.prod(shape[1:])
    spans = [tuple(row * width for row in rows_of(shape[0], ranks, rank)) for rank in range(ranks)]
    found: list[list[TensorPiece]] = []
    for start in range(0, total, CHUNK_ELEMENTS):
        end = min(start + CHUNK_ELEMENTS, total)
        cut = [(rank, max(start, first), min(end, last)) for rank, (first, last) in enumerate(spans)]
        found.append([TensorPiece(*piece) for piece in cut if piece[2] > piece[1]])
    return found


def owners(chunks: Mapping[ChunkName, list[TensorPiece]], sizes: Mapping[str, int]) -> dict[ChunkName, int]:
    """Return the rank that publishes each chunk: of the ranks that have a piece of it, the one with the fewest bytes so far.

    The result is the same on every rank. `sizes`: bytes per element, by tensor. Undivided chunks are assigned first, then divided ones,
    each largest first.
    """
    dealt: dict[ChunkName, int] = {}
    loads: dict[int, int] = dict.fromkeys((piece.rank for pieces in chunks.values() for piece in pieces), 0)

    def size(at: ChunkName) -> int:
        return (chunks[at][-1].last - chunks[at][0].first) * sizes[at[0]]

    for at in sorted(chunks, key=lambda at: (len(chunks[at]) > 1, -size(at), at)):
        rank = min((piece.rank for piece in chunks[at]), key=lambda rank: (loads[rank], rank))
        dealt[at] = rank
        loads[rank] += size(at)
    return dealt


class TensorDealing:
    """The chunks of the tensors of `forms`, each tensor divided by rows over the ranks of `group`.

    Example::

        dealing = TensorDealing({"w": ("BF16", (49152, 576))}, group)
        mine = dealing.chunks(lambda name: rows[name])
    """

    def __init__(self, forms: Mapping[str, Form], group: RankGroup) -> None:
        self._group = group
        self._sizes = {name: ITEMSIZES[dtype] for name, (dtype, _) in forms.items()}
        self._starts = {name: _first_element(shape, group) for name, (_, shape) in forms.items()}
        self._pieces = {
            (name, index): pieces
            for name, (_, shape) in sorted(forms.items())
            for index, pieces in enumerate(pieces_of(shape, group.count))
        }
        self._owners = owners(self._pieces, self._sizes)

    def chunks(self, rows: Callable[[str], Tensor]) -> dict[ChunkName, NDArray[np.uint8]]:
        """Return the chunks that this rank publishes. All ranks must call it together; `rows` gives a tensor's own rows as published."""
        mine: dict[ChunkName, NDArray[np.uint8]] = {}
        for name, group in itertools.groupby(self._pieces.items(), lambda item: item[0][0]):
            own = rows(name).reshape(-1).view(torch.uint8)
            for at, pieces in group:
                found = self._collected(at, pieces, own)
                if found is not None:
                    mine[at] = found.numpy()
        return mine

    def _collected(self, at: ChunkName, pieces: list[TensorPiece], own: Tensor) -> Tensor | None:
        """Return the chunk on its owner, None elsewhere. All ranks visit the chunks in the same order, so that they cannot deadlock."""
        owner, size, start = self._owners[at], self._sizes[at[0]], self._starts[at[0]]
        if self._group.rank != owner:
            for piece in pieces:
                if piece.rank == self._group.rank:
                    self._group.send(own[(piece.first - start) * size : (piece.last - start) * size].clone(), owner)
            return None
        first = pieces[0].first
        whole = torch.empty((pieces[-1].last - first) * size, dtype=torch.uint8)
        for piece in pieces:
            part = whole[(piece.first - first) * size : (piece.last - first) * size]
            if piece.rank == owner:
                part.copy_(own[(piece.first - start) * size : (piece.last - start) * size])
            else:
                self._group.receive(part, piece.rank)
        return whole


def _first_element(shape: tuple[int, ...], group: RankGroup) -> int:
    return rows_of(shape[0], group.count, group.rank)[0] * math.prod(shape[1:])


# ---------------------------------------------------------------- master weights


class ShardedMasters:
    """This rank's rows of the `MasterWeights`. Only the first rank is given reference weights; each rank publishes its part."""

    def __init__(self, policy: ShardedPolicy, dtype: torch.dtype, config: TrainConfig, group: RankGroup) -> None:
        self._group, self._served, self._decay = group, policy.served, config.weight_decay
        self._tensors = named_tensors(policy.model)
        self._parameters = {name: _as_dtensor(parameter) for name, parameter in policy.model.named_parameters()}
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._computed = {name: parameter.to_local().detach() for name, parameter in self._parameters.items()}
        self._in_place = all(self._served[name] == dtype for name in self._computed)
        beside = self._computed if self._in_place else {name: rows.clone() for name, rows in self._computed.items()}
        self._set_masters(beside)
        self._forms = {name: (dtype_name(self._served[name]), shape) for name, shape in self.shapes().items()}
        self._dealing = TensorDealing(self._forms, group)
        self._stashed: dict[str, Tensor] | None = None
        self._moments = {kind: {name: torch.zeros_like(rows) for name, rows in beside.items()} for kind in MOMENTS}
        self._optimizer = adamw([rows for rows in self._masters.values() if rows.numel()], config)
        self.set_steps(0)
        self.round_into_model()

    def _set_masters(self, rows: Mapping[str, Tensor]) -> None:
        self._masters = {name: nn.Parameter(each, requires_grad=False) for name, each in rows.items()}

    def set_steps(self, steps: int) -> None:
        """Tell AdamW how many steps its moments have seen."""
        for name, rows in self._masters.items():
            if rows.numel():
                kinds = {kind: self._moments[kind][name] for kind in MOMENTS}
                self._optimizer.state[rows] = {"step": torch.tensor(float(steps), device=rows.device), **kinds}

    def forget_mean(self) -> None:
        """Drop the momentum."""
        for rows in self._moments["exp_avg"].values():
            rows.zero_()

    # ------------------------------------------------------------ gradients

    def clear_grads(self) -> None:
        """Reset the gradient sums, including half-finished ones."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _grads(self) -> dict[str, Tensor]:
        """Return this rank's rows of the summed gradient, without parameters that no token reached."""
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        return {name: grad.to_local() for name, grad in found.items() if isinstance(grad, DTensor)}

    def grad_norm(self) -> float:
        """Return the global L2 norm of the summed gradient; NaN or infinite if any entry is."""
        total = sum_of_squares(self._grads().values()).view(1)
        return math.sqrt(square) if (square := float(self._group.total(total))) >= 0 else square  # a NaN stays a NaN

    def momentum_product(self) -> float:
        """Return the inner product of the summed gradient with AdamW's momentum, the mean of earlier gradients."""
        mean = self._moments["exp_avg"]
        return float(
            self._group.total(inner_product((grad, mean[name]) for name, grad in self._grads().items()).view(1))
        )

    @torch.no_grad()
    def update(self, *, learning_rate: float, scale: float) -> None:
        """Take one AdamW step with the gradient times `scale`, and round the new masters into the compute model."""
        for name, grad in self._grads().items():
            self._masters[name].grad = grad.mul_(scale) if scale != 1.0 else grad
        if self._decay:
            for name, parameter in self._parameters.items():
                if parameter.dim() > 1:
                    self._masters[name].mul_(1 - learning_rate * self._decay)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        for rows in self._masters.values():
            rows.grad = None
        self.clear_grads()
        self.round_into_model()

    # ------------------------------------------------------------ compute model

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Write the published rounding of the masters into the compute model."""
        if not self._in_place:
            for name, rows in self._masters.items():
                self._computed[name].copy_(rows.to(self._served[name]))
        elif self._stashed is not None:
            for name, rows in self._stashed.items():
                self._computed[name].copy_(rows)
            self._stashed = None

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Copy the compute model's weights to the masters."""
        if not self._in_place:
            for name, rows in self._masters.items():
                rows.copy_(self._computed[name])
        self._stashed = None

    @torch.no_grad()
    def put(self, weights: Weights) -> None:
        """Write other weights, which the first rank has, into the compute model. Raises BadWeights, with the model unchanged."""
        wrong = next((name for name, p in self._parameters.items() if not _fits(name, p, weights)), None)
        if self._group.any(self._group.rank == 0 and wrong is not None):
            raise BadWeights(f"the reference weights have no tensor {wrong!r} of this model's shape")
        if self._in_place and self._stashed is None:
            self._stashed = {name: rows.clone() for name, rows in self._computed.items()}
        for name, parameter in self._parameters.items():
            self._computed[name].copy_(self._scattered(name, parameter, weights))

    def _scattered(self, name: str, parameter: Tensor, weights: Weights) -> Tensor:
        """Return this rank's rows of a tensor that the first rank has, sent in the published dtype."""
        count, rank = self._group.count, self._group.rank
        if rank:
            mine = torch.empty(self._computed[name].shape, dtype=self._served[name])
            if mine.numel():
                self._group.receive(mine, 0)
            return mine
        whole = values_of(weights[name]).to(self._served[name])
        for other in range(1, count):
            first, last = rows_of(len(parameter), count, other)
            if last > first:
                self._group.send(whole[first:last].contiguous(), other)
        return whole[slice(*rows_of(len(parameter), count, 0))]

    def publish(self) -> WeightPart:
        """Return the chunks that this rank publishes, from the masters in the published dtypes."""
        buffers = {name: bytes_of(name, self._rounded(name)) for name in self._tensors.keys() - self._parameters.keys()}
        chunks = self._dealing.chunks(self._rounded)
        if self._group.rank == 0:  # every rank has the buffers
            chunks |= {at: chunk for name, array in buffers.items() for at, chunk in chunks_of(name, array)}
        forms = {name: (array.dtype, array.shape) for name, array in buffers.items()}
        return WeightPart(self._forms | forms, chunks)

    def _rounded(self, name: str) -> Tensor:
        """Return this rank's rows, or a buffer, in the published dtype, on the host."""
        source = self._masters[name].detach() if name in self._masters else self._tensors[name]
        return source.to(self._served[name], copy=True).cpu()

    def gather(self) -> Weights:
        """Return the masters in the published dtypes as fresh bytes, on the first rank; {} on the others."""
        gathered = {name: self._gathered(name, tensor) for name, tensor in self._tensors.items()}
        return {name: array for name, array in gathered.items() if array is not None}

    def _gathered(self, name: str, tensor: Tensor) -> WeightArray | None:
        mine = self._rounded(name)
        if name not in self._masters:  # a buffer, which every rank has
            return bytes_of(name, mine) if self._group.rank == 0 else None
        if self._group.rank:
            if mine.numel():
                self._group.send(mine, 0)
            return None
        whole = torch.empty(tensor.shape, dtype=mine.dtype)
        for rank in range(self._group.count):
            first, last = rows_of(len(whole), self._group.count, rank)
            if rank == 0:
                whole[first:last] = mine
            elif last > first:
                self._group.receive(whole[first:last], rank)
        return bytes_of(name, whole)

    # ------------------------------------------------------------ checkpoints

    def arrays(self) -> tuple[Arrays, Arrays, RankPart]:
        """Return views (from a GPU: copies) of this rank's rows of the masters and of the moments, and which rows they are."""
        weights = {name: rows.detach().cpu().numpy() for name, rows in self._masters.items()}
        moments = {
            f"{kind}/{name}": rows.cpu().numpy() for kind in MOMENTS for name, rows in self._moments[kind].items()
        }
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        firsts = {name: rows_of(shape[0], self._group.count, self._group.rank)[0] for name, shape in shapes.items()}
        return weights, moments, RankPart(shapes=shapes, firsts=firsts)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load this rank's rows of a checkpoint, written by any number of ranks."""
        for name, parameter in self._parameters.items():
            span = rows_of(len(parameter), self._group.count, self._group.rank)
            put_array(self._masters[name].detach(), checkpoint.rows("weights", name, *span))
            for kind in MOMENTS:
                put_array(self._moments[kind][name], checkpoint.rows(kind, name, *span))
        self.set_steps(checkpoint.step)
        self._stashed = None
        self.round_into_model()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return parameter name -> shape of the whole."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}


def _as_dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)  # FSDP2 shards all parameters
    return parameter


def _fits(name: str, parameter: Tensor, weights: Weights) -> bool:
    return name in weights and weights[name].shape == tuple(parameter.shape)
