# pyright: basic, reportCallIssue=false
"""How threads share the phases of one computation inside a kernel, without locks or a barrier of all threads.

Each thread runs the same phases in the same order. In a phase it takes one piece of work after another until none is left, and goes on
when all pieces are done, by whichever threads. So a thread that comes late, or never, delays no other: a late one finds the phases done
and passes through. Counters [phases, 16], zeros at the start, belong to one computation.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.model.kernels.arithmetic import inlined, operation
from ostinato.model.kernels.processor import IS_ARM

TAKEN, DONE = 0, 8  # columns: a cache line each
COLUMNS = 16
_LONG = ir.IntType(64)
_PATIENCE = 4000  # checks, some 50 us, before a waiting thread offers its core to others


def _counter(context: Any, builder: Any, kind: Any, counters: Any, phase: Any, column: Any) -> Any:
    made = context.make_array(kind)(context, builder, counters)
    at = builder.add(builder.mul(phase, ir.Constant(_LONG, COLUMNS)), column)
    return builder.gep(made.data, [at])


@intrinsic
def _next(typingctx: Any, counters: Any, phase: Any, column: Any) -> Any:
    """Raise the counter by one, and return its value before."""
    del typingctx, phase, column

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _counter(context, builder, signature.args[0], *args)
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "acq_rel")

    return types.int64(counters, types.int64, types.int64), generate


@intrinsic
def _look(typingctx: Any, counters: Any, phase: Any, column: Any) -> Any:
    """The counter's current value; everything written before it was raised is then visible."""
    del typingctx, phase, column

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature.args[0], *args), "acquire", 8)

    return types.int64(counters, types.int64, types.int64), generate


def _resting(builder: Any, yielding: Any) -> None:
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


_rest = operation(_resting, types.void, types.boolean)
"""A short pause; if its argument is true, the core is offered to other threads."""


@inlined
def claim(counters, phase):
    """The number of a piece of work that no other thread does; a phase's pieces count from 0, and a number too high means none is left."""
    return _next(counters, phase, TAKEN)


@inlined
def finished(counters, phase):
    """Report that a piece is done."""
    _next(counters, phase, DONE)


@inlined
def await_all(counters, phase, pieces):
    """Wait until all of the phase's pieces are done."""
    looks = 0
    while _look(counters, phase, DONE) < pieces:
        looks += 1
        _rest(looks > _PATIENCE)
