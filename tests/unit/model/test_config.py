"""Which arithmetic is chosen: the quick one, by engine and trainer alike, and never one that would round what is stored."""

import pytest
import torch

from ostinato.core.errors import BadConfig
from ostinato.model.config import ModelConfig, compute_dtype, stored_dtype


def never():
    pytest.fail("the machine was asked")


@pytest.mark.parametrize("quick", ["bfloat16", "float32"])
def test_by_default_it_is_what_the_machine_multiplies_faster(quick):
    assert compute_dtype(ModelConfig(), lambda: quick) is getattr(torch, quick)
    assert stored_dtype(ModelConfig()) is torch.bfloat16


def test_weights_stored_in_float32_are_never_rounded():
    config = ModelConfig(dtype="float32")
    assert stored_dtype(config) is compute_dtype(config, never) is torch.float32
    with pytest.raises(BadConfig, match="would round the weights"):
        compute_dtype(ModelConfig(dtype="float32", compute="bf16"), never)


def test_what_is_asked_for_is_done():
    assert compute_dtype(ModelConfig(compute="fp32"), never) is torch.float32
    assert compute_dtype(ModelConfig(compute="bf16"), never) is torch.bfloat16


def test_a_directory_is_served_under_its_own_name_however_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "Qwen3-0.6B" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "Qwen3-0.6B")
    for source in (".", "./", "inner/..", "../Qwen3-0.6B/", str(tmp_path / "Qwen3-0.6B")):
        assert ModelConfig(source=source).served_as == "Qwen3-0.6B"
    for source in ("smollm2", "Qwen/Qwen3-0.6B", "~nobody-has-this-name/model"):
        assert ModelConfig(source=source).served_as == source
