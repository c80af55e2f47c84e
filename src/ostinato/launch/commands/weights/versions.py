"""`ostinato weights show` and `diff`: one version, and what changed between two."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import open_follower, open_store
from ostinato.config import Config
from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.records import PolicyVersion
from ostinato.web.weights_page import Row, render, shade
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.compare import TensorChange, compare, total
from ostinato.weights.version.content import VERSIONS
from ostinato.weights.version.manifest import Manifest

_NUMBER = re.compile(r"v?(\d{1,9})")
_ROOT = re.compile(r"[0-9a-f]{6,64}")
_BLOCKS = " ▁▂▃▄▅▆▇█"


async def show_version(config: Config, name: str, console: Console) -> None:
    """Print what one version is made of. Raises NotFound."""
    manifest = await find_version(config, name)
    table = Table(show_header=False, box=None, pad_edge=False)
    codecs: dict[str, tuple[int, int]] = {}
    for chunk in (chunk for tensor in manifest.tensors for chunk in tensor.chunks):
        count, size = codecs.get(chunk.codec, (0, 0))
        codecs[chunk.codec] = (count + 1, size + chunk.length)
    table.add_row("version", f"v{manifest.number} of run {manifest.run}")
    table.add_row("root", manifest.root)
    table.add_row("kind", f"{manifest.kind}, {manifest.links} deltas after a full snapshot")
    table.add_row("parent", manifest.parent or "none")
    smaller = manifest.full_bytes / max(1, manifest.payload_bytes)
    table.add_row(
        "size", f"{_mb(manifest.payload_bytes)} for {_mb(manifest.full_bytes)} of weights: {smaller:.0f} times smaller"
    )
    table.add_row("tensors", f"{len(manifest.tensors)}, {', '.join(sorted({t.dtype for t in manifest.tensors}))}")
    for codec, (count, size) in sorted(codecs.items()):
        table.add_row(f"  {codec}", f"{count} chunks, {_mb(size)}")
    for key, value in manifest.meta.items():
        table.add_row(key, str(value))
    console.print(table)


async def diff_versions(config: Config, one: str, other: str, html: Path | None, console: Console) -> None:
    """Print how many elements changed from one version to the other, per layer. Raises NotFound, BadRequest."""
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
        html.write_text(page, encoding="utf-8")
    console.print(f"[bold]{title}[/]  {lead}", highlight=False)
    for line in picture(changes):
        console.print(line)
    if html is not None:
        console.print(f"the page is {html}", highlight=False)


def picture(changes: Sequence[TensorChange]) -> list[Text]:
    """One line per kind of tensor, one block per layer, higher where more changed; then the tensors outside of layers."""
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


async def find_version(config: Config, name: str) -> Manifest:
    """The version named by a ref, a number (v12), or the first digits of its root. Raises NotFound, BadRequest."""
    store = open_store(config)
    manifests, refs = Manifests(store), await store.refs()
    if name in refs:
        return (await manifests.at(refs[name]))[1]
    versions = {ref.removeprefix(VERSIONS): value for ref, value in refs.items() if ref.startswith(VERSIONS)}
    if number := _NUMBER.fullmatch(name):
        every = [await manifests.read(value) for value in versions.values()]
        found = [manifest for manifest in every if manifest.number == int(number.group(1))]
    elif _ROOT.fullmatch(name):
        found = [await manifests.read(value) for root, value in versions.items() if root.startswith(name)]
    else:
        found = []
    if not found:
        shown = ", ".join(ref for ref in refs if not ref.startswith(VERSIONS))
        if not shown:
            raise NotFound(f"no version {name!r}: this run has none yet; start `ostinato up`, and wait until it serves")
        if name == "candidate":
            raise NotFound(
                "there is no candidate yet: `ostinato status` says what the trainer waits for; or name another version, by a ref "
                f"({shown}), a number such as v12, or a root's first digits"
            )
        raise NotFound(f"no version {name!r}: give a ref ({shown}), a number such as v12, or a root's first digits")
    if len({manifest.root for manifest in found}) > 1:
        raise BadRequest(f"{len(found)} versions match {name!r}: give more of the root (`ostinato weights log`)")
    return found[0]


def _name(policy: PolicyVersion) -> str:
    return f"v{policy.number} ({policy.hash[:8]})"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
