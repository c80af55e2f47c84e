"""Micro-batches: samples -> packed token trees with everything that the loss needs, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ostinato.core.records import PolicyVersion, Turn, logit_divisor
from ostinato.core.samples import Sample
from ostinato.model.logit_edits import Edit, Edits
from ostinato.train.config import TrainConfig
from ostinato.train.packing import PackedBatch, TokenTurn, microbatches, pack
from ostinato.train.replay import Routes
from ostinato.train.tree_attention import TreeAttention


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """One micro-batch: the packed tree, the loss's inputs for its M sampled tokens of S turns, and, after the pass, its results.

    `turns_M` counts the micro-batch's turns from 0; `weights_S` are their shares of their episodes, `factors_S` the weights of their
    tokens in the loss. `foreign_M`: made under another numerics contract than the trainer's. `edits`: the changes made to the logits
    of some of the M tokens. `hinted`: the same tokens behind prompts with hints, if the samples have any. `routes`: the experts to
    replay, None for a model without experts. `release_M` and `anchor_M`: the log-probabilities under the release and under the anchor, if
    they were computed. `keep_M`: not left out by the sequence mask.
    """

    packed: PackedBatch
    attend: TreeAttention
    temperatures_M: Tensor
    behaviour_M: Tensor
    advantages_M: Tensor
    turns_M: Tensor
    weights_S: Tensor
    factors_S: Tensor
    foreign_M: Tensor
    versions_M: Sequence[PolicyVersion]
    edits: Edits | None = None
    routes: Routes | None = None
    hinted: TreeAttention | None = None
    release_M: Tensor | None = None
    anchor_M: Tensor | None = None
    logprobs_M: Tensor = field(default_factory=lambda: torch.empty(0))
    keep_M: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    @property
    def shares_M(self) -> Tensor:
        """Each token's weight in the loss: its turn's share of its episode, or 1 if an episode's tokens are summed."""
        return self.factors_S[self.turns_M]

    @property
    def kept_S(self) -> Tensor:
        """The turns that the mask kept; it keeps or drops whole turns."""
        kept_S = torch.zeros(len(self.weights_S), dtype=torch.bool)
        kept_S[self.turns_M[self.keep_M]] = True
        return kept_S

    def made_by(self, policy: Callable[[PolicyVersion], bool]) -> Tensor:
        """Return [M]: True for tokens made, like all earlier ones of their turn, by such a policy: after a swap, older keys may be read."""
        own_M = torch.tensor([policy(version) for version in self.versions_M])
        others_M = (~own_M).long().cumsum(0)
        first_M = torch.searchsorted(self.turns_M, self.turns_M)  # the first token of each token's turn
        before_M = others_M[first_M] - (~own_M[first_M]).long()
        return others_M == before_M


def packed_trees(turns: Sequence[TokenTurn], config: TrainConfig) -> Iterator[tuple[list[int], PackedBatch]]:
    """Yield the micro-batches of some turns (`packing.microbatches`): the indices of the turns, and their token tree."""
    for chosen in microbatches(turns, config.microbatch_tokens, largest=config.largest_microbatch):
        yield chosen, pack([turns[index] for index in chosen])


def make_microbatches(
    samples: Sequence[Sample],
    config: TrainConfig,
    foreign: Callable[[Turn], bool],
    routes: Callable[[PackedBatch, Sequence[Turn]], Routes | None],
    edits: Callable[[Sequence[Turn], int, int], Mapping[int, Edit]],
    on_layer: Callable[[], None],
) -> list[Microbatch]:
    """Cut samples into micro-batches.

    `foreign` labels turns, `routes` lays out their experts, `edits` replays the changes to their logits,
    `on_layer` is called at each layer of each pass.
    """
    work: list[Microbatch] = []
    for chosen, packed in packed_trees(token_turns([sample.turn for sample in samples]), config):
        turns = [samples[index].turn for index in chosen]
        credit = [samples[index].advantages for index in chosen]
        prompts = [samples[index].hinted for index in chosen]
        hinted = [
            TokenTurn(prompt=prompt, sampled=turn.sampled_ids)
            for prompt, turn in zip(prompts, turns, strict=True)
            if prompt
        ]
        labels = np.array([foreign(turn) for turn in turns], np.bool_)
        work.append(
            Microbatch(
                packed=packed,
                attend=TreeAttention(packed, on_layer=on_layer),
                temperatures_M=temperatures(turns),
                behaviour_M=torch.tensor([value for turn in turns for value in turn.logprobs], dtype=torch.float32),
                advantages_M=torch.tensor([value for turn in credit for value in turn], dtype=torch.float32),
                turns_M=torch.from_numpy(packed.turns_M),
                weights_S=torch.tensor([samples[index].weight for index in chosen], dtype=torch.float32),
                factors_S=torch.tensor([samples[index].factor for index in chosen], dtype=torch.float32),
                foreign_M=torch.from_numpy(labels[packed.turns_M]),
                versions_M=[version for turn in turns for version in turn.versions_T()],
                edits=partial(edits, turns),
                routes=routes(packed, turns),
                hinted=TreeAttention(pack(hinted), on_layer=on_layer) if hinted else None,
            )
        )
    return work


def idle_microbatch() -> Microbatch:
    """Return a micro-batch that teaches nothing, for a rank without work, because all ranks must compute the same number of times."""
    packed = pack([TokenTurn(prompt=(0,), sampled=(0,))])
    return Microbatch(
        packed=packed,
        attend=TreeAttention(packed),
        temperatures_M=torch.ones(1),
        behaviour_M=torch.zeros(1),
        advantages_M=torch.zeros(1),
        turns_M=torch.from_numpy(packed.turns_M),
        weights_S=torch.zeros(1),
        factors_S=torch.zeros(1),
        foreign_M=torch.ones(1, dtype=torch.bool),
        versions_M=[PolicyVersion(number=0, hash="")],
    )


def token_turns(turns: Sequence[Turn]) -> list[TokenTurn]:
    """Convert turns to the form that packing needs; each must have a prompt and sampled tokens."""
    return [TokenTurn(prompt=turn.prompt_ids, sampled=turn.sampled_ids) for turn in turns]


def temperatures(turns: Sequence[Turn]) -> Tensor:
    """Return the temperature of each sampled token. Greedy turns (temperature 0) are recorded with the logprobs of temperature 1."""
    values = [logit_divisor(turn.sampling.temperature) for turn in turns for _ in turn.sampled_ids]
    return torch.tensor(values, dtype=torch.float32)
