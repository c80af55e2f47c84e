"""`ostinato weights`: the chain of versions, a check of the store, and the export of a version."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.app.storage import model_path, open_follower, open_store
from ostinato.config import Config
from ostinato.core.errors import BadConfig, Corrupt, NotFound
from ostinato.weights.keep.fsck import verify


async def print_chain(config: Config, ref: str, console: Console) -> None:
    """Print the version that a ref names, and its ancestors. Raises NotFound."""
    table = Table("version", "root", "kind", "bytes", "smaller", box=None, pad_edge=False)
    for manifest in await open_follower(config).log(ref):
        size = manifest.payload_bytes
        table.add_row(
            f"v{manifest.number}",
            manifest.root[:16],
            manifest.kind,
            f"{size / 1e6:.2f} MB",
            f"{manifest.full_bytes / max(1, size):.0f}x",
        )
    console.print(table)


async def check_store(config: Config, console: Console) -> None:
    """Verify everything that a ref can reach. Raises Corrupt if something is not what it should be."""
    with console.status("reading and hashing"):
        found = await verify(open_store(config))
    for problem in found.problems:
        console.print(f"[bold red]✗[/] {problem}", highlight=False)
    if found.problems:
        raise Corrupt(
            f"{len(found.problems)} problems; publish a full snapshot again or restore the objects from a copy"
        )
    console.print(
        f"sound: {found.refs} refs, {found.manifests} manifests, {found.objects} objects, {found.bytes / 1e6:.0f} MB",
        highlight=False,
    )


async def export_model(config: Config, ref: str, target: Path, console: Console) -> None:
    """Write a version as a model directory. Raises NotFound, or BadConfig for a target that is not empty."""
    if target.exists() and any(target.iterdir()):
        raise BadConfig(f"{target} is not empty; give a new directory")
    follower = open_follower(config)
    policy = await follower.resolve(ref)
    if policy is None:
        raise NotFound(f"no ref {ref!r} in the weight store; `ostinato status` lists them", field="ref")
    source = await asyncio.to_thread(model_path, config)
    files = [path for path in source.iterdir() if path.is_file() and path.suffix in (".json", ".jinja", ".txt")]
    with console.status(f"writing {policy}"):
        await follower.materialise(policy, target, [path for path in files if "safetensors" not in path.name])
    console.print(f"{policy} is in {target}; load it with transformers like any model", highlight=False)
