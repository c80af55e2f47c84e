"""A worker's process from its first moment to its last: it says what it does, ends with its supervisor, and says why it fails.

A worker with a role that only one process of a run may have takes it, keeps it while it works, and ends when another process takes it.
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
from ostinato.launch.placing.heartbeat import Heartbeat, Sender, Sign, die_with_parent, supervised
from ostinato.launch.placing.process import KEPT_BYTES, rotation
from ostinato.launch.workers.shutdown import CLEANING_S, Stopped, unless, until_stopped
from ostinato.record.roles import Tenure

logger = logging.getLogger(__name__)

EXPECTED, DEFECT = 2, 1  # exit codes
_ORPHAN_S = 20.0  # how long a worker without a supervisor may take to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Passed to a worker's main loop: `stopping` tells it to end, and it reports to `pulse` what it does."""

    stopping: asyncio.Event
    pulse: Heartbeat

    def starting(self, config: Config) -> Callable[[str], None]:
        """A function that reports one step of the start, which may take `supervise.start_s`."""

        def say(what: str) -> None:
            logger.info("%s", what)
            self.pulse.begin(what, config.supervise.start_s)

        return say


def live(
    work: Callable[[Life], Coroutine[Any, Any, None]],
    *,
    expendable: int = 0,
    output_bytes: int = KEPT_BYTES,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> NoReturn:
    """Run a worker's main loop and end the process: code 0 when told to end, 2 for an expected error, 1 for a defect.

    `expendable`, 0 to 1000, is its `oom_score_adj`: the higher, the sooner the kernel kills it when the machine runs out of memory.

    `output_bytes`: its output file is rotated beyond that size, if it is the supervisor's and not a file of the caller's own.

    `loop_factory` makes its event loop.

    The process ends when `work` does, even if threads are still computing: what they compute is computed again at the next start.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    die_with_parent()
    with contextlib.suppress(OSError):  # not Linux, or a system that forbids it
        Path("/proc/self/oom_score_adj").write_text(str(expendable))
    if (rotating := rotation(output_bytes)) is not None:
        rotating.start()
    loop = loop_factory()
    asyncio.set_event_loop(loop)
    pulse, pipe = Heartbeat(), supervised()
    sender = None if pipe is None else Sender(pulse, pipe, loop, _orphaned)
    code = 0
    try:
        loop.run_until_complete(_main(work, pulse, sender))
    except BaseException as error:  # noqa: BLE001 (whatever it is, the supervisor is told)
        code = _explain(error, pulse, sender)
    with contextlib.suppress(OSError):  # the disk that its output goes to may be full
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    if rotating is not None:
        rotating.look()  # at what it printed last
    os._exit(code)


async def _main(work: Callable[[Life], Coroutine[Any, Any, None]], pulse: Heartbeat, sender: Sender | None) -> None:
    life = Life(stopping=until_stopped(), pulse=pulse)
    if sender is not None:
        sender.start()
    telling = asyncio.create_task(_tell(life))
    try:
        await work(life)
    finally:
        telling.cancel()


async def _tell(life: Life) -> None:
    await life.stopping.wait()
    logger.info("told to end while %s", life.pulse.sign().doing)


def _explain(error: BaseException, pulse: Heartbeat, sender: Sender | None) -> int:
    """Say why the worker ends, to the supervisor and, if the disk is not full, on its output. Returns the exit code."""
    cause = first_cause(error)
    if isinstance(cause, Stopped):
        return 0
    short = is_short(cause)
    expected = isinstance(cause, OstinatoError) or short
    if sender is not None:
        why = _without_memory(cause, pulse) if short else f"{type(cause).__name__}: {cause}"
        hopeless = short and address_space_limited() and not pulse.ready
        certain, outside = hopeless or isinstance(cause, BadConfig | BadWeights), _passes(cause)
        sender.last_words(Sign(doing=pulse.sign().doing, failed=why, certain=certain, outside=outside))
    with contextlib.suppress(OSError):
        if expected:
            print(f"error {_without_memory(cause, pulse) if short else cause}", file=sys.stderr)  # noqa: T201 (its output is the worker's log)
        else:
            traceback.print_exception(error)
    return EXPECTED if expected else DEFECT


def _without_memory(cause: BaseException, pulse: Heartbeat) -> str:
    """One line for an allocator's error: what was done, what there is, and the remedy."""
    room = min(filter(None, (free_memory(), process_limit())), key=lambda each: each.size, default=None)
    left = f"; {room.bound} leaves {in_gib(room.size)}" if room else ""
    said = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return (
        f"out of memory while {pulse.sign().doing}{left}; use a smaller model (model.source), fewer streams (engine.kv_tokens, "
        f"engine.max_batch), smaller steps (learn.batch, train.turn_tokens), or raise the limit [{said}]"
    )


def _passes(cause: BaseException) -> bool:
    """True if the cause lies outside the worker and may pass: a disk that is full or fails, a store or service that is unavailable or
    refuses us, a lost role.
    """
    refused = isinstance(cause, OSError) and cause.errno in REFUSALS
    return refused or isinstance(cause, StorageFull | Unavailable | Unauthorized | LeaseLost)


def first_cause(error: BaseException) -> BaseException:
    """The most informative error of an exception group: an expected error before a defect."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(each) for each in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, OstinatoError)), causes[0])


def _orphaned() -> None:
    """The supervisor is gone: end as if told to, and if that takes too long, at once. Called on the pulse's thread."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_S)
    os._exit(DEFECT)


# ---------------------------------------------------------------- roles that one process holds


_LOOK_S = 0.2


async def act(
    config: Config,
    life: Life,
    role: str,
    work: Callable[[Run], Coroutine[Any, Any, None]],
    *,
    patient: bool = True,
) -> None:
    """Do `work` on the run as the one process that has the role, until it is done. In a run on several hosts the others wait in reserve.

    `patient`: calls to a log whose server is unavailable wait, `record.away_s` at most, so that nothing is left half done. Otherwise they
    raise Unavailable, and `work` handles that and goes on.

    Raises Conflict if another process of this machine has the role; LeaseLost once a process of another host took it over; Stopped.
    """
    roles = open_roles(config)
    if roles.pass_on:
        taking = wait_for(roles, role, lambda who: life.pulse.begin(f"in reserve: {who}"))
        tenure = await unless(life.stopping, taking)
    else:
        tenure = roles.take(role)

    async def claimed(run: Run) -> None:
        if tenure.token is not None:
            await claim_refs(run, role)
        await work(run)

    with closing(tenure), open_run(config, tenure, patience_of(config, life) if patient else None) as run:
        await _unless_lost(tenure, claimed(run))


def patience_of(config: Config, life: Life) -> Patience:
    """The patience of a log, `record.away_s`; while it waits, the pulse says what it waits for instead of what the worker does."""
    return Patience(config.record.away_s, life.pulse.during)


async def _unless_lost(tenure: Tenure, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; raises what it raises. Raises LeaseLost once the role is lost: `work` is then cancelled and has time to clean up."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not tenure.lost:
            await asyncio.wait({task}, timeout=_LOOK_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLEANING_S)
    if tenure.lost:
        tenure.check()
    await task
