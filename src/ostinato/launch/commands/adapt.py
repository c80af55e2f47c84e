"""`ostinato adapt`: fits the dials' directions to the live version, tries them against a suite of safety, writes the basis to the log."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from ostinato.adapt.fit import PROMPTS
from ostinato.app.dials import BasisCheck, Safety, Told, check_live, fit_live
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
    """Fit and write a basis; with `adapt.safety.suite` it is tried first. Raises NotFound, BadConfig, StorageFull."""
    existing(config)
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    with open_run(config) as run:
        with _progress() as told:
            found = await fit_live(run, asked, each=each, tokens=tokens, seed=seed, on_progress=told)
        table = Table("attribute", "explained on other prompts", "dial")
        for name, share in found.explained.items():
            table.add_row(name, f"{share:.0%}", "yes" if name in found.basis.names else "no")
        console.print(table)
        basis = found.basis
        if config.adapt.safety.suite:
            with _progress() as told:
                checked = await check_live(run, basis, seed=seed, on_progress=told)
            _show(checked, config.adapt.safety.margin, console)
            basis = checked.kept
        await run.log.append(SteeringBasis.of(basis, wall_clock()))
    console.print(
        f"basis {basis.hash} of {len(basis.tokens_M)} tokens, for the version {basis.weights[:12]}, is in the log",
        highlight=False,
    )


async def check(config: Config, *, seed: int, console: Console) -> bool:
    """Try the live version's basis, and write it again without the dials that failed. True if every corner was shown to be safe.

    Raises NotFound, BadConfig, Unavailable, StorageFull.
    """
    existing(config)
    with open_run(config) as run:
        with _progress() as told:
            found = await check_live(run, None, seed=seed, on_progress=told)
        _show(found, config.adapt.safety.margin, console)
        if found.dropped:
            await run.log.append(SteeringBasis.of(found.kept, wall_clock()))
            console.print(f"basis {found.kept.hash} is in the log in the place of {found.basis.hash}", highlight=False)
    return found.safe


def _show(found: BasisCheck, margin: float, console: Console) -> None:
    """Print what was shown of each corner, and what became of the dials."""
    table = Table("corner", "violations above the base's", "bounds", "prompts", "needed", "found")
    for each in found.corners:
        table.add_row(
            each.corner.name,
            f"{100 * each.rise:+.1f} pp",
            f"{100 * each.lower:+.1f} to {100 * each.upper:+.1f}",
            str(each.prompts),
            str(each.needed),
            each.found.value,
        )
    console.print(table)
    console.print(f"the base model: {found.base:.1%} violations; margin {100 * margin:g} pp", highlight=False)
    if found.dropped:
        left = "no dial is left, and nobody's answers lean" if len(found.dropped) == len(found.basis.names) else ""
        console.print(f"dropped: {', '.join(found.dropped)}{'; ' if left else ''}{left}", highlight=False)
    if unknown := [each.corner.name for each in found.corners if each.found is Safety.OPEN]:
        needed = max(each.needed for each in found.corners if each.found is Safety.OPEN)
        console.print(
            f"not shown to be safe, and kept: {', '.join(unknown)}. Give adapt.safety.suite {needed} prompts, or widen adapt.safety.margin",
            highlight=False,
        )


@contextmanager
def _progress() -> Generator[Told]:
    """A bar with a line for each thing that is told of."""
    with counting_bar(disable=False) as bar:
        lines: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done)

        yield told


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
