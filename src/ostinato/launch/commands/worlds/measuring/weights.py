"""The weights to be measured: found by name, put into a slot of a gateway, and held there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ostinato.app.roles import open_roles
from ostinato.app.storage import EVALUATION_REF, home, open_follower, open_store
from ostinato.config import Config
from ostinato.core.errors import Conflict, NotFound
from ostinato.core.records import Arm, PolicyVersion
from ostinato.launch.commands.checks import check_same_model, check_start
from ostinato.launch.commands.up import launch
from ostinato.launch.commands.weights.versions import find_version
from ostinato.launch.placing.address import read_address
from ostinato.record.lock import hold
from ostinato.worlds.rollout.gateway import WorldGateway

NEWEST = "newest"
_NEWEST_REFS = (Arm.WORLD.value, "candidate", Arm.LIVE.value)
_LOOK_S = 0.1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """Weights in a slot of a gateway. `pinned`: nobody moves the slot meanwhile.

    Example: ``PlacedWeights(url="http://127.0.0.1:8321", slot="evaluation", policy=v7, pinned=True)``
    """

    url: str
    slot: str
    policy: PolicyVersion
    pinned: bool


async def at_gateway(config: Config, work: Callable[[str], Coroutine[Any, Any, _T]], say: Callable[[str], None]) -> _T:
    """Call `work` with the URL of the run's gateway and return its result. If no gateway is up, one is started for as long as that takes.

    Raises BadConfig, WorkerFailed if the gateway cannot be started or fails for good, Conflict if the run is just being started.
    """
    place = home(config)
    if (url := read_address(place.address)) is not None:
        return await work(url)
    await check_start(config)
    check_same_model(config)
    # the run's own settings file must stay what the run was started with
    settings = place.root / "measuring.json" if place.config.exists() else place.config
    listening = config.model_copy(update={"listen": config.listen.model_copy(update={"port": 0})})

    def told(worker: str, what: str) -> None:
        say(f"{worker}: {what}")

    async def served() -> _T:
        while (url := read_address(place.address)) is None:
            await asyncio.sleep(_LOOK_S)
        return await work(url)

    with hold(place.root, "up"):
        say(f"no gateway is running for {place.root}: starting one")
        try:
            async with launch(listening, told, front="serve", names=("serve",), settings=settings) as launched:
                return await launched.during(served())
        finally:
            if settings != place.config:
                settings.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def place_weights(config: Config, url: str, release: str) -> AsyncGenerator[PlacedWeights]:
    """Put the weights that `release` names (a ref, a number (v12), a root, or "newest") into a slot, and hold them there.

    Candidates are evaluated in the same slot, so it is held only if no release worker is up. While a release worker is up, "newest" is
    whatever the slot for worlds holds, which may move, and Conflict is raised for any other version or if there is no such slot. Raises
    NotFound, BadRequest.
    """
    place = home(config)
    async with contextlib.AsyncExitStack() as leaving:
        try:
            leaving.enter_context(contextlib.closing(open_roles(config).take("release")))
        except Conflict as error:
            if release != NEWEST:
                raise Conflict(
                    f"--release {release}: the release worker is running and holds the slot that a chosen version needs; leave out "
                    "--release, or measure while the release worker is stopped"
                ) from error
            yield await _unpinned(config, url)
            return
        version = await newest(config) if release == NEWEST else release
        policy = (await find_version(config, version)).policy
        store = open_store(config)
        before = await store.read_ref(EVALUATION_REF)
        await store.move_ref(EVALUATION_REF, before, policy.hash)
        leaving.push_async_callback(_put_back, config, before or await store.read_ref(Arm.LIVE.value))
        async with WorldGateway(url, place.admin_key(), slot=EVALUATION_REF) as gateway:
            while await gateway.holds() != policy:
                await asyncio.sleep(_LOOK_S)
        yield PlacedWeights(url=url, slot=EVALUATION_REF, policy=policy, pinned=True)


async def newest(config: Config) -> str:
    """The ref of the newest version: the highest number among those of rollouts, candidates and users. Raises NotFound."""
    follower = open_follower(config)
    found = [(policy, ref) for ref in _NEWEST_REFS if (policy := await follower.resolve(ref)) is not None]
    if not found:
        raise NotFound("the run has no version of its weights yet; start it once")
    return max(found, key=lambda each: each[0].number)[1]


async def _unpinned(config: Config, url: str) -> PlacedWeights:
    async with WorldGateway(url, home(config).admin_key()) as gateway:
        policy = await gateway.holds()
    if policy is None:
        raise Conflict(
            "the release worker is running, and the gateway has no slot for worlds because the run learns from people only "
            "(learn.source): measure while the release worker is stopped"
        )
    return PlacedWeights(url=url, slot=Arm.WORLD.value, policy=policy, pinned=False)


async def _put_back(config: Config, value: str | None) -> None:
    """Give the slot back what it held before, or weights that are loaded anyway."""
    store = open_store(config)
    now = await store.read_ref(EVALUATION_REF)
    if value is not None and now != value:
        await store.move_ref(EVALUATION_REF, now, value)
