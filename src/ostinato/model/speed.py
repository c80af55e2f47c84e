"""A start-up microbenchmark: which dtype is faster on this machine, and how many threads are worthwhile. Takes about a second.

It times the model's own matrix products, because a CPU's flags do not predict their speed. With AMX, fp32 was faster than bf16 under
kernels that did not use the tiles. Without bf16 instructions, a library may be five times as slow in bf16 as in fp32, or faster where
memory bandwidth is the limit.
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

FEW, MANY = 4, 128  # rows: decoding a few streams in the engine; a prompt, or the trainer's tokens
MARGIN = 1.1
"""fp32 is chosen only if it is faster than bf16 by more than this factor: weights are published in bf16, which takes half the memory."""
MIN_SPEEDUP = 1.25
"""Twice as many threads are worthwhile if they speed products up by at least this factor."""
_SHAPES = 2  # the number of the model's largest shapes to time
_PARAMETERS = 12 << 20  # of all matrices that a call with few rows reads: more than most caches hold
_MAX_COPIES = 64  # of one matrix: a tiny model fits into the cache in the engine too
_MAX_PARAMETERS = 2 << 20  # of the part of a matrix by which many rows are multiplied
_SLICE_S, _ROUNDS = 0.12, 8  # per comparison; the fastest round counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The measured speed of one matrix product of the model, in GFLOP/s.

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
    """The speeds of both dtypes on one thread, and of the faster one on 1, 2, 4, ... threads; the load average before, and the cores.

    Example: ``Speeds(dtypes=(), teams=(), load=0.1, cores=1)``
    """

    dtypes: tuple[Speed, ...]
    teams: tuple[Speed, ...]
    load: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other programs may have used the cores on which further threads were timed."""
        return self.load > self.cores / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChoice:
    """The choice that follows from the speeds. `bf16`: its speed relative to fp32. `teams`: by thread count, the speed relative to one
    thread, as far as timed. `threads`: the number up to which each doubling is worthwhile.

    Example: ``SpeedChoice(dtype="bfloat16", bf16=1.9, threads=2, teams={2: 1.8})``
    """

    dtype: DType
    bf16: float
    threads: int
    teams: dict[int, float]


def choose(speeds: Speeds) -> SpeedChoice:
    """Choose the faster dtype, with `MARGIN` in favour of bf16, and the number of threads. A pure function of the speeds.

    Without speeds the choice is bf16 on one thread. If the machine was busy, further threads are not considered.
    """
    bf16 = _factor(speeds.dtypes, lambda each: each.dtype, "bfloat16", "float32")
    teams = {
        count: _factor(speeds.teams, lambda each: each.threads, count, 1)
        for count in sorted({each.threads for each in speeds.teams} - {1})
    }
    threads = 1
    for count, factor in [] if speeds.busy else teams.items():
        if factor < MIN_SPEEDUP * teams.get(threads, 1.0):
            break
        threads = count
    return SpeedChoice(dtype="bfloat16" if bf16 * MARGIN >= 1 else "float32", bf16=bf16, threads=threads, teams=teams)


def is_whole(speeds: Speeds) -> bool:
    """Return whether `choose` can use these speeds: all finite and positive, each with its reference. Stored files may lack some."""
    if not all(0 < each.gflops < math.inf for each in (*speeds.dtypes, *speeds.teams)):
        return False
    try:
        choose(speeds)
    except (KeyError, ArithmeticError, ValueError):
        return False
    return True


def _factor(speeds: Sequence[Speed], what: Callable[[Speed], object], one: object, other: object) -> float:
    """Return the geometric mean, over products, of the speed of `one` relative to that of `other`; 1 without speeds."""
    gflops = {(each.inputs, each.outputs, each.rows, what(each)): each.gflops for each in speeds}
    factors = [speed / gflops[*key[:3], other] for key, speed in gflops.items() if key[3] == one]
    return math.exp(sum(map(math.log, factors)) / max(1, len(factors)))


def measure(path: Path, pack: Pack | None, cores: int, clock: Clock = time.perf_counter) -> Speeds:
    """Time the largest products of the model in a directory, with few and with many rows: both dtypes on one thread, then the faster dtype
    on 1, 2, 4, ... threads.

    With few rows a product is computed as in the engine, with matrices that `pack` converted and that are too large for the cache; with
    many rows as in the trainer. The compared variants alternate, so that another program slows all of them. Raises what `empty_model`
    raises.
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
    variants: list[tuple[DType, int]] = [(dtype, count) for dtype in dtypes for count in counts]
    times = _times([_with(count, runs[dtype][0]) for dtype, count in variants], clock)
    return [
        Speed(
            inputs=inputs,
            outputs=outputs,
            rows=rows,
            threads=count,
            dtype=dtype,
            gflops=runs[dtype][1] / seconds / 1e9,
        )
        for (dtype, count), seconds in zip(variants, times, strict=True)
    ]


def _with(count: int, run: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with team(count), torch.inference_mode():
            run()

    return call


def _run(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, pack: Pack | None
) -> tuple[Callable[[], object], int]:
    """Return a call that computes the product, and its number of floating-point operations."""
    x = random_numbers(rows, inputs, dtype)
    if rows >= MANY:
        outputs = min(outputs, max(64, _MAX_PARAMETERS // inputs))
        weight = random_numbers(outputs, inputs, dtype)
        return lambda: linear(x, weight), 2 * rows * inputs * outputs
    outputs = min(outputs, max(64, _PARAMETERS // inputs))
    copies = min(_MAX_COPIES, -(-_PARAMETERS // (inputs * outputs)))
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
    """Return the seconds of the fastest call of each, in alternation."""
    for run in runs:
        run()  # warm-up: chooses and compiles kernels
    best, end = [math.inf] * len(runs), clock() + _SLICE_S
    for _ in range(_ROUNDS):
        for number, run in enumerate(runs):
            began = clock()
            run()
            best[number] = min(best[number], max(clock() - began, 1e-9))
        if clock() >= end:
            break
    return best
