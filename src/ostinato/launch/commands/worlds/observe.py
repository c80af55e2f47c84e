"""`ostinato worlds observe` and `episodes`: observations of machines, and of what the model was shown."""

from __future__ import annotations

import hashlib
import platform
from collections import defaultdict
from pathlib import Path
from typing import Literal

from rich.console import Console

from ostinato.app.storage import open_run
from ostinato.config import Config
from ostinato.core.errors import NotFound, StorageFull
from ostinato.core.records import Arm, Turn
from ostinato.launch.commands.log import existing
from ostinato.launch.views.page.page_cli import Spelling
from ostinato.worlds.fidelity.look import look
from ostinato.worlds.fidelity.observation import Observation, of_turns
from ostinato.worlds.fidelity.observe import script


def observation_of_this(group: str) -> str:
    """An observation of this machine, as a line."""
    return Observation(group=group or _hashed(platform.node()), features=look()).line()


def source() -> str:
    """The script that writes such a line."""
    return script()


async def write_episodes(
    config: Config, whose: Literal["people", "world"], out: Path, most: int, console: Console
) -> None:
    """Write the newest episodes of a run, oldest first. Raises NotFound if there are none, StorageFull."""
    existing(config)
    episodes: defaultdict[str, list[Turn]] = defaultdict(list)
    with open_run(config) as run:
        async for _, row in run.log.read(0, {Turn}):
            if isinstance(row, Turn) and not row.redacted and _wanted(row, whose):
                episodes[row.episode].append(row)
                if len(episodes) > most:
                    del episodes[next(iter(episodes))]
    if not episodes:
        raise NotFound(f"the log has no turns of {whose}; serve some first")
    pieces = Spelling(config)
    lines = [of_turns(turns, pieces, _group(turns[0])).line() for turns in episodes.values()]
    try:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageFull(f"{out} cannot be written: {error.strerror}; name another file with --out") from error
    console.print(f"{len(lines)} episodes of {whose} in {out}", highlight=False)


def _wanted(turn: Turn, whose: str) -> bool:
    return turn.arm is Arm.WORLD if whose == "world" else turn.arm.people


def _group(turn: Turn) -> str:
    """The group of a turn: the rollouts of a task, or the episodes of a person, who is not named."""
    return turn.group or _hashed("\0".join(turn.person))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
