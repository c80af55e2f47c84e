"""Model tensors <-> the byte form (`core.Weights`) that trainer, weight store and engine exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.core.errors import BadWeights
from ostinato.core.weights import WeightArray, Weights

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""safetensors dtype name -> torch dtype, for weights that can be served and trained."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# name -> (integer type of the same width, bits of +infinity): every NaN and infinity has magnitude bits >= these
_INTEGERS: dict[str, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    "BF16": (np.int16, np.uint16, 0x7F80),
    "F16": (np.int16, np.uint16, 0x7C00),
    "F32": (np.int32, np.uint32, 0x7F800000),
}


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's stored tensors by name, each once: of tied tensors only the first name is kept."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = cast("Tensor", tensor).detach()
    return tensors


def weights_of(model: PreTrainedModel) -> Weights:
    """The model's tensors as bytes, tied tensors once. CPU tensors are not copied.

    The arrays are read-only views of live memory: they change when the model is trained or overwritten. Copy what must stay.
    Raises BadWeights for a dtype other than BF16, F16, F32.
    """
    return {name: _as_bytes(name, tensor) for name, tensor in named_tensors(model).items()}


def put_weights(model: PreTrainedModel, weights: Weights) -> None:
    """Copy `weights` into the model. All of them are checked first: on BadWeights the model is unchanged.

    A model in float32 takes 16-bit weights too: every one of them is a float32. Refused, by name: missing or extra tensors, another
    shape, a dtype that would be rounded, a wrong byte count, any NaN or infinity.
    """
    tensors = named_tensors(model)
    check_names(tensors, weights)
    for name, tensor in tensors.items():
        check_form(name, weights[name], tensor)
        _check_finite(name, weights[name])
    with torch.no_grad():
        for name, tensor in tensors.items():
            _copy(tensor, weights[name])


def check_names(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Raise BadWeights unless the weights are those of a model with these tensors, by name."""
    missing, extra = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or extra:
        raise BadWeights(f"the weights do not fit the model: missing {_some(missing)}, extra {_some(extra)}")


def check_finite(weights: Weights) -> None:
    """Raise BadWeights naming the first tensor that holds a NaN or an infinity. About 0.1 s per 10^8 bf16 values."""
    for name, array in weights.items():
        _check_finite(name, array)


def dtype_of(weights: Weights) -> torch.dtype:
    """The torch dtype of the first tensor. Raises BadWeights when there is none or it cannot be served."""
    first = next(iter(weights.items()), None)
    if first is None:
        raise BadWeights("the weights hold no tensor")
    name, array = first
    if array.dtype not in DTYPES:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
    return DTYPES[array.dtype]


def _as_bytes(name: str, tensor: Tensor) -> WeightArray:
    if tensor.dtype not in _NAMES:
        raise BadWeights(f"tensor {name!r} has dtype {tensor.dtype}; allowed: {', '.join(DTYPES)}")
    data = _byte_view(tensor.cpu().contiguous()).view()
    data.flags.writeable = False
    return WeightArray(_NAMES[tensor.dtype], tuple(tensor.shape), data)


def _byte_view(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def check_form(name: str, array: WeightArray, tensor: Tensor) -> None:
    """Raise BadWeights unless the array's shape, dtype and size fit the tensor; see `put_weights`."""
    stored = DTYPES.get(array.dtype)
    if stored is None or stored != tensor.dtype != torch.float32:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; the model's is {tensor.dtype}")
    if array.shape != tuple(tensor.shape):
        raise BadWeights(f"tensor {name!r} has shape {array.shape}; the model's is {tuple(tensor.shape)}")
    if array.data.dtype != np.uint8 or array.data.nbytes != tensor.numel() * stored.itemsize:
        raise BadWeights(f"tensor {name!r} has {array.data.nbytes} bytes, not {tensor.numel() * stored.itemsize}")


def _check_finite(name: str, array: WeightArray) -> None:
    if array.dtype not in _INTEGERS:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
    for part in parts_of(array):
        check_part(name, array, part)


def parts_of(array: WeightArray, elements: int = 1 << 22) -> list[slice]:
    """The array's elements in order, some millions at a time: what takes long is done in parts."""
    count = array.data.size // DTYPES[array.dtype].itemsize
    return [slice(start, min(start + elements, count)) for start in range(0, count, elements)]


def check_part(name: str, array: WeightArray, part: slice) -> None:
    """Raise BadWeights if these elements hold a NaN or an infinity.

    Two integer maxima, no temporary: as signed bits they bound the positive values, as unsigned bits the negative ones.
    """
    signed, unsigned, infinity = _INTEGERS[array.dtype]
    flat = np.ascontiguousarray(array.data).reshape(-1).view(signed)[part]
    sign = 1 << (np.dtype(unsigned).itemsize * 8 - 1)
    if int(flat.max()) >= infinity or int(flat.view(unsigned).max()) >= sign + infinity:
        raise BadWeights(f"tensor {name!r} holds NaN or infinity")


def copy_part(tensor: Tensor, array: WeightArray, part: slice) -> None:
    """Copy these elements of the array into the same places of a contiguous CPU tensor, widening them if need be."""
    source = np.ascontiguousarray(array.data).reshape(-1)
    if DTYPES[array.dtype] == tensor.dtype:
        size = tensor.element_size()
        own = slice(part.start * size, part.stop * size)
        np.copyto(_byte_view(tensor)[own], source[own])
    elif array.dtype == "BF16":  # the upper half of a float32
        out = _byte_view(tensor).view(np.uint32)[part]
        np.left_shift(source.view(np.uint16)[part], np.uint32(16), out=out)
    else:
        _byte_view(tensor).view(np.float32)[part] = source.view(np.float16)[part]


def _copy(tensor: Tensor, array: WeightArray) -> None:
    whole = slice(0, tensor.numel())
    if tensor.is_cpu and tensor.is_contiguous():
        copy_part(tensor, array, whole)
        return
    held = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_part(held, array, whole)
    tensor.copy_(held)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
