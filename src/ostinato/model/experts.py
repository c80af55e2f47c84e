"""Gated feed-forward layers (SwiGLU, GEGLU), and the experts function of all mixture-of-experts models, reproducible to the bit.

Gated layers compute down(activation(gate(x)) * up(x)) with our activation kernel. They keep the library's module tree and parameter names.

The experts function is registered in the library's ExpertsInterface, so engine and trainer run the same Hugging Face module. A token's
output depends on that token alone, by three rules: a product's row depends on that row alone, tokens share nothing but weights, and a
token's expert outputs are added one after another in the order of their expert ids (not of arrival or probability). On a GPU, where
exactness is not promised, all experts' products are one grouped product, so the host never waits for row counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.core.errors import BadConfig
from ostinato.model.backend import replace_parts
from ostinato.model.cpu import split
from ostinato.model.kernels.elementwise import activation_mul, activation_mul_gradients
from ostinato.model.linear import Panels, can_lay_out, in_panels, linear, multiply
from ostinato.model.paged import array

# ---------------------------------------------------------------- gated MLPs


_MIN_ROWS = 64  # per thread: below it a second thread costs more than it saves
_NAMES = ("gate_proj", "up_proj", "down_proj")
Activation = Literal["silu", "gelu_tanh"]
"""SiLU, or GELU in its tanh approximation ("gelu_pytorch_tanh" in the library's configurations); see `kernels.elementwise`."""


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up for two tensors of one shape [..., F] with a contiguous last axis. Works under autograd."""
    if torch.is_grad_enabled():
        result: Tensor = _Gated.apply(gate, up, activation)  # pyright: ignore[reportAssignmentType]
        return result
    return _gated(gate, up, activation)


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype)
    g, u, o, gelu = _rows(gate), _rows(up), _rows(out), activation == "gelu_tanh"
    split(len(o), lambda a, b: activation_mul(g[a:b], u[a:b], gelu, o[a:b]), least=_MIN_ROWS)
    return out


def fill_gradients(
    gate: Tensor, up: Tensor, grad: Tensor, activation: Activation, *, again: Tensor, d_gate: Tensor, d_up: Tensor
) -> None:
    """Recompute `gated(gate, up, activation)` into `again`, bit for bit; fill `d_gate` and `d_up` with the gradients, given its `grad`.

    All have one shape; the three outputs are contiguous. Each output may be `grad` itself; `again` may be `d_up` if it is not needed.
    """
    g, u, d, out, d_g, d_u = (_rows(x) for x in (gate, up, grad, again, d_gate, d_up))
    gelu = activation == "gelu_tanh"

    def work(a: int, b: int) -> None:
        activation_mul_gradients(g[a:b], u[a:b], d[a:b], gelu, out[a:b], d_g[a:b], d_u[a:b])

    split(len(g), work, least=_MIN_ROWS)


def _rows(x: Tensor) -> Any:
    return array(x.reshape(-1, x.shape[-1]))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        fill_gradients(gate, up, grads[0].contiguous(), ctx.activation, again=d_up, d_gate=d_gate, d_up=d_up)
        return d_gate, d_up, None


class GatedMLP(nn.Module):
    """SwiGLU, or GEGLU with GELU (Shazeer 2020, 2002.05202). Keeps the three linear layers of the module that it replaces."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        for name in _NAMES:
            setattr(self, name, getattr(mlp, name))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


@torch.no_grad()
def replace_mlps(model: nn.Module) -> int:
    """Replace every feed-forward layer of the model that computes the same as `GatedMLP` by it; return how many.

    Whether a module computes the same is tested by running it, not guessed from its name.
    """
    known: dict[tuple[type, str], Activation | None] = {}

    def ours(child: nn.Module) -> GatedMLP | None:
        if sorted(part for part, _ in child.named_children()) != sorted((*_NAMES, "act_fn")):
            return None
        kind = (type(child), str(child.act_fn))
        if kind not in known:
            known[kind] = _activation_of(child)
        activation = known[kind]
        return None if activation is None else GatedMLP(child, activation)

    return replace_parts(model, ours)


def _activation_of(mlp: nn.Module) -> Activation | None:
    """Return the activation with which a small layer of this class equals ours up to rounding, for random weights; None if none does."""
    if any(not isinstance(getattr(mlp, name), nn.Linear) for name in _NAMES):
        return None
    theirs = copy.copy(mlp)  # same class and settings, but with small layers
    vars(theirs)["_modules"] = dict(mlp.named_children())
    source = torch.Generator().manual_seed(0)
    for name, (inputs, outputs) in zip(_NAMES, ((8, 24), (8, 24), (24, 8)), strict=True):
        layer = nn.Linear(inputs, outputs, dtype=torch.float32, device="cpu")
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float32))
        setattr(theirs, name, layer)
    # explicit dtype: another thread may change the default
    x = torch.randn(5, 8, generator=source, dtype=torch.float32) * 3
    try:
        expected = theirs(x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    for activation in get_args(Activation):
        if torch.allclose(GatedMLP(theirs, activation)(x), expected, rtol=1e-4, atol=1e-5):
            return activation
    return None


# ---------------------------------------------------------------- experts


IMPLEMENTATION = "ostinato"
"""Name under which `load` registers `experts`."""
# major compute capability; on later GPUs the gradient of an expert without rows is not zero (github.com/pytorch/pytorch/issues/172439)
_HOPPER = 9


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the experts modules of `model`, in layer order; empty for a dense model."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


@dataclass(frozen=True)
class _Plan:
    """The row layout of the experts' products: one row per pair (token, slot), S = N x k in all, sorted by expert."""

    sizes_E: Tensor  # number of rows of each expert; their sum is S
    token_S: Tensor  # the token of each row
    row_S: Tensor  # the row of each (token, slot), slots in ascending order of expert id

    def hit(self) -> list[tuple[int, int]]:
        """Return the experts with at least one row, ascending, with their numbers of rows."""
        return [(expert, size) for expert, size in enumerate(cast("list[int]", self.sizes_E.tolist())) if size]


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a layer's experts, as the library calls it: states [N, D], expert ids [N, k] and gates [N, k] -> [N, D] in the input's dtype.

    Gated outputs and their sum are fp32 (wider if the model is), and rounded once. Works under autograd and inference_mode.
    Raises BadConfig for experts with a weight layout that the library's own functions do not support either.
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
        total = total + part  # in a fixed order, which a reduction kernel would not guarantee
    return total.to(hidden_states.dtype)


def _plan(ids_Nk: Tensor, experts: int) -> _Plan:
    flat_S = ids_Nk.reshape(-1)
    order_S = torch.argsort(flat_S, stable=True)
    chosen_S = flat_S[order_S]
    # checked on the CPU only: on a GPU it would force a synchronisation, and the indexing below fails instead
    if chosen_S.is_cpu and int(chosen_S[-1]) >= experts:
        raise BadConfig(f"the router chose expert {int(chosen_S[-1])} of {experts}: router and experts do not fit")
    ends_E = torch.searchsorted(chosen_S, torch.arange(experts, device=chosen_S.device), right=True)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    at_S = torch.arange(len(flat_S), device=flat_S.device)
    row_S = torch.empty_like(at_S).index_copy_(0, order_S, at_S)
    return _Plan(sizes_E, order_S // ids_Nk.shape[1], row_S)


def _linear(module: Any, name: str, x_SD: Tensor, plan: _Plan) -> Tensor:
    """Multiply each expert's rows by its own weight, and add its bias: [S, in] -> [S, out]."""
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
    """Replace the experts' parameters by weights in panels for the kernels, once: for inference on the CPU."""
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
    """Return whether torch has a grouped product (not in 2.8) that supports these weights [E, *, *]: bf16, sizes in multiples of 8."""
    return (
        hasattr(F, "grouped_mm") and stacked.dtype == torch.bfloat16 and not any(size % 8 for size in stacked.shape[1:])
    )


def grouped(x_SD: Tensor, weights_EDO: Tensor, bias_EO: Tensor | None, sizes_E: Tensor) -> Tensor:
    """Multiply the rows of each expert, sorted by expert, by its weight and add its bias, in one product: [S, D] -> [S, O]."""
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
    """Return the activation of the experts' gates if our CPU kernel supports it, else None."""
    plain, activations = _of_library()
    if not module.has_gate or type(module)._apply_gate is not plain:
        return None
    return activations.get(type(getattr(module, "act_fn", None)))


@lru_cache
def _of_library() -> tuple[Any, dict[type, Activation]]:
    """Return the library's default gate function, and our activations by the library's activation class.

    Imported here, because the import takes 2 s and only models with experts need it.
    """
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate  # pyright: ignore[reportPrivateUsage]

    silu, gelu = type(ACT2FN["silu"]), type(ACT2FN["gelu_pytorch_tanh"])
    return _default_apply_gate, {nn.SiLU: "silu", silu: "silu", gelu: "gelu_tanh"}


def _by_expert(stacked: Tensor) -> Sequence[Tensor] | Tensor:
    # with indexing, autograd would build and add a gradient of all experts' size per expert; with unbind it stacks them once
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
