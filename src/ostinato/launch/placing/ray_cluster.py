"""A Ray cluster, which chooses the node of each worker and notices when a node is gone.

Ray itself is imported only when a cluster is opened, because nothing else needs it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ostinato.core.errors import BadConfig, OstinatoError, Unavailable
from ostinato.launch.placing.remote_worker import NodeKeeper, NodePlace
from ostinato.placing_config import RayConfig

_T = TypeVar("_T")
_Amounts = Mapping[str, float]
_LOOK_S = 1.0
_START_S = 15.0  # added to `patience_s`, because a node puts files in place and starts a process


class NodeFailed(OstinatoError):
    """A node cannot do what it was asked. It may lack something that another node has."""

    code = "node_failed"


class OnRay(NodeKeeper):
    """A keeper that runs as a Ray actor."""

    def __init__(self) -> None:
        super().__init__(str(_ray().util.get_node_ip_address()))

    async def where(self) -> tuple[str, str]:
        """The node's address and its Ray node id, because several nodes may share an address."""
        return await self.here(), str(_ray().get_runtime_context().get_node_id())


class RayCluster:
    """A driver's connection to the cluster at `config.address`.

    The workers of `crew` share a placement group: Ray reserves the nodes for all of them at once, or for none yet. Any other worker, such
    as a further rollout worker, is placed where there is room; if there is none, Ray's autoscaler, if it runs, adds a node.

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
        self._room = _Asked(lambda: (self._ray.available_resources(), self._ray.cluster_resources()))
        self._draining = _Asked(_draining)
        try:
            bundles = [self._needs(name) for name in crew]
            self._group = self._ray.util.placement_group(bundles, strategy=config.strategy)
        except (self._ray.exceptions.RayError, TypeError, ValueError) as error:
            self._ray.shutdown()
            raise BadConfig(f"ray.cpus, ray.resources or ray.strategy: Ray accepts no such group: {error}") from error

    def place_for(self, name: str, kind: str) -> Callable[[], NodePlace]:
        """A function that requests a place for the worker `name` with the resources of `kind`; each call requests a new place."""
        return lambda: self._place(name, kind)

    async def leaving(self) -> frozenset[str]:
        """The ids of the nodes that Ray is draining: nothing new is placed there, and what runs there has some seconds left.

        Raises Unavailable and Ray's own errors.
        """
        return await self._draining.seen()

    def close(self) -> None:
        """Leave the cluster. All placed workers end."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _needs(self, kind: str) -> dict[str, float]:
        return {"CPU": self._config.cpus.get(kind, 1.0)} | self._config.resources.get(kind, {})

    def _place(self, name: str, kind: str) -> NodePlace:
        needs = self._needs(kind)
        others = {key: amount for key, amount in needs.items() if key not in ("CPU", "GPU", "memory")}
        strategy: Any = "SPREAD"
        if name in self._crew:
            scheduling = importlib.import_module("ray.util.scheduling_strategies")
            strategy = scheduling.PlacementGroupSchedulingStrategy(self._group, self._crew.index(name))
        actor = (
            self._ray.remote(OnRay)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=needs.get("memory"),
                resources=others,
                scheduling_strategy=strategy,
                max_restarts=0,  # the supervisor restarts it: it knows which workers hang and which can never run
            )
            .remote()
        )
        return _RayPlace(self._ray, actor, needs, self._room, self._config.patience_s)


class _Asked(Generic[_T]):
    """A query to Ray's head, which may be slow: a thread runs it at most once a second, and all callers share the answer."""

    def __init__(self, ask: Callable[[], _T]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[_T] | None = None
        self._asked_at = 0.0

    async def seen(self) -> _T:
        """The newest answer. Raises Unavailable if there is none within a second, and whatever `ask` raises."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now - self._asked_at >= _LOOK_S):
            self._asking, self._asked_at = asyncio.ensure_future(asyncio.to_thread(self._ask)), now
        asking = self._asking
        await asyncio.wait({asking}, timeout=_LOOK_S)
        if not asking.done():
            raise Unavailable("Ray's head (ray.address) does not answer; `ray status` there says whether it runs")
        return asking.result()


class _RayPlace:
    """An actor, wherever Ray puts it."""

    def __init__(
        self, ray: Any, actor: Any, needs: _Amounts, room: _Asked[tuple[_Amounts, _Amounts]], patience_s: float
    ) -> None:
        self._ray, self._actor, self._needs, self._room = ray, actor, needs, room
        self.keeper = _Calls(ray, actor, patience_s)

    @property
    def node_name(self) -> str:
        return self.keeper.node_name

    async def wanting(self) -> str:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
        try:
            free, there = await self._room.seen()
        except Exception as error:  # noqa: BLE001 (only a message is lost)
            return f"waiting for Ray to place it, which does not answer: it takes {wanted}; {_last_line(error)}"
        rest = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in self._needs)
        return f"waiting for Ray to place it: it takes {wanted}; free are {rest}"

    def leave(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class _Calls:
    """A keeper's methods as calls to an actor. Raises Unavailable if the actor is gone or silent for `patience_s`, NodeFailed if it can
    never work on that node, and OSError and Ostinato's own errors as the keeper raised them.
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
        except self._errors.RayTaskError as error:  # first: it is also of its cause's class, such as TimeoutError
            if isinstance(error.cause, OSError | OstinatoError):  # the cause itself, without Ray's traceback
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
    """The ids of draining nodes. Ray has no public API for this; empty if a version of Ray lacks the private one used here."""
    state = getattr(importlib.import_module("ray._private.state"), "state", None)
    asked = getattr(state, "get_draining_nodes", dict[str, int])
    return frozenset(asked())


def _last_line(error: Exception) -> str:
    """The last non-empty line of an error's text, which says what was wrong if the text is a remote traceback."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BadConfig(f"`--on ray` needs Ray ({error}): pip install 'ostinato[ray]'") from error
