"""One optimizer step by policy gradient: samples with credit in, new weights out.

Data flow: samples -> admission -> micro-batches of packed token trees -> their log-probabilities under the release and the anchor
-> forward, loss, backward (gradients summed in fp32) -> one set of checks over the whole batch (`judge`) -> AdamW -> the rounded
weights as bytes. Synchronous and CPU-bound; the worker runs it in a thread.

A step either completes or leaves weights, moments and step count unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.errors import BadConfig, BadWeights, Cancelled, Corrupt, NoSignal
from ostinato.core.numerics import Contract
from ostinato.core.records import Arm, SteeringBasis, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Learned, Weights
from ostinato.model import routing
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.renderer import HFRenderer
from ostinato.train.checkpoint import Checkpoint, load, save
from ostinato.train.config import TrainConfig
from ostinato.train.linear_gradients import sum_gradients_into
from ostinato.train.masters import Masters, MasterWeights
from ostinato.train.microbatch import Microbatch, make_microbatches, packed_trees, temperatures, token_turns
from ostinato.train.packing import TokenTurn
from ostinato.train.passes import Passes, PhaseTimer, next_token_gradient, surprise
from ostinato.train.policy import Policy
from ostinato.train.ranks import ALONE, Ranks
from ostinato.train.references import References, fill_references, reference_logprobs
from ostinato.train.replay import AnswerEdits, Experts
from ostinato.train.step_metrics import judge
from ostinato.train.tree_attention import TreeAttention
from ostinato.train.values import TurnValues, ValuedTurns

if TYPE_CHECKING:
    from ostinato.train.sharding.group import RankGroup

# ---------------------------------------------------------------- admission


class Admission:
    """Admits a sample if it has tokens, a numerics contract that may be trained on, and logit edits and routes that can be replayed.

    Args:
        contract: the trainer's numerics contract; None: it was not measured, and no turn is foreign.
        refuse_foreign: leave turns of another contract out.
        experts: decides which routes can be replayed.
        edits: decides which edits of logits can be replayed.
    """

    def __init__(
        self, contract: Contract | None, *, refuse_foreign: bool, experts: Experts, edits: AnswerEdits
    ) -> None:
        self._contract, self._refuse, self._experts, self._edits = contract, refuse_foreign, experts, edits

    def foreign(self, turn: Turn) -> bool:
        """Return True if the turn was made under another contract than the trainer's; an unknown contract counts as another."""
        return self._contract is not None and turn.numerics != self._contract.id

    def admit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Return the sampled turns that can be learned from, and how many were dropped for each reason; demonstrations are only counted.

        Raises NoSignal if none is left.
        """
        shown = sum(sample.shown for sample in samples)
        kept = [sample for sample in samples if not sample.beside]
        contract = self._contract.id if self._contract else ""
        reasons: Mapping[str, tuple[Callable[[Turn], bool], str]] = {
            "turns_empty": (
                lambda turn: bool(turn.prompt_ids and turn.sampled_ids),
                "has a sampled token: hold such turns back, do not batch them",
            ),
            "refused_turns": (
                lambda turn: not (self._refuse and self.foreign(turn)),
                f"was made under the trainer's numerics contract {contract}: give engine and trainer the same one (`ostinato status` "
                "shows both), or set train.foreign_numerics to 'label'",
            ),
            "grammar_refused": (
                self._edits.admits,
                "follows its grammar as this llguidance reads it, and has the nucleus of its top_p recorded; see the log",
            ),
            "basis_refused": (self._edits.knows_basis, "was steered by a basis that is in the log; see the log"),
            "router_refused": (
                self._experts.admits,
                "has routes that can be replayed; train.router_replay=false does without",
            ),
        }
        dropped: dict[str, float] = {}
        for name, (admits, wanted) in reasons.items():
            before, kept = kept, [sample for sample in kept if admits(sample.turn)]
            if not kept:
                raise NoSignal(f"none of {len(before)} turns {wanted}")
            dropped[name] = float(len(before) - len(kept))
        return kept, {"turns": float(len(kept)), "demonstrations": float(shown), **dropped}


# ---------------------------------------------------------------- the trainer


def never() -> bool:
    """Return False: a `stop` that never stops a step."""
    return False


class PolicyTrainer:
    """Trains all weights of one model on turns.

    `step_count` is the number of optimizer steps behind the weights, which is the policy version's number.

    Args:
        model_path: the model's directory.
        config: how a step is taken. `compute` must name its dtype: "auto" means the engine's, which is not known here.
        contract: the numerics contract of this process. Turns made under another are labelled or refused (`foreign_numerics`); None:
            it was not measured, and nothing is checked.
        group: the ranks that train this model together, as many as `config.ranks`; all of them call the same methods with the
            same arguments. None: this process alone.
        backend: the device and the kernels for computation. A group has its own, and then this is not used.

    Raises BadConfig if `compute` is "auto", and for several ranks without a group.

    Example::

        trainer = PolicyTrainer(resolve("smollm2", cache), TrainConfig(compute="bf16", learning_rate=2e-5))
        learned = trainer.step(samples, References(release=v17, anchor=v0, fetch=fetch))
        learned.metrics["loss"], learned.weights["model.embed_tokens.weight"].dtype  # "BF16"
    """

    def __init__(
        self,
        model_path: Path,
        config: TrainConfig,
        contract: Contract | None = None,
        group: RankGroup | None = None,
        backend: ComputeBackend = OWN,
    ) -> None:
        if config.ranks != (1 if group is None else group.count):
            raise BadConfig(
                f"train.ranks is {config.ranks}, and only the training worker starts ranks: set it to 1 for this"
            )
        self.config = config
        self.contract = contract
        self.step_count = 0
        self._own_numbers = {0}  # the policy numbers whose weights are the current ones
        # False: no policy number identifies the current weights, whatever `_own_numbers` says
        self._numbers_valid = True
        self._policy, self._masters, self._ranks = (
            _single_rank(model_path, config, backend) if group is None else _sharded(model_path, config, group)
        )
        self._experts = Experts(routing.of(self._policy.model), config)
        self._edits = AnswerEdits(lambda: HFRenderer(model_path).grammars)
        self._admission = Admission(
            contract,
            refuse_foreign=config.foreign_numerics == "refuse",
            experts=self._experts,
            edits=self._edits,
        )
        self._passes = Passes(self._policy, self._masters, self._experts, contract, config, self._ranks)
        self._signal = GradientSignal(config.beta1)
        self._values = None if config.value_lambda is None else TurnValues(config.value_lambda)
        torch.manual_seed(config.seed)

    def set_bases(self, rows: Sequence[SteeringBasis]) -> None:
        """Set the bases by which turns of the next steps were steered; a turn with another basis is left out (`basis_refused`)."""
        self._edits.set_bases(rows)

    # ------------------------------------------------------------ one step

    def step(
        self, samples: Sequence[Sample], references: References | None = None, stop: Callable[[], bool] = never
    ) -> Learned:
        """Learn from `samples`, kept near `references` (None: near nothing). `stop` is called at every layer of every pass; with several
        ranks, before every micro-batch.

        Raises NoSignal (no turn is left to learn from, or the batch must not be learned from; the message says why), BadWeights (the loss
        or gradient is NaN or infinite) and Cancelled (`stop` returned True). The trainer is then as it was before the call.
        """
        laps = PhaseTimer()

        def refuse(wanted: bool) -> None:
            if wanted:
                raise Cancelled(f"step {self.step_count + 1} was cancelled; weights and moments are as before it")

        alone = self._ranks.count == 1  # several ranks must all stop at the same point: before a micro-batch

        held = self._own_numbers if self._numbers_valid else set[int]()

        def check_layer() -> None:
            refuse(alone and stop())

        def check() -> None:
            refuse(not alone and self._ranks.any(stop()))

        try:
            usable, counts = self._admission.admit(samples)
            valued = self._valued(usable, samples, laps, check_layer)
            beside = self._auxiliary_batches(samples, {sample.turn.id for sample in usable}, check_layer)
            work = make_microbatches(
                valued.samples,
                self.config,
                self._admission.foreign,
                self._experts.lay_out,
                self._edits.replay,
                check_layer,
            )
            laps.end("prepare")
            anchor_beta = self._fill_references(work, references, check)
            laps.end("reference")
            done = self._passes.run(
                work, *beside, held=held, step=self.step_count + 1, anchor_beta=anchor_beta, laps=laps, check=check
            )
            norm = self._masters.grad_norm()
            metrics = judge(work, loss=done.loss, norm=norm, step=self.step_count + 1, held=held, config=self.config)
        except BaseException:
            self._masters.clear_grads()
            self._experts.settle()
            self._edits.settle()
            raise
        self._update(metrics, valued)
        laps.end("optimizer")
        weights = self._masters.publish()
        laps.end("publish")
        metrics |= {"anchor_beta": anchor_beta, "alarm_promise": float(done.broken), **done.hints}
        metrics |= counts | self._experts.settle() | self._edits.settle() | valued.metrics
        metrics |= _data_metrics(work, valued.samples, self.step_count - 1) | laps.metrics()
        metrics["tokens_per_second"] = metrics["tokens"] / metrics["seconds"]
        return Learned(step=self.step_count, policy_number=self.step_count, weights=weights, metrics=metrics)

    def _valued(
        self, usable: Sequence[Sample], samples: Sequence[Sample], laps: PhaseTimer, on_layer: Callable[[], None]
    ) -> ValuedTurns:
        """Return the admitted samples with the credit that remains after subtracting the values of their states, computed with the weights
        before the step. No routes are replayed: nobody sampled from these states.
        """
        if self._values is None:
            return ValuedTurns(samples=list(usable), lessons={}, metrics={})
        asked = [TokenTurn(prompt=each.turn.prompt_ids, sampled=each.turn.sampled_ids[:1]) for each in usable]
        states: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(asked)
        for chosen, packed in packed_trees(asked, self.config):
            found_SD = self._policy.states(packed, TreeAttention(packed, on_layer=on_layer)).numpy()
            for index, state in zip(chosen, found_SD, strict=True):
                states[index] = state
        going_on = {(each.turn.tenant, each.turn.episode) for each in samples if each.cut}
        valued = self._values.credit(usable, np.stack(states), going_on)
        laps.end("values")
        return valued

    def _auxiliary_batches(
        self, samples: Sequence[Sample], admitted: Container[str], on_layer: Callable[[], None]
    ) -> tuple[list[Microbatch], list[Microbatch]]:
        """Return micro-batches of the demonstrations, and of the admitted turns with hints; the latter only with one rank. No routes are
        replayed: nobody sampled the demonstrations or the teacher's tokens.
        """
        hinted = [each for each in samples if each.hinted and each.turn.id in admitted and self._ranks.count == 1]
        shown, hints = (
            make_microbatches(
                some,
                self.config,
                lambda turn: False,
                lambda packed, turns: None,
                self._edits.replay,
                on_layer,
            )
            for some in ([sample for sample in samples if sample.shown], hinted)
        )
        return shown, hints

    def score(self, turns: Sequence[Turn]) -> list[tuple[float, ...]]:
        """Return the sampled tokens' logprobs under the current weights, at each turn's temperature, as the sampler would record them."""
        results: list[tuple[float, ...]] = [()] * len(turns)
        known = [index for index, turn in enumerate(turns) if turn.prompt_ids and turn.sampled_ids]
        for chosen, packed in packed_trees(token_turns([turns[index] for index in known]), self.config):
            asked = [turns[known[i]] for i in chosen]
            with torch.no_grad():
                scored = self._policy.logprobs(
                    packed, TreeAttention(packed), temperatures(asked), partial(self._edits.replay, asked)
                ).numpy()
            for place, index in enumerate(chosen):
                results[known[index]] = tuple(scored[packed.turns_M == place].tolist())
        return results

    # ------------------------------------------------------------ next-token prediction

    def read(self, pieces: Sequence[Sequence[int]], *, learning_rate: float) -> dict[str, float]:
        """Take one step of next-token prediction on the pieces, which do not attend to each other. Returns metrics.

        Raises BadWeights (the loss or gradient is NaN or infinite) with the trainer as it was before the call.
        """
        laps = PhaseTimer()
        try:
            self._masters.clear_grads()
            loss = next_token_gradient(self._policy, pieces, self.config, laps)
            norm = self._masters.grad_norm()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise BadWeights(
                    f"step {self.step_count + 1} refused: loss {loss}, gradient norm {norm}. Weights are unchanged; lower the learning rate"
                )
        except BaseException:
            self._masters.clear_grads()
            raise
        self._masters.update(learning_rate=learning_rate, scale=min(1.0, self.config.clip / max(norm, 1e-30)))
        self.step_count += 1
        self._own_numbers = {self.step_count}
        laps.end("optimizer")
        tokens = float(sum(len(piece) - 1 for piece in pieces))
        spent = laps.metrics()
        learned = {"loss": loss, "grad_norm": norm, "tokens": tokens, "learning_rate": learning_rate}
        return learned | spent | {"tokens_per_second": tokens / spent["seconds"]}

    def surprise(self, pieces: Sequence[Sequence[int]]) -> float:
        """Return the mean surprise per predicted token of the pieces under the current weights, in nats."""
        return surprise(self._policy, pieces, self.config)

    def _fill_references(
        self, work: Sequence[Microbatch], references: References | None, check: Callable[[], None]
    ) -> float:
        """Compute the references' log-probabilities. Returns beta, the price per nat of divergence from the anchor."""
        if references is None:
            return 0.0

        @torch.no_grad()
        def forward(items: Sequence[Microbatch]) -> list[Tensor]:
            found: list[Tensor] = []
            for item in self._ranks.share(items):
                check()
                found.append(self._policy.logprobs(item.packed, item.attend, item.temperatures_M, item.edits))
            return self._ranks.exchange(items, found, each=1)

        under = reference_logprobs(references.fetch, self._masters, forward)
        return fill_references(work, references, under, step=self.step_count, config=self.config)

    def _update(self, metrics: dict[str, float], valued: ValuedTurns) -> None:
        scale = metrics["clip_scale"] * metrics["mask_scale"]
        self._signal.see(
            square=(metrics["grad_norm"] * metrics["clip_scale"]) ** 2,
            with_momentum=self._masters.momentum_product() * scale,
        )
        metrics["signal"] = self._signal.share
        warmup = min(1.0, (self.step_count + 1) / max(1, self.config.warmup_steps))
        # a larger batch has a larger share of signal, for which batch_factor already raises the learning rate
        grown = batch_factor(len(valued.samples), self.config)
        trusted = metrics["trust"] * signal_factor(self._signal.share / grown**2, self.config)
        metrics["learning_rate"] = self.config.learning_rate * warmup * trusted * grown
        self._masters.update(learning_rate=metrics["learning_rate"], scale=scale)
        if self._values is not None:
            self._values.learn(valued)
        self.step_count += 1
        self._own_numbers = {self.step_count}

    # ------------------------------------------------------------ state

    def state(self) -> Checkpoint:
        """Return the whole state, as views of live memory: write it (`checkpoint.save`) before the next step."""
        weights, moments, part = self._masters.arrays()
        moments = {**moments, "rng": torch.get_rng_state().numpy(), "signal": self._signal.state()}
        if self._values is not None:
            moments["values"] = self._values.state()
        return Checkpoint(step=self.step_count, weights=weights, moments=moments, part=part)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises Corrupt, with the trainer unchanged, if it belongs to another model."""
        if checkpoint.shapes != self._masters.shapes() or "rng" not in checkpoint.moments:
            raise Corrupt(
                "the checkpoint's tensors are not this model's: resume with the model that it was trained from"
            )
        self._masters.restore(checkpoint)
        torch.set_rng_state(torch.from_numpy(np.array(checkpoint.moments["rng"])))
        if "signal" in checkpoint.moments:  # older checkpoints have none
            self._signal.restore(checkpoint.moments["signal"])
        if self._values is not None:
            self._values.restore(checkpoint.moments.get("values"))
        self.step_count = checkpoint.step
        self._own_numbers, self._numbers_valid = {checkpoint.step}, True

    def save(self, directory: Path, *, cursor: int, keep: int) -> None:
        """Write a checkpoint (`checkpoint.save`); `cursor` is the log position up to which batches are in the weights."""
        save(directory, replace(self.state(), cursor=cursor), keep=keep, ranks=self._ranks)

    def resume(self, directory: Path) -> bool:
        """Restore the newest whole checkpoint; return False if there is none. Raises Corrupt."""
        found = load(directory, self._ranks)
        if found is not None:
            self.restore(found)
        return found is not None

    def go_back(self, weights: Weights, number: int | None = None) -> None:
        """Start the next step from an existing release: its weights become the masters, and the momentum is dropped.

        `number` is the release's policy number: its tokens then count as made by the current weights.

        Raises BadWeights, with the trainer unchanged, if the weights are not this model's.
        """
        self._masters.put(weights)
        self._masters.take_from_model()
        self._masters.forget_mean()
        self._signal.forget_mean()
        self._own_numbers = set() if number is None else {number}

    def hold_nothing(self) -> None:
        """Until the next `restore`, count no recorded token as made by the current weights: the log's numbers denote other weights."""
        self._numbers_valid = False

    def skip_step(self) -> None:
        """Count a refused step, so that step numbers and recorded batches stay aligned. Weights and moments stay as they are."""
        self.step_count += 1
        self._own_numbers.add(self.step_count)
        self._masters.set_steps(self.step_count)  # a resumed trainer knows only the step count

    def close(self) -> None:
        """Do nothing: no other process was started. With several ranks there are processes to end (`ShardedTrainer`)."""

    def weights(self) -> Weights:
        """Return the current weights as they are published; on a rank other than the first there are none."""
        return self._masters.gather()

    def present(self) -> Learned:
        """Return the current weights as a publishable result without metrics."""
        return Learned(step=self.step_count, policy_number=self.step_count, weights=self._masters.publish(), metrics={})


class GradientSignal:
    """The share of the gradient's expected square that is signal: |E g|^2 / E|g|^2, a moving average over about ten steps.

    Two gradients of independent batches have E[g . g'] = |E g|^2 (McCandlish et al., arXiv:1812.06162, whose noise scale is B (1/share - 1)
    for batches of B). Here g' is AdamW's momentum, the mean of the gradients of earlier steps, so it costs one inner product. It starts at
    1. Where steps overshoot, successive gradients point against each other and the share is negative.
    """

    def __init__(self, beta1: float) -> None:
        self._beta1 = beta1
        self._signal = self._square = 0.0
        self._seen = 0  # gradients in the momentum

    def see(self, *, square: float, with_momentum: float) -> None:
        """Add a step's squared gradient norm, and the gradient's inner product with the momentum before the step."""
        if self._seen:
            self._signal += _SIGNAL_RATE * (with_momentum / (1 - self._beta1**self._seen) - self._signal)
            self._square += _SIGNAL_RATE * (square - self._square)
        elif not self._square:
            self._signal = self._square = square
        self._seen += 1

    def forget_mean(self) -> None:
        """Note that the momentum was dropped."""
        self._seen = 0

    @property
    def share(self) -> float:
        """The share; at most about 1."""
        return self._signal / self._square if self._square else 1.0

    def state(self) -> NDArray[np.uint8]:
        """Return the state for a checkpoint."""
        return np.array([self._signal, self._square, self._seen], "<f8").view(np.uint8)

    def restore(self, state: NDArray[Any]) -> None:
        """Restore the state from `state`."""
        self._signal, self._square, seen = np.array(state).view("<f8").tolist()
        self._seen = int(seen)


_SIGNAL_RATE = 0.1
_LEAST_FACTOR = 0.25


def signal_factor(share: float, config: TrainConfig) -> float:
    """Return the factor on `learning_rate` for a gradient with this share of signal: sqrt(share / signal_share), from 1/4 to 1.

    It follows the rule of `batch_factor`: for AdamW, half the signal is like half the batch.

    Example: ``signal_factor(0.1, TrainConfig(signal_share=0.2))`` is sqrt(0.5).
    """
    if config.signal_share is None:
        return 1.0
    return min(1.0, max(_LEAST_FACTOR, math.sqrt(max(0.0, share) / config.signal_share)))


def batch_factor(turns: int, config: TrainConfig) -> float:
    """Return the factor on `learning_rate` for a step of that many turns: sqrt(turns / base_turns), from 1 to 2.

    With k times the batch Adam follows the same path with sqrt(k) times the step size while noise dominates the gradient (Malladi et al.,
    NeurIPS 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"). Beyond a small k that no longer holds, hence the bound.

    Example: ``batch_factor(288, TrainConfig(base_turns=144))`` is sqrt(2).
    """
    if config.base_turns is None:
        return 1.0
    return min(2.0, max(1.0, math.sqrt(turns / config.base_turns)))


def _compute_dtype(config: TrainConfig) -> torch.dtype:
    if config.compute == "auto":
        raise BadConfig('train.compute is "auto", and a trainer by itself knows no engine: set it to "bf16" or "fp32"')
    return torch.bfloat16 if config.compute == "bf16" else torch.float32


def _single_rank(path: Path, config: TrainConfig, backend: ComputeBackend) -> tuple[Policy, MasterWeights, Ranks]:
    """Set up a model in this process alone."""
    policy = Policy(path, _compute_dtype(config), config, backend)
    masters = Masters(policy.model, config, policy.served)
    sum_gradients_into(policy.model, masters.sums)
    return policy, masters, ALONE


def _sharded(path: Path, config: TrainConfig, group: RankGroup) -> tuple[Policy, MasterWeights, Ranks]:
    """Set up this rank's part of a model. FSDP2 is imported only here: importing it takes a second."""
    from ostinato.train.sharding.masters import ShardedMasters
    from ostinato.train.sharding.policy import ShardedPolicy

    dtype = _compute_dtype(config)
    policy = ShardedPolicy(path, dtype, config, group)
    return policy, ShardedMasters(policy, dtype, config, group), group


def _data_metrics(work: Sequence[Microbatch], usable: Sequence[Sample], before: int) -> dict[str, float]:
    """Return counts and means over the data of a step from version `before`. Means weight episodes; lags are differences of numbers."""
    weight = sum(sample.weight for sample in usable)
    each = [sum(map(abs, sample.advantages)) / len(sample.advantages) for sample in usable]
    lags_M = [before - version.number for item in work for version in item.versions_M]
    return {
        "lag_max": float(max(lags_M)),
        "lag_mean": sum(lags_M) / len(lags_M),
        "turns_flat": float(sum(not any(sample.advantages) for sample in usable)),  # of groups without contrast
        "episodes": weight,
        "tokens": float(sum(item.packed.tokens for item in work)),
        "tokens_saved": float(sum(item.packed.saved for item in work)),
        "tokens_sampled": float(sum(len(item.turns_M) for item in work)),
        "microbatches": float(len(work)),
        "largest_microbatch": float(max(item.packed.tokens for item in work)),
        "reward_mean": sum(sample.reward * sample.factor for sample in usable) / weight,
        "advantage_abs": sum(size * sample.weight for size, sample in zip(each, usable, strict=True)) / weight,
    } | _push_metrics(usable)


def _push_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return, by origin, the L2 norm of the tokens' advantages as they enter the loss. It is the gradient's norm if the tokens' scores are
    independent and of equal norm.
    """
    squares: dict[str, float] = {}
    for sample in samples:
        name = "push_worlds" if sample.turn.arm is Arm.WORLD else "push_people"
        squares[name] = squares.get(name, 0.0) + sample.factor**2 * math.fsum(a * a for a in sample.advantages)
    return {name: math.sqrt(square) for name, square in squares.items()}
