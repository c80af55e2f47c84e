"""The command line: `ostinato COMMAND --help` explains each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, validators
from rich.console import Console
from rich.text import Text

from ostinato import __version__
from ostinato.cli.adapt import adapt
from ostinato.cli.approvals import alarms, approve, refuse, rollback, ship
from ostinato.cli.connect import connect, watch
from ostinato.cli.corpus import corpus
from ostinato.cli.options import DEFAULTS, Common, Flag, Positive, console
from ostinato.cli.reward import reward
from ostinato.cli.suite import suite
from ostinato.cli.weights import weights
from ostinato.cli.workers import compute, housekeeping, plan, rollout, run_worker, serve, train
from ostinato.cli.worlds import worlds
from ostinato.core.errors import BadConfig, BadRequest, OstinatoError
from ostinato.core.interpreter import collecting_rarely

app = App(
    name="ostinato",
    version=__version__,
    help="Real-time reinforcement learning of the model behind a product: serve it, learn from what people do next, "
    "prove that the new checkpoint is better, ship it, and roll back if it is worse.",
    suppress_keyboard_interrupt=False,  # `ostinato.cli.main` gives the exit code
)
for _group in (weights, alarms, connect, watch, worlds, corpus, reward, suite, adapt):
    app.command(_group)
for _command in (serve, train, rollout, housekeeping, ship, approve, refuse, rollback, plan, compute):
    app.command(_command)


@app.command
def up(*, on: Literal["here", "ray"] = "here", common: Common = DEFAULTS) -> None:
    """Start gateway, trainer, release worker and housekeeping, and keep them running until Ctrl-C.

    A worker that dies or hangs is restarted. If one cannot run at all, the command prints the reason, and serving goes on without it.
    If the gateway itself cannot run, the command exits with 2.

    Parameters
    ----------
    on
        here: as processes of this machine. ray: on the nodes of a Ray cluster (settings `ray`), with the log in Postgres (`record.url`)
        and the weights in a bucket (`weights.url`).
    """
    from ostinato.launch.placing.warm import forked_workers

    def say(what: str) -> None:
        console.print(Text.assemble((f"{'up':12}", "bold"), " ", what), highlight=False, soft_wrap=True)

    # first, since the fork server imports in parallel
    with forked_workers(say) if on == "here" else contextlib.nullcontext():
        with collecting_rarely():
            from ostinato.launch.commands.up import up as run

        asyncio.run(run(common.starting(), console, on))


@app.command
def scale(
    worker: Literal["rollout"],
    number: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1000))],
    *,
    common: Common = DEFAULTS,
) -> None:
    """Set how many workers of a kind a run on Ray has, until the run ends.

    Parameters
    ----------
    worker
        The kind of worker.
    number
        How many workers. Ray places new ones where there is room; the newest are stopped first.
    """
    from ostinato.launch.commands.compute import scale_rollouts

    scale_rollouts(common.of_run(), number, Console())


demo = App(
    name="demo",
    help="The whole loop on a real model with simulated users; writes report.html and report.json. `ostinato demo worlds` begins in a "
    "simulated world.",
)
app.command(demo)


@demo.default
def run_demo(
    *,
    scenario: Literal["copilot", "tab", "personal"] | None = None,
    minutes: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    seed: int = 0,
    out: Path = Path(),
    directory: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Run the whole loop on a real model with simulated users; writes report.html and report.json.

    Parameters
    ----------
    scenario
        copilot: write small functions, judged by hidden tests. tab: complete short lists, some of which are unknowable, so that the
        model may also suggest nothing. personal: people with different wishes, to whom answers lean by their ratings; nothing is
        trained, it takes about five minutes on two cores. It exits with 1 if it does not show that they accept more than the
        holdout. Default: copilot, or tab where this machine has no sandbox for the functions.
    minutes
        Minutes that the simulated users work (default: 12). The whole command takes about two minutes more. On a CPU without bf16
        instructions steps take about twice as long: set 40. Not for personal, which ends after a fixed number of answers.
    seed
        Seeds users, sampling and evaluation.
    out
        Where report.html and report.json are written.
    directory
        Where the run is kept (default: runs/demo-SEED, or demo-tab-SEED, demo-personal-SEED; emptied first if it holds an earlier
        demo).
    """
    from ostinato.launch.commands.demo import choose, demo_overrides
    from ostinato.launch.commands.demo import demo as run

    out_console = Console()
    if scenario == "personal":
        from ostinato.launch.commands.personal_demo import personal_demo, personal_overrides

        if minutes is not None:
            raise BadConfig("--minutes: --scenario personal ends after a fixed number of answers; leave it out")
        config = common.starting(*personal_overrides(seed, directory))
        sys.exit(0 if asyncio.run(personal_demo(config, seed=seed, out=out, console=out_console)) else 1)
    chosen = asyncio.run(choose(scenario, common.load().sandbox, out_console))
    config = common.starting(*demo_overrides(chosen, seed, directory))
    asyncio.run(run(config, scenario=chosen, seed=seed, minutes=minutes or 12.0, out=out, console=out_console))


@demo.command(name="worlds")
def run_worlds_demo(
    *,
    minutes: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 16.5,
    training: Annotated[float, Parameter(validator=validators.Number(gt=0, lt=1))] = 0.65,
    seed: int = 0,
    out: Path = Path(),
    directory: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Train in a simulated world, gate the result, try it as a canary, release it, compare it with a start without the world; report.

    Parameters
    ----------
    minutes
        Minutes of training and simulated users together. Starts, bar, gate and the last measurement take four to eight more.
    training
        Share of the minutes that is spent training in the world.
    seed
        Seeds tasks, users, sampling and evaluation.
    out
        Where report.html and report.json are written.
    directory
        Where the run is kept (default: runs/demo-worlds-SEED, emptied first if it holds an earlier demo).
    """
    from ostinato.launch.commands.worlds.demo import Plan, demo_worlds, worlds_demo_overrides

    config = common.starting(*worlds_demo_overrides(seed, directory))
    plan = Plan.of(minutes=minutes, training=training)
    asyncio.run(demo_worlds(config, seed=seed, plan=plan, out=out, console=Console()))


release = App(
    name="release",
    help="Run the release worker: evaluate candidates, ship or block them, guard what is live (a worker of `up`). "
    "`ostinato release show` says how one release stands.",
)
app.command(release)


@release.default
def run_release(common: Common = DEFAULTS) -> None:
    """Run the release worker (a worker of `up`)."""
    run_worker("release", common.starting(), expendable=300)


@release.command(name="show")
def show_release(version: str = "live", *, common: Common = DEFAULTS) -> None:
    """Show whether a release is better, how sure that is, what changed, and how to roll it back, as `Releases` on the page does.

    Parameters
    ----------
    version
        `live`, a version number such as v12, or the first digits of a root hash.
    """
    from ostinato.launch.commands.release import show_release as run

    asyncio.run(run(common.of_run(), version, Console()))


@app.command(name="config")
def show_config(prefix: str = "", *, json: Flag = False, common: Common = DEFAULTS) -> None:
    """List every key: its type, default and current value, where the value came from, and what the key means.

    Parameters
    ----------
    prefix
        Only keys in this section, as in `ostinato config train` or `ostinato config evaluate.gate`.
    json
        Print JSON, for programs.
    """
    from ostinato.launch.commands.config import list_keys

    list_keys(common.load(), common.config, common.overrides, prefix, Console(), as_json=json)


@app.command(name="eval")
def evaluate(
    *,
    slot: Literal[
        "live", "canary", "previous", "verified", "learner", "control", "evaluation", "evaluation-best"
    ] = "live",
    draws: Positive = 1,
    common: Common = DEFAULTS,
) -> None:
    """Run the evaluation suite against a slot of the running gateway and print the score with its interval.

    Parameters
    ----------
    slot
        The slot whose weights answer; `evaluation` holds the candidate that is being judged.
    draws
        Samples per item.
    """
    from ostinato.launch.commands.release import evaluate_slot

    asyncio.run(evaluate_slot(common.of_run(), slot, draws, Console()))


@app.command
def status(*, json: Flag = False, common: Common = DEFAULTS) -> None:
    """Show workers, alarms, the live version, training progress and users' feedback on one screen.

    Parameters
    ----------
    json
        Print one JSON object instead of the screen.
    """
    from ostinato.launch.commands.status import show_status

    asyncio.run(show_status(common.of_run(), Console(), machine=json))


@app.command
def report(directory: Path | None = None, *, out: Path = Path("report.html"), common: Common = DEFAULTS) -> None:
    """Write what the page shows of a run as one self-contained HTML file, without scripts or network access.

    Parameters
    ----------
    directory
        The run's directory, read with the settings that the run was started with. Default: `run.directory`.
    out
        The file to write.
    """
    from ostinato.launch.commands.report import write_report

    asyncio.run(write_report(common.of_run(directory), out, Console()))


log = App(
    name="log",
    help="The newest rows of the append-only log; subcommands back it up, restore it, change its master key, and copy it to or from "
    "Postgres.",
)
app.command(log)


@log.default
def show_log(
    *,
    kind: Literal[
        "all",
        "turns",
        "signals",
        "rewards",
        "quarantines",
        "holdbacks",
        "batches",
        "releases",
        "contracts",
        "alarms",
        "bases",
        "consents",
        "dials",
        "priors",
        "forgotten",
    ] = "all",
    last: Annotated[int, Parameter(name=["--last", "-n"], validator=validators.Number(gte=0))] = 20,
    common: Common = DEFAULTS,
) -> None:
    """Print the newest rows of the append-only log.

    Parameters
    ----------
    kind
        Only rows of this kind.
    last
        How many rows.
    """
    from ostinato.launch.commands.log import print_log

    asyncio.run(print_log(common.of_run(), kind, last, Console()))


@log.command(name="copy")
def copy_rows(source: str, target: str, *, common: Common = DEFAULTS) -> None:
    """Copy a log row by row, keeping every row's position. Stop the run's workers first; an interrupted copy resumes when run again.

    Parameters
    ----------
    source
        A run's directory, or the URL of a Postgres database.
    target
        A run's directory, or the URL of a Postgres database. A missing log is created; the schema is `record.namespace`.
    """
    from ostinato.launch.commands.log import copy_between

    asyncio.run(copy_between(common.load(), source, target, Console()))


@log.command
def backup(directory: Path, *, common: Common = DEFAULTS) -> None:
    """Copy the log and its keys into a new directory while the run's workers go on. Every row that was in the log at the start is copied.

    The weights, the trainer's checkpoints and the master key (`record.master_key`) are not copied: back them up as well.

    Parameters
    ----------
    directory
        Where to: a new or empty directory.
    """
    from ostinato.launch.commands.log import backup as run

    run(common.of_run(), directory, Console())


@log.command
def restore(
    directory: Path, *, keys: Path | None = None, old_master: Path | None = None, common: Common = DEFAULTS
) -> None:
    """Install a backup as the log of the run that the settings name. Stop its workers first, and move away any log that is there.

    What was forgotten since the backup stays forgotten, as far as the run's own log-keys.db or --keys shows it.

    Parameters
    ----------
    directory
        The backup.
    keys
        The newest copy of log-keys.db, if the run's directory has none. Keys that are destroyed there are destroyed in the restored log.
    old_master
        File of the master key that the backup was made under, if `log rekey` has changed it since. The settings name the present one.
    """
    from ostinato.launch.commands.log import restore as run

    run(common.load(), directory, keys, Console(), old_master)


@log.command
def rekey(*, new_master: Path, common: Common = DEFAULTS) -> None:
    """Wrap the keys that encrypt the log with another master key. Stop the run's workers first; run it again if it was interrupted.

    Parameters
    ----------
    new_master
        File of 32 or more random bytes. `record.master_key` names the present one, or is unset if the keys are not wrapped.
    """
    from ostinato.launch.commands.log import rekey as run

    run(common.of_run(), new_master, Console())


@app.command(name="auto")
def show_auto(*, share: tuple[str, ...] = (), common: Common = DEFAULTS) -> None:
    """Show what Auto knows about its arms and, with --share, an estimate of what other shares would have earned.

    Parameters
    ----------
    share
        An arm's share, as in --share live=0.7 --share large=0.3; the shares must sum to 1.
    """
    from ostinato.launch.commands.auto import show_auto as run

    asyncio.run(run(common.of_run(), share, Console()))


@app.command
def forget(
    tenant: str = "",
    *,
    user: str | None = None,
    wait: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 120.0,
    replay: Flag = False,
    dry_run: Flag = False,
    verify: Path | None = None,
    turns: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Make what people wrote unreadable forever, by destroying the keys that encrypt it (`record.encrypt`).

    A running trainer is asked for a checkpoint first, so that a crash repeats no step without the turns that became unreadable.

    Parameters
    ----------
    tenant
        The tenant whose users are forgotten; `default` if there is only one tenant.
    user
        Only this user. Default: every user of the tenant.
    wait
        Seconds to wait for the trainer's checkpoint, which it writes between two steps.
    replay
        Also take what was learned from them out of the weights: the trainer repeats its steps since their first effect without them.
    dry_run
        With --replay: print what would be done, and do nothing.
    verify
        Forget nobody, but verify this certificate of a replay.
    turns
        With --verify: a file of turn ids, one per line. None of them may have been used to train the weights.
    """
    from ostinato.launch.commands import erasure, log

    if verify is not None:
        erasure.verify(common.load(), verify, turns, Console())
        return
    config = common.of_run()
    if not tenant:
        raise BadRequest("name the tenant to forget; `default` if there is only one", field="tenant")
    if user == "":
        raise BadRequest("--user names nobody; leave it out to forget all of the tenant's users", field="user")
    if dry_run and not replay:
        raise BadRequest("--dry-run says what --replay would do: give both", field="dry-run")
    if dry_run:
        asyncio.run(erasure.show_plan(config, tenant, user, Console()))
        return
    asyncio.run(log.forget(config, tenant, user, Console(), wait_s=wait, replay=replay))


@app.command
def consent(
    tenant: str,
    user: str,
    level: Literal["never", "aggregate", "adapt", "yes"] | None = None,
    *,
    common: Common = DEFAULTS,
) -> None:
    """Show what a person allows to be done with their turns, or record it. It counts within a second.

    Parameters
    ----------
    tenant
        The person's tenant; `default` if there is only one.
    user
        The person's name with that tenant.
    level
        What they allow. Below `yes`, what waits to be learned from is held back, too.
    """
    from ostinato.core.records import Consent
    from ostinato.launch.commands.log import consent as run

    if not tenant or not user:
        raise BadRequest("name the tenant and the person; the tenant is `default` if there is only one", field="user")
    wanted = None if level is None else Consent(level)
    asyncio.run(run(common.of_run(), tenant, user, wanted, Console()))


@app.command
def drain(url: str, *, back: Flag = False, common: Common = DEFAULTS) -> None:
    """Stop sending new requests to one of the engine's vLLM servers: its open answers finish, and then you can stop it.

    A slot that no other server holds moves to a free server; if there is none, it stays on this one.

    Parameters
    ----------
    url
        The server's URL as written in engine.urls.
    back
        Use the server again.
    """
    from ostinato.launch.commands.compute import drain_server

    drain_server(common.of_run(), url, back, console)


@app.command
def doctor(*, again: bool = False, common: Common = DEFAULTS) -> None:
    """Check this machine and the configuration, part by part. Each failure names its remedy.

    Parameters
    ----------
    again
        Measure this machine's speed and arithmetic anew, instead of reading what an earlier start measured.
    """
    from ostinato.launch.commands.doctor import examine

    if not examine(common.starting(), Console(), again=again):
        sys.exit(1)


_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # errors of a full or read-only disk


def _explain(error: BaseException) -> None:
    """Print an expected error as one red line. Raise anything else, which is a defect, so that its traceback is printed."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _explain(inner)
    elif isinstance(error, OstinatoError) or (isinstance(error, OSError) and error.errno in _REFUSED):
        console.print(Text.assemble(("error", "bold red"), " ", str(error)), soft_wrap=True)
    else:
        raise error


def run_command() -> None:
    """Run the command that `sys.argv` names. Raises SystemExit with 2 after an expected error, KeyboardInterrupt after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: an ASCII locale must not make printing fail
    try:
        app(exit_on_error=False)
    except CycloptsError as error:  # Cyclopts has printed it
        if isinstance(error, UnknownOptionError):
            hint = "Settings are given with --set, as in --set listen.port=9000; `ostinato config` lists them."
            console.print(hint, soft_wrap=True)
        sys.exit(2)
    except (OstinatoError, OSError, BaseExceptionGroup) as error:
        _explain(error)
        sys.exit(2)
