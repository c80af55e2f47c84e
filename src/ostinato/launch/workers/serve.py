"""The serving worker: gateway and engine in one process, following the refs of the weight store."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import math
import resource
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.adapt.dials import DialAdaptation
from ostinato.app.branches import open_branches
from ostinato.app.evaluation import open_ledger
from ostinato.app.gateway import Serving, journal_of, open_serving
from ostinato.app.storage import Run, home, live_last, model_path, open_run, served_refs
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadWeights, OstinatoError, Unauthorized, Unavailable
from ostinato.core.interpreter import collecting_rarely, keep_heaps_small, settle, take_short_turns
from ostinato.core.records import Arm
from ostinato.core.seams import Engine, Log
from ostinato.core.weights import Snapshot
from ostinato.launch.placing.address import bind, handed_down, remove_address, write_address
from ostinato.launch.placing.heartbeat import SERVING
from ostinato.launch.views.audit import AuditFile
from ostinato.launch.views.numbers import LearningNumbers, RunNumbers, watch_alarms, watch_branches, watch_learning
from ostinato.launch.views.page import RunPage, open_page
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.http_server import listen
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import WorkerContext
from ostinato.model.kernels.cache import announced
from ostinato.record.roles import hold
from ostinato.release.alarms import note
from ostinato.release.ledger import ReleaseLedger
from ostinato.release.monitors.watcher import standing
from ostinato.serve.auth import check_bind, client_keys
from ostinato.serve.gateway import GatewayApp
from ostinato.serve.reader import RequestReader
from ostinato.serve.wire.connections import Connections
from ostinato.status.branches import BranchReader

# ---------------------------------------------------------------- loading weights


logger = logging.getLogger(__name__)

_POLL_S = 1.0
_DIALS_POLL_S = 20.0  # between two checks of how people's dials differ
_REPEAT_EVERY = 3  # checks after which the refused bases are recorded again: readers see only a file's newest lines
READER_ALARM = "serve:reader"
"""The alarm that is raised while the process that reads long requests fails."""
ALARM = "weights:{ref}"
"""The alarm that is raised while a ref's version cannot be loaded."""


def _is_about_other_ref(alarm: str, refs: Sequence[str]) -> bool:
    """Return True if the alarm is about a ref other than these."""
    return alarm.startswith(ALARM.format(ref="")) and alarm not in {ALARM.format(ref=ref) for ref in refs}


class WeightLoader:
    """Loads the versions that the refs point to, at the start and whenever a ref moves.

    Args:
        serving: the engine and the follower.
        log: receives an alarm for each ref whose version cannot be loaded.
        progress: receives a line for each swap.
        on_live: called when the live weights can be served for the first time.
    """

    def __init__(self, serving: Serving, log: Log, progress: Progress, on_live: Callable[[], None]) -> None:
        self._serving, self._log, self._progress, self._on_live = serving, log, progress, on_live
        self._loaded: set[str] = set()
        self._failing: dict[str, str] = {}
        self._reported: dict[str, str | None] = {}

    def trouble(self) -> str | None:
        """Return which refs cannot be loaded and why; None if all can."""
        return "; ".join(f"{ref} cannot be loaded: {why}" for ref, why in [*self._failing.items()]) or None

    async def run(self, refs: Sequence[str]) -> None:
        """Follow the refs until cancelled. Raises BadWeights if live was never loaded and its version never can be."""
        reporting = asyncio.create_task(self._report_alarms(refs))
        try:
            await self._serving.follower.watch(
                refs, self._load, on_error=self._failed, at_start=live_last(refs), on_recovered=self._recovered
            )
        finally:
            reporting.cancel()

    async def _load(self, slot: str, snapshot: Snapshot) -> None:
        swap = await self._serving.engine.load(slot, snapshot)
        if not self._loaded:  # the first weights; no request has been answered yet
            settle()
        if slot == Arm.LIVE and slot not in self._loaded:
            self._on_live()
        self._loaded.add(slot)
        self._failing.pop(slot, None)
        self._serving.gateway.state.metrics.swapped(swap)
        self._progress.swapped(swap)

    def _failed(self, ref: str, error: Exception) -> None:
        logger.error("ref %s: the weights stay as they are: %s", ref, error)
        if isinstance(error, BadWeights) and ref == Arm.LIVE and ref not in self._loaded:
            raise error
        self._failing[ref] = str(error)

    def _recovered(self, ref: str) -> None:
        """Clear a ref's failure when the store is readable again, even if it has nothing new to load."""
        self._failing.pop(ref, None)

    async def _report_alarms(self, refs: Sequence[str]) -> None:
        """Raise and clear the alarms until cancelled. First clear those about refs that an earlier process followed. Calls to a log that
        is unavailable are retried.
        """
        stale: set[str] | None = None
        while True:
            with contextlib.suppress(OstinatoError):
                if stale is None or stale:
                    stale = {name for name in await standing(self._log) if _is_about_other_ref(name, refs)}
                for name in stale:
                    await note(self._log, name, raised=False, why="this ref is not followed any more", at=wall_clock())
            for ref in self._loaded | self._failing.keys():
                why = self._failing.get(ref)
                if self._reported.get(ref, "") == why:
                    continue
                try:
                    await note(
                        self._log,
                        ALARM.format(ref=ref),
                        raised=why is not None,
                        why=why or f"the version of {ref} is loaded",
                        at=wall_clock(),
                    )
                    self._reported[ref] = why
                except OstinatoError as error:
                    logger.warning("the alarm about %s is not written yet: %s", ref, error)
            await asyncio.sleep(_POLL_S)


# ---------------------------------------------------------------- open files


_MAX_OPEN_FILES = 65_536  # even where the system sets no limit, since open files take memory
_CONNECTIONS_SHARE = 0.8  # the rest is for the log, the weights and the engine


def room_for_connections() -> int:
    """Raise this process's limit of open files as far as allowed. Return how many of them may be connections."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, _MAX_OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems report no limit but have one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
    return int(min(soft, _MAX_OPEN_FILES) * _CONNECTIONS_SHARE)


# ---------------------------------------------------------------- the worker


_CLOSE_S = 5.0  # an engine that hangs is not waited for any longer


class EngineDied(OstinatoError):
    """The engine died or hangs. The worker must be restarted: only a new process gets a new engine."""

    code = "engine_failed"


async def serve(config: Config, context: WorkerContext) -> None:
    """Serve until told to stop. The address is bound before the model is loaded.

    Raises BadConfig for a public address without keys or an address in use, Conflict if the run is already served, BadWeights if the live
    version can never be loaded and was not before, EngineDied if the engine died or hangs.
    """
    keep_heaps_small()
    check_bind(config.listen.host, client_keys(config.serve.api_keys, config.serve.api_keys_file))
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold(home(config).root, "serve"))
        listener = handed_down() or bind(config.listen.host, config.listen.port)
        run = stack.enter_context(open_run(config))
        starting = context.starting(config)
        path = await unless(context.stopping, _prepared(run, starting))
        starting("loading the model")
        audit = AuditFile(run.home.audit)
        branches = BranchReader(stack.enter_context(open_branches(run.config)))
        page = stack.enter_context(open_page(run, audit, branches)) if config.serve.page else None
        progress = Progress(run.home.progress("serve"), kept_bytes(run.config))
        with announced(starting), collecting_rarely():
            serving = await unless(
                context.stopping, open_serving(run, path, page and page.routes, progress.lent, audit)
            )
        await _run(run, serving, listener, context, page, progress, branches)


async def _prepared(run: Run, say: Callable[[str], None]) -> Path:
    """As `prepare`. If the weight store is unavailable or rejects our credentials, a gateway that has served before and has a cache starts
    with the version that it served last, from the cache, and needs only the model's files.
    """
    try:
        return await prepare(run, say)
    except (Unavailable, Unauthorized) as error:
        served = journal_of(run.config).entries.get(Arm.LIVE.value)
        if run.config.follow.cache is None or served is None or served.have is None:
            raise
        logger.warning("starting with what was served last: %s", error)
        return await asyncio.to_thread(model_path, run.config, say)


class ReadinessReporter:
    """Reports the gateway's URL and readiness: to the address file, the heartbeat and the log file."""

    def __init__(self, context: WorkerContext, address: Path) -> None:
        self._context, self._address = context, address
        self._url, self._live = "", False
        self.loaded = asyncio.Event()

    def answering(self, url: str) -> None:
        """Report that the gateway accepts connections at this URL."""
        write_address(self._address, url)
        self._url = url
        self._context.pulse.ready = True
        self._say()

    def live(self) -> None:
        """Report that the live weights are loaded."""
        self._live = True
        self.loaded.set()
        self._say()

    def _say(self) -> None:
        if self._url:
            doing = f"{SERVING} {self._url}" if self._live else f"waiting for weights to serve at {self._url}"
            self._context.pulse.begin(doing)
            logger.info("%s", doing)


async def _run(
    run: Run,
    serving: Serving,
    listener: socket.socket,
    context: WorkerContext,
    page: RunPage | None,
    progress: Progress,
    branches: BranchReader,
) -> None:
    take_short_turns()  # not before: while the model loads, nobody waits for an answer, and frequent thread switches only cost time
    engine, address = serving.engine, run.home.address
    contract = engine.contract()
    if contract is not None:
        logger.info("numerics contract %s (%s)", contract.id, contract.mode)
    if serving.numerics is not None:
        logger.log(logging.WARNING if serving.numerics.why else logging.INFO, "%s", serving.numerics)
        progress.computing(serving.numerics)
    readiness, config = ReadinessReporter(context, address), run.config.serve
    connections = Connections(most=room_for_connections(), per_address=config.connections_per_address)
    numbers, learning, ledger = RunNumbers(run.home.workers), _learning_of(run), open_ledger(run)
    for each in (numbers, learning):
        serving.gateway.state.metrics.registry.register(each)
    loader = WeightLoader(serving, run.log, progress, readiness.live)
    context.pulse.trouble = loader.trouble
    await engine.start()
    try:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(loader.run(served_refs(run.config))),
                group.create_task(watch_engine(engine, _engine_timeout_s(run.config))),
                group.create_task(watch_reader(serving.reader, run.log)),
                group.create_task(watch_alarms(run.log, numbers.alarms)),
                group.create_task(watch_learning(run.log, run.folds, ledger, learning)),
                group.create_task(watch_branches(branches, run.home.workers, learning)),
                group.create_task(follow_trial(ledger, serving.gateway, run.config.release.verified_share)),
                group.create_task(import_deferred(readiness.loaded)),
                *([] if page is None else [group.create_task(page.keep(context.stopping))]),
                *([] if serving.lending is None else [group.create_task(serving.lending.run())]),
            ]
            if serving.router is not None:
                background.append(group.create_task(serving.router.run()))
            if serving.adaptation is not None:
                background.append(group.create_task(record_dials(serving.adaptation, progress)))
            await listen(
                serving.gateway,
                listener,
                context.stopping,
                readiness.answering,
                connections=connections,
                unread_s=config.send_timeout_s,
                keep_alive_s=config.keep_alive_s,
            )
            for task in background:
                task.cancel()
        if serving.router is not None:
            await serving.router.save()
    finally:
        remove_address(address)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), _CLOSE_S)


DEFERRED_IMPORTS = ("aiohttp",)
"""Modules that only actions on the page need. They are imported once the gateway answers, so that the start is faster."""


async def import_deferred(loaded: asyncio.Event) -> None:
    """Import `DEFERRED_IMPORTS` on a thread, once the live weights are loaded."""
    await loaded.wait()
    for name in DEFERRED_IMPORTS:
        await asyncio.to_thread(importlib.import_module, name)


async def watch_reader(reader: RequestReader, log: Log) -> None:
    """Until cancelled, raise an alarm when the process that reads long requests fails, and clear it once it answers again."""
    reported, may_be_raised = 0, True  # an earlier process may have raised it
    while True:
        failures, why = reader.failures, reader.trouble
        if failures > reported or (may_be_raised and reader.answers and not why):
            with contextlib.suppress(OstinatoError):  # retried
                raised = failures > reported
                reason = (why or "it ended") if raised else "long requests are read in a process of their own"
                await note(log, READER_ALARM, raised=raised, why=reason, at=wall_clock())
                reported, may_be_raised = failures, raised
        await asyncio.sleep(_POLL_S)


async def follow_trial(ledger: ReleaseLedger, gateway: GatewayApp, verified: float) -> None:
    """Until cancelled, assign users to releases as the ledger says at every change, a share `verified` of them to the verified
    release.
    """
    while True:
        with contextlib.suppress(OstinatoError):  # the shares stay as they are while the log is unavailable
            gateway.deal((await ledger.refresh()).dealt(verified))
        await asyncio.sleep(_POLL_S)


def _learning_of(run: Run) -> LearningNumbers:
    home, late = run.home, run.config.reward.surrogate.truth_after_s > 0
    return LearningNumbers(
        adapt=run.config.adapt, serve=home.progress("serve"), train=home.progress("train") if late else None
    )


async def record_dials(adaptation: DialAdaptation, progress: Progress) -> None:
    """Until cancelled, record the spread of people's dials and the refused bases whenever they change. Refused bases are also recorded
    every minute.
    """
    recorded, refused = None, None
    for look in itertools.count():
        await asyncio.sleep(_DIALS_POLL_S)
        if [*adaptation.refused] != refused or (refused and look % _REPEAT_EVERY == 0):
            refused = [*adaptation.refused]
            progress.bases(refused)
        with contextlib.suppress(OstinatoError):  # keys or states are unavailable; retried
            spread = await adaptation.spread()
            if spread is not None and spread != recorded:
                progress.dials(spread)
                recorded = spread


def _engine_timeout_s(config: Config) -> float:
    """Return how long the engine may make no progress. No limit for vLLM: that engine itself sets hanging servers aside."""
    return math.inf if config.engine.kind == "vllm" else config.supervise.engine_s


async def watch_engine(engine: Engine, longest_s: float) -> None:
    """Watch the engine until cancelled. Raises EngineDied once it is dead, or has work but finished no step or command for `longest_s`."""
    loop = asyncio.get_running_loop()
    last_progress, since = -1.0, loop.time()
    while True:
        try:
            stats = engine.stats()
        except Unavailable as error:
            raise EngineDied(str(error)) from error
        busy = sum(stats.get(name, 0.0) for name in ("running", "waiting", "orders_open")) > 0
        progress, now = stats.get("steps", 0.0) + stats.get("orders_done", 0.0), loop.time()
        if not busy or progress != last_progress:
            last_progress, since = progress, now
        if now - since > longest_s:
            raise EngineDied(f"the engine has finished no step or command for {now - since:.0f} s, with work waiting")
        await asyncio.sleep(_POLL_S)
        # time in which this whole process was suspended does not count
        since += max(0.0, loop.time() - now - 2 * _POLL_S)
