"""One step of our loop as a contender of step.py: rollout in the engine, reward, training step, swap into the engine."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.contender import THREADS, gpu_peak_gib, quiet_stdout, reward, serve
from benchmarks.engine.ours import BLOCK, compute_on, first_snapshot, make_engine, make_trainer
from benchmarks.training.roofline import Matrices, Roofline

import ostinato
from ostinato.core.generation import Generate
from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.model.load import empty_model
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_sample
from ostinato.weights.version.content import weights_root


class Loop:
    """Engine and trainer in one process, taking turns on the same threads."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._prompts = [tuple(HFRenderer(path).encode(text)) for text in settings["prompts"]]
        self._samples, self._tokens = settings["samples"], settings["tokens"]
        rows = len(self._prompts) * self._samples
        blocks = sum(-(-len(prompt) // BLOCK) + 1 for prompt in self._prompts) + rows * (-(-self._tokens // BLOCK) + 2)
        self._engine = make_engine(
            path,
            settings["mode"],
            kv_tokens=min(blocks * BLOCK, EngineConfig().kv_tokens),  # long rollouts wait for memory, as in the product
            rows=rows,
            stops=False,
            device=settings["device"],
        )
        self._trainer = make_trainer(
            path,
            settings["mode"],
            settings["device"],
            microbatch_tokens=settings["microbatch"],
            turn_tokens=self._tokens,
            **({"recompute_tokens": 0} if settings["recompute"] else {}),
        )
        self._policy = PolicyVersion(number=0, hash="")
        compute = compute_on(settings["device"], path)
        self._matrices = Matrices.of(empty_model(path, compute))
        self._roofline = Roofline(self._matrices, compute, settings["device"])

    async def start(self, snapshot: Snapshot) -> None:
        await self._engine.start()
        await self._engine.load("live", snapshot)
        self._policy = snapshot.policy

    async def step(self, _: dict[str, Any]) -> dict[str, Any]:
        laps = [time.perf_counter()]
        groups = await asyncio.gather(*(self._rollout(i) for i in range(len(self._prompts))))
        laps.append(time.perf_counter())
        samples = [sample for group in groups for sample in _credit(group)]
        laps.append(time.perf_counter())
        learned = self._trainer.step(samples)
        laps.append(time.perf_counter())
        self._policy = PolicyVersion(number=learned.policy_number, hash=weights_root(learned.whole))
        await self._engine.load("live", Snapshot(policy=self._policy, weights=learned.whole))
        laps.append(time.perf_counter())
        rollout, rewarding, learning, swap = (after - before for before, after in pairwise(laps))
        inner = {name: learned.metrics[f"seconds_{name}"] for name in ("forward", "backward", "optimizer")}
        phases = {"rollout": rollout, "reward": rewarding, **inner}
        phases |= {"rest of learning": learning - sum(inner.values()), "swap": swap}
        sampled = [len(sample.turn.sampled_ids) for sample in samples]
        return {
            "seconds": laps[-1] - laps[0],
            "phases": phases,
            "sampled": sum(sampled),
            "learned": learned.metrics["tokens"],
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "peak_gpu_gib": gpu_peak_gib(),
            "work": self._work(sampled, learned.metrics) if self._settings["roofline"] else {},
        }

    async def _rollout(self, number: int) -> list[Turn]:
        prompt, sampling = self._prompts[number], Sampling(max_tokens=self._tokens)
        ids: list[list[int]] = [[] for _ in range(self._samples)]
        logprobs: list[list[float]] = [[] for _ in ids]
        routes = [b""] * self._samples
        request = Generate(
            id=f"{self._policy.number}-{number}", slot="live", prompt_ids=prompt, sampling=sampling, n=self._samples
        )
        async for chunk in self._engine.generate(request):
            ids[chunk.index] += chunk.ids
            logprobs[chunk.index] += chunk.logprobs
            routes[chunk.index] = chunk.routes
        return [
            Turn(
                id=f"{request.id}:{index}",
                episode=request.id,
                parent=None,
                user="simulated",
                tenant="default",
                arm=Arm.LIVE,
                propensity=1.0,
                prompt_ids=prompt,
                sampled_ids=tuple(made),
                logprobs=tuple(logprobs[index]),
                spans=(Span(policy=self._policy, tokens=len(made)),),
                sampling=sampling,
                finish=Finish.LENGTH,
                text="",
                started_at=0.0,
                ended_at=0.0,
                numerics=self._engine.numerics(),
                routes=routes[index],
            )
            for index, made in enumerate(ids)
        ]

    def _work(self, sampled: list[int], metrics: Any) -> dict[str, dict[str, float]]:
        """Per phase: the work of its matrix products (GFLOP) and the least seconds that they take on this CPU."""
        made, line = self._matrices, self._roofline
        prompts, decoded, heads = sum(map(len, self._prompts)), sum(sampled) - len(sampled), len(self._prompts)
        rows, microbatches = len(sampled), metrics["microbatches"]
        batch, predicted = round(metrics["tokens"] / microbatches), round(sum(sampled) / microbatches)
        learn = {"rows": batch, "heads": predicted}
        forward = made.flop(metrics["tokens"], sum(sampled))
        prefill = line.least(prompts, heads, rows=EngineConfig().chunk_on(self._settings["device"]), heads=heads)
        decode = line.least(decoded, decoded, rows=rows, heads=rows)
        return {
            "rollout": {"gflop": made.flop(prompts + decoded, heads + decoded) / 1e9, "least_s": prefill + decode},
            "forward": {"gflop": forward / 1e9, "least_s": line.least(metrics["tokens"], sum(sampled), **learn)},
            "backward": {
                "gflop": 2 * forward / 1e9,
                "least_s": line.least(metrics["tokens"], sum(sampled), **learn, backward=True),
            },
            "rates_gflop_per_s": dict(line.rates),
        }


def _credit(group: list[Turn]) -> list[Sample]:
    """Samples whose advantage is the reward minus the mean reward of the same prompt."""
    rewards = [reward(turn.sampled_ids) for turn in group]
    mean = statistics.fmean(rewards)
    return [a_sample(turn, value - mean, reward=value) for turn, value in zip(group, rewards, strict=True)]


def main() -> None:
    answers = quiet_stdout()
    torch.set_num_threads(THREADS)
    path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    loop, contender = asyncio.new_event_loop(), Loop(path, settings)
    loop.run_until_complete(contender.start(first_snapshot(path)))
    about = {"version": ostinato.__version__, "torch": torch.__version__, "mode": settings["mode"]}
    about |= {
        "compute": str(compute_on(settings["device"], path)),
        "masters": "torch.float32",
        "microbatch": settings["microbatch"],
    }
    serve(about, lambda command: loop.run_until_complete(contender.step(command)), answers)


if __name__ == "__main__":
    main()
