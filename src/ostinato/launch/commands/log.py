"""`ostinato log`: prints the newest rows of the log; `backup` and `restore` it, `copy` it to or from Postgres, `rekey` its encryption keys.

`ostinato forget` makes somebody's words unreadable, and `ostinato consent` shows or records what a person allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn

from ostinato.app.backups import back_up_log, rekey_log, restore_log
from ostinato.app.branches import branches_begun
from ostinato.app.storage import Home, copy_rows_of, existing_home, log_elsewhere, named_log, open_log, serving_run
from ostinato.config import Config
from ostinato.core import records
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.notices import Alarm, Forgotten, Stamp
from ostinato.core.seams import Log
from ostinato.core.steering import DialPrior, DialSet
from ostinato.launch.commands.erasure import CHECKPOINT_WAIT_S, ask_replay, await_checkpoint
from ostinato.launch.views.audit import audited, login
from ostinato.launch.views.screen import measured_bar, plain, say
from ostinato.record.backup import KEYS, BackupManifest
from ostinato.record.config import RecordConfig
from ostinato.reward.functions import parts_of

KINDS: dict[str, set[type]] = {
    "turns": {records.Turn},
    "signals": {records.Signal},
    "rewards": {records.Reward},
    "quarantines": {records.Quarantine},
    "holdbacks": {records.Holdback},
    "batches": {records.Batch},
    "releases": {records.ReleaseEvent},
    "contracts": {Stamp},
    "alarms": {Alarm},
    "bases": {records.SteeringBasis},
    "consents": {records.ConsentGiven},
    "dials": {DialSet},
    "priors": {DialPrior},
    "forgotten": {Forgotten},
}
KINDS["all"] = set[type]({records.Delivered}).union(*KINDS.values())
SHOWN = 60


def line(row: records.Row, parts: Mapping[str, float] | None = None) -> str:
    """Return a row as one line of escaped text. `parts`: a reward's components, if they are known."""
    kind, text = _described(row)
    made = ", ".join(f"{name} {worth:+.2f}" for name, worth in (parts or {}).items())
    return f"{kind:10} " + plain(f"{text}: {made}" if made else text)


async def parts_in(log: Log, rows: Iterable[records.Row], options: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the components of the rewards among these rows as {turn: {name: value}}, where they are known.

    `options`: the reward function's options.
    """
    rewards = [row for row in rows if isinstance(row, records.Reward) and row.signals]
    turns = {turn.id: turn for turn in await log.find(records.Turn, [(row.turn,) for row in rewards])}
    named = [(turns[row.turn].tenant, id) for row in rewards if row.turn in turns for id in row.signals]
    said = {(signal.tenant, signal.id): signal for signal in await log.find(records.Signal, named)}
    found: dict[str, dict[str, float]] = {}
    for row in rewards:
        if (turn := turns.get(row.turn)) is not None:
            signals = [said[key] for id in row.signals if (key := (turn.tenant, id)) in said]
            found[row.turn] = parts_of(turn, row, signals, options)
    return found


def _described(row: records.Row) -> tuple[str, str]:
    """Return a row's kind and its text."""
    match row:
        case records.Turn():
            text = " ".join(row.text.split())[:SHOWN]
            said = f"{row.finish}  {len(row.sampled_ids)} tokens  {text!r}"
            made = row.arm.value if row.oldest is None else f"{row.arm}  v{row.oldest}"
            drawn = "" if row.auto is None else f"auto={row.auto.arm}  "
            return "turn", f"{row.id}  {row.user}  {made}  {drawn}{said}"
        case records.Signal():
            return "signal", f"{row.turn}  {row.name}={row.value:g}  {row.source}  ({row.id})"
        case records.Delivered():
            return "delivered", ", ".join(row.turns)
        case records.Reward():
            count = f"{len(row.signals)} signal" + ("s" if len(row.signals) != 1 else "")
            return "reward", f"{row.turn}  {row.value:+.3f}  {row.function}  from {count}"
        case records.Quarantine() | records.Holdback():
            return type(row).__name__.lower(), f"{row.turn}  {row.reason}"
        case records.ConsentGiven():
            return "consent", f"{row.tenant}  {row.user}  {row.level}"
        case DialSet():
            told = {name: "prior" if value is None else f"{value:g}" for name, value in (row.dials or {}).items()}
            said = ", ".join(f"{name} {value}" for name, value in told.items()) or "all to the prior"
            return "dials", f"{row.tenant}  {row.user}  by {row.by}  {'forgotten' if row.dials is None else said}"
        case Forgotten():
            return "forgotten", f"{row.tenant}  {'everybody' if row.user is None else row.user}"
        case records.Batch() | records.ReleaseEvent() | Stamp() | Alarm() | records.SteeringBasis() | DialPrior():
            return _decided(row)


def _decided(
    row: records.Batch | records.ReleaseEvent | Stamp | Alarm | records.SteeringBasis | DialPrior,
) -> tuple[str, str]:
    match row:
        case records.Batch():
            return "batch", f"step {row.step}  {len(row.turns)} turns  reference {row.reference}"
        case records.ReleaseEvent():
            actor = f"  by {row.detail['actor']}" if row.detail.get("actor") else ""
            back = f"{row.previous} to " if row.action == "rolled_back" and row.previous else ""
            return "release", f"{row.action}  {back}{row.policy}{actor}  {row.reason}"
        case Stamp():
            return "contract", f"{row.id}  {row.contract}"
        case Alarm():
            return "alarm", f"{row.state}  {row.name}  {row.reason}"
        case records.SteeringBasis():
            return "basis", f"{row.hash}  {len(row.tokens) // 8} tokens  dials {', '.join(row.names)}"
        case DialPrior():
            levels = f"{len(row.organisations)} organisations"
            noise = f"  noise multiplier {row.sigma:.3g}" if row.sigma else ""
            told = f"{row.names}  number {row.number}  of {row.people} people  {levels}  up to row {row.upto}{noise}"
            return "prior", told


async def print_log(config: Config, kind: str, last: int, console: Console) -> None:
    """Print the `last` newest rows of a kind, oldest first. Raises NotFound if the run does not exist."""
    existing_home(config)
    with open_log(config) as log:
        rows = log.tail(last, KINDS[kind])
        parts = await parts_in(log, (row for _, row in rows), config.reward.options)
        for cursor, row in rows:
            made = parts.get(row.turn) if isinstance(row, records.Reward) else None
            say(console, f"{cursor:>8}  {line(row, made)}")


async def forget(
    config: Config,
    tenant: str,
    user: str | None,
    console: Console,
    *,
    wait_s: float = CHECKPOINT_WAIT_S,
    replay: bool = False,
) -> None:
    """Make the words of one user of a tenant unreadable, or with user None those of everybody of the tenant.

    First waits up to `wait_s` seconds for the trainer to write a checkpoint. The copy from which the tenant's branch learns becomes
    unreadable too. `replay`: also request that the trainer repeat the training without them. Raises NotFound, BadConfig.
    """
    place = existing_home(config)
    if config.run.tenant:
        raise BadConfig(
            f"{place.root} trains a branch: forget in the run that serves, {serving_run(config).run.directory}, which reaches this one, too"
        )
    whose = "everybody's" if user is None else "one user's"
    with audited(place, "forget", tenant=tenant, whose=whose, actor=login()), ExitStack() as opened:
        branches = branches_begun(config, tenant)
        # check all logs before anything is erased
        logs = [opened.enter_context(open_log(each)) for each in (config, *branches)]
        for log in logs:
            log.check_forgettable(user)
        for each in (config, *branches):
            if said := await await_checkpoint(each, wait_s):
                say(console, f"branch of {tenant}: {said}" if each.run.tenant else said)
        newest, *copied = [await log.forget(tenant, user) for log in logs]
        if branches and not replay:
            say(
                console,
                f"{tenant} has a branch, which may have been trained on them: `--replay` begins it anew at the shared version and deletes "
                f"what it was. `ostinato ship live --for {tenant}` begins it anew, too, and `ostinato weights gc` deletes what it was only "
                f"once its checkpoints, {config.collect.releases} releases (collect.releases) and {config.collect.keep} versions "
                "(collect.keep) are later ones",
            )
    who = f"everybody of {tenant}" if user is None else f"{user} of {tenant}"
    if user is not None:
        who += ", while record.encrypt was 'user',"
    say(
        console,
        f"what was written by and for {who} is unreadable. Versions that were trained on rows up to {newest} may still know it. Running "
        "workers drop what they keep under the name within seconds. Backups of the log that were made before hold the "
        "keys: make a new one and delete them",
    )
    if replay:
        await ask_replay(config, tenant, user, newest, max(copied, default=0), console)


async def consent(config: Config, tenant: str, user: str, level: records.Consent | None, console: Console) -> None:
    """Record what a person allows if `level` is given, and print it. Raises BadConfig for unreadable keys, NotFound without a run or for a
    tenant without a key.
    """
    from ostinato.serve.consent import ConsentChoices  # slow to import

    place = existing_home(config)
    check_tenant(config, tenant)
    with open_log(config) as log:
        choices = ConsentChoices(log)
        await choices.refresh()
        if level is not None:
            with audited(place, "consent", tenant=tenant, level=level.value, actor=login()):
                while not await choices.add((tenant, user), level, wall_clock()):
                    pass  # a gateway has just recorded another choice; retry, so that the operator's comes last
        chosen = choices.of((tenant, user))
    most = records.Consent.strictest(chosen, config.privacy.at_most(tenant))
    say(console, plain(f"{user} of {tenant}: {chosen}; what counts with the operator's settings: {most}"))


def check_tenant(config: Config, tenant: str) -> None:
    """Raise NotFound for a tenant that has no API key and is not the default tenant of calls without a key."""
    from ostinato.serve.auth import DEFAULT_TENANT, client_keys, key_holders  # slow to import

    serve = config.serve
    known = key_holders(client_keys(serve.api_keys, serve.api_keys_file)) | {DEFAULT_TENANT}
    if tenant not in known:
        raise NotFound(
            f"no key belongs to a tenant {tenant!r}; known are {', '.join(sorted(known))}. Tenants stand before the ':' of the keys in "
            "serve.api_keys and serve.api_keys_file; if these are in a file of settings, name it with --config"
        )


# ---------------------------------------------------------------- backups and keys


def backup(config: Config, directory: Path, console: Console) -> None:
    """Back up the run's log. Raises as `app.backups.back_up_log`."""
    with (
        measured_bar(console, "copying the log", DownloadColumn(), TimeRemainingColumn()) as show,
        audited(Home(config.run.directory), "log backup", actor=login(), target=str(directory)),
    ):
        made = back_up_log(config, directory, show)
    tenants = sorted(path.name for path in directory.glob("branches/*"))
    with_branches = f", and the branches of {', '.join(tenants)}" if tenants else ""
    say(console, f"backed up {_rows(made)}{with_branches} to {directory}")
    if any(file.name == KEYS for file in made.files):
        master = config.record.master_key
        said = (
            f"{KEYS} in it is not wrapped with a master key: who has the directory can read everything"
            if master is None
            else f"the master key is not in it: keep a copy of {master} elsewhere, because nothing can be read without it"
        )
        say(console, f"{said}. Delete the directory once somebody is forgotten who is in it")


def restore(
    config: Config, directory: Path, keys: Path | None, console: Console, old_master: Path | None = None
) -> None:
    """Restore a backup into the run's directory. Raises as `app.backups.restore_log`."""
    with (
        measured_bar(console, "restoring the log", DownloadColumn(), TimeRemainingColumn()) as show,
        audited(Home(config.run.directory), "log restore", actor=login(), source=str(directory)),
    ):
        made = restore_log(config, directory, keys, show, old_master)
    say(console, f"restored {_rows(made.manifest)} to {config.run.directory}")
    if made.branches:
        say(console, f"restored the branches of {', '.join(made.branches)}")
    if made.kept:
        say(console, f"the branches of {', '.join(made.kept)} stay as they are here")
    if made.destroyed:
        say(console, f"{made.destroyed} keys that were forgotten since stay destroyed")


def rekey(config: Config, new_master: Path, console: Console) -> None:
    """Wrap the run's keys with another master key. Raises as `app.backups.rekey_log`."""
    with audited(Home(config.run.directory), "log rekey", actor=login()):
        count = rekey_log(config, new_master)
    named = f'record.master_key = "{new_master}"'
    say(
        console,
        f"{count} keys are wrapped with the master key in {new_master}: set {named} before the run starts again. "
        "Keep the old one for earlier backups: `ostinato log restore DIR --old-master FILE` needs it",
    )


def _rows(manifest: BackupManifest) -> str:
    dropped = " and the permanent rows before them" if manifest.first > 1 else ""
    return (
        "a log without rows" if manifest.last < manifest.first else f"rows {manifest.first} to {manifest.last}{dropped}"
    )


# ---------------------------------------------------------------- copies to and from Postgres


async def copy_between(config: Config, source: str, target: str, console: Console) -> None:
    """Copy a log. Raises NotFound, BadConfig, Conflict, StorageFull, Unavailable."""
    one, other = (named_log(config, place) for place in (source, target))
    if one == other:
        raise BadConfig("the two logs are the same; name another target")
    if isinstance(one, Path) and not one.exists():
        raise NotFound(f"no log in {one}; name a run's directory or postgresql://user@host/database")
    if isinstance(one, RecordConfig):
        name, there = log_elsewhere(one)
        if not there:
            raise NotFound(f"no log at {name}; correct the URL or record.namespace")
    with measured_bar(console, "copying rows", MofNCompleteColumn(), TimeRemainingColumn()) as show:
        place = Home(one.parent) if isinstance(one, Path) else Home(config.run.directory)
        with audited(place, "log copy", actor=login(), target=str(other) if isinstance(other, Path) else "Postgres"):
            newest = await copy_rows_of(config, one, other, show)
    say(console, f"copied: the newest row is {newest}")
