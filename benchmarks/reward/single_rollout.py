"""One rollout a prompt or groups of eight: our credit, groups judged by their outcomes, and SAO's estimator on the same turns.

    python -m benchmarks.reward.single_rollout [--seeds 3] [--batches 24]

The world `prompts` of `turn_values`: each prompt is new, one of its tokens tells which of four actions is right, another whether its reader
is easy to please; a transformer of two layers has 0.4 for the right action. Batches hold 64 answers, of one token.

- *groups*: eight prompts, eight answers to each, advantages against the group's mean (the product's `GroupRelative`).
- *ours*: the product's default for people's turns, `SingleRollout` with its learned baseline, and the trainer's truncated weights.
- *SAO* (arXiv:2607.07508, written out here from a short description of it): the advantage is the outcome less a value model's word, which
  takes two steps on each batch afterwards; tokens whose ratio of new to old probability leaves 0.3 to 5 are masked, the others weighted by
  it. The value model is a copy of the policy's with a linear head, Adam at `--critic-rate`.

"cosine" is that of a batch's gradient with the exact one, over 1,024 other prompts and all of their actions, after each estimator has
learned from `--taught` batches; "noise" the number of answers at which it would be 0.71: N (1 / c^2 - 1). "stale" answers were drawn with
logits that differ by normal noise of that standard deviation. "steps": until the right action of held-out prompts has 0.7, with answers of
`--lag` steps ago. All gradients are the product's trainer's, whose step is AdamW's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.contender import RESULTS, machine
from benchmarks.reward.bad_turn import ACTIONS, FIRST_ACTION, Floats, Ints
from benchmarks.reward.turn_values import (
    BAR,
    BATCH,
    People,
    Prompt,
    PromptWorld,
    a_trainer,
    logprobs,
    some_idea,
    supervised,
)
from numpy.typing import NDArray
from scipy import stats
from transformers import LlamaForCausalLM

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, PolicyVersion, Span, Turn
from ostinato.core.samples import Episode, Sample
from ostinato.reward.credit import GroupRelative
from ostinato.testing.records import a_turn
from ostinato.train.trainer import PolicyTrainer

EXACT, GROUP = 1_024, 8
LOWEST, HIGHEST = 0.3, 5.0  # SAO's mask
STALE = (0.0, 0.5)
GOOD, BAD = 0.75, -0.25


@dataclass(frozen=True)
class Answers:
    """A batch: prompts, their right actions, whether each reader is easy to please, and each prompt's group."""

    prompts: Sequence[Prompt]
    turns: list[Turn]
    values: Mapping[str, float]
    group_B: Ints


def chance(easy: NDArray[np.bool_], right: NDArray[np.bool_]) -> Floats:
    """That an answer is liked."""
    return np.where(easy, 0.75, 0.05).astype(np.float64) + 0.2 * right


def answers(trainer: PolicyTrainer, world: PromptWorld, number: int, *, grouped: bool, stale: float = 0.0) -> Answers:
    """Drawn from the trainer's policy, or one beside it."""
    each = GROUP if grouped else 1
    prompts, rights, easy = world.prompts(BATCH // each)
    odds_PA = logprobs(trainer, prompts)
    odds_PA = odds_PA + stale * world.rng.normal(size=odds_PA.shape)
    odds_PA = np.repeat(odds_PA - np.log(np.exp(odds_PA).sum(1, keepdims=True)), each, axis=0)
    asked, rights, easy = [p for p in prompts for _ in range(each)], np.repeat(rights, each), np.repeat(easy, each)
    actions = (world.rng.random((BATCH, 1)) > np.exp(odds_PA).cumsum(1)[:, :-1]).sum(1)
    liked = world.rng.random(BATCH) < chance(easy, actions == rights)
    policy = PolicyVersion(number=trainer.step_count, hash="")
    turns = [
        replace(
            a_turn(f"{number}-{i}:0", user=f"u{i}", prompt=prompt, sampled=(FIRST_ACTION + int(actions[i]),)),
            logprobs=(float(odds_PA[i, actions[i]]),),
            spans=(Span(policy=policy, tokens=1),),
        )
        for i, prompt in enumerate(asked)
    ]
    values = {turn.id: GOOD if ok else BAD for turn, ok in zip(turns, liked, strict=True)}
    return Answers(asked, turns, values, np.arange(BATCH) // each)


# ---------------------------------------------------------------- estimators


class Ours:
    """The product's credit for people."""

    def __init__(self) -> None:
        self._people = People()

    def __call__(self, trainer: PolicyTrainer, batch: Answers) -> list[Sample]:
        """Raises NoSignal."""
        del trainer
        return self._people.samples(batch.turns, batch.values)

    learn = __call__


class Groups:
    """The product's credit for groups: of one, it has nothing to say."""

    def __call__(self, trainer: PolicyTrainer, batch: Answers) -> list[Sample]:
        """Raises NoSignal."""
        del trainer
        episodes = [
            Episode(id=turn.id, tenant="default", turns=(turn,), group=f"g{group}")
            for turn, group in zip(batch.turns, batch.group_B.tolist(), strict=True)
        ]
        found = GroupRelative()(episodes, batch.values)
        return [Sample(turn=t, reward=batch.values[t.id], advantages=found.get(t.id, (0.0,))) for t in batch.turns]

    def learn(self, trainer: PolicyTrainer, batch: Answers) -> None:
        """Nothing."""


class Sao:
    """The outcome less a value model's word; a two-sided mask of tokens. `masked`: how many of how many answers were left out."""

    def __init__(self, path: Path, rate: float) -> None:
        self._body = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).model
        self._head = torch.nn.Linear(self._body.config.hidden_size, 1)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.Adam([*self._body.parameters(), *self._head.parameters()], lr=rate)
        self.masked = [0, 0]

    def __call__(self, trainer: PolicyTrainer, batch: Answers) -> list[Sample]:
        """The trainer is given each answer as if it were drawn now, with its weight within the advantage."""
        advantages_B = self.learn(trainer, batch)
        now_B = np.array([score[0] for score in trainer.score(batch.turns)])
        ratio_B = np.exp(now_B - np.array([turn.logprobs[0] for turn in batch.turns]))
        kept_B = (ratio_B >= LOWEST) & (ratio_B <= HIGHEST)
        self.masked = [self.masked[0] + int((~kept_B).sum()), self.masked[1] + len(kept_B)]
        weighted_B = np.where(kept_B, ratio_B * advantages_B, 0.0)
        turns = [replace(turn, logprobs=(float(now),)) for turn, now in zip(batch.turns, now_B, strict=True)]
        return [
            Sample(turn=turn, reward=batch.values[turn.id], advantages=(float(weighted),))
            for turn, weighted in zip(turns, weighted_B, strict=True)
        ]

    def learn(self, trainer: PolicyTrainer, batch: Answers) -> Floats:
        """Two steps of the value model on a batch; the advantages as they were before them."""
        del trainer
        rewards_B = torch.tensor([batch.values[turn.id] for turn in batch.turns], dtype=torch.float32)
        ids_BT = torch.tensor(np.array(batch.prompts))
        found = torch.zeros(0)
        for step in range(2):
            values_B = self._head(self._body(ids_BT).last_hidden_state[:, -1])[:, 0]
            found = (rewards_B - values_B).detach() if step == 0 else found
            self._optimizer.zero_grad()
            torch.nn.functional.mse_loss(values_B, rewards_B).backward()
            self._optimizer.step()
        return found.double().numpy()


Estimator = Ours | Groups | Sao


# ---------------------------------------------------------------- cosines


def gradient(trainer: PolicyTrainer, samples: Sequence[Sample]) -> Floats:
    """Of a trainer whose momentum is the last gradient and whose weights all but stay. A world's turns are not scaled to an RMS of 1."""
    trainer.step([replace(each, turn=replace(each.turn, arm=Arm.WORLD)) for each in samples])
    return np.array(trainer.state().moments["exp_avg"], np.float64)


def exact(trainer: PolicyTrainer, world: PromptWorld) -> Floats:
    """The gradient of the expected reward: every action of many prompts, weighted by its chance."""
    prompts, rights, easy = world.prompts(EXACT)
    odds_PA = logprobs(trainer, prompts)
    samples = list[Sample]()
    for number, prompt in enumerate(prompts):
        liked_A = chance(np.full(ACTIONS, easy[number]), np.arange(ACTIONS) == rights[number])
        worth_A = BAD + (GOOD - BAD) * liked_A
        chances_A = np.exp(odds_PA[number])
        for action in range(ACTIONS):
            turn = a_turn(f"x{number}-{action}:0", prompt=prompt, sampled=(FIRST_ACTION + action,))
            turn = replace(turn, logprobs=(float(odds_PA[number, action]),))
            weight = float(chances_A[action] * (worth_A[action] - chances_A @ worth_A / chances_A.sum()))
            samples.append(Sample(turn=turn, reward=0.0, advantages=(weight,)))
    return gradient(trainer, samples)


def cosine(one: Floats, other: Floats) -> float:
    return float(one @ other / max(1e-30, float(np.linalg.norm(one) * np.linalg.norm(other))))


def cosines(path: Path, seed: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """By batches and estimator, the cosine of each batch's gradient with the exact one. Estimators of a row see the same answers."""
    # with beta1 = 0 the momentum is the last gradient
    trainer = a_trainer(path, None, 1e-12, beta1=0.0, clip=1e30)
    truth, found = exact(trainer, PromptWorld(5_000 + seed)), dict[str, list[float]]()
    for grouped in (True, False):
        for stale in STALE:
            world = PromptWorld(seed)
            several: dict[str, Estimator] = {"ours": Ours(), "SAO": Sao(path, args.critic_rate)}
            several |= {"groups": Groups()} if grouped else {}
            for number in range(args.taught + args.batches):
                batch = answers(trainer, world, number, grouped=grouped, stale=stale)
                for name, estimator in several.items():
                    if number < args.taught:
                        estimator.learn(trainer, batch)
                        continue
                    row = f"{'8 prompts x 8' if grouped else '64 prompts'}, stale {stale:g}: {name}"
                    found.setdefault(row, []).append(cosine(gradient(trainer, estimator(trainer, batch)), truth))
    return found


# ---------------------------------------------------------------- steps


def steps_to_bar(path: Path, estimator: Estimator, rate: float, seed: int, args: argparse.Namespace) -> int | None:
    """Steps until the right action of held-out prompts has a mean chance of `BAR`; None beyond `--most-steps`."""
    trainer, world = a_trainer(path, None, rate, clip=1e30), PromptWorld(seed)
    held_out, rights, _ = PromptWorld(1_000 + seed).prompts(128)
    waiting = deque[Answers]()
    for number in range(args.most_steps + args.lag):
        if np.exp(logprobs(trainer, held_out))[np.arange(128), rights].mean() >= BAR:
            return number - args.lag
        waiting.append(answers(trainer, world, number, grouped=isinstance(estimator, Groups)))
        if len(waiting) > args.lag:
            try:
                trainer.step(estimator(trainer, waiting.popleft()))
            except NoSignal:
                continue
    return None


# ---------------------------------------------------------------- the command


def told(values: Sequence[float]) -> tuple[float, float, float]:
    """A mean over seeds with Student's 95% interval."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    half = error * float(stats.t.ppf(0.975, max(1, len(values) - 1)))
    return mean, mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--taught", type=int, default=20, help="batches before the gradients are measured")
    parser.add_argument("--batches", type=int, default=24, help="over which they are")
    parser.add_argument("--critic-rate", type=float, default=1e-3, help="of SAO's value model")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4], help="learning rates")
    parser.add_argument("--lag", type=int, default=2, help="steps")
    parser.add_argument("--most-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS / "single_rollout.json")
    args, began = parser.parse_args(), machine()
    torch.set_num_threads(1)
    started, rows = time.process_time(), dict[str, object]()
    kinds: dict[str, Callable[[Path], Estimator]] = {
        "groups": lambda _: Groups(),
        "ours": lambda _: Ours(),
        "SAO": lambda path: Sao(path, args.critic_rate),
    }
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / f"p{seed}" for seed in range(args.seeds)]
        for seed, path in enumerate(paths):
            supervised(path, seed, 400, some_idea)
        by_seed = [cosines(path, seed, args) for seed, path in enumerate(paths)]
        for name in by_seed[0]:
            means = [float(np.mean(found[name])) for found in by_seed]
            mean, low, high = told(means)
            rows[name] = {"cosine": means, "mean": mean, "95%": [low, high], "noise": BATCH * (mean**-2 - 1.0)}
            print(
                f"{name:<36} cosine {mean:.3f} [{low:.3f}, {high:.3f}] noise {BATCH * (mean**-2 - 1.0):.0f} answers",
                flush=True,
            )
        for rate in args.rates:
            for name, made in kinds.items():
                steps = [steps_to_bar(path, made(path), rate, seed, args) for seed, path in enumerate(paths)]
                rows[f"steps, {name}, rate {rate:g}"] = steps
                print(f"{name}, rate {rate:g}: steps {steps}", flush=True)
    print(f"{time.process_time() - started:.0f} CPU-seconds")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps({"machine": began} | settings | rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
