"""The check of an architecture before any of its weights are used: the library's own forward pass and ours must agree.

A model whose layers pass everything on to our attention, and give it no sign of a window that they built into the mask they made
themselves, would be served and trained wrong without a word. So a miniature of it is computed by both, on sequences longer than any window.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ostinato import __version__
from ostinato.core.errors import BadConfig
from ostinato.core.places import cache_directory
from ostinato.model.attention import (
    IMPLEMENTATION,
    OF_ITS_OWN,
    CausalAttend,
    Inexpressible,
    check_config,
    check_forward,
    hidden,
    logits,
)
from ostinato.model.checkpoint_validation import SEE
from ostinato.model.miniature import WINDOW, cut, depth_of, miniatures

LENGTHS = (3 * WINDOW, 2 * WINDOW + 1)
"""Tokens of the two sequences."""
TOLERANCE = 1e-4
"""The largest difference of a logit, as a share of the largest logit. Rounding in fp32 makes 2e-5 at most."""
_CHECK = "1"  # raise it with every change of this check, or of what `attention` accepts
_DRAWS = 3  # a router whose choice hangs by rounding may differ in one; another mechanism differs in all
_MOST_BYTES = 1 << 16  # of a file that says that a model agreed
_PASSED: set[str] = set()

Make = Callable[[Any], PreTrainedModel]
"""Makes a model from a configuration."""


def check_agreement(file: Path, config: Any, make: Make, kernels: str = "own", kept: Path | None = None) -> None:
    """Raise BadConfig, in one line, unless a miniature of the model that `make` builds gives the library's own logits.

    Computed once for each content of the configuration's `file`, kind of `kernels` and versions of the libraries; that it agreed is kept in
    the directory `kept` (None: in the user's cache). `make` is called on copies of `config`, and must give models on the CPU in fp32.
    """
    key = _key(file, kernels)
    place = _place(kept, key)
    try:
        check_config(config.get_text_config())
        if key not in _PASSED and not (place and _is_kept(place)):
            with _seeded():
                _compare(config, make)
            if place is not None:
                _keep(place, {"model_type": config.model_type, "agrees": True})
    except Inexpressible as error:
        raise BadConfig(f"{_named(config)} are not supported: {error}; {SEE}") from error
    _PASSED.add(key)


def _place(kept: Path | None, key: str) -> Path | None:
    try:
        return (kept or cache_directory()) / "architectures" / f"{key}.json"
    except BadConfig:  # then it is computed each time
        return None


def _compare(config: Any, make: Make) -> None:
    small, theirs, wanted = _library(config)
    try:
        ours = make(copy.deepcopy(small))  # which changes its configuration
        ours.load_state_dict(theirs.state_dict())
        check_forward(ours)
        _check_logits(ours, theirs, wanted)
    except (BadConfig, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise
        own = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)  # looked up in a table of its own
        raise Inexpressible(
            OF_ITS_OWN if own else f"Ostinato cannot compute a small one ({_in_a_line(error)})"
        ) from error


def _check_logits(ours: PreTrainedModel, theirs: PreTrainedModel, wanted: Tensor) -> None:
    first = 0
    for draw in range(_DRAWS):
        ids = _ids(theirs, draw)
        want = wanted if draw == 0 else _stock(theirs, ids)
        first = _first_apart(_flattened(ours, ids), want)
        if first < 0:
            return
    raise Inexpressible(
        f"Ostinato's forward pass gives other logits than transformers' own from token {first + 1} of a sequence on{_guess(first)}"
    )


def _library(config: Any) -> tuple[Any, PreTrainedModel, Tensor]:
    """The smallest copy of the configuration that the library can compute, its model of it, and that model's logits."""
    problem: Exception | None = None
    for small in miniatures(config):
        try:
            with torch.device("meta"):
                cut(small, depth_of(_from_config(small)))
            model = _from_config(small)
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
    raise Inexpressible(f"transformers {_transformers()} itself cannot compute a small one ({why})")


def _from_config(config: Any) -> Any:
    made: Any = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        trust_remote_code=False,
    )
    return made.eval()


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
    return logits(model, hidden(model, torch.cat(ids), positions, CausalAttend([len(part) for part in ids])))


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


def _named(config: Any) -> str:
    return f"models of type {config.model_type!r}"


def _in_a_line(error: Exception) -> str:
    """An error of the library as part of a sentence: its kind and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"


def _transformers() -> str:
    return version("transformers")


def _key(file: Path, kernels: str) -> str:
    """A hash of everything that the outcome depends on."""
    versions = (_CHECK, kernels, _transformers(), torch.__version__, __version__)
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


def _keep(place: Path, found: dict[str, Any]) -> None:
    """Write for the next start. A cache that cannot be written costs a second each time, and is no error."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(handle, "w") as stream:
            json.dump(found, stream)
        os.replace(name, place)
