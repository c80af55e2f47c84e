"""`ostinato weights drive-vllm`: a vLLM server follows a ref of the weight store."""

from __future__ import annotations

import contextlib
import logging

from rich.console import Console

from ostinato.app.storage import open_follower, store_place
from ostinato.config import Config
from ostinato.launch.workers.stopping import Stopped, unless, until_stopped
from ostinato.weights.follow.drive import Kv, VllmFollower, VllmSwap


async def drive(config: Config, url: str, ref: str, kv: Kv, store: str, console: Console) -> None:
    """Follow `ref` with the vLLM server at `url` until told to stop. `store` is that server's name for the weight store; "": our own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    follower = open_follower(config)
    place = store_place(config, store)

    def say(swap: VllmSwap) -> None:
        console.print(
            f"{url} serves {swap.policy}: fetched in {swap.staged_s:.2f} s, paused {1e3 * swap.pause_s:.0f} ms "
            f"(load {1e3 * swap.load_s:.0f} ms)",
            highlight=False,
        )

    def complain(ref: str, error: Exception) -> None:
        console.print(f"[bold red]ref {ref}[/] {error}", highlight=False)

    async with VllmFollower(url, follower, place, kv=kv) as vllm:
        with contextlib.suppress(Stopped):
            await unless(until_stopped(), vllm.follow(ref, say, complain, config.follow.interval_s))
