"""Validates a model directory before anything in it is loaded: complete, safe to read, and of a supported format."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from ostinato.core.errors import BadConfig, BadWeights

_RUNS_CODE = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"})
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_POINTER = b"version https://git-lfs.github.com/spec/"
SEE_MODELS = "the table of models in the documentation says which are supported"
_MAX_JSON = 16 << 20
_CONFIG = "config.json"
GENERATION = "generation_config.json"
_LAYERS, _WIDTH, _EXPERTS, _VOCABULARY = 1 << 10, 1 << 18, 1 << 14, 1 << 22
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), _WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    "vocab_size": _VOCABULARY,
}
"""Upper limits of sizes in config.json, by field: beyond any real model, and small enough to build the model without weights."""
_MAY_BE_0 = frozenset(name for name, largest in _LARGEST.items() if largest == _EXPERTS)  # in a dense model
_IMPORTS = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
_TO_SAFETENSORS = _IMPORTS + '[C.from_pretrained({source}).save_pretrained("converted") for C in (M, T)]'
_FROM_GGUF = (
    _IMPORTS + 'm = M.from_pretrained({source}, gguf_file={name}, dtype="bfloat16"); m.hf_quantizer = None; '
    'del m.config.quantization_config; m.save_pretrained("converted"); '
    'T.from_pretrained({source}, gguf_file={name}).save_pretrained("converted")'
)
_MERGED = (
    "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
    'M.from_pretrained({source}, dtype="bfloat16").merge_and_unload().save_pretrained("merged"); '
    'T.from_pretrained({base}).save_pretrained("merged")'
)


def check_directory(path: Path) -> None:
    """Raise BadWeights unless `path` holds config.json, readable safetensors, and a tokenizer.

    No other file is ever opened, in particular no pickled weights and no Python files; `auto_map`, a pointer to remote code, is ignored
    too. The error says what to do about weights that exist only in a format that can run code or must be converted, shards outside the
    directory, Git LFS pointers, adapters, and quantised weights, which cannot be trained.
    """
    if not path.is_dir():
        raise BadWeights(f"{path} is not a directory")
    if (path / _ADAPTER).is_file():
        raise _adapter(path)
    weights = weight_files(path)
    config = _sizes_checked(path)
    if "quantization_config" in config:
        raise BadWeights(
            f"{path}/config.json: quantised weights cannot be trained; give bf16, fp16 or fp32 safetensors"
        )
    if weights != [path / _WEIGHTS] and not isinstance(read_json(path / _INDEX).get("metadata"), dict):
        raise BadWeights(f'{path}/{_INDEX} has no "metadata", which transformers asks for: add "metadata": {{}} to it')
    if (path / GENERATION).is_file():
        read_json(path / GENERATION)
    for file in weights:
        _check_weights(file)
    tokenizers = [path / name for name in _TOKENIZERS if (path / name).is_file()]
    if not tokenizers:
        raise BadWeights(f"{path} holds no tokenizer (tokenizer.json)")
    for file in tokenizers:
        _check_pulled(file)


def read_config(path: Path) -> Any:
    """Return the directory's configuration as a transformers object. Raises BadConfig if transformers has no causal model for it."""
    # imported here, because the checks of `ostinato up` do without them
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, is_torch_available

    where, kind = path / _CONFIG, str(_sizes_checked(path).get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        raise BadConfig(
            f"{where}: model_type {kind[:100]!r} needs a newer transformers than {version('transformers')}, or is not supported; "
            f"{SEE_MODELS}"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise BadConfig(
            f"{where}: transformers cannot read it ({' '.join(str(error).split())}); copy it again from where the model came from"
        ) from error
    try:
        text = config.get_text_config()
    except ValueError as error:  # a composite of several models that process text
        raise BadConfig(f"{where}: {kind!r} is not the type of one language model; {SEE_MODELS}") from error
    if isinstance(text, dict):
        raise BadConfig(f"{where}: text_config is not for models of type {kind!r}; take it out")
    # without torch only the tokenizer is used
    if is_torch_available() and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadConfig(f"{where}: transformers has no causal language model of type {kind!r}; {SEE_MODELS}")
    return config


def check_vocabulary(path: Path, rows: int | None = None) -> None:
    """Raise BadConfig if the tokenizer has ids beyond the model's embedding of `rows` rows (None: as config.json states).

    A directory without tokenizer.json passes, because its tokenizer is only known after transformers has built it.
    """
    from tokenizers import Tokenizer  # imported here, because not every check needs it

    if rows is None:
        config = _sizes_checked(path)
        rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows is None or not (path / "tokenizer.json").is_file():
        return
    try:
        core = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower type
        raise BadConfig(
            f"{path}/tokenizer.json cannot be read ({' '.join(str(error).split())}); copy it again from where the model came from"
        ) from error
    check_ids(path, core.get_vocab(), rows)


def check_ids(path: Path, vocabulary: Mapping[str, int], rows: int) -> None:
    """Raise BadConfig if a token's id has no row in the model's embedding of `rows` rows."""
    largest = max(vocabulary.values(), default=-1)
    if largest >= rows:
        raise BadConfig(
            f"{path}: the tokenizer has ids up to {largest}, and the model has rows for {rows} (0 to {rows - 1}): give the model its own "
            "tokenizer, or save it again after `model.resize_token_embeddings(len(tokenizer))`"
        )


def expert_count(path: Path) -> int:
    """Return the number of experts per layer by config.json; 0 for a dense model. Raises BadWeights."""
    config = _sizes_checked(path)
    config = config.get("text_config") or config
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def weight_files(path: Path) -> list[Path]:
    """Return the files from which transformers reads weights. Raises BadWeights, with what is there instead and how to convert it."""
    found = {file.name for file in path.iterdir() if file.is_file()}
    named: set[str] = set()
    if _INDEX in found:
        _check_pulled(path / _INDEX)
        shards = read_json(path / _INDEX).get("weight_map", {})
        if not isinstance(shards, dict):
            raise BadWeights(f"{path}/{_INDEX}: weight_map must be a JSON object from a tensor's name to a file's")
        named = set(map(str, cast("dict[str, Any]", shards).values()))
        if missing := sorted(named - found):
            raise BadWeights(f"{path}/{_INDEX} names {missing[0][:200]!r}, which is not a file of this directory")
    if _WEIGHTS in found:
        return [path / _WEIGHTS]
    if named:
        return [path / name for name in sorted(named)]
    ggufs = sorted(name for name in found if name.lower().endswith(".gguf"))
    if ggufs:
        command = _command(_FROM_GGUF, source=str(path), name=ggufs[0])
        raise BadWeights(
            f"{path} holds weights as GGUF alone ({ggufs[0]}), and cannot be trained so: convert them with `{command}`"
        )
    pickled = sorted(name for name in found if Path(name).suffix.lower() in _RUNS_CODE)
    if pickled:
        command = _command(_TO_SAFETENSORS, source=str(path))
        raise BadWeights(
            f"{path} holds no {_WEIGHTS}, and {pickled[0]} can run code when it is loaded, so it is never opened: if you trust it, "
            f"convert it with `{command}`"
        )
    others = sorted(name for name in found if name.endswith(".safetensors"))
    also = f"; {others[0]} has another name, and perhaps another format" if others else ""
    raise BadWeights(
        f"{path} holds neither {_WEIGHTS} nor {_INDEX} with its shards{also}: give a whole model directory"
    )


def _adapter(path: Path) -> BadWeights:
    base = str(read_json(path / _ADAPTER).get("base_model_name_or_path") or "the base model")[:200]
    command = _command(_MERGED, source=str(path), base=base)
    shown = repr(base)[1:-1]
    return BadWeights(
        f"{path} holds an adapter of {shown} ({_ADAPTER}), and all weights are trained here: merge it with its base, once, with `{command}`"
    )


def _command(program: str, **names: str) -> str:
    """Return a shell command that runs a line of Python, with quoted `names`, which come from untrusted files."""
    return f"python -c {shlex.quote(program.format(**{key: json.dumps(name) for key, name in names.items()}))}"


def _check_weights(file: Path) -> None:
    _check_pulled(file)
    try:
        with safe_open(file, "np"):
            pass  # opening checks the header against the file's length
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{file}: not a safetensors file ({error})") from error


def _check_pulled(file: Path) -> None:
    """Raise BadWeights for a Git LFS pointer file, which a clone without Git LFS leaves in place of a large file."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise BadWeights(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}")


def _sizes_checked(path: Path) -> dict[str, Any]:
    """Read the directory's config.json. Raises BadWeights, with the field's name, for a size beyond any real model."""
    file = path / _CONFIG
    config = read_json(file)
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise BadWeights(f"{file}: text_config must be a JSON object")
    for where, part in (("", config), ("text_config.", cast("dict[str, Any]", text or {}))):
        for name, largest in _LARGEST.items():
            value, least = part.get(name), 0 if name in _MAY_BE_0 else 1
            if value is not None and (type(value) is not int or not least <= value <= largest):
                shown = repr(value)[:40] if isinstance(value, (int, float, str)) else "a list or an object"
                raise BadWeights(
                    f"{file}: {where}{name} is {shown}; it must be a whole number from {least} to {largest:,}"
                )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises BadWeights."""
    try:
        if file.stat().st_size > _MAX_JSON:
            raise BadWeights(f"{file} is larger than {_MAX_JSON >> 20} MiB")
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise BadWeights(f"{file} is missing") from error
    except (ValueError, RecursionError, OSError) as error:
        raise BadWeights(f"{file} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadWeights(f"{file} is not a JSON object")
    return value
