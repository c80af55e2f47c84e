"""`ostinato up --on ray`: the same workers under the same supervisor, each on a node that Ray chooses."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import urllib.parse
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from ostinato.app.storage import Home, home
from ostinato.config import Config, plain, save
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.scaling import read_wish, write_wish
from ostinato.launch.commands.up import WORKERS, Launched, limits_of, supervised
from ostinato.launch.placing.address import read_address, write_address
from ostinato.launch.placing.nodes.cluster import RayCluster
from ostinato.launch.placing.nodes.keeper import Order
from ostinato.launch.placing.nodes.placed import PlacedWorker
from ostinato.launch.placing.supervision import Event, Supervisor

_LOOK_S = 0.5
_ASKING = ("release", "rollout")  # workers that call the gateway


def check_placeable(config: Config) -> None:
    """Raise BadConfig for a run whose workers cannot be on several machines."""
    if not config.record.url:
        raise BadConfig("`--on ray` needs a log that all nodes reach: name a Postgres database in record.url")
    if not config.weights.url:
        raise BadConfig("`--on ray` needs a weight store that all nodes reach: name a bucket in weights.url")
    known = {*WORKERS, "rollout"}
    for section, named in (("cpus", config.ray.cpus), ("resources", config.ray.resources)):
        if unknown := sorted(set(named) - known):
            raise BadConfig(f"ray.{section}.{unknown[0]}: no such worker; there are {', '.join(sorted(known))}")


@contextlib.asynccontextmanager
async def launch_on_ray(config: Config, say: Event) -> AsyncGenerator[Launched]:
    """A run's workers on a Ray cluster, alive inside the block and stopped after it. Whoever calls holds the run's lock `up`.

    Raises BadConfig if there is no such cluster, or the run cannot be on several machines.
    """
    check_placeable(config)
    place = home(config)
    save(config, place.config)
    cluster = RayCluster(config.ray, WORKERS)
    try:
        crew = Crew(config, place, cluster, say)
        supervisor = Supervisor(crew.workers, limits_of(config), say, front="serve")
        async with supervised(place, supervisor, "", lambda: crew.serving.url) as launched:
            write_wish(place.scale, config.ray.rollouts)
            keeping = asyncio.create_task(crew.keep(supervisor))
            try:
                yield launched
            finally:
                keeping.cancel()
                await asyncio.wait({keeping})
    finally:
        place.scale.unlink(missing_ok=True)
        cluster.close()


@dataclass(slots=True)
class Crew:
    """The workers of a run on a cluster: those that it always has, and as many that make rollouts as are wanted."""

    config: Config
    place: Home
    cluster: RayCluster
    say: Event
    workers: list[PlacedWorker] = field(default_factory=list[PlacedWorker])
    _admin_key: str = ""
    _told: str | None = None
    _out_of_reach: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])

    def __post_init__(self) -> None:
        self._admin_key = self.place.admin_key()
        self.workers += [self._worker(name, name) for name in WORKERS]

    @property
    def serving(self) -> PlacedWorker:
        """The gateway's worker."""
        return next(worker for worker in self.workers if worker.name == "serve")

    async def keep(self, supervisor: Supervisor) -> None:
        """As many rollout workers as are wanted, and all who ask the gateway told where it is. Until cancelled."""
        while True:
            if self.config.learn.source != "people":
                await self._scale(supervisor, read_wish(self.place.scale))
            if (url := self.serving.url) is not None:
                await self._tell(url)
            await asyncio.sleep(_LOOK_S)

    async def _scale(self, supervisor: Supervisor, wanted: int | None) -> None:
        there = [worker for worker in self.workers if worker.name not in WORKERS]
        if wanted is None or wanted == len(there):
            return
        if wanted > len(there):
            for number in range(len(there) + 1, wanted + 1):
                worker = self._worker("rollout" if number == 1 else f"rollout-{number}", "rollout", number - 1)
                self.workers.append(worker)
                supervisor.add(worker)
            return
        leaving = there[wanted:]
        await asyncio.gather(*(supervisor.remove(worker.name) for worker in leaving))
        for worker in leaving:
            self.workers.remove(worker)
            self.say(worker.name, "left: fewer are wanted")

    async def _tell(self, url: str) -> None:
        if url != self._told:
            self._told = url
            with contextlib.suppress(
                OSError
            ):  # for commands on this machine; they say so themselves if it is not there
                if read_address(self.place.address) != url:
                    write_address(self.place.address, url)
        for worker in self.workers:
            if worker.name.startswith(_ASKING):
                self._warn(url, worker)
                await worker.tell(url, self.config.supervise.stop_s)

    def _warn(self, url: str, worker: PlacedWorker) -> None:
        """Say once that a worker cannot reach the gateway."""
        pair = (worker.name, worker.node, url)
        if worker.node in ("", self.serving.node) or pair in self._out_of_reach or not _loopback(url):
            return
        self._out_of_reach.add(pair)
        what = f"is on {worker.node} and cannot reach {url} of {self.serving.node}; set listen.host to 0.0.0.0, and serve.api_keys"
        self.say(worker.name, what)

    def _worker(self, name: str, kind: str, before: int = 0) -> PlacedWorker:
        """`before`: how many of its kind there are already; each has an order of tasks of its own."""
        root = self.place.root.absolute()
        own = root if name == kind else root / name  # each rollout worker has a journal of its own
        run = self.config.run.model_copy(update={"directory": own})
        worlds = self.config.worlds.model_copy(update={"seed": self.config.worlds.seed + before})
        settings = self.config.model_copy(update={"run": run, "worlds": worlds})
        order = Order(
            name=name,
            command=kind,
            settings=json.dumps(plain(settings), indent=1),
            home=str(own),
            admin_key=self._admin_key,
            cwd=os.getcwd(),
        )
        return PlacedWorker(name, order, self.cluster.place_for(name, kind), self.say)


def _loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
