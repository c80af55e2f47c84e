"""SAO's estimator beside ours, on the same turns: how near each comes to the true gradient, and how many turns it takes to a bar.

    python -m benchmarks.training.single_rollout

SAO (Single-rollout Asynchronous Optimization, arXiv 2607.07508) is written here from its published description: one rollout per prompt;
a token's ratio to the policy that sampled it weights it, and masks it outside of [0.7, 6]; a value model, a copy of the first policy whose
attention stays, takes two steps for each of the policy's, at five times its learning rate, towards the rewards; advantages by GAE with the
lambda of the answer's length, 1 - 1 / (1.5 tokens). "sao, taught" begins with ten steps of the value model alone, as published. "ours" has
`train.turn_ess = 0.3`, "ours, by tokens" weights no turn as a whole, as by default. All have the same AdamW.

`gradient`: turns of an older policy, by how many steps; the cosine of a batch's gradient with the gradient of the expected reward, which is
estimated from `--reference` answers of the newest policy, with their expected rewards, each less the mean of those of its prompt. Baseline
and value model have learned from `--taught` batches of the older policy.

`bar`: the simulated product of `benchmarks.training.learner_share`, with its delays, in which turns become three to eight steps old.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.contender import RESULTS
from benchmarks.reward.bad_turn import FIRST_ACTION, Floats, Ints
from benchmarks.reward.turn_values import People, Prompt, PromptWorld, a_trainer, supervised
from benchmarks.training.learner_share import LENGTH, Learner, Ours, Policies, run, some_idea
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaModel

from ostinato.core.records import PolicyVersion, Span, Turn
from ostinato.testing.records import a_turn
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

BATCH, SAMPLES = 64, 16  # turns of a batch; answers to one prompt of the reference
LOWEST, HIGHEST = 0.7, 6.0  # ratios of tokens that are learned from: 1 - 0.3, 1 + 5
CRITIC_STEPS, CRITIC_RATE, ALPHA = 2, 5.0, 1.5


def answer_logprobs(model: LlamaForCausalLM, turns: Sequence[Turn]) -> Tensor:
    """[B, L]: of the sampled tokens."""
    ids_BT = torch.tensor([(*turn.prompt_ids, *turn.sampled_ids) for turn in turns])
    logprobs_BLV = model(ids_BT).logits[:, -LENGTH - 1 : -1].log_softmax(-1)
    return logprobs_BLV.gather(-1, ids_BT[:, -LENGTH:, None])[..., 0]


def optimizer_of(parameters: Sequence[Tensor], rate: float) -> torch.optim.AdamW:
    config = TrainConfig()
    return torch.optim.AdamW(
        parameters, rate, (config.beta1, config.beta2), config.epsilon, weight_decay=config.weight_decay
    )


class Sao:
    """The policy, and its value model, of SAO."""

    def __init__(self, path: Path, rate: float, *, critic_only: int = 0) -> None:
        self.step_count = 0
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._critic = LlamaModel.from_pretrained(path, dtype=torch.float32)
        self._head = torch.nn.Linear(self._critic.config.hidden_size, 1)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        learning = [each for name, each in self._critic.named_parameters() if "self_attn" not in name]
        self._critic_optimizer = optimizer_of([*learning, *self._head.parameters()], CRITIC_RATE * rate)
        self._optimizer = optimizer_of(list(self._model.parameters()), rate)
        self._critic_only = critic_only

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: each.detach().numpy() for name, each in self._model.named_parameters()}

    def learn(self, turns: Sequence[Turn], values: dict[str, float]) -> float | None:
        """One step. Returns the share of tokens that were not masked."""
        advantages_BL = self.teach(turns, values)
        if self._critic_only > 0:
            self._critic_only -= 1
            return None
        self._optimizer.zero_grad()
        loss, kept = self.loss(turns, advantages_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), TrainConfig().clip)
        self._optimizer.step()
        self.step_count += 1
        return kept

    def teach(self, turns: Sequence[Turn], values: dict[str, float]) -> Tensor:
        """The advantages [B, L] by the value model as it was; then it learns."""
        rewards_B = torch.tensor([values[turn.id] for turn in turns], dtype=torch.float32)
        before_BL = self._values(turns).detach()
        for _ in range(CRITIC_STEPS):
            self._critic_optimizer.zero_grad()
            (self._values(turns) - rewards_B[:, None]).square().mean().backward()
            self._critic_optimizer.step()
        after_BL = torch.cat([before_BL[:, 1:], rewards_B[:, None]], dim=1)
        deltas_BL = after_BL - before_BL
        trace, found_BL = 1 - 1 / (ALPHA * LENGTH), torch.zeros_like(deltas_BL)
        running_B = torch.zeros(len(turns))
        for place in reversed(range(LENGTH)):
            running_B = deltas_BL[:, place] + trace * running_B
            found_BL[:, place] = running_B
        return found_BL

    def loss(self, turns: Sequence[Turn], advantages_BL: Tensor) -> tuple[Tensor, float]:
        """The policy's loss, and the share of tokens that were not masked."""
        sampled_BL = torch.tensor([turn.logprobs for turn in turns], dtype=torch.float32)
        ratios_BL = (answer_logprobs(self._model, turns) - sampled_BL).exp()
        kept_BL = (ratios_BL.detach() > LOWEST) & (ratios_BL.detach() < HIGHEST)
        return -(ratios_BL * advantages_BL * kept_BL).mean(), float(kept_BL.float().mean())

    def gradient(self, turns: Sequence[Turn], values: dict[str, float], model: LlamaForCausalLM) -> Floats:
        """Of `model`, by name in one row."""
        self._model = model
        model.zero_grad()
        self.loss(turns, self.teach(turns, values))[0].backward()
        return flat({name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None})

    def _values(self, turns: Sequence[Turn]) -> Tensor:
        ids_BT = torch.tensor([(*turn.prompt_ids, *turn.sampled_ids) for turn in turns])
        return self._head(self._critic(ids_BT).last_hidden_state[:, -LENGTH - 1 : -1])[..., 0]


def flat(parts: Mapping[str, NDArray[Any]]) -> Floats:
    return np.concatenate([np.asarray(parts[name], np.float64).ravel() for name in sorted(parts)])


# ---------------------------------------------------------------- the gradient


def expected_reward(said: Ints, rights: Ints) -> Floats:
    """What an answer's reader gives it on average, as in `learner_share`: +0.5 if it is liked, else -0.5."""
    return 0.05 + 0.9 * (said == FIRST_ACTION + rights[:, None]).mean(1) - 0.5


def true_gradient(model: LlamaForCausalLM, policies: Policies, number: int, prompts: int, seed: int) -> Floats:
    """Of minus the expected reward, from `SAMPLES` answers to each prompt."""
    asked, rights, _ = PromptWorld(seed).prompts(prompts)
    repeated = [prompt for prompt in asked for _ in range(SAMPLES)]
    rng, rights = np.random.default_rng(seed), rights.repeat(SAMPLES)
    model.zero_grad()
    for start in range(0, len(repeated), 1024):
        part = slice(start, start + 1024)
        said, logprobs, _ = policies.answers(number, repeated[part], rng)
        rewards = expected_reward(said, rights[part]).reshape(-1, SAMPLES)
        less = (rewards - rewards.mean(1, keepdims=True)).ravel() * SAMPLES / (SAMPLES - 1)
        turns = turns_of(repeated[part], said, logprobs, number, f"r{start}")
        (-(answer_logprobs(model, turns).sum(1) * torch.from_numpy(less).float()).sum() / len(repeated)).backward()
    return flat({name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None})


def turns_of(prompts: Sequence[Prompt], said: Ints, logprobs: Floats, number: int, name: str) -> list[Turn]:
    spans = (Span(policy=PolicyVersion(number=number, hash=""), tokens=LENGTH),)
    found = [
        a_turn(f"{name}-{place}:0", user=f"u{place}", prompt=prompt, sampled=said[place].tolist())
        for place, prompt in enumerate(prompts)
    ]
    return [replace(turn, logprobs=tuple(row.tolist()), spans=spans) for turn, row in zip(found, logprobs, strict=True)]


def batch(policies: Policies, world: PromptWorld, number: int, name: str) -> tuple[list[Turn], dict[str, float]]:
    """Turns of a policy, and what their readers said."""
    prompts, rights, _ = world.prompts(BATCH)
    said, logprobs, _ = policies.answers(number, prompts, world.rng)
    turns = turns_of(prompts, said, logprobs, number, name)
    liked = world.rng.random(BATCH) < expected_reward(said, rights) + 0.5
    return turns, {turn.id: 0.5 if ok else -0.5 for turn, ok in zip(turns, liked, strict=True)}


def gradients(path: Path, place: Path, age: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Mean cosines with the true gradient at a policy that is `age` steps newer than the turns."""
    policies, world = Policies(path), PromptWorld(seed)
    ours = Ours(path, 3e-4)
    policies.keep(0, ours)
    for step in range(age):
        policies.keep(step, ours)
        ours.learn(*batch(policies, world, step, f"d{step}"))
    policies.keep(age, ours)
    newest = policies.model(age)
    shutil.copytree(path, place)  # its tokenizer
    newest.save_pretrained(place)
    truth = true_gradient(newest, policies, age, args.reference // SAMPLES, 10_000 + seed)
    # with beta1 = 0 the momentum is the last gradient; the weights all but stay
    still = {"beta1": 0.0, "clip": 1e30, "turn_tokens": LENGTH}
    measured = {
        "ours": a_trainer(place, None, 1e-12, turn_ess=0.3, **still),
        "ours, by tokens": a_trainer(place, None, 1e-12, turn_ess=None, **still),
    }
    people, sao = People(), Sao(path, 3e-4)
    found: dict[str, list[float]] = {"ours": [], "ours, by tokens": [], "sao": []}
    for number in range(args.taught + args.batches):
        turns, values = batch(policies, world, 0, f"b{number}")
        mine = people.samples(turns, values)
        if number < args.taught:
            sao.teach(turns, values)
            continue
        for name, trainer in measured.items():
            trainer.step(mine)
            found[name].append(cosine(last_gradient(trainer), truth))
        found["sao"].append(cosine(sao.gradient(turns, values, newest), truth))
    return {name: float(np.mean(each)) for name, each in found.items()}


def last_gradient(trainer: PolicyTrainer) -> Floats:
    """As `flat` has it."""
    state, parts, start = trainer.state(), dict[str, NDArray[Any]](), 0
    for name, array in state.weights.items():
        parts[name] = state.moments["exp_avg"][start : start + array.size]
        start += array.size
    return flat(parts)


def cosine(one: Floats, other: Floats) -> float:
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--taught", type=int, default=20, help="batches that baseline and value model learn from first")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--reference", type=int, default=16_384, help="answers behind the true gradient")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="learning rates")
    parser.add_argument("--bar", type=float, default=0.8)
    parser.add_argument("--most-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS / "single_rollout.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.process_time(), list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{seed}" for seed in range(args.seeds)]
        for seed, path in enumerate(paths):
            supervised(path, seed, 400, some_idea)
            for age in args.ages:
                found = gradients(path, Path(folder) / f"{seed}-{age}", age, seed, args)
                rows.append({"what": "gradient", "seed": seed, "age": age, **found})
                print(json.dumps(rows[-1]), flush=True)
        for seed, path in enumerate(paths):
            for rate in args.rates:
                learners: dict[str, Learner] = {
                    "ours": Ours(path, rate, turn_ess=0.3),
                    "ours, by tokens": Ours(path, rate, turn_ess=None),
                    "sao": Sao(path, rate),
                    "sao, taught": Sao(path, rate, critic_only=10),
                }
                for name, learner in learners.items():
                    told = run(learner, path, 0.0, seed, args.bar, args.most_steps)
                    row = {"what": "bar", "learner": name, "rate": rate, "seed": seed, "steps": told.steps}
                    rows.append(row | {"turns": told.turns, "chance": told.chance})
                    print(json.dumps(rows[-1]), flush=True)
    print(f"{time.process_time() - started:.0f} CPU-seconds")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps(settings | {"runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
