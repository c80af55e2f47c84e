"""Kinds of credit in the trainer: how many episodes it takes to fix one bad turn among many, beside the outcome alone.

The setting of `bad_turn`, with a small transformer for the policy: the product's credit, hints (`HintSource`) and trainer
(`PolicyTrainer`, all weights). `--credit single` is people's, with hints of `--weights`; `group` that of a world; `belief` divides it by
the change of a simulated belief (asked now, sd 0.1); `suspects` samples each failure anew eight times from its largest fall.

At each of N turns one of four actions is right, which one depends on the turn; the policy is right with 0.9, at one turn that nobody
knows with 0.1. An episode succeeds with 0.9 if that turn was right, else with 0.3, less half a point for each slip elsewhere. Of the
failures, `--share` get a comment that names a turn, the bad one with the chance `--right` and else any, and an action: the right one at
the bad turn, else any. The first weights obey such a comment in the prompt with 0.8, be it right or wrong.

The bad turn is fixed at a chance of 0.75. A run has failed if the mean KL of the others exceeds `--drift` nats before that, or after
`--most` episodes. `compute`: tokens sampled or read forward, plus twice those read backward, in whole turns, of the prompts' own length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.contender import RESULTS
from benchmarks.reward.bad_turn import (
    ACTIONS,
    ASKED_NOW,
    EPISODES,
    FIRST_ACTION,
    GOAL,
    OBEYED,
    RIGHT,
    SHARE,
    Belief,
    Credits,
    Floats,
    Ints,
    comments_on,
    continued,
    credits_of_continued,
    drawn,
    group,
    hints_of,
    in_group,
    single,
    succeeded,
)
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ostinato.core.errors import NoSignal
from ostinato.core.records import PolicyVersion, Span, Turn
from ostinato.core.samples import Sample
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

OPEN, CLOSE = 257, 258
SEEN = Belief(ASKED_NOW, 0.1)


def prompt_of(turn: int) -> tuple[int, ...]:
    """The prompt of a turn, in every episode: eight tokens that have little in common with those of other turns."""
    return OPEN, *np.random.default_rng(turn).integers(60, 250, 8).tolist(), CLOSE


def hinted(prompt: Sequence[int], action: int) -> tuple[int, ...]:
    """The prompt with a comment that names an action."""
    return *prompt[:-1], FIRST_ACTION + action, CLOSE


@dataclass(frozen=True)
class Setting:
    """What is to be learned: the bad turn, and the right action of each turn."""

    turns: int
    bad: int
    right_N: Ints

    @staticmethod
    def of(turns: int, seed: int) -> Setting:
        """Drawn."""
        rng = np.random.default_rng(seed)
        return Setting(turns, int(rng.integers(turns)), rng.integers(0, ACTIONS, turns))

    def wanted(self) -> tuple[Floats, Floats]:
        """The first policy's chances of each action: at each turn [N, A], and behind a comment that names an action [N, A, A]."""
        plain_NA = np.full((self.turns, ACTIONS), 0.1 / (ACTIONS - 1))
        plain_NA[np.arange(self.turns), self.right_N] = 0.9
        plain_NA[self.bad] = 0.1
        plain_NA[self.bad, (self.right_N[self.bad] + 1) % ACTIONS] = 1 - 0.1 * (ACTIONS - 1)
        obeyed_AA = np.full((ACTIONS, ACTIONS), (1 - OBEYED) / (ACTIONS - 1))
        np.fill_diagonal(obeyed_AA, OBEYED)
        return plain_NA, np.broadcast_to(obeyed_AA, (self.turns, ACTIONS, ACTIONS))

    def write(self, path: Path, seed: int, steps: int) -> None:
        """A model directory with these chances, by supervised learning."""
        tiny_model(path, seed=seed, hidden=64, layers=2)
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        plain_NA, behind_NAA = (torch.tensor(np.array(x), dtype=torch.float32) for x in self.wanted())
        asked = torch.tensor([prompt_of(n) for n in range(self.turns)])
        told = torch.tensor([hinted(prompt_of(n), a) for n in range(self.turns) for a in range(ACTIONS)])
        chances = behind_NAA.reshape(-1, ACTIONS)
        draw = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            some = torch.randperm(len(told), generator=draw)[:128]
            loss = torch.stack(
                [
                    -(wanted * _of_actions(model, prompts)).sum(-1).mean()
                    for prompts, wanted in ((asked, plain_NA), (told[some], chances[some]))
                ]
            ).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.save_pretrained(path)


def _of_actions(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the actions behind each prompt, of all tokens."""
    return model(prompts).logits[:, -1].log_softmax(-1)[:, FIRST_ACTION : FIRST_ACTION + ACTIONS]


def logprobs(trainer: PolicyTrainer, prompts: Sequence[tuple[int, ...]]) -> Floats:
    """[P, A]: of each action behind each prompt."""
    asked = [a_turn("q", prompt=p, sampled=(FIRST_ACTION + a,)) for p in prompts for a in range(ACTIONS)]
    return np.array([score[0] for score in trainer.score(asked)]).reshape(len(prompts), ACTIONS)


@dataclass
class Run:
    """What it took. `episodes` is None if the bad turn was not fixed; `generated` counts those sampled anew as well, in parts."""

    episodes: int | None
    drift: float
    hints: int
    compute: int
    generated: float = 0.0
    right: float = 0.0  # the bad turn's chance of being right at the end


class Traffic:
    """Draws episodes and outcomes."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting = setting
        self.rng = np.random.default_rng(seed + 1000)

    def episodes(self, odds_NA: Floats) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Actions [E, N], whether each was right, and which episodes succeeded."""
        actions_EN = drawn(odds_NA, EPISODES, self.rng)
        right_EN = (actions_EN == self._setting.right_N).astype(np.int64)
        return actions_EN, right_EN, self.outcomes(actions_EN)

    def outcomes(self, actions_EN: Ints) -> NDArray[np.bool_]:
        """Which episodes succeeded."""
        right_EN = (actions_EN == self._setting.right_N).astype(np.int64)
        return succeeded(right_EN, self._setting.bad, self.rng)


def credits_by(kind: str, setting: Setting) -> Credits:
    """The advantages of a batch's turns."""
    if kind == "single":
        return single(setting.turns, discount=0.9, outcome=True, repeat=False)
    return group(setting.turns, bad=setting.bad, belief=SEEN if kind == "belief" else None)


def until_fixed(path: Path, setting: Setting, args: argparse.Namespace, rate: float, weight: float, seed: int) -> Run:
    """One run. `weight`: of hints; 0: the outcome alone."""
    config = TrainConfig(
        compute="fp32", publish="fp32", learning_rate=rate, warmup_steps=0, turn_tokens=1, signal_share=None
    )
    trainer, traffic = PolicyTrainer(path, config), Traffic(setting, seed)
    prompts = [prompt_of(n) for n in range(setting.turns)]
    credits, whole = credits_by(args.credit, setting), in_group(setting.turns)
    first_NA, done = logprobs(trainer, prompts), Run(None, 0.0, 0, 0)
    for number in range(args.most // EPISODES):
        now_NA = logprobs(trainer, prompts)
        kl_N = (np.exp(first_NA) * (first_NA - now_NA)).sum(1)
        done.drift = float(np.delete(kl_N, setting.bad).mean())
        done.right = float(np.exp(now_NA[setting.bad, setting.right_N[setting.bad]]))
        if done.drift > args.drift:
            return done
        if done.right >= GOAL:
            done.episodes = number * EPISODES
            return done
        odds_NA = np.exp(now_NA) / np.exp(now_NA).sum(1, keepdims=True)
        actions_EN, right_EN, done_E = traffic.episodes(odds_NA)
        drawn = done_E, setting.bad, setting.right_N, args.share, args.right, traffic.rng
        comments = comments_on(*drawn) if weight else {}
        more = []
        if args.credit == "suspects":
            changes_EN = SEEN.changes(right_EN, setting.bad, traffic.rng)
            more = continued(odds_NA, actions_EN, done_E, changes_EN, EPISODES, traffic.outcomes, traffic.rng)
        done.generated += EPISODES + sum(setting.turns - each.at for each in more) / setting.turns
        try:
            advantages_EN = credits(number, right_EN, done_E)
            again = credits_of_continued(whole, done_E, more)[EPISODES:] if more else []
        except NoSignal:
            continue
        policy = PolicyVersion(number=trainer.step_count, hash="")

        def turn_of(e: int, n: int, action: int, policy: PolicyVersion = policy, now_NA: Floats = now_NA) -> Turn:
            made = a_turn(f"{e}-{n}:0", user=f"u{e}", prompt=prompts[n], sampled=(FIRST_ACTION + action,))
            return replace(made, logprobs=(float(now_NA[n, action]),), spans=(Span(policy=policy, tokens=1),))

        turns = [turn_of(e, n, int(actions_EN[e, n])) for e in range(EPISODES) for n in range(setting.turns)]
        samples = [
            Sample(turn=turn, reward=0.0, advantages=(float(value),))
            for turn, value in zip(turns, advantages_EN.ravel(), strict=True)
        ]
        by_place = dict(zip(np.ndindex(EPISODES, setting.turns), turns, strict=True))
        samples += [
            Sample(
                turn=turn_of(EPISODES + i, each.at, int(each.actions_N[each.at])),
                reward=0.0,
                advantages=(float(own[0]),),
            )
            for i, (each, own) in enumerate(zip(more, again, strict=True))
        ]
        hints = asyncio.run(hints_of(by_place, advantages_EN, comments, weight)) if comments else []
        trainer.step([*samples, *hints])
        own = sum(len(turn.prompt_ids) for turn in turns) + sum(len(prompts[0]) * (setting.turns - m.at) for m in more)
        done.hints += len(hints)
        done.compute += 4 * own + sum(len(each.hinted) + 3 * len(each.turn.prompt_ids) for each in hints)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--credit", choices=["single", "group", "belief", "suspects"], default="single")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--drift", type=float, default=0.005, help="nats")
    parser.add_argument("--most", type=int, default=2048, help="episodes")
    parser.add_argument("--share", type=float, default=SHARE, help="of the failures that get a comment")
    parser.add_argument("--right", type=float, default=RIGHT, help="chance that a comment names the bad turn")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-4, 3e-5], help="learning rates")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 30.0], help="of hints; 0: the outcome alone")
    parser.add_argument("--base-steps", type=int, default=400, help="of supervised learning for the first weights")
    parser.add_argument("--out", type=Path, default=RESULTS / "hints.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        settings = [Setting.of(args.turns, seed) for seed in range(args.seeds)]
        for seed, setting in enumerate(settings):
            setting.write(Path(place) / str(seed), seed, args.base_steps)
        for weight in args.weights:
            for rate in args.rates:
                runs = [
                    until_fixed(Path(place) / str(seed), setting, args, rate, weight, seed)
                    for seed, setting in enumerate(settings)
                ]
                rows.append({"weight": weight, "rate": rate, "runs": [vars(run) for run in runs]})
                told = [
                    (r.episodes, round(r.generated), round(r.right, 2), round(r.drift, 4), r.hints, f"{r.compute:.3g}")
                    for r in runs
                ]
                what = f"{args.credit}, weight {weight:g}, rate {rate:g}"
                print(f"{what}: episodes, generated, right, drift, hints, compute: {told}", flush=True)
    settings_of = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps(settings_of | {"arms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
