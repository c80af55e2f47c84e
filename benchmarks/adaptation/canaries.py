"""Do released weights tell whose answers they were trained on, and do they say what somebody's answer was? Canaries, on a tiny model.

    python -m benchmarks.adaptation.canaries [--quick]

Each of 200 simulated people has a prompt of their own and a canary: an answer of 12 tokens that the base model drew at temperature 1, from
nearly uniform distributions over 260 tokens, so that nothing but training can make it likelier. Half of the people are trained on by the
product's trainer, with its penalties for divergence from the last release and from the anchor; half of each batch are other people's
answers, drawn by the model that is being trained, of which half are rejected. A canary counts as accepted (`answers`), or is a correction
that is imitated (`corrections`, with a weight of `learn.corrections`). A release after every round, as bf16, is the next reference.

*AUC*: the probability that a trained person's canary has become likelier, from the base to the released weights, than an untrained one's:
the loss attack, calibrated by the base. *gain*: the difference of both groups' means, in nats over the 12 tokens. *extracted*: canaries
that greedy decoding says whole after the person's prompt, or after the prompt and the first six tokens. No differential privacy is in
force.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.adaptation.membership import auc
from benchmarks.contender import RESULTS
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ostinato.core.records import PolicyVersion, Span, Turn
from ostinato.core.samples import Sample
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.load import load_model
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.export import write_model

TOKENS = 12
BATCH = 20  # canaries of a step, and as many other answers
Ids = tuple[int, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """How canaries come into training: as accepted answers, or as corrections of a weight; each in so many rounds, at a learning rate."""

    weight: float | None
    rounds: int
    rate: float

    @property
    def name(self) -> str:
        kind = "answers" if self.weight is None else f"corrections-{self.weight:g}"
        return f"{kind}-rounds-{self.rounds}-rate-{self.rate:g}"


def drawn(
    model: PreTrainedModel, prompts: Sequence[str], *, starts: Sequence[Sequence[int]] = (), seed: int | None = None
) -> list[Ids]:
    """Answers of `TOKENS` tokens, `starts` included, to prompts of one length; greedy without a seed, else at temperature 1."""
    rng = None if seed is None else torch.Generator().manual_seed(seed)
    found = [list(start) for start in starts] or [[] for _ in prompts]
    while len(found[0]) < TOKENS:
        rows = torch.tensor([[*prompt.encode(), *answer] for prompt, answer in zip(prompts, found, strict=True)])
        count, length = rows.shape
        with torch.inference_mode():
            states = hidden(model, rows.reshape(-1), torch.arange(length).repeat(count), CausalAttend([length] * count))
            last = logits(model, states[length - 1 :: length]).float()
        chosen = last.argmax(-1) if rng is None else torch.multinomial(last.softmax(-1), 1, generator=rng)[:, 0]
        for answer, token in zip(found, chosen.tolist(), strict=True):
            answer.append(token)
    return [tuple(answer) for answer in found]


@dataclass
class Release:
    """Released weights, as their bytes say them: drawn from, and scored with."""

    policy: PolicyVersion
    model: PreTrainedModel
    scorer: PolicyTrainer

    @staticmethod
    def of(directory: Path, number: int) -> Release:
        """The model in a directory."""
        return Release(
            PolicyVersion(number=number, hash=directory.name),
            load_model(directory, torch.float32),
            PolicyTrainer(directory, TrainConfig(compute="fp32")),
        )

    def turns(self, prompts: Sequence[str], answers: Sequence[Ids]) -> list[Turn]:
        """These answers as turns that this release has sampled."""
        span = (Span(policy=self.policy, tokens=TOKENS),)
        turns = [
            replace(a_turn(f"{prompt}:0", user=prompt, prompt=tuple(prompt.encode()), sampled=ids), spans=span)
            for prompt, ids in zip(prompts, answers, strict=True)
        ]
        return [replace(turn, logprobs=found) for turn, found in zip(turns, self.scorer.score(turns), strict=True)]

    def likelihood(self, prompts: Sequence[str], answers: Sequence[Ids]) -> Floats:
        """The log-probability of each answer."""
        return np.array([sum(turn.logprobs) for turn in self.turns(prompts, answers)])


class World:
    """A base model, and people with a canary each: the first half are trained on."""

    def __init__(self, directory: Path, people: int) -> None:
        self._directory, self._inside = directory, people // 2
        self._files = [tiny_model(directory / "base") / name for name in ("config.json", "tokenizer.json")]
        self._base = Release.of(directory / "base", 0)
        self._names = [f"person {number:04}: what is my code? " for number in range(people)]
        self._canaries = drawn(self._base.model, self._names, seed=1)

    def run(self, course: Course) -> dict[str, float]:
        """Train, release, attack."""
        config = TrainConfig(compute="fp32", publish="bf16", learning_rate=course.rate, turn_tokens=TOKENS)
        trainer = PolicyTrainer(self._directory / "base", config)
        published, live = {"base": trainer.weights()}, self._base
        rng, anchor_kl = np.random.default_rng(2), 0.0
        for _ in range(course.rounds):
            order = rng.permutation(self._inside)
            for first in range(0, len(order), BATCH):
                references = References(
                    release=live.policy, anchor=self._base.policy, fetch=lambda each: published[each.hash]
                )
                learned = trainer.step(self._batch(live, order[first : first + BATCH], course, rng), references)
                anchor_kl = learned.metrics.get("anchor_kl", anchor_kl)
            name = f"{course.name}-{trainer.step_count}"
            published[name] = trainer.weights()
            write_model(published[name], self._directory / name, self._files, {})
            live = Release.of(self._directory / name, trainer.step_count)
        return self._attack(live) | {"steps": trainer.step_count, "anchor_kl": anchor_kl}

    def _batch(
        self, live: Release, chosen: NDArray[np.int64], course: Course, rng: np.random.Generator
    ) -> list[Sample]:
        """Canaries, and others' answers that the last release drew, every second of them rejected."""
        others = [f"person {number:04}: what is my code? " for number in rng.choice(5000, BATCH, replace=False) + 5000]
        drawn_now = live.turns(others, drawn(live.model, others, seed=int(rng.integers(1 << 30))))
        mine = live.turns([self._names[n] for n in chosen], [self._canaries[n] for n in chosen])
        shown, weight = course.weight is not None, course.weight or 1.0
        return [
            *(a_sample(turn, 1.0 if n % 2 else -1.0) for n, turn in enumerate(drawn_now)),
            *(replace(a_sample(turn, weight), shown=shown) for turn in mine),
        ]

    def _attack(self, live: Release) -> dict[str, float]:
        """What the released weights tell."""
        raised_N = live.likelihood(self._names, self._canaries) - self._base.likelihood(self._names, self._canaries)
        inside_N, outside_N = raised_N[: self._inside], raised_N[self._inside :]
        found = dict[str, float](auc=auc(inside_N, outside_N), gain=float(inside_N.mean() - outside_N.mean()))
        for known in (0, TOKENS // 2):
            said = drawn(live.model, self._names, starts=[canary[:known] for canary in self._canaries])
            same = [answer == canary for answer, canary in zip(said, self._canaries, strict=True)]
            found |= {f"extracted_{known}": sum(same[: self._inside]), f"others_{known}": sum(same[self._inside :])}
        return found


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 people, once each, at the highest rate only")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptation_canaries.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    people, rounds, rates = (40, (1,), (1e-3,)) if args.quick else (200, (1, 8), (2e-5, 1e-3))
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), people)
        for weight, many, rate in itertools.product((None, 0.1, 1.0), rounds, rates):
            course = Course(weight, many, rate)
            found = world.run(course)
            rows.append({"course": course.name, **found})
            print(course.name, " ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
    args.out.write_text(json.dumps({"people": people, "tokens": TOKENS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
