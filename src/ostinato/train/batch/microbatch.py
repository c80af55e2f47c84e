"""Micro-batches: samples -> packed token trees with everything that the loss reads, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.core.records import PolicyVersion, Turn
from ostinato.core.samples import Sample
from ostinato.train.batch.packing import Packed, TokenTurn, microbatches, pack
from ostinato.train.batch.replay import Routes
from ostinato.train.gradients.tree_attention import TreeAttention


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """One micro-batch: the packed tree and, for its M sampled tokens, what the loss reads; after the pass, what came out.

    `turns_M` counts the micro-batch's turns from 0. `shares_M`: the turn's part of its episode. `foreign_M`: made under another
    numerics contract than the trainer's. `keep_M`: not left out by the sequence mask. `routes`: the experts to replay, None for a
    model without.
    """

    packed: Packed
    attend: TreeAttention
    temperatures_M: Tensor
    behaviour_M: Tensor
    advantages_M: Tensor
    shares_M: Tensor
    turns_M: Tensor
    foreign_M: Tensor
    versions_M: list[PolicyVersion]
    routes: Routes | None = None
    reference_M: Tensor | None = None
    logprobs_M: Tensor = field(default_factory=lambda: torch.empty(0))
    keep_M: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    @property
    def kept(self) -> int:
        """Turns that the mask left in."""
        return len(torch.unique(self.turns_M[self.keep_M]))


def make_microbatches(
    samples: Sequence[Sample],
    budget: int,
    foreign: Callable[[Turn], bool],
    routes: Callable[[Packed, Sequence[Turn]], Routes | None],
) -> list[Microbatch]:
    """Cut samples into micro-batches of at most `budget` packed tokens."""
    tokens = token_turns([sample.turn for sample in samples])
    work: list[Microbatch] = []
    for chosen in microbatches(tokens, budget):
        packed = pack([tokens[index] for index in chosen])
        turns = [samples[index].turn for index in chosen]
        credit = [samples[index].advantages for index in chosen]
        shares = np.array([samples[index].weight for index in chosen], np.float32)
        labels = np.array([foreign(turn) for turn in turns], np.bool_)
        work.append(
            Microbatch(
                packed=packed,
                attend=TreeAttention(packed),
                temperatures_M=temperatures(turns),
                behaviour_M=torch.tensor([value for turn in turns for value in turn.logprobs], dtype=torch.float32),
                advantages_M=torch.tensor([value for turn in credit for value in turn], dtype=torch.float32),
                shares_M=torch.from_numpy(shares[packed.turns_M]),
                turns_M=torch.from_numpy(packed.turns_M),
                foreign_M=torch.from_numpy(labels[packed.turns_M]),
                versions_M=[version for turn in turns for version in turn.versions_T()],
                routes=routes(packed, turns),
            )
        )
    return work


def token_turns(turns: Sequence[Turn]) -> list[TokenTurn]:
    """What packing needs of turns that have a prompt and sampled tokens."""
    return [TokenTurn(prompt=turn.prompt_ids, sampled=turn.sampled_ids) for turn in turns]


def temperatures(turns: Sequence[Turn]) -> Tensor:
    """Per sampled token. Greedy turns (temperature 0) are recorded with the logprobs of temperature 1."""
    values = [turn.sampling.temperature or 1.0 for turn in turns for _ in turn.sampled_ids]
    return torch.tensor(values, dtype=torch.float32)
