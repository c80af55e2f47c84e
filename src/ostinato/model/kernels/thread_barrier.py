# pyright: basic, reportCallIssue=false
"""A barrier for the phases of one computation inside a kernel: threads share the work of each phase, without locks.

Each thread runs the same phases in the same order. In a phase it claims one piece of work after another until none is left, then waits
until all pieces are done, by whichever threads. It never waits for a particular thread: one that starts late finds the phases done and
passes through, and one that never starts delays nobody. Each computation has its own counters [phases, 16], initially zero.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.model.kernels.arithmetic import inlined, operation
from ostinato.model.kernels.processor import IS_ARM

TAKEN, DONE = 0, 8  # columns, on cache lines of their own
COLUMNS = 16
_LONG = ir.IntType(64)
_SPINS = 4000  # checks, about 50 us, before a waiting thread yields its core


def _counter(context: Any, builder: Any, kind: Any, counters: Any, phase: Any, column: Any) -> Any:
    made = context.make_array(kind)(context, builder, counters)
    at = builder.add(builder.mul(phase, ir.Constant(_LONG, COLUMNS)), column)
    return builder.gep(made.data, [at])


@intrinsic
def _increment(typingctx: Any, counters: Any, phase: Any, column: Any) -> Any:
    """Increment the counter atomically; return its old value."""
    del typingctx, phase, column

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _counter(context, builder, signature.args[0], *args)
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "acq_rel")

    return types.int64(counters, types.int64, types.int64), generate


@intrinsic
def _read(typingctx: Any, counters: Any, phase: Any, column: Any) -> Any:
    """Read the counter with acquire semantics: everything written before its increments is then visible."""
    del typingctx, phase, column

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature.args[0], *args), "acquire", 8)

    return types.int64(counters, types.int64, types.int64), generate


def _pausing(builder: Any, yielding: Any) -> None:
    if IS_ARM:
        hint = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        wait = cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint")
        builder.call(wait, [ir.Constant(ir.IntType(32), 1)])  # yield
    else:
        pause = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
    with builder.if_then(builder.trunc(yielding, ir.IntType(1))):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


_pause = operation(_pausing, types.void, types.boolean)
"""Pauses briefly; if its argument is true, yields the core to other threads."""


@inlined
def claim(counters, phase):
    """Claim the next piece of a phase's work; return its number, counted from 0. Beyond the last piece, no work is left."""
    return _increment(counters, phase, TAKEN)


@inlined
def finished(counters, phase):
    """Report that a piece is done."""
    _increment(counters, phase, DONE)


@inlined
def await_all(counters, phase, pieces):
    """Wait until all of the phase's pieces are done."""
    spins = 0
    while _read(counters, phase, DONE) < pieces:
        spins += 1
        _pause(spins > _SPINS)
