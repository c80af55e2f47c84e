"""`ostinato weights`: shows and compares versions, verifies and garbage-collects the store, exports a model, replays a run.

`ostinato weights pull`, `push` and `relay`: copies of versions between stores, and a relay that followers read from.

`ostinato weights drive-vllm`: makes a vLLM server follow a ref of the weight store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import cast

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ostinato.app.numerics import trainer_contract
from ostinato.app.retention import needed
from ostinato.app.storage import Run, home, model_path, open_follower, open_log, open_run, open_store, store_place
from ostinato.app.trainer import open_learning
from ostinato.config import Config
from ostinato.core.arm_assignment import branch_of
from ostinato.core.errors import BadConfig, BadRequest, BadWeights, Corrupt, NoSignal, NotFound, StorageFull
from ostinato.core.records import Batch, PolicyVersion
from ostinato.launch.placing.address import bind
from ostinato.launch.views.screen import plain, say
from ostinato.launch.workers.http_server import listen
from ostinato.launch.workers.shutdown import Stopped, unless, until_stopped
from ostinato.record.roles import hold
from ostinato.status.progress_lines import Lines
from ostinato.web.weights_page import Row, render, shade
from ostinato.weights.follow.drive import Kv, VllmFollower, VllmSwap
from ostinato.weights.follow.export import files_beside
from ostinato.weights.follow.follower import line_of
from ostinato.weights.keep import pins
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import Collected, GcProgress, Tally, collect
from ostinato.weights.keep.transfer import Transferred, transfer
from ostinato.weights.relay import RelayStore, relay_app
from ostinato.weights.store.bucket import BucketConfig
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.factory import open_url
from ostinato.weights.store.interface import RefStore
from ostinato.weights.store.readonly import HttpStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.compare import TensorChange, compare, total
from ostinato.weights.version.content import VERSIONS, is_hash, weights_root
from ostinato.weights.version.manifest import Manifest

_NUMBER = re.compile(r"v?(\d{1,9})")
_ROOT = re.compile(r"[0-9a-f]{6,64}")
_BLOCKS = " ▁▂▃▄▅▆▇█"


async def show_version(config: Config, name: str, console: Console) -> None:
    """Print a version's manifest: kind, parent, sizes, codecs and metadata. Raises NotFound."""
    manifest = await find_version(config, name)
    table = Table(show_header=False, box=None, pad_edge=False)
    codecs: dict[str, tuple[int, int]] = {}
    for chunk in (chunk for tensor in manifest.tensors for chunk in tensor.chunks):
        count, size = codecs.get(chunk.codec, (0, 0))
        codecs[chunk.codec] = (count + 1, size + chunk.length)
    # `plain`, since the publisher's text is untrusted
    table.add_row("version", Text(plain(f"v{manifest.number} of run {manifest.run}")))
    table.add_row("root", manifest.root)
    table.add_row("kind", f"{manifest.kind}, {manifest.links} deltas after a full snapshot")
    table.add_row("parent", manifest.parent or "none")
    size = f"{_mb(manifest.payload_bytes)} for {_mb(manifest.full_bytes)} of weights"
    table.add_row("size", f"{size}: {_ratio(manifest)} times smaller")
    table.add_row("tensors", f"{len(manifest.tensors)}, {', '.join(sorted({t.dtype for t in manifest.tensors}))}")
    for codec, (count, size) in sorted(codecs.items()):
        table.add_row(f"  {codec}", f"{count} chunks, {_mb(size)}")
    for key, value in manifest.meta.items():
        table.add_row(Text(plain(key)), Text(plain(str(value))))
    console.print(table)


async def diff_versions(config: Config, one: str, other: str, html: Path | None, console: Console) -> None:
    """Print the share of elements that differ between two versions, per layer; with `html` also as a page.

    Raises NotFound, BadRequest, StorageFull if `html` cannot be written.
    """
    follower = open_follower(config)
    with console.status("fetching both versions"):
        policies = [(await find_version(config, name)).policy for name in (one, other)]
        old, new = [await follower.fetch(policy) for policy in policies]
        changes = await asyncio.to_thread(compare, old, new)
    title = f"{_name(policies[0])} → {_name(policies[1])}"
    whole = total(changes)
    lead = f"{whole.changed:,} of {whole.elements:,} elements changed ({whole.share:.3%})."
    if html is not None:
        rows = [
            Row(name=c.name, layer=c.layer, kind=c.kind, share=c.share, elements=c.elements, moved=c.moved)
            for c in changes
        ]
        page = render(f"What changed, {title}", f"{lead} Darker is more, on a logarithmic scale.", rows)
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise StorageFull(f"{html} cannot be written: {error.strerror}; name another place with --html") from error
    console.print(f"[bold]{title}[/]  {lead}", highlight=False)
    for line in picture(changes):
        console.print(line)
    if html is not None:
        say(console, f"the page is {html}")


def picture(changes: Sequence[TensorChange]) -> list[Text]:
    """Return a sparkline per kind of tensor: one block per layer, higher where a larger share changed."""
    most = max((change.share for change in changes), default=0.0)
    width = max((len(change.kind) for change in changes), default=0)
    lines: list[Text] = []
    for kind in dict.fromkeys(change.kind for change in changes):
        same = sorted((c for c in changes if c.kind == kind), key=lambda c: c.layer or 0)
        blocks = "".join(_BLOCKS[round(shade(change.share, most) * (len(_BLOCKS) - 1))] for change in same)
        lowest, highest = min(c.share for c in same), max(c.share for c in same)
        span = f"{highest:.3%}" if lowest == highest else f"{lowest:.3%} to {highest:.3%}"
        lines.append(Text.assemble((f"{kind:<{width}}  ", "dim"), (blocks, "cyan"), f"  {span}"))
    return lines


async def find_version(config: Config, name: str, run: str = "") -> Manifest:
    """Return the version named by a ref, a number (v12), or the first digits of its root hash. Raises NotFound, BadRequest.

    A tenant's branch may have a version with the same number: the one of `run` is returned, by default that of the configured run.
    """
    store = open_store(config)
    manifests, refs = Manifests(store), await store.refs()
    if name in refs:
        return (await manifests.at(refs[name]))[1]
    versions = {ref.removeprefix(VERSIONS): value for ref, value in refs.items() if ref.startswith(VERSIONS)}
    if number := _NUMBER.fullmatch(name):
        every = [await manifests.read(value) for value in versions.values()]
        matches = [manifest for manifest in every if manifest.number == int(number.group(1))]
        line = line_of(run or (branch_of(config.run.tenant) if config.run.tenant else ""))
        matches = [manifest for manifest in matches if line_of(manifest.run) == line] or matches
    else:
        matches = []
    if not matches and _ROOT.fullmatch(name):  # not `elif`: the first digits of a root may all be decimal
        matches = [await manifests.read(value) for root, value in versions.items() if root.startswith(name)]
    if not matches:
        named = ", ".join(ref for ref in refs if not ref.startswith(VERSIONS))
        if not named:
            raise NotFound(f"no version {name!r}: this run has none yet; start `ostinato up`, and wait until it serves")
        if name == "candidate":
            raise NotFound(
                "there is no candidate yet: `ostinato status` says what the trainer waits for; or name another version, by a ref "
                f"({named}), a number such as v12, or a root's first digits"
            )
        raise NotFound(f"no version {name!r}: give a ref ({named}), a number such as v12, or a root's first digits")
    if len({manifest.root for manifest in matches}) > 1:
        raise BadRequest(f"{len(matches)} versions match {name!r}: give more of the root (`ostinato weights log`)")
    return matches[0]


def _name(policy: PolicyVersion) -> str:
    return f"v{policy.number} ({policy.hash[:8]})"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def _ratio(manifest: Manifest) -> str:
    ratio = manifest.full_bytes / max(1, manifest.payload_bytes)
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


# ---------------------------------------------------------------- chains of versions


async def print_chain(config: Config, ref: str, console: Console) -> None:
    """Print the version that a ref names, and its ancestors. Raises NotFound."""
    table = Table("version", "root", "kind", "bytes", "smaller", box=None, pad_edge=False)
    for manifest in await open_follower(config).log(ref):
        size, smaller = _mb(manifest.payload_bytes), f"{_ratio(manifest)}x"
        table.add_row(f"v{manifest.number}", manifest.root[:16], manifest.kind, size, smaller)
    console.print(table)


async def check_store(config: Config, console: Console) -> None:
    """Verify every object that is reachable from a ref. Raises Corrupt if one is missing or damaged."""
    with console.status("reading and hashing"):
        found = await verify(open_store(config))
    for problem in found.problems:
        console.print(Text.assemble(("✗ ", "bold red"), plain(problem)))
    if found.problems:
        count = len(found.problems)
        raise Corrupt(f"{count} problems; publish a full snapshot again or restore the objects from a copy")
    counts = f"{found.refs} refs, {found.manifests} manifests, {found.objects} objects"
    say(console, f"sound: {counts}, {found.bytes / 1e6:.0f} MB")


async def export_model(config: Config, ref: str, target: Path, console: Console) -> None:
    """Write a version as a model directory. Raises NotFound, or BadConfig for a target that is a file or not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadConfig(f"{target} is {'not empty' if target.is_dir() else 'a file'}; give a new directory")
    follower = open_follower(config)
    policy = await follower.resolve(ref)
    if policy is None:
        raise NotFound(f"no ref {ref!r} in the weight store; `ostinato status` lists them", field="ref")
    source = await asyncio.to_thread(model_path, config)
    with console.status(f"writing {policy}"):
        await follower.materialise(policy, target, files_beside(source))
    say(console, f"{policy} is in {target}; load it with transformers like any model")


# ---------------------------------------------------------------- garbage collection


async def collect_garbage(config: Config, dry_run: bool, console: Console) -> None:
    """Delete old objects that nothing needs (`keep.gc`), or print what would be deleted.

    Raises Corrupt if a manifest is damaged, since it lists what is needed.
    """
    store, roots = open_store(config), await _needed(config, console)
    with _stages(console) as show:
        found = await collect(store, config.collect, roots=roots, dry_run=dry_run, on_step=show)
    _print(found, config, console)


async def pin_version(config: Config, name: str, version: str, console: Console) -> None:
    """Pin a version: keep it until it is unpinned. Raises NotFound, BadRequest."""
    policy = (await find_version(config, version)).policy
    before = await pins.pin(open_store(config), name, policy.hash)
    moved = f"; it held {before[:16]} before" if before not in (None, policy.hash) else ""
    say(console, f"pin {name} holds {policy}{moved}")


async def unpin_version(config: Config, name: str, console: Console) -> None:
    """Remove a pin. Raises NotFound with a list of the pins."""
    root = await pins.unpin(open_store(config), name)
    say(console, f"pin {name} is gone; it held {root[:16]}")


async def _needed(config: Config, console: Console) -> list[str]:
    """Return the roots that must be kept according to the run's log."""
    if not home(config).log.exists():
        console.print(f"no log in {config.run.directory}: past releases are kept only where a ref or pin names them")
        return []
    with open_log(config) as log:
        return await needed(log, config)


@contextlib.contextmanager
def _stages(console: Console) -> Generator[Callable[[GcProgress], None]]:
    """Yield a function that shows a progress bar with bytes and their rate for each stage of a garbage collection."""
    counts = (bars.MofNCompleteColumn(), "{task.fields[size]}", bars.TimeElapsedColumn())
    with bars.Progress("{task.description}", bars.BarColumn(), *counts, console=console) as progress:
        tasks: dict[str, bars.TaskID] = {}

        def show(step: GcProgress) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = progress.add_task(step.stage, total=None, size="")
            task = tasks[step.stage]
            elapsed = progress.tasks[task].elapsed
            rate = f", {decimal(int(step.bytes / elapsed))}/s" if elapsed else ""
            size = f"{decimal(step.bytes)}{rate}" if step.bytes else ""
            progress.update(task, completed=step.done, total=step.total, size=size)

        yield show


def _print(found: Collected, config: Config, console: Console) -> None:
    table = Table("kept", "root", "because of", box=None, pad_edge=False)
    for policy, reasons in found.reasons.items():
        table.add_row(f"v{policy.number}", policy.hash[:16], Text(plain(", ".join(reasons))))
    console.print(table)
    would = "would delete" if found.dry_run else "deleted"
    if found.gone:
        say(console, f"{would} {', '.join(str(policy) for policy in found.gone)}")
    for ref in found.leases:
        say(console, f"{would} the expired {ref}")
    for root in found.missing:
        say(console, f"a past release is not in this store: {root[:16]}")
    young = f" ({_size(found.young)} unneeded but younger than {config.collect.grace_hours:g} h)"
    say(console, f"{would} {_size(found.deleted)}; kept {_size(found.kept)}{young if found.young.objects else ''}")


def _size(tally: Tally) -> str:
    return f"{tally.objects} objects, {decimal(tally.bytes)}"


# ---------------------------------------------------------------- replay


async def replay_run(config: Config, console: Console) -> None:
    """Repeat the training from the log and compare the root of every published version. Raises Corrupt at the first that differs."""
    path = await asyncio.to_thread(model_path, config)
    with open_run(config) as run, console.status("taking every recorded step again"):
        lines = Lines(run.home.progress("train")).new()
        published = {line["number"]: line["hash"] for line in lines if line["kind"] == "published"}
        roots = await replay(run, path)
    for step, root in roots.items():
        if published.get(step, root) != root:
            raise Corrupt(f"step {step} gives {root[:16]}, but {published[step][:16]} was published")
    say(console, f"{len(roots)} steps taken again, every version bit for bit the same")


async def replay(run: Run, path: Path) -> dict[int, str]:
    """Repeat every recorded step from the starting model and return {step: root of its weights}. Writes nothing.

    Gives the same bits only with the same type of machine, version of torch, and numbers of threads and ranks. Raises Corrupt if turns were
    erased.
    """
    import torch

    torch.set_num_threads(run.config.train.threads)
    base = await run.follower.resolve("base")
    assert base is not None
    contract = trainer_contract(run.config)
    parts = open_learning(run, path, base, contract, on_learned=lambda _: None, on_published=lambda _: None)
    roots: dict[int, str] = {}
    last = run.log.tail(1, {Batch})
    try:
        async for batch in parts.desk.recorded(1, cast(Batch, last[0][1]).step if last else 0):
            if any(sample.turn.redacted for sample in batch.samples):
                raise Corrupt(f"turns of step {batch.row.step} were erased: it cannot be taken again as it was")
            with contextlib.suppress(NoSignal, BadWeights):  # a batch that was refused then is refused again
                await parts.learner.trainer.step(batch)
                roots[batch.row.step] = weights_root(await asyncio.to_thread(parts.trainer.weights))
    finally:
        parts.trainer.close()
    return roots


# ---------------------------------------------------------------- copies between stores


LEDGERS = frozenset({"live", "control", "canary", "best", "verified"})
"""Refs that a run's release ledger controls."""


async def pull(
    config: Config, url: str, version: str, name: str | None, options: Sequence[str], console: Console
) -> None:
    """Copy a version from the store at `url` into the run's. Raises BadConfig if that would move a ref of the release ledger."""
    ref, place = _target(version, name), home(config)
    if ref in LEDGERS and not config.weights.url and place.log.exists():
        raise BadConfig(
            f"the release ledger in {place.log} decides where {ref!r} is; give another name with --to, such as --to imported"
        )
    done = await _copy(_elsewhere(config, url, options), open_store(config), version, ref, console)
    _done(done, ref, "pulled", console)


async def push(
    config: Config, url: str, version: str, name: str | None, options: Sequence[str], console: Console
) -> None:
    """Copy a version from the run's store into the store at `url`. Raises BadConfig if that store is read-only."""
    ref, target = _target(version, name), _elsewhere(config, url, options)
    if isinstance(target, HttpStore):
        raise BadConfig(f"{url} can only be read; push to the bucket or directory behind it")
    done = await _copy(open_store(config), target, version, ref, console)
    _done(done, ref, "pushed", console)


async def relay(config: Config, address: str | None, console: Console) -> None:
    """Serve the run's store to followers, cached in a directory, until told to stop. Raises Conflict if the directory is in use."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    host, port = _address(address) if address is not None else (config.relay.host, config.relay.port)
    directory = config.relay.directory or home(config).root / "relay"
    with hold(directory, "relay"):
        stopping = until_stopped()
        local = await asyncio.to_thread(DirectoryStore, directory)
        store = RelayStore(open_store(config), local, config.relay)
        listener = bind(host, port, "give another --listen HOST:PORT")
        kept = f"at most {config.relay.max_bytes / 1e9:.1f} GB in {directory}"

        def answering(url: str) -> None:
            console.print(
                Text.assemble(f"relay on {url} ({kept}); followers: ", (f'--set weights.url="{url}"', "bold"))
            )

        await listen(relay_app(store), listener, stopping, answering, lifespan=False)


def _target(version: str, name: str | None) -> str | None:
    """Return the ref to move in the target store: `name` if given, else the source's ref; None if `version` is a hash."""
    return name or (None if is_hash(version) else version)


def _elsewhere(config: Config, url: str, options: Sequence[str]) -> RefStore:
    """Open the store at a URL with the run's settings, but with these options instead of the run's."""
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
    rates = (bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress("{task.description}", bars.BarColumn(), *rates, console=console) as progress:
        bar = progress.add_task("reading manifests", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, description="copying", completed=done, total=total)

        return await transfer(source, target, version, ref=ref, on_bytes=show)


def _done(done: Transferred, ref: str | None, verb: str, console: Console) -> None:
    rate = done.bytes / 1e6 / max(done.seconds, 1e-6)
    moved = f"; {ref} is at it" if ref is not None else ""
    sent = f"{done.objects} objects, {done.bytes / 1e6:.2f} MB in {done.seconds:.1f} s ({rate:.1f} MB/s)"
    say(console, f"{verb} {done.policy}: {sent}, {done.skipped / 1e6:.2f} MB were there already{moved}")


# ---------------------------------------------------------------- vLLM


async def drive(config: Config, url: str, ref: str, kv: Kv, store: str, console: Console) -> None:
    """Make the vLLM server at `url` follow `ref` until told to stop. `store`: the weight store as that server reaches it; "": as we do."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    follower = open_follower(config)
    place = store_place(config, store)

    def swapped(swap: VllmSwap) -> None:
        paused = f"paused {1e3 * swap.pause_s:.0f} ms (load {1e3 * swap.load_s:.0f} ms)"
        say(console, f"{url} serves {swap.policy}: fetched in {swap.staged_s:.2f} s, {paused}")

    def complain(ref: str, error: Exception) -> None:
        console.print(Text.assemble((f"ref {ref} ", "bold red"), plain(str(error))))

    async with VllmFollower(url, follower, place, kv=kv) as vllm:
        with contextlib.suppress(Stopped):
            await unless(until_stopped(), vllm.follow(ref, swapped, complain, config.follow.interval_s))
