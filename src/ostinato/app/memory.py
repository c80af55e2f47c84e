"""The least memory that a run's model needs, checked against what is available before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadWeights
from ostinato.core.memory import Room, in_gib
from ostinato.model.checkpoint_validation import weight_files

Part = Literal["serve", "train"]
_WORKING = 1 << 28  # bytes of a process that computes: code, one batch
_READER = 432 << 20  # bytes of the process that parses long requests, fully grown, and of its replacement
_VERSIONS = 2  # versions loaded at once: the users' and the one that is evaluated
_STEPS = 2  # more versions if users follow training: the step that serves them and the one that is tested
_MASTERS = 16  # bytes per weight: fp32 master, gradient and two moments


def check_memory(
    config: Config,
    path: Path,
    parts: Sequence[Part],
    room: Room | None,
    width: int = 0,
    *,
    branches: int = 0,
    held: int | None = None,
) -> None:
    """Raise BadConfig, with both numbers, if these workers together need more memory than `room`. Does not check models on a GPU.

    `path`: the model's directory. `width`: bytes per number in computing; 0: the least that the settings allow. `branches`: how many
    trainers of tenants' branches also run. `held` as in `needed`.
    """
    if config.model.device != "cpu" or room is None:
        return
    needs: dict[str, int] = {}
    for part in parts:
        needs |= needed(config, path, part, width, held)
    if branches:
        needs[f"trainers of {branches} branches"] = branches * sum(needed(config, path, "train", width).values())
    total = sum(needs.values())
    if total <= room.size:
        return
    shares = ", ".join(f"{what} {in_gib(size)}" for what, size in needs.items())
    fewer = ", fewer streams (engine.kv_tokens, engine.max_batch)" if "serve" in parts else ""
    if config.serve.branches:
        fewer += ", fewer branches (serve.branches, learn.tenants)"
    elsewhere = ", or `ostinato train` on another machine (record.url, weights.url)" if "train" in parts else ""
    raise BadConfig(
        f"memory is too small to {' and '.join(parts)} {config.model.served_as}: at least {in_gib(total)} are needed ({shares}), and "
        f"{room.bound} leaves {in_gib(room.size)}; raise it, or use a smaller model (model.source){fewer}{elsewhere}"
    )


def needed(config: Config, path: Path, part: Part, width: int = 0, held: int | None = None) -> dict[str, int]:
    """Return the least bytes that a worker needs for the model in `path`, as {purpose: bytes}. `width` as in `check_memory`.

    `held`: how many versions tenants' branches have of their own; None: as many as they will have once each was trained.
    """
    if part == "serve" and config.engine.kind == "vllm":
        return {}
    wide = config.model.dtype == "float32" or config.model.compute == "fp32"
    weights, width = weight_count(path), width or (4 if wide else 2)
    if part == "train":
        ranks = config.train.ranks
        return {
            "fp32 masters, gradients and moments": weights * _MASTERS,
            "weights in training": weights * width,
            "the trainer's own work": _WORKING * ranks,
        }
    if held is None:  # a trained branch also has a version that is evaluated
        held = len(config.serve.branches) + len(config.learn.tenants)
    versions = _VERSIONS + held + (_STEPS if config.serve.learner_share else 0)
    return {
        f"weights of {versions} versions": weights * width * versions,
        "KV cache": config.engine.kv_tokens * _kv_numbers(path) * width,
        "the engine's own work": _WORKING,
        "the process that reads long requests": _READER,
    }


def weight_count(path: Path) -> int:
    """Return the number of weights in the files that are loaded from a directory, from their headers.

    0 if they cannot be read, which loading reports.
    """
    try:
        return sum(map(_count, weight_files(path)))
    except (BadWeights, OSError):
        return 0


def _count(file: Path) -> int:
    try:
        with file.open("rb") as data:
            header = json.loads(data.read(min(int.from_bytes(data.read(8), "little"), 100 << 20)))
        return sum(math.prod(map(_whole, each["shape"])) for name, each in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def _whole(value: object) -> int:
    """Return a size from an untrusted file. Raises ValueError unless it is a count: a string or list would be repeated, not multiplied."""
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _kv_numbers(path: Path) -> int:
    """Return how many numbers the keys and values of one token have, from the usual names in config.json; 0 if missing or not counts."""
    try:
        config: Mapping[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        heads = _whole(config["num_attention_heads"])
        size = _whole(config.get("head_dim") or _whole(config["hidden_size"]) // heads)
        return 2 * _whole(config["num_hidden_layers"]) * _whole(config.get("num_key_value_heads") or heads) * size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
        return 0
