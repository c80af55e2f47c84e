"""Workers on the nodes of a Ray cluster. Ray chooses each worker's node; the supervisor polls it.

On the node a keeper (a Ray actor) writes the run's files, starts the worker as its subprocess, and relays its heartbeats. Ray itself is
imported only when a cluster is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ostinato import __version__
from ostinato.app.storage import Home
from ostinato.config import write_private
from ostinato.core.errors import BadConfig, OstinatoError, StorageFull, Unavailable
from ostinato.core.files import REFUSALS, write_atomic
from ostinato.launch.placing.address import reachable, write_address
from ostinato.launch.placing.heartbeat import Sign, read_sign
from ostinato.launch.placing.process import THREADS, WorkerProcess, own_command
from ostinato.placing_config import RayConfig
from ostinato.status.gateway_address import read_address

_T = TypeVar("_T")
_Resources = Mapping[str, float]

# ---------------------------------------------------------------- on the worker's node


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The request to start a worker on a node. `command`: the CLI command; `settings`: the configuration as JSON, with only the secrets
    that this worker needs; `home`: the run's directory on the node; `admin_key`: the run's own key, empty if the worker does not need it;
    `cwd`: the base of relative paths, if it exists on the node; `version`: the version of Ostinato, which must be the same on all nodes.
    """

    name: str
    command: str
    settings: str
    home: str
    admin_key: str
    cwd: str
    version: str = __version__

    def plain(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteState:
    """A worker's state as polled from its node. `line`: its last heartbeat, as sent; `silent_s`: seconds since that or since its start;
    `ready`: it has been ready since this start; `code`: its exit code, None while it runs; `url`: its URL, if it is the run's gateway.
    """

    line: str | None
    silent_s: float
    ready: bool
    code: int | None
    last_line: str
    url: str | None


class NodeKeeper:
    """The node's side of one worker: runs it as a subprocess that dies with the keeper. `host`: this node's address.

    The supervisor calls it remotely, so all arguments and results are plain values.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._worker: WorkerProcess | None = None
        self._ending: asyncio.Future[int] | None = None
        self._home = Home(Path())
        self._serves: str | None = None
        self._url_sent: str | None = None

    async def here(self) -> str:
        """Return the node's address."""
        return self._host

    async def start(self, order: dict[str, str]) -> int:
        """Start the worker and return its pid. Raises OSError, StorageFull, and BadConfig if the node has another version of Ostinato."""
        if (version := order.get("version")) != __version__:  # checked before anything else in the order is used
            raise BadConfig(
                f"{self._host} has ostinato {__version__}, `ostinato up` is {version}: install one version on all nodes"
            )
        request = Order(**order)
        self._home = Home(Path(request.home))
        self._home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if request.admin_key:
            write_private(self._home.root / "admin.key", request.admin_key)
        settings = self._home.config
        if request.command != "serve":  # workers may share the directory, but not their secrets
            settings = settings.with_name(f"config-{request.name}.json")
        write_private(settings, request.settings)
        directory = Path(request.cwd)
        self._worker = WorkerProcess(
            request.name,
            own_command(request.command, "--config", str(settings)),
            self._home.worker_log(request.command),
            env=THREADS,
            directory=directory if directory.is_dir() else None,
        )
        await self._worker.start()
        self._ending = asyncio.ensure_future(self._worker.ended())
        return self._worker.pid

    async def look(self) -> dict[str, Any]:
        """Return the worker's `RemoteState` as a dict."""
        worker, ending = self._started()
        if self._serves is None:  # read once, since other processes may overwrite the file
            self._serves = read_address(self._home.address, worker.pid)
        if self._url_sent is not None and read_address(self._home.address) is None:  # the process that wrote it is gone
            with contextlib.suppress(OSError):
                write_address(self._home.address, self._url_sent)
        code = ending.result() if ending.done() else None
        sign = worker.sign
        return asdict(
            RemoteState(
                line=None if sign is None else sign.line().decode(),
                silent_s=asyncio.get_running_loop().time() - worker.heard,
                ready=worker.was_ready,
                code=code,
                last_line=worker.last_line() if code is not None else "",
                url=self._serves,
            )
        )

    async def tell(self, url: str) -> None:
        """Write the URL of the run's gateway to the address file, for a worker that calls it. Raises OSError."""
        self._url_sent = url
        known = read_address(self._home.address)
        if known is None or reachable(known, self._host) != url:
            # a file that already has this URL may be the gateway's own, which must stay valid after this keeper's end
            write_address(self._home.address, url)

    async def put(self, name: str, text: str) -> None:
        """Write one of the run's files that `ostinato up` sends to the gateway's node. Raises OSError, and ValueError for another name."""
        if name not in (self._home.workers.name, self._home.draining.name):
            raise ValueError(f"{name} is no file that the gateway reads")
        write_atomic(self._home.root / name, text, durable=False)

    async def stop(self, grace_s: float) -> bool:
        return await self._started()[0].stop(grace_s)

    async def kill(self) -> None:
        await self._started()[0].kill()

    def _started(self) -> tuple[WorkerProcess, asyncio.Future[int]]:
        if self._worker is None or self._ending is None:
            raise RuntimeError("the worker was not started")
        return self._worker, self._ending


class RayKeeper(NodeKeeper):
    """A keeper that runs as a Ray actor."""

    def __init__(self) -> None:
        super().__init__(str(_ray().util.get_node_ip_address()))

    async def where(self) -> tuple[str, str]:
        """Return the node's address and its Ray node id, since several nodes may share an address."""
        return await self.here(), str(_ray().get_runtime_context().get_node_id())


# ---------------------------------------------------------------- on the supervisor's machine


POLL_S = 1.0
_STOP_MARGIN_S = 5.0
_FAILED = 1


class PlacedWorker:
    """A `Worker` on a node that the cluster chooses. Each start requests a new place (an actor).

    Args:
        name: the worker's name.
        order: sent to the node to start the worker.
        open_place: requests a place without waiting for it.
        on_placed: called with the worker's name and a message that names its node.
    """

    def __init__(
        self, name: str, order: Order, open_place: Callable[[], RayPlace], on_placed: Callable[[str, str], None]
    ) -> None:
        self.name, self.heard, self.was_ready = name, 0.0, False
        self.sign: Sign | None = None
        self.url: str | None = None
        """The gateway's URL, if this worker is the gateway."""
        self._order, self._open, self._say = order, open_place, on_placed
        self._place: RayPlace | None = None
        self._life: asyncio.Task[int] | None = None
        self._at, self._last_line = (0, ""), ""
        self._url_sent: str | None = None
        self._gateway_url: str | None = None
        self._files, self._files_sent = dict[str, str](), dict[str, str]()
        self._left = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._life is not None and not self._life.done()

    @property
    def pid(self) -> int:
        return self._at[0]

    @property
    def node(self) -> str:
        return self._at[1]

    @property
    def node_name(self) -> str:
        """The node's id in the cluster; empty while the worker has no node."""
        return self._place.node_name if self._place is not None and self.pid and self.running else ""

    async def start(self) -> None:
        self._place = None
        self._at, self._last_line, self.url, self._url_sent = (0, ""), "", None, None
        self._files_sent.clear()
        self._left = asyncio.Event()
        self._hear(Sign(doing="waiting for a node"))
        self._life = asyncio.create_task(self._run_until_left())

    async def ended(self) -> int:
        if self._life is None:
            raise RuntimeError(f"{self.name} was not started")
        return await asyncio.shield(self._life)

    async def stop(self, grace_s: float) -> bool:
        if not self.running:
            return True
        alone = not self.pid  # a worker that waits for a node has no process
        if self.pid and self._place is not None:
            with contextlib.suppress(Exception):  # whatever is wrong with the node, the place is released below
                async with asyncio.timeout(grace_s + _STOP_MARGIN_S):
                    alone = await self._place.keeper.stop(grace_s)
                    await self.ended()
        await self._leave()
        return alone

    async def kill(self) -> None:
        if self.running and self._place is not None and self.pid:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_STOP_MARGIN_S):
                    await self._place.keeper.kill()
                    await self.ended()
        await self._leave()

    def last_line(self) -> str:
        return self._last_line

    async def tell(self, url: str, grace_s: float) -> None:
        """Set the URL of the run's gateway. A worker that already has another URL is stopped, so that it restarts with the new one."""
        self._gateway_url = url
        if self._url_sent not in (None, url) and self.running:
            await self.stop(grace_s)

    def give(self, name: str, text: str) -> None:
        """Write a file of the run on this worker's node and on every node that it moves to later."""
        self._files[name] = text

    # ------------------------------------------------------------ life cycle

    async def _run_until_left(self) -> int:
        """Run from the request for a place until the worker ends or its place is released. Return the exit code."""
        hearing, left = asyncio.ensure_future(self._run_on_node()), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({hearing, left}, return_when=asyncio.FIRST_COMPLETED)
            return hearing.result() if hearing.done() else -signal.SIGKILL
        finally:
            hearing.cancel()
            left.cancel()
            await asyncio.wait({hearing})
            self.url = None
            if self._place is not None:
                with contextlib.suppress(Exception):  # the cluster may be gone
                    self._place.leave()

    async def _run_on_node(self) -> int:
        """Request a place, start the worker there and poll its node until the worker ends. Return the exit code."""
        try:
            self._place = place = self._open()
            await self._placed(place)
            while True:
                state = RemoteState(**await place.keeper.look())
                self._record_state(state)
                if state.code is not None:
                    self._last_line = state.last_line
                    return state.code
                await self._send_pending(place.keeper)
                await asyncio.sleep(POLL_S)
        except (Unavailable, StorageFull) as error:
            self._hear(Sign(doing=self._doing, failed=str(error), outside=True))
        except OSError as error:
            why_failed, outside = f"could not be started on its node: {error}", error.errno in REFUSALS
            self._hear(Sign(doing=self._doing, failed=why_failed, outside=outside))
        except Exception as error:  # noqa: BLE001 (one worker's failure must not end the others)
            # never `certain`: another node may have what this one lacks
            why = str(error) if isinstance(error, OstinatoError) else f"{type(error).__name__}: {error}"
            self._hear(Sign(doing=self._doing, failed=why))
        return _FAILED

    async def _placed(self, place: RayPlace) -> None:
        began = asyncio.get_running_loop().time()

        async def waiting() -> Sign:
            for_s = asyncio.get_running_loop().time() - began
            return Sign(doing="waiting for a node", for_s=for_s, trouble=await place.wanting())

        async def starting() -> Sign:
            return Sign(doing=f"starting on {node}")

        node = await self._await_with_signs(place.keeper.here(), waiting)
        pid = await self._await_with_signs(place.keeper.start(self._order.plain()), starting)
        self._at = (pid, node)
        self._hear(Sign(doing="starting"))
        self._say(self.name, f"placed on {node} (pid {pid})")

    async def _await_with_signs(self, call: Awaitable[_T], sign: Callable[[], Awaitable[Sign]]) -> _T:
        """Wait for an answer and return it. Until it arrives, `sign` replaces the worker's own heartbeats."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=POLL_S)
                if not answer.done():
                    self._hear(await sign())
            return answer.result()
        finally:
            answer.cancel()

    async def _send_pending(self, keeper: _KeeperCalls) -> None:
        """Send the node the URL and the files that it still lacks. After an OSError, such as a full disk, the next poll retries."""
        with contextlib.suppress(OSError):
            if self._gateway_url is not None and self._url_sent is None:
                await keeper.tell(self._gateway_url)
                self._url_sent = self._gateway_url
            for name, text in list(self._files.items()):
                if self._files_sent.get(name) != text:
                    await keeper.put(name, text)
                    self._files_sent[name] = text

    def _record_state(self, look: RemoteState) -> None:
        self.heard = asyncio.get_running_loop().time() - look.silent_s
        self.was_ready |= look.ready
        self.url = None if look.url is None else reachable(look.url, self.node)
        sign = None if look.line is None else read_sign(look.line.encode())
        if sign is not None:
            self.sign = sign

    @property
    def _doing(self) -> str:
        return "" if self.sign is None else self.sign.doing

    def _hear(self, sign: Sign) -> None:
        self.sign, self.heard = sign, asyncio.get_running_loop().time()

    async def _leave(self) -> None:
        self._left.set()
        await self.ended()


# ---------------------------------------------------------------- the cluster


class NodeFailed(OstinatoError):
    """A node cannot run the worker. It may lack something that another node has."""

    code = "node_failed"


class RayCluster:
    """The driver's connection to the Ray cluster at `config.address`.

    The workers of `crew` share a placement group: Ray reserves resources for all of them at once or for none. Any other worker, such as a
    further rollout worker, is placed where there is room; if there is none, Ray's autoscaler may add a node.

    Example::

        cluster = RayCluster(config.ray, ("serve", "train"))
        worker = PlacedWorker("train", order, cluster.place_for("train", "train"), say)
        cluster.close()
    """

    def __init__(self, config: RayConfig, crew: Sequence[str]) -> None:
        self._config, self._crew, self._ray = config, tuple(crew), _ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray.init(address=config.address, namespace="ostinato", log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadConfig(
                f"ray.address {config.address!r}: {error}; start a cluster with `ray start --head`, or name one that runs"
            ) from error
        self._room = _CachedQuery(lambda: (self._ray.available_resources(), self._ray.cluster_resources()))
        self._draining = _CachedQuery(_draining)
        try:
            bundles = [self._needs(name) for name in crew]
            self._group = self._ray.util.placement_group(bundles, strategy=config.strategy)
        except (self._ray.exceptions.RayError, TypeError, ValueError) as error:
            self._ray.shutdown()
            raise BadConfig(f"ray.cpus, ray.resources or ray.strategy: Ray accepts no such group: {error}") from error

    def place_for(self, name: str, kind: str) -> Callable[[], RayPlace]:
        """Return a function that requests a new place for the worker `name` with the resources of `kind`."""
        return lambda: self._place(name, kind)

    async def leaving(self) -> frozenset[str]:
        """Return the ids of the nodes that Ray is draining: no new actors are placed there, and those there must end within seconds.

        Raises Unavailable and Ray's own errors.
        """
        return await self._draining.seen()

    def close(self) -> None:
        """Leave the cluster. All placed workers end."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _needs(self, kind: str) -> dict[str, float]:
        return {"CPU": self._config.cpus.get(kind, 1.0)} | self._config.resources.get(kind, {})

    def _place(self, name: str, kind: str) -> RayPlace:
        needs = self._needs(kind)
        others = {key: amount for key, amount in needs.items() if key not in ("CPU", "GPU", "memory")}
        strategy: Any = "SPREAD"
        if name in self._crew:
            scheduling = importlib.import_module("ray.util.scheduling_strategies")
            strategy = scheduling.PlacementGroupSchedulingStrategy(self._group, self._crew.index(name))
        actor = (
            self._ray.remote(RayKeeper)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=needs.get("memory"),
                resources=others,
                scheduling_strategy=strategy,
                max_restarts=0,  # restarts are the supervisor's: only it knows which workers hang and which can never run
            )
            .remote()
        )
        return RayPlace(self._ray, actor, needs, self._room, self._config.patience_s)


_QUERY_INTERVAL_S = 1.0


class _CachedQuery(Generic[_T]):
    """A cached query to Ray's head, which may be slow: a thread runs it at most once a second, and all callers share the answer."""

    def __init__(self, ask: Callable[[], _T]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[_T] | None = None
        self._asked_at = 0.0

    async def seen(self) -> _T:
        """Return the newest answer. Raises Unavailable if there is none within a second, and whatever `ask` raises."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now - self._asked_at >= _QUERY_INTERVAL_S):
            self._asking, self._asked_at = asyncio.ensure_future(asyncio.to_thread(self._ask)), now
        asking = self._asking
        await asyncio.wait({asking}, timeout=_QUERY_INTERVAL_S)
        if not asking.done():
            raise Unavailable("Ray's head (ray.address) does not answer; `ray status` there says whether it runs")
        return asking.result()


class RayPlace:
    """An actor on a node that Ray chooses, or the pending request for it.

    `keeper.here` waits until the actor has a node. All methods of `keeper` raise Unavailable once the node is gone, and all but `here` also
    if the node does not answer in time.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        needs: _Resources,
        room: _CachedQuery[tuple[_Resources, _Resources]],
        patience_s: float,
    ) -> None:
        self._ray, self._actor, self._needs, self._room = ray, actor, needs, room
        self.keeper = _KeeperCalls(ray, actor, patience_s)

    @property
    def node_name(self) -> str:
        """The node's id in the cluster; empty until the actor has a node."""
        return self.keeper.node_name

    async def wanting(self) -> str:
        """Return a message that says which resources it waits for. Returns within a second or so."""
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
        try:
            free, there = await self._room.seen()
        except Exception as error:  # noqa: BLE001 (only a message is lost)
            return f"waiting for Ray to place it, which does not answer: it takes {wanted}; {_last_line(error)}"
        rest = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in self._needs)
        return f"waiting for Ray to place it: it takes {wanted}; free are {rest}"

    def leave(self) -> None:
        """Release the place. Whatever still runs there is killed."""
        self._ray.kill(self._actor, no_restart=True)


_START_S = 15.0  # added to `patience_s` for a start, which writes files and spawns a process


class _KeeperCalls:
    """`RayKeeper`'s methods as calls to the actor. They raise Unavailable if the actor is gone or does not answer for `patience_s`,
    NodeFailed if it can never work on that node, and the OSErrors and Ostinato errors that the keeper raised.
    """

    def __init__(self, ray: Any, actor: Any, patience_s: float) -> None:
        self._errors, self._actor, self._patience_s = ray.exceptions, actor, patience_s
        self.node_name = ""

    async def here(self) -> str:
        host, self.node_name = await self._answer(self._actor.where.remote(), None)
        return host

    async def start(self, order: dict[str, str]) -> int:
        return await self._answer(self._actor.start.remote(order), _START_S + self._patience_s)

    async def look(self) -> dict[str, Any]:
        return await self._answer(self._actor.look.remote(), self._patience_s)

    async def tell(self, url: str) -> None:
        await self._answer(self._actor.tell.remote(url), self._patience_s)

    async def put(self, name: str, text: str) -> None:
        await self._answer(self._actor.put.remote(name, text), self._patience_s)

    async def stop(self, grace_s: float) -> bool:
        return await self._answer(self._actor.stop.remote(grace_s), grace_s + self._patience_s)

    async def kill(self) -> None:
        await self._answer(self._actor.kill.remote(), self._patience_s)

    async def _answer(self, asked: Awaitable[_T], timeout_s: float | None) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        # must come first: it is also an instance of its cause's class, e.g. TimeoutError
        except self._errors.RayTaskError as error:
            if isinstance(error.cause, OSError | OstinatoError):  # raise the cause without Ray's traceback
                raise error.cause from error
            raise NodeFailed(f"its node failed: {type(error.cause).__name__}: {error.cause}") from error
        except self._errors.RayActorError as error:
            if error.actor_init_failed:
                raise NodeFailed(f"its node cannot keep a worker: {_last_line(error)}") from error
            raise Unavailable(f"its node or its actor is gone: {_last_line(error)}") from error
        except self._errors.RayError as error:
            raise Unavailable(f"Ray: {_last_line(error)}") from error
        except TimeoutError as error:
            raise Unavailable(f"its node did not answer for {timeout_s or 0:g} s") from error


def _draining() -> frozenset[str]:
    """Return the ids of draining nodes. Ray has no public API for this; empty if this version of Ray lacks the private one used here."""
    state = getattr(importlib.import_module("ray._private.state"), "state", None)
    asked = getattr(state, "get_draining_nodes", dict[str, int])
    return frozenset(asked())


def _last_line(error: Exception) -> str:
    """Return the last non-empty line of an error's text: in a remote traceback, the error itself."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BadConfig(f"`--on ray` needs Ray ({error}): pip install 'ostinato[ray]'") from error
