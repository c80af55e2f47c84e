"""Summaries of windows, learned from one right or wrong answer at the end of a chain.

    python -m benchmarks.worlds.summaries --out DIR --seed 0

A seed's start imitates a summariser that forgets; then each arm learns from it, and all are measured on the same streams.

The world is that of `summaries_world.py`. Harness with memory, rollout worker, gateway, engine, log, reward desk, credit and trainer are
the product's; they run in one process and call the gateway without a socket, so that a step's cost is theirs. Arms: `all` gives the
chain's advantage to all that was sampled in it; `nosum` leaves summaries out of `reward.purposes`. Error is measured sampled and
greedy, the needle and the state apart, and with the summary taken away before the question (`off`: only the last segment is seen).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine.ours import whole
from benchmarks.worlds.summaries_world import (
    GOALS,
    SEGMENTS,
    SUMMARY,
    VALUES,
    Prompts,
    Stream,
    StreamReader,
    task_of,
    teach,
    tokenizer,
)
from pydantic import SecretStr
from starlette.types import ASGIApp
from transformers import AutoModelForCausalLM

from ostinato.core.errors import NoSignal, Unavailable
from ostinato.core.records import Arm, Holdback, PolicyVersion, Purpose
from ostinato.core.seams import Log
from ostinato.core.weights import Snapshot, WeightPart
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import build, load_model
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.model.tensors import weights_of
from ostinato.record.log import SqlLog
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import asker_of
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import GatewayApp, create_app
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.export import write_model
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.groups import EventFile, SpentGroups
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

GROUP, GROUPS = 8, 8
RATE = 7e-4
TASKS = 16384
LENGTHS = (SEGMENTS[1], 2 * SEGMENTS[1], 4 * SEGMENTS[1], 8 * SEGMENTS[1])  # segments of the streams that are measured
KEY = "admin-0123456789abcdef"
ARMS = {"all": (Purpose.TASK, Purpose.COMPACTION), "nosum": (Purpose.TASK,)}
EXACT = contract(torch.float32, "exact", 1, block=16)
TRAINING = TrainConfig(
    compute="fp32",
    publish="fp32",
    learning_rate=RATE,
    turn_tokens=SUMMARY,
    microbatch_tokens=4096,
    kl_beta=0.0,
    anchor_kl=None,
)


def streams(seed: int, count: int = TASKS, segments: tuple[int, int] = SEGMENTS) -> Taskset:
    """Streams of so many segments, each with a question about one of its goals."""
    dice = random.Random(seed)
    drawn = [(Stream.drawn(dice.randint(*segments), dice), dice.randrange(GOALS)) for _ in range(count)]
    return taskset_of("streams", [task_of(f"s{n}", stream, asked) for n, (stream, asked) in enumerate(drawn)])


class NearGateway(WorldGateway):
    """A gateway in this process, called without a socket."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__("", KEY)
        self._app = app

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        accepted: Sequence[int] = (),
    ) -> Any:
        """One call's answer. Raises Unavailable for any status but 2xx and those accepted."""
        given = {"host": "localhost", "content-type": "application/json", "x-ostinato-key": KEY, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        asked = [
            {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}
        ]
        status, parts, never = 0, list[bytes](), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not asked:
                await never.wait()
            return asked.pop()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        said = b"".join(parts)
        if status >= 300 and status not in accepted:
            raise Unavailable(f"{method} {path}: HTTP {status}: {said[:500]!r}")
        return json.loads(said)


def served(base: Path, log: Log, *, int8: bool = False, kv_tokens: int = 1 << 16) -> tuple[TorchEngine, GatewayApp]:
    """An engine that is not started yet, exact unless its products are `int8`, and the gateway in front of it."""
    renderer, integers = HFRenderer(base), whole(base) if int8 else None
    sizes = EngineConfig(kv_tokens=kv_tokens, block=16, max_batch=256, prefill_chunk=1024, threads=1)
    engine = TorchEngine(
        build(base),
        renderer,
        sizes.model_copy(update={"products": "int8"}) if integers else sizes,
        integers=integers,
        contract=contract(torch.float32, "fast", 1, block=16, quantisation=integers.name) if integers else EXACT,
        grammars=renderer.grammars,
    )
    app = create_app(
        engine=engine,
        renderer=renderer,
        log=log,
        config=ServeConfig(),
        clock=time.time,
        model_name="model",
        admin_keys=[SecretStr(KEY)],
    )
    return engine, app


class Run:
    """One run's parts, opened in a directory."""

    def __init__(self, base: Path, arm: str, place: Path) -> None:
        self.log = SqlLog.open(place / "log")
        self.engine, self.app = served(base, self.log)
        reward = RewardConfig(purposes=ARMS[arm], settle_s=0.0)
        self.desk = RewardDesk(
            self.log, asker_of(reward), time.time, reward, taught=Taught(people=False, groups=GROUPS)
        )
        self.trainer = PolicyTrainer(base, TRAINING, EXACT)
        self.start = weights_of(load_model(base, torch.float32))
        self.journal = EventFile.open(place / "rollouts.jsonl")[0]
        self.finished, self.learned_from = list[Finished](), Counter[str]()

    def rollouts(self, tasks: Taskset, gateway: WorldGateway, seed: int) -> Rollouts:
        """The rollout worker."""
        config = WorldsConfig(
            group=GROUP,
            groups=GROUPS,
            group_first=0,
            lead=1,
            window=2 * GROUPS,
            concurrency=2 * GROUP * GROUPS,
            curriculum=False,
            epochs=0,
            seed=seed,
            poll_s=0.02,
        )
        harness = StreamReader()
        shop = Workshop(harnesses={harness.name: harness}, backend=None, grader=PatternGrader(), gateway=gateway)
        spending = SpentGroups(self.log, after=0)
        return Rollouts(tasks, shop, self.journal, [], spending, config, lambda *_, **__: None, self.finished.append)

    async def steps(self, count: int, until: float) -> list[dict[str, float]]:
        """So many steps, fewer at the Unix time `until`."""
        told = list[dict[str, float]]()
        while len(told) < count and time.time() < until:
            try:
                batch = await self.desk.batch(self.trainer.step_count + 1, 1, PolicyVersion(number=0, hash="v0"))
            except NoSignal:
                batch = None
            if batch is None:
                await asyncio.sleep(0.01)
                continue
            learned = await asyncio.to_thread(self.trainer.step, batch.samples)
            assert not isinstance(learned.weights, WeightPart), "one process holds all weights"
            policy = PolicyVersion(number=learned.step, hash=f"v{learned.step}")
            await self.engine.load(Arm.WORLD, Snapshot(policy=policy, weights=learned.weights))
            told.append(dict(learned.metrics))
            self.learned_from.update(sample.turn.purpose.value for sample in batch.samples)
            names = "learning_rate", "signal", "grad_norm", "turns", "tokens", "seconds", "lag_mean", "reward_mean"
            shown = " ".join(f"{name} {told[-1][name]:.3g}" for name in names if name in told[-1])
            print(f"step {learned.step}, {time.process_time():.0f} CPU-seconds: {shown}", flush=True)
        return told


async def learn(
    base: Path, arm: str, seed: int, steps: int, minutes: float, out: Path | None = None, tasks: Taskset | None = None
) -> dict[str, Any]:
    """Train for so many steps, or minutes if these are over first, and write the weights to `out`. Returns a report."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as place:
        run = Run(base, arm, Path(place))
        await run.engine.start()
        await run.engine.load(Arm.WORLD, Snapshot(policy=PolicyVersion(number=0, hash="v0"), weights=run.start))
        began, wall = time.process_time(), time.time()
        async with NearGateway(run.app) as gateway, run.app.router.lifespan_context(run.app):
            work = asyncio.create_task(run.rollouts(tasks or streams(seed), gateway, seed).run())
            told = asyncio.create_task(run.steps(steps, wall + 60 * minutes))
            await asyncio.wait([work, told], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            taken = await told
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        spent, wall = time.process_time() - began, time.time() - wall
        held = [row async for _, row in run.log.read(0, {Holdback})]
        await run.engine.close()
        run.journal.close()
        run.log.close()
        if out is not None:
            files = [path for path in base.iterdir() if "safetensors" not in path.name]
            write_model(run.trainer.weights(), out, files, {})
        run.trainer.close()
    ended = [each.effort for each in run.finished]
    summaries = max(1.0, sum(each["summaries"] for each in ended))
    return {
        "steps": len(taken),
        "cpu_minutes": spent / 60,
        "wall_minutes": wall / 60,
        "differing": sum(step.get("mismatch_differing", 0.0) for step in taken),
        "held": Counter(row.reason.partition(":")[0] for row in held if isinstance(row, Holdback)),
        "learned_from": run.learned_from,
        "rollouts": len(ended),
        "right": [round(sum(each.value or 0.0 for each in part) / len(part), 3) for part in _tenths(run.finished)],
        "refused_a_summary": sum(each["refused"] for each in ended) / summaries,
        "tokens_a_summary": sum(each["summary_tokens"] for each in ended) / summaries,
    }


def _tenths(finished: Sequence[Finished]) -> list[Sequence[Finished]]:
    """The rollouts in ten parts, in the order in which they ended."""
    size = max(1, len(finished) // 10)
    return [finished[start : start + size] for start in range(0, len(finished), size)][:10]


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
            length += sum(self._prompts.length(each) for each in answers if each is not None)
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


def newest(drawn: Sequence[Stream], kept: int) -> dict[str, float]:
    """The rule that keeps the newest events as they are, `kept` tokens of them, for a reader that makes no mistake and guesses the rest."""
    wrong = [0.0] * GOALS
    for stream in drawn:
        seen = "".join(stream.segments)[-2 * kept :][::2]
        for goal, key in enumerate(stream.goals):
            wrong[goal] += 0.0 if key in seen else 1 - 1 / len(VALUES)
    of = len(drawn)
    return {
        "error": sum(wrong) / of / GOALS,
        "needle": wrong[0] / of,
        "state": sum(wrong[1:]) / of / (GOALS - 1),
        "tokens": kept,
    }


def measure(model: Path, segments: int, count: int) -> dict[str, dict[str, float]]:
    """Errors on `count` streams of so many segments, sampled and greedy, and greedy with only the last segment seen (`off`)."""
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    dice = random.Random(12345)
    drawn = [Stream.drawn(segments, dice) for _ in range(count)]
    return {
        "sampled": Reader(loaded, False, 7).errors(drawn, off=False),
        "greedy": Reader(loaded, True, 7).errors(drawn, off=False),
        "off": Reader(loaded, True, 7).errors(drawn, off=True),
        **{f"rule: the newest {kept} tokens": newest(drawn, kept) for kept in (4, 20)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where models and figures are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--imitate", type=float, default=5.0, help="most CPU minutes until it copies; a start that is there is taken"
    )
    parser.add_argument("--steps", type=int, default=100, help="of each arm")
    parser.add_argument("--minutes", type=float, default=20.0, help="the most minutes of an arm")
    parser.add_argument("--models", choices=["start", *ARMS], nargs="*", default=["start", *ARMS])
    parser.add_argument("--count", type=int, default=256, help="streams of each length")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = args.out / f"start-{args.seed}"
    if not (start / "config.json").exists():
        teach(start, args.imitate, seed=args.seed)
    for name in args.models:
        place = args.out / f"{name}-{args.seed}"
        told = dict[str, Any]()
        if name != "start":
            told = asyncio.run(learn(start, name, args.seed, args.steps, args.minutes, place))
        errors = {segments: measure(place, segments, args.count) for segments in LENGTHS}
        line = json.dumps({"model": name, "seed": args.seed, **told, "errors": errors})
        (args.out / f"{name}-{args.seed}.json").write_text(line)
        print(line, flush=True)


if __name__ == "__main__":
    main()
