"""One model computed in every way that the platform has, and the count of logprobs whose bits differ.

An engine under `traffic` samples; `PolicyTrainer.score`, training steps (plain, micro-batched, with recomputed activations) and `rescore`
(a plain pass over each turn alone or right-padded) compute the same logprobs again. The same is done after an optimizer step, after a
publication through a weight store, and across hot swaps in mid-stream.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.examinations.exactness.traffic import LARGE, MIDDLE, SMALL, Harvest, Traffic, drive, running
from transformers import PreTrainedModel

from ostinato.core import routes as codec
from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Snapshot, Weights
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model import routing
from ostinato.model.attention import Attend, hidden, logits
from ostinato.model.load import build, load_model, weights_of
from ostinato.model.logit_edits import edit_logits
from ostinato.model.logprobs import RowSoftmax
from ostinato.model.numerics import contract
from ostinato.model.paged import WholeAttend
from ostinato.testing.records import a_sample
from ostinato.train.config import TrainConfig
from ostinato.train.replay import AnswerEdits
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore


def with_credit(turns: Sequence[Turn], seed: int = 0) -> list[Sample]:
    """The turns as samples, each with an advantage of 1 or -1."""
    rng = random.Random(seed)
    return [a_sample(turn, rng.choice([-1.0, 1.0])) for turn in turns]


@dataclass(frozen=True, slots=True)
class Gap:
    """Two computations of the same logprobs: tokens compared, tokens whose bits differ, k3 and the largest |d| in nats."""

    tokens: int
    differing: int
    k3: float
    largest: float


def gap(
    turns: Sequence[Turn],
    scores: Sequence[Sequence[float]],
    mask: Callable[[Turn], Sequence[bool]] | None = None,
) -> Gap:
    """Compare `scores` with the engine's logprobs, on the tokens of `mask` (None: all)."""
    keep = np.array([own for turn in turns for own in (mask(turn) if mask else [True] * len(turn.sampled_ids))], bool)
    ours = np.array([value for own in scores for value in own], np.float32)[keep]
    theirs = np.array([value for turn in turns for value in turn.logprobs], np.float32)[keep]
    if not len(ours):
        return Gap(0, 0, 0.0, 0.0)
    d = ours.astype(np.float64) - theirs
    differing = int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    return Gap(len(d), differing, float((np.exp(d) - 1 - d).mean()), float(np.abs(d).max()))


@dataclass(frozen=True, slots=True)
class Rescored:
    """Logprobs per turn; `routed` counts pairs of a token and a layer with a router, `flips` those where another set was chosen."""

    scores: list[list[float]]
    routed: int
    flips: int


@torch.inference_mode()
def rescore(
    model: PreTrainedModel,
    turns: Sequence[Turn],
    *,
    width: int = 1,
    attend: Callable[[Sequence[int]], Attend] = WholeAttend,
) -> Rescored:
    """Plain passes over `width` turns at once, padded on the right to the longest of them, with live routing."""
    found = routing.of(model)
    scores: list[list[float]] = []
    routed = flips = 0
    for at in range(0, len(turns), width):
        group = turns[at : at + width]
        length = max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in group) - 1
        ids = [[*turn.prompt_ids, *turn.sampled_ids[:-1]] for turn in group]
        ids_N = torch.tensor([token for own in ids for token in own + [0] * (length - len(own))])
        positions_N = torch.arange(length).repeat(len(group))
        with nullcontext() if found is None else found.record() as seen:
            states_ND = hidden(model, ids_N, positions_N, attend([length] * len(group)))
        chosen_NLk = None if seen is None else seen.ids_NLk().numpy()
        for place, turn in enumerate(group):
            first = place * length + len(turn.prompt_ids) - 1
            scores.append(_score(model, states_ND[first : first + len(turn.sampled_ids)], turn))
            if chosen_NLk is not None:
                known = codec.decode(turn.routes)
                live = chosen_NLk[place * length : place * length + len(known)]
                routed += known.shape[0] * known.shape[1]
                flips += int((known != live).any(-1).sum())
    return Rescored(scores, routed, flips)


def _no_grammars() -> Any:
    raise AssertionError("no turn has a grammar")


def _score(model: PreTrainedModel, states_MD: torch.Tensor, turn: Turn) -> list[float]:
    temperature = turn.sampling.temperature or 1.0
    temperatures_M = torch.full((len(states_MD),), temperature, dtype=torch.float32)
    logits_MV = logits(model, states_MD)
    edit_logits(logits_MV, AnswerEdits(_no_grammars).replay([turn], 0, len(logits_MV)))
    normal = RowSoftmax.of(logits_MV, temperatures_M)
    return normal.logprobs(np.array(turn.sampled_ids)).tolist()


# ---------------------------------------------------------------- the whole examination


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of an examination. `tokens` tokens are sampled in the first stage and half as many in each later one.

    Example: ``Subject(path=directory, dtype=torch.bfloat16, tokens=10_000, work=scratch)``
    """

    path: Path
    dtype: torch.dtype
    tokens: int
    work: Path
    threads: int = 1
    clients: int = 12
    answer: int = 50
    lowest: int = 0
    highest: int = 256
    learning_rate: float = 1e-4

    @property
    def contract(self) -> Contract:
        """The contract of all engines, since the block size does not affect the arithmetic."""
        return contract(self.dtype, "exact", self.threads, block=32)

    def train(self, **changes: Any) -> TrainConfig:
        """The trainer's settings."""
        name = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        settings = {"compute": name, "publish": name, "learning_rate": self.learning_rate, "warmup_steps": 0}
        return TrainConfig.model_validate({"threads": self.threads, "clip": 1e6} | settings | changes)


@dataclass(slots=True)
class Findings:
    """The findings. `stages`: name -> counts; `differing` and `flips` must be 0 in all stages but the controls."""

    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    sampled: int = 0
    cancelled: int = 0
    prefix_hits: int = 0
    preemptions: int = 0

    def add(self, harvest: Harvest) -> list[Turn]:
        """Add up the traffic of a stage. Returns its turns."""
        self.sampled += harvest.tokens
        self.cancelled += harvest.cancelled
        self.prefix_hits += harvest.stats["prefix_hit_tokens"]
        self.preemptions += harvest.stats["preemptions"]
        return harvest.turns

    def total(self, name: str) -> int:
        """Sum of `differing` or `flips` over the stages that promise 0."""
        return int(sum(found.get(name, 0) for stage, found in self.stages.items() if "control" not in stage))


class Examination:
    """Runs the stages one after another; `say(name)` is called before each.

    Example: ``findings = await Examination(subject).run(); findings.total("differing")``
    """

    def __init__(self, subject: Subject, say: Callable[[str], object] = lambda _: None) -> None:
        self._subject, self._say = subject, say
        self._seed = 0
        self.findings = Findings()

    async def run(self) -> Findings:
        """Run all stages."""
        torch.set_num_threads(self._subject.threads)
        first = Snapshot(
            policy=PolicyVersion(number=0, hash="0" * 64),
            weights=weights_of(load_model(self._subject.path, self._subject.dtype)),
        )
        turns = await self._sampled("sampling", first, (SMALL, MIDDLE, LARGE), self._subject.tokens)
        trainer = self._trainer()
        self._scored("packed", trainer, turns)
        self._padded(first, turns)
        again = self._stepped("recompute", self._trainer(recompute_tokens=0), turns)
        self._stepped("micro", self._trainer(microbatch_tokens=200), turns)
        second = Snapshot(policy=PolicyVersion(number=1, hash="1" * 64), weights=self._stepped("step", trainer, turns))
        self.findings.stages["recompute"]["weights_differing"] = _differing_bytes(again, second.weights)
        self.findings.stages["moved (control)"] = asdict(gap(turns, trainer.score(turns)))
        turns = await self._sampled("after step", second, (MIDDLE,))
        self._scored("after step", trainer, turns)
        self._say("publish")
        third = await self._published(first.weights, second.weights, self._stepped("second step", trainer, turns))
        turns = await self._sampled("after publish", third, (SMALL,))
        self._scored("after publish", trainer, turns)
        self._rescored("after publish, padded", third, turns, 4)
        await self._swapped(trainer, second, third)
        return self.findings

    def _trainer(self, **changes: Any) -> PolicyTrainer:
        return PolicyTrainer(self._subject.path, self._subject.train(**changes), self._subject.contract)

    async def _sampled(
        self,
        stage: str,
        snapshot: Snapshot,
        configs: Sequence[EngineConfig],
        tokens: int | None = None,
        other: Snapshot | None = None,
    ) -> list[Turn]:
        """Turns from an engine of each configuration. With `other` the weights change back and forth under the streams."""
        self._say(stage)
        subject, turns = self._subject, []
        for config in configs:
            self._seed += 1
            traffic = Traffic(
                tokens=(tokens or subject.tokens // 2) // len(configs),
                seed=self._seed,
                clients=subject.clients,
                answer=subject.answer,
                lowest=subject.lowest,
                highest=subject.highest,
                preempted=config is SMALL,
            )
            sized = config.model_copy(update={"threads": subject.threads})
            async with running(subject.path, sized, snapshot, subject.contract) as engine:
                swaps = None if other is None else _Swaps(engine, (other, snapshot), max(40, traffic.tokens // 6))
                turns += self.findings.add(await drive(engine, traffic, meanwhile=swaps))
        return turns

    def _scored(self, stage: str, trainer: PolicyTrainer, turns: Sequence[Turn]) -> None:
        self._say(stage)
        self.findings.stages[stage] = asdict(gap(turns, trainer.score(turns)))

    def _padded(self, snapshot: Snapshot, turns: Sequence[Turn]) -> None:
        self._rescored("alone", snapshot, turns[::2], 1)
        self._rescored("padded", snapshot, turns, 5)

    def _rescored(self, stage: str, snapshot: Snapshot, turns: Sequence[Turn], width: int) -> None:
        self._say(stage)
        found = rescore(self._model(snapshot), turns, width=width)
        self.findings.stages[stage] = asdict(gap(turns, found.scores)) | {"routed": found.routed, "flips": found.flips}

    def _model(self, snapshot: Snapshot) -> PreTrainedModel:
        return build(self._subject.path)(snapshot.weights)

    def _stepped(self, stage: str, trainer: PolicyTrainer, turns: Sequence[Turn]) -> Weights:
        """Take one optimizer step, and record the differences that its forward pass under autograd found."""
        self._say(stage)
        learned = trainer.step(with_credit(turns))
        names = {"tokens": "mismatch_tokens", "differing": "mismatch_differing", "largest": "mismatch_max_abs"}
        names |= {"k3": "mismatch_k3", "routed": "router_routed", "flips": "router_flips"}
        found = {name: learned.metrics.get(metric, 0.0) for name, metric in names.items()}
        wanted = sum(len(turn.sampled_ids) for turn in turns)
        if found["tokens"] != wanted:
            raise RuntimeError(f"the step compared {found['tokens']} tokens of {wanted}: versions or contracts differ")
        self.findings.stages[stage] = found
        return learned.weights

    async def _published(self, *versions: Weights) -> Snapshot:
        """Publish the versions one after another, as deltas after the first. Returns the last as a follower reads it."""
        store = DirectoryStore(self._subject.work / "store")
        publisher, base = VersionPublisher(store, PublisherConfig(anchor_share=100)), None
        for number, weights in enumerate(versions):
            published = await publisher.publish(number, weights, run="exactness", base=base, ref="candidate")
            if base is not None and published.kind != "delta":
                raise RuntimeError(f"version {number} was published whole: {published.reason}")
            base = published.policy
        follower = Follower(store)
        policy = await follower.resolve("candidate")
        if policy is None:
            raise RuntimeError("the publisher moved no ref")
        return Snapshot(policy=policy, weights=await follower.fetch(policy))

    async def _swapped(self, trainer: PolicyTrainer, one: Snapshot, other: Snapshot) -> None:
        """Examine swaps: with recomputed pasts each token under its own version, with kept pasts the tokens before the first swap."""
        again = LARGE.model_copy(update={"recompute_on_swap": True, "max_batch": 16, "prefill_chunk": 16})
        turns = await self._sampled("swap", one, (again,), other=other)
        kept = await self._sampled(
            "swap, kept", one, (again.model_copy(update={"recompute_on_swap": False}),), other=other
        )
        for name, chosen, first in (
            ("swap", turns, False),
            ("swap, kept", kept, True),
            ("kept (control)", kept, False),
        ):
            found = Counter[str]({"spans": sum(len(turn.spans) for turn in chosen)})
            for snapshot in (one, other):
                trainer.go_back(snapshot.weights, snapshot.policy.number)
                mine = [turn for turn in chosen if snapshot.policy in turn.versions_T()]
                found.update(asdict(gap(mine, trainer.score(mine), _made_by(snapshot.policy, first_only=first))))
                if name == "swap":  # the past was computed again under the last version, and so were its routes
                    last = [turn for turn in mine if turn.spans[-1].policy == snapshot.policy]
                    found["flips"] += rescore(self._model(snapshot), last).flips
            self.findings.stages[name] = dict(found) | {"turns": len(chosen)}


class _Swaps:
    """Loads the snapshots alternately, one after every `every` tokens seen."""

    def __init__(self, engine: TorchEngine, snapshots: Sequence[Snapshot], every: int) -> None:
        self._engine, self._snapshots, self._every = engine, snapshots, every

    async def __call__(self, harvest: Harvest) -> None:
        count = 0
        while True:
            await asyncio.sleep(0.002)
            if harvest.seen >= (count + 1) * self._every:
                await self._engine.load("live", self._snapshots[count % len(self._snapshots)])
                count += 1


def _made_by(policy: PolicyVersion, *, first_only: bool) -> Callable[[Turn], list[bool]]:
    def mask(turn: Turn) -> list[bool]:
        before = turn.spans[0].tokens if first_only else len(turn.sampled_ids)
        return [version == policy and at < before for at, version in enumerate(turn.versions_T())]

    return mask


def _differing_bytes(one: Weights, other: Weights) -> int:
    return sum(int((array.data != other[name].data).sum()) for name, array in one.items())
