"""The command `probe`: a table of what gives a simulation away."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.launch.views.plain import plain
from ostinato.worlds.fidelity.observe import read_observations
from ostinato.worlds.fidelity.paired import match_prompts, tell_pairs_apart
from ostinato.worlds.fidelity.probe import BOUND, FEWEST, Probed, tell_apart

_SURE = 0.05


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
    """Compare both sides and print the result. `same_prompts`: use only prompts that both were given. Raises NotFound, BadRequest."""
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
        console.print(
            Text(f"{matched.prompts} prompts are shared, {len(matched.production)} pairs drawn; {out}", "dim")
        )
    sides = f"{_counted(found.production)} of production, {_counted(found.simulation)} of simulation, {found.columns} columns"
    console.print(Text(sides, "dim"))
    chance = "" if found.p is None else f", p = {found.p:.2g} by permutation of the labels"
    console.print(f"AUC {found.auc:.3f} [{found.lower:.3f}, {found.upper:.3f}]{chance}", highlight=False)
    console.print(Text(verdict(found), "green" if found.faithful else "red" if found.told_apart else "yellow"))
    table = Table(box=None, pad_edge=False)
    for name in ("feature", "AUC", "p (Holm)", "production", "simulation"):
        table.add_column(name, overflow="fold")
    for tell in found.tells[:tells]:
        style = "bold" if tell.p < _SURE else "dim"
        words = (plain(tell.name), f"{tell.auc:.3f}", f"{tell.p:.2g}", tell.production, tell.simulation)
        table.add_row(*(Text(word, style) for word in words))
    console.print(table)


def verdict(found: Probed) -> str:
    """The verdict in words, for an operator."""
    units = "independent pairs" if found.paired else "groups on each side"
    aside = ", the task mix set aside" if found.paired else ""
    if found.too_few:
        return f"too few groups: at least {FEWEST} on each side are needed, and {found.needed} {units} to rule out an AUC of {BOUND:g}"
    if found.told_apart:
        return f"told apart{aside}: a model can know that it is in a simulation, by the features below"
    if found.faithful:
        return f"an AUC above {BOUND:g} is ruled out by these features{aside}"
    return (
        f"not told apart{aside}, but not ruled out either: {found.needed} {units} would rule out an AUC above {BOUND:g}"
    )


def _counted(counts: tuple[int, int]) -> str:
    return f"{counts[0]} observations in {counts[1]} groups"
