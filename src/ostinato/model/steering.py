"""Logit steering of one answer: what a person's dials add to each row of logits, and what came of it, token by token.

One definition for the sampler, which goes token by token, and for the trainer, which replays a stored answer. The arithmetic of a row
is `kernels.steering`.
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

_WINDOW = 64  # bytes of the answer's end in which a tool call is looked for
_PACKED = 1024  # tokens of prompts and answers that are computed at once


@dataclass(frozen=True, slots=True)
class SteeredToken:
    """What steering did to a row of logits: the exact KL(steered || base) in nats, and E[u] of each dial under the steered distribution."""

    kl: float
    means_K: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogitSteering:
    """The steering of a row of logits by some dials: the same at every token of an answer. `pushes_M`: before the scale. `on_token` is
    told of each row.
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
        """clip(sum_k z_k u_k, -clip, clip), added in fp64 in the order of the dials and rounded once, for any CPU the same."""
        sums_M = np.zeros(len(basis.tokens_M), np.float64)
        for dial, directions_M in zip(dials, basis.directions_KM, strict=True):
            sums_M += np.float64(np.float32(dial)) * directions_M
        pushes_M = np.clip(sums_M, -clip, clip).astype(np.float32)
        return cls(basis.tokens_M, pushes_M, basis.directions_KM, cap, np.float32(logit_divisor(temperature)))

    def apply(self, logits_V: Tensor) -> SteeredToken:
        """Steer a row of fp32 logits in place, on whatever device."""
        row_V = logits_V.contiguous().cpu()
        means_K, found = np.empty(len(self.directions_KM), np.float64), np.empty(2, np.float64)
        cap = np.float64(self.cap)
        steer(array(row_V), self.divisor, self.tokens_M, self.pushes_M, cap, self.directions_KM, means_K, found)
        if row_V.data_ptr() != logits_V.data_ptr():
            at_M = torch.from_numpy(self.tokens_M)
            logits_V[at_M.to(logits_V.device)] = row_V[at_M].to(logits_V.device)
        token = SteeredToken(float(found[0]), means_K)
        if self.on_token is not None:
            self.on_token(token)
        return token


_LINE = 1024  # bytes of a line that are looked at
_OPENS = re.compile(rb"[ \t>]*(`{3,}(?=[^`]*$)|~{3,})")
_CLOSES = re.compile(rb"[ \t>]*(`{3,}|~{3,})[ \t\r]*")


class CodeFences:
    r"""Where a growing text is inside of a fenced code block (CommonMark 4.5): from its third backtick or tilde to the end of the line that
    closes it. Fences may be indented at will, as in lists and quotations.

    Example: after ``fences.feed(b"So:\n```py")`` ``fences.inside`` is true, and false again after ``fences.feed(b"\nx = 1\n```\n")``.
    """

    def __init__(self) -> None:
        self._fence, self._line = b"", b""
        self.inside = False

    def feed(self, data: bytes) -> None:
        """Take in more of the text."""
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
    """The steering of answers by one bias on their logits, for a server that takes biases and nothing else: the same at each token to the
    end, in tool calls and code as well. `biases` is by token; empty where a form is demanded.

    Example: ``StaticSteering(asked, sampling).result(24)``
    """

    def __init__(self, asked: Steering, sampling: Sampling) -> None:
        divisor = logit_divisor(sampling.temperature)
        self._asked, self._off = asked, bool(sampling.grammar)
        self._clip = static_clip(asked, sampling.max_tokens, divisor)
        logits = LogitSteering.of(asked.basis, asked.dials, asked.cap, sampling.temperature, self._clip)
        pushes_M = np.zeros_like(logits.pushes_M) if self._off else logits.pushes_M
        self.biases = {int(token): float(push) for token, push in zip(logits.tokens_M, pushes_M, strict=True) if push}
        moves = (0.0, *self.biases.values())  # 0: of all other tokens
        self._bound = ((max(moves) - min(moves)) / divisor) ** 2 / 8.0  # nats a token

    def result(self, tokens: int) -> Steered:
        """What came of so many tokens; `kl` is what is proven of it."""
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
    """The steering of one answer: it ends where its budget could be exceeded, or a tool call begins, leaves fenced code alone, and is
    recorded for each token.

    Args:
        asked: how the answer is to be steered.
        logits: the same for each row, shared by the answers of a request.
        opens_call: whether a tool call begins in a text.
        spell: the bytes of a token.
        off: nothing is to be steered, because the answer's form is demanded.

    Example::

        rows = steering.row()  # None: the next token is the base model's
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
        """What is done to the next row of logits: nothing in fenced code, and once a further token at the cap would exceed the budget."""
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
        found_K = logits.directions_KM[:, place].astype(np.float64) if known else 0.0
        self._features_K = self._features_K + (found_K - drawn.means_K) / np.float64(logits.divisor)
        self._kl += drawn.kl
        self._tokens += 1

    def result(self) -> Steered:
        """What came of the tokens so far."""
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


# ---------------------------------------------------------------- what a basis is fitted to


Answer = tuple[Sequence[int], Sequence[int]]
"""The ids of a prompt, and of the answer to it."""


def mean_probabilities(model: PreTrainedModel, answers: Sequence[Answer]) -> NDArray[np.float64]:
    """[V]: the mean over the answers' tokens of the distribution that each was drawn from at temperature 1."""
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
    """[N, M]: for each answer the gradient of its log-probability with respect to a constant added to each of these tokens' logits.

    It is the sum over the answer's tokens of 1[token = v] - p(v), at temperature 1. `done` is told how many answers are done.
    """
    found_NM, number = np.zeros((len(answers), len(tokens_M))), 0
    for some in _packed(answers):
        for (_, sampled), logits_TV in zip(some, _teacher_forced(model, some), strict=True):
            at_M = torch.from_numpy(tokens_M).to(logits_TV.device)
            expected_M = logits_TV.softmax(-1).sum(0)[at_M].double().cpu().numpy()
            found_NM[number] = np.bincount(sampled, minlength=logits_TV.shape[1])[tokens_M] - expected_M
            number += 1
        done(number)
    return found_NM


def _packed(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Answers in order, together as many as have at most `_PACKED` tokens."""
    some: list[Answer] = []
    used = 0
    for answer in answers:
        size = len(answer[0]) + len(answer[1])
        if some and used + size > _PACKED:
            yield some
            some, used = [], 0
        some.append(answer)
        used += size
    if some:
        yield some


@torch.inference_mode()
def _teacher_forced(model: PreTrainedModel, answers: Sequence[Answer]) -> list[Tensor]:
    """For each answer [T, V]: the fp32 logits that each of its tokens was drawn from."""
    own = backend_of(model).kernels == "own"
    whole = [[*prompt, *sampled][:-1] for prompt, sampled in answers]
    lengths = [len(ids) for ids in whole]
    ids_N = torch.tensor([id for ids in whole for id in ids]).to(model.device)
    places_N = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    states_ND = hidden(model, ids_N, places_N, WholeAttend(lengths) if own else CausalAttend(lengths))
    drawn = [part[len(prompt) - 1 :] for (prompt, _), part in zip(answers, states_ND.split(lengths), strict=True)]
    return list(logits(model, torch.cat(drawn)).float().split([len(part) for part in drawn]))
