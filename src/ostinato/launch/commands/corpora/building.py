"""`ostinato corpus build` and `ostinato corpus show`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ostinato.app.corpora import CorpusDesk, open_source
from ostinato.config import Config
from ostinato.core.errors import OstinatoError
from ostinato.corpus.build import check_new
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.manifest import CorpusManifest
from ostinato.corpus.shards import ShardSet
from ostinato.launch.views.plain import plain

_SHOWN = 20


async def build_corpus(
    config: Config, sources: Sequence[str], out: Path, settings: CorpusConfig, against: Sequence[Path], console: Console
) -> None:
    """Build a corpus, with a progress bar, and say what it contains and what was left out. A source that cannot be read is refused, and
    counted.

    Raises BadConfig and BadRequest; in these cases nothing is written.
    """
    check_new(out)
    desk = CorpusDesk(config, settings, against)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[files]} files, {task.fields[tokens]:,} tokens"), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        line = bar.add_task("sources", total=len(sources), files=0, tokens=0)
        seen = 0

        def on_file() -> None:
            nonlocal seen
            seen += 1
            bar.update(line, files=seen, tokens=desk.build.tokens)

        for name in sources:
            bar.update(line, description=plain(name))
            try:
                desk.build.take(await open_source(name), on_file)
            except OstinatoError as error:
                desk.build.refuse(name, "source", str(error))
            bar.advance(line)
        bar.update(line, description="writing")
        manifest = desk.write(out)
    show_manifest(manifest, out, console)


def show_corpus(directory: Path, console: Console) -> None:
    """Check every shard of a corpus, and say what it contains. Raises NotFound, Corrupt."""
    show_manifest(ShardSet(directory).manifest, directory, console)


def show_manifest(manifest: CorpusManifest, directory: Path, console: Console) -> None:
    """Print what each source gave, what was left out and why."""
    table = Table("source", "licence", "files", "tokens", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for each in manifest.sources:
        table.add_row(Text(plain(each.name)), Text(plain(each.licence)), f"{each.documents:,}", f"{each.tokens:,}")
    console.print(table)
    for each in manifest.refused[:_SHOWN]:
        where = f"{each.source}/{each.path}" if each.path else each.source
        console.print(Text(f"left out {plain(where)}: {each.reason}: {plain(each.detail)}"))
    if len(manifest.refused) > _SHOWN:
        console.print(Text(f"and {len(manifest.refused) - _SHOWN} more in {directory}/corpus.json"))
    if manifest.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.left_out.items())
        console.print(Text(f"left out: {reasons}"))
    total = f"{directory}: {manifest.documents:,} files, {manifest.tokens:,} tokens in {len(manifest.shards)} shards"
    console.print(Text(total))
