"""Which device and kernels a setting means, and what is said where it cannot be had. No GPU is needed: torch is told what it sees."""

import pytest
import torch

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands import doctor
from ostinato.launch.commands.checks import check_device
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.config import ModelConfig, backend, compute_dtype
from ostinato.model.numerics import contract


@pytest.fixture
def gpus(monkeypatch):
    """Make torch say that it sees so many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    see(0)
    return see


def test_nobody_gets_a_gpu_without_asking(gpus):
    gpus(2)
    assert backend(ModelConfig()) == backend(ModelConfig(numerics="fast")) == OWN


@pytest.mark.parametrize(
    ("settings", "seen", "found"),
    [
        ({"device": "auto"}, 1, ComputeBackend(device="cuda", kernels="torch")),
        ({"device": "auto", "numerics": "exact"}, 1, OWN),
        ({"device": "cuda"}, 1, ComputeBackend(device="cuda", kernels="torch")),
        ({"kernels": "torch"}, 0, ComputeBackend(kernels="torch")),
        ({"device": "auto", "numerics": "fast"}, 0, OWN),
        ({"device": "auto", "numerics": "fast"}, 1, ComputeBackend(device="cuda", kernels="torch")),
        ({"device": "auto", "numerics": "fast", "kernels": "own"}, 1, OWN),
        ({"device": "cuda:1", "numerics": "fast"}, 2, ComputeBackend(device="cuda:1", kernels="torch")),
        ({"kernels": "torch", "numerics": "fast"}, 0, ComputeBackend(kernels="torch")),
    ],
)
def test_what_a_setting_means(gpus, settings, seen, found):
    gpus(seen)
    assert backend(ModelConfig(**settings)) == found
    if found.device != "cpu":
        assert compute_dtype(ModelConfig(**settings), lambda: "float32") is torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "seen", "words"),
    [
        (
            {"device": "cuda", "numerics": "fast"},
            0,
            ['model.device = "cuda"', "no CUDA GPU", 'set model.device = "cpu"'],
        ),
        ({"device": "cuda"}, 0, ["no CUDA GPU", 'set model.device = "cpu"']),
        ({"device": "cuda:2", "numerics": "fast"}, 2, ["sees 2 CUDA GPUs", '"cuda:0" to "cuda:1"']),
        ({"device": "cuda", "numerics": "fast", "kernels": "own"}, 1, ['set model.kernels = "torch"']),
        ({"device": "cuda", "numerics": "exact"}, 1, ['set model.numerics = "fast"']),
        ({"kernels": "torch", "numerics": "exact"}, 0, ['set model.numerics = "fast"', 'model.kernels = "own"']),
    ],
)
def test_what_cannot_be_had_names_the_field_and_the_remedy(gpus, settings, seen, words):
    gpus(seen)
    with pytest.raises(BadConfig) as caught:
        backend(ModelConfig(**settings))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_run_that_cannot_have_its_device_is_refused_before_anything_starts(gpus):
    check_device(load(None, []))
    with pytest.raises(BadConfig, match="no CUDA GPU"):
        check_device(load(None, ["model.device=cuda", "model.numerics=fast"]))


def test_an_order_of_additions_that_this_cpu_lacks_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("ostinato.model.linear.HAS_PAIRS", False)
    check_device(load(None, ["model.order=blocks"]))
    with pytest.raises(BadConfig, match=r'set model\.order = "blocks"'):
        check_device(load(None, ["model.order=pairs"]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.device=cuda", "train.ranks=3"], ["sees 2 CUDA GPUs here", "set train.ranks = 2"]),
        (["model.device=cuda:1", "train.ranks=2"], ['"cuda:1"', 'set model.device = "cuda"']),
        (["model.kernels=torch", "train.ranks=2", "train.context_ranks=2"], ["set train.context_ranks = 1"]),
    ],
)
def test_ranks_that_cannot_have_their_devices_are_refused_before_anything_starts(gpus, settings, words):
    gpus(2)
    with pytest.raises(BadConfig) as caught:
        check_device(load(None, ["model.numerics=fast", *settings]))
    assert [word for word in words if word not in str(caught.value)] == []


def test_ranks_of_torchs_kernels_and_a_gpu_for_each_are_taken(gpus):
    gpus(2)
    check_device(load(None, ["model.kernels=torch", "model.numerics=fast", "train.ranks=2"]))
    check_device(load(None, ["model.device=cuda", "model.numerics=fast", "train.ranks=2"]))


def test_the_doctor_says_where_it_computes(gpus):
    found = doctor._device(load(None, []))
    assert found == "engine and trainer compute on cpu with our own kernels; torch sees no CUDA GPU"
    found = doctor._device(load(None, ["model.kernels=torch", "model.numerics=fast"]))
    assert found.startswith("engine and trainer compute on cpu with torch's kernels")


def test_torchs_kernels_have_a_contract_of_their_own():
    made = {
        kernels: contract(torch.float32, "fast", 1, 32, backend=ComputeBackend(kernels=kernels))
        for kernels in ("own", "torch")
    }
    assert made["own"].id != made["torch"].id
    assert "numba" in made["own"].kernels
    assert "numba" not in made["torch"].kernels
