"""What this machine says about its arithmetic: complete, repeatable, and another id when a switch is turned."""

import os
import re
import subprocess
import sys

import pytest
import torch

from ostinato.app.machine import SWITCHES
from ostinato.model.numerics import blas, contract, isa, probe


def made(**changes):
    return contract(
        **({"model_dtype": torch.bfloat16, "mode": "exact", "threads": 1, "rows": 4, "block": 32} | changes)
    )


def test_the_same_call_gives_the_same_id():
    assert made() == made()
    assert made().dtype == "bfloat16"
    assert made().torch == torch.__version__
    assert made().quantisation == "none"
    assert re.fullmatch(r"ostinato \d+ transformers \S+ numba \S+ llvmlite \S+ llguidance \S+", made().kernels)


def test_every_argument_counts():
    changes = [
        {"model_dtype": torch.float32},
        {"mode": "fast"},
        {"threads": 2},
        {"rows": 8},
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
    monkeypatch.delenv(name, raising=False)  # the suite may run under one
    before = made().id
    monkeypatch.setenv(name, "AVX2")
    assert f"{name}=AVX2" in made().blas
    assert made().id != before


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


def test_instructions_that_are_masked_give_another_id():
    """Asked of a process of its own, because the library reads its switch once."""
    code = "from ostinato.model.numerics import probe; print(probe())"
    unmasked = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    found = {
        isa: subprocess.run(
            [sys.executable, "-c", code],
            env=unmasked | ({"DNNL_MAX_CPU_ISA": isa} if isa else {}),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for isa in ("", "SSE41")
    }
    assert all(len(bits) == 1 for bits in found.values())
    assert found[""] != found["SSE41"]
