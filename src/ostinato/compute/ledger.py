"""Operations by phase, counted from the lengths of turns and batches; and the number of rollout workers for a given share of them.

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


# ---------------------------------------------------------------- rollout workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRules:
    """Sampling should get `share` of the time of all workers, including borrowed ones.

    Nothing moves for a gap of less than `slack` workers (hysteresis), and at most `moves` workers move at once.

    Example: ``ShareRules(share=1 / 3)``
    """

    share: float = 1 / 3
    slack: float = 0.75
    moves: int = 4


def rollout_workers(rules: ShareRules, workers: int, least: int, most: int, observed: float) -> int:
    """The number of rollout workers wanted, given `workers` now and sampling's share `observed` of all operations.

    The trainer stays while rollout workers come and go, so sampling's operations are assumed to grow with their number and training's not
    to. The target brings sampling's odds to those of the share. If something else limits sampling (the turns ready for the trainer, or the
    engine), the number ends at `most` or `least`.

    Example: ``rollout_workers(ShareRules(share=0.5), 2, 1, 8, observed=1 / 3) == 4``
    """
    seen = min(max(observed, 1e-3), 1 - 1e-3)
    wanted = max(1, workers) * (rules.share / (1 - rules.share)) / (seen / (1 - seen))
    gap = min(float(most), max(float(least), wanted)) - workers
    if abs(gap) < rules.slack and least <= workers <= most:
        return workers
    return min(most, max(least, workers + max(-rules.moves, min(rules.moves, round(gap)))))
