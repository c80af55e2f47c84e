"""A Ray cluster: it says on which node a worker runs, and notices when a node is gone.

Ray itself is imported when a cluster is asked for: nothing else needs it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ostinato.core.errors import BadConfig, StorageFull, Unavailable
from ostinato.launch.placing.nodes.keeper import NodeKeeper
from ostinato.launch.placing.nodes.placed import Place
from ostinato.placing_config import RayConfig

_T = TypeVar("_T")


class OnRay(NodeKeeper):
    """A keeper that is an actor of Ray."""

    def __init__(self) -> None:
        super().__init__(str(_ray().util.get_node_ip_address()))


class RayCluster:
    """The cluster at `config.address`, as one driver of it.

    The workers of `crew` have a placement group: the nodes for all of them are taken at once, or not yet. Whoever else asks for a place,
    such as further rollout workers, gets one where there is room; where there is none Ray's autoscaler, if it runs, adds a node.

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
        bundles = [self._needs(name) for name in crew]
        self._group = self._ray.util.placement_group(bundles, strategy=config.strategy)

    def place_for(self, name: str, kind: str) -> Callable[[], Place]:
        """Asks for a place for the worker `name`, which takes what `kind` takes: a new one at each call."""
        return lambda: self._place(name, kind)

    def close(self) -> None:
        """Leave the cluster; what was placed ends."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _needs(self, kind: str) -> dict[str, float]:
        return {"CPU": self._config.cpus.get(kind, 1.0)} | self._config.resources.get(kind, {})

    def _place(self, name: str, kind: str) -> Place:
        needs = self._needs(kind)
        others = {key: amount for key, amount in needs.items() if key not in ("CPU", "GPU")}
        strategy: Any = "SPREAD"
        if name in self._crew:
            scheduling = importlib.import_module("ray.util.scheduling_strategies")
            strategy = scheduling.PlacementGroupSchedulingStrategy(self._group, self._crew.index(name))
        actor = (
            self._ray.remote(OnRay)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                resources=others,
                scheduling_strategy=strategy,
                max_restarts=0,  # the supervisor starts it again: it knows who hangs, and who can never run
            )
            .remote()
        )
        return _RayPlace(self._ray, actor, needs, self._config.patience_s)


class _RayPlace:
    """An actor, wherever Ray puts it."""

    def __init__(self, ray: Any, actor: Any, needs: Mapping[str, float], patience_s: float) -> None:
        self._ray, self._actor, self._needs = ray, actor, needs
        self.keeper = _Calls(ray, actor, patience_s)

    def wanting(self) -> str:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
        try:
            free, there = self._ray.available_resources(), self._ray.cluster_resources()
        except self._ray.exceptions.RayError as error:
            return f"waiting for Ray, which does not answer: {error}"
        rest = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in self._needs)
        return f"waiting for Ray to place it: it takes {wanted}; free are {rest}"

    def leave(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class _Calls:
    """A keeper's methods as calls to an actor. Raises Unavailable where the actor is gone, or silent for `patience_s`."""

    def __init__(self, ray: Any, actor: Any, patience_s: float) -> None:
        self._errors, self._actor, self._patience_s = ray.exceptions, actor, patience_s

    async def start(self, order: dict[str, str]) -> tuple[int, str]:
        pid, host = await self._answer(self._actor.start.remote(order))
        return pid, host

    async def look(self) -> dict[str, Any]:
        return await self._answer(self._actor.look.remote(), self._patience_s)

    async def tell(self, url: str) -> None:
        await self._answer(self._actor.tell.remote(url), self._patience_s)

    async def stop(self, grace_s: float) -> bool:
        return await self._answer(self._actor.stop.remote(grace_s), grace_s + self._patience_s)

    async def kill(self) -> None:
        await self._answer(self._actor.kill.remote(), self._patience_s)

    async def _answer(self, asked: Awaitable[_T], timeout_s: float | None = None) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError as error:
            raise Unavailable(f"its node did not answer for {timeout_s:g} s") from error
        except self._errors.RayTaskError as error:
            if isinstance(
                error.cause, OSError | StorageFull
            ):  # the node is short of something; its own words, without Ray's traceback
                raise error.cause from error
            raise Unavailable(f"Ray: {type(error.cause).__name__}: {error.cause}") from error
        except self._errors.RayActorError as error:
            raise Unavailable(f"its node or its actor is gone: {_first_line(error)}") from error
        except self._errors.RayError as error:
            raise Unavailable(f"Ray: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BadConfig(f"`--on ray` needs Ray ({error}): pip install 'ostinato[ray]'") from error
