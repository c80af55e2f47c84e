"""`ostinato train --demonstrations FILE --out DIR`: a start by imitation, with a progress bar and a line per step."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ostinato.app.imitation import imitate_into, read_demonstrations
from ostinato.config import Config
from ostinato.core.weights import Learned


def imitate_file(config: Config, file: Path, out: Path, epochs: int, batch: int, console: Console) -> None:
    """Train, show the loss on the demonstrations, and say where the model is. Raises BadConfig, StorageFull."""
    shown = read_demonstrations(file)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        line = bar.add_task("loading the model", total=epochs * math.ceil(len(shown) / batch))

        def tell(learned: Learned) -> None:
            loss = learned.metrics["entropy_proxy"]
            bar.update(line, description=f"loss {loss:.3f} nats per token", advance=1)
            console.print(
                f"step {learned.step:>4}  loss {loss:.3f}  {learned.metrics['seconds']:.1f} s", highlight=False
            )

        imitate_into(config, shown, out, epochs=epochs, batch=batch, on_step=tell)
    console.print(
        f"{out}: learned from {len(shown)} demonstrations; use it with --set model.source='{out}'", highlight=False
    )
