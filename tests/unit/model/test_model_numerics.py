"""What this machine says about its arithmetic: complete, repeatable, and the same on every CPU where only our kernels compute."""

import os
import re
import subprocess
import sys

import pytest
import torch

from ostinato.app.machine import SWITCHES
from ostinato.core.errors import BadConfig
from ostinato.model import numerics
from ostinato.model.linear import order_in_use
from ostinato.model.numerics import blas, contract, isa, probe


def made(**changes):
    return contract(**({"model_dtype": torch.bfloat16, "mode": "exact", "threads": 1, "block": 32} | changes))


def test_the_same_call_gives_the_same_id():
    assert made() == made()
    assert made().dtype == "bfloat16"
    assert made().quantisation == "none"
    assert re.fullmatch(r"ostinato \d+ transformers \S+ llguidance \S+", made().kernels)


def test_a_contracts_order_is_found_again_and_an_unknown_one_is_refused():
    assert numerics.order_named(made().order) == order_in_use()
    with pytest.raises(BadConfig, match="blocks 7"):
        numerics.order_named("blocks 7")


def test_a_library_is_named_only_where_it_computes():
    assert re.fullmatch(r"bits [0-9a-f]{8}", made().blas)
    assert (made().torch, made().isa, made().order) == ("", "", numerics.ORDERS[order_in_use()])
    for leaning in (made(library=("gelu",)), made(mode="fast"), made(threads=2)):
        assert leaning.torch == torch.__version__.partition("+")[0]
        assert torch.backends.cpu.get_cpu_capability() in leaning.isa
        assert re.fullmatch(r"ostinato \d+ transformers \S+ numba \S+ llvmlite \S+ llguidance \S+", leaning.kernels)


def test_every_argument_counts():
    changes = [
        {"model_dtype": torch.float32},
        {"mode": "fast"},
        {"threads": 2},
        {"library": ("gelu",)},
        {"block": 16},
        {"quantisation": "x"},
    ]
    assert len({made(**change).id for change in changes} | {made().id}) == 7


def test_the_libraries_are_those_that_torch_was_built_with():
    built = torch.__config__.show()
    for version in re.findall(r"\d+\.\d+(?:\.\d+)?", blas()):
        assert version in built
    assert blas().split()[0] in ("mkl", "mkl-dnn", "blas")
    assert torch.backends.cpu.get_cpu_capability() in isa()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR"])
def test_a_switch_in_the_environment_is_another_arithmetic(monkeypatch, name):
    """Where a library computes; our own kernels do not read it."""
    monkeypatch.delenv(name, raising=False)
    before, ours = made(library=("gelu",)).id, made().id
    monkeypatch.setenv(name, "AVX2")
    assert f"{name}=AVX2" in made(library=("gelu",)).blas
    assert made(library=("gelu",)).id != before
    assert made().id == ours


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormal numbers")
def test_a_process_that_flushes_denormal_numbers_has_another_arithmetic():
    before = made()
    torch.set_flush_denormal(True)
    try:
        assert made().id != before.id
    finally:
        torch.set_flush_denormal(False)
    assert made() == before


def test_the_probe_tells_another_order_of_additions_from_ours(monkeypatch):
    """Planted: a product that adds its second half first."""

    def turned(x, weight):
        half = x.shape[-1] // 2
        return x[:, half:] @ weight[:, half:].t() + x[:, :half] @ weight[:, :half].t()

    before = probe()
    assert probe() == before
    monkeypatch.setattr("ostinato.model.numerics.linear", turned)
    assert probe() != before


def test_masked_instructions_change_no_bit():
    """Asked of processes of their own, because libraries read their switches once: also of one without any fused multiply-add."""
    code = "from ostinato.model.numerics import probe; print(probe())"
    unmasked = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    masks = ({}, {"DNNL_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}, {"NUMBA_CPU_NAME": "nehalem"})
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env=unmasked | mask, capture_output=True, text=True, check=True
        ).stdout.split()
        for mask in masks
    ]
    assert all(len(bits) == 1 for bits in found)
    assert found[0] == found[1] == found[2]
