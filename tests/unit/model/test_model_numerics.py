"""What this machine says about its arithmetic: complete, repeatable, and another id when a switch is turned."""

import re

import torch

from ostinato.model.numerics import blas, contract, isa


def made(**changes):
    return contract(
        **({"model_dtype": torch.bfloat16, "mode": "exact", "threads": 1, "rows": 4, "block": 32} | changes)
    )


def test_the_same_call_gives_the_same_id():
    assert made() == made()
    assert made().dtype == "bfloat16"
    assert made().torch == torch.__version__
    assert made().quantisation == "none"
    assert re.fullmatch(r"ostinato \d+ transformers \S+ numba \S+ llvmlite \S+", made().kernels)


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


def test_a_switch_in_the_environment_is_another_arithmetic(monkeypatch):
    before = made().id
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in made().blas
    assert made().id != before
