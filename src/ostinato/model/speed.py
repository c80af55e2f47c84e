"""Which dtype is faster on this machine, and how many threads pay: the model's own products, timed for about a second.

A CPU's flags do not say it. With AMX, fp32 was faster than bf16 under kernels that did not use the tiles; without bf16 instructions a
library may be five times as slow in bf16 as in fp32, or, where memory is the limit, faster.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ostinato.model.cpu import team
from ostinato.model.linear import Linear, linear
from ostinato.model.load import empty_model
from ostinato.model.selftest import Pack, random_numbers, shapes_of

Clock = Callable[[], float]
DType = Literal["bfloat16", "float32"]

FEW, MANY = 4, 128  # rows: some streams' next tokens in the engine, and a prompt or the trainer's tokens
MARGIN = 1.1
"""fp32 is chosen only if it is faster than bf16 by more than this factor: bf16 is what is published, and takes half the memory."""
PAYS = 1.25
"""Twice as many threads pay if they make products faster by at least this factor."""
_SHAPES = 2  # of the model's, the largest ones
_PARAMETERS = 12 << 20  # of all matrices that a call with few rows reads: more than most caches hold
_COPIES = 64  # of one matrix at most: a tiny model fits into the cache, in the engine, too
_MOST = 2 << 20  # parameters of the part of a matrix that many rows are multiplied by
_SLICE_S, _ROUNDS = 0.12, 8  # per comparison; the fastest round counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast one product of the model was, in 1e9 floating-point operations per second.

    Example: ``Speed(inputs=576, outputs=1536, rows=4, threads=1, dtype="bfloat16", gflops=38.2)``
    """

    inputs: int
    outputs: int
    rows: int
    threads: int
    dtype: DType
    gflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds of both dtypes on one thread, and of the better one with more and more threads; the load before that, and the cores.

    Example: ``Speeds(dtypes=(), teams=(), load=0.1, cores=1)``
    """

    dtypes: tuple[Speed, ...]
    teams: tuple[Speed, ...]
    load: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other programs may have taken the cores on which further threads were timed."""
        return self.load > self.cores / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChoice:
    """What the speeds say. `bf16`: its speed relative to fp32. `teams`: the speed of so many threads relative to one, as far as timed.
    `threads`: the number up to which each doubling pays.

    Example: ``SpeedChoice(dtype="bfloat16", bf16=1.9, threads=2, teams={2: 1.8})``
    """

    dtype: DType
    bf16: float
    threads: int
    teams: dict[int, float]


def choose(speeds: Speeds) -> SpeedChoice:
    """The faster dtype, with `MARGIN` in favour of bf16, and how many threads pay. Depends on nothing but the speeds.

    Without any speeds it is bf16 on one thread. If the machine was busy, nothing is concluded about further threads.
    """
    bf16 = _factor(speeds.dtypes, lambda each: each.dtype, "bfloat16", "float32")
    teams = {
        count: _factor(speeds.teams, lambda each: each.threads, count, 1)
        for count in sorted({each.threads for each in speeds.teams} - {1})
    }
    threads = 1
    for count, factor in [] if speeds.busy else teams.items():
        if factor < PAYS * teams.get(threads, 1.0):
            break
        threads = count
    return SpeedChoice(dtype="bfloat16" if bf16 * MARGIN >= 1 else "float32", bf16=bf16, threads=threads, teams=teams)


def is_whole(speeds: Speeds) -> bool:
    """Whether `choose` can compare these speeds: finite ones above zero, each with the speed that it is relative to. Kept files may lack
    some.
    """
    if not all(0 < each.gflops < math.inf for each in (*speeds.dtypes, *speeds.teams)):
        return False
    try:
        choose(speeds)
    except (KeyError, ArithmeticError, ValueError):
        return False
    return True


def _factor(speeds: Sequence[Speed], what: Callable[[Speed], object], one: object, other: object) -> float:
    """The geometric mean, over products, of the speed of `one` relative to that of `other`; 1 without speeds."""
    found = {(each.inputs, each.outputs, each.rows, what(each)): each.gflops for each in speeds}
    factors = [speed / found[*key[:3], other] for key, speed in found.items() if key[3] == one]
    return math.exp(sum(map(math.log, factors)) / max(1, len(factors)))


def measure(path: Path, pack: Pack | None, cores: int, clock: Clock = time.perf_counter) -> Speeds:
    """Time the largest products of the model in a directory, at few and at many rows: both dtypes on one thread, then the better dtype on
    1, 2, 4, ... threads.

    With few rows a product is computed as in the engine, from a matrix that was converted by `pack` and lies in memory; with many rows as
    in the trainer. What is compared takes turns, so that another program slows all of it. Raises BadConfig as `empty_model`.
    """
    load = os.getloadavg()[0]
    model = empty_model(path, torch.float32, shallow=True)
    shapes = shapes_of(model.base_model) or shapes_of(model)
    largest = sorted(shapes, key=lambda shape: -shape.flops)[:_SHAPES]
    places = [(shape.inputs, shape.outputs, rows) for shape in largest for rows in (FEW, MANY)]
    dtypes = [each for at in places for each in _compared(*at, ("bfloat16", "float32"), (1,), pack, clock)]
    better = choose(Speeds(dtypes=tuple(dtypes), teams=(), load=load, cores=cores)).dtype
    counts = [1 << power for power in range(cores.bit_length())]
    teams = [each for at in places[:2] if cores > 1 for each in _compared(*at, (better,), counts, pack, clock)]
    return Speeds(dtypes=tuple(dtypes), teams=tuple(teams), load=load, cores=cores)


def _compared(
    inputs: int,
    outputs: int,
    rows: int,
    dtypes: Sequence[DType],
    counts: Sequence[int],
    pack: Pack | None,
    clock: Clock,
) -> list[Speed]:
    runs = {dtype: _run(inputs, outputs, rows, getattr(torch, dtype), pack) for dtype in dtypes}
    ways: list[tuple[DType, int]] = [(dtype, count) for dtype in dtypes for count in counts]
    times = _times([_with(count, runs[dtype][0]) for dtype, count in ways], clock)
    return [
        Speed(
            inputs=inputs,
            outputs=outputs,
            rows=rows,
            threads=count,
            dtype=dtype,
            gflops=runs[dtype][1] / seconds / 1e9,
        )
        for (dtype, count), seconds in zip(ways, times, strict=True)
    ]


def _with(count: int, run: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with team(count), torch.inference_mode():
            run()

    return call


def _run(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, pack: Pack | None
) -> tuple[Callable[[], object], int]:
    """A call that multiplies, and its number of floating-point operations."""
    x = random_numbers(rows, inputs, dtype)
    if rows >= MANY:
        outputs = min(outputs, max(64, _MOST // inputs))
        weight = random_numbers(outputs, inputs, dtype)
        return lambda: linear(x, weight), 2 * rows * inputs * outputs
    outputs = min(outputs, max(64, _PARAMETERS // inputs))
    copies = min(_COPIES, -(-_PARAMETERS // (inputs * outputs)))
    layers = nn.Sequential(*(_layer(random_numbers(outputs, inputs, dtype)) for _ in range(copies)))
    if pack is not None:
        pack(layers)
    each = list(layers)
    return lambda: [layer(x) for layer in each], 2 * rows * inputs * outputs * len(each)


def _layer(weight: Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return Linear(layer)


def _times(runs: Sequence[Callable[[], object]], clock: Clock) -> list[float]:
    """Seconds of the fastest call of each, which take turns."""
    for run in runs:
        run()  # kernels are chosen and compiled
    best, end = [math.inf] * len(runs), clock() + _SLICE_S
    for _ in range(_ROUNDS):
        for number, run in enumerate(runs):
            began = clock()
            run()
            best[number] = min(best[number], max(clock() - began, 1e-9))
        if clock() >= end:
            break
    return best
