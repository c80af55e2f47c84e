"""Checks that a model directory is safe and complete, before anything in it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ostinato.core.errors import BadWeights

_RUNS_CODE = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".py", ".pyc", ".so"})
_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_FILES = 10_000
_MAX_JSON = 16 << 20


def check_directory(path: Path) -> None:
    """Raise BadWeights unless `path` holds config.json, readable safetensors, a tokenizer, and nothing that can run code.

    Refused: pickle-like weights and Python files anywhere below `path`, `auto_map` in any configuration file (a pointer to
    remote code), shards outside the directory, quantised weights (they cannot be trained).
    """
    if not path.is_dir():
        raise BadWeights(f"{path} is not a directory")
    _check_suffixes(path)
    config = _read_json(path / "config.json")
    if "quantization_config" in config:
        raise BadWeights(
            f"{path}/config.json: quantised weights cannot be trained; give bf16, fp16 or fp32 safetensors"
        )
    for file in sorted(path.glob("*config*.json")):
        if _mentions(_read_json(file), "auto_map"):
            raise BadWeights(
                f"{file}: `auto_map` names remote code, which is never run; remove it or choose another model"
            )
    _check_shards(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise BadWeights(f"{path} holds no tokenizer (tokenizer.json)")


def architecture_of(path: Path) -> str:
    """The `model_type` of the model in `path`, by its config.json; "" if it names none. Raises BadWeights."""
    return str(_read_json(path / "config.json").get("model_type", ""))


def expert_count(path: Path) -> int:
    """The experts in each layer of the model in `path`, by its config.json; 0 for a dense one. Raises BadWeights."""
    config = _read_json(path / "config.json")
    config = config.get("text_config", config)
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _check_suffixes(path: Path) -> None:
    for count, file in enumerate(path.rglob("*")):
        if count >= _MAX_FILES:
            raise BadWeights(f"{path} holds more than {_MAX_FILES} files: is this a model directory?")
        if file.suffix.lower() in _RUNS_CODE:
            raise BadWeights(
                f"{file}: a {file.suffix} file can run code when it is loaded; keep only safetensors and JSON here"
            )


def _check_shards(path: Path) -> None:
    shards = {file.name for file in path.glob(_WEIGHTS)}
    if not shards:
        raise BadWeights(f"{path} holds no {_WEIGHTS} file")
    if (path / _INDEX).is_file():
        named = set(map(str, dict(_read_json(path / _INDEX).get("weight_map", {})).values()))
        if not named <= shards:
            raise BadWeights(
                f"{path}/{_INDEX} names {sorted(named - shards)[0]!r}, which is not a file of this directory"
            )
    for name in sorted(shards):
        try:
            with safe_open(path / name, "np"):
                pass  # opening checks the header against the file's length
        except (SafetensorError, OSError) as error:
            raise BadWeights(f"{path / name}: not a safetensors file ({error})") from error


def _read_json(file: Path) -> dict[str, Any]:
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


def _mentions(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_mentions(item, key) for item in value.values())
    return isinstance(value, list) and any(_mentions(item, key) for item in value)
