"""The numerics contract of vLLM servers, from what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato.core.numerics import Contract
from ostinato.engine.vllm.wire import About, System


def contract_of(told: Sequence[tuple[str, About]]) -> Contract:
    """The contract of servers with these versions and descriptions. A field in which they differ names all values.

    It tells the turns of one engine from another's and promises no bits: batch shapes, kernels and cores are unknown.
    """
    settings = [about.vllm_config for _, about in told]
    systems = [about.system_env or System() for _, about in told]
    devices = [
        system.nvidia_gpu_models or each.device_config.device for system, each in zip(systems, settings, strict=True)
    ]
    return Contract(
        mode="fast",
        torch=_all(system.torch_version for system in systems),
        blas="unknown",
        isa=_all(devices),
        threads=1,
        block=1,
        dtype=_all(each.model_config_.dtype.removeprefix("torch.") for each in settings),
        quantisation=_all(each.model_config_.quantization or "none" for each in settings),
        kernels=_all(f"vllm {version}" for version, _ in told),
    )


def _all(values: Iterable[str]) -> str:
    return " or ".join(sorted({" ".join(value.split())[:200] for value in values}))
