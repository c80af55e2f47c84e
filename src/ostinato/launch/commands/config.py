"""`ostinato config`: every key that can be set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ostinato.config import Config, nearest, origins
from ostinato.core.errors import NotFound
from ostinato.launch.views.keys import blocks, listed, table

WIDE = 140  # columns


def list_keys(
    config: Config, path: Path | None, overrides: Sequence[str], prefix: str, console: Console, *, as_json: bool
) -> None:
    """Print the keys below `prefix`. Raises NotFound, naming the nearest key or section, if there are none."""
    every = listed(config, origins(path, overrides))
    found = [key for key in every if f"{key.name}.".startswith(f"{prefix}." if prefix else "")]
    if not found:
        names = {key.name.rpartition(".")[0] for key in every} | {key.name for key in every}
        close = nearest(prefix, sorted(names))
        known = f"did you mean {close!r}?" if close else f"sections: {', '.join(Config.model_fields)}"
        raise NotFound(f"no key or section {prefix!r}; {known}")
    if as_json:
        console.print_json(json.dumps([asdict(key) for key in found]))
    else:
        console.print(table(found) if console.width >= WIDE else blocks(found))
