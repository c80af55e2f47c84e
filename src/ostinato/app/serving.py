"""The serving worker's objects: an engine, the gateway in front of it, and a follower that brings it weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr
from starlette.applications import Starlette

from ostinato.app.numerics import engine_contract, stamp
from ostinato.app.storage import Run, open_cached_follower
from ostinato.core.clock import wall_clock
from ostinato.core.seams import Engine, Renderer
from ostinato.serve.gateway import create_app
from ostinato.weights.follow.follower import Follower


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What serves: an engine that is not started yet, the gateway over it, and who fetches its weights."""

    engine: Engine
    gateway: Starlette
    follower: Follower


async def open_serving(run: Run, model: Path) -> Serving:
    """Build the engine and the gateway of a run, and write down the engine's contract. Raises BadConfig."""
    from ostinato.engine.embedded.engine import TorchEngine
    from ostinato.model.config import compute_dtype
    from ostinato.model.load import build
    from ostinato.model.renderer import HFRenderer

    config = run.config
    renderer = await asyncio.to_thread(HFRenderer, model)  # in a thread each: the worker hears that it should end
    contract = await asyncio.to_thread(engine_contract, config)
    run.log.derive_text(spelling(renderer))
    await stamp(run.log, contract)
    weights = await asyncio.to_thread(build, model, compute_dtype(config.model))
    engine = TorchEngine(weights, renderer, config.engine, contract=contract)
    gateway = create_app(
        engine=engine,
        renderer=renderer,
        log=run.log,
        config=config.serve,
        clock=wall_clock,
        model_name=config.model.served_as,
        admin_keys=[SecretStr(run.home.admin_key())],  # the release worker's
    )
    return Serving(engine=engine, gateway=gateway, follower=open_cached_follower(config))


def spelling(renderer: Renderer) -> Callable[[int], str]:
    """The text that a token adds to a text: what it is behind another one, because some tokenizers treat a text's first one apart."""
    before = renderer.encode("a")
    known = renderer.decode(before)
    return lambda token: renderer.decode([*before, token])[len(known) :]
