"""One optimizer step: samples with credit in, new weights out.

Data flow: samples -> micro-batches of packed token trees (`work`) -> forward, loss, backward (gradients summed in fp32) -> one set
of checks over the whole batch (`judge`) -> AdamW -> the rounded weights as bytes. Synchronous and CPU-bound; the worker runs it
in a thread.

A step either happens or leaves weights, moments and step count as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import Corrupt, NoSignal
from ostinato.core.numerics import Contract
from ostinato.core.records import Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Learned, Snapshot, Weights
from ostinato.model import routing
from ostinato.model.attention import hidden, logits
from ostinato.model.experts import DEFAULT_ROWS, set_rows
from ostinato.model.load import load_model
from ostinato.model.memory import give_back
from ostinato.train.checkpoint import Checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.judge import judge
from ostinato.train.losses import policy_loss, sequence_mask, token_logprobs
from ostinato.train.masters import Masters
from ostinato.train.batch.microbatch import Microbatch, make_microbatches, temperatures, token_turns
from ostinato.train.batch.packing import Packed, microbatches, pack
from ostinato.train.batch.replay import Experts
from ostinato.train.gradients.tree_attention import TreeAttention

_LOG = logging.getLogger(__name__)
_GIVE_BACK_EVERY = 8  # micro-batches; it costs each of them about half a percent


def compute_dtype(choice: str) -> torch.dtype:
    """bf16 or fp32. `auto` is bf16 where the CPU multiplies bf16 matrices itself (AVX512-BF16, AMX); elsewhere that is slower."""
    if choice == "auto":
        flags = torch.cpu.get_capabilities()
        return (
            torch.bfloat16 if flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16") else torch.float32
        )
    return torch.bfloat16 if choice == "bf16" else torch.float32


class PolicyTrainer:
    """All weights of one model, learning from turns.

    `step_count` is the number of optimizer steps behind the weights, which is the policy version's number.

    Args:
        model_path: the model's directory.
        config: how a step is taken.
        contract: the arithmetic of this process. Turns made under another are labelled or refused (`foreign_numerics`); None:
            nobody measured it, and nothing is checked.

    Example::

        trainer = PolicyTrainer(resolve("smollm2", cache), TrainConfig(learning_rate=2e-5))
        learned = trainer.step(samples, reference=Snapshot(policy=v0, weights=weights))
        learned.metrics["loss"], learned.weights["model.embed_tokens.weight"].dtype  # "BF16"
    """

    def __init__(
        self,
        model_path: Path,
        config: TrainConfig,
        contract: Contract | None = None,
    ) -> None:
        self.config = config
        self.contract = contract
        self.step_count = 0
        self._own = "" if contract is None else contract.id
        self._held = {0}  # the policy numbers whose weights are the present ones
        # eval mode: dropout would make the trainer's policy another one than the sampler's
        self._model = load_model(model_path, compute_dtype(config.compute))
        self._rows = DEFAULT_ROWS if contract is None else contract.rows
        set_rows(self._model, self._rows)
        self._experts = Experts(routing.of(self._model), config)
        if config.recompute:
            _recompute(self._model)
        self._head = partial(logits, self._model, rows=self._rows)
        self._masters = Masters(self._model, config)
        torch.manual_seed(config.seed)

    # ------------------------------------------------------------ one step

    def step(self, samples: Sequence[Sample], reference: Snapshot | None = None) -> Learned:
        """Learn from `samples`; `reference` is the release that the KL penalty is measured against (None: no penalty).

        A token made by `reference.policy` is its own reference: the captured logprob is used and no second pass is needed.

        Raises NoSignal (no turn left to learn from, or ESS/n below `min_ess`) and BadWeights (a NaN or infinite loss or
        gradient); the trainer is then as it was before the call.
        """
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        usable, counts = self._admit(samples)
        work = make_microbatches(usable, self.config.microbatch_tokens, self._foreign, self._experts.lay_out)
        lap = _lap(seconds, "prepare", started)
        if reference is not None and self.config.kl_beta:
            self._add_reference(work, reference)
        lap = _lap(seconds, "reference", lap)
        try:
            loss = self._accumulate(work, sum(sample.weight for sample in usable), seconds)
            lap = time.perf_counter()
            metrics = judge(
                work,
                loss=loss,
                norm=self._masters.grad_norm(),
                step=self.step_count + 1,
                held=self._held,
                config=self.config,
            )
        except BaseException:
            self._masters.clear_grads()
            self._experts.settle()
            raise
        self._keep_promise(metrics)
        self._update(metrics)
        lap = _lap(seconds, "optimizer", lap)
        weights = self._masters.publish()
        _lap(seconds, "publish", lap)
        total = time.perf_counter() - started
        tokens = sum(item.packed.tokens for item in work)
        metrics |= counts | self._experts.settle()
        metrics |= {
            "tokens": float(tokens),
            "tokens_saved": float(sum(item.packed.saved for item in work)),
            "tokens_sampled": float(sum(len(item.packed.targets_M) for item in work)),
            "microbatches": float(len(work)),
            "reward_mean": sum(sample.reward for sample in usable) / len(usable),
            "advantage_abs": sum(abs(value) for sample in usable for value in sample.advantages)
            / sum(len(sample.advantages) for sample in usable),
            "seconds": total,
            "tokens_per_second": tokens / total,
            **{f"seconds_{name}": value for name, value in seconds.items()},
        }
        return Learned(step=self.step_count, policy_number=self.step_count, weights=weights, metrics=metrics)

    def score(self, turns: Sequence[Turn]) -> list[tuple[float, ...]]:
        """The sampled tokens' logprobs under the present weights, at each turn's own temperature, as the sampler recorded them."""
        results: list[tuple[float, ...]] = [()] * len(turns)
        known = [index for index, turn in enumerate(turns) if turn.prompt_ids and turn.sampled_ids]
        tokens = token_turns([turns[index] for index in known])
        for chosen in microbatches(tokens, self.config.microbatch_tokens):
            packed = pack([tokens[index] for index in chosen])
            scored = self._forward(
                packed, TreeAttention(packed), temperatures([turns[known[i]] for i in chosen])
            ).numpy()
            for place, index in enumerate(chosen):
                results[known[index]] = tuple(scored[packed.turns_M == place].tolist())
        return results

    def _admit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """The samples that can be learned from, and how many fell out for each reason. Raises NoSignal if none is left."""
        full = [sample for sample in samples if sample.turn.prompt_ids and sample.turn.sampled_ids]
        if not full:
            raise NoSignal(f"none of {len(samples)} turns has a sampled token: hold such turns back, do not batch them")
        refuse = self.config.foreign_numerics == "refuse"
        own = [sample for sample in full if not (refuse and self._foreign(sample.turn))]
        if not own:
            raise NoSignal(
                f"none of {len(full)} turns was made under the trainer's numerics contract {self._own}: give engine and trainer "
                "the same one (`ostinato status` shows both), or set train.foreign_numerics to 'label'"
            )
        routed = [sample for sample in own if self._experts.admits(sample.turn)]
        if not routed:
            raise NoSignal(
                f"none of {len(own)} turns has routes that can be replayed; train.router_replay=false does without"
            )
        return routed, {
            "turns": float(len(routed)),
            "turns_empty": float(len(samples) - len(full)),
            "refused_turns": float(len(full) - len(own)),
            "router_refused": float(len(own) - len(routed)),
        }

    def _foreign(self, turn: Turn) -> bool:
        """True if the turn was made under another contract than the trainer's; unknown arithmetic is another one."""
        return self.contract is not None and turn.numerics != self._own

    def _add_reference(self, work: Sequence[Microbatch], reference: Snapshot) -> None:
        """Give each token its logprob under the reference; the reference's weights are loaded only if some token needs them."""
        own = reference.policy.hash
        foreign = any(version.hash != own for item in work for version in item.versions_M)
        if foreign:
            self._masters.put(reference.weights)
        try:
            for item in work:
                own_M = torch.tensor([version.hash == own for version in item.versions_M])
                item.reference_M = item.behaviour_M
                if foreign and not bool(own_M.all()):
                    computed = self._forward(item.packed, item.attend, item.temperatures_M)
                    item.reference_M = torch.where(own_M, item.behaviour_M, computed)
        finally:
            if foreign:
                self._masters.round_into_model()

    @torch.no_grad()
    def _forward(self, packed: Packed, attend: TreeAttention, temperatures_M: Tensor) -> Tensor:
        return self._logprobs(packed, attend, temperatures_M)

    def _logprobs(self, packed: Packed, attend: TreeAttention, temperatures_M: Tensor) -> Tensor:
        ids_N, positions_N = torch.from_numpy(packed.ids_N), torch.from_numpy(packed.positions_N)
        states_ND = hidden(self._model, ids_N, positions_N, attend, rows=self._rows)
        rows_MD = states_ND.index_select(0, torch.from_numpy(packed.rows_M))
        return token_logprobs(self._head, rows_MD, torch.from_numpy(packed.targets_M), temperatures_M)

    def _accumulate(self, work: Sequence[Microbatch], episodes: float, seconds: dict[str, float]) -> float:
        """Forward and backward of every micro-batch, whose logprobs and mask are kept on it. Returns the loss."""
        total = 0.0
        seconds |= {"forward": 0.0, "backward": 0.0}
        self._masters.clear_grads()
        for number, item in enumerate(work, 1):
            lap = time.perf_counter()
            with self._experts.replaying(item.routes):  # the backward pass may recompute activations: routes alike
                logprobs_M = self._logprobs(item.packed, item.attend, item.temperatures_M)
                item.logprobs_M = logprobs_M.detach()
                item.keep_M = self._mask(item)
                result = policy_loss(
                    logprobs_M,
                    behaviour_M=item.behaviour_M,
                    advantages_M=item.advantages_M,
                    turns_M=item.turns_M,
                    normaliser=episodes * self.config.turn_tokens,
                    reference_M=item.reference_M,
                    beta=self.config.kl_beta,
                    cap=self.config.importance_cap,
                    keep_M=item.keep_M,
                    shares_M=item.shares_M,
                )
                now = time.perf_counter()
                seconds["forward"] += now - lap
                result.loss.backward()
                item.attend.forget()
            if number % _GIVE_BACK_EVERY == 0 or number == len(work):
                give_back()
            seconds["backward"] += time.perf_counter() - now
            total += float(result.loss.detach())
        return total

    def _mask(self, item: Microbatch) -> Tensor:
        """The tokens that may teach. Turns of our own exact contract are never masked: their staleness is the ESS guard's."""
        keep_M = torch.ones(len(item.turns_M), dtype=torch.bool)
        bound = self.config.sequence_mask
        if bound is None or self.contract is None:
            return keep_M
        subject_M = item.foreign_M if self.contract.mode == "exact" else keep_M
        if bool(subject_M.any()):
            keep_M = ~subject_M | sequence_mask(item.logprobs_M, item.behaviour_M, item.turns_M, bound=bound)
        return keep_M

    def _keep_promise(self, metrics: Mapping[str, float]) -> None:
        """Say aloud that the same weights under the same exact contract gave other bits."""
        broken = metrics["mismatch_differing"]
        if broken and self.contract is not None and self.contract.mode == "exact":
            _LOG.warning(
                "step %d: %d of %d tokens of the same weights under the exact contract %s differ from the engine's: the promise "
                "is broken (largest |d| %.3g); run `ostinato doctor`, and set model.numerics to 'fast' until it holds",
                self.step_count + 1,
                broken,
                metrics["mismatch_tokens"],
                self._own,
                metrics["mismatch_max_abs"],
            )

    def _update(self, metrics: dict[str, float]) -> None:
        warmup = min(1.0, (self.step_count + 1) / max(1, self.config.warmup_steps))
        metrics["learning_rate"] = self.config.learning_rate * warmup * metrics["ess"]
        scale = metrics["clip_scale"] * metrics["mask_scale"]
        self._masters.update(learning_rate=metrics["learning_rate"], scale=scale)
        self.step_count += 1
        self._held = {self.step_count}

    # ------------------------------------------------------------ state

    def state(self) -> Checkpoint:
        """The whole state, as views of live memory: write it (`checkpoint.save`) before the next step."""
        first, second = self._masters.moments
        moments = {"exp_avg": first.numpy(), "exp_avg_sq": second.numpy(), "rng": torch.get_rng_state().numpy()}
        weights = {name: view.numpy() for name, view in self._masters.weights.items()}
        return Checkpoint(step=self.step_count, weights=weights, moments=moments)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises Corrupt, with the trainer unchanged, if it belongs to another model."""
        shapes = {name: tuple(array.shape) for name, array in checkpoint.weights.items()}
        if shapes != self._masters.shapes() or not {"exp_avg", "exp_avg_sq", "rng"} <= checkpoint.moments.keys():
            raise Corrupt(
                "the checkpoint's tensors are not this model's: resume with the model that it was trained from"
            )
        for name, view in self._masters.weights.items():
            np.copyto(view.numpy(), checkpoint.weights[name])
        for moment, name in zip(self._masters.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            np.copyto(moment.numpy(), checkpoint.moments[name])
        torch.set_rng_state(torch.from_numpy(np.array(checkpoint.moments["rng"])))
        self.step_count = checkpoint.step
        self._held = {checkpoint.step}
        self._masters.set_steps(checkpoint.step)
        self._masters.round_into_model()

    def go_back(self, weights: Weights, number: int | None = None) -> None:
        """Start the next step from a standing release: its weights become the masters, and the momentum that led away is dropped.

        `number` is the release's policy number: its tokens are then known as made by the present weights.

        Raises BadWeights, with the trainer unchanged, if they are not this model's.
        """
        self._masters.put(weights)
        self._masters.take_from_model()
        self._masters.moments[0].zero_()
        self._held = set() if number is None else {number}

    def skip_step(self) -> None:
        """Count a refused step, so that step numbers and recorded batches stay in line. Weights and moments stay as they are."""
        self.step_count += 1
        self._held.add(self.step_count)
        self._masters.set_steps(self.step_count)  # a resumed trainer knows only the step count

    def weights(self) -> Learned:
        """The present weights as a publishable result without metrics."""
        return Learned(step=self.step_count, policy_number=self.step_count, weights=self._masters.publish(), metrics={})


def _recompute(model: PreTrainedModel) -> None:
    """Keep only each layer's input for the backward pass. The library asks for training mode, so dropout is taken out first."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    # the first name came with transformers 5.22 and the second goes with 6
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _lap(seconds: dict[str, float], name: str, since: float) -> float:
    now = time.perf_counter()
    seconds[name] = now - since
    return now
