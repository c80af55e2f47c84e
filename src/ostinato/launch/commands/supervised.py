"""Supervised training: `ostinato corpus build` and `show`, and `ostinato train` on a corpus (mid-training) or demonstrations (SFT).

Both kinds of training show a progress bar, and a line per measurement or step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ostinato.app import supervised
from ostinato.app.supervised import CorpusDesk, Course, ReadingStep
from ostinato.config import Config
from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.weights import Learned
from ostinato.corpus.build import check_new
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.order import Phase
from ostinato.corpus.shards import CorpusManifest, ShardSet
from ostinato.launch.views.screen import counting_bar, plain, say

_SHOWN = 20


async def build_corpus(
    config: Config, sources: Sequence[str], out: Path, settings: CorpusConfig, against: Sequence[Path], console: Console
) -> None:
    """Build a corpus with a progress bar, and print what it contains and what was left out. An unreadable source is listed as left out.

    Raises BadConfig and BadRequest; nothing is written then.
    """
    check_new(out)
    desk = CorpusDesk(config, settings, against)
    found = "{task.fields[files]} files, {task.fields[tokens]:,} tokens"
    with counting_bar(found, TimeElapsedColumn(), console=console) as bar:
        line = bar.add_task("sources", total=len(sources), files=0, tokens=0)
        seen = 0

        def on_file() -> None:
            nonlocal seen
            seen += 1
            bar.update(line, files=seen, tokens=desk.build.tokens)

        for name in sources:
            bar.update(line, description=plain(name))
            try:
                desk.build.take(await supervised.open_source(name), on_file)
            except OstinatoError as error:
                desk.build.refuse(name, "source", str(error))
            bar.advance(line)
        bar.update(line, description="writing")
        manifest = desk.write(out)
    show_manifest(manifest, out, console)


def show_corpus(directory: Path, console: Console) -> None:
    """Verify every shard of a corpus, and print what it contains. Raises NotFound, Corrupt."""
    show_manifest(ShardSet(directory).manifest, directory, console)


def show_manifest(manifest: CorpusManifest, directory: Path, console: Console) -> None:
    """Print what each source contributed, and what was left out and why."""
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


# ---------------------------------------------------------------- mid-training


def phases_of(words: tuple[str, ...]) -> tuple[Phase, ...]:
    """Parse phases as written on the command line, such as ("512:3", "1024"). Raises BadConfig."""
    found: list[Phase] = []
    for word in words:
        length, _, share = word.partition(":")
        try:
            found.append(Phase(length=int(length), share=float(share or 1)))
        except ValueError as error:
            raise BadConfig(f"--length {word!r}: give tokens, or tokens:share, as in 512:3") from error
    return tuple(found)


def read_corpora(config: Config, course: Course, out: Path, console: Console) -> None:
    """Train on a corpus, show the held-out loss, and print where the model is. Raises what `read_into` raises."""
    with counting_bar(TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        line = bar.add_task("loading the model", total=course.steps)
        epochs = 0.0

        def tell(at: ReadingStep) -> None:
            nonlocal epochs
            epochs = at.epochs
            words = [f"step {at.step:>5}"]
            if at.metrics:
                words += [f"loss {at.metrics['loss']:.4f}", f"{at.metrics['tokens_per_second']:.0f} tokens/s"]
            bar.update(line, completed=at.step, description="  ".join(words))
            if at.held_out is not None:
                console.print("  ".join((*words, f"held out {at.held_out:.4f} nats per token")), highlight=False)

        losses = supervised.read_into(config, course, out, tell)
    (_, before), (_, after) = losses[0], losses[-1]
    read = f"read {course.steps * course.batch_tokens:,} tokens ({epochs:.2f} epochs)"
    say(console, f"{out}: {read}, held-out loss {before:.4f} -> {after:.4f}; use it with --set model.source='{out}'")


# ---------------------------------------------------------------- SFT on demonstrations


def imitate_file(config: Config, file: Path, out: Path, epochs: int, batch: int, console: Console) -> None:
    """Fine-tune on demonstrations, show the loss, and print where the model is. Raises BadConfig, StorageFull."""
    shown = supervised.read_demonstrations(file)
    with counting_bar(TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        line = bar.add_task("loading the model", total=epochs * math.ceil(len(shown) / batch))

        def tell(learned: Learned) -> None:
            loss = learned.metrics["entropy_proxy"]
            bar.update(line, description=f"loss {loss:.3f} nats per token", advance=1)
            say(console, f"step {learned.step:>4}  loss {loss:.3f}  {learned.metrics['seconds']:.1f} s")

        supervised.imitate_into(config, shown, out, epochs=epochs, batch=batch, on_step=tell)
    say(console, f"{out}: learned from {len(shown)} demonstrations; use it with --set model.source='{out}'")
