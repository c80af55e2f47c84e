"""SmolLM2-135M in a world longer than its window: notes on a generated repository of over 40,000 tokens, prompted and demonstrated.

    python -m benchmarks.worlds.repository measure --long --count 1           # answers, facts in notes, what the prefix cache saves
    python -m benchmarks.worlds.repository tools                              # the same questions with tools: does it call any?
    python -m benchmarks.worlds.repository teach --out DIR                    # a short supervised start, from demonstrations
    python -m benchmarks.worlds.repository measure --base DIR --bits          # short repositories; does the trainer see the same bits?

The world and its harness are `repository_world.py`'s. Gateway, engine, log, memory, imitation and trainer are the product's, in one
process, as in `summaries.py`. Intervals are Wilson's over tasks; tasks share repositories, so that they are too narrow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.worlds.repository_world import Chain, Repository, RepositoryReader, tasks_of
from benchmarks.worlds.summaries import EXACT, NearGateway, served

from ostinato.core.records import Arm, PolicyVersion, Purpose, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.evaluate.statistics import wilson
from ostinato.model.load import load_model, resolve
from ostinato.model.renderer import HFRenderer
from ostinato.model.tensors import weights_of
from ostinato.serve.calls.capture import cache_salt
from ostinato.testing.log import MemoryLog
from ostinato.train.config import TrainConfig
from ostinato.train.imitation import imitate, shown_turns
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.export import write_model
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.harnesses import ToolLoop, ToolLoopConfig
from ostinato.worlds.harness.memory import MemoryConfig
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.task import Task

LONG, WINDOW = 128_000, 20_000  # characters of a repository of over 40,000 tokens, and of the files in a window of 8k
SHORT = (600, 1800), 3  # least and most characters of the files in a window, and windows that a short repository fills
TAUGHT_ON = (300, 1200), 2  # the same in the supervised start
LINKS = (1, 1, 2, 2, 2, 3)
TAUGHT = TrainConfig(
    compute="fp32",
    publish="fp32",
    learning_rate=1e-4,
    turn_tokens=16,
    microbatch_tokens=2048,
    kl_beta=0.0,
    anchor_kl=None,
)


Sizes = tuple[tuple[int, int], int]


def short(seed: int, sizes: Sizes, links: Sequence[int] = LINKS) -> Iterator[tuple[Repository, RepositoryReader]]:
    """Repositories that fill a few windows, each with the reader of windows of its own size."""
    dice, ((least, most), parts) = random.Random(seed), sizes
    while True:
        characters = dice.randint(least, most)
        repository = Repository.drawn(dice.getrandbits(32), characters=parts * characters, links=links)
        yield repository, RepositoryReader(characters)


def teach(
    base: Path,
    out: Path,
    *,
    steps: int,
    minutes: float,
    seed: int,
    training: TrainConfig = TAUGHT,
    sizes: Sizes = TAUGHT_ON,
    links: Sequence[int] = LINKS,
) -> None:
    """A supervised start: each step imitates the notes of all chains of one repository. It ends after so many minutes at the latest, and
    after a kill goes on behind the last step, whose checkpoint is beside `out` until the model is written.
    """
    renderer, trainer, began = HFRenderer(base), PolicyTrainer(base, training, EXACT), time.time()
    kept = out.with_name(f"{out.name}-checkpoints")
    trainer.resume(kept)
    for repository, reader in islice(short(seed, sizes, links), trainer.step_count, steps):
        shown = [
            shown_turns(each, renderer)
            for task, chain in zip(tasks_of("t", repository), repository.chains, strict=True)
            for each in reader.demonstrated(task, chain)
        ]
        for learned in imitate(trainer, shown, epochs=1, batch=len(shown), seed=seed):
            told = {
                name: learned.metrics[name] for name in ("loss", "entropy_proxy", "tokens", "tokens_sampled", "seconds")
            }
            print(f"step {learned.step}, {time.process_time():.0f} CPU-seconds: {told}", flush=True)
        trainer.save(kept, cursor=0, keep=1)
        if time.time() - began > 60 * minutes:
            break
    write_model(trainer.weights(), out, beside(base), {"format": "pt"})
    shutil.rmtree(kept, ignore_errors=True)
    trainer.close()


def beside(base: Path) -> list[Path]:
    """A model directory's files but the weights."""
    return [path for path in base.iterdir() if "safetensors" not in path.name]


# ---------------------------------------------------------------- measuring


class Measured:
    """Rollouts of a model at one temperature, their turns, and the engine's counters.

    Notes are `exact` if they tell what the files so far have told and nothing else, `other` if they have a number that is not the chain's,
    `several` if they have more than one number.
    """

    def __init__(self) -> None:
        self.right, self.rollouts = Counter[str](), Counter[str]()
        self.kept, self.known = Counter[int](), Counter[int]()  # facts in summaries, by their age in windows
        self.turns = list[Turn]()
        self.effort, self.notes = Counter[str](), Counter[str]()
        self.questions = dict[str, dict[str, Any]]()  # by task: what was said, and how right it was
        self.cost = {name: Counter[str]() for name in ("first", "others", "score", "score alone")}
        """Of the first question about each repository, which finds no prefix in the cache; of the others; of scoring the longest turn, with
        the cache and with none of its prefixes in it."""

    def take(
        self,
        task: Task,
        chain: Chain,
        effort: Mapping[str, float],
        turns: Sequence[Turn],
        parts: Sequence[Sequence[str]],
        value: float,
    ) -> None:
        """Count one rollout of a reader."""
        for links in (f"{len(chain.names)} links", "all"):
            self.right[links] += value == 1.0
            self.rollouts[links] += 1
        self.effort.update({name: int(number) for name, number in effort.items()})
        notes, read, since = [turn for turn in turns if turn.purpose is Purpose.COMPACTION], 0, dict[str, int]()
        kept, known, wanted = 0, 0, list[str]()
        for number, (part, turn) in enumerate(zip(parts, notes, strict=True)):
            read += len(part)
            wanted.append(chain.notes(read))
            numbers = re.findall(r"\d+", turn.text)
            self.notes.update(
                all=1,
                exact=turn.text.strip() == wanted[-1],
                other=any(each != chain.number for each in numbers),
                several=len(set(numbers)) > 1,
            )
            for fact in chain.seen(read):
                age = number - since.setdefault(fact, number)
                self.known[age] += 1
                self.kept[age] += fact in turn.text
                known, kept = known + 1, kept + (fact in turn.text)
        said = {"said": [turn.text for turn in turns], "wanted": [*wanted, chain.number]}
        found = {"right": float(value == 1.0), "reward": value, "kept": kept, "known": known}
        self.questions[task.id] = {"links": len(chain.names), **found, **said}

    def told(self) -> dict[str, Any]:
        """The figures."""
        return {
            "right": {
                name: f"{self.right[name]} of {of} [{', '.join(f'{100 * end:.0f}' for end in wilson(self.right[name], of))}]"
                for name, of in sorted(self.rollouts.items())
            },
            "facts_in_notes_by_age": {age: f"{self.kept[age]} of {of}" for age, of in sorted(self.known.items())},
            "facts": f"{sum(self.kept.values())} of {sum(self.known.values())}",
            "refused": f"{self.effort['refused']} of {self.effort['summaries']}",
            "tokens_a_note": round(self.effort["summary_tokens"] / max(1, self.effort["summaries"]), 2),
            "notes": self.notes,
            "sampled": sum(len(turn.sampled_ids) for turn in self.turns),
            "cost": self.cost,
        }


@asynccontextmanager
async def opened(
    base: Path, int8: bool, kv_tokens: int = 1 << 16
) -> AsyncGenerator[tuple[TorchEngine, WorldGateway, MemoryLog]]:
    """An engine with a model, a gateway in front of it, and its log."""
    log = MemoryLog()
    engine, app = served(base, log, int8=int8, kv_tokens=kv_tokens)
    await engine.start()
    weights = weights_of(load_model(base, torch.float32))
    await engine.load(Arm.WORLD, Snapshot(policy=PolicyVersion(number=0, hash="v0"), weights=weights))
    async with NearGateway(app) as gateway, app.router.lifespan_context(app):
        yield engine, gateway, log
    await engine.close()


async def measure(
    base: Path,
    given: Sequence[tuple[Repository, RepositoryReader]],
    temperature: float,
    *,
    int8: bool = False,
    show: int = 0,
    kv_tokens: int = 1 << 16,
) -> Measured:
    """Answers to all questions about some repositories; those about one run at once."""
    measured = Measured()
    async with opened(base, int8, kv_tokens) as (engine, gateway, log):
        for number, (repository, reader) in enumerate(given):
            tasks, done = tasks_of(f"r{number}", repository), list[Rollout]()
            for name, share in (("first", slice(0, 1)), ("others", slice(1, None))):  # the first finds no prefix
                before, began, known = engine.stats()["prefix_hit_tokens"], time.process_time(), len(log.turns())
                models = [
                    gateway.model(task.id, group=None, harness=reader.hash, seed=at, temperature=temperature)
                    for at, task in enumerate(tasks[share], 1000 * len(done))
                ]
                done += await asyncio.gather(
                    *(reader.run(task, model, None) for task, model in zip(tasks[share], models, strict=True))
                )
                sent = sum(len(turn.prompt_ids) for turn in log.turns()[known:])
                measured.cost[name].update(
                    questions=len(models),
                    tokens_sent=sent,
                    tokens_computed=sent - int(engine.stats()["prefix_hit_tokens"] - before),
                    cpu_ms=round(1000 * (time.process_time() - began)),
                )
            turns = {turn.id: turn for turn in log.turns()}
            for task, chain, rollout in zip(tasks, repository.chains, done, strict=True):
                grade = await PatternGrader().grade(task, rollout)
                own = [turns[name] for name in rollout.turns]
                measured.take(task, chain, rollout.effort, own, reader.parts(task), grade.value)
                if show > 0:
                    show -= 1
                    print(*(f"{len(turn.prompt_ids)} tokens: {turn.text!r}" for turn in own), sep="\n")
                    print(f"{chain}: {grade.value:g}", flush=True)
        measured.turns = log.turns()
        longest = max(measured.turns, key=lambda turn: len(turn.prompt_ids))
        ids, salt = [*longest.prompt_ids, *longest.sampled_ids], cache_salt(longest.tenant, longest.user, Arm.WORLD)
        for name, shares in (("score", salt), ("score alone", "alone")):
            before, began = engine.stats()["prefix_hit_tokens"], time.process_time()
            await engine.score(Arm.WORLD, ids, len(longest.prompt_ids), shares)
            measured.cost[name].update(
                tokens_sent=len(ids),
                tokens_computed=len(ids) - 1 - int(engine.stats()["prefix_hit_tokens"] - before),
                cpu_ms=round(1000 * (time.process_time() - began)),
            )
    return measured


async def tools(base: Path, seed: int) -> dict[str, float]:
    """The same questions in the harness `tools` with memory, whose files the model would have to read by calls."""
    repository, boxes, found = Repository.drawn(seed, characters=LONG, links=LINKS), Boxes(), Counter[str]()
    harness = ToolLoop(ToolLoopConfig(memory=MemoryConfig(window=8192, think_tokens=0), output_chars=6000))
    async with opened(base, False) as (_, gateway, _):

        async def one(task: Task) -> None:
            box = await boxes.start(task.spec)
            model = gateway.model(task.id, group=None, harness=harness.hash, seed=0, temperature=1.0)
            rollout = await harness.run(task, model, box)
            await box.stop()
            grade = await PatternGrader().grade(task, rollout)
            found.update(rollouts=1, right=int(grade.value))
            found.update({name: int(rollout.effort[name]) for name in ("calls", "errors", "turns")})
            print(rollout.ended.value, repr(rollout.messages[-1].text), flush=True)

        tasks = tasks_of("tools", repository, harness.name)
        await asyncio.gather(*(one(replace(task, tokens=64)) for task in tasks))
    await boxes.close()
    return dict(found)


def differing(base: Path, turns: Sequence[Turn]) -> tuple[int, int]:
    """Sampled tokens, and how many have other bits where the trainer recomputes their log-probabilities."""
    trainer = PolicyTrainer(base, TAUGHT, EXACT)
    scored = trainer.score(turns)
    trainer.close()
    own, theirs = (
        np.concatenate([np.array(each, np.float32) for each in those]).view(np.int32)
        for those in (scored, [turn.logprobs for turn in turns])
    )
    return len(own), int((own != theirs).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("teach", "measure", "tools"))
    parser.add_argument("--base", type=Path, default=None, help="the model directory; SmolLM2-135M-Instruct")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato").expanduser())
    parser.add_argument("--out", type=Path, help="where a model is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--count", type=int, default=4, help="repositories that are measured")
    parser.add_argument("--long", action="store_true", help="repositories of over 40,000 tokens, in windows of 8k")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--int8", action="store_true", help="measure with the engine's int8 products")
    parser.add_argument("--bits", action="store_true", help="have the trainer recompute what was sampled")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = args.base or resolve("smollm2", args.cache)
    if args.what == "teach":
        teach(base, args.out, steps=args.steps, minutes=args.minutes, seed=args.seed)
    elif args.what == "tools":
        print(asyncio.run(tools(base, 20_000 + args.seed)))
    else:
        given = list(islice(short(10_000 + args.seed, SHORT), args.count))
        if args.long:
            drawn = [Repository.drawn(20_000 + args.seed + n, characters=LONG, links=LINKS) for n in range(args.count)]
            given = [(each, RepositoryReader(WINDOW)) for each in drawn]
        measured = asyncio.run(measure(base, given, args.temperature, int8=args.int8, show=6))
        print(json.dumps(measured.told(), indent=1))
        if args.bits:
            print("tokens, differing:", differing(base, measured.turns))


if __name__ == "__main__":
    main()
