"""Logit processors: grammar masks, biases and penalties that a request's sampling asks for, and steering.

The sampler, which works token by token, and the trainer, which replays a stored answer, share this definition. So the recorded
log-probability and the trained one refer to the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling
from ostinato.model.grammars import Grammars
from ostinato.model.steering import LogitSteering, SteeredToken


@dataclass(frozen=True, slots=True)
class Edit:
    """The edit of one token's V logits: add `values` at `ids`, then apply `steering`, then set the logits not `allowed` to -inf.

    `allowed`: a bit mask of V bits, in little bit order, as bytes; None allows all.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    allowed: NDArray[np.uint8] | None
    steering: LogitSteering | None = None


UNEDITED = Edit(np.empty(0, np.int64), np.empty(0, np.float32), None)
"""An edit that changes nothing."""

Edits = Callable[[int, int], Mapping[int, Edit]]
"""Returns the edits of tokens [start, stop), by token; tokens without an edit are left out."""


class LogitEditor:
    """Makes the edits of one answer, token by token. The cost per token does not grow with the answer.

    Penalties as OpenAI defines them (API reference, "frequency and presence penalties"): logit - presence * [count > 0] - frequency *
    count, where count is how often the answer holds the token so far.

    Args:
        sampling: the requested sampling.
        matcher: the matcher of its grammar, at the beginning; None without a grammar.
        failed: called when the matcher fails.
    """

    def __init__(
        self, sampling: Sampling, matcher: LLMatcher | None, failed: Callable[[], None] = lambda: None
    ) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._matcher, self._failed = matcher, failed
        self._failure = ""
        self._places: dict[int, int] = {}  # token -> its index in the arrays
        self._ids, self._values = np.empty(16, np.int64), np.zeros(16, np.float32)
        self._met: set[int] = set()
        for token, value in sampling.logit_bias:
            self._add(token, value)

    @classmethod
    def of(cls, sampling: Sampling, grammars: Grammars | None) -> LogitEditor | None:
        """Return the editor for a sampling; None if it edits no logits. Raises BadRequest for a bad grammar, or one without `grammars`."""
        if not sampling.edits_logits:
            return None
        if not sampling.grammar:
            return cls(sampling, None)
        if grammars is None:
            raise BadRequest("this engine cannot enforce a grammar; send tool_choice 'auto' and no format")
        return cls(sampling, grammars.matcher(sampling.grammar), partial(grammars.forget, sampling.grammar))

    def copy(self) -> LogitEditor:
        """Return an independent editor at the same position in the answer."""
        other = copy(self)
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        other._places, other._met = self._places.copy(), self._met.copy()
        other._ids, other._values = self._ids.copy(), self._values.copy()
        return other

    def edit(self) -> Edit:
        """Return the edit of the next token's logits."""
        count = len(self._places)
        allowed = None if self._matcher is None else np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return Edit(self._ids[:count].copy(), self._values[:count].copy(), allowed)

    def take(self, token: int) -> str:
        """Record a sampled token. Returns why the answer violates the grammar; "" if it can continue, or is complete."""
        if self._presence or self._frequency:
            self._add(token, -self._frequency - (0.0 if token in self._met else self._presence))
            self._met.add(token)
        matcher = self._matcher
        if matcher is None or self._failure:
            return self._failure
        # is_error first: a matcher that failed while it computed the mask still accepts an end token
        if matcher.is_error() or not matcher.consume_token(token):
            self._failure = matcher.get_error() or "the grammar does not allow the token"
            self._failed()
        return self._failure

    def _add(self, token: int, value: float) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._values = np.concatenate([self._values, np.zeros_like(self._values)])
        self._ids[place] = token
        self._values[place] += value


def edit_logits(logits_MV: Tensor, edits: Mapping[int, Edit]) -> tuple[Tensor, dict[int, SteeredToken]]:
    """Edit rows of logits on their device; return the edited logits, and the effect of steering by row. `edits`: by row.

    Values are added in fp32, because bf16 logits near 25 are 0.125 apart and would lose smaller additions. If any are added, the result is
    an fp32 copy, in which unedited rows keep their values; else the logits are edited in place.
    """
    vocab, device = logits_MV.shape[1], logits_MV.device
    steered: dict[int, SteeredToken] = {}
    if any(len(edit.ids) or edit.steering is not None for edit in edits.values()):
        logits_MV = logits_MV.float()
    for row, edit in edits.items():
        logits_V = logits_MV[row]
        if len(edit.ids):
            logits_V[torch.from_numpy(edit.ids).to(device)] += torch.from_numpy(edit.values).to(device)
        if edit.steering is not None:
            steered[row] = edit.steering.apply(logits_V)
        if edit.allowed is not None:
            bits_V = np.unpackbits(edit.allowed, count=vocab, bitorder="little")
            logits_V.masked_fill_(torch.from_numpy(bits_V == 0).to(device), -torch.inf)
    return logits_MV, steered
