"""Continued pre-training: every token of a text is predicted from those before it, by the same passes as in learning from rewards.

Data flow: pieces of documents -> packed trees, in which no piece sees another -> log-probabilities -> their negative mean, and its
gradient in the masters' sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ostinato.model.memory import GIVE_BACK_EVERY, give_back
from ostinato.train.batch.packing import PackedBatch, TokenTurn, microbatches, pack
from ostinato.train.config import TrainConfig
from ostinato.train.gradients.tree_attention import TreeAttention
from ostinato.train.passes import Laps
from ostinato.train.policy import Policy


def next_token_gradient(policy: Policy, pieces: Sequence[Sequence[int]], config: TrainConfig, laps: Laps) -> float:
    """Add the gradient of the mean surprise over all predictions to the sums; returns that mean, in nats.

    A piece of n tokens holds n - 1 predictions, and needs at least one.
    """
    total = sum(len(piece) - 1 for piece in pieces)
    nats: list[float] = []
    for number, packed in enumerate(_packed(pieces, config), 1):
        loss = -_logprobs(policy, packed).sum() / total
        laps.end("forward")
        loss.backward()
        nats.append(float(loss.detach()))
        if number % GIVE_BACK_EVERY == 0:
            give_back()
        laps.end("backward")
    give_back()
    laps.end("backward")
    return math.fsum(nats)


@torch.no_grad()
def surprise(policy: Policy, pieces: Sequence[Sequence[int]], config: TrainConfig) -> float:
    """Mean nats per prediction under the present weights; nothing is learned."""
    total = sum(len(piece) - 1 for piece in pieces)
    return -math.fsum(float(_logprobs(policy, packed).double().sum()) for packed in _packed(pieces, config)) / total


def _packed(pieces: Sequence[Sequence[int]], config: TrainConfig) -> Iterator[PackedBatch]:
    turns = [TokenTurn(prompt=(piece[0],), sampled=tuple(piece[1:])) for piece in pieces]
    for chosen in microbatches(turns, config.microbatch_tokens, largest=config.largest_microbatch):
        yield pack([turns[index] for index in chosen])


def _logprobs(policy: Policy, packed: PackedBatch) -> Tensor:
    return policy.logprobs(packed, TreeAttention(packed), torch.ones(len(packed.targets_M)))
