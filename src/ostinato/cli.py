"""The command line: `ostinato COMMAND --help` explains each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console

from ostinato import __version__
from ostinato.config import Config, load
from ostinato.core.errors import OstinatoError

app = App(
    name="ostinato",
    version=__version__,
    help="Real-time reinforcement learning of the model behind a product: serve it, learn from what people do next, "
    "prove that the new checkpoint is better, ship it, with a way back.",
)
weights = App(name="weights", help="Look into the weight store: every version, by hash.")
app.command(weights)

console = Console(stderr=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options that every command takes."""

    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None
    """TOML file; none: defaults."""
    overrides: Annotated[tuple[str, ...], Parameter(name=["--set"], negative="")] = ()
    """Override one key, as in --set train.lr=1e-5; may be repeated."""

    def load(self, *more: str) -> Config:
        """The checked configuration."""
        return load(self.config, (*more, *self.overrides))


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@app.command
def up(common: Common | None = None) -> None:
    """Start gateway, trainer and release worker, and keep them running until Ctrl-C."""
    from ostinato.launch.up import up as run

    _run(run((common or Common()).load(), console))


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
    from ostinato.launch.demo import demo as run
    from ostinato.launch.demo import demo_overrides

    config = (common or Common()).load(*demo_overrides(seed, directory))
    _run(run(config, minutes=minutes, out=out, console=Console()))


@app.command
def serve(common: Common | None = None) -> None:
    """Run the gateway and the embedded engine (a worker of `up`)."""
    from ostinato.launch.serve import serve as run

    _run(run((common or Common()).load()))


@app.command
def train(common: Common | None = None) -> None:
    """Run the trainer (a worker of `up`)."""
    from ostinato.launch.train import train as run

    _run(run((common or Common()).load()))


@app.command
def release(common: Common | None = None) -> None:
    """Run the release worker: evaluate candidates, ship or block them, guard what is live (a worker of `up`)."""
    from ostinato.launch.release import release as run

    _run(run((common or Common()).load()))


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
    from ostinato.launch.release import evaluate_slot

    _run(evaluate_slot((common or Common()).load(), slot, draws, Console()))


@app.command
def status(common: Common | None = None) -> None:
    """What is live, what was learned, how people react: one screen."""
    from ostinato.launch.status import show_status

    _run(show_status((common or Common()).load(), Console()))


@app.command(name="log")
def show_log(
    *,
    kind: Literal["all", "turns", "signals", "rewards", "holdbacks", "batches", "releases", "contracts"] = "all",
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
    from ostinato.launch.status import print_log

    _run(print_log((common or Common()).load(), kind, last, Console()))


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
    from ostinato.launch.release import roll_back

    _run(roll_back((common or Common()).load(), number, reason, Console()))


@weights.command(name="log")
def weights_log(*, ref: str = "live", common: Common | None = None) -> None:
    """The chain of versions behind a ref: number, hash, kind, bytes."""
    from ostinato.launch.weights import print_chain

    _run(print_chain((common or Common()).load(), ref, Console()))


@weights.command
def show(version: str = "live", *, common: Common | None = None) -> None:
    """What a version is made of: kind, size, parent, codecs, and what its publisher said about it.

    Parameters
    ----------
    version
        A ref, a number such as v12, or the first digits of a root.
    """
    from ostinato.launch.versions import show_version

    _run(show_version((common or Common()).load(), version, Console()))


@weights.command
def diff(one: str, other: str, *, html: Path | None = None, common: Common | None = None) -> None:
    """What changed from one version to another, layer by layer.

    Parameters
    ----------
    one
        A ref, a number such as v12, or the first digits of a root.
    other
        The same.
    html
        Also write a page with every tensor.
    """
    from ostinato.launch.versions import diff_versions

    _run(diff_versions((common or Common()).load(), one, other, html, Console()))


@weights.command
def fsck(common: Common | None = None) -> None:
    """Verify every object that a ref can reach."""
    from ostinato.launch.weights import check_store

    _run(check_store((common or Common()).load(), Console()))


@weights.command
def export(target: Path, *, ref: str = "live", common: Common | None = None) -> None:
    """Write a version as a plain Hugging Face directory (safetensors, config, tokenizer).

    Parameters
    ----------
    target
        A new or empty directory.
    ref
        Which version.
    """
    from ostinato.launch.weights import export_model

    _run(export_model((common or Common()).load(), ref, target, Console()))


@weights.command
def replay(common: Common | None = None) -> None:
    """Train again from the log alone and compare every version bit for bit with what was published."""
    from ostinato.launch.weights import replay_run

    _run(replay_run((common or Common()).load(), Console()))


@weights.command(name="drive-vllm")
def drive_vllm(
    url: str,
    *,
    ref: str = "live",
    kv: Literal["recompute", "keep"] = "recompute",
    store: str = "",
    common: Common | None = None,
) -> None:
    """Let a vLLM server follow a ref: it fetches and verifies beside its serving, then swaps under its open streams.

    The server needs VLLM_SERVER_DEV_MODE=1, --weight-transfer-config '{"backend": "ostinato"}' and
    --worker-extension-cls ostinato.publish.vllm.worker.StagingWorker; see the guide.

    Parameters
    ----------
    url
        The server, like http://127.0.0.1:8000.
    ref
        Which version it should serve.
    kv
        recompute: nothing that the old weights computed is read again. keep: open streams and cached prefixes stay as they are.
    store
        How the server names the weight store, if it sees it elsewhere than this command does.
    """
    from ostinato.launch.vllm import drive

    _run(drive((common or Common()).load(), url, ref, kv, store, console))


@app.command
def doctor(common: Common | None = None) -> None:
    """Check this machine: Python, torch, SQLite, CPU features, sandbox, model, disk, port. Each failure names its remedy."""
    from ostinato.launch.doctor import examine

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


if __name__ == "__main__":
    main()
