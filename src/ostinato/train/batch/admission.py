"""Selects the samples that can be learned from; the others are dropped and counted by reason."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.errors import NoSignal
from ostinato.core.numerics import Contract
from ostinato.core.records import Turn
from ostinato.core.samples import Sample
from ostinato.train.batch.edits import AnswerEdits
from ostinato.train.batch.replay import Experts


class Admission:
    """Admits a sample if it has tokens, an arithmetic that may be trained on, and logit edits and routes that can be replayed.

    Args:
        contract: the trainer's; None: it was not measured, and no turn is foreign.
        refuse_foreign: leave turns of another contract out.
        experts: knows which routes can be replayed.
        edits: knows which edits of logits can be replayed.
    """

    def __init__(
        self, contract: Contract | None, *, refuse_foreign: bool, experts: Experts, edits: AnswerEdits
    ) -> None:
        self._contract, self._refuse, self._experts, self._edits = contract, refuse_foreign, experts, edits

    def foreign(self, turn: Turn) -> bool:
        """True if the turn was made under another contract than the trainer's; unknown arithmetic counts as another."""
        return self._contract is not None and turn.numerics != self._contract.id

    def admit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """The samples that can be learned from, and how many were dropped for each reason. Raises NoSignal if none is left."""
        full = [sample for sample in samples if sample.turn.prompt_ids and sample.turn.sampled_ids]
        if not full:
            raise NoSignal(f"none of {len(samples)} turns has a sampled token: hold such turns back, do not batch them")
        own = [sample for sample in full if not (self._refuse and self.foreign(sample.turn))]
        if not own:
            raise NoSignal(
                f"none of {len(full)} turns was made under the trainer's numerics contract "
                f"{self._contract.id if self._contract else ''}: give engine and trainer the same one (`ostinato status` shows "
                "both), or set train.foreign_numerics to 'label'"
            )
        edited = [sample for sample in own if self._edits.admits(sample.turn)]
        if not edited:
            raise NoSignal(f"none of {len(own)} turns follows its grammar as this llguidance reads it; see the log")
        routed = [sample for sample in edited if self._experts.admits(sample.turn)]
        if not routed:
            raise NoSignal(
                f"none of {len(edited)} turns has routes that can be replayed; train.router_replay=false does without"
            )
        return routed, {
            "turns": float(len(routed)),
            "turns_empty": float(len(samples) - len(full)),
            "refused_turns": float(len(full) - len(own)),
            "grammar_refused": float(len(own) - len(edited)),
            "router_refused": float(len(edited) - len(routed)),
        }
