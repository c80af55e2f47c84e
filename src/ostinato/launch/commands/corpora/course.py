"""`ostinato train --corpus DIR --out MODEL`: continued pre-training, with a progress bar and a line per measurement."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ostinato.app.midtraining import Course, ReadingStep, read_into
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.corpus.order import Phase


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
    """Train, show the held-out loss, and say where the model is. Raises what `read_into` raises."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
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

        losses = read_into(config, course, out, tell)
    (_, before), (_, after) = losses[0], losses[-1]
    console.print(
        f"{out}: read {course.steps * course.batch_tokens:,} tokens ({epochs:.2f} epochs), held-out loss {before:.4f} -> {after:.4f}; "
        f"use it with --set model.source='{out}'",
        highlight=False,
    )
