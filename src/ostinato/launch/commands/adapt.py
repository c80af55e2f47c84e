"""`ostinato adapt fit`: fits the dials' directions to the live version, prints what they explain, and writes the basis to the run's log."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.adapt.fit import PROMPTS
from ostinato.app.dials import fit_live
from ostinato.app.storage import open_run
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of
from ostinato.core.records import SteeringBasis
from ostinato.launch.commands.log import existing
from ostinato.launch.views.screen import counting_bar

_MOST_BYTES = 1 << 20


async def fit(config: Config, prompts: Path | None, *, each: int, tokens: int, seed: int, console: Console) -> None:
    """Fit and write a basis. Raises NotFound, BadConfig, StorageFull."""
    existing(config)
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    with open_run(config) as run, counting_bar(disable=False) as bar:
        lines = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done)

        found = await fit_live(run, asked, each=each, tokens=tokens, seed=seed, on_progress=on_progress)
        await run.log.append(SteeringBasis.of(found.basis, wall_clock()))
    table = Table("attribute", "explained on other prompts", "dial")
    for name, share in found.explained.items():
        table.add_row(name, f"{share:.0%}", "yes" if name in found.basis.names else "no")
    console.print(table)
    console.print(
        f"basis {found.basis.hash} of {len(found.basis.tokens_M)} tokens, for the version {found.basis.weights[:12]}, is in the log",
        highlight=False,
    )


def read_prompts(path: Path) -> tuple[str, ...]:
    """A file's prompts, one a line. Raises BadConfig."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadConfig(f"--prompts {path}: larger than {_MOST_BYTES} bytes; some hundred prompts are enough")
        found = tuple(
            dict.fromkeys(line.strip() for line in lines_of(path.read_text(encoding="utf-8")) if line.strip())
        )
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--prompts {path} cannot be read: {error}") from error
    if len(found) < 2:
        raise BadConfig(f"--prompts {path}: give at least two different prompts, one a line; every second one judges")
    return found
