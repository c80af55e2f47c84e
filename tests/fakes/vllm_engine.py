"""The engine over vLLM servers, with fake servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.fakes.vllm_tokens import TokenVllm

from ostinato.core.seams import Renderer
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.engine import VllmEngine, open_vllm
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower


@asynccontextmanager
async def vllm_engine(
    *fakes: TokenVllm,
    renderer: Renderer | None = None,
    draining: Collection[str] = (),
    experts: int = 0,
    **settings: Any,
) -> AsyncGenerator[VllmEngine, None]:
    """A started engine with empty slots over these servers, each behind a real socket. `draining` is read again at each use."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake.app)) for fake in fakes]
        config = EngineConfig(kind="vllm", urls=tuple(urls), **settings)
        follower = Follower(MemoryStore())
        engine = await open_vllm(
            config,
            renderer or ByteRenderer(),
            lambda url: VllmFollower(url, follower, {"url": "s"}, kv="keep", poll_s=0.001),
            lambda: draining,
            experts,
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()
