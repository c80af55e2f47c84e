"""Forward and backward passes over one step's micro-batches: gradients go into the masters' sums, other results onto the micro-batches.

Also next-token prediction (continued pre-training), by the same passes as learning from rewards.

Data flow: pieces of documents -> packed trees, in which no piece attends to another -> log-probabilities -> their negative mean, and its
gradient in the masters' sums.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.core.errors import NoSignal
from ostinato.core.numerics import Contract
from ostinato.model.cpu import TRIM_EVERY, trim_heap
from ostinato.train.config import TrainConfig
from ostinato.train.losses import policy_loss, sequence_mask
from ostinato.train.masters import MasterWeights
from ostinato.train.microbatch import Microbatch, packed_trees
from ostinato.train.packing import PackedBatch, TokenTurn
from ostinato.train.policy import Policy
from ostinato.train.ranks import Ranks
from ostinato.train.references import penalties
from ostinato.train.replay import Experts
from ostinato.train.tree_attention import TreeAttention

_LOG = logging.getLogger(__name__)


class PhaseTimer:
    """Timer of a step's phases: seconds, summed by phase name."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Add the time since the last call to this phase."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return `seconds` in total, and `seconds_<phase>`."""
        named = {f"seconds_{name}": value for name, value in self._seconds.items()}
        return {"seconds": self._last - self._started, **named}


class BrokenPromise(NoSignal):
    """The same weights under the same exact contract gave different bits in the engine and in the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The loss over all turns, whether exact mode was found broken, and the metrics of hints, if there were any."""

    loss: float
    broken: bool
    hints: dict[str, float]


class Passes:
    """Runs the passes. `contract`: the trainer's numerics contract, None if not measured. `ranks`: the processes that share the work."""

    def __init__(
        self,
        policy: Policy,
        masters: MasterWeights,
        experts: Experts,
        contract: Contract | None,
        config: TrainConfig,
        ranks: Ranks,
    ) -> None:
        self._policy, self._masters, self._experts = policy, masters, experts
        self._contract, self._config, self._ranks = contract, config, ranks

    def run(
        self,
        work: Sequence[Microbatch],
        shown: Sequence[Microbatch] = (),
        hinted: Sequence[Microbatch] = (),
        *,
        held: Collection[int],
        step: int,
        anchor_beta: float,
        laps: PhaseTimer,
        check: Callable[[], None],
    ) -> PassResult:
        """Run all micro-batches, the demonstrations `shown` and the turns with hints `hinted`. `held`: the policy numbers whose weights the
        trainer has; `step`: the step about to be taken; `check`: called before each micro-batch, and may end the step.

        If the engine's bits at the same weights differ from the trainer's, the exact contract does not hold, and no turn can be
        trusted: the step is then taken as in fast mode, or raises NoSignal (`train.broken_promise`).
        """
        exact = self._contract is not None and self._contract.mode == "exact"
        loss, broken = 0.0, False
        try:
            loss = self._accumulate(work, held if exact else None, step, anchor_beta, laps, check)
        except BrokenPromise as error:
            if self._config.broken_promise == "refuse":
                raise
            broken = True
            _LOG.error("%s; this step is taken as in fast mode", str(error))
        # outside the handler, since the error's traceback keeps the failed micro-batch's activations alive
        if broken:
            self._experts.start_over()
            loss = self._accumulate(work, None, step, anchor_beta, laps, check)
        normaliser = normaliser_of(work, self._config)
        self._imitate(shown, normaliser, laps, check)
        return PassResult(loss=loss, broken=broken, hints=self._distil(hinted, normaliser, laps, check))

    def _distil(
        self, hinted: Sequence[Microbatch], normaliser: float, laps: PhaseTimer, check: Callable[[], None]
    ) -> dict[str, float]:
        """Add the gradient of the divergence between the hinted turns' tokens and the same weights given the hint, each token's times its
        advantage. No other turn is in such a pass. Returns metrics: the number of turns, the share of their tokens that the term keeps, and
        the mean divergence of these in nats.
        """
        nats, kept, tokens, turns = 0.0, 0, 0, 0
        for item in hinted:
            check()
            assert item.hinted is not None
            kl_M, open_M = self._policy.hint_divergence(
                item.packed, item.attend, item.hinted, item.temperatures_M, item.edits
            )
            ((kl_M * item.advantages_M * item.shares_M).sum() / normaliser).backward()
            nats, kept = nats + float(kl_M.detach().double().sum()), kept + int(open_M.sum())
            tokens, turns = tokens + len(open_M), turns + len(item.weights_S)
        if not turns:
            return {}
        laps.end("hints")
        return {"hints": float(turns), "hint_share": kept / tokens, "hint_kl": nats / max(1, kept)}

    def _imitate(
        self, shown: Sequence[Microbatch], normaliser: float, laps: PhaseTimer, check: Callable[[], None]
    ) -> None:
        """Add the gradient of the demonstrations' log-likelihood, each token's times its advantage. With the policy's own log-probabilities
        as the sampler's, importance weights are 1. There is no KL penalty, since KL is estimated on tokens that the policy samples.
        """
        for item in self._ranks.share(shown) if shown else ():
            check()
            logprobs_M = self._policy.logprobs(item.packed, item.attend, item.temperatures_M, item.edits)
            policy_loss(
                logprobs_M,
                behaviour_M=logprobs_M.detach(),
                advantages_M=item.advantages_M,
                turns_M=item.turns_M,
                normaliser=normaliser,
                shares_M=item.shares_M,
            ).backward()
        laps.end("imitate")

    def _accumulate(
        self,
        work: Sequence[Microbatch],
        promised: Collection[int] | None,
        step: int,
        anchor_beta: float,
        laps: PhaseTimer,
        check: Callable[[], None],
    ) -> float:
        """Run all micro-batches and return the loss. `promised`: the policy numbers whose bits an exact contract promises, or None."""
        normaliser = normaliser_of(work, self._config)
        losses: list[Tensor] = []
        self._masters.clear_grads()
        mine = self._ranks.share(work)
        for number, item in enumerate(mine, 1):
            check()
            with self._experts.replaying(item.routes):  # also in the backward pass, which may recompute activations
                logprobs_M = self._policy.logprobs(item.packed, item.attend, item.temperatures_M, item.edits)
                item.logprobs_M = logprobs_M.detach()
                if promised is not None:
                    broken = self._promise_violation(item, promised, step)
                    if self._ranks.any(bool(broken)):
                        raise BrokenPromise(
                            broken or f"step {step}: another rank found the promise of exact mode broken"
                        )
                item.keep_M = self._mask(item, exact=promised is not None)
                loss = policy_loss(
                    logprobs_M,
                    behaviour_M=item.behaviour_M,
                    advantages_M=item.advantages_M,
                    turns_M=item.turns_M,
                    normaliser=normaliser,
                    penalties=penalties(item, anchor_beta=anchor_beta, config=self._config),
                    cap=self._config.importance_cap,
                    turn_cap=self._config.turn_cap,
                    least_ess=self._config.turn_ess,
                    keep_M=item.keep_M,
                    shares_M=item.shares_M,
                )
                laps.end("forward")
                loss.backward()
            if number % TRIM_EVERY == 0 or number == len(mine):
                trim_heap()
            laps.end("backward")
            losses.append(loss.detach())
        return self._merge_results(work, mine, losses)

    def _merge_results(self, work: Sequence[Microbatch], mine: Sequence[Microbatch], losses: Sequence[Tensor]) -> float:
        """Give every rank the results of all, so that `judge` decides the same everywhere. Returns the loss."""
        found = self._ranks.exchange(
            work,
            [
                torch.cat([loss.view(1), item.logprobs_M, item.keep_M.float()])
                for item, loss in zip(mine, losses, strict=True)
            ],
            each=2,
            extra=1,
        )
        total = 0.0
        for item, values in zip(work, found, strict=True):
            item.logprobs_M, kept_M = values[1:].chunk(2)
            item.keep_M = kept_M.bool()
            total += float(values[0])
        return total

    def _mask(self, item: Microbatch, *, exact: bool) -> Tensor:
        """Return True for the tokens to learn from. Turns of our own exact contract are never masked: `judge` checks their staleness."""
        keep_M = torch.ones(len(item.turns_M), dtype=torch.bool)
        bound = self._config.sequence_mask
        if bound is None or self._contract is None:
            return keep_M
        subject_M = item.foreign_M if exact else keep_M
        if bool(subject_M.any()):
            keep_M = ~subject_M | sequence_mask(item.logprobs_M, item.behaviour_M, item.turns_M, bound=bound)
        return keep_M

    def _promise_violation(self, item: Microbatch, promised: Collection[int], step: int) -> str:
        """Describe how the micro-batch breaks exact mode; "" if it does not."""
        same_M = item.made_by(lambda version: version.number in promised) & ~item.foreign_M
        d_M = (item.logprobs_M - item.behaviour_M)[same_M]
        differing = int((d_M != 0).sum())
        if not differing:
            return ""
        return (
            f"step {step}: {differing} of {len(d_M)} tokens of the same weights under the exact contract "
            f"{self._contract.id if self._contract else ''} differ from the engine's (largest |d| {float(d_M.abs().max()):.3g}): "
            "the promise is broken. Run `ostinato doctor`, and set model.numerics to 'fast' until it holds"
        )


def normaliser_of(work: Sequence[Microbatch], config: TrainConfig) -> float:
    """Return the loss's constant: the number of episodes of the whole batch times the token budget of a turn."""
    return sum(float(item.weights_S.double().sum()) for item in work) * config.turn_tokens


# ---------------------------------------------------------------- next-token prediction


def next_token_gradient(
    policy: Policy, pieces: Sequence[Sequence[int]], config: TrainConfig, laps: PhaseTimer
) -> float:
    """Add the gradient of the mean surprise over all predictions to the sums, and return that mean, in nats.

    A piece of n tokens has n - 1 predictions, and must have at least one.
    """
    total = sum(len(piece) - 1 for piece in pieces)
    nats: list[float] = []
    for number, packed in enumerate(_packed(pieces, config), 1):
        loss = -_logprobs(policy, packed).sum() / total
        laps.end("forward")
        loss.backward()
        nats.append(float(loss.detach()))
        if number % TRIM_EVERY == 0:
            trim_heap()
        laps.end("backward")
    trim_heap()
    laps.end("backward")
    return math.fsum(nats)


@torch.no_grad()
def surprise(policy: Policy, pieces: Sequence[Sequence[int]], config: TrainConfig) -> float:
    """Return the mean surprise per prediction under the current weights, in nats; nothing is learned."""
    total = sum(len(piece) - 1 for piece in pieces)
    return -math.fsum(float(_logprobs(policy, packed).double().sum()) for packed in _packed(pieces, config)) / total


def _packed(pieces: Sequence[Sequence[int]], config: TrainConfig) -> Iterator[PackedBatch]:
    turns = [TokenTurn(prompt=(piece[0],), sampled=tuple(piece[1:])) for piece in pieces]
    return (packed for _, packed in packed_trees(turns, config))


def _logprobs(policy: Policy, packed: PackedBatch) -> Tensor:
    return policy.logprobs(packed, TreeAttention(packed), torch.ones(len(packed.targets_M)))
