"""Portable operations: in the library's routers and rotary embeddings, replaces torch operations whose bits depend on the CPU by our own.

Elementwise additions, products, divisions and roundings are the same everywhere (IEEE 754). Matrix products, sums, exponentials, sines
and cosines are not: a library chooses their order and their polynomials by the CPU's vector width. `library_operations` traces a pass to
find the operations of this kind that a model still uses; its numerics contract then names the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ostinato.model.kernels.elementwise import cosines, powers, sigmoids, sines, softmax_rows
from ostinato.model.linear import linear
from ostinato.model.paged import array

_SAME_EVERYWHERE = frozenset(
    """
    abs add alias amax amin any arange argmax argsort as_strided bitwise_and bitwise_not bitwise_or bucketize cat ceil chunk clamp
    clamp_min clone contiguous copy copy_ cumsum detach diff div embedding empty empty_like empty_strided eq expand fill fill_ flip floor
    full full_like gather ge gt index index_add index_copy index_copy_ index_put index_select item le lift_fresh local_scalar_dense
    logical_and logical_not logical_or lt masked_fill masked_fill_ max maximum min minimum mul ne neg new_empty new_empty_strided new_ones
    new_zeros ones ones_like pad constant_pad_nd permute reciprocal relu remainder repeat reshape round rsub scalar_tensor scatter
    scatter_ searchsorted select sign slice sort split split_with_sizes sqrt square squeeze stack sub t to _to_copy topk transpose tril
    resolve_conj resolve_neg promote_types type_as dropout
    triu unbind unsafe_view _unsafe_view unfold unsqueeze view where zeros zeros_like isnan isinf _local_scalar_dense
    """.split()  # noqa: SIM905
)
"""ATen operations whose results do not depend on the vector width: moves, comparisons, integer sums, and single IEEE operations."""


class PortableOperations(TorchFunctionMode):
    """A context in which our kernels compute the operations on CPU tensors that they define."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ours = _OURS.get(func)
        if ours is not None:
            answer = ours(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight, bias) if input.is_cpu and input.dtype == weight.dtype else NotImplemented


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Tensor:
    return NotImplemented if scales or input.dim() != 1 else _linear(mat1, mat2.t(), input)


def _power_of(exponent: Any, base: Any) -> Any:
    """Return ``base ** exponent`` for a positive number and a tensor, as in the frequencies of rotary embeddings."""
    if not isinstance(base, int | float) or not 0 < base < 1e30 or not isinstance(exponent, Tensor):
        return NotImplemented
    if not exponent.is_cpu or exponent.dtype != torch.float32 or exponent.requires_grad:
        return NotImplemented
    out = torch.empty_like(exponent, memory_format=torch.contiguous_format)
    powers(float(base), array(exponent.contiguous().view(-1)), array(out.view(-1)))
    return out


def _power(base: Any, exponent: Any) -> Any:
    return _power_of(exponent, base)


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row, descending; of ties the first."""
    if not largest or not sorted or dim not in (-1, input.dim() - 1):
        return NotImplemented
    values, ids = input.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def _of_floats(kernel: Callable[[Any, Any], None]) -> Callable[[Tensor], Tensor]:
    def compute(input: Tensor) -> Tensor:
        if not input.is_cpu or input.dtype != torch.float32 or (torch.is_grad_enabled() and input.requires_grad):
            return NotImplemented
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        kernel(array(input.contiguous().view(-1)), array(out.view(-1)))
        return out

    return compute


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    del _stacklevel
    if not input.is_cpu or dim not in (-1, input.dim() - 1) or (dtype or input.dtype) != torch.float32:
        return NotImplemented
    return _Softmax.apply(input.to(torch.float32))  # pyright: ignore[reportReturnType]


def _sigmoid(input: Tensor) -> Tensor:
    if not input.is_cpu or input.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    return _Sigmoid.apply(input)  # pyright: ignore[reportReturnType]


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum along the last axis in ascending order, one after another: meant for a token's few gates."""
    last = dim if isinstance(dim, int) else dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else None
    if not input.is_floating_point() or last not in (-1, input.dim() - 1) or dtype is not None:
        return NotImplemented
    if not input.shape[-1]:
        return NotImplemented
    total, *rest = input.float().unbind(-1)
    for part in rest:
        total = total + part
    total = total.to(input.dtype)
    return total.unsqueeze(-1) if keepdim else total


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        softmax_rows(array(x.contiguous().view(-1, x.shape[-1])), array(out.view(-1, x.shape[-1])))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return y * (grads[0] - (grads[0] * y).sum(-1, keepdim=True))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        sigmoids(array(x.contiguous().view(-1)), array(out.view(-1)))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return grads[0] * y * (1 - y)


_cosines, _sines = _of_floats(cosines), _of_floats(sines)
_OURS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _sigmoid),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.topk, Tensor.topk), _topk),
    **dict.fromkeys((Tensor.__rpow__,), _power_of),
    **dict.fromkeys((torch.pow, Tensor.pow), _power),
    **dict.fromkeys((torch.cos, Tensor.cos), _cosines),
    **dict.fromkeys((torch.sin, Tensor.sin), _sines),
}


def make_portable(model: nn.Module) -> int:
    """Make the model's routers, rotary embeddings and Conv1D layers use our operations, in place, by subclassing; return how many."""
    count = 0
    for module in model.modules():
        is_router = hasattr(module, "top_k") and hasattr(module, "num_experts") and hasattr(module, "weight")
        is_rotary = hasattr(module, "inv_freq") or has_layer_types(module)
        is_ours = is_router or is_rotary or type(module) is Conv1D
        if is_ours and not hasattr(module, "ostinato_portable"):
            module.__class__ = _portable(type(module))
            _compute_frequencies(module)
            count += 1
    return count


def has_layer_types(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding with separate frequencies for each layer type, as in Gemma 3."""
    return not hasattr(module, "inv_freq") and bool(_frequencies_of(module))


def _frequencies_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]


def _compute_frequencies(module: Any) -> None:
    """Recompute a rotary embedding's frequencies, because the library's powers give other bits on other CPUs.

    A module with an unusual constructor keeps the library's frequencies, recorded as `own_frequencies = False`.
    """
    names = _frequencies_of(module)
    if not names:
        return
    module.own_frequencies = False
    with contextlib.suppress(Exception), PortableOperations():
        fresh: dict[str, Tensor] = dict(type(module)(module.config).named_buffers(recurse=False))
        held = {name: getattr(module, name) for name in names}
        if all(torch.allclose(fresh[name], held[name], rtol=1e-5) for name in names if not held[name].is_meta):
            for name in names:
                module.register_buffer(name, fresh[name], persistent=False)
            module.own_frequencies = True


_known: dict[type, type] = {}


def _portable(kind: type) -> type:
    if kind not in _known:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with PortableOperations():
                return kind.forward(self, *args, **kwargs)

        _known[kind] = type(kind.__name__, (kind,), {"forward": forward, "ostinato_portable": True})
    return _known[kind]


class _OperationRecorder(TorchDispatchMode):
    """Records the names of floating-point ATen operations that may give other bits on another CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        answer = func(*args, **named)
        name: str = func.overloadpacket.__name__
        known = name in _SAME_EVERYWHERE or name.rstrip("_") in _SAME_EVERYWHERE
        if _has_floats((args, named, answer)) and (not known or _chosen_by_library(name, func, args, named)):
            self.names.add(name)
        return answer


def _has_floats(parts: object) -> bool:
    return any(
        isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in tree_leaves(parts)
    )


def _chosen_by_library(name: str, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a known operation is called in a way that leaves an order, a tie or an operator fusion to the library."""
    if named.get("alpha", 1) != 1 or named.get("accumulate") or (name.startswith("index_put") and True in args[3:]):
        return True
    if "sort" in name:  # ties may come in any order
        return not (named.get("stable") or (func._overloadname == "stable" and True in args[1:2]))
    return name in ("cumsum", "topk") or "reduce" in named


def library_operations(run: Callable[[], object]) -> tuple[str, ...]:
    """Run a pass; return the sorted names of torch operations in it that may give other bits on another CPU. Example: ("gelu",)."""
    recorder = _OperationRecorder()
    with torch.inference_mode(), recorder:
        run()
    return tuple(sorted(recorder.names))
