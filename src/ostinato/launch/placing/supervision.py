"""The supervisor: starts workers, receives their heartbeats, restarts those that die or hang, gives up on hopeless ones, stops them all.

A worker holds no authoritative state: everything is in the log and the weight store. So a restart is the remedy for every death. Serving
goes on without a trainer that cannot run. The restart policy is pure: it decides when a worker is hung, what its end means, and when a
restart cannot help. The status board is the file in which the supervisor reports on its workers to `ostinato status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError, StorageFull
from ostinato.core.files import REFUSALS, write_atomic
from ostinato.launch.placing.heartbeat import Sign
from ostinato.placing_config import SuperviseConfig
from ostinato.status.worker_status import WorkerStatus

# ---------------------------------------------------------------- the worker


class Worker(Protocol):
    """A worker that can be started, monitored and stopped repeatedly: a subprocess here, or an actor on a node of a cluster.

    `sign` is its last heartbeat, received at `heard` on the event loop's clock. `was_ready`: it has been ready at least once since the
    supervisor started.
    """

    name: str
    sign: Sign | None
    heard: float
    was_ready: bool

    @property
    def running(self) -> bool:
        """True between its start and its end."""
        ...

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 before the first."""
        ...

    @property
    def node(self) -> str:
        """The machine that it runs on; empty for this machine."""
        ...

    async def start(self) -> None:
        """Start it. Raises OSError or StorageFull if this machine lacks a resource, such as memory or disk space."""
        ...

    async def ended(self) -> int:
        """Wait for the end and return the exit code, or minus the signal number. By then all heartbeats have been received."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """Tell it to end, and kill it after `grace_s` seconds. Return True if it ended by itself."""
        ...

    async def kill(self) -> None:
        """Kill it at once, with every process that it started."""
        ...

    def last_line(self) -> str:
        """Return the last line of its output, for a worker that could not report why it ended."""
        ...


# ---------------------------------------------------------------- the restart policy


FIRST_PAUSE_S = 0.5
STEADY_S = 30.0
_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a process ended. `fault`: the process itself was the cause, so this counts as a failure. `certain`: a restart would fail too."""

    reason: str
    fault: bool
    certain: bool = False


def hung(sign: Sign | None, silent_s: float, limits: SuperviseConfig) -> str | None:
    """Return why the worker counts as hung, or None. `silent_s`: seconds since its last heartbeat or its start."""
    if silent_s > limits.silence_s:
        return f"gave no sign of life for {silent_s:.0f} s" + (f" while {sign.doing}" if sign else "")
    if sign is None:
        return None
    if sign.limit_s is not None and sign.for_s > sign.limit_s:
        return f"was {sign.doing} for {sign.for_s:.0f} s, longer than the {sign.limit_s:g} s allowed"
    if sign.lag_s > max(limits.silence_s, sign.limit_s or 0.0):
        return f"its event loop stood still for {sign.lag_s:.0f} s while {sign.doing}"
    return None


def ending(code: int, sign: Sign | None, last_line: str) -> Ending:
    """Interpret an exit code and the last heartbeat. The output's `last_line` is the reason if no heartbeat gives one."""
    if sign is not None and sign.failed is not None:
        return Ending(reason=sign.failed, fault=not sign.outside, certain=sign.certain)
    if code == 0:
        return Ending(reason="ended, as if it had been asked to", fault=False)
    if code < 0:
        known = -code in set(signal.Signals)  # few real-time signals have a name
        name = signal.Signals(-code).name if known else f"signal {-code}"
        crashed = -code in _CRASH_SIGNALS
        hint = "; is memory short?" if -code == signal.SIGKILL else ""
        return Ending(reason=f"{'crashed with' if crashed else 'was killed by'} {name}{hint}", fault=crashed)
    return Ending(reason=f"ended with code {code}" + (f": {last_line}" if last_line else ""), fault=True)


@dataclass(slots=True)
class Failures:
    """The restart policy of one worker: counts its ends on a monotonic clock, and decides whether and after which pause to restart it."""

    limits: SuperviseConfig
    faults: list[float] = field(default_factory=list[float])
    quick: int = 0

    def add(self, now: float, end: Ending, ran_s: float) -> None:
        """Count an end after `ran_s` seconds. Drops failures older than the window; a run of over `STEADY_S` resets the back-off."""
        self.faults = [at for at in self.faults if now - at <= self.limits.window_s] + [now] * end.fault
        self.quick = 1 if ran_s > STEADY_S else self.quick + 1

    @property
    def enough(self) -> bool:
        """True once the worker has failed too often to be restarted. Kills from outside are not failures."""
        return len(self.faults) >= self.limits.tries

    @property
    def wait_s(self) -> float:
        """The pause before the next start: exponential back-off over ends in quick succession."""
        return min(FIRST_PAUSE_S * 2 ** min(max(self.quick - 1, 0), 32), self.limits.longest_wait_s)


# ---------------------------------------------------------------- supervision


Event = Callable[[str, str], None]
"""Called with the worker's name and a message about an event."""
_HEAD_START_POLL_S = 0.1


class WorkerFailed(OstinatoError):
    """A worker failed for good: a restart cannot help. The message gives the worker's own reason."""

    code = "worker_failed"


class Condition(StrEnum):
    """A worker's state under supervision."""

    RUNNING = "running"
    WAITING = "waiting"  # for its next start
    STOPPED = "stopped"
    FAILED = "failed"  # for good


@dataclass(slots=True)
class Watched:
    """A supervised worker and its history. Times are Unix seconds. `reason`: how it last ended, at `reason_at`; `told`: set to end it."""

    worker: Worker
    condition: Condition = Condition.WAITING
    since: float = field(default_factory=wall_clock)
    restarts: int = 0
    reason: str | None = None
    reason_at: float | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def turn(self, condition: Condition) -> None:
        """Enter a condition at the current time."""
        self.condition, self.since = condition, wall_clock()


class Supervisor:
    """Keeps workers alive until told to stop, or until `front` fails for good (without a front: until any worker does).

    Args:
        crew: the workers.
        limits: the timeouts and retry limits.
        on_event: called with each event, as a message for people.
        before_start: called before each start, to prepare a worker's files.
        front: name of the worker that serves people. Any other worker that fails for good stays down while the rest go on. Once the
            front has been ready, it is restarted however often it ends, unless a restart cannot help. None: the permanent failure of
            any worker ends all.
        head_start_s: longest delay of the others' first start. They wait until the front has been ready or has ended, so that it has
            the processors of a small machine for itself while it starts.
    """

    def __init__(
        self,
        crew: Sequence[Worker],
        limits: SuperviseConfig,
        on_event: Event,
        before_start: Callable[[], None] = lambda: None,
        front: str | None = None,
        head_start_s: float = 0.0,
    ) -> None:
        self.watched = [Watched(worker) for worker in crew]
        self._limits, self._say, self._before_start = limits, on_event, before_start
        self._front = next((worker for worker in crew if worker.name == front), None)
        self._head_start_s = head_start_s
        self._stopped, self._group = False, asyncio.TaskGroup()
        self._keeping = dict[str, asyncio.Task[None]]()
        self._failed: WorkerFailed | None = None
        self._checked_at = 0.0

    def stop(self) -> None:
        """Tell `run` to stop all workers and return."""
        self._stopped = True
        for watched in self.watched:
            watched.told.set()

    def add(self, worker: Worker) -> None:
        """Start one more worker and keep it alive while `run` runs. No effect after `stop`."""
        if not self._stopped:
            watched = Watched(worker)
            self.watched.append(watched)
            self._keeping[worker.name] = self._group.create_task(self._keep(watched))

    async def remove(self, name: str) -> None:
        """Stop a worker that was added, wait for its end and forget it."""
        watched = next(each for each in self.watched if each.worker.name == name)
        watched.told.set()
        await asyncio.shield(self._keeping.pop(name))
        self.watched.remove(watched)

    async def run(self) -> None:
        """Run until `stop`, then stop all workers. Raises WorkerFailed if a worker's permanent failure ended the run."""
        async with self._group:
            for watched in self.watched:
                self._group.create_task(self._keep_after_head_start(watched))
        if self._failed is not None:
            raise self._failed

    async def _keep_after_head_start(self, watched: Watched) -> None:
        """Keep one of the initial workers alive, after the front's head start."""
        front = next((each for each in self.watched if each.worker is self._front), None)
        if front is not None and front is not watched:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._head_start_s):
                    while not (front.worker.was_ready or front.reason or watched.told.is_set()):
                        await _pause(watched, _HEAD_START_POLL_S)
        await self._keep(watched)

    async def _keep(self, watched: Watched) -> None:
        """Start one worker and restart it until it is told to stop or fails for good."""
        loop = asyncio.get_running_loop()
        worker, failures = watched.worker, Failures(self._limits)
        while not watched.told.is_set():
            started = loop.time()
            end = await self._run_once(watched)
            if end is None:
                watched.turn(Condition.STOPPED)
                return
            watched.reason, watched.reason_at = end.reason, wall_clock()
            failures.add(loop.time(), end, loop.time() - started)
            if end.certain or (failures.enough and not self._is_depended_on(worker)):
                watched.turn(Condition.FAILED)
                self._give_up(watched, len(failures.faults), certain=end.certain)
                return
            watched.turn(Condition.WAITING)
            watched.restarts += 1
            self._say(worker.name, f"{end.reason}; starts again in {failures.wait_s:.1f} s")
            await _pause(watched, failures.wait_s)
        watched.turn(Condition.STOPPED)

    def _is_depended_on(self, worker: Worker) -> bool:
        """Return True for a front that has served: the cause of its failures may pass, and late service is better than none."""
        return worker is self._front and worker.was_ready

    async def _run_once(self, watched: Watched) -> Ending | None:
        """Start the worker and return how it ended; None if it was told to stop."""
        worker = watched.worker
        try:
            self._before_start()
            if not await _unless_told(watched, worker.start()):
                return None
        except (OSError, StorageFull) as error:  # this machine lacks a resource: processes, memory, disk space
            refused = isinstance(error, StorageFull) or error.errno in REFUSALS
            return Ending(reason=f"could not be started: {error}", fault=not refused)
        watched.turn(Condition.RUNNING)
        if worker.pid:  # a worker on a node gets its pid later
            self._say(worker.name, f"started (pid {worker.pid})")
        return await self._wait_for_end(watched)

    async def _wait_for_end(self, watched: Watched) -> Ending | None:
        """Wait until the worker ends, kill it if it hangs, and return how it ended; None if it was told to stop."""
        worker = watched.worker
        ended = asyncio.ensure_future(worker.ended())
        stop = asyncio.ensure_future(watched.told.wait())
        why = None
        while why is None and not ended.done() and not stop.done():
            await asyncio.wait({ended, stop}, timeout=self._check_interval_s, return_when=asyncio.FIRST_COMPLETED)
            why = None if ended.done() else self._hung(worker)
        stop.cancel()
        if not ended.done():
            if why is not None:
                await worker.kill()
            elif not await worker.stop(self._limits.stop_s):
                self._say(worker.name, f"did not end within {self._limits.stop_s:g} s and was killed")
        code = await ended
        if why is not None:
            return Ending(reason=why, fault=True)
        return None if watched.told.is_set() else ending(code, worker.sign, worker.last_line())

    @property
    def _check_interval_s(self) -> float:
        return min(1.0, self._limits.silence_s / 4)

    def _hung(self, worker: Worker) -> str | None:
        """Return why the worker counts as hung, or None. If this process was suspended, all silences are counted from now on."""
        now = asyncio.get_running_loop().time()
        gap, self._checked_at = now - self._checked_at, now
        if gap > 4 * self._check_interval_s + 1.0:
            for each in self.watched:
                each.worker.heard = max(each.worker.heard, now)
        return hung(worker.sign, now - worker.heard, self._limits)

    def _give_up(self, watched: Watched, faults: int, *, certain: bool) -> None:
        name, front = watched.worker.name, self._front
        often = "" if certain else f" ({faults} failures in {self._limits.window_s:g} s)"
        why = f"cannot run{often}: {watched.reason}"
        if front is not None and front is not watched.worker:
            self._say(name, f"{why}; {front.name} goes on without it")
            return
        if self._failed is None:
            self._failed = WorkerFailed(f"{name} {why}")
        self.stop()


async def _unless_told(watched: Watched, start: Coroutine[Any, Any, None]) -> bool:
    """Start a worker unless it is told to end first, e.g. while it waits for imports. Return True if it was started."""
    starting, told = asyncio.ensure_future(start), asyncio.ensure_future(watched.told.wait())
    try:
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        starting.cancel()  # no effect once it is done
    await asyncio.wait({starting})
    if starting.cancelled():
        return False
    starting.result()
    return True


async def _pause(watched: Watched, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(watched.told.wait(), seconds)


# ---------------------------------------------------------------- the status board


BOARD_INTERVAL_S = 2.0


class Board:
    """Writes the status board of a supervisor's workers."""

    def __init__(self, path: Path, crew: Sequence[Watched]) -> None:
        self._path, self._crew = path, crew

    async def keep(self) -> None:
        """Write the board every `BOARD_INTERVAL_S` seconds until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(BOARD_INTERVAL_S)

    def write(self, ended: str | None = None) -> None:
        """Write the current state. A full disk is ignored: only the board is lost."""
        with contextlib.suppress(OSError):
            write_atomic(self._path, board_text(self._crew, ended), durable=False)


def board_text(crew: Sequence[Watched], ended: str | None = None) -> str:
    """Return the workers' current state as the text of the board's file."""
    now = wall_clock()
    workers = [asdict(_status(watched, now)) for watched in crew]
    shown: dict[str, Any] = {"at": now, "pid": os.getpid(), "ended": ended, "workers": workers}
    return json.dumps(shown, indent=1)


def _status(watched: Watched, now: float) -> WorkerStatus:
    """Return the current state of a worker."""
    sign = watched.worker.sign
    return WorkerStatus(
        name=watched.worker.name,
        pid=watched.worker.pid,
        condition=watched.condition.value,
        since=watched.since,
        doing="" if sign is None else sign.doing,
        doing_since=now if sign is None else now - sign.for_s,
        trouble=None if sign is None else sign.trouble,
        restarts=watched.restarts,
        reason=watched.reason,
        reason_at=watched.reason_at,
        node=watched.worker.node,
    )
