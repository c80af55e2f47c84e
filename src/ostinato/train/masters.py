"""fp32 master weights, their gradients and AdamW, in one process (over several ranks: `sharding.masters`).

Data flow: backward adds each parameter's gradient to `sums` (fp32, across micro-batches) -> `update` -> the masters change ->
`round_into_model` -> `publish`. The compute copy is always the published rounding, in bf16 and in fp32 compute alike:
gradients are taken at the weights that serve people.

In one process all masters are in one flat tensor, so the norm, AdamW and a checkpoint are one pass over memory each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadWeights
from ostinato.core.weights import Weights
from ostinato.model.tensors import bytes_of, named_tensors, on_host, put_array, values_of
from ostinato.train.checkpoint import Arrays, Checkpoint
from ostinato.train.config import TrainConfig

if TYPE_CHECKING:
    from ostinato.train.sharding.masters import ShardedMasters

MasterWeights: TypeAlias = "Masters | ShardedMasters"
"""fp32 weights, their summed gradients and AdamW's moments, next to the compute model, which has the published rounding.

With several ranks, all of them call the same methods in the same order.
"""

# ---------------------------------------------------------------- gradient norm


_ROW_SIZE = 1024


def sum_of_squares(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all entries of all fp32 tensors, as a float64 scalar; NaN or infinite if any entry is.

    Summed in short rows, because torch accumulates a norm in fp32, which was 1.7% too small on 135M entries.
    """
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        flat = part.reshape(-1)
        whole = len(flat) - len(flat) % _ROW_SIZE
        for rows in (flat[:whole].view(-1, _ROW_SIZE), flat[whole:].view(1, -1)):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum().to(total.device)
    return total


_CHUNK_SIZE = 1 << 20


def inner_product(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of products of all entries of pairs of fp32 tensors, as a float64 scalar; chunks are summed in fp32."""
    total = torch.zeros((), dtype=torch.float64)
    for one, other in pairs:
        for a, b in zip(one.reshape(-1).split(_CHUNK_SIZE), other.reshape(-1).split(_CHUNK_SIZE), strict=True):
            total += torch.dot(a, b).double().to(total.device)
    return total


# ---------------------------------------------------------------- master weights


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names for its two moments."""


def adamw(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Create the optimizer. It decays no weights, because `update` decays the matrices."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, eps=config.epsilon, weight_decay=0.0, fused=True
    )


class Masters:
    """The trainable state of a model: flat fp32 weights, gradient sums and AdamW moments, with views by parameter name.

    `served` is the dtype in which each of the model's tensors is published: an architecture may keep some in fp32 in any case.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, served: Mapping[str, torch.dtype]) -> None:
        self._model, self._served = model, served
        self._decay = config.weight_decay
        self._parameters = dict(model.named_parameters())
        total = sum(p.numel() for p in self._parameters.values())
        self.flat = nn.Parameter(torch.empty(total, dtype=torch.float32, device=model.device), requires_grad=False)
        self.grads = torch.zeros(total, dtype=torch.float32, device=model.device)
        self.weights, self.sums = self._views(self.flat.data), self._views(self.grads)
        for name, parameter in self._parameters.items():
            self.weights[name].copy_(parameter.detach())
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_GradientAccumulator(self.sums[name]))
        self._optimizer = adamw([self.flat], config)
        self.moments = (torch.zeros_like(self.flat.data), torch.zeros_like(self.flat.data))
        self.set_steps(0)
        self.round_into_model()

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self._parameters.items():
            views[name] = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        return views

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return parameter name -> shape, in the order of the flat tensors."""
        return {name: tuple(view.shape) for name, view in self.weights.items()}

    def set_steps(self, steps: int) -> None:
        """Tell AdamW how many steps its moments have seen (its bias correction depends on it)."""
        self._optimizer.state[self.flat] = {
            "step": torch.tensor(float(steps), device=self.flat.device),
            "exp_avg": self.moments[0],
            "exp_avg_sq": self.moments[1],
        }

    def forget_mean(self) -> None:
        """Drop the momentum, AdamW's first moment."""
        self.moments[0].zero_()

    def arrays(self) -> tuple[Arrays, Arrays, None]:
        """Return views (from a GPU: copies) of the masters, and of the moments in the weights' order; None: this process has all rows."""
        moments = {name: moment.cpu().numpy() for name, moment in zip(MOMENTS, self.moments, strict=True)}
        return {name: view.cpu().numpy() for name, view in self.weights.items()}, moments, None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the masters and moments of a checkpoint of this model, written by any number of ranks."""
        for name, view in self.weights.items():
            put_array(view, checkpoint.rows("weights", name, 0, len(view)))
        for kind, flat in zip(MOMENTS, self.moments, strict=True):
            for name, view in self._views(flat).items():
                put_array(view, checkpoint.rows(kind, name, 0, len(view)))
        self.set_steps(checkpoint.step)
        self.round_into_model()

    def clear_grads(self) -> None:
        """Reset the gradient sums, including half-finished ones."""
        self.grads.zero_()
        for parameter in self._parameters.values():
            parameter.grad = None

    def grad_norm(self) -> float:
        """Return the global L2 norm of the summed gradient; NaN or infinite if any entry is."""
        return float(sum_of_squares([self.grads]).sqrt())

    def momentum_product(self) -> float:
        """Return the inner product of the summed gradient with AdamW's momentum, the mean of earlier gradients."""
        return float(inner_product([(self.grads, self.moments[0])]))

    @torch.no_grad()
    def update(self, *, learning_rate: float, scale: float) -> None:
        """Take one AdamW step with the gradient times `scale`, and round the new masters into the compute model.

        Decoupled weight decay (Loshchilov and Hutter 2019) for matrices only: a smaller norm weight or bias is not a simpler model.
        """
        if scale != 1.0:
            self.grads.mul_(scale)
        if self._decay:
            for view in self.weights.values():
                if view.dim() > 1:
                    view.mul_(1 - learning_rate * self._decay)
        self.flat.grad = self.grads
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self.flat.grad = None
        self.round_into_model()

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Write the published rounding of the masters into the compute model."""
        for name, parameter in self._parameters.items():
            master, served = self.weights[name], self._served[name]
            parameter.copy_(master if parameter.dtype == served else master.to(served))

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Copy the compute model's weights to the masters."""
        for name, parameter in self._parameters.items():
            self.weights[name].copy_(parameter)

    @torch.no_grad()
    def put(self, weights: Weights) -> None:
        """Write other weights (a reference's) into the compute model; `round_into_model` undoes it.

        Raises BadWeights, with the model unchanged, if a tensor is missing or has another size.
        """
        for name, parameter in self._parameters.items():
            if name not in weights or weights[name].shape != tuple(parameter.shape):
                raise BadWeights(f"the reference weights have no tensor {name!r} of shape {tuple(parameter.shape)}")
        for name, parameter in self._parameters.items():
            parameter.copy_(values_of(weights[name]))

    def publish(self) -> Weights:
        """Return the masters in the published dtypes as fresh bytes, which a later step cannot change."""
        tensors = {name: self.weights.get(name, tensor) for name, tensor in named_tensors(self._model).items()}
        return {name: bytes_of(name, tensor) for name, tensor in on_host(tensors, self._served).items()}

    def gather(self) -> Weights:
        """Return all masters in the published dtypes; here the same as `publish`."""
        return self.publish()


class _GradientAccumulator:
    """Adds a parameter's gradient to its fp32 sum as soon as backward has computed it, and drops the original."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._total.add_(parameter.grad)
            parameter.grad = None
