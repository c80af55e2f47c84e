"""One optimizer step: samples with credit in, new weights out.

Data flow: samples -> micro-batches of packed token trees -> forward, loss, backward (gradients summed in fp32) -> one set of
checks over the whole batch -> AdamW -> the rounded weights as bytes. Synchronous and CPU-bound; the worker runs it in a thread.

A step either happens or leaves weights, moments and step count as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadWeights, Corrupt, NoSignal
from ostinato.core.records import Learned, PolicyVersion, Sample, Snapshot, Turn, Weights
from ostinato.model.attention import hidden, logits
from ostinato.model.load import load_model
from ostinato.train.checkpoint import Checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.losses import drift, effective_share, k1, k3, policy_loss, token_logprobs
from ostinato.train.masters import Masters
from ostinato.train.packing import Packed, TokenTurn, pack, plan
from ostinato.train.tree_attention import TreeAttention


def compute_dtype(choice: str) -> torch.dtype:
    """bf16 or fp32. `auto` is bf16 where the CPU multiplies bf16 matrices itself (AVX512-BF16, AMX); elsewhere that is slower."""
    if choice == "auto":
        flags = torch.cpu.get_capabilities()
        return (
            torch.bfloat16 if flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16") else torch.float32
        )
    return torch.bfloat16 if choice == "bf16" else torch.float32


@dataclass(slots=True, kw_only=True)
class _Work:
    """One micro-batch: the packed tree and, for its M sampled tokens, everything that the loss reads."""

    packed: Packed
    attend: TreeAttention
    temperatures_M: Tensor
    behaviour_M: Tensor
    advantages_M: Tensor
    versions_M: list[PolicyVersion]
    reference_M: Tensor | None = None


class PolicyTrainer:
    """All weights of one model, learning from turns.

    `step_count` is the number of optimizer steps behind the weights, which is the policy version's number.

    Example::

        trainer = PolicyTrainer(resolve("smollm2", cache), TrainConfig(learning_rate=2e-5))
        learned = trainer.step(samples, reference=Snapshot(policy=v0, weights=weights))
        learned.metrics["loss"], learned.weights["model.embed_tokens.weight"].dtype  # "BF16"
    """

    def __init__(self, model_path: Path, config: TrainConfig) -> None:
        self.config = config
        self.step_count = 0
        # eval mode: dropout would make the trainer's policy another one than the sampler's
        self._model = load_model(model_path, compute_dtype(config.compute))
        if config.recompute:
            _recompute(self._model)
        self._head = partial(logits, self._model)
        self._masters = Masters(self._model, config)
        torch.manual_seed(config.seed)

    # ------------------------------------------------------------ one step

    def step(self, samples: Sequence[Sample], reference: Snapshot | None = None) -> Learned:
        """Learn from `samples`; `reference` is the release that the KL penalty is measured against (None: no penalty).

        A token made by `reference.policy` is its own reference: the captured logprob is used and no second pass is needed.

        Raises NoSignal (no sampled token, or ESS/n below `min_ess`) and BadWeights (a NaN or infinite loss or gradient); the
        trainer is then as it was before the call.
        """
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        usable = [sample for sample in samples if sample.turn.prompt_ids and sample.turn.sampled_ids]
        if not usable:
            raise NoSignal(f"none of {len(samples)} turns has a sampled token: hold such turns back, do not batch them")
        work = self._prepare(usable)
        lap = _lap(seconds, "prepare", started)
        if reference is not None and self.config.kl_beta:
            self._add_reference(work, reference)
        lap = _lap(seconds, "reference", lap)
        try:
            loss, logprobs = self._accumulate(work, len(usable), seconds)
            lap = time.perf_counter()
            metrics = self._judge(work, logprobs, loss)
        except BaseException:
            self._masters.clear_grads()
            raise
        self._update(metrics)
        lap = _lap(seconds, "optimizer", lap)
        weights = self._masters.publish()
        _lap(seconds, "publish", lap)
        total = time.perf_counter() - started
        tokens = sum(item.packed.tokens for item in work)
        metrics |= {
            "tokens": float(tokens),
            "tokens_saved": float(sum(item.packed.saved for item in work)),
            "tokens_sampled": float(sum(len(item.packed.targets_M) for item in work)),
            "turns": float(len(usable)),
            "turns_empty": float(len(samples) - len(usable)),
            "microbatches": float(len(work)),
            "reward_mean": sum(sample.reward for sample in usable) / len(usable),
            "advantage_abs": sum(abs(sample.advantage) for sample in usable) / len(usable),
            "seconds": total,
            "tokens_per_second": tokens / total,
            **{f"seconds_{name}": value for name, value in seconds.items()},
        }
        return Learned(step=self.step_count, policy_number=self.step_count, weights=weights, metrics=metrics)

    def score(self, turns: Sequence[Turn]) -> list[tuple[float, ...]]:
        """The sampled tokens' logprobs under the present weights, at each turn's own temperature, as the sampler recorded them."""
        results: list[tuple[float, ...]] = [()] * len(turns)
        known = [index for index, turn in enumerate(turns) if turn.prompt_ids and turn.sampled_ids]
        tokens = [TokenTurn(prompt=turns[i].prompt_ids, sampled=turns[i].sampled_ids) for i in known]
        for chosen in plan(tokens, self.config.microbatch_tokens):
            packed = pack([tokens[index] for index in chosen])
            scored = self._forward(
                packed, TreeAttention(packed), _temperatures([turns[known[i]] for i in chosen])
            ).numpy()
            for place, index in enumerate(chosen):
                results[known[index]] = tuple(scored[packed.turns_M == place].tolist())
        return results

    def _prepare(self, samples: Sequence[Sample]) -> list[_Work]:
        tokens = [TokenTurn(prompt=sample.turn.prompt_ids, sampled=sample.turn.sampled_ids) for sample in samples]
        work: list[_Work] = []
        for chosen in plan(tokens, self.config.microbatch_tokens):
            packed = pack([tokens[index] for index in chosen])
            turns = [samples[index].turn for index in chosen]
            advantages = np.array([samples[index].advantage for index in chosen], np.float32)
            work.append(
                _Work(
                    packed=packed,
                    attend=TreeAttention(packed),
                    temperatures_M=_temperatures(turns),
                    behaviour_M=torch.tensor([value for turn in turns for value in turn.logprobs], dtype=torch.float32),
                    advantages_M=torch.from_numpy(advantages[packed.turns_M]),
                    versions_M=[version for turn in turns for version in turn.versions_T()],
                )
            )
        return work

    def _add_reference(self, work: Sequence[_Work], reference: Snapshot) -> None:
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
        states_ND = hidden(self._model, torch.from_numpy(packed.ids_N), torch.from_numpy(packed.positions_N), attend)
        rows_MD = states_ND.index_select(0, torch.from_numpy(packed.rows_M))
        return token_logprobs(self._head, rows_MD, torch.from_numpy(packed.targets_M), temperatures_M)

    def _accumulate(self, work: Sequence[_Work], turns: int, seconds: dict[str, float]) -> tuple[float, list[Tensor]]:
        """Forward and backward of every micro-batch. Returns the loss and each micro-batch's logprobs."""
        total = 0.0
        kept: list[Tensor] = []
        seconds |= {"forward": 0.0, "backward": 0.0}
        self._masters.clear_grads()
        for item in work:
            lap = time.perf_counter()
            logprobs_M = self._logprobs(item.packed, item.attend, item.temperatures_M)
            result = policy_loss(
                logprobs_M,
                behaviour_M=item.behaviour_M,
                advantages_M=item.advantages_M,
                turns_M=torch.from_numpy(item.packed.turns_M),
                normaliser=float(turns * self.config.turn_tokens),
                reference_M=item.reference_M,
                beta=self.config.kl_beta,
                cap=self.config.importance_cap,
            )
            now = time.perf_counter()
            seconds["forward"] += now - lap
            result.loss.backward()
            seconds["backward"] += time.perf_counter() - now
            total += float(result.loss.detach())
            kept.append(logprobs_M.detach())
        return total, kept

    def _judge(self, work: Sequence[_Work], logprobs: Sequence[Tensor], loss: float) -> dict[str, float]:
        """Measure the batch and refuse what must not move the weights."""
        cap = self.config.importance_cap
        now_M = torch.cat(list(logprobs))
        behaviour_M = torch.cat([item.behaviour_M for item in work])
        fresh_M = torch.tensor([version.number == self.step_count for item in work for version in item.versions_M])
        norm = self._masters.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise BadWeights(
                f"step {self.step_count + 1} refused: loss {loss}, gradient norm {norm}. Weights are unchanged. Look for a NaN in the "
                "batch's logprobs or advantages; if there is none, resume from an earlier checkpoint."
            )
        ess = effective_share((now_M - behaviour_M).exp().clamp(max=cap))
        if ess < self.config.min_ess:
            raise NoSignal(
                f"step {self.step_count + 1} refused: ESS/n of the importance weights is {ess:.3f}, below {self.config.min_ess}: the "
                "policy has left these samples behind. Train on fresher turns (release more often, or lower the staleness limit)."
            )
        if norm == 0.0:
            raise NoSignal(
                f"step {self.step_count + 1} refused: the gradient is exactly 0, as when every advantage is 0"
            )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "clip_scale": min(1.0, self.config.clip / norm),
            "ess": ess,
            "entropy_proxy": float(-now_M.mean()),  # mean surprise of the sampled tokens
        }
        metrics |= drift(now_M[fresh_M], behaviour_M[fresh_M], cap=cap, prefix="mismatch_")
        metrics |= drift(now_M[~fresh_M], behaviour_M[~fresh_M], cap=cap, prefix="stale_")
        reference = [item.reference_M for item in work if item.reference_M is not None]
        if reference:
            reference_M = torch.cat(reference)
            metrics["kl_k1"] = float(k1(now_M, reference_M).mean())
            metrics["kl_k3"] = float(k3(now_M, reference_M).mean())
        return metrics

    def _update(self, metrics: dict[str, float]) -> None:
        warmup = min(1.0, (self.step_count + 1) / max(1, self.config.warmup_steps))
        metrics["learning_rate"] = self.config.learning_rate * warmup * metrics["ess"]
        self._masters.update(learning_rate=metrics["learning_rate"], scale=metrics["clip_scale"])
        self.step_count += 1

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
        self._masters.set_steps(checkpoint.step)
        self._masters.round_into_model()

    def go_back(self, weights: Weights) -> None:
        """Start the next step from a standing release: its weights become the masters, and the momentum that led away is dropped.

        Raises BadWeights, with the trainer unchanged, if they are not this model's.
        """
        self._masters.put(weights)
        self._masters.take_from_model()
        self._masters.moments[0].zero_()

    def skip_step(self) -> None:
        """Count a refused step, so that step numbers and recorded batches stay in line. Weights and moments stay as they are."""
        self.step_count += 1
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


def _temperatures(turns: Sequence[Turn]) -> Tensor:
    """Per sampled token. Greedy turns (temperature 0) are recorded with the logprobs of temperature 1."""
    values = [turn.sampling.temperature or 1.0 for turn in turns for _ in turn.sampled_ids]
    return torch.tensor(values, dtype=torch.float32)
