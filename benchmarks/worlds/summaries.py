"""Summaries of windows, learned from one right or wrong answer at the end of a chain: by the real gateway, engine, log, desk and trainer.

    python -m benchmarks.worlds.summaries teach --base DIR --minutes 6                  # the prompted summariser, which forgets
    python -m benchmarks.worlds.summaries learn --base DIR --arm all --seed 0 --steps 60 --out DIR
    python -m benchmarks.worlds.summaries table --base DIR --models DIR DIR

The world is that of `summaries_world.py`. Arms: `all` gives the chain's advantage to all that was sampled in it; `nosum` leaves summaries
out of `reward.purposes`. `table` measures error at 8, 16 and 32 segments, sampled and greedy, the needle and the state apart, and with the
summary taken away before the question (`off`: only the last segment is seen), on the same streams for every model, without the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.worlds.summaries_world import (
    GOALS,
    GREATEST,
    LEAST,
    SUMMARY,
    VALUES,
    Prompts,
    Stream,
    StreamReader,
    task_of,
    teach,
    tokenizer,
)
from transformers import AutoModelForCausalLM

from ostinato.app.storage import home, open_run
from ostinato.config import Config, load
from ostinato.core.records import Arm, Holdback
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.demo import ready
from ostinato.record.roles import hold
from ostinato.status.progress_lines import last_lines
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.groups import EventFile, Spending
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

GROUP, GROUPS = 8, 6
RATE = 3e-4
TASKS = 4096
ARMS = {"all": '["task", "compaction"]', "nosum": '["task"]'}


def settings(directory: Path, base: Path, arm: str, seed: int, *more: str) -> list[str]:
    """A run's settings, in exact mode: each step compares the trainer's log-probabilities with the engine's."""
    return [
        f"run.directory='{directory / 'run'}'",
        f"model.source='{base}'",
        "model.name='tiny'",
        "model.dtype='float32'",
        "model.compute='fp32'",
        "model.numerics='exact'",
        "listen.port=0",
        "serve.page=false",
        'learn.source="worlds"',
        "learn.poll_s=0.02",
        "learn.publish_every=100000",
        "learn.checkpoint_every=100",
        "train.compute='fp32'",
        "train.publish='fp32'",
        f"train.learning_rate={RATE}",
        f"train.turn_tokens={SUMMARY}",
        "train.microbatch_tokens=4096",
        "train.kl_beta=0.0",
        "train.anchor_beta=0.0",
        "train.anchor_limit=100.0",
        f"reward.purposes={ARMS[arm]}",
        "reward.world_staleness=8",
        "reward.settle_s=0.0",
        "evaluate.suite=''",
        "follow.interval_s=0.05",
        f"worlds.group={GROUP}",
        "worlds.group_first=0",
        f"worlds.groups={GROUPS}",
        "worlds.lead=1",
        f"worlds.window={2 * GROUPS}",
        f"worlds.concurrency={2 * GROUP * GROUPS}",
        "worlds.curriculum=false",
        "worlds.epochs=0",
        f"worlds.seed={seed}",
        "worlds.poll_s=0.02",
        *more,
    ]


def streams(seed: int, count: int = TASKS, segments: tuple[int, int] = (LEAST, GREATEST)) -> Taskset:
    """Streams of 2 to 5 segments, each with a question about one of its goals."""
    dice = random.Random(seed)
    drawn = [(Stream.drawn(dice.randint(*segments), dice), dice.randrange(GOALS)) for _ in range(count)]
    return taskset_of("streams", [task_of(f"s{n}", stream, asked) for n, (stream, asked) in enumerate(drawn)])


def steps_of(config: Config) -> list[dict[str, Any]]:
    """The steps taken so far."""
    return [line for line in last_lines(home(config).progress("train"), 1 << 24) if line["kind"] == "step"]


def cpu_s(launched: Launched) -> float:
    """CPU seconds of the gateway, the trainer and this process, which makes the rollouts."""
    pids = [os.getpid(), *(watched.worker.pid for watched in launched.supervisor.watched)]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def learn(config: Config, tasks: Taskset, steps: int, minutes: float, out: Path | None = None) -> dict[str, Any]:
    """Train for so many steps, or so many minutes if these are over first, and write the last version to `out`. Returns a report."""
    with hold(home(config).root, "up"):
        async with launch(config, lambda *_: None, names=("serve", "train")) as launched:
            url = await launched.during(ready(launched.home, ("world",)))
            with open_run(config) as run, contextlib.closing(EventFile.open(run.home.rollouts)[0]) as journal:
                async with WorldGateway(url, run.home.admin_key()) as gateway:
                    shop = Workshop(
                        harnesses={"stream": StreamReader()}, backend=None, grader=PatternGrader(), gateway=gateway
                    )
                    finished = list[Any]()
                    spending = Spending(run.log, after=0)
                    rollouts = Rollouts(
                        tasks, shop, journal, [], spending, config.worlds, lambda *_, **__: None, finished.append
                    )
                    began, spent = time.time(), cpu_s(launched)
                    task = asyncio.create_task(rollouts.run())
                    while not task.done() and len(steps_of(config)) < steps and time.time() - began < 60 * minutes:
                        await asyncio.sleep(0.1)
                    spent = cpu_s(launched) - spent
                    if task.done():
                        task.result()
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                held = [row async for _, row in run.log.read(0, {Holdback})]
                if out is not None:
                    policy = await run.follower.resolve(Arm.WORLD.value)
                    assert policy is not None
                    source = Path(config.model.source)
                    files = [path for path in source.iterdir() if "safetensors" not in path.name]
                    out.mkdir(parents=True, exist_ok=True)
                    await run.follower.materialise(policy, out, files)
    taken = steps_of(config)
    return {
        "steps": len(taken),
        "wall_s_a_step": (time.time() - began) / max(1, len(taken)),
        "cpu_s_a_step": spent / max(1, len(taken)),
        "rewards": [round(step["reward_mean"], 4) for step in taken],
        "differing": sum(step.get("mismatch_differing", 0) for step in taken),
        "lag_max": max((step["lag_max"] for step in taken), default=0),
        "held": Counter(row.reason.partition(":")[0] for row in held if isinstance(row, Holdback)),
        "rollouts": len(finished),
        "refused_a_summary": sum(each.effort["refused"] for each in finished)
        / max(1.0, sum(each.effort["summaries"] for each in finished)),
        "tokens_a_summary": sum(each.effort["summary_tokens"] for each in finished)
        / max(1.0, sum(each.effort["summaries"] for each in finished)),
    }


# ---------------------------------------------------------------- measuring


class Reader:
    """A model that reads many streams at once, as `StreamReader` has it read, but that a refused summary is not asked for again."""

    def __init__(self, model: Any, greedy: bool, seed: int) -> None:
        self._model, self._greedy = model, greedy
        self._words = tokenizer()
        self._prompts = Prompts(self._words)
        self._dice = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def said(self, prompts: Sequence[Sequence[int]], most: int) -> list[str | None]:
        """An answer to each; None if it had no end. Prompts of one length are computed together."""
        found: list[str | None] = [None] * len(prompts)
        for length in {len(prompt) for prompt in prompts}:
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            ids, cache, told = torch.tensor([list(prompts[row]) for row in rows]), None, list[torch.Tensor]()
            for _ in range(most):
                out = self._model(ids, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[:, -1].float()
                choice = (
                    logits.argmax(-1)
                    if self._greedy
                    else torch.multinomial(logits.softmax(-1), 1, generator=self._dice)[:, 0]
                )
                told.append(choice)
                ids = choice[:, None]
            for row, answer in zip(rows, torch.stack(told, 1).tolist(), strict=True):
                if self._prompts.end in answer:
                    found[row] = str(self._words.decode(answer[: answer.index(self._prompts.end)]))
                elif most == 1:
                    found[row] = str(self._words.decode(answer))
        return found

    def errors(self, drawn: Sequence[Stream], *, off: bool) -> dict[str, float]:
        """Shares of wrong answers at the streams' end, over all goals, of the needle and of the state; and tokens of a summary."""
        summaries: list[str | None] = [None] * len(drawn)
        length, count = 0, 0
        begin = len(drawn[0].segments) - 1 if off else 0
        for number in range(begin, len(drawn[0].segments)):
            asked = [
                self._prompts.to_sum(stream.goals, summary, stream.segments[number])
                for stream, summary in zip(drawn, summaries, strict=True)
            ]
            answers = self.said(asked, SUMMARY)
            summaries = [old or "" if new is None else new for old, new in zip(summaries, answers, strict=True)]
            length += sum(len(each) // 2 + 1 for each in answers if each is not None)
            count += sum(each is not None for each in answers)
        wrong = [0] * GOALS
        for goal in range(GOALS):
            asked = [
                self._prompts.to_ask(each.goals, summary or "", each.goals[goal])
                for each, summary in zip(drawn, summaries, strict=True)
            ]
            wrong[goal] = sum(
                answer != stream.truth[-1][goal] for answer, stream in zip(self.said(asked, 1), drawn, strict=True)
            )
        of = len(drawn)
        return {
            "error": sum(wrong) / of / GOALS,
            "needle": wrong[0] / of,
            "state": sum(wrong[1:]) / of / (GOALS - 1),
            "tokens": length / max(1, count),
        }


def table(models: Sequence[Path], count: int) -> dict[str, Any]:
    """Errors of each model on the same streams."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for place in models:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        for segments in (8, 16, 32):
            dice = random.Random(12345)
            drawn = [Stream.drawn(segments, dice) for _ in range(count)]
            for greedy in (False, True):
                for off in (False, True) if segments == 16 else (False,):
                    name = f"{place.name}, {segments} segments, {'greedy' if greedy else 'sampled'}{', off' if off else ''}"
                    found[name] = Reader(model, greedy, 7).errors(drawn, off=off)
                    print(name, " ".join(f"{key} {value:.3f}" for key, value in found[name].items()), flush=True)
    print(f"a guess errs in {1 - 1 / len(VALUES):.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["teach", "learn", "table"])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="CPU minutes of imitation")
    parser.add_argument("--arm", choices=[*ARMS], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--most-minutes", type=float, default=60.0, help="of learning")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, default=256, help="streams of each length")
    args = parser.parse_args()
    if args.what == "teach":
        torch.set_num_threads(1)
        teach(args.base, args.minutes)
    elif args.what == "learn":
        with tempfile.TemporaryDirectory() as place:
            config = load(None, settings(Path(place), args.base, args.arm, args.seed))
            found = asyncio.run(learn(config, streams(args.seed), args.steps, args.most_minutes, args.out))
        print(json.dumps({"arm": args.arm, "seed": args.seed, **found}), flush=True)
    else:
        table([args.base, *args.models], args.count)


if __name__ == "__main__":
    main()
