"""The learner arm (`serve.learner_share`): how fresh what is learned from becomes, and whether that takes fewer steps to a bar.

    python -m benchmarks.training.learner_share            # about ten minutes of one core

A simulated product in one process, on a clock of its own, so that the machine's load changes nothing: the product's dealing (`Arms`),
credit (`SingleRollout` with its baseline) and trainer (`PolicyTrainer`, a transformer of two layers). Its clock ticks four times a step,
and `TURNS` turns come at each tick, of 400 people. An answer has `LENGTH` tokens, each one of five actions; the prompt tells which is
right, and a reader likes an answer with a probability that grows with its share of right tokens. The first policy has 0.4 for the right
action.

Times are the demo's, in steps: feedback is heard after half a step; a step's weights can be served three quarters of a step after it was
taken (stored, then tested); a candidate every third step, which the gate judges for three steps, and lets pass. A turn that is more than
eight steps old is not learned from, and training does not run further ahead of live. "Steps" and "turns" are what training took until
held-out prompts' right actions have a mean chance of `--bar` under its newest weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from benchmarks.contender import RESULTS
from benchmarks.reward.bad_turn import ACTIONS, FIRST_ACTION, Floats, Ints
from benchmarks.reward.turn_values import People, Prompt, PromptWorld, a_trainer, supervised
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, PolicyVersion, Span, Turn
from ostinato.serve.arms import Arms
from ostinato.testing.records import a_turn

PEOPLE, TURNS, LENGTH, TICKS = 400, 16, 6, 4
HEARD, SERVED = 2, 3  # ticks until feedback is heard, and until a step's weights can be served to the learner arm
EVERY, JUDGED, STALEST = 3, 3, 8  # steps


def some_idea(rng: np.random.Generator) -> tuple[Ints, Ints, Floats]:
    """Prompts with answers, in which each token is the right action with 0.4, and each other action with 0.2."""
    prompts, rights, _ = PromptWorld(int(rng.integers(1 << 30))).prompts(64)
    wanted = np.full((64, LENGTH, ACTIONS), 0.6 / (ACTIONS - 1))
    wanted[np.arange(64), :, rights] = 0.4
    said = FIRST_ACTION + (rng.random((64, LENGTH, 1)) > wanted.cumsum(2)[:, :, :-1]).sum(2)
    ids = np.concatenate([np.array(prompts), said], axis=1)
    return ids, np.arange(LENGTH) + len(prompts[0]) - 1, wanted


class Learner(Protocol):
    """What learns from turns in `run`."""

    @property
    def step_count(self) -> int: ...

    def weights(self) -> Mapping[str, NDArray[np.float32]]: ...

    def learn(self, turns: Sequence[Turn], values: dict[str, float]) -> float | None:
        """A step from turns and their rewards. Returns how much of them counted, in [0, 1], or None if the policy did not change."""
        ...


class Ours:
    """The product's credit and trainer."""

    def __init__(self, path: Path, rate: float, **more: float | None) -> None:
        self._trainer, self._people = a_trainer(path, None, rate, turn_tokens=LENGTH, **more), People()

    @property
    def step_count(self) -> int:
        return self._trainer.step_count

    def weights(self) -> Mapping[str, NDArray[np.float32]]:
        kept = self._trainer.weights()
        return {name: np.frombuffer(array.data, np.float32).reshape(array.shape) for name, array in kept.items()}

    def learn(self, turns: Sequence[Turn], values: dict[str, float]) -> float | None:
        """A step; the ESS of its tokens."""
        try:
            return self._trainer.step(self._people.samples(turns, values)).metrics["ess"]
        except NoSignal:
            return None


class Policies:
    """The weights of each version, as models that answer."""

    def __init__(self, path: Path) -> None:
        self._first = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._held = dict[int, LlamaForCausalLM]()

    def model(self, number: int) -> LlamaForCausalLM:
        return self._held[number]

    def keep(self, number: int, learner: Learner) -> None:
        """Keep the learner's weights as a version, and forget those that nobody can be served any more."""
        model = copy.deepcopy(self._first)
        state = {name: torch.from_numpy(np.array(array)) for name, array in learner.weights().items()}
        model.load_state_dict(state, strict=False)
        self._held[number] = model
        for old in [each for each in self._held if each < number - 4 * STALEST]:
            del self._held[old]

    def answers(self, number: int, prompts: Sequence[Prompt], rng: np.random.Generator) -> tuple[Ints, Floats, Floats]:
        """Answers [P, L], the log-probabilities of their tokens, and of each action where they were drawn [P, L, A]."""
        ids, found, odds = np.array(prompts), list[Floats](), list[Floats]()
        for _ in range(LENGTH):
            with torch.no_grad():
                logprobs = self._held[number](torch.from_numpy(ids)).logits[:, -1].double().log_softmax(-1).numpy()
            mine = logprobs[:, FIRST_ACTION : FIRST_ACTION + ACTIONS]
            chances = np.exp(logprobs) / np.exp(logprobs).sum(1, keepdims=True)
            drawn = (rng.random((len(ids), 1)) > chances.cumsum(1)[:, :-1]).sum(1)
            found.append(logprobs[np.arange(len(ids)), drawn])
            odds.append(mine)
            ids = np.concatenate([ids, drawn[:, None]], axis=1)
        return ids[:, -LENGTH:], np.stack(found, 1), np.stack(odds, 1)


@dataclass
class Found:
    """What a run came to. `lag` and `fresh`: of the tokens that were learned from, up to the bar; `fresh` at most two steps old."""

    steps: int | None = None
    turns: int = 0
    lag: float = 0.0
    on_policy: float = 0.0
    fresh: float = 0.0
    ess: float = 0.0
    chance: float = 0.0
    lags: list[int] = field(default_factory=list[int])


def run(trainer: Learner, path: Path, share: float, seed: int, bar: float, most: int) -> Found:
    """One product with a share of people who follow training."""
    policies = Policies(path)
    arms, world, rng, found = Arms(learner=share), PromptWorld(seed), np.random.default_rng(seed), Found()
    held_out, rights, _ = PromptWorld(1_000 + seed).prompts(128)
    policies.keep(0, trainer)
    served, waiting, esses = {"live": 0, "learner": 0}, list[tuple[int, int, Turn, float]](), list[float]()
    judging: tuple[int, int] | None = None  # the candidate, and the tick of its verdict
    stored, tick, under_way = [(0, 0)], 0, None
    while trainer.step_count < most:
        if tick % TICKS == 0:
            if under_way is not None:
                learned = _learn(trainer, under_way, found)
                under_way = None
                if learned is not None:
                    esses.append(learned)
                    policies.keep(trainer.step_count, trainer)
                    stored.append((trainer.step_count, tick + SERVED))
                    odds = policies.answers(trainer.step_count, held_out, np.random.default_rng(7))[2]
                    found.chance = float(np.exp(odds)[np.arange(128), :, rights].mean())
                    if found.chance >= bar:
                        found.steps = trainer.step_count
                        break
            ready = [each for each in waiting if each[0] <= tick]
            if ready and trainer.step_count - served["live"] < STALEST:
                waiting = [each for each in waiting if each[0] > tick]
                under_way = ready
        if judging is not None and tick >= judging[1]:
            served["live"], judging = judging[0], None
        newest = max(number for number, at in stored if at <= tick)
        candidate = newest - newest % EVERY
        if judging is None and candidate > served["live"]:
            judging = candidate, tick + JUDGED * TICKS
        served["learner"] = max(newest, served["live"])
        waiting += _served(policies, arms, world, served, tick, rng)
        tick += 1
    lags = np.array(found.lags)
    found.lag, found.on_policy, found.fresh = float(lags.mean()), float((lags == 0).mean()), float((lags <= 2).mean())
    found.ess = float(np.mean(esses))
    return found


def _learn(trainer: Learner, ready: Sequence[tuple[int, int, Turn, float]], found: Found) -> float | None:
    usable = [(turn, value) for _, number, turn, value in ready if trainer.step_count - number <= STALEST]
    if not usable:
        return None
    lags = [trainer.step_count - turn.spans[0].policy.number for turn, _ in usable]
    counted = trainer.learn([turn for turn, _ in usable], {turn.id: value for turn, value in usable})
    if counted is not None:
        found.lags += lags
    found.turns += len(usable)
    return counted


def _served(
    policies: Policies, arms: Arms, world: PromptWorld, served: dict[str, int], tick: int, rng: np.random.Generator
) -> list[tuple[int, int, Turn, float]]:
    prompts, rights, _ = world.prompts(TURNS)
    users = [f"u{number}" for number in rng.integers(0, PEOPLE, TURNS)]
    dealt = [arms.assign("default", user, served).arm for user in users]
    found = list[tuple[int, int, Turn, float]]()
    for arm in (Arm.LIVE, Arm.LEARNER):
        places = [place for place, each in enumerate(dealt) if each is arm]
        if not places:
            continue
        number = served[arm.value]
        said, logprobs, _ = policies.answers(number, [prompts[place] for place in places], rng)
        good = (said == FIRST_ACTION + rights[places, None]).mean(1)
        liked = rng.random(len(places)) < 0.05 + 0.9 * good
        policy = PolicyVersion(number=number, hash="")
        for row, place in enumerate(places):
            ids = said[row].tolist()
            turn = a_turn(f"{tick}-{place}:0", user=users[place], prompt=prompts[place], sampled=ids, arm=arm)
            turn = replace(turn, logprobs=tuple(logprobs[row].tolist()), spans=(Span(policy=policy, tokens=LENGTH),))
            found.append((tick + HEARD, number, turn, 0.5 if liked[row] else -0.5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.5, 1.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4], help="learning rates")
    parser.add_argument("--bar", type=float, default=0.8)
    parser.add_argument("--most-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS / "learner_share.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.process_time(), list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / f"{seed}" for seed in range(args.seeds)]
        for seed, path in enumerate(paths):
            supervised(path, seed, 400, some_idea)
        for rate in args.rates:
            for share in args.shares:
                for seed, path in enumerate(paths):
                    row = vars(run(Ours(path, rate), path, share, seed, args.bar, args.most_steps))
                    del row["lags"]
                    rows.append({"rate": rate, "share": share, "seed": seed, **row})
                    print(json.dumps(rows[-1]), flush=True)
    print(f"{time.process_time() - started:.0f} CPU-seconds")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps(settings | {"runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
