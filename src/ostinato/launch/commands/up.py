"""`ostinato up`: checks the configuration and runs the workers under one supervisor.

`ostinato up --on ray`: the same workers under the same supervisor, each on a node that Ray chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import urllib.parse
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Literal

from rich.console import Console
from rich.text import Text

from ostinato.app.storage import Home, home
from ostinato.config import Config, plain, save
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.checks import check_same_model, check_start, network_warning
from ostinato.launch.commands.compute import ShareController, check_sharing, read_requested, write_requested
from ostinato.launch.commands.crew import WORKERS, Launched, launch, supervised
from ostinato.launch.placing.address import reachable, write_address
from ostinato.launch.placing.heartbeat import SERVING
from ostinato.launch.placing.ray_cluster import Order, PlacedWorker, RayCluster
from ostinato.launch.placing.supervision import BOARD_INTERVAL_S, Event, Supervisor, board_text
from ostinato.launch.workers.shutdown import until_stopped
from ostinato.record.restore import sweep_restorations
from ostinato.record.roles import hold
from ostinato.serve.auth import Keyring, client_keys
from ostinato.serve.quotas import in_force
from ostinato.status.config_warnings import config_warnings
from ostinato.status.gateway_address import read_address
from ostinato.status.progress_lines import last_lines, numerics_line


async def up(config: Config, console: Console, on: Literal["here", "ray"] = "here") -> None:
    """Run until Ctrl-C, SIGTERM or SIGHUP, with the workers on this machine or on the nodes of a Ray cluster.

    Raises Conflict if the run is up already, BadConfig for workers that cannot be placed, WorkerFailed if the serving worker fails for
    good.
    """
    await check_start(config, on_ray=on == "ray")
    check_same_model(config)
    check_sharing(config, on_ray=on == "ray")

    say = partial(_tell, console)
    with hold(home(config).root, "up"):
        with contextlib.suppress(OSError):  # housekeeping retries
            sweep_restorations(home(config).log, math.inf)  # none is in progress: it would hold the lock
        if not config.record.url and (words := network_warning(config.run.directory)):
            say("log", words)
        if not config.evaluate.suite:
            by_hand = "nothing ships by itself; `ostinato ship` does it by hand"
            say("release", f"no suite (evaluate.suite): it learns, and {by_hand}")
        for worker, words in config_warnings(config).items():
            say(worker, words, "bold yellow")
        async with _launching(config, say, on) as launched:
            stopping = until_stopped()  # after the launch, since Ray sets signal handlers too
            if launched.url:
                _show(console, Text(f"reserved {launched.url}; it answers once the model is loaded"))
            announcing = asyncio.create_task(_announce(launched, config, console))
            try:
                await launched.during(stopping.wait())
            finally:
                announcing.cancel()


def _launching(config: Config, say: Event, on: str) -> contextlib.AbstractAsyncContextManager[Launched]:
    return launch(config, say, front="serve") if on == "here" else launch_on_ray(config, say)


def _show(console: Console, line: Text) -> None:
    """Print a line. An output that cannot be written, e.g. on a full disk, must not stop the workers."""
    with contextlib.suppress(OSError):
        console.print(line, highlight=False, soft_wrap=True)


def _tell(console: Console, worker: str, words: str, style: str = "") -> None:
    _show(console, Text.assemble((f"{worker:12}", "bold"), " ", (words, style)))


def _limits(config: Config) -> str:
    """Return each tenant's limits in words; "" with a single tenant."""
    tenants = Keyring(client_keys(config.serve.api_keys, config.serve.api_keys_file)).tenants
    return f"limits: {in_force(config.serve, tenants)}" if len(tenants) > 1 else ""


async def _announce(launched: Launched, config: Config, console: Console) -> None:
    """Until cancelled, show the serving worker's activity until it is ready, then its URLs, and from then on its troubles."""
    tell, troubled, shown, url = partial(_tell, console, "serve"), "", "", None
    started = asyncio.get_running_loop().time()
    with contextlib.suppress(OSError), console.status("starting") as status:
        while (url := launched.address()) is None or not launched.doing("serve").startswith(SERVING):
            doing = launched.doing("serve")
            waited = asyncio.get_running_loop().time() - started
            status.update(Text(f"serve: {doing} ({waited:.0f} s)"))
            if doing != shown and not console.is_terminal:
                tell(doing)
            shown = doing
            troubled = _show_trouble(launched, tell, troubled)
            await asyncio.sleep(0.2)
    if url is not None:
        model = (config.model.served_as, "bold")
        _show(console, Text.assemble("\nserving ", (f"{url}/v1", "bold"), "  model ", model, "  (Ctrl-C stops)"))
        page = ("; so does the page at ", (f"{url}/", "bold")) if config.serve.page else ()
        _show(console, Text.assemble("`ostinato status`, with the same options, says how it learns", *page, "\n"))
        if words := _limits(config):
            tell(words)
        if words := numerics_line(last_lines(launched.home.progress("serve"))):
            tell(words, "yellow")
    while True:
        troubled = _show_trouble(launched, tell, troubled)
        await asyncio.sleep(1.0)


def _show_trouble(launched: Launched, tell: Callable[[str, str], None], known: str) -> str:
    """Show the serving worker's trouble if it is not the `known` one. Return it."""
    trouble = launched.trouble("serve")
    if trouble and trouble != known:
        tell(trouble, "red")
    return trouble


# ---------------------------------------------------------------- on the nodes of a cluster


_POLL_S = 0.5
_GATEWAY_CALLERS = ("release", "rollout")  # workers that call the gateway
_MIN_AMOUNT = 0.0001  # Ray's resolution: smaller amounts of a resource count as zero


def check_placeable(config: Config) -> None:
    """Raise BadConfig for a run whose workers cannot be placed on several machines."""
    if not config.record.url:
        raise BadConfig("`--on ray` needs a log that all nodes reach: name a Postgres database in record.url")
    if not config.weights.url:
        raise BadConfig("`--on ray` needs a weight store that all nodes reach: name a bucket in weights.url")
    check_sharing(config, on_ray=True)
    known = (*WORKERS, "rollout")
    for section, named in (("cpus", config.ray.cpus), ("resources", config.ray.resources)):
        if unknown := sorted(set(named) - set(known)):
            raise BadConfig(f"ray.{section}.{unknown[0]}: no such worker; there are {', '.join(sorted(known))}")
    for worker in known:
        _check_amounts(config, worker)


def _with_reserved_threads(config: Config) -> Config:
    """Return the configuration with `engine.threads` set: by default the CPUs reserved for serving, not all those of its node."""
    if config.engine.threads:
        return config
    reserved = max(1, int(config.ray.cpus.get("serve", 1.0)))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"threads": reserved})})


def _check_amounts(config: Config, worker: str) -> None:
    """Raise BadConfig for amounts of resources that Ray would refuse for a worker."""
    cpus, others = config.ray.cpus.get(worker, 1.0), config.ray.resources.get(worker, {})
    named = {f"ray.cpus.{worker}": cpus} | {f"ray.resources.{worker}.{name}": each for name, each in others.items()}
    for key, amount in named.items():
        if not math.isfinite(amount) or amount < 0 or 0 < amount < _MIN_AMOUNT:
            raise BadConfig(f"{key} is {amount:g}; give 0, or {_MIN_AMOUNT:g} and more")
    if others.get("GPU", 0) > 1 and others["GPU"] % 1:
        raise BadConfig(f"ray.resources.{worker}.GPU is {others['GPU']:g}; give a share of one GPU, or a whole number")
    if "object_store_memory" in others:
        raise BadConfig(f"ray.resources.{worker}.object_store_memory: a worker uses none; leave it out")
    if worker in WORKERS and not any({"CPU": cpus, **others}.values()):
        nothing = f"ray.cpus.{worker} is 0, and it takes nothing else"
        raise BadConfig(f"{nothing}: give it {_MIN_AMOUNT:g} or more, so that Ray has a place to keep")


@contextlib.asynccontextmanager
async def launch_on_ray(config: Config, say: Event) -> AsyncGenerator[Launched]:
    """Run a run's workers on a Ray cluster inside the block, and stop them after it. The caller must hold the run's `up` lock.

    Raises BadConfig if there is no such cluster, or the run cannot be placed on several machines.
    """
    check_placeable(config)
    place, config = home(config), _with_reserved_threads(config)
    save(config, place.config)
    cluster = RayCluster(config.ray, WORKERS)
    try:
        crew = Crew(config, place, cluster, say)
        supervisor = Supervisor(crew.workers, config.supervise, say, front="serve")
        async with supervised(place, supervisor, "", lambda: crew.serving.url) as launched:
            write_requested(place.scale, config.ray.rollouts)
            keeping = {asyncio.create_task(crew.keep(supervisor))}
            if config.compute.share:
                keeping.add(asyncio.create_task(ShareController(config, say).keep()))
            try:
                yield launched
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.wait(keeping)
    finally:
        place.scale.unlink(missing_ok=True)
        cluster.close()


class Crew:
    """The workers of a run on a cluster: those that every run has, and the requested number of rollout workers."""

    def __init__(self, config: Config, place: Home, cluster: RayCluster, say: Event) -> None:
        self.config, self.place, self.cluster, self.say = config, place, cluster, say
        self._admin_key = place.admin_key()  # read once, since the gateway keeps the key that it started with
        self._shown_at, self._failing, self._out_of_reach = 0.0, dict[str, str](), set[tuple[str, str, str]]()
        self.workers = [self._worker(name, name) for name in WORKERS]

    @property
    def serving(self) -> PlacedWorker:
        return next(worker for worker in self.workers if worker.name == "serve")

    async def keep(self, supervisor: Supervisor) -> None:
        """Until cancelled, adjust the number of rollout workers, send workers the gateway's URL, send the gateway's node the files of this
        machine that it reads, and stop workers on draining nodes. A failure is reported once and retried.
        """
        parts = {
            "scaling": self._scale,
            "telling the workers": self._tell,
            "telling the gateway": self._show,
            "leaving nodes": self._move,
        }
        while True:
            for name, part in parts.items():
                try:
                    await part(supervisor)
                    self._failing.pop(name, None)
                except Exception as error:  # noqa: BLE001 (one part's failure must not silently end the others)
                    what = f"{name} failed and is tried again: {type(error).__name__}: {error}"
                    if self._failing.get(name) != what:
                        self.say("up", what)
                    self._failing[name] = what
            await asyncio.sleep(_POLL_S)

    async def _scale(self, supervisor: Supervisor) -> None:
        wanted = None if self.config.learn.source == "people" else read_requested(self.place.scale)
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

    async def _tell(self, _: Supervisor) -> None:
        url = self.serving.url
        if url is None:
            return
        with contextlib.suppress(OSError):  # the file is only for commands on this machine, which report it if missing
            known = read_address(self.place.address)
            if known is None or reachable(known, self.serving.node) != url:
                write_address(self.place.address, url)
        asking = [worker for worker in self.workers if worker.name.startswith(_GATEWAY_CALLERS)]
        for worker in asking:
            self._warn(url, worker)
        await asyncio.gather(*(worker.tell(url, self.config.supervise.stop_s) for worker in asking))

    async def _show(self, supervisor: Supervisor) -> None:
        """Send the gateway's node the status board, for `/metrics` and the page, and the list of draining engine servers."""
        if (now := asyncio.get_running_loop().time()) - self._shown_at >= BOARD_INTERVAL_S:
            self._shown_at = now
            self.serving.give(self.place.workers.name, board_text(supervisor.watched))
        draining = self.place.draining
        self.serving.give(draining.name, draining.read_text(errors="replace") if draining.exists() else "")

    async def _move(self, _: Supervisor) -> None:
        """Stop the workers on draining nodes while they still have time to end. They are restarted elsewhere."""
        leaving = await self.cluster.leaving()
        going = [worker for worker in self.workers if worker.node_name and worker.node_name in leaving]
        for worker in going:
            self.say(worker.name, f"leaves {worker.node}, which Ray removes")
        await asyncio.gather(*(worker.stop(self.config.supervise.stop_s) for worker in going))

    def _warn(self, url: str, worker: PlacedWorker) -> None:
        """Report once that a worker cannot reach the gateway."""
        pair = (worker.name, worker.node, url)
        if worker.node in ("", self.serving.node) or pair in self._out_of_reach or not _loopback(url):
            return
        self._out_of_reach.add(pair)
        what = f"is on {worker.node} and cannot reach {url} of {self.serving.node}; set listen.host to 0.0.0.0, and serve.api_keys"
        self.say(worker.name, what)

    def _worker(self, name: str, kind: str, before: int = 0) -> PlacedWorker:
        """Make a worker. `before`: number of earlier ones of its kind, added to the seed, so that each draws tasks in its own order."""
        root = self.place.root.absolute()
        own = root if name == kind else root / name  # each rollout worker has its own journal
        run = self.config.run.model_copy(update={"directory": own})
        worlds = self.config.worlds.model_copy(update={"seed": self.config.worlds.seed + before})
        settings = self.config.model_copy(update={"run": run, "worlds": worlds})
        if kind != "serve":  # only the gateway authenticates callers
            callers = {"api_keys": (), "api_keys_file": None, "user_keys": (), "admin_key": None, "metrics_key": None}
            settings = settings.model_copy(update={"serve": settings.serve.model_copy(update=callers)})
        order = Order(
            name=name,
            command=kind,
            settings=json.dumps(plain(settings), indent=1),
            home=str(own),
            admin_key=self._admin_key if kind in ("serve", *_GATEWAY_CALLERS) else "",
            cwd=os.getcwd(),
        )
        return PlacedWorker(name, order, self.cluster.place_for(name, kind), self.say)


def _loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
