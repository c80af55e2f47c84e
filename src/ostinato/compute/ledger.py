"""Operations by phase, counted from the lengths of turns and batches. Pure.

"A third on inference" was published in two senses: a third of all compute is spent on sampling; or sampling gets a third of what training
gets, one forward pass against the equivalent of three, which is a quarter of both together. The ledger reports both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ostinato.compute.work import TokenWork, causal_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLedger:
    """Operations spent, by phase. `prefill` and `decode` exclude turns of evaluation.

    Example: ``OperationLedger(prefill=1e12, decode=1e12, forward=2e12, backward=4e12).of_all == 0.25``
    """

    prefill: float = 0.0
    decode: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    evaluation: float = 0.0

    @property
    def sampling(self) -> float:
        """Prefill and decode."""
        return self.prefill + self.decode

    @property
    def training(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """All phases, including evaluation."""
        return self.sampling + self.training + self.evaluation

    @property
    def of_all(self) -> float:
        """Sampling as a share of everything (the first sense). 0 if nothing was spent."""
        return self.sampling / self.total if self.total else 0.0

    @property
    def per_training(self) -> float | None:
        """Sampling operations per training operation (the second sense). None before the first step."""
        return self.sampling / self.training if self.training else None

    def served(self, work: TokenWork, prompt: int, cached: int, answer: int, *, evaluation: bool) -> OperationLedger:
        """The ledger with one more turn.

        The prompt after its `cached` tokens is prefilled, which gives the first token's logits; each other sampled token takes one pass.
        """
        new, rest = prompt - cached, max(0, answer - 1)
        prefill = work.forward(new, causal_pairs(new, cached), 1 if answer else 0)
        decode = work.forward(rest, causal_pairs(rest, prompt), rest)
        if evaluation:
            return replace(self, evaluation=self.evaluation + prefill + decode)
        return replace(self, prefill=self.prefill + prefill, decode=self.decode + decode)

    def stepped(self, work: TokenWork, turns: Iterable[tuple[int, int, int]]) -> OperationLedger:
        """The ledger with one more optimizer step over turns of (prompt, prompt tokens shared with another turn of the step, answer).

        Answers are scored; the backward pass recomputes nothing.
        """
        forward = 0.0
        for prompt, shared, answer in turns:
            new = prompt - shared + answer
            forward += work.forward(new, causal_pairs(new, shared), answer)
        return replace(self, forward=self.forward + forward, backward=self.backward + 2 * forward)
