"""The trainer's part of `ostinato forget`: a checkpoint before turns become unreadable, and with `--replay` erasure from the weights."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ostinato.app.branches import branches_begun, held_by_branches
from ostinato.app.roles import open_roles
from ostinato.app.storage import Home, existing_home, open_log, open_run
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, NotFound
from ostinato.core.files import write_atomic
from ostinato.core.records import Batch
from ostinato.launch.views.screen import say
from ostinato.status.progress_lines import Lines

if TYPE_CHECKING:  # they import torch
    from ostinato.app.erasure import ErasurePlan, ErasureRequest
    from ostinato.app.trainer import ModelTokens

CHECKPOINT_WAIT_S = 120.0
"""Default timeout of `ostinato forget` for the trainer's checkpoint. The trainer checks for the request between two steps."""
_LOOK_S = 0.1


async def await_checkpoint(config: Config, wait_s: float) -> str:
    """Request a checkpoint that covers every recorded step from the run's trainer, and wait for it. Return a message, or "" if it exists.

    Without one, a trainer that crashes cannot repeat the steps with erased turns since its last checkpoint, and continues from the newest
    published version.
    """
    from ostinato.train.checkpoint import newest_step

    place = Home(config.run.directory)
    with open_log(config) as log:
        rows = [row for _, row in log.tail(1, {Batch}) if isinstance(row, Batch)]
    last = rows[0].step if rows else 0
    if newest_step(place.checkpoints) >= last:
        return ""
    after = f"steps {newest_step(place.checkpoints) + 1} to {last} are in no checkpoint"
    then = "if they hold erased turns, the trainer goes on from the newest published version when it starts again"
    if not await _is_training(config):
        return f"no trainer is up, and {after}: {then}"
    write_atomic(place.checkpoint_wanted, f"{last} {wall_clock():.0f}\n", durable=False)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while place.checkpoint_wanted.exists() and newest_step(place.checkpoints) < last:
                await asyncio.sleep(_LOOK_S)
    place.checkpoint_wanted.unlink(missing_ok=True)
    if newest_step(place.checkpoints) >= last:
        return ""
    return f"the trainer wrote no checkpoint within {wait_s:g} s, and {after}: {then}"


async def _is_training(config: Config) -> bool:
    """Return True if a process has the trainer's role now."""
    try:
        tenure = await asyncio.to_thread(open_roles(config).take, "train")
    except Conflict:
        return True
    tenure.close()
    return False


# ---------------------------------------------------------------- erasure from the weights


async def ask_replay(
    config: Config, tenant: str, user: str | None, upto: int, copied_upto: int, console: Console
) -> None:
    """Request that the run's trainer repeat the training without somebody whose words are erased up to log position `upto`, and that every
    branch that may know them begin anew. `copied_upto`: the position in the log of the tenant's own branch.
    """
    from ostinato.app.erasure import ErasureFiles, ErasureRequest

    place = Home(config.run.directory)
    ErasureFiles(place).request(ErasureRequest(tenant=tenant, user=user, upto=upto))
    when = "at its next start"
    if await _is_training(config):
        when = f"as soon as its present step is done, or {when} if no checkpoint is older than their first turns"
    say(
        console,
        f"the trainer trains again without them {when}; what comes out is a candidate for the gate, and once it is live the versions and "
        f"checkpoints that knew them are deleted. Certificates: {place.erasure}",
    )
    for branch in branches_begun(config):  # after the shared request, since otherwise a branch would not wait for it
        whose = branch.run.tenant
        # other tenants' turns are not in its log, only in its starting version
        reach = copied_upto if whose == tenant else 0
        ErasureFiles(Home(branch.run.directory)).request(ErasureRequest(tenant=tenant, user=user, upto=reach))
        then = f"begins anew at the shared version if it may know them, and forgets what it learned from anybody: train@{whose} does it"
        if whose not in config.learn.tenants:
            then = f"is not trained now (learn.tenants), and may know them: `ostinato ship live --for {whose}` once that is the new version"
        say(console, f"the branch of {whose} {then}. Certificates: {Home(branch.run.directory).erasure}")
    with open_run(config) as run:
        found = await held_by_branches(run)
    for ref, policy in found.items():
        whose = ref.split("/")[1]
        then = f"once the new version is live, begin the branch anew with `ostinato ship live --for {whose}`"
        if whose in config.learn.tenants:
            then = "until the branch begins anew"
        say(console, f"{policy} may know them, and the ref {ref} keeps it: {then}")


async def show_plan(config: Config, tenant: str, user: str | None, console: Console) -> None:
    """Print what `ostinato forget --replay` would do (a dry run). Raises NotFound, Corrupt."""
    existing_home(config)
    from ostinato.app.erasure import ErasureFiles, ErasureRequest, find_tainted, plan_erasure
    from ostinato.app.storage import model_path
    from ostinato.app.trainer import ModelTokens

    with open_run(config) as run:
        run.log.check_forgettable(user)
        request = ErasureRequest(tenant=tenant, user=user, upto=run.log.newest())
        people, tokens = [*ErasureFiles(run.home).requests(), request], ModelTokens(model_path(config))
        plan = await plan_erasure(config, run.log, run.home, people, tokens)
        await _show_branches(config, plan, replace(request, upto=1 << 62), tokens, console)
        if plan.first is None:
            say(console, f"none of {plan.last} steps would differ without them: there is nothing to train again")
            return
        found = await find_tainted(run, plan.first, plan.last)
    start, steps = "the start of training (no checkpoint is older)", plan.last - plan.start
    if plan.checkpoint is not None:
        start = f"checkpoint {plan.checkpoint.name}"
    lines = [
        f"{plan.erased_turns} turns are taken out; {plan.touched} of {plan.last} steps differ without them, the first is step {plan.first}",
        f"{steps} steps are taken again, from {start}{_estimated_time(config, steps)}",
        f"the result is version {plan.last + 1}, a candidate; once it or a later one is live, these are deleted: {found.line()}",
    ]
    for line in lines:
        say(console, line)


async def _show_branches(
    config: Config, plan: ErasurePlan, request: ErasureRequest, tokens: ModelTokens, console: Console
) -> None:
    """Print which tenants' branches would begin anew."""
    from ostinato.app.branch_erasure import turns_learned

    for each in branches_begun(config):
        with open_run(each) as branch:
            base = await branch.follower.resolve("base")
            began = plan.first is not None and base is not None and plan.first <= base.number <= plan.last
            knows = began or await turns_learned(branch, [request], tokens)
        then = "begins anew at the shared version, and what it learned from anybody is deleted" if knows else "stays"
        say(console, f"the branch of {each.run.tenant} {then}")


def _estimated_time(config: Config, steps: int) -> str:
    """Return the estimated time of this many steps from the last steps' time; "" if none is known."""
    lines = Lines(Home(config.run.directory).progress("train")).new()
    seconds = [float(line["seconds"]) for line in lines if line["kind"] == "step" and "seconds" in line][-20:]
    return f", about {steps * sum(seconds) / len(seconds):.0f} s by the last steps' time" if seconds else ""


def verify(config: Config, path: Path, turns: Path | None, console: Console) -> None:
    """Verify an erasure certificate, and that its weights were not trained on any of the turns in the file `turns` (one id per line).

    Raises Corrupt, BadConfig, NotFound.
    """
    from ostinato.weights.version.certificate import SHARED, check_erasure, read_certificate, read_rows

    certificate = read_certificate(_read(path, "the certificate").encode())
    beside = path.with_name(f"{certificate.id}.rows.jsonl")
    rows = read_rows(_read(beside, "the batches of the certificate").splitlines())
    lines = [] if turns is None else _read(turns, "--turns").splitlines()
    ids = [line.strip() for line in lines if line.strip()]
    if turns is not None and (not ids or any(len(line.split()) > 1 for line in ids)):
        either = "of a turn (chatcmpl-3f:0) or of a call (chatcmpl-3f)"
        raise BadConfig(f"--turns {turns}: write one id on each line, {either}")
    check_erasure(certificate, rows, ids, config.follow.trusted)
    signature = certificate.signature
    trust = "" if config.follow.trusted else " (follow.trusted is empty)"
    by = "by nobody" if signature is None else f"by {signature.key}{trust}"
    if certificate.checkpoint.startswith(SHARED):
        said = (
            f"a branch began anew at v{certificate.weights[0]} with root {certificate.weights[1]} of the shared run, and nothing that it "
            f"learned itself by step {certificate.last} is in that; what is behind it is said by the shared run's certificates"
        )
    else:
        count = sum(len(ids) for _, ids in rows)
        given = f"none of the {len(ids)} given turns is among them"
        among = given if ids else "no turns were given to look for (--turns)"
        said = f"v{certificate.weights[0]} with root {certificate.weights[1]} rests on {count} turns of {len(rows)} steps; {among}"
    say(console, f"certificate {certificate.id}, signed {by}: {said}")
    say(console, certificate.model_dump_json(indent=1, exclude={"signature"}))


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"{what} {path} cannot be read: {error}; name a text file that this user may read") from error
