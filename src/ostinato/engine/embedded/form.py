"""The engine's form of a model: all layers in one call, or fused layers, if that changes no bit; otherwise linear layers in panels.

If rounding to integers is requested, the decoder's linear layers are rounded, in the same forms (`quantized`).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ostinato.engine.embedded.condensed import condense
from ostinato.engine.embedded.fused import fuse
from ostinato.engine.embedded.quantized import quantise
from ostinato.model.attention import hidden
from ostinato.model.cpu import team
from ostinato.model.experts import lay_out_experts
from ostinato.model.linear import Integers, replace_by_panels
from ostinato.model.load import empty_model
from ostinato.model.paged import WholeAttend
from ostinato.model.selftest import filled, vocabulary_of

_TIMED = (1, 8, 32, 128)  # rows
_TIMES = 5


def prepack(model: nn.Module, integers: Integers | None = None) -> int:
    """Bring a model, or a part of a model, into the engine's form, in place. Returns how many linear layers were laid out anew.

    Results keep their bits, unless a model's decoder is rounded to `integers`. Raises BadConfig for a model that cannot be rounded.
    """
    if not isinstance(model, PreTrainedModel):
        return replace_by_panels(model)
    taken = (condense(model) or fuse(model)) if integers is None else quantise(model, integers)
    lay_out_experts(model)
    return taken + replace_by_panels(model)


@torch.inference_mode()
def times_as_fast(path: Path, dtype: torch.dtype, integers: Integers) -> dict[int, float]:
    """By number of rows: the speed of decoder layers rounded to `integers`, over the same layers in the engine's usual form, on one thread.

    A row is the next token of a sequence of its own, as when so many streams generate. The model in the directory `path` gives the layers,
    one of each kind. A short measurement, so other work on the machine affects it. Raises BadConfig for a model that cannot be rounded.
    """
    forms = [filled(empty_model(path, dtype, shallow=True)) for _ in range(2)]
    prepack(forms[0])
    prepack(forms[1], integers)
    found: dict[int, float] = {}
    with team(1):
        for rows in _TIMED:
            plain, rounded = _seconds(forms, rows)
            found[rows] = plain / rounded
    return found


def _seconds(models: list[PreTrainedModel], rows: int) -> list[float]:
    """The fastest of a few calls of each, which take turns."""
    ids, positions = torch.arange(rows) % vocabulary_of(models[0]), torch.zeros(rows, dtype=torch.long)
    best = [float("inf")] * len(models)
    for _ in range(1 + _TIMES):  # what the first call compiles or lays out is not in the fastest
        for number, model in enumerate(models):
            attend = WholeAttend([1] * rows)
            began = time.perf_counter()
            hidden(model, ids, positions, attend)
            best[number] = min(best[number], time.perf_counter() - began)
    return best
