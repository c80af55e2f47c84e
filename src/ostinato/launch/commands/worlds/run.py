"""`ostinato worlds run`: evaluates a version on tasks, with k tries each: pass@1 and best-of-k.

The version is loaded into a slot of a gateway and pinned there. The rates come from the records of the rollouts, with confidence intervals,
by split and family. `ostinato worlds coverage` compares checkpoints on the held-out tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ostinato.app.roles import open_roles
from ostinato.app.storage import home, open_follower, open_run, open_store, point_ref
from ostinato.app.worlds import check_tasks, note_cheats, note_coverage, open_workshop
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadRequest, Conflict, NotFound, StorageFull
from ostinato.core.lines import lines_of
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.report import ItemMean, ItemScore, PassRates
from ostinato.evaluate.coverage import ScoredAttempt, covered, lost_coverage
from ostinato.evaluate.pass_at_k import pass_rates
from ostinato.launch.commands.checks import check_same_model, check_start
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.weights import find_version
from ostinato.launch.placing.address import await_gateway
from ostinato.launch.views import progress
from ostinato.launch.views.screen import counting_bar, plain, say
from ostinato.launch.workers.shutdown import stop_signals
from ostinato.record.roles import hold
from ostinato.run_directory import EVALUATION_REF
from ostinato.status.gateway_address import read_address
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.rollout.attempt import Measurement, Workshop
from ostinato.worlds.rollout.finished import CheatWatch, Finished, read_finished
from ostinato.worlds.rollout.groups import shuffled
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load

# ---------------------------------------------------------------- weights


NEWEST = "newest"
_NEWEST_REFS = (Arm.WORLD.value, "candidate", Arm.LIVE.value)
_LOOK_S = 0.1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """A version in a slot of a gateway. `pinned`: the slot does not change during the measurement."""

    url: str
    slot: str
    policy: PolicyVersion
    pinned: bool

    def __str__(self) -> str:
        held = "pinned" if self.pinned else "which changes as the trainer learns"
        return f"answers come from {self.policy}, slot {self.slot}, {held}"


async def at_gateway(config: Config, work: Callable[[str], Coroutine[Any, Any, _T]], say: Callable[[str], None]) -> _T:
    """Call `work` with the URL of the run's gateway and return its result. If no gateway is up, one is started for this call.

    Raises BadConfig, WorkerFailed if the gateway cannot be started or fails for good, Conflict if the run is being started.
    """
    place = home(config)
    if (url := read_address(place.address)) is not None:
        return await work(url)
    await check_start(config)
    check_same_model(config)
    # the run's own settings file must keep the settings of its last start
    settings = place.root / "measuring.json" if place.config.exists() else place.config
    listening = config.model_copy(update={"listen": config.listen.model_copy(update={"port": 0})})

    def told(worker: str, what: str) -> None:
        say(f"{worker}: {what}")

    async def served() -> _T:
        return await work(await await_gateway(place))

    with hold(place.root, "up"):
        say(f"no gateway is running for {place.root}: starting one")
        try:
            async with launch(listening, told, front="serve", names=("serve",), settings=settings) as launched:
                return await launched.during(served())
        finally:
            if settings != place.config:
                settings.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def place_weights(config: Config, url: str, release: str) -> AsyncGenerator[PlacedWeights]:
    """Load the version that `release` names (a ref, a number (v12), a root, or "newest") into the evaluation slot and pin it there.

    The release worker uses the same slot for candidates, so a version can be pinned only while none is up. While one is up, "newest" means
    the version in the slot for worlds, which may change; Conflict is raised for any other version, or if there is no such slot. Raises
    NotFound, BadRequest.
    """
    place = home(config)
    async with contextlib.AsyncExitStack() as leaving:
        try:
            leaving.enter_context(contextlib.closing(open_roles(config).take("release")))
        except Conflict as error:
            if release != NEWEST:
                raise Conflict(
                    f"--release {release}: the release worker is running and holds the slot that a chosen version needs; leave out "
                    "--release, or measure while the release worker is stopped"
                ) from error
            yield await _unpinned(config, url)
            return
        version = await newest(config) if release == NEWEST else release
        policy = (await find_version(config, version)).policy
        store = open_store(config)
        before = await store.read_ref(EVALUATION_REF)
        await store.move_ref(EVALUATION_REF, before, policy.hash)
        leaving.push_async_callback(_put_back, config, before or await store.read_ref(Arm.LIVE.value))
        async with WorldGateway(url, place.admin_key(), slot=EVALUATION_REF) as evaluating:
            while await evaluating.holds() != policy:
                await asyncio.sleep(_LOOK_S)
        yield PlacedWeights(url=url, slot=EVALUATION_REF, policy=policy, pinned=True)


async def newest(config: Config) -> str:
    """Return the ref of the newest version: the highest number among those of worlds, candidate and live. Raises NotFound."""
    follower = open_follower(config)
    found = [(policy, ref) for ref in _NEWEST_REFS if (policy := await follower.resolve(ref)) is not None]
    if not found:
        raise NotFound("the run has no version of its weights yet; start it once")
    return max(found, key=lambda each: each[0].number)[1]


async def _unpinned(config: Config, url: str) -> PlacedWeights:
    async with WorldGateway(url, home(config).admin_key()) as serving:
        policy = await serving.holds()
    if policy is None:
        raise Conflict(
            "the release worker is running, and the gateway has no slot for worlds because the run learns from people only "
            "(learn.source): measure while the release worker is stopped"
        )
    return PlacedWeights(url=url, slot=Arm.WORLD.value, policy=policy, pinned=False)


async def _put_back(config: Config, value: str | None) -> None:
    """Restore the slot's earlier version. If it had none, `value` is the live version, which is loaded anyway."""
    if value is not None:
        await point_ref(open_store(config), EVALUATION_REF, value)


# ---------------------------------------------------------------- pass rates


MOST_FAMILIES = 12
_CONFIDENCE = 0.95
_NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedTasks:
    """Results for a split, or for one family of it. `family` "": the whole split. `first` (pass@1) is over tasks with a graded try, `best`
    (best-of-k) over tasks with k of them; None if there is no such task. `value`: the mean value of the tries, clustered by task.
    """

    split: Split
    family: str
    tries: int
    first: ItemMean | None
    best: ItemMean | None
    value: ItemMean | None


def solved(records: Sequence[Finished], k: int) -> list[SolvedTasks]:
    """Return a row per split, each followed by a row per family if the split has 2 to `MOST_FAMILIES` families."""
    rows: list[SolvedTasks] = []
    for split in Split:
        theirs = [record for record in records if record.split is split]
        if not theirs:
            continue
        rows.append(_row(theirs, split, "", k))
        families = sorted({record.family for record in theirs})
        if 1 < len(families) <= MOST_FAMILIES:
            rows += [_row([each for each in theirs if each.family == name], split, name, k) for name in families]
    return rows


def answered_by(records: Iterable[Finished]) -> Counter[tuple[PolicyVersion | None, PolicyVersion | None]]:
    """Count the rollouts by their (oldest, newest) version."""
    return Counter((record.policy, record.policy_last) for record in records)


def _row(records: Sequence[Finished], split: Split, family: str, k: int) -> SolvedTasks:
    graded: dict[str, list[Finished]] = defaultdict(list)
    for record in records:
        if record.value is not None:
            graded[record.task].append(record)
    whole = {task: theirs for task, theirs in graded.items() if len(theirs) >= k}

    def rates(of: dict[str, list[Finished]], k: int, *, worth: bool = False) -> PassRates | None:
        scores = [
            ItemScore(item=task, draw=draw, score=(record.value or 0.0) if worth else float(record.solved))
            for task, theirs in of.items()
            for draw, record in enumerate(theirs)
        ]
        return pass_rates(scores, k, _CONFIDENCE) if scores else None

    first, best, value = rates(graded, 1), rates(whole, k), rates(graded, 1, worth=True)
    return SolvedTasks(
        split=split,
        family=family,
        tries=sum(map(len, graded.values())),
        first=first and first.first,
        best=best and best.best,
        value=value and value.first,
    )


def figures_json(records: Sequence[Finished], k: int, policy: PolicyVersion, *, whole: bool) -> dict[str, Any]:
    """Return all figures in JSON types. `whole`: the measurement was not stopped early."""
    answered = [
        {"policy": None if first is None else asdict(first), "policy_last": None if last is None else asdict(last)}
        | {"rollouts": count}
        for (first, last), count in answered_by(records).items()
    ]
    return {
        "asked_for": asdict(policy),
        "answered_by": answered,
        "k": k,
        "whole": whole,
        "rows": [asdict(row) for row in solved(records, k)],
        "ended": Counter(record.ended.value for record in records),
        "ungraded": sum(record.value is None for record in records),
        "cheated": [[record.task, record.episode, list(record.cheated)] for record in records if record.cheated],
    }


def show_figures(records: Sequence[Finished], k: int, policy: PolicyVersion, console: Console) -> None:
    """Print the same figures for people. Rollouts that `policy` did not make alone are highlighted, not left out."""
    names = ["split", "family", "tasks", "tries", "pass@1", *[f"best of {k}"] * (k > 1), "value"]
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[2].justify = table.columns[3].justify = "right"
    for row in solved(records, k):
        figures = [_share(row.first), *[_share(row.best)] * (k > 1), _share(row.value)]
        tasks = str(row.first.items if row.first else 0)
        table.add_row(row.split.value, Text(plain(row.family) or "all"), tasks, str(row.tries), *figures)
    console.print(table)
    for (first, last), count in sorted(answered_by(records).items(), key=str):
        made = "unnamed weights" if first is None else f"{first}" if first == last else f"{first} to {last}"
        other = first != policy or last != policy
        console.print(Text(f"answered by {made}: {count} rollouts", "yellow" if other else ""))
    ended = Counter(record.ended.value for record in records)
    console.print(Text("ended: " + ", ".join(f"{how} {count}" for how, count in ended.most_common())))
    for why, count in Counter(record.why for record in records if record.value is None).most_common(5):
        console.print(Text(f"not graded, {count}: {plain(why)}", "yellow"))
    for record in records:
        if record.cheated:
            what = "; ".join(record.cheated)
            console.print(Text(f"cheated: {plain(record.task)} ({plain(record.episode)}): {plain(what)}", "red"))


def _share(mean: ItemMean | None) -> str:
    return _NONE if mean is None else f"{100 * mean.mean:.1f}% [{100 * mean.lower:.1f}, {100 * mean.upper:.1f}]"


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of a measurement. `split` "all": every task; `limit` 0: no limit; `out`: an additional file for the records."""

    file: Path
    split: str = Split.HELD_OUT.value
    tries: int = 1
    limit: int = 0
    release: str = "newest"
    out: Path | None = None
    machine: bool = False


async def run_tasks(config: Config, asked: MeasureOptions, console: Console) -> None:
    """Measure and print the results. Ctrl-C stops early and prints the figures of the finished rollouts.

    Raises BadConfig for a taskset without such tasks, NotFound or Conflict for a version that is not available, StorageFull.
    """
    tasks = load(asked.file.expanduser())
    chosen = chosen_tasks(tasks, asked.split, asked.limit, config.worlds.seed)
    check_tasks(config, chosen)

    def tell(what: str) -> None:
        if not asked.machine:
            say(console, plain(what), "dim")

    async def work(url: str) -> tuple[PolicyVersion, list[Finished]]:
        async with place_weights(config, url, asked.release) as placed:
            many = f"{len(chosen)} tasks of {asked.split} x {asked.tries}"
            tell(f"{tasks.name} ({tasks.hash[:12]}): {many}, temperature {config.worlds.temperature:g}; {placed}")
            async with open_workshop(config, home(config), placed.url, tasks, placed.slot) as shop:
                return placed.policy, await _measured(config, asked, tasks, chosen, shop, console)

    policy, records = await at_gateway(config, work, tell)
    await _note(config, tasks, records, asked.tries)
    whole = len(records) == asked.tries * len(chosen)
    if asked.machine:
        console.out(json.dumps(figures_json(records, asked.tries, policy, whole=whole)), highlight=False)
        return
    if not whole:
        console.print(Text(f"stopped after {len(records)} of {asked.tries * len(chosen)} rollouts", "yellow"))
    if records:
        show_figures(records, asked.tries, policy, console)


async def _note(config: Config, tasks: Taskset, records: Sequence[Finished], k: int) -> None:
    """Raise alarms in the run's log if a rollout cheated, or if all measurements of this taskset together show a loss of coverage."""
    watch = CheatWatch(config.worlds.cheat_quiet)
    for record in records:
        watch.take(record)
    with contextlib.suppress(FileNotFoundError), open_run(config) as run:
        await note_cheats(run.log, watch)
        kept, _ = read_finished(lines_of(run.home.finished.read_text(encoding="utf-8", errors="replace")))
        await note_coverage(run.log, (each for each in kept if each.taskset == tasks.hash), k)


def chosen_tasks(tasks: Taskset, split: str, limit: int, seed: int) -> list[Task]:
    """Return the tasks of a split ("all": every task) in the file's order; at most `limit`, drawn by the seed. Raises BadConfig."""
    found = [task for task in tasks.tasks if split in ("all", task.split.value)]
    if not found:
        raise BadConfig(f"{tasks.name}: no task has the split {split!r}; `ostinato worlds show` lists the splits")
    if not 0 < limit < len(found):
        return found
    drawn = set(shuffled([task.id for task in found], 0, seed)[:limit])
    return [task for task in found if task.id in drawn]


async def _measured(
    config: Config, asked: MeasureOptions, tasks: Taskset, chosen: list[Task], shop: Workshop, console: Console
) -> list[Finished]:
    """Measure until all rollouts have ended or it is stopped. Return the records of the finished rollouts."""
    settings, records = config.worlds, list[Finished]()
    measurement = Measurement(
        chosen,
        shop,
        tries=asked.tries,
        concurrency=settings.concurrency,
        token=f"m{secrets.token_hex(4)}",
        again=settings.tries,
        pause_s=settings.retry_pause_s,
        patience_s=settings.patience_s,
    )
    columns = ("{task.fields[so_far]}", TimeElapsedColumn(), TimeRemainingColumn())
    bar = counting_bar(*columns, console=console, disable=asked.machine)
    with bar, _record_writer(config, asked.out) as keep:
        line = bar.add_task("rollouts", total=asked.tries * len(chosen), so_far="")

        async def work() -> None:
            async with contextlib.aclosing(measurement.results()) as results:
                async for tried in results:
                    record = tried.record(tasks, wall_clock)
                    keep(record.line())
                    records.append(record)
                    bar.update(line, advance=1, so_far=f"{sum(each.solved for each in records)} solved")

        await _until_stopped(work())
    return records


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until SIGINT, SIGTERM or SIGHUP. Raises what `work` raises."""
    loop, working = asyncio.get_running_loop(), asyncio.ensure_future(work)
    signals = stop_signals()
    for number in signals:
        loop.add_signal_handler(number, working.cancel)
    try:
        await asyncio.wait({working})
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


@contextlib.contextmanager
def _record_writer(config: Config, out: Path | None) -> Generator[Callable[[str], None]]:
    """Yield a function that appends a line to the run's own file and to `out`. Raises StorageFull if `out` cannot be opened."""
    own = progress.Progress(home(config).finished, progress.kept_bytes(config))
    with contextlib.ExitStack() as leaving:
        try:
            file = None if out is None else leaving.enter_context(out.open("a", encoding="utf-8", buffering=1))
        except OSError as error:
            raise StorageFull(
                f"--out {out} cannot be written: {error.strerror}; name a file in a directory of yours"
            ) from error

        def keep(line: str) -> None:
            own.append(line)
            if file is not None:
                file.write(f"{line}\n")

        yield keep


# ---------------------------------------------------------------- coverage by checkpoint


def show_coverage(rollouts: Path, k: int, console: Console, *, machine: bool) -> None:
    """Print a line per checkpoint. Raises NotFound, and BadRequest that names the invalid line."""
    if k < 2:
        raise BadRequest(f"-k {k}: the best of one try is the first; give 2 or more", field="k")
    rows = covered(read_attempts(rollouts), k)
    lost = lost_coverage(rows)
    if machine:
        said = {"k": k, "rows": [asdict(row) for row in rows], "lost": None if lost is None else str(lost.policy)}
        console.out(json.dumps(said), highlight=False)
        return
    best = f"best of {k}"
    rates = ("pass@1", best, "pass@1, change", f"{best}, change")
    table = Table("checkpoint", "rollouts", "tasks", *rates, box=None, pad_edge=False)
    for row in rows:
        found, change = row.rates, row.change
        tasks = f"{found.first.items if found else 0}" + (f" (and {row.short} with too few tries)" if row.short else "")
        figures = (_share(found.first), _share(found.best)) if found else (_NONE, _NONE)
        moves = (_points(change.first), _points(change.best)) if change else (_NONE, _NONE)
        table.add_row(f"v{row.policy.number}", f"{row.attempts}", tasks, *figures, *moves)
    console.print(table)
    if lost is not None:
        told = f"v{lost.policy.number} has narrowed: pass@1 rose and the best of {k} fell; further training does not undo it"
        console.print(Text(told, "red"))


def read_attempts(path: Path) -> list[ScoredAttempt]:
    """Read the graded rollouts of held-out tasks that a single, known checkpoint made. Raises NotFound, BadRequest."""
    try:
        lines = lines_of(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {path}; name a run's finished.jsonl, or what `worlds run --out` wrote"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from error
    found: list[ScoredAttempt] = []
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:  # truncated by a kill or a full disk, or the empty line after such a line
            continue
        try:
            row_policy: dict[str, Any] | None = row["policy"]
            by_one_version = row_policy == row.get("policy_last", row_policy)
            if (
                row["split"] == Split.HELD_OUT.value
                and row["value"] is not None
                and row_policy is not None
                and by_one_version
            ):
                policy = PolicyVersion(number=int(row_policy["number"]), hash=str(row_policy["hash"]))
                task, family, value = str(row["task"]), str(row["family"]), float(row["value"])
                if not 0.0 <= value <= 1.0:
                    raise ValueError(f"value {value:g} is not in [0, 1]")
                found.append(ScoredAttempt(task=task, family=family, policy=policy, value=value))
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"{path}, line {number} is not a finished rollout: {error!r}") from error
    return found


def _points(mean: ItemMean) -> str:
    return f"{100 * mean.mean:+.1f} pp [{100 * mean.lower:+.1f}, {100 * mean.upper:+.1f}]"
