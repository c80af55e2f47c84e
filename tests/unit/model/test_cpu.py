"""A torch of any supported version runs: what only newer ones have is looked for before it is used."""

import platform

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ostinato.core.errors import BadConfig
from ostinato.engine.embedded.form import round_to_fp8
from ostinato.model import cpu, experts

ASKED = ("amx_bf16", "amx_int8", "avx2", "avx512_bf16", "avx512_f", "avx512_vnni", "avx_vnni", "bf16", "fma3", "i8mm")
XEON = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 fma avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8
bugs\t\t:

processor\t: 1
flags\t\t: fpu
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"


@pytest.mark.skipif(not cpu._CPUINFO.exists(), reason="needs Linux's /proc/cpuinfo")
def test_without_torchs_word_the_kernels_is_taken(monkeypatch):
    torchs = cpu.capabilities()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    ours = cpu.capabilities()
    assert ours["architecture"] == platform.machine()
    assert {name: bool(ours.get(name)) for name in ASKED} == {name: bool(torchs.get(name)) for name in ASKED}


def test_instructions_have_torchs_names():
    found = cpu.parse_cpuinfo(XEON)
    assert found["cpu_name"] == "Intel(R) Xeon(R) Processor"
    assert {name for name in ASKED if found.get(name)} == set(ASKED) - {"avx_vnni", "bf16", "i8mm"}
    assert {name for name in ASKED if cpu.parse_cpuinfo(GRAVITON).get(name)} == {"bf16", "i8mm"}
    assert cpu.parse_cpuinfo("") == {"architecture": platform.machine()}


def test_without_a_grouped_product_experts_are_multiplied_one_by_one(monkeypatch):
    stacked = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(F, "grouped_mm", print, raising=False)
    assert experts.can_group(stacked)
    monkeypatch.delattr(F, "grouped_mm")
    assert not experts.can_group(stacked)


def test_without_a_scaled_product_8_bit_floats_are_refused_by_name(monkeypatch):
    monkeypatch.delattr(F, "scaled_mm", raising=False)
    with pytest.raises(BadConfig, match=r"scaled_mm, which torch .* lacks: pip install --upgrade torch"):
        round_to_fp8(nn.Linear(16, 16))
