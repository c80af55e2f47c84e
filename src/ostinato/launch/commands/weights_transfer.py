"""`ostinato weights pull`, `push` and `relay`: copies of versions between stores, and a relay that followers read from.

`ostinato weights drive-vllm`: a vLLM server follows a ref of the weight store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ostinato.app.storage import home, open_follower, open_store, store_place
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.launch.placing.address import bind
from ostinato.launch.workers.http_server import listen
from ostinato.launch.workers.shutdown import Stopped, unless, until_stopped
from ostinato.record.lock import hold
from ostinato.weights.follow.drive import Kv, VllmFollower, VllmSwap
from ostinato.weights.keep.transfer import Transferred, transfer
from ostinato.weights.relay import RelayStore, relay_app
from ostinato.weights.store.bucket import BucketConfig
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.factory import open_url
from ostinato.weights.store.interface import RefStore
from ostinato.weights.store.readonly import HttpStore
from ostinato.weights.version.content import is_hash

LEDGERS = frozenset({"live", "control", "canary", "best", "verified"})
"""The refs that a run's release ledger controls."""


async def pull(
    config: Config, url: str, version: str, name: str | None, options: Sequence[str], console: Console
) -> None:
    """Copy a version from the store at `url` into the run's. Raises BadConfig if that would move a ref that the release ledger controls."""
    ref = _target(version, name)
    place = home(config)
    if ref in LEDGERS and not config.weights.url and place.log.exists():
        raise BadConfig(
            f"the release ledger in {place.log} decides where {ref!r} is; give another name with --to, such as --to imported"
        )
    done = await _copy(_elsewhere(config, url, options), open_store(config), version, ref, console)
    _say(done, ref, "pulled", console)


async def push(
    config: Config, url: str, version: str, name: str | None, options: Sequence[str], console: Console
) -> None:
    """Copy a version from the run's store into the store at `url`. Raises BadConfig if that store can only be read."""
    ref, target = _target(version, name), _elsewhere(config, url, options)
    if isinstance(target, HttpStore):
        raise BadConfig(f"{url} can only be read; push to the bucket or directory behind it")
    done = await _copy(open_store(config), target, version, ref, console)
    _say(done, ref, "pushed", console)


async def relay(config: Config, address: str | None, console: Console) -> None:
    """Serve the run's store to followers through a directory, until told to stop. Raises Conflict if the directory is in use."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    host, port = _address(address) if address is not None else (config.relay.host, config.relay.port)
    directory = config.relay.directory or home(config).root / "relay"
    with hold(directory, "relay"):
        stopping = until_stopped()
        local = await asyncio.to_thread(DirectoryStore, directory)
        store = RelayStore(open_store(config), local, config.relay)
        listener = bind(host, port, "give another --listen HOST:PORT")
        kept = f"at most {config.relay.max_bytes / 1e9:.1f} GB in {directory}"

        def say(url: str) -> None:
            console.print(f'relay on {url} ({kept}); followers: [bold]--set weights.url="{url}"[/]', highlight=False)

        await listen(relay_app(store), listener, stopping, say, lifespan=False)


def _target(version: str, name: str | None) -> str | None:
    """The ref that moves in the target: `name` if given, else the source's ref; None if `version` is a hash."""
    return name or (None if is_hash(version) else version)


def _elsewhere(config: Config, url: str, options: Sequence[str]) -> RefStore:
    """The store at a URL, with the run's settings but its own options."""
    pairs: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise BadConfig(f"--option {option!r}: write it as key=value, such as aws_region=eu-west-1")
        pairs[key] = value
    settings = config.weights.model_dump() | {"url": url, "options": pairs}
    return open_url(BucketConfig.model_validate(settings))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise BadConfig(f"--listen {text!r}: write it as HOST:PORT, such as 0.0.0.0:8330")
    return host.strip("[]"), int(port)


async def _copy(source: RefStore, target: RefStore, version: str, ref: str | None, console: Console) -> Transferred:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading manifests", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, description="copying", completed=done, total=total)

        return await transfer(source, target, version, ref=ref, on_bytes=show)


def _say(done: Transferred, ref: str | None, verb: str, console: Console) -> None:
    rate = done.bytes / 1e6 / max(done.seconds, 1e-6)
    moved = f"; {ref} is at it" if ref is not None else ""
    console.print(
        f"{verb} {done.policy}: {done.objects} objects, {done.bytes / 1e6:.2f} MB in {done.seconds:.1f} s ({rate:.1f} MB/s), "
        f"{done.skipped / 1e6:.2f} MB were there already{moved}",
        highlight=False,
    )


# ---------------------------------------------------------------- vLLM


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
