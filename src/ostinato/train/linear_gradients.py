"""Linear layers, embeddings and gated layers that add their weights' gradients directly to the sums.

Autograd would create each weight's gradient as a separate tensor, copy it into the weight's layout, and add it to the sum: for a tied
embedding twice, each time as large as the vocabulary. Here the product is added to the sum as it is computed. Forward passes call the
same functions as the model's own modules, so their bits stay the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.model.experts import Activation, GatedMLP, fill_gradients, gated
from ostinato.model.linear import Linear, gradient_product, has_bf16_products, linear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def sum_gradients_into(model: nn.Module, sums: Mapping[str, Tensor]) -> None:
    """Make the plain linear layers, embeddings and gated layers of `model` add their weights' gradients to the fp32 `sums`, by name.

    Other parameters, and biases, get their gradients from autograd as usual. With gradients disabled the modules compute as before.
    """
    by_weight = {id(parameter): sums[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        if type(module) is Linear:
            _replace_forward(module, partial(_linear, module, linear, by_weight[id(module.weight)]))
        elif type(module) is nn.Linear:  # by torch's kernels
            _replace_forward(module, partial(_linear, module, F.linear, by_weight[id(module.weight)]))
        elif is_plain_embedding(module):
            _replace_forward(module, partial(_embedding, module, by_weight[id(module.weight)]))
        elif isinstance(module, GatedMLP) and type(module.down_proj) is Linear:
            _replace_forward(module, partial(_gated_layer, module, by_weight[id(module.down_proj.weight)]))


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    cast("Any", module).forward = forward  # hooks on the module are called as before


def _add_product(total: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Total [O, I] += grad^T x."""
    if grad_NO.dtype == torch.float32:
        total.addmm_(grad_NO.t(), x_NI)
    elif grad_NO.is_cpu and not has_bf16_products():
        total.addmm_(grad_NO.t().float(), x_NI.float())
    else:
        total.add_(grad_NO.t().mm(x_NI))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------- linear layers


class _Linear(torch.autograd.Function):
    """`weight` is an argument so that autograd calls `backward`; its gradient goes to `total`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total, ctx.has_bias = total, bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_NO = _flat(grads[0])
        _add_product(ctx.total, grad_NO, _flat(x))
        grad_x = gradient_product(grad_NO, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, grad_NO.sum(0) if ctx.has_bias else None, None, None


def _linear(module: nn.Linear, product: Product, total: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return product(x, module.weight, module.bias)
    return _Linear.apply(x, module.weight, module.bias, total, product)  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------- embeddings


def is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return True if a module is an embedding that only looks up rows."""
    if type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _add_rows(total: Tensor, rows_N: Tensor, grad_ND: Tensor) -> None:
    """Add each gradient to its row of `total`, in the same order every time."""
    # on a GPU `index_put_` sorts before it adds, while `index_add_` adds in the order of arrival
    if total.is_cuda:
        total.index_put_((rows_N,), grad_ND, accumulate=True)
    else:
        total.index_add_(0, rows_N, grad_ND)


class _EmbeddingLookup(torch.autograd.Function):
    """Adds to `.grad` itself. Autograd would keep the gradient of a tied head, as large as this one, until this one is computed.

    `asked` makes autograd call `backward`; the weight is in a tuple, where autograd does not see it.
    """

    @staticmethod
    def forward(ctx: Any, asked: Tensor, ids: Tensor, rest: tuple[nn.Parameter, int | None]) -> Tensor:
        del asked
        ctx.save_for_backward(ids)
        ctx.rest = rest
        weight, padding = rest
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,), (weight, padding) = ctx.saved_tensors, ctx.rest
        known_K, place_N = ids.flatten().unique(return_inverse=True)
        rows_KD = torch.zeros(len(known_K), weight.shape[1], device=ids.device)
        _add_rows(rows_KD, place_N, _flat(grads[0]).float())
        if padding is not None:  # the padding's embedding is a constant
            rows_KD[known_K == padding] = 0
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, known_K, rows_KD.to(weight.dtype))
        return None, None, None


def embedding_lookup(ids: Tensor, weight: nn.Parameter, padding: int | None) -> Tensor:
    """Return rows of an embedding, under autograd: a token's gradients are summed in fp32, rounded once to the weight's dtype, and added to
    ``weight.grad``; `torch.autograd.grad` does not see them.

    Autograd's own backward sums them in the weight's dtype: in bf16 a frequent token learns too little or too much.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(ids, weight, padding)
    asked = torch.zeros((), requires_grad=True)
    return _EmbeddingLookup.apply(asked, ids, (weight, padding))  # pyright: ignore[reportReturnType]


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows_M: Tensor) -> Tensor:
        ctx.save_for_backward(rows_M)
        ctx.size, ctx.dtype = len(x_ND), x_ND.dtype
        return x_ND.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows_M,) = ctx.saved_tensors
        total_ND = torch.zeros(ctx.size, grads[0].shape[1], device=rows_M.device)
        _add_rows(total_ND, rows_M, grads[0].float())
        return total_ND.to(ctx.dtype), None


def select_rows(x_ND: Tensor, rows_M: Tensor) -> Tensor:
    """Return rows of a tensor, under autograd; a row that is selected several times gets the sum of its gradients, in a fixed order.

    Autograd's own backward adds them in the order of arrival on a GPU.
    """
    if not torch.is_grad_enabled():
        return x_ND.index_select(0, rows_M)
    return _SelectRows.apply(x_ND, rows_M)  # pyright: ignore[reportReturnType]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, total: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rest = total, padding
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,), (total, padding) = ctx.saved_tensors, ctx.rest
        ids_N, grad_ND = ids.flatten(), _flat(grads[0]).float()
        if padding is not None:  # the padding's embedding is a constant
            ids_N, grad_ND = ids_N[ids_N != padding], grad_ND[ids_N != padding]
        _add_rows(total, ids_N, grad_ND)
        return None, None, None, None


def _embedding(module: nn.Embedding, total: Tensor, ids: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.embedding(ids, module.weight, module.padding_idx)
    return _Embedding.apply(ids, module.weight, total, module.padding_idx)  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------- gated layers


class _GatedDown(torch.autograd.Function):
    """down(activation(gate) up), keeping only gate and up for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activation: Activation, weight: Tensor, bias: Tensor | None, total: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.total, ctx.has_bias = activation, total, bias is not None
        return linear(gated(gate, up, activation), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weight = ctx.saved_tensors
        grad_NO = _flat(grads[0])
        inner_NI = gradient_product(grad_NO, weight)
        hidden_NI, d_gate_NI = torch.empty_like(inner_NI), torch.empty_like(inner_NI)
        filled = {"again": hidden_NI, "d_gate": d_gate_NI, "d_up": inner_NI}
        fill_gradients(_flat(gate), _flat(up), inner_NI, ctx.activation, **filled)
        _add_product(ctx.total, grad_NO, hidden_NI)
        d_bias = grad_NO.sum(0) if ctx.has_bias else None
        return d_gate_NI.view(gate.shape), inner_NI.view(up.shape), None, None, d_bias, None


def _gated_layer(module: GatedMLP, total: Tensor, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if not torch.is_grad_enabled():
        return module.down_proj(gated(gate, up, module.activation))
    down = module.down_proj
    return _GatedDown.apply(gate, up, module.activation, down.weight, down.bias, total)  # pyright: ignore[reportReturnType]
