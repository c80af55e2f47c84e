"""The options that every command takes.

Nothing here, nor in the other files of this room, imports what a command does before the command is run: help comes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

if TYPE_CHECKING:
    from ostinato.config import Config

console = Console(stderr=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options that every command takes."""

    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None
    """TOML file; none: defaults."""
    overrides: Annotated[tuple[str, ...], Parameter(name=["--set"], negative="")] = ()
    """Override one key, as in --set train.learning_rate=1e-5; may be repeated. `ostinato config` lists them."""

    def load(self, *more: str) -> Config:
        """The checked configuration."""
        from ostinato.config import load

        return load(self.config, (*more, *self.overrides))

    def of_run(self, directory: Path | None) -> Config:
        """The checked configuration of the run in a directory: the one that it was started with, where no other file is named."""
        from ostinato.config import load, load_saved

        if directory is None:
            return self.load()
        own, overrides = directory / "config.json", (f"run.directory='{directory}'", *self.overrides)
        if self.config is not None or not own.exists():
            return load(self.config, overrides)
        config, unknown = load_saved(own, overrides)
        if unknown:
            console.print(
                f"{own} is of another version; left out: {', '.join(unknown)}", style="yellow", highlight=False
            )
        return config
