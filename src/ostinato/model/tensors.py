"""Converts between model tensors and `core.Weights`, the byte arrays that trainer, weight store and engine exchange."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.errors import BadWeights
from ostinato.core.weights import WeightArray, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""safetensors dtype name -> torch dtype, for weights that can be served and trained."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# name -> (signed and unsigned integer of the same width, bits of +infinity): NaN and infinity have magnitude bits >= these
_INTEGERS: dict[str, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    "BF16": (np.int16, np.uint16, 0x7F80),
    "F16": (np.int16, np.uint16, 0x7C00),
    "F32": (np.int32, np.uint32, 0x7F800000),
}


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's stored tensors by name; of tied tensors only the first."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = cast("Tensor", tensor).detach()
    return tensors


def weights_of(model: PreTrainedModel) -> Weights:
    """Return the model's tensors as bytes, tied tensors once. CPU tensors are not copied.

    The arrays are read-only views of live memory: they change when the model is trained or overwritten. Copy them to keep them.
    Raises BadWeights for a dtype other than BF16, F16, F32.
    """
    return {name: bytes_of(name, tensor) for name, tensor in named_tensors(model).items()}


def put_weights(model: PreTrainedModel, weights: Weights) -> None:
    """Copy `weights` into the model. All are checked first: on BadWeights the model is unchanged.

    A float32 model also takes 16-bit weights, which it represents exactly. Raises BadWeights, with the tensor's name, for missing or extra
    tensors, another shape, a dtype that would be rounded, a wrong byte count, and any NaN or infinity.
    """
    tensors = named_tensors(model)
    missing, extra = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or extra:
        raise BadWeights(f"the weights do not fit the model: missing {_some(missing)}, extra {_some(extra)}")
    for name, tensor in tensors.items():
        _check(name, weights[name], tensor)
    with torch.no_grad():
        for name, tensor in tensors.items():
            _copy(tensor, weights[name])


def check_finite(weights: Weights) -> None:
    """Raise BadWeights, with the tensor's name, for the first tensor with a NaN or infinity. About 0.1 s per 10^8 bf16 values."""
    for name, array in weights.items():
        _check_finite(name, array)


def dtype_of(weights: Weights) -> torch.dtype:
    """Return the torch dtype of the first tensor. Raises BadWeights if there is none, or for a dtype that cannot be served."""
    first = next(iter(weights.items()), None)
    if first is None:
        raise BadWeights("the weights hold no tensor")
    name, array = first
    if array.dtype not in DTYPES:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
    return DTYPES[array.dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype that can be served."""
    return _NAMES[dtype]


def on_host(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Copy tensors to the host, converted to `dtypes`, by name. Copies from a GPU go to pinned memory, with one synchronisation for all."""
    copies: dict[str, Tensor] = {}
    gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            rounded = tensor.to(dtypes[name])
            copies[name] = torch.empty(rounded.shape, dtype=rounded.dtype, pin_memory=True)
            copies[name].copy_(rounded, non_blocking=True)
        else:
            copies[name] = tensor.to("cpu", dtypes[name], copy=True)
    if gpu is not None:
        torch.cuda.synchronize(gpu)
    return copies


def put_array(tensor: Tensor, array: NDArray[np.float32]) -> None:
    """Copy an fp32 array of the same shape into a tensor on any device."""
    if tensor.is_cpu:
        np.copyto(tensor.numpy(), array)
    else:
        # copied, because torch warns about arrays that are not writable, such as those read from a file
        tensor.copy_(torch.from_numpy(np.array(array)))


def bytes_of(name: str, tensor: Tensor) -> WeightArray:
    """Return one tensor as bytes: a read-only view if it is contiguous on the CPU. Raises BadWeights, with its name, for other dtypes."""
    if tensor.dtype not in _NAMES:
        raise BadWeights(f"tensor {name!r} has dtype {tensor.dtype}; allowed: {', '.join(DTYPES)}")
    data = _byte_view(tensor.cpu().contiguous()).view()
    data.flags.writeable = False
    return WeightArray(_NAMES[tensor.dtype], tuple(tensor.shape), data)


def _byte_view(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _check(name: str, array: WeightArray, tensor: Tensor) -> None:
    stored = DTYPES.get(array.dtype)
    if stored is None or stored != tensor.dtype != torch.float32:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; the model's is {tensor.dtype}")
    if array.shape != tuple(tensor.shape):
        raise BadWeights(f"tensor {name!r} has shape {array.shape}; the model's is {tuple(tensor.shape)}")
    if array.data.dtype != np.uint8 or array.data.nbytes != tensor.numel() * stored.itemsize:
        raise BadWeights(f"tensor {name!r} has {array.data.nbytes} bytes, not {tensor.numel() * stored.itemsize}")
    _check_finite(name, array)


def _check_finite(name: str, array: WeightArray) -> None:
    """Raise BadWeights for a NaN or infinity, by two integer maxima without temporaries.

    As signed integers, the bits bound the positive values; as unsigned integers, the negative ones.
    """
    if not array.data.size:
        return
    if array.dtype not in _INTEGERS:
        raise BadWeights(f"tensor {name!r} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
    signed, unsigned, infinity = _INTEGERS[array.dtype]
    flat = np.ascontiguousarray(array.data).reshape(-1)
    sign = 1 << (np.dtype(unsigned).itemsize * 8 - 1)
    if int(flat.view(signed).max()) >= infinity or int(flat.view(unsigned).max()) >= sign + infinity:
        raise BadWeights(f"tensor {name!r} holds NaN or infinity")


def _copy(tensor: Tensor, array: WeightArray) -> None:
    if tensor.is_cpu and tensor.is_contiguous() and DTYPES[array.dtype] == tensor.dtype:
        np.copyto(_byte_view(tensor), array.data.reshape(-1))
        return
    tensor.copy_(values_of(array))


def values_of(array: WeightArray) -> Tensor:
    """Return the array's memory as a tensor, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and warns about it
        return torch.from_numpy(array.data.reshape(-1)).view(DTYPES[array.dtype]).view(array.shape)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
