"""The options that every command takes.

No module of this package imports a command's implementation before the command runs, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators
from rich.console import Console

if TYPE_CHECKING:
    from ostinato.config import Config

console = Console(stderr=True)

Flag = Annotated[bool, Parameter(negative="")]
Words = Annotated[tuple[str, ...], Parameter(negative="")]
Paths = Annotated[tuple[Path, ...], Parameter(negative="")]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Count = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Share = Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options that every command takes."""

    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None
    """TOML file with settings. Default: an existing run's own settings if the command needs a run, else the defaults."""
    overrides: Annotated[tuple[str, ...], Parameter(name=["--set"], negative="")] = ()
    """Override one key, as in --set train.learning_rate=1e-5; may be repeated. `ostinato config` lists all keys."""

    def load(self, *more: str) -> Config:
        """Load and validate the configuration. Raises BadConfig."""
        from ostinato.config import load

        return load(self.config, (*more, *self.overrides))

    def starting(self, *more: str) -> Config:
        """As `load`, for a command that loads models or runs code. Prints where caches are put if their usual place is not writable."""
        from ostinato.core.places import ensure_writable

        config = self.load(*more)
        for line in ensure_writable(config.run.directory):
            console.print(line, style="yellow", highlight=False, soft_wrap=True)
        return config

    def of_run(self, directory: Path | None = None, more: Sequence[str] = ()) -> Config:
        """Load the configuration of an existing run. Unless a file is named, it is the one that the run was started with.

        Args:
            directory: the run's directory; None: `run.directory`, which need not exist if `record.url` names the run's log.
            more: overrides of lower precedence than the user's.

        Raises:
            NotFound: there is no run. Nothing is created.
            BadConfig: the configuration is wrong.
        """
        from ostinato.app.storage import check_elsewhere
        from ostinato.config import as_override, load, load_saved, tenant_of
        from ostinato.core.errors import BadConfig, NotFound

        if directory is None:
            given = self.load(*more)
            directory = given.run.directory
            if given.record.url and not (directory / "log").exists():
                check_elsewhere(given)
                return given
        own = directory / "config.json"
        overrides = (*more, *self.overrides, as_override("run.directory", str(directory)))
        unknown = list[str]()
        if self.config is not None or not own.exists():
            config = load(self.config, overrides)
            tenant = tenant_of(own)
            if tenant and tenant != config.run.tenant:
                raise BadConfig(
                    f"{directory} is the run of {tenant}'s branch, with settings of its own: leave out --config"
                )
        else:
            config, unknown = load_saved(own, overrides)
        if not (directory / "log").exists():
            if not (own.exists() and config.record.url):
                raise NotFound(
                    f"no run in {directory}; name its directory with --set run.directory=..., or start one with `ostinato up`"
                )
            check_elsewhere(config)  # the log is on another host, e.g. if this one runs only `up --on ray`
        if unknown:
            console.print(
                f"{own} is of another version; left out: {', '.join(unknown)}", style="yellow", highlight=False
            )
        return config

    def of_run_or_new(self) -> Config:
        """Load the configuration of an existing run, as `of_run`, or of a new one. Raises BadConfig."""
        config = self.load()
        return self.of_run() if (config.run.directory / "log").exists() else config

    def of_store(self, more: Sequence[str] = ()) -> Config:
        """Load the configuration for reading a weight store: a run's, or without a run the store of `weights.url` or one made by `pull`.

        Raises NotFound, BadConfig as `of_run`.
        """
        config = self.load(*more)
        place = config.run.directory
        alone = (config.weights.url or (place / "weights").exists()) and not (place / "log").exists()
        return config if alone else self.of_run(more=more)


DEFAULTS = Common()
"""The options of a command line that gives none of them."""
