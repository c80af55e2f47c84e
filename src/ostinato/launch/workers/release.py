"""The release worker: evaluates candidates, ships or blocks them, and guards the live version."""

from __future__ import annotations

import asyncio
import logging

from ostinato.app import evaluation
from ostinato.app.branches import CopyWatch
from ostinato.app.storage import Run, home, serving_run
from ostinato.config import Config
from ostinato.core.errors import OstinatoError
from ostinato.evaluate.suites import Suite
from ostinato.launch.placing.address import await_gateway
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.prepare import await_prepared
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import WorkerContext, run_in_role
from ostinato.release.controller import ReleaseController

_PACE_S = 600.0

logger = logging.getLogger(__name__)


async def release(config: Config, context: WorkerContext) -> None:
    """Evaluate candidates until told to stop. Without a suite nothing ships by itself, but the live version is still guarded.

    Raises what `run_in_role` raises, and BadConfig for a suite that cannot be graded.
    """
    await run_in_role(config, context, "release", lambda run: _judge(run, context), patient=False)


async def _judge(run: Run, context: WorkerContext) -> None:
    config = run.config
    context.starting(config)("looking at the suite")
    evaluation.check_learner(config)
    suite = await unless(context.stopping, evaluation.check_suite(config)) if config.evaluate.suite else None
    context.pulse.begin("waiting for version 0")  # another worker makes it, with its own time limit
    await unless(context.stopping, await_prepared(run))
    await evaluation.note_suite(run)
    await evaluation.note_hearing(run)
    await evaluation.note_switched_off(run)
    gate, steps = None, None
    if suite is None:
        context.pulse.begin("guarding what is live; there is no suite, so nothing ships by itself")
    else:
        context.pulse.begin("waiting for the gateway")
        url = config.evaluate.gateway or await unless(context.stopping, await_gateway(home(serving_run(config))))
        gate, steps = evaluation.open_evaluation(config, url), evaluation.open_step_check(config, url)
        context.pulse.begin(f"judging candidates on {len(suite.items)} items of {suite.name}")
    monitors = evaluation.open_monitors(run)
    controller = evaluation.open_releases(run, gate, monitors, steps)
    copying = CopyWatch(run) if config.run.tenant else None

    def troubles() -> list[str | None]:
        return [controller.trouble, monitors.trouble, copying.trouble if copying else None]

    context.pulse.trouble = lambda: "; ".join(dict.fromkeys(filter(None, troubles()))) or None
    await monitors.refresh()  # an alarm from before this start must pause the first step
    progress = Progress(run.home.progress("release"), kept_bytes(config))
    background = [asyncio.create_task(record_pace(run, controller, suite, progress))]
    if copying is not None:
        background.append(asyncio.create_task(copying.run()))
    try:
        await asyncio.gather(controller.run(context.stopping), monitors.run(context.stopping))
    finally:
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        if copying is not None:
            copying.close()


async def record_pace(run: Run, controller: ReleaseController, suite: Suite | None, progress: Progress) -> None:
    """Until cancelled, write a progress line every `_PACE_S` seconds on how many releases the traffic can support, and after new verdicts
    record the suite's resolution in the log.
    """
    judged = 0
    while True:
        try:
            progress.paced(await controller.pace(gate_alpha=run.config.evaluate.gate.alpha))
            if suite is not None and controller.ledger.state.judged != judged:
                await evaluation.note_resolution(run, suite)
                judged = controller.ledger.state.judged
        except OstinatoError as error:
            logger.warning("release: no figures on the pace now: %s", error)
        await asyncio.sleep(_PACE_S)
