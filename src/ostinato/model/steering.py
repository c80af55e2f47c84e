"""Logit steering: what a person's dials add to each row of logits, and the resulting KL divergence, token by token.

The sampler, which works token by token, and the trainer, which replays a stored answer, share this definition. The arithmetic of a row
is in `kernels.steering`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.records import Sampling, logit_divisor
from ostinato.core.steering import CLIP, Basis, Steered, Steering, static_clip
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.backend import backend_of
from ostinato.model.kernels.steering import steer
from ostinato.model.paged import WholeAttend, array

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WINDOW = 64  # bytes at the answer's end in which to look for a tool call
_PACK_TOKENS = 1024  # of prompts and answers per forward pass


@dataclass(frozen=True, slots=True)
class SteeredToken:
    """The effect of steering on one row of logits: the exact KL(steered || base) in nats, and each dial's E[u] when steered."""

    kl: float
    means_K: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogitSteering:
    """The steering of rows of logits by some dials, the same at every token of an answer.

    `pushes_M`: the additions to the logits of `tokens_M`, before they are scaled to respect `cap`. `on_token` is called for each row.
    """

    tokens_M: NDArray[np.int64]
    pushes_M: NDArray[np.float32]
    directions_KM: NDArray[np.float32]
    cap: float
    divisor: np.float32
    on_token: Callable[[SteeredToken], None] | None = None

    @classmethod
    def of(
        cls, basis: Basis, dials: Sequence[float], cap: float, temperature: float, clip: float = CLIP
    ) -> LogitSteering:
        """Compute the pushes clip(sum_k z_k u_k, -clip, clip): summed in fp64 in the dials' order, rounded once, the same on any CPU."""
        sums_M = np.zeros(len(basis.tokens_M), np.float64)
        for dial, directions_M in zip(dials, basis.directions_KM, strict=True):
            sums_M += np.float64(np.float32(dial)) * directions_M
        pushes_M = np.clip(sums_M, -clip, clip).astype(np.float32)
        return cls(basis.tokens_M, pushes_M, basis.directions_KM, cap, np.float32(logit_divisor(temperature)))

    def apply(self, logits_V: Tensor) -> SteeredToken:
        """Steer a row of fp32 logits in place, on any device."""
        row_V = logits_V.contiguous().cpu()
        means_K, kl_and_scale = np.empty(len(self.directions_KM), np.float64), np.empty(2, np.float64)
        cap = np.float64(self.cap)
        steer(array(row_V), self.divisor, self.tokens_M, self.pushes_M, cap, self.directions_KM, means_K, kl_and_scale)
        if row_V.data_ptr() != logits_V.data_ptr():
            at_M = torch.from_numpy(self.tokens_M)
            logits_V[at_M.to(logits_V.device)] = row_V[at_M].to(logits_V.device)
        token = SteeredToken(float(kl_and_scale[0]), means_K)
        if self.on_token is not None:
            self.on_token(token)
        return token


_LINE = 1024  # bytes of a line that are examined
_OPENS = re.compile(rb"[ \t>]*(`{3,}(?=[^`]*$)|~{3,})")
_CLOSES = re.compile(rb"[ \t>]*(`{3,}|~{3,})[ \t\r]*")


class CodeFences:
    r"""Tracks whether a growing text is inside a fenced code block (CommonMark 4.5).

    A block reaches from its third backtick or tilde to the end of the line that closes it. Fences may have any indentation, as in lists
    and quotations.

    Example: after ``fences.feed(b"So:\n```py")`` ``fences.inside`` is true, and false again after ``fences.feed(b"\nx = 1\n```\n")``.
    """

    def __init__(self) -> None:
        self._fence, self._line = b"", b""
        self.inside = False

    def feed(self, data: bytes) -> None:
        """Add more text."""
        *whole, last = (self._line + data).split(b"\n")
        for line in whole:
            if not self._fence:
                found = _OPENS.match(line)
                self._fence = b"" if found is None else found[1]
            elif (found := _CLOSES.fullmatch(line)) and found[1].startswith(self._fence):
                self._fence = b""
        self._line = last[:_LINE]
        self.inside = bool(self._fence) or _OPENS.match(self._line) is not None


class StaticSteering:
    """Steering by constant logit biases, for a server that supports nothing else: the same at each token, in tool calls and code too.

    `biases`: by token id; empty if the answer must follow a grammar.

    Example: ``StaticSteering(asked, sampling).result(24)``
    """

    def __init__(self, asked: Steering, sampling: Sampling) -> None:
        divisor = logit_divisor(sampling.temperature)
        self._asked, self._off = asked, bool(sampling.grammar)
        self._clip = static_clip(asked, sampling.max_tokens, divisor)
        logits = LogitSteering.of(asked.basis, asked.dials, asked.cap, sampling.temperature, self._clip)
        pushes_M = np.zeros_like(logits.pushes_M) if self._off else logits.pushes_M
        self.biases = {int(token): float(push) for token, push in zip(logits.tokens_M, pushes_M, strict=True) if push}
        moves = (0.0, *self.biases.values())  # 0 for all other tokens
        self._bound = ((max(moves) - min(moves)) / divisor) ** 2 / 8.0  # nats per token

    def result(self, tokens: int) -> Steered:
        """Return the result after `tokens` tokens; `kl` is a proven upper bound."""
        asked, steered = self._asked, 0 if self._off else tokens
        return Steered(
            basis=asked.basis.hash,
            dials=asked.dials,
            cap=asked.cap,
            budget=asked.budget,
            tokens=steered,
            kl=steered * self._bound,
            features=(),
            clip=self._clip,
        )


class AnswerSteering:
    """The steering of one answer, recorded token by token.

    It stops for good where the next token could exceed the budget, or where a tool call begins. It skips fenced code blocks.

    Args:
        asked: the requested steering.
        logits: the steering of each row, shared by the answers of a request.
        opens_call: returns whether a tool call begins in a text.
        spell: returns the bytes of a token.
        off: disables steering, because the answer must follow a grammar.

    Example::

        rows = steering.row()  # None: the base model draws the next token
        steering.take(token, drawn)  # what `rows.apply` returned, None if it was not called
        steering.result()
    """

    def __init__(
        self,
        asked: Steering,
        logits: LogitSteering,
        opens_call: Callable[[str], bool],
        spell: Callable[[int], bytes],
        *,
        off: bool = False,
    ) -> None:
        self._asked, self._logits, self._opens_call, self._spell = asked, logits, opens_call, spell
        self._kl, self._features_K, self._tokens = 0.0, np.zeros(len(asked.dials)), 0
        self._end, self._over = b"", off
        self._fences, self._skipped, self._gaps = CodeFences(), 0, list[tuple[int, int]]()

    def row(self) -> LogitSteering | None:
        """Return the steering of the next row; None in fenced code, or once one more token at the cap would exceed the budget."""
        spent = self._kl + self._asked.cap > self._asked.budget
        return None if self._over or self._fences.inside or spent else self._logits

    def take(self, token: int, drawn: SteeredToken | None) -> None:
        """Record a drawn token."""
        if drawn is None and not self._fences.inside:
            self._over = True
        if self._over:
            return
        if drawn is None:
            self._skipped += 1
        else:
            self._count(token, drawn)
        spelled = self._spell(token)
        self._fences.feed(spelled)
        self._end = (self._end + spelled)[-_WINDOW:]
        self._over = self._opens_call(self._end.decode(errors="ignore"))

    def _count(self, token: int, drawn: SteeredToken) -> None:
        if self._skipped:
            place = self._tokens + sum(stop - start for start, stop in self._gaps)
            self._gaps.append((place, place + self._skipped))
            self._skipped = 0
        logits = self._logits
        place = int(np.searchsorted(logits.tokens_M, token))
        known = place < len(logits.tokens_M) and logits.tokens_M[place] == token
        directions_K = logits.directions_KM[:, place].astype(np.float64) if known else 0.0
        self._features_K = self._features_K + (directions_K - drawn.means_K) / np.float64(logits.divisor)
        self._kl += drawn.kl
        self._tokens += 1

    def result(self) -> Steered:
        """Return the result of steering so far."""
        asked = self._asked
        return Steered(
            basis=asked.basis.hash,
            dials=asked.dials,
            cap=asked.cap,
            budget=asked.budget,
            tokens=self._tokens,
            kl=self._kl,
            features=tuple(self._features_K.tolist()),
            gaps=tuple(self._gaps),
        )


# ---------------------------------------------------------------- statistics from which a basis is fitted


Answer = tuple[Sequence[int], Sequence[int]]
"""The ids of a prompt and of its answer."""


def mean_probabilities(model: PreTrainedModel, answers: Sequence[Answer]) -> NDArray[np.float64]:
    """Return [V]: the model's next-token distribution at temperature 1, averaged over the answers' tokens."""
    total_V, count = torch.zeros(()).double(), 0
    for some in _packed(answers):
        for logits_TV in _teacher_forced(model, some):
            total_V, count = total_V + logits_TV.softmax(-1).sum(0).double(), count + len(logits_TV)
    return (total_V / max(1, count)).cpu().numpy()


def score_features(
    model: PreTrainedModel,
    answers: Sequence[Answer],
    tokens_M: NDArray[np.int64],
    done: Callable[[int], None] = lambda count: None,
) -> NDArray[np.float64]:
    """Return [N, M]: the gradient of each answer's log-probability with respect to a constant bias on each of these tokens' logits.

    It is the sum over the answer's tokens of 1[token = v] - p(v), at temperature 1. `done` is called with the number of finished answers.
    """
    scores_NM, number = np.zeros((len(answers), len(tokens_M))), 0
    for some in _packed(answers):
        for (_, sampled), logits_TV in zip(some, _teacher_forced(model, some), strict=True):
            at_M = torch.from_numpy(tokens_M).to(logits_TV.device)
            expected_M = logits_TV.softmax(-1).sum(0)[at_M].double().cpu().numpy()
            scores_NM[number] = np.bincount(sampled, minlength=logits_TV.shape[1])[tokens_M] - expected_M
            number += 1
        done(number)
    return scores_NM


def _packed(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Yield packs of consecutive answers with at most `_PACK_TOKENS` tokens each; a longer answer is a pack of its own."""
    some: list[Answer] = []
    used = 0
    for answer in answers:
        size = len(answer[0]) + len(answer[1])
        if some and used + size > _PACK_TOKENS:
            yield some
            some, used = [], 0
        some.append(answer)
        used += size
    if some:
        yield some


@torch.inference_mode()
def _teacher_forced(model: PreTrainedModel, answers: Sequence[Answer]) -> list[Tensor]:
    """Return for each answer [T, V]: the fp32 logits from which each of its tokens is drawn."""
    own = backend_of(model).kernels == "own"
    whole = [[*prompt, *sampled][:-1] for prompt, sampled in answers]
    lengths = [len(ids) for ids in whole]
    ids_N = torch.tensor([id for ids in whole for id in ids]).to(model.device)
    places_N = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    states_ND = hidden(model, ids_N, places_N, WholeAttend(lengths) if own else CausalAttend(lengths))
    drawn = [part[len(prompt) - 1 :] for (prompt, _), part in zip(answers, states_ND.split(lengths), strict=True)]
    return list(logits(model, torch.cat(drawn)).float().split([len(part) for part in drawn]))
