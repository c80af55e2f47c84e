"""Values of turns (`train.value_lambda`): what a value head on the model's own hidden states is worth, in the product's trainer.

Two worlds for a transformer of two layers, with the product's credit (`SingleRollout` and its baseline) and trainer (`PolicyTrainer`):

`prompts`: each prompt is new. One of its tokens tells which of four actions is right, another whether its reader is easy to please: 0.95
for the right action and 0.75 for others, else 0.25 and 0.05. The first policy has 0.4 for the right action. "noise" is what is left of a
step's squared gradient, over batches of that policy, once baseline and head have learned from `--taught` of them; "steps" how many it takes
until a held-out prompt's right action has 0.7.

`episodes`: as in `bad_turn`, but all turns before stand in a turn's prompt, and after each the prompt says whether its action was right.
The bad turn is fixed at a chance of 0.75. The outcome is told at the end, and reaches all turns. The mean KL of the others from what
they were, over the prompts of the last batch, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.contender import RESULTS
from benchmarks.reward.bad_turn import ACTIONS, EPISODES, FIRST_ACTION, GOAL, Floats, Ints
from benchmarks.reward.hints import CLOSE, OPEN
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, PolicyVersion, Span, Turn
from ostinato.core.samples import Sample
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode, episode_returns
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

BATCH, BAR = 64, 0.7
RIGHT, WRONG = 55, 56  # the tokens that say what became of an action
Prompt = tuple[int, ...]


def supervised(
    path: Path, seed: int, steps: int, draw: Callable[[np.random.Generator], tuple[Ints, Ints, Floats]]
) -> None:
    """A model directory with given chances of actions. `draw` gives token ids [B, T], places that actions follow, [K], and the chances of
    each action behind them [B, K, A].
    """
    tiny_model(path, seed=seed, hidden=64, layers=2)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids_BT, places_K, wanted_BKA = draw(rng)
        logprobs = model(torch.from_numpy(ids_BT)).logits[:, torch.from_numpy(places_K)].log_softmax(-1)
        loss = (
            -(torch.tensor(wanted_BKA, dtype=torch.float32) * logprobs[..., FIRST_ACTION : FIRST_ACTION + ACTIONS])
            .sum(-1)
            .mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(path)


def logprobs(trainer: PolicyTrainer, prompts: Sequence[Prompt]) -> Floats:
    """[P, A]: of each action behind each prompt."""
    asked = [a_turn("q", prompt=p, sampled=(FIRST_ACTION + a,)) for p in prompts for a in range(ACTIONS)]
    return np.array([score[0] for score in trainer.score(asked)]).reshape(len(prompts), ACTIONS)


class People:
    """The product's credit for people's turns, with its baseline, which learns from each batch."""

    def __init__(self) -> None:
        self._config = RewardConfig(user_cap=1.0, user_steps=0)
        self._baseline = Baseline()

    def samples(self, turns: Sequence[Turn], values: Mapping[str, float]) -> list[Sample]:
        """Raises NoSignal."""
        episodes = by_episode(turns)
        ends = {each.turns[-1].id for each in episodes}
        credit = SingleRollout(self._config, self._baseline, outcomes=ends)(episodes, values)
        for each in episodes:
            ids = [turn.id for turn in each.turns]
            reached = episode_returns(ids, [(values[turn], 0.0, 0) for turn in ids], 0.9, outcomes=ends).turns
            for turn, found in zip(each.turns, reached, strict=True):
                self._baseline.observe(context_of(turn), found.total, 1, found.outcomes)
        return [Sample(turn=turn, reward=values[turn.id], advantages=credit[turn.id]) for turn in turns]


def a_trainer(path: Path, trace: float | None, rate: float, **more: float | None) -> PolicyTrainer:
    config = TrainConfig(
        compute="fp32",
        publish="fp32",
        learning_rate=rate,
        warmup_steps=0,
        turn_tokens=1,
        signal_share=None,
        value_lambda=trace,
        microbatch_tokens=4096,
    )
    return PolicyTrainer(path, config.model_copy(update=more))


# ---------------------------------------------------------------- prompts


class PromptWorld:
    """Draws prompts and what people say of actions."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def prompts(self, count: int) -> tuple[list[Prompt], Ints, NDArray[np.bool_]]:
        """Prompts, the right action of each, and whether its reader is easy to please."""
        found, rights, easy = list[Prompt](), self.rng.integers(0, ACTIONS, count), self.rng.random(count) < 0.5
        for right, ease in zip(rights, easy, strict=True):
            words = [60 + int(right), 70 + int(ease), *self.rng.integers(80, 250, 5).tolist()]
            found.append((OPEN, *self.rng.permutation(words).tolist(), CLOSE))
        return found, rights, easy

    def batch(self, trainer: PolicyTrainer, number: int) -> tuple[list[Turn], dict[str, float]]:
        """Turns of the trainer's present policy, and their rewards."""
        prompts, rights, easy = self.prompts(BATCH)
        odds_PA = logprobs(trainer, prompts)
        chances_PA = np.exp(odds_PA) / np.exp(odds_PA).sum(1, keepdims=True)
        actions = (self.rng.random((BATCH, 1)) > chances_PA.cumsum(1)[:, :-1]).sum(1)
        liked = self.rng.random(BATCH) < np.where(easy, 0.75, 0.05) + 0.2 * (actions == rights)
        policy = PolicyVersion(number=trainer.step_count, hash="")
        turns = [
            replace(
                a_turn(f"{number}-{i}:0", user=f"u{i}", prompt=prompt, sampled=(FIRST_ACTION + int(actions[i]),)),
                logprobs=(float(odds_PA[i, actions[i]]),),
                spans=(Span(policy=policy, tokens=1),),
            )
            for i, prompt in enumerate(prompts)
        ]
        return turns, {turn.id: 0.75 if ok else -0.25 for turn, ok in zip(turns, liked, strict=True)}


def some_idea(rng: np.random.Generator) -> tuple[Ints, Ints, Floats]:
    """Prompts behind which the right action has 0.4 and each of the others 0.2."""
    prompts, rights, _ = PromptWorld(int(rng.integers(1 << 30))).prompts(64)
    wanted = np.full((64, 1, ACTIONS), 0.2)
    wanted[np.arange(64), 0, rights] = 0.4
    return np.array(prompts), np.array([len(prompts[0]) - 1]), wanted


def steps_to_bar(path: Path, trace: float | None, rate: float, seed: int, most: int) -> int | None:
    """Steps until the right action of held-out prompts has a mean chance of `BAR`."""
    trainer, world, people = a_trainer(path, trace, rate), PromptWorld(seed), People()
    held_out, rights, _ = PromptWorld(1_000 + seed).prompts(128)
    for number in range(most):
        if np.exp(logprobs(trainer, held_out))[np.arange(128), rights].mean() >= BAR:
            return number
        turns, values = world.batch(trainer, number)
        trainer.step(people.samples(turns, values))
    return None


def gradient_noise(path: Path, seed: int, taught: int, batches: int) -> dict[str, float]:
    """E|g|^2 with credit beyond values, over that with the credit as recorded, over the same batches, and the share that values explain.

    The turns are called a world's here, whose credit is not scaled to its RMS: then E g is the same, and all of the difference is noise.
    """
    # with beta1 = 0 the momentum is the last gradient; the weights all but stay
    trainers = [a_trainer(path, trace, 1e-12, beta1=0.0, clip=1e30) for trace in (None, 1.0)]
    world, people, explained = PromptWorld(seed), People(), list[float]()
    squares: tuple[list[float], list[float]] = [], []
    for number in range(taught + batches):
        turns, values = world.batch(trainers[0], number)
        samples = [replace(each, turn=replace(each.turn, arm=Arm.WORLD)) for each in people.samples(turns, values)]
        for trainer, found in zip(trainers, squares, strict=True):
            metrics = trainer.step(samples).metrics
            found.append(float((np.array(trainer.state().moments["exp_avg"], np.float64) ** 2).sum()))
            explained += [metrics["value_explained"]] if "value_explained" in metrics else []
    plain, valued = (float(np.mean(found[taught:])) for found in squares)
    return {"noise": valued / plain, "explained": float(np.mean(explained[taught:]))}


# ---------------------------------------------------------------- episodes


@dataclass(frozen=True)
class Bad:
    """Which turn is bad, the question of each turn, and its right action."""

    turns: int
    bad: int
    right_N: Ints
    questions_NQ: Ints

    @staticmethod
    def of(turns: int, seed: int) -> Bad:
        """Drawn."""
        rng = np.random.default_rng(seed)
        bad = int(rng.integers(turns // 4, 3 * turns // 4))
        return Bad(turns, bad, rng.integers(0, ACTIONS, turns), rng.integers(60, 250, (turns, 3)))

    def wanted(self) -> Floats:
        """The first policy's chances [N, A]."""
        found_NA = np.full((self.turns, ACTIONS), 0.1 / (ACTIONS - 1))
        found_NA[np.arange(self.turns), self.right_N] = 0.9
        found_NA[self.bad] = 0.1
        found_NA[self.bad, (self.right_N[self.bad] + 1) % ACTIONS] = 1 - 0.1 * (ACTIONS - 1)
        return found_NA

    def ids(self, actions_EN: Ints) -> Ints:
        """Whole episodes [E, 6N]: question, the end of the prompt, action, and whether it was right."""
        episodes = len(actions_EN)
        told = np.where(actions_EN == self.right_N, RIGHT, WRONG)
        asked = np.broadcast_to(self.questions_NQ, (episodes, *self.questions_NQ.shape))
        close = np.full((episodes, self.turns, 1), CLOSE)
        parts = [asked, close, FIRST_ACTION + actions_EN[..., None], told[..., None]]
        return np.concatenate(parts, axis=2).reshape(episodes, -1)

    def draw(self, rng: np.random.Generator) -> tuple[Ints, Ints, Floats]:
        """For `supervised`: whatever was done before, the same chances."""
        wanted_NA = self.wanted()
        actions_EN = (rng.random((16, self.turns, 1)) > wanted_NA.cumsum(1)[None, :, :-1]).sum(2)
        places = np.arange(self.turns) * 6 + 3
        return self.ids(actions_EN), places, np.broadcast_to(wanted_NA, (16, *wanted_NA.shape)).copy()


def sampled(model: LlamaForCausalLM, setting: Bad, rng: np.random.Generator) -> Ints:
    """Actions [E, N] of a policy that sees all before."""
    actions_EN, cache = np.zeros((EPISODES, setting.turns), np.int64), None
    ids_E6 = np.zeros((EPISODES, 0), np.int64)
    for n in range(setting.turns):
        asked = np.tile(np.append(setting.questions_NQ[n], CLOSE), (EPISODES, 1))
        with torch.no_grad():
            out = model(
                torch.from_numpy(np.concatenate([ids_E6, asked], axis=1)), past_key_values=cache, use_cache=True
            )
        cache = out.past_key_values
        odds_EA = out.logits[:, -1, FIRST_ACTION : FIRST_ACTION + ACTIONS].softmax(-1).double().numpy()
        actions_EN[:, n] = (rng.random((EPISODES, 1)) > odds_EA.cumsum(1)[:, :-1]).sum(1)
        told = np.where(actions_EN[:, n] == setting.right_N[n], RIGHT, WRONG)
        ids_E6 = np.stack([FIRST_ACTION + actions_EN[:, n], told], axis=1)
    return actions_EN


@dataclass
class Fixed:
    """Episodes until the bad turn was fixed, None if it was not; the others' drift and the bad turn's chance at the end."""

    episodes: int | None
    drift: float
    chance: float
    explained: float


def until_fixed(path: Path, setting: Bad, trace: float | None, rate: float, seed: int, most: int) -> Fixed:
    trainer, people, rng = a_trainer(path, trace, rate), People(), np.random.default_rng(seed + 1_000)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    done, explained = Fixed(None, 0.0, 0.0, 0.0), list[float]()
    for number in range(most // EPISODES):
        state = {
            name: torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(tuple(array.shape))
            for name, array in trainer.weights().items()
        }
        model.load_state_dict(state, strict=False)
        actions_EN = sampled(model, setting, rng)
        ids_ET = setting.ids(actions_EN)
        places = np.arange(setting.turns) * 6 + 3
        with torch.no_grad():
            heard = model(torch.from_numpy(ids_ET)).logits[:, torch.from_numpy(places)].double()
        now_ENA = heard[..., FIRST_ACTION : FIRST_ACTION + ACTIONS].log_softmax(-1).numpy()
        first_NA = np.log(setting.wanted())
        kl_N = (np.exp(first_NA) * (first_NA - now_ENA)).sum(-1).mean(0)
        done.drift = float(np.delete(kl_N, setting.bad).mean())
        done.chance = float(np.exp(now_ENA[:, setting.bad, setting.right_N[setting.bad]]).mean())
        if done.chance >= GOAL:
            done.episodes = number * EPISODES
            break
        right_EN = actions_EN == setting.right_N
        slips_E = setting.turns - 1 - (right_EN.sum(1) - right_EN[:, setting.bad])
        success_E = rng.random(EPISODES) < np.where(right_EN[:, setting.bad], 0.9, 0.3) - 0.005 * slips_E
        policy = PolicyVersion(number=trainer.step_count, hash="")
        turns = [
            replace(
                a_turn(
                    f"{number}-{e}-{n}:0",
                    user=f"u{e}",
                    prompt=ids_ET[e, : places[n] + 1].tolist(),
                    sampled=(int(ids_ET[e, places[n] + 1]),),
                ),
                episode=f"{number}-{e}",
                spans=(Span(policy=policy, tokens=1),),
            )
            for e in range(EPISODES)
            for n in range(setting.turns)
        ]
        scores = trainer.score(turns)
        turns = [replace(turn, logprobs=score) for turn, score in zip(turns, scores, strict=True)]
        ends = {f"{number}-{e}-{setting.turns - 1}:0": float(ok) for e, ok in enumerate(success_E)}
        try:
            learned = trainer.step(people.samples(turns, {turn.id: ends.get(turn.id, 0.0) for turn in turns}))
        except NoSignal:
            continue
        explained.append(learned.metrics.get("value_explained", 0.0))
    done.explained = float(np.mean(explained[len(explained) // 2 :])) if explained else 0.0
    return done


# ---------------------------------------------------------------- the command


def run_prompts(args: argparse.Namespace, place: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for seed in range(args.seeds):
        supervised(place / f"p{seed}", seed, 400, some_idea)
        noise = gradient_noise(place / f"p{seed}", seed, args.taught, args.batches)
        found[f"noise, seed {seed}"] = noise
        print(f"seed {seed}: gradient noise {noise}", flush=True)
    for rate in args.rates:
        for name, trace in (("as recorded", None), ("value", 1.0)):
            steps = [steps_to_bar(place / f"p{seed}", trace, rate, seed, args.most_steps) for seed in range(args.seeds)]
            found[f"steps, {name}, rate {rate:g}"] = steps
            print(f"{name}, rate {rate:g}: steps {steps}", flush=True)
    return found


def run_episodes(args: argparse.Namespace, place: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    settings = [Bad.of(args.turns, seed) for seed in range(args.seeds)]
    for seed, setting in enumerate(settings):
        supervised(place / f"e{seed}", seed, 150, setting.draw)
    for trace in args.traces:
        for rate in args.episode_rates:
            runs = [
                until_fixed(place / f"e{seed}", setting, None if trace < 0 else trace, rate, seed, args.most)
                for seed, setting in enumerate(settings)
            ]
            name = f"{'as recorded' if trace < 0 else f'lambda {trace:g}'}, rate {rate:g}"
            found[name] = [vars(run) for run in runs]
            told = [(run.episodes, round(run.drift, 4), round(run.chance, 2), round(run.explained, 2)) for run in runs]
            print(f"{name}: episodes, drift, chance, explained: {told}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("prompts", "episodes"), default=None)
    parser.add_argument("--taught", type=int, default=20, help="batches before the gradient's noise is measured")
    parser.add_argument("--batches", type=int, default=60, help="over which it is")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-4], help="learning rates")
    parser.add_argument("--most-steps", type=int, default=150)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--most", type=int, default=640, help="episodes")
    parser.add_argument("--traces", type=float, nargs="+", default=[-1, 1.0, 0.95, 0.5], help="lambda; -1: no values")
    parser.add_argument("--episode-rates", type=float, nargs="+", default=[2e-4], help="learning rates")
    parser.add_argument("--out", type=Path, default=RESULTS / "turn_values.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.process_time(), dict[str, object]()
    with tempfile.TemporaryDirectory() as place:
        if args.only != "episodes":
            rows["prompts"] = run_prompts(args, Path(place))
        if args.only != "prompts":
            rows["episodes"] = run_episodes(args, Path(place))
    print(f"{time.process_time() - started:.0f} CPU-seconds")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps(settings | rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
