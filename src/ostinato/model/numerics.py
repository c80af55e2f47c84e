"""Builds the numerics contract of this process from what torch, its libraries and the CPU report about themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.core.errors import BadConfig
from ostinato.core.numerics import Contract
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.cpu import capabilities, team
from ostinato.model.device_attention import CacheAttend, CachedLayer
from ostinato.model.device_step import DecodingStep, StepAttend, numbers_of
from ostinato.model.experts import GatedMLP, experts_of, gate_activation
from ostinato.model.linear import Order, linear, order_in_use
from ostinato.model.logprobs import RowSoftmax, TensorSoftmax
from ostinato.model.norms import RMSNorm, rms_normed
from ostinato.model.paged import PagedEntry
from ostinato.model.portable import has_layer_types

TORCH_KERNELS = "4"
"""A version: raise it with every change of `device_attention`, `device_step` or `TensorSoftmax` that changes results."""
KERNELS = "5"
"""A version: raise it with every change of our own kernels, or of the model code around them, that changes a bit."""
GELU_TANH, ZERO_CENTERED, ROTARY_BY_LAYER = "gelu_tanh 1", "zero_centered_rms_norm 1", "rotary_by_layer_type 1"
"""Definitions that only some models use, each with its own version, so that a change of one does not affect other models' contracts."""
ORDERS: dict[Order, str] = {"blocks": "blocks 1", "pairs": "pairs 1"}
"""The definitions of our products (`kernels.product`), with versions: raise one with every change of a bit."""
_FLAGS = re.compile(r"avx|amx|fma|f16c|neon|asimd|sve|sme|bf16|i8mm|vsx|zvector|rvv")
_ROWS, _INPUTS, _OUTPUTS = 32, 256, 48  # of the probe
_SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
)


def contract(
    model_dtype: torch.dtype,
    mode: Literal["exact", "fast"],
    threads: int,
    block: int,
    quantisation: str = "none",
    backend: ComputeBackend = OWN,
    library: Sequence[str] = (),
    definitions: Sequence[str] = (),
) -> Contract:
    """Return the contract under which this process computes with `threads` torch threads.

    `block` is the KV block size in tokens, `backend` the device and kernels. `library` (torch operations that may give other bits on other
    CPUs) and `definitions` (those of ours that only some models use) are as the self-test found them. In exact mode without such torch
    operations, and with results that do not depend on threads (`threads` is 1), neither torch nor the CPU is part of the contract. In all
    other cases environment variables that change kernels are part of it: call this once, at the start, after torch has been set up.

    Example: ``contract(torch.bfloat16, "exact", threads=1, block=32).id``
    """
    own = backend.kernels == "own"
    named = (
        [f"ostinato {KERNELS}", *definitions]
        if own
        else [f"ostinato torch {TORCH_KERNELS} on {backend.device.partition(':')[0]}"]
    )
    order = "" if not own else ORDERS["blocks" if model_dtype == torch.float32 else order_in_use()]
    anywhere = own and mode == "exact" and not library and threads == 1  # the same bits on every machine
    if anywhere:
        compilers = ()
    elif own:
        compilers = ("numba", "llvmlite")
    else:
        compilers = () if backend.device == "cpu" else ("triton",)
    libraries = [f"{name} {_version(name)}" for name in ("transformers", *compilers, "llguidance")]
    return Contract(
        mode=mode,
        order=order,
        torch="" if anywhere else torch.__version__.partition("+")[0],
        blas=f"bits {probe(backend, model_dtype)}" if anywhere else f"{blas()} bits {probe(backend)}",
        isa="" if anywhere else isa() if backend.device == "cpu" else gpu(backend.device),
        threads=threads,
        block=block,
        dtype=str(model_dtype).removeprefix("torch."),
        quantisation=quantisation,
        kernels=" ".join([*named, *libraries]),
    )


def definitions_of(model: nn.Module) -> tuple[str, ...]:
    """Return those of the definitions that only some models use on which a loaded model depends, sorted. Example: ("gelu_tanh 1",)."""
    used: set[str] = set()
    for module in model.modules():
        if isinstance(module, GatedMLP) and module.activation == "gelu_tanh":
            used.add(GELU_TANH)
        elif isinstance(module, RMSNorm) and module.zero_centered:
            used.add(ZERO_CENTERED)
        elif has_layer_types(module):
            used.add(ROTARY_BY_LAYER)
    if any(gate_activation(module) == "gelu_tanh" for module in experts_of(model)):
        used.add(GELU_TANH)
    return tuple(sorted(used))


def order_named(definition: str) -> Order:
    """Return the order that a contract's `order` names. Raises BadConfig for an unknown definition, or an unknown version of one."""
    for order, known in ORDERS.items():
        if known == definition:
            return order
    raise BadConfig(
        f"products in the order {definition!r} are not known here, only {list(ORDERS.values())}: update both sides"
    )


@torch.inference_mode()
def probe(backend: ComputeBackend = OWN, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return eight hex digits of a hash over a few sums and products on the engine's device, to catch settings that `_SWITCHES` misses.

    Most terms of each sum cancel in pairs, so that the remainder reveals the order of additions. Some numbers are subnormal, so that a
    process that flushes them to zero gets other bits.
    """
    with team(1):
        bits = [part.cpu() for part in computed(backend, dtype)]
    return sha256(b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in bits)).hexdigest()[:8]


def computed(backend: ComputeBackend, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Compute the input of `probe`: results of the engine's own operations, on the backend's device.

    FlexAttention, which computes prompts on CUDA, is not among them, because compiling it would delay the start too much.
    """
    source = np.random.default_rng(0)  # uniform numbers from the host, which are the same for every CPU and device
    weight, x = (
        torch.from_numpy(source.random((rows, _INPUTS), np.float32) - np.float32(0.5)) for rows in (_OUTPUTS, _ROWS)
    )
    weight[:, 1::2], x[:, 1::2] = weight[:, ::2], -x[:, ::2]
    x[:, ::16] *= 1 + 2.0**-6
    weight, x, small, steps = (
        part.to(backend.device) for part in (weight, x, torch.full((4,), 2.0**-130), torch.arange(4.0))
    )
    if backend.kernels == "own":
        products = [linear(x.to(dtype), weight.to(dtype)), linear(x, weight)]
        drawn = RowSoftmax.of(products[1], torch.full((_ROWS,), 0.7)).logprobs(np.arange(_ROWS))
        return [*products, drawn, rms_normed(x, weight[0], 1e-5), small * steps]
    products = [F.linear(x.bfloat16(), weight.bfloat16()), F.linear(x, weight)]
    return [*products, torch.exp(x[0]), small * steps, _drawn_from(products[0]), _attended(weight, x)]


def _drawn_from(logits_MV: Tensor) -> Tensor:
    """Return log-probabilities, computed as for sampled tokens."""
    device, rows = logits_MV.device, len(logits_MV)
    tokens_M = torch.arange(rows, device=device)
    return TensorSoftmax.of(logits_MV, torch.full((rows,), 0.7, device=device)).of_tokens(tokens_M)


def _attended(cached: Tensor, x: Tensor) -> Tensor:
    """Return one token's attention over a cache, as in decoding: 8 query heads over 4 key heads."""
    slots_SKD = cached.view(_OUTPUTS, 4, -1)
    held = CachedLayer(slots_SKD.clone(), slots_SKD.flip(0))
    last, block = PagedEntry(start=_OUTPUTS - 1, end=_OUTPUTS, blocks=(2, 0, 1)), _OUTPUTS // 3
    if x.is_cuda:
        numbers = numbers_of([0], [last], block, rows=1, blocks=3, spare=0)
        attend = StepAttend([held], block, DecodingStep(torch.from_numpy(numbers).to(x.device)))
    else:
        attend = CacheAttend([held], block, [last], x.device)
    return attend(0, x[:2].view(1, 8, -1), slots_SKD[:1], slots_SKD[1:2], 0.125, 0)


def blas() -> str:
    """Describe the BLAS libraries with their versions, and settings that are switched off or set by the environment.

    Example: "mkl 2024.2 mkl-dnn 3.12.0".
    """
    built = torch.__config__.show()
    parts = [_found(r"Math Kernel Library Version (\S+?)-", built, "mkl"), _found(r"MKL-DNN v(\S+)", built, "mkl-dnn")]
    named = [part for part in parts if part] or [_found(r"BLAS_INFO=(\w+)", built, "blas") or "blas unknown"]
    if not torch.backends.mkldnn.enabled:  # pyright: ignore[reportGeneralTypeIssues, reportUnnecessaryComparison]
        named.append("mkl-dnn off")
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        named.append(f"fp32 matmul {precision}")
    return " ".join([*named, *(f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ)])


def isa() -> str:
    """Describe the CPU, its caches (which determine tile sizes) and the vector instructions that determine the choice of kernels.

    Example: "AVX512, AMD EPYC, l1 32768, l2 1048576: avx avx2 avx512_bf16 ...".
    """
    cpu = capabilities()
    flags = sorted(name for name, has in cpu.items() if has is True and _FLAGS.match(name))
    about = [
        torch.backends.cpu.get_cpu_capability(),
        str(cpu.get("cpu_name", cpu.get("architecture", "unknown CPU"))),
        *(f"{level} {cpu[f'{level}_cache_size']}" for level in ("l1d", "l2") if f"{level}_cache_size" in cpu),
    ]
    return f"{', '.join(about)}: {' '.join(flags)}"


def gpu(device: str) -> str:
    """Describe a CUDA GPU and the libraries that choose its kernels. Example: "NVIDIA H100, sm_90, cuda 12.8, cudnn 91002"."""
    major, minor = torch.cuda.get_device_capability(device)
    parts = [torch.cuda.get_device_name(device), f"sm_{major}{minor}", f"cuda {torch.version.cuda}"]
    return ", ".join([*parts, f"cudnn {torch.backends.cudnn.version()}"])


def _found(pattern: str, text: str, name: str) -> str:
    match = re.search(pattern, text)
    return f"{name} {match.group(1)}" if match else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
