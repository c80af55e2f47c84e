"""The release worker and the commands that look at releases: judge candidates, ship, guard, roll back."""

from __future__ import annotations

import asyncio
import logging

from rich.console import Console

from ostinato import app
from ostinato.config import Config
from ostinato.core.errors import NotFound, Unavailable
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.evaluate.statistics import suite_mean
from ostinato.launch.prepare import prepare
from ostinato.launch.stopping import until_stopped
from ostinato.record.lock import hold

logger = logging.getLogger(__name__)


def gateway_url(config: Config) -> str | None:
    """Where the run's gateway listens, or None before it has said so."""
    address = app.home(config).address
    return address.read_text().strip() if address.exists() else None


async def release(config: Config) -> None:
    """Judge candidates until told to stop. Raises Conflict if another release worker holds the run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    place = app.home(config)
    with hold(place.root, "release"):
        await prepare(config, logger.info)
        stopping = until_stopped()
        while (url := gateway_url(config)) is None and not stopping.is_set():
            await asyncio.sleep(0.5)
        with app.open_log(config) as log:
            controller = app.open_releases(config, log, app.open_evaluation(config, url or ""))
            await controller.run(stopping)


async def evaluate_slot(config: Config, slot: str, draws: int, console: Console) -> None:
    """Score one slot of the running gateway on the suite. Raises Unavailable if nothing is running."""
    url = gateway_url(config)
    if url is None:
        raise Unavailable("no gateway is running for this run; start one with `ostinato up`")
    policy = await app.Follower(app.open_store(config), config.follow).resolve(slot)
    if policy is None:
        raise NotFound(f"no ref {slot!r} in the weight store; use live, canary, control or evaluation", field="slot")
    runner = app.open_runner(config, url)
    with console.status(f"{len(runner.suite.items)} items x {draws} draws against {slot} = {policy}"):
        scores = await runner.run(slot, policy, range(draws))
    mean = suite_mean(scores)
    console.print(f"{runner.suite.name} ({runner.suite.hash[:12]}): {slot} = {policy}")
    console.print(
        f"score {mean.mean:.3f}  95% [{mean.lower:.3f}, {mean.upper:.3f}]  {len(runner.suite.items)} items, {draws} draws"
    )


async def roll_back(config: Config, number: int | None, reason: str, console: Console) -> None:
    """Move `live` back. Raises NotFound for a number that was never released."""
    with app.open_log(config) as log:
        controller = app.open_releases(config, log)
        target = None if number is None else await _released(log, number)
        event = await controller.rollback(target, reason)
    console.print(
        f"live is {event.policy} again (was {event.previous}); engines follow within {config.follow.interval_s:g} s"
    )


async def _released(log: app.SqlLog, number: int) -> PolicyVersion:
    known: set[int] = set()
    async for _, row in log.read(0, {ReleaseEvent}):
        assert isinstance(row, ReleaseEvent)
        if row.action == "shipped":
            known.add(row.policy.number)
            if row.policy.number == number:
                return row.policy
    raise NotFound(
        f"v{number} was never released; released: {', '.join(f'v{n}' for n in sorted(known)) or 'nothing'}",
        field="number",
    )
