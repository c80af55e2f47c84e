"""The one experts function of every mixture-of-experts model: a token's output depends on that token alone, to the bit.

Registered in the library's ExpertsInterface, so engine and trainer run the same Hugging Face module. Three rules make it exact:
a product's row depends on that row alone, nothing is shared between tokens but weights, and a token's expert outputs are added one after
another in the order of their expert ids (never in arrival order or order of probability).

On a GPU, where exactness is not promised, all experts' products are one grouped product, and the host waits for no row count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.moe import (
    ExpertsInterface,
    _default_apply_gate,  # pyright: ignore[reportPrivateUsage]
)

from ostinato.core.errors import BadConfig
from ostinato.model.gated_mlp import Activation, gated
from ostinato.model.linear import Panels, can_lay_out, in_panels, linear, multiply

IMPLEMENTATION = "ostinato"
"""Name under which the function is registered."""
# on later ones the gradient of an expert without rows is not zero (github.com/pytorch/pytorch/issues/172439)
_HOPPER = 9
_ACTIVATIONS: dict[type, Activation] = {
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",  # the library has classes of its own
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that `experts` serves, in layer order; empty for a dense model."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


@dataclass(frozen=True)
class _Plan:
    """The layout of rows: one for each of S = N x k pairs of (token, slot), in ascending order of expert."""

    sizes_E: Tensor  # rows of each expert; their sum is S
    token_S: Tensor  # which token fills a row
    row_S: Tensor  # the row that holds the output of (token, slot), slots in ascending order of expert id

    def hit(self) -> list[tuple[int, int]]:
        """The experts that were hit, ascending, with their rows."""
        return [(expert, size) for expert, size in enumerate(cast("list[int]", self.sizes_E.tolist())) if size]


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that the library calls in each layer: [N, D], ids [N, k] and gates [N, k] in, [N, D] in the dtype of the input out.

    Slot products and their sum are fp32 (wider if the model is), rounded once. Works under autograd and inference_mode.
    Raises BadConfig for experts with a weight layout that the library's own functions do not know either.
    """
    _check(module)
    tokens, slots = top_k_index.shape
    if tokens == 0:
        return torch.zeros_like(hidden_states)
    ids_Nk, order_Nk = top_k_index.sort(dim=-1, stable=True)
    gates_Nk = top_k_weights.gather(-1, order_Nk)
    plan = _plan(ids_Nk, module.num_experts)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    x = _linear(module, first, hidden_states.index_select(0, plan.token_S), plan)
    x = _activate(module, x)
    y = _linear(module, "down_proj", x, plan)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    slots_NkD = y.index_select(0, plan.row_S).view(tokens, slots, -1).to(wide)
    total, *rest = (slots_NkD * gates_Nk.to(wide).unsqueeze(-1)).unbind(1)
    for part in rest:
        total = total + part  # one slot after another: a reduction kernel may choose its own order
    return total.to(hidden_states.dtype)


ExpertsInterface.register(IMPLEMENTATION, experts)


def _plan(ids_Nk: Tensor, experts: int) -> _Plan:
    flat_S = ids_Nk.reshape(-1)
    order_S = torch.argsort(flat_S, stable=True)
    chosen_S = flat_S[order_S]
    if (
        chosen_S.is_cpu and int(chosen_S[-1]) >= experts
    ):  # on a GPU the index below fails instead, and nothing is waited for
        raise BadConfig(f"the router chose expert {int(chosen_S[-1])} of {experts}: router and experts do not fit")
    ends_E = torch.searchsorted(chosen_S, torch.arange(experts, device=chosen_S.device), right=True)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    at_S = torch.arange(len(flat_S), device=flat_S.device)
    row_S = torch.empty_like(at_S).index_copy_(0, order_S, at_S)
    return _Plan(sizes_E, order_S // ids_Nk.shape[1], row_S)


def _linear(module: Any, name: str, x_SD: Tensor, plan: _Plan) -> Tensor:
    """Each expert's rows times its own weight (plus its bias): [S, in] -> [S, out]."""
    stacked: Tensor = getattr(module, name)
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    if x_SD.is_cuda and can_group(stacked) and torch.cuda.get_device_capability(x_SD.device)[0] == _HOPPER:
        return grouped(x_SD, stacked if module.is_transposed else stacked.transpose(1, 2), bias, plan.sizes_E)
    laid: dict[str, list[Panels]] = getattr(module, "ostinato_panels", {})
    weights, biases, hit = _by_expert(stacked), None if bias is None else _by_expert(bias), plan.hit()
    parts: list[Tensor] = []
    for (expert, _), x in zip(hit, x_SD.split([size for _, size in hit]), strict=True):
        if name in laid:
            part = multiply(x, laid[name][expert])
        else:
            part = linear(x, weights[expert].t() if module.is_transposed else weights[expert])
        parts.append(part if biases is None else part + biases[expert])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@torch.inference_mode()
def lay_out_experts(model: nn.Module) -> None:
    """Lay the experts' weights out for the kernels once, in place of their parameters: for inference on the CPU."""
    for module in experts_of(model):
        laid: dict[str, list[Panels]] = {}
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            stacked: Tensor | None = getattr(module, name, None)
            if isinstance(stacked, Tensor) and stacked.dim() == 3 and can_lay_out(stacked):
                turned = bool(cast("Any", module).is_transposed)
                laid[name] = [in_panels(weight.t() if turned else weight) for weight in stacked.detach()]
                setattr(module, name, nn.Parameter(stacked.new_empty(0), requires_grad=False))
        cast("Any", module).ostinato_panels = laid


def can_group(stacked: Tensor) -> bool:
    """Whether torch has a grouped product (2.8 has not) and it takes these weights [E, *, *]: bf16, rows and columns of whole 16 bytes."""
    return (
        hasattr(F, "grouped_mm") and stacked.dtype == torch.bfloat16 and not any(size % 8 for size in stacked.shape[1:])
    )


def grouped(x_SD: Tensor, weights_EDO: Tensor, bias_EO: Tensor | None, sizes_E: Tensor) -> Tensor:
    """The rows of each expert, ascending, times its weight (plus its bias), in one product: [S, D] -> [S, O]."""
    y_SO = F.grouped_mm(x_SD, weights_EDO, offs=sizes_E.cumsum(0).to(torch.int32))
    if bias_EO is None:
        return y_SO
    owners_S = torch.arange(len(sizes_E), device=x_SD.device).repeat_interleave(sizes_E, output_size=len(x_SD))
    return y_SO + bias_EO[owners_S]


def _activate(module: Any, x_SD: Tensor) -> Tensor:
    if not module.has_gate:
        return module.act_fn(x_SD)
    activation = gate_activation(module)
    if x_SD.is_cpu and activation is not None:
        gate, up = x_SD.chunk(2, -1)
        return gated(gate, up, activation)
    return module._apply_gate(x_SD)


def gate_activation(module: Any) -> Activation | None:
    """The activation of the experts' gates if our kernel computes it on the CPU."""
    plain = module.has_gate and type(module)._apply_gate is _default_apply_gate
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None))) if plain else None


def _by_expert(stacked: Tensor) -> Sequence[Tensor] | Tensor:
    # indexing would make autograd build and add a gradient of all experts' size for each expert hit; unbind stacks them once
    return stacked.unbind(0) if torch.is_grad_enabled() and stacked.requires_grad else stacked


def _check(module: Any) -> None:
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if module.has_bias else []
    missing = [name for name in names if not isinstance(getattr(module, name, None), Tensor)]
    if missing:
        raise BadConfig(
            f"{type(module).__name__} holds no stacked {', '.join(missing)}: load the checkpoint unquantised, "
            "or choose a model whose experts transformers keeps as one tensor per projection"
        )
    if not getattr(module, names[0]).is_floating_point() or getattr(module, names[0]).element_size() < 2:
        raise BadConfig(f"{type(module).__name__} has quantised experts: load the checkpoint as bfloat16 or float32")
    if module._is_expert_parallel:
        raise BadConfig(f"{type(module).__name__} is split over devices: load the model without expert parallelism")
