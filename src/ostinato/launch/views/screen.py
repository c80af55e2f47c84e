"""Terminal output of commands: lines and tables about a run, progress bars, and the escaping of untrusted text."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ostinato.config import Config, RunConfig
from ostinato.core.durations import ago
from ostinato.core.records import Arm
from ostinato.core.report import headline

if TYPE_CHECKING:  # most commands do not need them
    from ostinato.evaluate.acceptance import Acceptance
    from ostinato.status.arms import ArmAcceptance

WIDTH = 30
BOLD = "table.header"
"""Rich's style of table headings."""


def bare_table(*names: str, right: Iterable[int] = (), header_style: str = "dim") -> Table:
    """Return a table without lines. `right`: indices of the right-aligned columns."""
    table = Table(*names, box=None, pad_edge=False, header_style=header_style)
    for number in right:
        table.columns[number].justify = "right"
    return table


def bar(point: Acceptance) -> Text:
    """Return acceptance as a bar on which its 95% confidence interval (clustered by user) is marked."""
    text = Text()
    for cell in range(WIDTH):
        share = (cell + 0.5) / WIDTH
        inside = point.lower <= share <= point.upper
        text.append("━" if share <= point.acceptance else "╌" if inside else " ", "green" if inside else "cyan")
    return text


def arms_table(rows: Sequence[ArmAcceptance], who: str, when: str) -> Table:
    """Return a table of acceptance by arm. `who` is the heading of the arms, `when` says which turns are counted."""
    table = bare_table(who, f"acceptance, {when}", "", "95%", "turns", "policy")
    for row in sorted(rows, key=lambda row: _ARM_ORDER.index(row.arm)):
        point = row.point
        name = row.arm + (" (frozen)" if row.arm == Arm.CONTROL else "")
        share = (f"{100 * point.acceptance:.0f}%", f"{100 * point.lower:.0f} to {100 * point.upper:.0f}")
        policy = "-" if row.newest is None else f"v{row.newest}"
        table.add_row(name, bar(point), *share, str(point.turns), policy)
    return table


_LAST_ARMS = (Arm.CONTROL, Arm.EVAL, Arm.WORLD, Arm.OUTSIDE)
_ARM_ORDER = (*(arm for arm in Arm if arm not in _LAST_ARMS), *_LAST_ARMS)
"""The order of the arms in a table."""


def step_line(step: dict[str, Any]) -> str:
    """Return one line about an optimizer step."""
    own = f"on-policy {100 * step['on_policy']:.0f}%  " if "on_policy" in step else ""
    measured = (("kl_k1", "KL"), ("anchor_kl", "KL from the anchor"))  # kl_k1 exists only with `train.kl_beta`
    kl = next((f"{name} {step[key]:+.4f}  " for key, name in measured if key in step), "")
    return (
        f"step {step['step']:>3}  reward {step['reward_mean']:+.3f}  {kl}ESS {step['ess']:.2f}  {own}"
        f"{step['tokens']:.0f} tokens ({step['tokens_saved']:.0f} shared)  {step['seconds']:.0f} s"
    )


def release_line(action: str, number: int, reason: str, actor: str | None = None) -> Text:
    """Return one line of the release ledger, its reason cut to the headline. `actor`: the person who did it."""
    style = {"shipped": "bold green", "blocked": "yellow", "rolled_back": "bold red"}.get(action, "dim")
    by = "" if actor is None else f"by {actor}: "
    back = "to " if action == "rolled_back" else ""
    return Text.assemble((f"{action.replace('_', ' '):11}", style), f" {back}v{number}  {by}{headline(reason)}")


def published_line(line: dict[str, Any]) -> str:
    """Return one line about a publication."""
    return f"{line['form']} v{line['number']}: {line['bytes'] / 1e6:.2f} MB of {line['full_bytes'] / 1e6:.0f} MB"


def swap_line(line: dict[str, Any]) -> str:
    """Return one line about the last hot swap of the live slot."""
    return f"last swap: v{line['number']}, pause {1e3 * line['pause_s']:.2f} ms, {line['streams']} streams"


def lent_line(line: dict[str, Any], now: float) -> str:
    """Return one line about the vLLM servers that are lent from people to rollouts."""
    given = f"; {line['tokens']:.0f} tokens in {line['seconds'] / 3600:.2f} server-hours, {line['cut']} answers cut off"
    back = f", {line['returning']} returning" if line["returning"] else ""
    why = f"; {ago(now - line['at'])} ago {line['why']}" if line["why"] else ""
    return f"lent to rollouts: {line['lent']}{back}, {line['serving']} serving people{given}{why}"


def run_option(config: Config) -> str:
    """Return the option that selects this run in another command; "" for the default run. Example: ``--set run.directory=runs/demo-0``"""
    place = config.run.directory
    return "" if place == RunConfig().directory else f"--set {shlex.quote(f'run.directory={place}')}"


# ---------------------------------------------------------------- plain text


def plain(text: str) -> str:
    """Escape control characters as in Python's repr, so that a terminal does not obey them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def plain_lines(text: str) -> str:
    """As `plain`, but keep line breaks."""
    return "\n".join(plain(line) for line in text.split("\n"))


def say(console: Console, words: str, style: str = "") -> None:
    """Print `plain_lines` of a text, without Rich's markup, highlighting and line wrapping."""
    console.print(Text(plain_lines(words), style), soft_wrap=True)


# ---------------------------------------------------------------- progress bars


def counting_bar(*columns: str | ProgressColumn, console: Console | None = None, disable: bool = False) -> Progress:
    """Return progress bars with a count of done and total, and further columns (by default the elapsed time). They are shown on standard
    error unless `console` is given, and disappear at their end.
    """
    shown = ("{task.description}", BarColumn(), MofNCompleteColumn(), *(columns or (TimeElapsedColumn(),)))
    return Progress(*shown, console=console or Console(stderr=True), transient=True, disable=disable)


@contextlib.contextmanager
def counting_bars(*, disable: bool = False) -> Generator[Callable[[str, int, int], None]]:
    """Yield a function of (what, done, total) that shows a `counting_bar` for each `what`."""
    with counting_bar(disable=disable) as bar:
        lines: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done, total=total)

        yield told


@contextlib.contextmanager
def measured_bar(console: Console, what: str, *columns: ProgressColumn) -> Generator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that updates one progress bar."""
    with Progress("{task.description}", BarColumn(), *columns, console=console) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
