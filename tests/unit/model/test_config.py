"""Which arithmetic is chosen: the quick one, by engine and trainer alike, and never one that would round what is stored."""

import pytest
import torch

from ostinato.core.errors import BadConfig
from ostinato.model.config import ModelConfig, compute_dtype, quick_dtype, stored_dtype

WITHOUT = {"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.fixture(params=["avx512_bf16", "amx_bf16", "bf16", None])
def instructions(request, monkeypatch):
    """The bf16 instructions that the CPU says it has."""
    flags = WITHOUT | ({request.param: True} if request.param else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    return request.param


def test_bf16_is_computed_in_where_the_cpu_can(instructions):
    quick = torch.bfloat16 if instructions else torch.float32
    assert quick_dtype() is compute_dtype(ModelConfig()) is quick
    assert stored_dtype(ModelConfig()) is torch.bfloat16


def test_weights_stored_in_float32_are_never_rounded(instructions):
    assert stored_dtype(ModelConfig(dtype="float32")) is compute_dtype(ModelConfig(dtype="float32")) is torch.float32
    with pytest.raises(BadConfig, match="would round the weights"):
        compute_dtype(ModelConfig(dtype="float32", compute="bf16"))


def test_what_is_asked_for_is_done(instructions):
    assert compute_dtype(ModelConfig(compute="fp32")) is torch.float32
    assert compute_dtype(ModelConfig(compute="bf16")) is torch.bfloat16
