"""The bits in a numerics contract are made where the engine computes, by what it computes with there."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ostinato.model import numerics
from ostinato.model.backend import ComputeBackend
from ostinato.model.numerics import computed, contract

TORCH = ComputeBackend(kernels="torch")
WORK = {"linear", "exp", "logsumexp", "scaled_dot_product_attention"}


class Watched(TorchFunctionMode):
    """Notes on which devices the operands of each named operation lie."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        self.seen.setdefault(func.__name__, set()).update(each.device.type for each in tensors)
        return func(*args, **(kwargs or {}))


def test_a_devices_contract_is_measured_on_that_device():
    with Watched() as watched:
        made = computed(ComputeBackend(device="meta", kernels="torch"))
    assert {part.device.type for part in made} == {"meta"}
    assert {name: watched.seen.get(name) for name in WORK} == {name: {"meta"} for name in WORK}


@pytest.mark.parametrize("differs", ["linear", "logsumexp", "scaled_dot_product_attention"])
def test_a_device_that_computes_anything_otherwise_has_another_id(differs):
    class Other(TorchFunctionMode):
        """A device on which one operation rounds otherwise."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return found * (1 + 2.0**-7) if func.__name__ == differs else found

    one = contract(torch.float32, "fast", 1, 32, backend=TORCH)
    with Other():
        other = contract(torch.float32, "fast", 1, 32, backend=TORCH)
    assert (one.isa, one.kernels) == (other.isa, other.kernels)
    assert one.id != other.id
    assert contract(torch.float32, "fast", 1, 32, backend=TORCH).id == one.id


def test_the_probe_is_told_which_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(numerics, "gpu", lambda device: f"a GPU at {device}")
    monkeypatch.setattr(numerics, "probe", lambda backend: asked.append(backend) or "00000000")
    gpu = ComputeBackend(device="cuda:1", kernels="torch")
    made = contract(torch.bfloat16, "fast", 1, 32, backend=gpu)
    assert made.isa == "a GPU at cuda:1"
    assert " triton " in made.kernels, "it compiles the paged kernel"
    assert asked == [gpu]
    assert "triton" not in contract(torch.bfloat16, "fast", 1, 32, backend=TORCH).kernels
