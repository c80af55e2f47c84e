"""A log of made-up traffic, written through the real writer: how large it gets, how fast it is written and read.

    python benchmarks/record/synthetic.py DIRECTORY --turns 100000

People (`--users` of `--tenants`) hold conversations of `--episode` turns, or ask once; each turn's new message has about `--prompt`
tokens, its answer `--tokens`, and a tenant's system prompt stands before all. Token ids are drawn one by one from a Zipf
distribution, so they hold no phrases that a compressor could find, and log-probabilities are random floats of which half lie near
0: real traffic is smaller. Each turn gets a `Delivered`, and `--signals` of them a signal.

`--callers N` appends as a gateway does: N calls at a time, one turn in each append. Otherwise 64 rows go into one append.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.core.records import Arm, Delivered, Finish, PolicyVersion, Row, Sampling, Signal, Source, Span, Turn
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog

VOCABULARY = 49_152
BULK = 64
BLOCK = 200_000  # numbers that are drawn at once
START = 1_760_000_000.0


@dataclass(frozen=True)
class Shape:
    """What the traffic is like. Token counts are means."""

    turns: int
    tenants: int = 10
    users: int = 10_000
    tokens: int = 100
    prompt: int = 60
    system: int = 120
    episode: int = 4
    choices: int = 1
    signals: float = 0.3
    seed: int = 0


class Draws:
    """Token ids, log-probabilities and hexadecimal names, drawn in large blocks and handed out in pieces."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        weight = 1.0 / (np.arange(VOCABULARY) + 40.0)
        self._cumulated = np.cumsum(weight / weight.sum())
        self._ids, self._id = list[int](), 0
        self._logprobs, self._logprob = list[float](), 0
        self.pieces = [f" {self._random.integers(26**4):x}" if i % 3 else f"{i % 97:x}" for i in range(VOCABULARY)]

    def ids(self, count: int) -> list[int]:
        if self._id + count > len(self._ids):
            drawn = np.searchsorted(self._cumulated, self._random.random(BLOCK + count))
            self._ids, self._id = np.minimum(drawn, VOCABULARY - 1).tolist(), 0
        self._id += count
        return self._ids[self._id - count : self._id]

    def logprobs(self, count: int) -> list[float]:
        if self._logprob + count > len(self._logprobs):
            size = BLOCK + count
            near = 10.0 ** self._random.uniform(-6, -2, size)
            far = self._random.exponential(1.5, size)
            drawn = -np.where(self._random.random(size) < 0.5, near, far)
            self._logprobs, self._logprob = drawn.astype("f4").tolist(), 0
        self._logprob += count
        return self._logprobs[self._logprob - count : self._logprob]

    def name(self) -> str:
        return self._random.bytes(16).hex()

    def length(self, mean: int) -> int:
        """Around the mean: from half of it to one and a half."""
        return int(self._random.integers(mean // 2, mean + mean // 2 + 1)) if mean else 0

    def below(self, bound: int) -> int:
        return int(self._random.integers(bound))

    def chance(self, share: float) -> bool:
        return bool(self._random.random() < share)


@dataclass(slots=True)
class Talk:
    """A conversation that goes on."""

    tenant: str
    user: str
    episode: str
    ids: tuple[int, ...]
    parent: str | None = None
    turns: int = 0


def traffic(shape: Shape, draws: Draws) -> Iterator[list[Row]]:
    """The rows of one call after another: its turns, their delivery, and what people made of them."""
    systems = [tuple(draws.ids(shape.system)) for _ in range(shape.tenants)]
    policy = PolicyVersion(number=0, hash=draws.name() * 2)
    open_: list[Talk] = []
    made = 0
    now = START
    while made < shape.turns:
        now += 0.05
        if made % 50_000 < shape.choices:
            policy = PolicyVersion(number=policy.number + 1, hash=draws.name() * 2)
        if len(open_) < 2_000:
            user = draws.below(shape.users)
            tenant = user % shape.tenants
            open_.append(Talk(f"tenant-{tenant}", f"user-{user}", f"ep-{draws.name()}", systems[tenant]))
            talk = open_[-1]
        else:
            talk = open_[draws.below(len(open_))]
        prompt = talk.ids + tuple(draws.ids(draws.length(shape.prompt)))
        call = f"chatcmpl-{draws.name()}"
        turns = [answer(shape, draws, talk, prompt, f"{call}:{i}", policy, now) for i in range(shape.choices)]
        made += len(turns)
        rows: list[Row] = [*turns, Delivered(id=call, turns=tuple(turn.id for turn in turns), at=now + 1.0)]
        rows += [judged(turn, draws, now) for turn in turns if draws.chance(shape.signals)]
        yield rows
        talk.ids, talk.parent, talk.turns = prompt + turns[0].sampled_ids, turns[0].id, talk.turns + 1
        if talk.turns >= shape.episode:
            open_.remove(talk)


def answer(
    shape: Shape, draws: Draws, talk: Talk, prompt: tuple[int, ...], name: str, policy: PolicyVersion, now: float
) -> Turn:
    sampled = tuple(draws.ids(max(1, draws.length(shape.tokens))))
    return Turn(
        id=name,
        episode=talk.episode,
        parent=talk.parent,
        user=talk.user,
        tenant=talk.tenant,
        arm=Arm.LIVE,
        propensity=0.9,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=tuple(draws.logprobs(len(sampled))),
        spans=(Span(policy=policy, tokens=len(sampled)),),
        sampling=Sampling(max_tokens=512, seed=draws.below(1 << 62)),
        finish=Finish.STOP,
        text="".join(map(draws.pieces.__getitem__, sampled)),
        started_at=now + draws.below(1 << 20) / 1e6,
        ended_at=now + 1.0 + draws.below(1 << 20) / 1e6,
        numerics="5f0c2b7a91d3e846",
    )


def judged(turn: Turn, draws: Draws, now: float) -> Signal:
    return Signal(
        id=draws.name(),
        tenant=turn.tenant,
        turn=turn.id,
        name="accepted" if draws.chance(0.6) else "undone",
        value=1.0,
        source=Source.HUMAN,
        occurred_at=now + 20.0,
        received_at=now + 20.0 + draws.below(1 << 20) / 1e6,
    )


async def write(log: SqlLog, shape: Shape, callers: int = 0) -> int:
    """Write the traffic; how many rows. Without `callers`, in appends of `BULK` rows."""
    draws = Draws(shape.seed)
    log.derive_text(draws.pieces.__getitem__)
    waiting: set[asyncio.Future[int]] = set()
    block: list[Row] = []
    rows = 0
    for call in traffic(shape, draws):
        rows += len(call)
        block += call
        if callers or len(block) >= BULK:
            # a gateway appends the turn, and when the answer is out, that it was delivered
            parts = [call[: shape.choices], call[shape.choices :]] if callers else [block]
            waiting |= {asyncio.ensure_future(log.append(*part)) for part in parts if part}
            block = []
        while len(waiting) >= (callers or 8):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
    if block:
        await log.append(*block)
    await asyncio.gather(*waiting)
    return rows


async def scan(log: SqlLog, kinds: set[type]) -> int:
    """Read all rows of these kinds; how many."""
    count = 0
    async for _ in log.read(0, kinds):
        count += 1
    return count


def size(directory: Path) -> int:
    """Bytes of all files of a log."""
    return sum(path.stat().st_size for path in directory.iterdir())


async def run(directory: Path, shape: Shape, callers: int, config: RecordConfig) -> dict[str, float]:
    figures: dict[str, float] = {}
    with SqlLog.open(directory, config=config) as log:
        wall, cpu = time.perf_counter(), time.process_time()
        figures["rows"] = await write(log, shape, callers)
        figures["write wall s"] = time.perf_counter() - wall
        figures["write cpu s"] = time.process_time() - cpu
    turns = shape.turns
    figures["bytes a turn"] = size(directory) / turns
    figures["segments"] = len(list(directory.glob("*.db")))
    figures["turns/s wall"] = turns / figures["write wall s"]
    figures["turns/s cpu"] = turns / figures["write cpu s"]
    with SqlLog.open(directory, config=config) as log:
        for name, kinds in (("turns", {Turn}), ("small rows", {Delivered, Signal})):
            cpu = time.process_time()
            count = await scan(log, kinds)
            figures[f"{name} read/s cpu"] = count / (time.process_time() - cpu)
    figures["peak memory MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


def generation(shape: Shape) -> float:
    """CPU seconds that making up the traffic takes by itself."""
    cpu = time.process_time()
    for _ in traffic(shape, Draws(shape.seed)):
        pass
    return time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    for name, default in vars(Shape(turns=100_000)).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--callers", type=int, default=0)
    parser.add_argument("--encrypt", default="none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = Shape(**{name: getattr(args, name) for name in vars(Shape(turns=1))})
    figures = asyncio.run(run(args.directory, shape, args.callers, RecordConfig(encrypt=args.encrypt)))
    figures["made-up cpu s"] = generation(shape)
    figures["writer's cpu us a turn"] = (figures["write cpu s"] - figures["made-up cpu s"]) / shape.turns * 1e6
    for name, value in figures.items():
        print(f"{name:>24} {value:12,.1f}")
    if args.out:
        args.out.write_text(json.dumps({"shape": vars(shape), "callers": args.callers, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
