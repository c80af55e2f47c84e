"""The command line: `ostinato COMMAND --help` explains each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from ostinato import __version__
from ostinato.cli.options import Common, console, run_to_end
from ostinato.cli.weights import weights
from ostinato.core.errors import OstinatoError

app = App(
    name="ostinato",
    version=__version__,
    help="Real-time reinforcement learning of the model behind a product: serve it, learn from what people do next, "
    "prove that the new checkpoint is better, ship it, with a way back.",
)
app.command(weights)


@app.command
def up(common: Common | None = None) -> None:
    """Start gateway, trainer and release worker, and keep them running until Ctrl-C."""
    from ostinato.launch.commands.up import up as run

    run_to_end(run((common or Common()).load(), console))


@app.command
def demo(
    *,
    minutes: float = 12.0,
    seed: int = 0,
    out: Path = Path(),
    directory: Path | None = None,
    common: Common | None = None,
) -> None:
    """The whole loop on a real model with simulated users; writes report.html and report.json.

    Parameters
    ----------
    minutes
        How long the simulated users work. The whole command takes about two minutes more.
    seed
        Seeds users, sampling and evaluation.
    out
        Where report.html and report.json are written.
    directory
        Where the run is kept (default: runs/demo-SEED, emptied first if it holds an earlier demo).
    """
    from ostinato.launch.commands.demo import demo as run
    from ostinato.launch.commands.demo import demo_overrides

    config = (common or Common()).load(*demo_overrides(seed, directory))
    run_to_end(run(config, minutes=minutes, out=out, console=Console()))


@app.command
def serve(common: Common | None = None) -> None:
    """Run the gateway and the embedded engine (a worker of `up`)."""
    import uvloop

    from ostinato.launch.workers.serve import serve as run

    run_to_end(run((common or Common()).load()), uvloop.new_event_loop)


@app.command
def train(common: Common | None = None) -> None:
    """Run the trainer (a worker of `up`)."""
    from ostinato.launch.workers.train import train as run

    run_to_end(run((common or Common()).load()))


@app.command
def release(common: Common | None = None) -> None:
    """Run the release worker: evaluate candidates, ship or block them, guard what is live (a worker of `up`)."""
    from ostinato.launch.workers.release import release as run

    run_to_end(run((common or Common()).load()))


@app.command(name="eval")
def evaluate(*, slot: str = "live", draws: int = 1, common: Common | None = None) -> None:
    """Run the evaluation suite against a slot of the running gateway and print the score with its interval.

    Parameters
    ----------
    slot
        live, canary, control or candidate.
    draws
        Samples per item.
    """
    from ostinato.launch.commands.release import evaluate_slot

    run_to_end(evaluate_slot((common or Common()).load(), slot, draws, Console()))


@app.command
def status(common: Common | None = None) -> None:
    """What is live, what was learned, how people react: one screen."""
    from ostinato.launch.commands.status import show_status

    run_to_end(show_status((common or Common()).load(), Console()))


@app.command(name="log")
def show_log(
    *,
    kind: Literal[
        "all", "turns", "signals", "rewards", "quarantines", "holdbacks", "batches", "releases", "contracts", "alarms"
    ] = "all",
    last: Annotated[int, Parameter(name=["--last", "-n"])] = 20,
    common: Common | None = None,
) -> None:
    """Print the newest rows of the append-only log.

    Parameters
    ----------
    kind
        Only rows of this kind.
    last
        How many.
    """
    from ostinato.launch.commands.status import print_log

    run_to_end(print_log((common or Common()).load(), kind, last, Console()))


@app.command
def rollback(number: int | None = None, *, reason: str = "by hand", common: Common | None = None) -> None:
    """Put an earlier release before users again; engines follow within seconds.

    Parameters
    ----------
    number
        The release to go back to, as its policy number; none: the one before the live one.
    reason
        Kept in the ledger.
    """
    from ostinato.launch.commands.release import roll_back

    run_to_end(roll_back((common or Common()).load(), number, reason, Console()))


@app.command
def doctor(common: Common | None = None) -> None:
    """Check this machine: Python, torch, SQLite, CPU features, sandbox, model, disk, port. Each failure names its remedy."""
    from ostinato.launch.commands.doctor import examine

    if not examine((common or Common()).load(), Console()):
        sys.exit(1)


def _explain(error: BaseException) -> None:
    """An expected error is one red line, not a traceback; anything else is a defect and keeps its traceback."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _explain(inner)
    elif isinstance(error, OstinatoError):
        console.print(f"[bold red]error[/] {error}", highlight=False)
    else:
        raise error


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (OstinatoError, BaseExceptionGroup) as error:
        _explain(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
