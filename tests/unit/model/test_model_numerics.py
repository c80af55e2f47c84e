"""What this machine says about its arithmetic: complete, repeatable, and the same on every CPU where only our kernels compute."""

import os
import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from tests.examinations.processors.run import NO_FMA, possible
from tests.grids import first

from ostinato.app.machine import SWITCHES
from ostinato.core.errors import BadConfig
from ostinato.core.numerics import differences
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
        {"definitions": (numerics.GELU_TANH,)},
        {"block": 16},
        {"quantisation": "x"},
    ]
    assert len({made(**change).id for change in changes} | {made().id}) == 8


def test_a_definition_that_few_models_use_is_named_with_its_version_in_their_contracts_alone():
    """Whether torch computes as well, or not: a change of its bits shows in their records, and in no others."""
    for other in ({}, {"library": ("gelu",)}, {"threads": 2}):
        named = made(definitions=(numerics.GELU_TANH, numerics.ZERO_CENTERED), **other)
        assert re.match(r"ostinato \d+ gelu_tanh \d+ zero_centered_rms_norm \d+ transformers ", named.kernels)
        assert differences(named, made(**other)) == ("kernels",)
        assert re.match(r"ostinato \d+ transformers ", made(**other).kernels)


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


GATES_AND_NORMS = """
from hashlib import sha256
import torch
from ostinato.model.experts import fill_gradients, gated
from ostinato.model.norms import rms_normed

source, bits = torch.Generator().manual_seed(4), []
drawn = lambda *shape: torch.randint(-1 << 20, 1 << 20, shape, generator=source) / 2.0**17
for dtype in (torch.float32, torch.bfloat16):
    for activation in ("silu", "gelu_tanh"):
        gate, up, grad = (drawn(64, 50).to(dtype) for _ in range(3))
        filled = [torch.empty_like(gate) for _ in range(3)]
        fill_gradients(gate, up, grad, activation, again=filled[0], d_gate=filled[1], d_up=filled[2])
        bits += [gated(gate, up, activation), *filled]
    for zero_centered in (False, True):
        leaves = [drawn(64, 48).to(dtype).requires_grad_(), drawn(48).to(dtype).requires_grad_()]
        y = rms_normed(*leaves, 1e-6, zero_centered=zero_centered)
        bits += [y, *torch.autograd.grad(y, leaves, drawn(64, 48).to(dtype))]
print(*(sha256(x.detach().contiguous().view(torch.uint8).numpy()).hexdigest()[:8] for x in bits))
"""


PROBE = """
import sys
from ostinato.model.numerics import probe
print(probe(), "transformers.modeling_utils" in sys.modules)
"""
CLASSES = {processor.name: processor.switches for processor in possible()}
MASKS = {
    "this CPU": {},
    "no fused multiply-add": NO_FMA,
    "torch alone": {"DNNL_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "our kernels alone": {"NUMBA_CPU_NAME": "nehalem"},
}


@cache
def found(name):
    """What a process finds whose instructions are masked, because libraries read their switches once: its lines."""
    unmasked = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    code = PROBE * (name in MASKS) + GATES_AND_NORMS * (name in CLASSES)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=unmasked | (CLASSES | MASKS)[name],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("mask", first([*MASKS][1:]))
def test_masked_instructions_change_no_bit(mask):
    """Also in a process without any fused multiply-add. None imports the library's models, which would take it 2 s."""
    assert found(mask)[0] == found("this CPU")[0]
    assert found(mask)[0][1] == "False"


@pytest.mark.parametrize("name", first([*CLASSES][:0:-1], few=2))
def test_gates_and_norms_have_the_same_bits_compiled_for_every_class_of_cpu(name):
    """Forward and backward, in vectors of four, eight and sixteen numbers, with fused multiply-adds and without."""
    bits = found("this CPU")[-1]
    assert (len(bits), len(set(bits))) == (28, 24)  # four are filled again
    assert found(name)[-1] == bits
