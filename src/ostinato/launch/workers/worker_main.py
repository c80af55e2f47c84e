"""The life cycle of a worker process: heartbeats, graceful shutdown, exit code and reported cause of a failure, exclusive roles.

A worker ends when its supervisor does. A worker whose role only one process of a run may have takes the role, keeps it while it works,
and ends when another process takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ostinato.app.roles import claim_refs, open_roles, wait_for
from ostinato.app.storage import Run, open_run
from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadWeights, LeaseLost, OstinatoError, StorageFull, Unauthorized, Unavailable
from ostinato.core.files import REFUSALS
from ostinato.core.memory import address_space_limited, free_memory, in_gib, is_short, process_limit
from ostinato.core.retry import Patience
from ostinato.launch.placing.heartbeat import Heartbeat, Sender, Sign, die_with_parent, supervisor_pipe
from ostinato.launch.placing.process import KEPT_BYTES, rotation
from ostinato.launch.workers.shutdown import CLEANING_S, Stopped, unless, until_stopped
from ostinato.record.roles import Tenure

logger = logging.getLogger(__name__)

EXIT_EXPECTED, EXIT_DEFECT = 2, 1  # exit codes
_ORPHAN_GRACE_S = 20.0  # grace period of a worker whose supervisor is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker's main loop is given: `stopping` is set when it must end, and it reports its current activity to `pulse`."""

    stopping: asyncio.Event
    pulse: Heartbeat

    def starting(self, config: Config) -> Callable[[str], None]:
        """Return a function that reports one step of the start. Each step may take `supervise.start_s`."""

        def say(what: str) -> None:
            logger.info("%s", what)
            self.pulse.begin(what, config.supervise.start_s)

        return say


def run_process(
    work: Callable[[WorkerContext], Coroutine[Any, Any, None]],
    *,
    expendable: int = 0,
    output_bytes: int = KEPT_BYTES,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> NoReturn:
    """Run a worker's main loop and end the process with exit code 0 when told to end, 2 for an expected error, 1 for a defect.

    The process ends when `work` does, even if threads are still computing: the next start repeats what they computed.

    Args:
        work: the main loop.
        expendable: the process's `oom_score_adj`, 0 to 1000. The higher, the sooner the kernel kills it when memory runs out.
        output_bytes: size beyond which the output file is rotated, if the supervisor opened it.
        loop_factory: makes the event loop.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    die_with_parent()
    with contextlib.suppress(OSError):  # not Linux, or a system that forbids it
        Path("/proc/self/oom_score_adj").write_text(str(expendable))
    if (rotating := rotation(output_bytes)) is not None:
        rotating.start()
    loop = loop_factory()
    asyncio.set_event_loop(loop)
    pulse, pipe = Heartbeat(), supervisor_pipe()
    sender = None if pipe is None else Sender(pulse, pipe, loop, _orphaned)
    code = 0
    try:
        loop.run_until_complete(_main(work, pulse, sender))
    except BaseException as error:  # noqa: BLE001 (the supervisor learns of every failure)
        code = _report_end(error, pulse, sender)
    with contextlib.suppress(OSError):  # the output's disk may be full
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    if rotating is not None:
        rotating.look()  # its last output counts too
    os._exit(code)


async def _main(
    work: Callable[[WorkerContext], Coroutine[Any, Any, None]], pulse: Heartbeat, sender: Sender | None
) -> None:
    context = WorkerContext(stopping=until_stopped(), pulse=pulse)
    if sender is not None:
        sender.start()
    telling = asyncio.create_task(_log_stop(context))
    try:
        await work(context)
    finally:
        telling.cancel()


async def _log_stop(context: WorkerContext) -> None:
    await context.stopping.wait()
    logger.info("told to end while %s", context.pulse.sign().doing)


def _report_end(error: BaseException, pulse: Heartbeat, sender: Sender | None) -> int:
    """Report why the worker ends to the supervisor and, if the disk is not full, on its output. Return the exit code."""
    cause = first_cause(error)
    if isinstance(cause, Stopped):
        return 0
    out_of_memory = is_short(cause)
    expected = isinstance(cause, OstinatoError) or out_of_memory
    if sender is not None:
        why = _out_of_memory_line(cause, pulse) if out_of_memory else f"{type(cause).__name__}: {cause}"
        hopeless = out_of_memory and address_space_limited() and not pulse.ready
        certain, outside = hopeless or isinstance(cause, BadConfig | BadWeights), _is_external(cause)
        sender.last_words(Sign(doing=pulse.sign().doing, failed=why, certain=certain, outside=outside))
    with contextlib.suppress(OSError):
        if expected:
            print(f"error {_out_of_memory_line(cause, pulse) if out_of_memory else cause}", file=sys.stderr)  # noqa: T201 (its output is the worker's log)
        else:
            traceback.print_exception(error)
    return EXIT_EXPECTED if expected else EXIT_DEFECT


def _out_of_memory_line(cause: BaseException, pulse: Heartbeat) -> str:
    """Return one line about an allocator's error: the activity that failed, the free memory and the remedy."""
    limit = min(filter(None, (free_memory(), process_limit())), key=lambda each: each.size, default=None)
    free = f"; {limit.bound} leaves {in_gib(limit.size)}" if limit else ""
    message = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return (
        f"out of memory while {pulse.sign().doing}{free}; use a smaller model (model.source), fewer streams (engine.kv_tokens, "
        f"engine.max_batch), smaller steps (learn.batch, train.turn_tokens), or raise the limit [{message}]"
    )


def _is_external(cause: BaseException) -> bool:
    """Return True for a cause outside the worker that may pass: a full or failing disk, a store or service that is unavailable or rejects
    our credentials, a lost role.
    """
    refused = isinstance(cause, OSError) and cause.errno in REFUSALS
    return refused or isinstance(cause, StorageFull | Unavailable | Unauthorized | LeaseLost)


def first_cause(error: BaseException) -> BaseException:
    """Return the most informative error of a (nested) exception group: the first expected one, otherwise the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(each) for each in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, OstinatoError)), causes[0])


def _orphaned() -> None:
    """End because the supervisor is gone: gracefully, or at once after `_ORPHAN_GRACE_S`. Called on the heartbeat's thread."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(EXIT_DEFECT)


# ---------------------------------------------------------------- exclusive roles


_ROLE_POLL_S = 0.2


async def run_in_role(
    config: Config,
    context: WorkerContext,
    role: str,
    work: Callable[[Run], Coroutine[Any, Any, None]],
    *,
    patient: bool = True,
) -> None:
    """Take the role, then run `work` on the run until it is done. Only one process has the role; on other hosts standbys wait for it.

    With `patient`, calls to a log whose server is unavailable wait for up to `record.away_s`, so that no work is left half done. Otherwise
    they raise Unavailable, which `work` must handle.

    Raises Conflict if another process of this machine has the role, LeaseLost once a process of another host took it over, Stopped.
    """
    roles = open_roles(config)
    if roles.pass_on:
        taking = wait_for(roles, role, lambda who: context.pulse.begin(f"in reserve: {who}"))
        tenure = await unless(context.stopping, taking)
    else:
        tenure = roles.take(role)

    async def claimed(run: Run) -> None:
        if tenure.token is not None:
            await claim_refs(run, role)
        await work(run)

    with closing(tenure), open_run(config, tenure, patience_of(config, context) if patient else None) as run:
        await _unless_lost(tenure, claimed(run))


def patience_of(config: Config, context: WorkerContext) -> Patience:
    """Return how long calls to the log wait for its server: `record.away_s`. Meanwhile the heartbeat says what they wait for."""
    return Patience(config.record.away_s, context.pulse.during)


async def _unless_lost(tenure: Tenure, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and raise what it raises. Once the role is lost, cancel it, give it `CLEANING_S` to clean up and raise LeaseLost."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not tenure.lost:
            await asyncio.wait({task}, timeout=_ROLE_POLL_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLEANING_S)
    if tenure.lost:
        tenure.check()
    await task
