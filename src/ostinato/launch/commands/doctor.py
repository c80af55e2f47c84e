"""`ostinato doctor`: checks this machine and the configuration. Each failing line names its remedy."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ostinato.app.evaluation import check_suite
from ostinato.app.machine import Measured, cores, forget, places
from ostinato.app.storage import Home, log_elsewhere, open_folds, open_follower, open_log, rows_of
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, OstinatoError, StorageFull
from ostinato.core.memory import in_gib, process_limit
from ostinato.core.notices import Alarm
from ostinato.core.records import Batch, PolicyVersion, SteeringBasis
from ostinato.core.seams import Backend, R
from ostinato.core.steering import DialPrior
from ostinato.launch.commands.checks import check_keys, check_model, check_place, check_room
from ostinato.launch.placing.address import bind, url_of
from ostinato.status.compactions import prompt_lengths
from ostinato.status.dials import REFUSED, refused_bases
from ostinato.status.gateway_address import read_address
from ostinato.status.progress_lines import last_lines
from ostinato.status.summary import FOLD, Summary

if TYPE_CHECKING:
    from ostinato.model.speed import SpeedChoice, Speeds

_BREAK = "\n           "  # indents the further lines of a check
GIB = 1 << 30
NEEDED_GIB = 8  # two checkpoints of a 135M model, its versions and a log


def _python(_: Config) -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _torch(_: Config) -> str:
    import torch

    from ostinato.model.cpu import capabilities

    flags = capabilities()
    found = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if flags.get(name)]
    count = cores()
    return f"{torch.__version__}, {count} core{'s' * (count > 1)}, {' '.join(found)}"


def _device(config: Config) -> str:
    import torch

    from ostinato.app.numerics import trainer_backend

    found = trainer_backend(config)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    seen = f"torch sees {', '.join(gpus)}" if gpus else "torch sees no CUDA GPU"
    kernels = "our own kernels" if found.kernels == "own" else "torch's kernels"
    never = "" if found.device == "cpu" else "; only partly tried on GPUs"
    return f"engine and trainer compute on {found.device} with {kernels}; {seen}{never}"


def _sqlite(_: Config) -> str:
    from ostinato.record.sqlite import driver, refuse_faulty

    refuse_faulty(driver.sqlite_version)
    return driver.sqlite_version


def _sandbox(config: Config) -> str:
    asyncio.run(_namespaces(config))
    found = "user, mount, pid and network namespaces work"
    if config.sandbox.backend == "gvisor":
        from ostinato.worlds.sandbox.gvisor import GVisorBoxes

        boxes = GVisorBoxes(config.sandbox)
        missing = asyncio.run(_missing(boxes))
        return f"{found}; gVisor works (platform {boxes.platform}): {missing}"
    if config.sandbox.backend == "e2b":
        from ostinato.worlds.sandbox.e2b import E2BBoxes

        missing = asyncio.run(_missing(E2BBoxes(config.sandbox)))
        return f"{found}; E2B works (template {config.sandbox.template}): {missing}"
    runsc = "runsc is installed" if shutil.which("runsc") else "no runsc"
    sdk = "E2B's SDK is installed" if importlib.util.find_spec("e2b") else "no E2B SDK"
    return f"{found}; {runsc} for sandbox.backend = 'gvisor', {sdk} for 'e2b'"


async def _namespaces(config: Config) -> None:
    from ostinato.worlds.sandbox import SingleRuns

    async with SingleRuns(config.sandbox) as runs:
        await runs.check()


async def _missing(boxes: Backend) -> str:
    """Return what a backend's isolation lacks. Raises SandboxRefused."""
    try:
        return "; ".join((await boxes.isolation()).missing)
    finally:
        await boxes.close()


def _context(config: Config) -> str:
    """Compare the model's context length with agents' prompts. Raises BadConfig if it is too short for prompts that were sent."""
    if _must_be_downloaded(config):
        return "read at startup, once the model has been downloaded"
    from transformers import AutoConfig

    from ostinato.model.load import resolve
    from ostinato.serve.calls.context import LEAST_SHARE

    found = AutoConfig.from_pretrained(resolve(config.model.source, Path(config.model.cache))).get_text_config()
    context = int(found.max_position_embeddings)
    longest, openings = asyncio.run(_prompts(config))
    if not openings:
        return f"{context:,} tokens; no prompt of 1,000 tokens was served yet"
    served = f"{context:,} tokens; the newest {len(openings):,} long sessions had prompts of up to {longest:,}"
    if longest >= context:
        raise BadConfig(
            f"{served}: such calls are refused. Serve a model with a longer context, or have clients shorten their conversations earlier"
        )
    summary = context // LEAST_SHARE
    trigger = int(config.serve.compaction_share * context)
    tight = [opening for opening in openings if opening + summary >= trigger]
    if not tight:
        return f"{served}, and windows begin with up to {max(openings):,}"
    return (
        f"{served}{_BREAK}warning: {len(tight):,} of them began a window with {min(tight):,} tokens and more of instructions, tools and "
        f"summary: with a summary of up to {summary:,} they reach {trigger:,} (serve.compaction_share) again at once, and an agent may "
        "summarise after every answer and never end. Serve a model with a longer context, or give the agent fewer tools"
    )


async def _prompts(config: Config) -> tuple[int, Sequence[int]]:
    """Return the longest prompt of people's sessions and the lengths of those that began a window, from the last saved summary."""
    kept = await open_folds(config).load(FOLD) if Home(config.run.directory).folds.is_dir() else None
    if kept is None:
        return 0, ()
    try:
        return prompt_lengths(Summary.of(*kept).compactions)
    except (KeyError, TypeError, ValueError):  # saved by another version of Ostinato; rebuilt at the next start
        return 0, ()


def _speed(config: Config) -> str:
    from ostinato.app import numerics

    if _must_be_downloaded(config):
        return "measured at startup, once the model has been downloaded"
    if numerics.trainer_backend(config).kernels == "torch":
        return "not measured for torch's kernels"
    measured, found = numerics.speeds(config), numerics.choice(config)
    engine, trainer = numerics.compute(config), numerics.training(config).compute
    used = f"the engine computes in {str(engine).removeprefix('torch.')}, the trainer in {trainer}"
    lines = [f"{used}; {found.dtype} is faster here: bf16 at {found.bf16:.2g}x of fp32's speed; {_kept(measured)}"]
    by_place: dict[tuple[int, int, int], dict[str, float]] = {}
    for each in measured.value.dtypes:
        by_place.setdefault((each.inputs, each.outputs, each.rows), {})[each.dtype] = each.gflops
    lines += [
        f"  {inputs} -> {outputs}, {rows:>3} rows: " + ", ".join(f"{name} {g:.3g} GFLOP/s" for name, g in of.items())
        for (inputs, outputs, rows), of in by_place.items()
    ]
    return _BREAK.join([*lines, _threads(config, measured.value, found)])


def _threads(config: Config, speeds: Speeds, found: SpeedChoice) -> str:
    """Return how much faster more threads are, and which setting to change."""
    from ostinato.app.numerics import engine_threads

    engine, trainer = engine_threads(config), config.train.threads
    used = f"threads: engine {engine}, trainer {trainer}"
    if not found.teams:
        return f"{used}; there is one core"
    shown = ", ".join(f"{factor:.2g}x with {count}" for count, factor in found.teams.items())
    if speeds.busy:
        return (
            f"{used}; {shown}, but the machine was busy (load {speeds.load:.1f} on {speeds.cores} cores): measure again when "
            "it is idle (`ostinato doctor --again`)"
        )
    if found.threads > max(engine, trainer):
        return f"{used}; {shown}: where no other worker needs the cores, set engine.threads or train.threads to {found.threads}"
    return f"{used}; {shown}"


def _numerics(config: Config) -> str:
    from ostinato.app import numerics
    from ostinato.core.numerics import contract_in_words, differences_in_words
    from ostinato.model.config import backend
    from ostinato.model.kernels.cache import announced

    numerics.check_products(config)
    if _must_be_downloaded(config):
        return f"{config.model.numerics} mode; measured at startup, once the model has been downloaded"
    with announced(Console(stderr=True).print):
        mode = numerics.numerics_mode(config)
        engine, trainer = numerics.engine_contract(config), numerics.trainer_contract(config)
    alike = "engine and trainer alike"
    if engine != trainer:
        alike = f"the trainer's is {trainer.id}: {differences_in_words(engine, trainer)}, so its turns count as foreign"
    if backend(config.model).kernels == "torch":
        return f"{contract_in_words(engine)}; {alike}; torch's kernels promise no bitwise equality, so there is no self-test"
    examined = numerics.examined(config, numerics.compute(config), 1)
    found, count = examined.value, numerics.engine_threads(config)
    held = "exact mode holds" if found.exact else found.reason
    lines = [f"{contract_in_words(engine)}; {alike}", *([str(mode)] if mode.why else [])]
    lines.append(f"self-test, {found.seconds:.1f} s, {count} thread{'s' * (count > 1)}: {held}; {_kept(examined)}")
    lines += [f"  {line}" for line in found.table]
    lines += [] if found.exact else [_exact_in_other_dtype(config)]
    if times := numerics.pace(config):
        shown = ", ".join(f"{factor:.1f}x at {numerics.streams(count)}" for count, factor in times.items())
        lines.append(
            numerics.slower(times) or f"the decoder in whole numbers against plain products, one thread: {shown}"
        )
    return _BREAK.join(lines)


def _exact_in_other_dtype(config: Config) -> str:
    """Return whether exact mode holds in the other dtype, for a machine on which it does not hold in the configured one."""
    import torch

    from ostinato.app import numerics

    other = "fp32" if numerics.compute(config) == torch.bfloat16 else "bf16"
    if other == "bf16" and config.model.dtype == "float32":
        return "exact mode would need another CPU or another torch"
    there = numerics.examined(config, torch.float32 if other == "fp32" else torch.bfloat16, 1).value
    holds = f"exact mode holds here with model.compute = '{other}'"
    return holds if there.exact else f"with model.compute = '{other}' exact mode does not hold, either: {there.reason}"


def _kept(measured: Measured[Any]) -> str:
    """Return when a cached measurement was made and its file.

    Example: "measured on 2026-11-28 at 14:03, kept in ~/.cache/ostinato/machine/exact-0f3a.json".
    """
    when = time.strftime("%Y-%m-%d at %H:%M", time.localtime(measured.at))
    where = "not kept: model.cache cannot be written" if measured.file is None else f"kept in {measured.file}"
    return f"measured on {when}, {where}"


def _must_be_downloaded(config: Config) -> bool:
    """Return True for a model that must be downloaded, since a check must not download gigabytes."""
    return config.model.source != "smollm2" and not Path(config.model.source).expanduser().is_dir()


def _suite(config: Config) -> str:
    if not config.evaluate.suite:
        return "none: nothing ships by itself; set evaluate.suite to a task file, or ship by hand"
    suite = asyncio.run(check_suite(config))
    return f"{len(suite.items)} items of {suite.name}, each can be graded here"


def _reward(config: Config) -> str:
    from ostinato.reward.runners import asker_of, late_asker_of

    async def look() -> None:
        for asker in filter(None, (asker_of(config.reward), late_asker_of(config.reward))):
            try:
                await asker.open()
            finally:
                await asker.close()

    asyncio.run(look())
    found, times = f"{config.reward.function} can be loaded", config.reward.group_tokens / config.reward.batch_tokens
    if config.learn.source == "people" or times <= 1.0:
        return found
    return (
        f"{found}; a group of rollouts may have {config.reward.group_tokens:,} tokens (reward.group_tokens), and its step may take up to "
        f"{times:.3g} times supervise.work_s, {times * config.supervise.work_s:g} s"
    )


def _disk(config: Config) -> str:
    place = check_place(config)
    free = shutil.disk_usage(place).free / GIB
    if free < NEEDED_GIB:
        raise StorageFull(
            f"{free:.1f} GiB free in {place}: {NEEDED_GIB} GiB are needed; free some or set run.directory"
        )
    return f"{free:.0f} GiB free in {place}, which is writable"


def _log(config: Config) -> str:
    if not config.record.url:
        return f"a directory, {Home(config.run.directory).log}"
    name, there = log_elsewhere(config.record)
    return name if there else f"{name} can be reached; the log is created at the first start"


def _erasure(config: Config) -> str:
    """Return what `ostinato forget` can promise under these settings and in this run so far."""
    days, octaves = config.record.retain_days, config.learn.checkpoint_ladder
    words = f"record.encrypt is {config.record.encrypt.value!r}"
    if config.record.encrypt.value == "none":
        return f"{words}: nobody can be forgotten"
    words += ": words can be erased for"
    whose = "single people" if config.record.encrypt.value == "user" else "all users of a tenant together"
    reach = config.learn.checkpoint_every << octaves
    tail = (
        f"a replay begins at most twice as far back as their first step, up to {reach} steps (learn.checkpoint_ladder = {octaves})"
        if octaves
        else "a replay begins at the start of training, unless one of learn.keep_checkpoints is older than their first step"
    )
    lines = [f"{words} {whose}", tail]
    dropped, first = _dropped(config)
    if dropped:
        lines.append(
            f"warning: rows up to {dropped} were dropped, and live may be trained on turns among them (steps from {first} on): no replay "
            "can erase anybody from the weights; train again from the base, with record.retain_days unset or longer than the weights live"
        )
    elif days is not None:
        lines.append(
            f"warning: record.retain_days = {days:g}: once rows are dropped, no replay can erase anybody from weights that were trained "
            "on them, since it recomputes credits from the log's first row on; unset it, or train again from the base at least as often"
        )
    else:
        lines.append("no row is ever dropped (record.retain_days): a replay can erase anybody from the weights")
    return _BREAK.join(lines)


def _dials(config: Config) -> str:
    """Return whose answers are steered by dials under these settings. Raises BadConfig if nobody's can be."""
    adapt = config.adapt
    if adapt.mode == "off":
        return _BREAK.join(["off: answers lean to nobody (adapt.mode)", *_approved(config)])
    if adapt.users == "verified" and not config.serve.user_keys:
        raise BadConfig(
            "adapt.users is 'verified' and serve.user_keys is empty, so nobody has dials: set serve.user_keys and send "
            "X-Ostinato-User-Signature with each call, or set adapt.users to 'declared'"
        )
    whose = "users that their tenant signs" if adapt.users == "verified" else "any user that a caller names"
    cap = f"a token moves by {adapt.cap:g} nats at most; {adapt.holdout:.0%} of people are held out"
    told = [f"{whose}; {cap}", _basis(config), *_approved(config)]
    if private := _private_priors(config):
        told.append(private)
    if config.engine.kind != "embedded":
        told.append("vLLM leans whole answers by a bias, none with tools, and ratings of them teach no dial")
    return _BREAK.join(told)


def _has_log(config: Config) -> bool:
    return bool(config.record.url) or any(Home(config.run.directory).log.glob("*.db"))


def _rows(config: Config, kind: type[R]) -> list[R]:
    """Return the log's rows of a kind, oldest first."""

    async def read() -> list[R]:
        with open_log(config) as log:
            return [row async for row in rows_of(log, kind)]

    return asyncio.run(read()) if _has_log(config) else []


def _live(config: Config) -> PolicyVersion | None:
    return asyncio.run(open_follower(config).resolve("live")) if _has_log(config) else None


def _basis(config: Config) -> str:
    """Return whether the live version has a basis of dials, with the remedy if it has none."""
    after, live = "run `ostinato adapt fit` after the start and after each release", _live(config)
    if live is None:
        return after
    bases = [row for row in _rows(config, SteeringBasis) if row.weights == live.hash]
    if live.hash in refused_bases(last_lines(Home(config.run.directory).progress("serve"))):
        return f"warning: {REFUSED}"
    if not bases or not bases[-1].moves:
        return f"warning: v{live.number} is live and has no basis, so nobody's answers lean: run `ostinato adapt fit`"
    names = bases[-1].names
    return f"v{live.number} is live and has a basis of {len(names)} dials: {', '.join(names)}; {after}"


def _approved(config: Config) -> list[str]:
    """Return lines on which styles are approved for the live version, with the remedy for the others; none without styles."""
    from ostinato.adapt.styles import StyleApprovals, styles_of

    styles = styles_of(config.adapt)
    if styles and not _has_log(config):
        return ["styles: run `ostinato adapt approve` after the start and after each release"]
    if not styles or (live := _live(config)) is None:
        return []
    approvals = StyleApprovals(config.adapt.styles.versions)
    for row in _rows(config, Alarm):
        approvals.take(row)
    unsafe = ", ".join(style.name for style in styles if approvals.unsafe(style.arm, live))
    names = {style.name: approvals.holds(style.arm, live) for style in styles}
    dealt = ", ".join(name for name, held in names.items() if held) or "none"
    lines = [f"styles that are approved for v{live.number}, which is live: {dealt}"]
    if unsafe:
        lines.append(
            f"warning: `ostinato adapt check` found unsafe, so that nobody is dealt it: {unsafe}. Change its text"
        )
    if missing := ", ".join(name for name, held in names.items() if not held and name not in unsafe.split(", ")):
        lines.append(f"warning: nobody is dealt {missing}: run `ostinato adapt approve`")
    return lines


def _private_priors(config: Config) -> str:
    """Return how much of their privacy budget the priors of dials have spent; "" without a budget."""
    from ostinato.adapt.privacy import PrivacyBudget

    if (budget := PrivacyBudget.of(config.adapt.privacy)) is None:
        return ""
    priors = [(row.at, row.sigma) for row in _rows(config, DialPrior)]
    most = f"a tenant with {config.adapt.most_states} people who rated is in none (adapt.most_states)"
    return f"priors of dials: {budget.words(priors, wall_clock())}; {most}"


def _dropped(config: Config) -> tuple[int, int]:
    """Return the log position up to which rows were dropped (0 if none were), and the first recorded step."""
    if config.record.url or not _has_log(config):
        return 0, 0

    async def look() -> tuple[int, int]:
        with open_log(config) as log:
            first = await anext(aiter(log.read(0, {Batch})), None)
            return await log.horizon(), 0 if first is None or not isinstance(first[1], Batch) else first[1].step

    return asyncio.run(look())


def _memory(config: Config) -> str:
    check_room(config)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if total < NEEDED_GIB:
        raise BadConfig(
            f"{total:.1f} GiB of memory: {NEEDED_GIB} GiB are needed for the default model; choose a smaller model or a larger machine"
        )
    room = process_limit()
    return f"{total:.0f} GiB" + (f"; {room.bound} leaves {in_gib(room.size)}" if room else "")


def _address(config: Config) -> str:
    check_keys(config)
    url = read_address(Home(config.run.directory).address)
    if url is not None and url.endswith(f":{config.listen.port}"):
        return f"this run's gateway answers on {url}"
    with bind(config.listen.host, config.listen.port) as listener:
        return f"{url_of(listener)} is free" if config.listen.port else f"a free port on {config.listen.host}"


CHECKS: tuple[tuple[str, Callable[[Config], str]], ...] = (
    ("Python", _python),
    ("torch", _torch),
    ("device", _device),
    ("SQLite", _sqlite),
    ("sandbox", _sandbox),
    ("model", check_model),
    ("context", _context),
    ("speed", _speed),
    ("numerics", _numerics),
    ("reward", _reward),
    ("suite", _suite),
    ("memory", _memory),
    ("disk", _disk),
    ("log", _log),
    ("erasure", _erasure),
    ("dials", _dials),
    ("port", _address),
)


def examine(config: Config, console: Console, *, again: bool = False) -> bool:
    """Run all checks and print their results. Return True if all passed. `again`: repeat the measurements instead of using cached ones."""
    if again:
        forget(places(config))
    fine = True
    for name, check in CHECKS:
        try:
            found = check(config)
        except ImportError as error:
            fine = _failed(
                name, f"{error}; install Ostinato with its dependencies: pip install --upgrade ostinato", console
            )
        except (OstinatoError, OSError) as error:
            fine = _failed(name, str(error), console)
        else:
            passed = "ok" if console.options.ascii_only else "✓"
            console.print(Text.assemble((passed, "green"), f" {name:8} {found}"), soft_wrap=True)
    console.print(f"run directory: {Path(config.run.directory).resolve()}", highlight=False, soft_wrap=True)
    return fine


def _failed(name: str, why: str, console: Console) -> bool:
    failed = "no" if console.options.ascii_only else "✗"
    console.print(Text.assemble((failed, "bold red"), f" {name:8} {why}"), soft_wrap=True)
    return False
