"""`ostinato weights`: inspects the weight store, copies versions between stores, collects garbage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from cyclopts import App
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Flag, Words, console

weights = App(name="weights", help="Inspect and manage the weight store: every version, by hash.")


@weights.command(name="log")
def weights_log(*, ref: str = "live", common: Common = DEFAULTS) -> None:
    """List the chain of versions behind a ref: number, hash, kind, bytes."""
    from ostinato.launch.commands.weights import print_chain

    asyncio.run(print_chain(common.of_store(), ref, Console()))


@weights.command
def show(version: str = "live", *, common: Common = DEFAULTS) -> None:
    """Show a version's kind, size, parent and codecs, and its publisher's notes.

    Parameters
    ----------
    version
        A ref, a version number such as v12, or the first digits of a root hash.
    """
    from ostinato.launch.commands.weights import show_version

    asyncio.run(show_version(common.of_store(), version, Console()))


@weights.command
def diff(one: str, other: str, *, html: Path | None = None, common: Common = DEFAULTS) -> None:
    """Show what changed from one version to another, layer by layer.

    Parameters
    ----------
    one
        A ref, a version number such as v12, or the first digits of a root hash.
    other
        The other version, named in the same way.
    html
        Also write an HTML page with every tensor to this file.
    """
    from ostinato.launch.commands.weights import diff_versions

    asyncio.run(diff_versions(common.of_store(), one, other, html, Console()))


@weights.command
def fsck(common: Common = DEFAULTS) -> None:
    """Verify every object that is reachable from a ref."""
    from ostinato.launch.commands.weights import check_store

    asyncio.run(check_store(common.of_store(), Console()))


@weights.command
def key(path: Path) -> None:
    """Create a key that signs versions: the publisher names its file in `publish.key`, followers list its public key in `follow.trusted`.

    Parameters
    ----------
    path
        A new file for the key, readable by its owner only.
    """
    from ostinato.weights.version.signing import Signer

    public, out = Signer.create(path).public, Console()
    out.print(f"the key is in {path}; set publish.key to it", highlight=False)
    out.print(f'followers: follow.trusted = ["{public}"]', highlight=False, soft_wrap=True)


@weights.command
def gc(
    *,
    dry_run: Flag = False,
    keep: int | None = None,
    grace_hours: float | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Delete versions that no ref, pin or lease holds and that are neither among the newest nor the last released.

    Safe while the run is up: the versions that a kept delta builds on stay, and nothing younger than the grace period is touched.

    Parameters
    ----------
    dry_run
        Only show what would be deleted.
    keep
        How many of the newest versions to keep (default: collect.keep, 20).
    grace_hours
        Delete nothing younger than this (default: collect.grace_hours, 24). Make it longer than any publication takes.
    """
    from ostinato.launch.commands.weights import collect_garbage

    named = {"keep": keep, "grace_hours": grace_hours}
    given = [f"collect.{key}={value}" for key, value in named.items() if value is not None]
    config = common.of_store(given)
    asyncio.run(collect_garbage(config, dry_run, Console()))


@weights.command
def pin(name: str, version: str, *, common: Common = DEFAULTS) -> None:
    """Keep a version through every collection, even if no ref names it any more. An existing pin of this name is moved.

    Parameters
    ----------
    name
        The pin's name: a-z, 0-9, '.', '_', '-'.
    version
        A ref, a version number such as v12, or the first digits of a root hash.
    """
    from ostinato.launch.commands.weights import pin_version

    asyncio.run(pin_version(common.of_store(), name, version, Console()))


@weights.command
def unpin(name: str, *, common: Common = DEFAULTS) -> None:
    """Remove a pin; the next collection may delete its version.

    Parameters
    ----------
    name
        The pin's name. An unknown name lists the existing pins.
    """
    from ostinato.launch.commands.weights import unpin_version

    asyncio.run(unpin_version(common.of_store(), name, Console()))


@weights.command
def export(target: Path, *, ref: str = "live", common: Common = DEFAULTS) -> None:
    """Write a version as a plain Hugging Face directory (safetensors, config, tokenizer).

    Parameters
    ----------
    target
        A new or empty directory.
    ref
        The version to write.
    """
    from ostinato.launch.commands.weights import export_model

    asyncio.run(export_model(common.of_store(), ref, target, Console()))


@weights.command
def pull(
    url: str,
    *,
    ref: str = "live",
    to: str | None = None,
    option: Words = (),
    common: Common = DEFAULTS,
) -> None:
    """Copy a version from another store into the run's. Only missing objects are sent; after an interruption, run it again.

    Parameters
    ----------
    url
        s3://bucket/path, gs://..., az://..., http://relay:port or a directory.
    ref
        What to copy: a ref of the other store, or the hash of a version.
    to
        The ref that names it here afterwards (default: the same ref; for a hash, no ref).
    option
        A setting of the other store, as in --option aws_region=eu-west-1; may be repeated. For http: a request header.
    """
    from ostinato.launch.commands.weights import pull as run

    asyncio.run(run(common.load(), url, ref, to, option, console))


@weights.command
def push(
    url: str,
    *,
    ref: str = "live",
    to: str | None = None,
    option: Words = (),
    common: Common = DEFAULTS,
) -> None:
    """Copy a version from the run's store into another. Only missing objects are sent; after an interruption, run it again.

    Parameters
    ----------
    url
        s3://bucket/path, gs://..., az://... or a directory.
    ref
        What to copy: a ref of the run, or the hash of a version.
    to
        The ref that names it there afterwards (default: the same ref; for a hash, no ref).
    option
        A setting of the other store, as in --option aws_region=eu-west-1; may be repeated.
    """
    from ostinato.launch.commands.weights import push as run

    asyncio.run(run(common.of_store(), url, ref, to, option, console))


@weights.command
def relay(*, listen: str | None = None, common: Common = DEFAULTS) -> None:
    """Serve the run's weights to followers nearby: each object is fetched once, kept on disk, and served from there.

    Followers set weights.url to the address that it prints. They verify everything, so they need not trust the relay; but anyone
    who can reach it can read the weights, so bind it to a private network.

    Parameters
    ----------
    listen
        HOST:PORT (default: relay.host and relay.port, 127.0.0.1:8330).
    """
    from ostinato.launch.commands.weights import relay as run

    asyncio.run(run(common.load(), listen, console))


@weights.command(name="plan")
def weights_plan(
    *,
    parameters: float,
    changed: float = 0.01,
    shards: int = 1,
    cores: int | None = None,
    gbit: float = 10.0,
    rtt_ms: float = 150.0,
    streams: int = 16,
    keep: int = 100,
) -> None:
    """Estimate what a planned deployment would move, keep and wait for: bytes, objects, requests and seconds.

    Parameters
    ----------
    parameters
        Parameters of the model, of 16 bits each, such as 1e12.
    changed
        Share of the parameters that one version changes.
    shards
        Parts of the model that are published as separate chains, each by its own cores.
    cores
        Cores per shard.
    gbit
        Bandwidth between publisher and follower, in Gbit/s.
    rtt_ms
        Round-trip time between them, in milliseconds.
    streams
        Concurrent connections.
    keep
        Versions kept in the store.
    """
    from ostinato.launch.commands.plan import print_plan
    from ostinato.weights.plan import Deployment, Link

    deployment = Deployment(parameters=parameters, changed=changed, shards=shards, keep=keep)
    print_plan(deployment, Link(gbit_s=gbit, rtt_s=rtt_ms / 1e3, streams=streams), Console(), cores)


@weights.command(name="drive-vllm")
def drive_vllm(
    url: str,
    *,
    ref: str = "live",
    kv: Literal["recompute", "keep"] = "recompute",
    store: str = "",
    common: Common = DEFAULTS,
) -> None:
    """Let a vLLM server follow a ref: it fetches and verifies weights while it serves, then swaps them without ending open streams.

    The server needs VLLM_SERVER_DEV_MODE=1, --weight-transfer-config '{"backend": "ostinato"}' and
    --worker-extension-cls ostinato.weights.follow.vllm.worker.StagingWorker, and Ostinato installed beside vLLM.

    Parameters
    ----------
    url
        The server's address, such as http://127.0.0.1:8000.
    ref
        The ref that it follows.
    kv
        recompute: compute the KV cache of open streams and prefixes again with the new weights. keep: go on with the old weights' cache.
    store
        The weight store's path or URL as the server sees it, if it differs from this command's.
    """
    from ostinato.launch.commands.weights import drive

    asyncio.run(drive(common.of_store(), url, ref, kv, store, console))


@weights.command
def replay(common: Common = DEFAULTS) -> None:
    """Repeat the training from the log alone and compare every version bit for bit with the published one."""
    from ostinato.launch.commands.weights import replay_run

    asyncio.run(replay_run(common.of_run(), Console()))
