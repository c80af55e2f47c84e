"""Checks whether a model in another form computes the same bits: it is compared with its original form, once per configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.model.attention import Attend, hidden
from ostinato.model.exactness import bits_of, vocabulary_of
from ostinato.model.paged import WholeAttend
from ostinato.model.threads import team

_COUNTS = (1, 2, 3, 5)  # of tokens, at which models are compared
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Reach:
    """A layer's attention parameters besides its queries, keys and values; see `model.attention.Attend`."""

    scale: float
    window: int


Found = dict[tuple[str, torch.dtype], tuple[Reach, ...] | None]
"""By configuration and dtype: each layer's attention parameters, or None if the form changes a bit."""


def count_linears(part: nn.Module) -> int:
    """The number of linear layers in a module."""
    return sum(isinstance(each, nn.Linear) for each in part.modules())


def tried_once(
    known: Found,
    model: PreTrainedModel,
    attempt: Callable[[], tuple[tuple[Reach, ...] | None, bool]],
    exchange: Callable[[tuple[Reach, ...]], None],
) -> None:
    """Replace a model's parts: by `attempt` for a configuration that is not yet `known`, later by `exchange` with its result, if any.

    `attempt` returns each layer's attention parameters, or None if it left the parts unchanged; and whether the result is valid for
    other weights too.
    """
    key = (model.config.to_json_string(use_diff=False), model.dtype)
    with _LOCK:
        if key not in known:
            found, telling = attempt()
            if telling:
                known[key] = found
        elif (reaches := known[key]) is not None:
            exchange(reaches)


class RecordedAttention:
    """Attention over one whole sequence that records each layer's attention parameters."""

    def __init__(self, tokens: int) -> None:
        self._whole = WholeAttend([tokens])
        self.reaches: list[Reach] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        self.reaches.append(Reach(scale, window))
        return self._whole(layer, q, k, v, scale, window)


def answers(
    model: PreTrainedModel, attending: Callable[[int], Attend] = RecordedAttention
) -> tuple[list[Tensor], tuple[Reach, ...]]:
    """Bits of the model's final states for several runs of tokens, and each layer's attention parameters in the last run.

    `attending` makes the attention over a given number of tokens. The parameters are empty unless it makes a `RecordedAttention`.
    """
    found: list[Tensor] = []
    attend: Attend = RecordedAttention(0)
    with team(1):  # whichever thread this is, so that the compared bits come from equal thread counts
        for first, count in runs_of(model.config.get_text_config()):
            attend = attending(count)
            ids = torch.randint(vocabulary_of(model), (count,), generator=torch.Generator().manual_seed(count))
            found.append(bits_of(hidden(model, ids, torch.arange(first, first + count), attend)))
    return found, tuple(attend.reaches) if isinstance(attend, RecordedAttention) else ()


def runs_of(config: Any) -> list[tuple[int, int]]:
    """(first position, tokens): short runs from the beginning, and long runs at positions where a model may compute differently.

    Some models change with the position: Ministral 3 scales its queries from the length at which it was first trained.
    """
    longest = _COUNTS[-1]
    ends = cast("int | None", getattr(config, "max_position_embeddings", None)) or 0
    far = {length - longest // 2 for length in _first_lengths(config)} | {ends - longest}
    return [(0, count) for count in _COUNTS] + [(first, longest) for first in sorted(far) if first > 0]


def _first_lengths(config: Any) -> set[int]:
    """The lengths at which a model was trained before its rotary embeddings were stretched, according to its configuration."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    told = [vars(config), rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    lengths = (cast("dict[str, Any]", each).get("original_max_position_embeddings") for each in told)
    return {length for length in lengths if isinstance(length, int)}
