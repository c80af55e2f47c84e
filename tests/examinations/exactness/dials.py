"""Answers that lean to people's dials, and the trainer's replay of them: are all log-probabilities the same bits?

    python -m tests.examinations.exactness.dials [--tokens 100000] [--model llama | smollm2] [--round N] [--minutes M] [--resume]

People ask at the gateway, by HTTP, and rate what they get, so that their dials move all the while (`adapt.DialAdaptation`). Temperatures,
`top_p`, biases, penalties and several choices vary, clients go away, prompts share prefixes, and the engine is first too small for the
traffic, so that streams are preempted, and is then given other weights under the streams, again and again, each version with its own basis.
The trainer scores every recorded token under the weights that the turn names; then it takes a step, which counts tokens beyond their cap.

Two controls must not be 0: each turn's largest dial moved by one unit in the last place, and its basis replaced by the other version's.
Counted are tokens that leaned, by dials that are not 0. Writes tests/examinations/results/exactness_dials.json.

It goes by rounds of `--round` leaning tokens, each with people, bases and weights of its own, and writes their sum after each. `--minutes`:
none begins later. `--resume`: goes on after the rounds that are written, which must be of the same numerics contract.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.examinations.exactness.measures import Gap, gap, with_credit
from tests.examinations.exactness.traffic import LARGE, SMALL, running
from tests.unit.adapt.people import cache_at
from tests.unit.serve.gateway_world import World, world

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.files import write_atomic
from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, SteeringBasis, Turn
from ostinato.core.steering import Basis
from ostinato.core.weights import ITEMSIZES, Snapshot, Weights
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import load_model, resolve, weights_of
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.testing.log import MemoryLog
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

RESULT = Path(__file__).parents[1] / "results" / "exactness_dials.json"
DIALS = 8
_PATIENCE_S = 3600.0  # for a token, on a machine with other work
WORDS = tuple(f"word{number}" for number in range(24))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model; how many tokens people's dials may move, of the ids below `highest`; and how many leaning tokens are wanted."""

    path: Path
    dtype: torch.dtype
    steerable: int
    highest: int
    tokens: int
    clients: int = 10
    people: int = 24
    answer: int = 50

    @property
    def contract(self) -> Contract:
        return contract(self.dtype, "exact", 1, block=32)

    def trainer(self, rows: Sequence[SteeringBasis]) -> PolicyTrainer:
        name = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        settings = {
            "compute": name,
            "publish": name,
            "learning_rate": 1e-4,
            "warmup_steps": 0,
            "threads": 1,
            "clip": 1e6,
        }
        trainer = PolicyTrainer(self.path, TrainConfig.model_validate(settings), self.contract)
        trainer.set_bases(rows)
        return trainer


class People:
    """Clients of the gateway, each of whom likes what some directions make likelier and says so of every answer."""

    def __init__(self, subject: Subject, gateway: World, log: MemoryLog, basis: Basis, seed: int) -> None:
        self._subject, self._gateway, self._log, self._basis = subject, gateway, log, basis
        self._rng, self._rated = random.Random(seed), 0
        wishes = np.random.default_rng(seed).normal(size=(subject.people, DIALS))
        self._likes = dict(zip((f"person {n}" for n in range(subject.people)), wishes, strict=True))
        self.cancelled = 0

    def leaning(self) -> int:
        return leaning_tokens(self._log.turns())

    async def ask(self, wanted: int, engine: TorchEngine, *, preempted: bool) -> None:
        """All clients, until so many tokens leaned and, if it is to be, a stream was preempted."""

        async def client() -> None:
            while self.leaning() < wanted or (preempted and not engine.stats()["preemptions"]):
                await self._once()

        await asyncio.gather(*(client() for _ in range(self._subject.clients)))

    async def _once(self) -> None:
        rng = self._rng
        self._gateway.now += 1.0
        user = rng.choice(sorted(self._likes))
        body = {
            "model": "m",
            "messages": [
                {"role": "system", "content": " ".join(WORDS[: rng.choice([8, 16])])},
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(1, 9)))},
            ],
            "user": user,
            "max_tokens": rng.randrange(5, self._subject.answer + 1),
            "temperature": rng.choice([1.0, 1.0, 1.0, 0.7, 1.3, 0.0]),
            "top_p": rng.choice([1.0, 1.0, 1.0, 0.9]),
            "n": rng.choice([1, 1, 2]),
            "seed": rng.randrange(1 << 40),
        }
        if rng.random() < 0.3:
            body["logit_bias"] = {str(token): rng.uniform(-2, 2) for token in rng.sample(range(40, 200), 4)}
            body["presence_penalty"], body["frequency_penalty"] = rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)
        if rng.random() < 0.1:  # a client that goes away
            asking = asyncio.create_task(self._gateway.post("/v1/chat/completions", body))
            await asyncio.sleep(rng.random() * 0.3)
            self.cancelled += not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        else:
            status, _, told = await self._gateway.post("/v1/chat/completions", body)
            assert status == 200, told
        await self._rate()

    async def _rate(self) -> None:
        """Say of every new answer whether it was liked."""
        turns = self._log.turns()
        new, self._rated = turns[self._rated :], len(turns)
        tokens_M, directions_KM = self._basis.tokens_M, self._basis.directions_KM
        for turn in new:
            counts_M = np.bincount(turn.sampled_ids, minlength=int(tokens_M[-1]) + 1)[tokens_M]
            liked = float(self._likes[turn.user] @ directions_KM @ (counts_M - counts_M.mean())) > 0
            await self._gateway.feedback(turn.id, id=f"s {turn.id}", value=liked)


def leaning_tokens(turns: Sequence[Turn]) -> int:
    """Sampled tokens that were steered by dials that are not 0."""
    return sum(turn.steered.tokens for turn in turns if turn.steered is not None and any(turn.steered.dials))


def basis_of(subject: Subject, weights: str, seed: int) -> Basis:
    rng = np.random.default_rng(seed)
    tokens_M = np.sort(rng.choice(np.arange(33, subject.highest), subject.steerable, replace=False)).astype(np.int64)
    return Basis(
        tuple(f"dial {k}" for k in range(DIALS)),
        tokens_M,
        rng.normal(size=(DIALS, subject.steerable)).astype(np.float32),
        weights,
    )


def moved(weights: Weights, seed: int) -> Weights:
    """Other weights of the same model: in each array one value in fifty has changed places with another."""
    rng, found = np.random.default_rng(seed), dict(weights)
    for name, array in weights.items():
        flat = array.data.copy().view({2: np.uint16, 4: np.uint32}[ITEMSIZES[array.dtype]])
        at = rng.choice(len(flat), len(flat) // 50, replace=False)
        flat[at] = flat[at[::-1]]
        found[name] = replace(array, data=flat.view(np.uint8))
    return found


async def sampled(
    subject: Subject, snapshots: Sequence[Snapshot], bases: Sequence[Basis], work: Path, first_seed: int
) -> dict[str, Any]:
    """What people got: the turns, and what happened to the streams."""
    log = MemoryLog()
    await log.append(*(SteeringBasis.of(basis, at=float(number + 1)) for number, basis in enumerate(bases[::-1])))
    found: dict[str, Any] = {"preemptions": 0, "prefix_hit_tokens": 0, "swaps": 0}
    adaptation = DialAdaptation(log, cache_at(work), AdaptConfig(mode="dials", users="declared", holdout=0.0))
    small = SMALL.model_copy(update={"kv_tokens": 640, "recompute_on_swap": True})
    large = LARGE.model_copy(update={"recompute_on_swap": True})
    cancelled = 0
    for seed, (config, share, swaps) in enumerate(((small, 0.4, False), (large, 1.0, True))):
        async with running(subject.path, config, snapshots[0], subject.contract) as engine:
            async with world(
                engine=engine,
                log=log,
                renderer=HFRenderer(subject.path),
                adaptation=_Unowned(adaptation),
                chunk_timeout_s=_PATIENCE_S,
            ) as gateway:
                gateway.now += 1e6 * seed
                people = People(subject, gateway, log, bases[0], first_seed + seed)
                people._rated = len(log.turns())
                task = asyncio.create_task(_swap(engine, snapshots, found)) if swaps else None
                following = asyncio.create_task(_follow(adaptation))
                await people.ask(int(share * subject.tokens), engine, preempted=not swaps)
                for each in (task, following):
                    if each is not None:
                        each.cancel()
                await asyncio.gather(*(each for each in (task, following) if each), return_exceptions=True)
                cancelled += people.cancelled
            for name in ("preemptions", "prefix_hit_tokens"):
                found[name] += int(engine.stats()[name])
    return found | {"turns": log.turns(), "cancelled": cancelled}


class _Unowned:
    """An adaptation that a gateway does not start and close, because another one uses it afterwards."""

    def __init__(self, adaptation: DialAdaptation) -> None:
        self._adaptation = adaptation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adaptation, name)

    async def start(self) -> None:
        await self._adaptation.follow()

    async def close(self) -> None:
        return None


async def _follow(adaptation: DialAdaptation) -> None:
    while True:
        await adaptation.follow()
        await asyncio.sleep(0.01)


async def _swap(engine: TorchEngine, snapshots: Sequence[Snapshot], found: dict[str, Any]) -> None:
    """Load the versions in turn, one for every 1,500 tokens."""
    while True:
        seen = engine.stats()["tokens"]
        while engine.stats()["tokens"] < seen + 1500:
            await asyncio.sleep(0.005)
        found["swaps"] += 1
        await engine.load("live", snapshots[found["swaps"] % len(snapshots)])


def scored(trainer: PolicyTrainer, turns: Sequence[Turn], snapshots: Sequence[Snapshot]) -> Gap:
    """The trainer's bits beside the recorded ones, each token under the weights that the turn names for it."""
    tokens = differing = 0
    k3 = largest = 0.0
    for snapshot in snapshots:
        trainer.go_back(snapshot.weights, snapshot.policy.number)
        mine = [turn for turn in turns if snapshot.policy in turn.versions_T()]
        one = gap(
            mine, trainer.score(mine), lambda turn, policy=snapshot.policy: [v == policy for v in turn.versions_T()]
        )
        k3 += one.k3 * one.tokens
        tokens, differing, largest = tokens + one.tokens, differing + one.differing, max(largest, one.largest)
    return Gap(tokens, differing, k3 / max(1, tokens), largest)


def nudged(turn: Turn) -> Turn:
    """With the largest dial one unit in the last place larger."""
    assert turn.steered is not None
    dials = np.array(turn.steered.dials, np.float32)
    most = int(np.abs(dials).argmax())
    dials[most] = np.nextafter(dials[most], np.float32(np.inf))
    return replace(turn, steered=replace(turn.steered, dials=tuple(float(dial) for dial in dials)))


def of_the_other(turn: Turn, bases: Sequence[Basis]) -> Turn:
    """Under the basis of the other version."""
    assert turn.steered is not None
    (other,) = (basis.hash for basis in bases if basis.hash != turn.steered.basis)
    return replace(turn, steered=replace(turn.steered, basis=other))


async def examined(subject: Subject, work: Path, number: int) -> dict[str, Any]:
    """Everything that was found in a round."""
    torch.set_num_threads(1)
    seed = 2 * number  # of two versions
    first = weights_of(load_model(subject.path, subject.dtype))
    policies = [PolicyVersion(number=version, hash=str(version) * 64) for version in (0, 1)]
    snapshots = [
        Snapshot(policy=policies[0], weights=first),
        Snapshot(policy=policies[1], weights=moved(first, seed + 1)),
    ]
    bases = [basis_of(subject, policy.hash, seed + policy.number) for policy in policies]
    found = await sampled(subject, snapshots, bases, work, seed)
    turns: list[Turn] = found.pop("turns")
    trainer = subject.trainer([SteeringBasis.of(basis, at=1.0) for basis in bases])
    leaning = [turn for turn in turns if turn.steered is not None and any(turn.steered.dials)]
    replayed = scored(trainer, turns, snapshots)
    controls = {
        "one ulp (control)": [nudged(turn) for turn in leaning],
        "the other basis (control)": [of_the_other(turn, bases) for turn in leaning],
    }
    found["replayed"] = asdict(replayed)
    found |= {name: asdict(scored(trainer, some, snapshots)) for name, some in controls.items()}
    trainer.go_back(first, 0)
    mine = [turn for turn in leaning if {*turn.versions_T()} == {policies[0]} and turn.sampling.temperature > 0]
    metrics = trainer.step(with_credit(mine)).metrics
    names = ("steered_tokens", "steered_over_cap", "mismatch_tokens", "mismatch_differing", "basis_refused")
    found["step"] = {name: metrics[name] for name in names}
    return found | {
        "turns": len(turns),
        "sampled": sum(len(turn.sampled_ids) for turn in turns),
        "leaning": leaning_tokens(turns),
        "people": len({turn.user for turn in leaning}),
        "settings": len({turn.steered.dials for turn in leaning if turn.steered is not None}),
        "swapped": sum(len({*turn.versions_T()}) > 1 for turn in leaning),
        "largest_dial": max(abs(dial) for turn in leaning if turn.steered is not None for dial in turn.steered.dials),
    }


def added(rounds: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The sum of earlier rounds and one more; largest values stay the largest, `people` the most, and k3 is weighted by its tokens."""
    total: dict[str, Any] = {}
    for name, value in one.items():
        before = rounds.get(name)
        if before is None or isinstance(value, str):
            total[name] = value
        elif isinstance(value, dict):
            total[name] = added(before, value)
        else:
            total[name] = max(before, value) if name in ("largest", "largest_dial", "people") else before + value
    if "k3" in one and "k3" in rounds:
        parts = ((each["k3"], each["tokens"]) for each in (rounds, one))
        total["k3"] = sum(k3 * tokens for k3, tokens in parts) / max(1, total["tokens"])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="leaning tokens that are wanted")
    parser.add_argument("--model", choices=["llama", "smollm2"], default="llama")
    parser.add_argument("--round", type=int, default=100_000, help="leaning tokens of a round")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no round begins later")
    parser.add_argument("--resume", action="store_true", help="go on after the rounds that are written")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ostinato", help="where models lie")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    real, began = args.model == "smollm2", time.perf_counter()
    told = json.loads(args.result.read_text()) if args.result.exists() else {}
    found = told.get(args.model, {}) if args.resume else {}
    while found.get("leaning", 0) < args.tokens and time.perf_counter() - began < 60 * args.minutes:
        started, worked = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory(prefix="ostinato-dials-") as scratch:
            work = Path(scratch)
            path = resolve("smollm2", args.cache) if real else tiny_model(work / "model")
            dtype = torch.bfloat16 if real else torch.float32
            steerable, highest = (384, 2000) if real else (80, 250)
            tokens = min(args.round, args.tokens)
            subject = Subject(path=path, dtype=dtype, steerable=steerable, highest=highest, tokens=tokens)
            if found and found.get("contract") != subject.contract.id:
                raise SystemExit("the written rounds are of another numerics contract: run without --resume")
            one = asyncio.run(examined(subject, work, found.get("rounds", 0)))
        one |= {"rounds": 1, "contract": subject.contract.id}
        one |= {"seconds": round(time.perf_counter() - started), "cpu_seconds": round(time.process_time() - worked)}
        found = added(found, one)
        write_atomic(args.result, json.dumps(told | {args.model: found}, indent=1) + "\n", durable=False, mode=0o644)
        print(json.dumps(one), flush=True)
    if not found:
        raise SystemExit("no round was run: give more --minutes")
    broken = found["replayed"]["differing"] + found["step"]["mismatch_differing"] + found["step"]["steered_over_cap"]
    blind = [name for name in found if "control" in name and not found[name]["differing"]]
    if broken or blind or found["leaning"] < args.tokens:
        raise SystemExit(
            f"{broken:g} differences where none may be; controls that found nothing: {blind}; {found['leaning']} of {args.tokens} tokens"
        )


if __name__ == "__main__":
    main()
