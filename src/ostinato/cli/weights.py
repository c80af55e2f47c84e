"""`ostinato weights`: look into the weight store, move versions between stores, make room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from ostinato.cli.options import Common, console

weights = App(name="weights", help="Look into the weight store: every version, by hash.")


@weights.command(name="log")
def weights_log(*, ref: str = "live", common: Common | None = None) -> None:
    """The chain of versions behind a ref: number, hash, kind, bytes."""
    from ostinato.launch.commands.weights.chain import print_chain

    asyncio.run(print_chain((common or Common()).of_store(), ref, Console()))


@weights.command
def show(version: str = "live", *, common: Common | None = None) -> None:
    """What a version is made of: kind, size, parent, codecs, and what its publisher said about it.

    Parameters
    ----------
    version
        A ref, a number such as v12, or the first digits of a root.
    """
    from ostinato.launch.commands.weights.versions import show_version

    asyncio.run(show_version((common or Common()).of_store(), version, Console()))


@weights.command
def diff(one: str, other: str, *, html: Path | None = None, common: Common | None = None) -> None:
    """What changed from one version to another, layer by layer.

    Parameters
    ----------
    one
        A ref, a number such as v12, or the first digits of a root.
    other
        The same.
    html
        Also write a page with every tensor.
    """
    from ostinato.launch.commands.weights.versions import diff_versions

    asyncio.run(diff_versions((common or Common()).of_store(), one, other, html, Console()))


@weights.command
def fsck(common: Common | None = None) -> None:
    """Verify every object that a ref can reach."""
    from ostinato.launch.commands.weights.chain import check_store

    asyncio.run(check_store((common or Common()).of_store(), Console()))


@weights.command
def key(path: Path) -> None:
    """Make a key that signs versions: the publisher's `publish.key` names the file, followers list the public key in `follow.trusted`.

    Parameters
    ----------
    path
        A new file; only its owner may read it.
    """
    from ostinato.weights.version.signing import Signer

    out = Console()
    out.print(f"the key is in {path}; set publish.key to it", highlight=False)
    out.print(f'followers: follow.trusted = ["{Signer.create(path).public}"]', highlight=False, soft_wrap=True)


@weights.command
def gc(
    *,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    keep: int | None = None,
    grace_hours: float | None = None,
    common: Common | None = None,
) -> None:
    """Delete the versions that nothing needs: no ref, no pin, no lease, not among the newest or the last released.

    Safe while the run is up: what a kept delta builds on stays, and nothing that is younger than the grace is touched.

    Parameters
    ----------
    dry_run
        Only say what would be deleted.
    keep
        Keep so many of the newest versions (default: collect.keep, 20).
    grace_hours
        Delete nothing younger (default: collect.grace_hours, 24). Longer than any publication takes.
    """
    from ostinato.launch.commands.weights.gc import collect_garbage

    named = {"keep": keep, "grace_hours": grace_hours}
    given = [f"collect.{key}={value}" for key, value in named.items() if value is not None]
    config = (common or Common()).of_store(given)
    asyncio.run(collect_garbage(config, dry_run, Console()))


@weights.command
def pin(name: str, version: str, *, common: Common | None = None) -> None:
    """Keep a version through every collection, whatever becomes of the refs; a pin of this name moves.

    Parameters
    ----------
    name
        What to call the pin: a-z, 0-9, '.', '_', '-'.
    version
        A ref, a number such as v12, or the first digits of a root.
    """
    from ostinato.launch.commands.weights.gc import pin_version

    asyncio.run(pin_version((common or Common()).of_store(), name, version, Console()))


@weights.command
def unpin(name: str, *, common: Common | None = None) -> None:
    """Take a pin away; the next collection may delete its version.

    Parameters
    ----------
    name
        The pin's name; a wrong one lists those that there are.
    """
    from ostinato.launch.commands.weights.gc import unpin_version

    asyncio.run(unpin_version((common or Common()).of_store(), name, Console()))


@weights.command
def export(target: Path, *, ref: str = "live", common: Common | None = None) -> None:
    """Write a version as a plain Hugging Face directory (safetensors, config, tokenizer).

    Parameters
    ----------
    target
        A new or empty directory.
    ref
        Which version.
    """
    from ostinato.launch.commands.weights.chain import export_model

    asyncio.run(export_model((common or Common()).of_store(), ref, target, Console()))


@weights.command
def pull(
    url: str,
    *,
    ref: str = "live",
    to: str | None = None,
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    common: Common | None = None,
) -> None:
    """Copy a version from another store into the run's. Only what is missing travels; call it again after an interruption.

    Parameters
    ----------
    url
        s3://bucket/path, gs://..., az://..., http://relay:port or a directory.
    ref
        What to copy: a ref of the other store, or the hash of a version.
    to
        The ref that names it here afterwards (default: the same; none for a hash).
    option
        A setting of the other store, as in --option aws_region=eu-west-1; may be repeated. For http: a header.
    """
    from ostinato.launch.commands.weights.transfers import pull as run

    asyncio.run(run((common or Common()).load(), url, ref, to, option, console))


@weights.command
def push(
    url: str,
    *,
    ref: str = "live",
    to: str | None = None,
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    common: Common | None = None,
) -> None:
    """Copy a version from the run's store into another. Only what is missing travels; call it again after an interruption.

    Parameters
    ----------
    url
        s3://bucket/path, gs://..., az://... or a directory.
    ref
        What to copy: a ref of the run, or the hash of a version.
    to
        The ref that names it there afterwards (default: the same; none for a hash).
    option
        A setting of the other store, as in --option aws_region=eu-west-1; may be repeated.
    """
    from ostinato.launch.commands.weights.transfers import push as run

    asyncio.run(run((common or Common()).of_store(), url, ref, to, option, console))


@weights.command
def relay(*, listen: str | None = None, common: Common | None = None) -> None:
    """Serve the run's weights to followers nearby: each object is fetched once, kept on disk, and served from there.

    Followers set weights.url to the address that it prints. They verify everything, so they need not trust it; but whoever
    reaches it can read the weights, so bind it to a private network.

    Parameters
    ----------
    listen
        HOST:PORT (default: relay.host and relay.port, 127.0.0.1:8330).
    """
    from ostinato.launch.commands.weights.transfers import relay as run

    asyncio.run(run((common or Common()).load(), listen, console))


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
    """What a deployment would move, keep and wait for: bytes, objects, requests and seconds, before there is one.

    Parameters
    ----------
    parameters
        How many the model has, of 16 bits each: 1e12.
    changed
        The share of them that one version changes.
    shards
        Parts that are published as chains of their own, each by its own cores.
    cores
        Cores per shard.
    gbit
        The line between publisher and follower, Gbit/s.
    rtt_ms
        Its delay, there and back.
    streams
        Connections at once.
    keep
        Versions that stay in the store.
    """
    from ostinato.launch.commands.weights.plan import print_plan
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
    common: Common | None = None,
) -> None:
    """Let a vLLM server follow a ref: it fetches and verifies beside its serving, then swaps under its open streams.

    The server needs VLLM_SERVER_DEV_MODE=1, --weight-transfer-config '{"backend": "ostinato"}' and
    --worker-extension-cls ostinato.weights.follow.vllm.worker.StagingWorker; see the guide.

    Parameters
    ----------
    url
        The server, like http://127.0.0.1:8000.
    ref
        Which version it should serve.
    kv
        recompute: nothing that the old weights computed is read again. keep: open streams and cached prefixes stay as they are.
    store
        How the server names the weight store, if it sees it elsewhere than this command does.
    """
    from ostinato.launch.commands.weights.vllm import drive

    asyncio.run(drive((common or Common()).of_store(), url, ref, kv, store, console))


@weights.command
def replay(common: Common | None = None) -> None:
    """Train again from the log alone and compare every version bit for bit with what was published."""
    from ostinato.launch.commands.weights.replay import replay_run

    asyncio.run(replay_run((common or Common()).of_run(), Console()))
