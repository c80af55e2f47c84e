"""The serving worker's objects: an engine, the gateway in front of it, and the follower that fetches its weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.styles import StyleAdaptation
from ostinato.app import numerics
from ostinato.app.memory import check_memory
from ostinato.app.numerics import NumericsMode
from ostinato.app.server_loans import Lending, Lent, check_lending, read_draining
from ostinato.app.storage import Run, home, live_last, open_cached_store, open_follower, served_refs, store_place
from ostinato.config import Config
from ostinato.core.arm_assignment import BRANCH_REFS, BRANCHES
from ostinato.core.audit import Audit, unaudited
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, OstinatoError, Unauthorized, Unavailable
from ostinato.core.memory import process_limit
from ostinato.core.records import Arm
from ostinato.core.seams import Engine, Renderer
from ostinato.record.person_cache import SqlPersonCache
from ostinato.release.alarms import note
from ostinato.release.auto.router import FoldedRouter
from ostinato.serve.calls.context import LEAST_SHARE
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import GatewayApp, Page, create_app
from ostinato.serve.reader import RequestReader
from ostinato.weights.follow.follower import Follower
from ostinato.weights.follow.journal import Journal

if TYPE_CHECKING:  # slow to import, so the serving process imports it on a thread
    from ostinato.model.renderer import HFRenderer

_LOG = logging.getLogger(__name__)

NO_CHAT = "model:chat"
"""The name of the alarm that is raised while the model has no chat template."""
_MIN_ROOM = 2_048  # tokens for instructions and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The serving worker's parts: an engine that is not started yet, the gateway over it, and the follower that fetches its weights.

    `router`: draws among Auto's arms. `lending`: lends servers to rollouts. `numerics`: the numerics mode of an engine in this process.
    `adaptation`: applies people's dials; None if they are off. `reader`: parses long requests. `ahead`: prefetches the follower's first
    version, see `_prefetch`.
    """

    engine: Engine
    gateway: GatewayApp
    follower: Follower
    router: FoldedRouter | None
    lending: Lending | None = None
    numerics: NumericsMode | None = None
    adaptation: DialAdaptation | None = None
    reader: RequestReader
    ahead: asyncio.Task[None] | None = None


async def open_serving(
    run: Run,
    model: Path,
    page: Callable[[Renderer], Page] | None = None,
    lent: Callable[[Lent], None] = lambda _: None,
    audit: Audit = unaudited,
) -> Serving:
    """Build the engine and the gateway of a run, and record the engine's contract in the log. Raises BadConfig, Unavailable.

    `page` makes the run's browser page, behind the gateway's keys. `lent` receives the state of lending. `audit` receives misuse of keys
    and choices.
    """
    config = run.config
    check_lending(config)
    follower = Follower(open_cached_store(config), config.follow, journal_of(config))
    renderer, ahead = await _open_renderer(config, model, follower)
    await check_chat(run, renderer, model)
    run.log.derive_text(spelling(renderer))
    engine = await _engine(run, model, renderer)
    check_window(config.serve, min(renderer.context, engine.capabilities().context))
    contract = engine.contract()
    if contract is not None:
        await numerics.stamp(run.log, contract)
    router = _router(run)
    if router is not None:
        await router.catch_up()
    adaptation, styles = _adaptation(run, engine, renderer), _styles(run)
    reader = RequestReader(model, depth=config.serve.max_depth, values=config.serve.max_values)
    gateway = create_app(
        engine=engine,
        renderer=renderer,
        log=run.log,
        config=config.serve,
        clock=wall_clock,
        model_name=config.model.served_as,
        admin_keys=[SecretStr(run.home.admin_key())],  # the release worker's
        dealer=None if router is None else router.router,
        page=None if page is None else page(renderer),
        adaptation=adaptation,
        styles=styles,
        room=None if config.record.url else lambda: shutil.disk_usage(run.home.root).free,
        audit=audit,
        privacy=config.privacy,
        trained=config.learn.tenants,
        reader=reader,
    )
    lending = _lending(config, engine, gateway, lent)
    mode = None if config.engine.kind == "vllm" else await asyncio.to_thread(numerics.numerics_mode, config)
    return Serving(
        engine=engine,
        gateway=gateway,
        follower=follower,
        router=router,
        lending=lending,
        numerics=mode,
        adaptation=adaptation,
        reader=reader,
        ahead=ahead,
    )


async def _open_renderer(
    config: Config, model: Path, follower: Follower
) -> tuple[HFRenderer, asyncio.Task[None] | None]:
    """Build the renderer while `_prefetch` runs; return both. Raises BadConfig.

    A run that was served before may now be on another machine, or have other code or settings. Then what is not cached for this machine is
    measured first, while nothing else computes.
    """
    if _was_served(config):
        await asyncio.to_thread(numerics.engine_contract, config)
        await asyncio.to_thread(numerics.engine_threads, config)
    ahead = _prefetch(config, model, follower)
    return await _build_renderer(model, grammars=ahead is not None), ahead


def _was_served(config: Config) -> bool:
    """Return whether an engine in this process has loaded the run's live version before."""
    served = journal_of(config).entries.get(Arm.LIVE.value)
    return config.engine.kind != "vllm" and served is not None and served.have is not None


def _prefetch(config: Config, model: Path, follower: Follower) -> asyncio.Task[None] | None:
    """Start fetching the version that the follower will deliver first, so that it is decoded while the rest starts.

    None if the run was never served: a first start measures this machine, and nothing should compute during that. Errors are left to the
    follower. Raises BadConfig for a model that does not fit into memory.
    """
    if not _was_served(config):
        return None
    check_memory(config, model, ("serve",), process_limit(), held=0)  # before allocating

    async def fetch() -> None:
        for ref in live_last(served_refs(config)):
            with contextlib.suppress(OstinatoError, OSError):
                if (policy := await follower.resolve(ref)) is not None:
                    await follower.fetch(policy)
                    return

    return asyncio.create_task(fetch())


async def _build_renderer(model: Path, grammars: bool) -> HFRenderer:
    """Build the renderer and, with `grammars`, also its grammars, which are otherwise built on first use."""
    from ostinato.model.renderer import HFRenderer

    def make() -> HFRenderer:
        made = HFRenderer(model)
        if grammars:
            _ = made.grammars
        return made

    return await asyncio.to_thread(make)  # on a thread, so that the worker can still be told to stop


async def _engine(run: Run, model: Path, renderer: HFRenderer) -> Engine:
    config = run.config
    if config.engine.kind != "vllm":
        return await open_embedded(config, model, renderer, await branch_versions(run))
    if config.serve.branches:
        raise BadConfig(
            "serve.branches needs the embedded engine (engine.kind); leave it out, or serve the tenant by a run of its own"
        )
    return await _vllm(run, model, renderer)


async def check_chat(run: Run, renderer: HFRenderer, model: Path) -> None:
    """Record in the log whether the model has a chat template. Raises BadConfig if it has none and rollouts need one."""
    why = f"{model} has no chat template, so only /v1/completions can be answered; put its chat_template.jinja beside tokenizer.json"
    if not renderer.chats and run.config.learn.source != "people":
        raise BadConfig(f"{why}: rollouts in simulated worlds (learn.source) are chats")
    if not renderer.chats:
        _LOG.warning("%s", why)
    with contextlib.suppress(OstinatoError):  # the next start records it
        said = "the model has a chat template" if renderer.chats else why
        await note(run.log, NO_CHAT, raised=not renderer.chats, why=said, at=wall_clock())


def check_window(config: ServeConfig, context: int) -> None:
    """Warn if summaries within calls (context_management) leave too little of the context for an agent's instructions and tools."""
    room = int(config.compaction_share * context) - context // LEAST_SHARE
    if room < _MIN_ROOM:
        _LOG.warning(
            "Of a context of %d tokens, summaries within calls (context_management) leave %d for instructions and tools: calls that need "
            "more are refused. Serve a model with a longer context, or raise serve.compaction_share.",
            context,
            room,
        )


def journal_of(config: Config) -> Journal:
    """Return the engine's journal of the versions it served, from which it starts while the weight store is unavailable."""
    return Journal(home(config).root / "follow.json")


def _lending(config: Config, engine: Engine, gateway: GatewayApp, lent: Callable[[Lent], None]) -> Lending | None:
    """Return the lending of servers to rollouts; None if it is off."""
    if not config.compute.lend.most:
        return None
    from ostinato.engine.vllm.engine import VllmEngine

    assert isinstance(engine, VllmEngine), "checked before"
    return Lending(
        engine.loans,
        gateway.state.waits,
        config.compute.lend,
        lambda: engine.stats()["lent_tokens"],
        lent,
        wall_clock,
    )


def _router(run: Run) -> FoldedRouter | None:
    """Return the router that draws among Auto's arms; None if there are none."""
    auto = run.config.serve.auto
    arms = [arm.name for arm in auto.arms]
    if not arms:
        return None
    return FoldedRouter(run.log, run.folds, wall_clock, arms, run.config.release.auto, auto.episodes)


def _adaptation(run: Run, engine: Engine, renderer: HFRenderer) -> DialAdaptation | None:
    """Return the component that applies people's dials; None if dials are off. Raises BadConfig for an engine that cannot steer."""
    config = run.config
    if config.adapt.mode == "off":
        return None
    if engine.capabilities().steers == "no":
        raise BadConfig(
            f"adapt.mode is {config.adapt.mode!r}, and this engine cannot steer answers (engine.kind); set it to 'off'"
        )
    cache = SqlPersonCache(run.home.people, run.log.keys, config.record.encrypt, most=config.adapt.most_states)
    protected = protected_ids(config, renderer)
    return DialAdaptation(run.log, cache, config.adapt, protected=protected, consent=config.privacy.at_most)


def _styles(run: Run) -> StyleAdaptation | None:
    """Return the component that assigns styles to people; None if there are none."""
    config = run.config
    if not config.adapt.styles.prompts:
        return None
    cache = SqlPersonCache(run.home.styles, run.log.keys, config.record.encrypt, most=config.adapt.most_states)
    return StyleAdaptation(run.log, cache, config.adapt, consent=config.privacy.at_most)


def protected_ids(config: Config, renderer: HFRenderer) -> frozenset[int]:
    """Return the tokens whose logits no dial may change: those that the model's formats reserve, and those of `adapt.protected`."""
    words = [told for word in config.adapt.protected for told in (word, f" {word}")]
    return renderer.reserved_ids().union(*map(renderer.encode, words))


async def branch_versions(run: Run) -> int:
    """Return how many versions the engine holds for tenants' branches alone, without those that it also holds for others.

    0 while the store is unavailable or refuses access.
    """
    with contextlib.suppress(Unavailable, Unauthorized):
        at = {ref: await run.store.read_ref(ref) for ref in served_refs(run.config)}
        others = {root for ref, root in at.items() if not ref.startswith((BRANCHES, BRANCH_REFS))}
        return len({*at.values()} - others - {None})
    return 0


async def open_embedded(config: Config, model: Path, renderer: HFRenderer, held: int = 0) -> Engine:
    """Return the engine in this process. Measures the machine's numerics and loads the model, each on a thread.

    `held`: how many versions of tenants' branches it will hold beside the run's.
    """
    from ostinato.engine.embedded.engine import TorchEngine
    from ostinato.model.config import backend
    from ostinato.model.load import build

    contract = await asyncio.to_thread(numerics.engine_contract, config)
    computing = await asyncio.to_thread(backend, config.model)
    dtype = await asyncio.to_thread(numerics.compute, config)
    check_memory(config, model, ("serve",), process_limit(), dtype.itemsize, held=held)
    weights = await asyncio.to_thread(build, model, dtype, computing)
    wide = await asyncio.to_thread(numerics.threads_agree, config)
    grammars = await asyncio.to_thread(lambda: renderer.grammars)
    found = await asyncio.to_thread(numerics.integers, config)
    if words := numerics.slower(await asyncio.to_thread(numerics.pace, config)):
        _LOG.warning("engine.products = %r is %s", config.engine.products, words)
    threads = await asyncio.to_thread(numerics.engine_threads, config)
    return TorchEngine(
        weights,
        renderer,
        config.engine.model_copy(update={"threads": threads}),
        integers=found,
        contract=contract,
        wide=wide,
        grammars=grammars,
        device=computing.device,
        keep=partial(numerics.form, config, model),
    )


async def _vllm(run: Run, model: Path, renderer: Renderer) -> Engine:
    """Return an engine over the servers in `engine.urls`, which fetch their weights from the run's store themselves."""
    from ostinato.engine.vllm.engine import open_vllm
    from ostinato.model.checkpoint_validation import expert_count
    from ostinato.weights.follow.drive import Kv, VllmFollower

    config = run.config
    follower, place = open_follower(config), store_place(config, config.engine.weights_seen_as)
    kv: Kv = "recompute" if config.engine.recompute_on_swap else "keep"
    return await open_vllm(
        config.engine,
        renderer,
        lambda url: VllmFollower(url, follower, place, kv=kv),
        lambda: read_draining(run.home.draining),
        expert_count(model),
    )


def spelling(renderer: Renderer) -> Callable[[int], str]:
    """Return a function that gives a token's text, decoded after another token, as some tokenizers treat a text's first one differently."""
    before = renderer.encode("a")
    known = renderer.decode(before)
    return lambda token: renderer.decode([*before, token])[len(known) :]
