"""The sim-to-real gap. `ostinato worlds observe` and `episodes`: collect observations of machines and of what the model was shown.

`ostinato worlds probe`: a classifier two-sample test between production and simulation, with the features that tell them apart.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import existing_home, open_run, rows_of
from ostinato.config import Config
from ostinato.core.errors import NotFound, StorageFull
from ostinato.core.records import Arm, Turn
from ostinato.launch.views.page import LazyTokenBytes
from ostinato.launch.views.screen import plain, say
from ostinato.worlds.fidelity.look import look
from ostinato.worlds.fidelity.observation import Observation, of_turns
from ostinato.worlds.fidelity.observe import read_observations
from ostinato.worlds.fidelity.paired import match_prompts, tell_pairs_apart
from ostinato.worlds.fidelity.probe import BOUND, FEWEST, ProbeResult, tell_apart


def observation_of_this(group: str) -> str:
    """Return an observation of this machine as a JSON line."""
    return Observation(group=group or _hashed(platform.node()), features=look()).line()


async def write_episodes(
    config: Config, whose: Literal["people", "world"], out: Path, most: int, console: Console
) -> None:
    """Write the `most` newest episodes of a run to `out`, oldest first. Raises NotFound if there are none, StorageFull."""
    existing_home(config)
    episodes: defaultdict[str, list[Turn]] = defaultdict(list)
    with open_run(config) as run:
        async for row in rows_of(run.log, Turn):
            if not row.redacted and _wanted(row, whose):
                episodes[row.episode].append(row)
                if len(episodes) > most:
                    del episodes[next(iter(episodes))]
    if not episodes:
        raise NotFound(f"the log has no turns of {whose}; serve some first")
    pieces = LazyTokenBytes(config)
    lines = [of_turns(turns, pieces, _group(turns[0])).line() for turns in episodes.values()]
    try:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageFull(f"{out} cannot be written: {error.strerror}; name another file with --out") from error
    say(console, f"{len(lines)} episodes of {whose} in {out}")


def _wanted(turn: Turn, whose: str) -> bool:
    return turn.arm is Arm.WORLD if whose == "world" else turn.arm.people


def _group(turn: Turn) -> str:
    """Return a turn's group: that of its rollouts of one task, or a hash of its person."""
    return turn.group or _hashed("\0".join(turn.person))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------- probing


_SIGNIFICANT_P = 0.05


def show_probe(
    production: Path,
    simulation: Path,
    seed: int,
    tells: int,
    console: Console,
    *,
    same_prompts: bool = False,
    machine: bool,
) -> None:
    """Compare both sides and print the result. `same_prompts`: use only prompts that both sides have. Raises NotFound, BadRequest."""
    matched, first, second = None, read_observations(production), read_observations(simulation)
    if same_prompts:
        matched = match_prompts(first, second, seed=seed)
        found = tell_pairs_apart(matched, seed=seed)
    else:
        found = tell_apart(first, second, seed=seed)
    if machine:
        shared = None if matched is None else {"shared": matched.prompts, "left_out": matched.left_out}
        told = {**asdict(found), "verdict": verdict(found), "prompts": shared}
        console.out(json.dumps(told, allow_nan=False), highlight=False)
        return
    if matched is not None:
        out = f"{matched.left_out[0]} of production and {matched.left_out[1]} of simulation left out"
        say(console, f"{matched.prompts} prompts are shared, {len(matched.production)} pairs drawn; {out}", "dim")
    sides = f"{_counted(found.production)} of production, {_counted(found.simulation)} of simulation, {found.columns} columns"
    console.print(Text(sides, "dim"))
    chance = "" if found.p is None else f", p = {found.p:.2g} by permutation of the labels"
    console.print(f"AUC {found.auc:.3f} [{found.lower:.3f}, {found.upper:.3f}]{chance}", highlight=False)
    console.print(Text(verdict(found), "green" if found.faithful else "red" if found.told_apart else "yellow"))
    table = Table("feature", "AUC", "p (Holm)", "production", "simulation", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for tell in found.tells[:tells]:
        style = "bold" if tell.p < _SIGNIFICANT_P else "dim"
        words = (plain(tell.name), f"{tell.auc:.3f}", f"{tell.p:.2g}", tell.production, tell.simulation)
        table.add_row(*(Text(word, style) for word in words))
    console.print(table)


def verdict(found: ProbeResult) -> str:
    """Return the verdict in words, for an operator."""
    units = "independent pairs" if found.paired else "groups on each side"
    aside = ", the task mix set aside" if found.paired else ""
    if found.too_few:
        return f"too few groups: at least {FEWEST} on each side are needed, and {found.needed} {units} to rule out an AUC of {BOUND:g}"
    if found.told_apart:
        return f"told apart{aside}: a model can know that it is in a simulation, by the features below"
    if found.faithful:
        return f"an AUC above {BOUND:g} is ruled out by these features{aside}"
    enough = f"{found.needed} {units} would rule out an AUC above {BOUND:g}"
    return f"not told apart{aside}, but not ruled out either: {enough}"


def _counted(counts: tuple[int, int]) -> str:
    return f"{counts[0]} observations in {counts[1]} groups"
