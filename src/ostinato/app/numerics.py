"""The numerics of each worker: the dtype and mode that measurements of this machine decide on, and its numerics contract.

Every process of a run resolves "auto" itself and gets the same result, because measurements are cached (`app.machine`). Another machine may
get a different one; the contract on each turn then says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ostinato.app.machine import Measured, cores, measured, places
from ostinato.app.storage import model_path
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Stamp
from ostinato.core.numerics import Contract
from ostinato.core.seams import Log

if TYPE_CHECKING:
    import torch

    from ostinato.engine.embedded.fused import EngineForm
    from ostinato.model.backend import ComputeBackend
    from ostinato.model.linear import Integers
    from ostinato.model.selftest import ExactnessVerdict
    from ostinato.model.speed import SpeedChoice, Speeds
    from ostinato.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsMode:
    """`model.numerics` with "auto" resolved. `why`: the reason why "auto" became fast; "" if it is exact or the mode was set.

    Example: ``NumericsMode(mode="fast", why="exact mode cannot hold on this machine: ...")``
    """

    mode: Literal["exact", "fast"]
    why: str = ""

    def __str__(self) -> str:
        """Describe the mode in one line."""
        if not self.why:
            return f"numerics: {self.mode}"
        return f"numerics: fast, as {self.why}; the trainer corrects for the difference to the engine's bits, and reports it"


def resolve(
    asked: Literal["auto", "exact", "fast"],
    kernels: str,
    products: str,
    examine: Callable[[], Iterable[ExactnessVerdict]],
) -> NumericsMode:
    """Return the mode that was set; for "auto" exact if every verdict of `examine` is, else fast. Runs `examine` only if needed."""
    if asked != "auto":
        return NumericsMode(mode=asked)
    if kernels == "torch":
        why = "torch's kernels do not guarantee bitwise equality"
    elif products != "plain":
        why = f"engine.products = {products!r} rounds what the trainer does not"
    else:
        why = next((_cause(found) for found in examine() if not found.exact), "")
    return NumericsMode(mode="fast" if why else "exact", why=why)


def _cause(found: ExactnessVerdict) -> str:
    from ostinato.model.selftest import REMEDY

    return found.reason.removesuffix(f"; {REMEDY}") or "the self-test failed"


def numerics_mode(config: Config) -> NumericsMode:
    """Return the mode in which a run's engine and trainer compute on this machine. Imports torch; measures like `engine_contract`."""
    from ostinato.model.config import backend

    def examine() -> Iterable[ExactnessVerdict]:
        engine, trainer = compute(config), trained_in(config)
        yield verdict(config, engine, 1)
        yield verdict(config, trainer, config.train.threads)

    return resolve(config.model.numerics, backend(config.model).kernels, config.engine.products, examine)


def compute(config: Config) -> torch.dtype:
    """Return the dtype in which the engine computes. Imports torch, and may measure this machine for a second or two. Raises BadConfig."""
    from ostinato.model.config import compute_dtype

    return compute_dtype(config.model, lambda: choice(config).dtype)


def choice(config: Config) -> SpeedChoice:
    """Return the dtype and thread count to use, by the measured speeds of the model's matrix products on this machine."""
    from ostinato.model.speed import choose

    return choose(speeds(config).value)


def engine_threads(config: Config) -> int:
    """Return the engine's threads: as set, else as many of the cores left by the trainer as pay. Measures only if cores are left."""
    from ostinato.model.config import backend

    if config.engine.threads:
        return config.engine.threads
    left = cores() - config.train.threads * config.train.ranks
    if left <= 1 or config.engine.kind == "vllm" or backend(config.model).kernels == "torch":
        return 1
    return min(left, choice(config).threads)


def speeds(config: Config) -> Measured[Speeds]:
    """Return the speeds of the model's matrix products on this machine, from the cache or measured now."""
    from ostinato.engine.embedded.form import prepack
    from ostinato.model.speed import Speeds, is_whole, measure

    path = model_path(config)
    return measured(
        places(config),
        "speed",
        _parts(config, path),
        lambda: measure(path, prepack, cores()),
        Speeds,
        usable=is_whole,
        lasting=lambda found: not found.busy,
    )


def _parts(config: Config, path: Path) -> dict[str, object]:
    """Return what a measurement depends on besides the machine: the model's shapes, and the bits that this process computes."""
    from ostinato.model.numerics import probe

    _use_order(config)
    shapes = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:16]
    return {"model": shapes, "probe": probe()}


def _use_order(config: Config) -> None:
    """Set the order of additions in this process's products, if configured. Must be called before anything is measured or multiplied."""
    from ostinato.model.linear import use_order

    if config.model.order != "auto":
        use_order(config.model.order)


def engine_contract(config: Config) -> Contract:
    """Return the numerics contract of the serving worker, the same in every process of this machine.

    Imports torch. Needs the model's directory (see `model_path`), and measures this machine for some seconds the first time. Raises
    BadConfig if exact mode was set and cannot hold.
    """
    check_products(config)
    return _contract(config, compute(config), threads=1, quantisation=_rounding(config))


def _rounding(config: Config) -> str:
    """Return the name of the quantisation of the engine's products; "none" for plain ones."""
    if config.engine.products == "fp8":
        from ostinato.engine.embedded.form import FP8_NAME

        return FP8_NAME
    found = integers(config)
    return "none" if found is None else found.name


def check_products(config: Config) -> None:
    """Raise BadConfig if `engine.products` contradicts other settings on the engine's numerics. Does not import torch."""
    if config.engine.products == "plain":
        return
    if config.model.numerics == "exact":
        raise BadConfig(
            f"engine.products = {config.engine.products!r} rounds what the trainer does not, and model.numerics = 'exact' promises the "
            "same bits: leave model.numerics out, or set engine.products = 'plain'"
        )
    if config.train.foreign_numerics == "refuse":
        raise BadConfig(
            f"engine.products = {config.engine.products!r} gives every turn another numerics contract than the trainer's, and "
            "train.foreign_numerics = 'refuse' would hold all of them back: set it to 'label', or engine.products = 'plain'"
        )
    chosen = f"model.kernels = {config.model.kernels!r} and model.device = {config.model.device!r}"
    if config.engine.products == "fp8" and config.model.kernels != "torch":
        raise BadConfig(
            f"engine.products = 'fp8' is for torch's kernels, not for {chosen}: set model.kernels = 'torch', and model.device = 'cuda' for "
            "speed, or engine.products = 'plain'"
        )
    if config.engine.products == "int8" and (config.model.kernels == "torch" or config.model.device != "cpu"):
        raise BadConfig(
            f"engine.products = 'int8' is for our own kernels on the CPU, not for {chosen}: set model.kernels = 'own' and "
            "model.device = 'cpu', or engine.products = 'plain'"
        )


def integers(config: Config) -> Integers | None:
    """Return the integer products of the engine with `engine.products = "int8"`, measured once per process; else None. Raises BadConfig."""
    return _integers(model_path(config)) if config.engine.products == "int8" else None


def pace(config: Config) -> dict[int, float]:
    """Return the speed of the engine's integer decoder relative to the plain one, by number of streams. Measures for some seconds."""
    from ostinato.engine.embedded.form import times_as_fast

    found = integers(config)
    return {} if found is None else times_as_fast(model_path(config), compute(config), found)


def slower(times: dict[int, float]) -> str:
    """Return a warning if the integer decoder is slower at some number of streams; else ""."""
    late = [f"{factor:.1f}x at {streams(count)}" for count, factor in times.items() if factor < 1]
    return f"slower here than engine.products = 'plain': {', '.join(late)}" if late else ""


def streams(count: int) -> str:
    """Format a count, as in "8 streams"."""
    return f"{count} stream{'s' * (count > 1)}"


def trainer_contract(config: Config) -> Contract:
    """Return the numerics contract of the training worker: the engine's, unless its dtype differs or its threads give other bits."""
    return _contract(config, trained_in(config), threads=config.train.threads)


def trained_in(config: Config) -> torch.dtype:
    """Return the dtype in which the trainer computes. Imports torch. Raises BadConfig."""
    import torch

    return torch.bfloat16 if training(config).compute == "bf16" else torch.float32


def trainer_backend(config: Config) -> ComputeBackend:
    """Return the training worker's device and kernels, which are the engine's. Raises BadConfig, also for ranks that cannot use them."""
    from ostinato.model.config import backend

    found = backend(config.model)
    if config.train.ranks > 1:
        from ostinato.train.sharding.group import check_ranks

        check_ranks(config.train, found)
    return found


def training(config: Config) -> TrainConfig:
    """Return the trainer's settings without "auto": `compute` is the engine's dtype, `publish` the model's.

    If `learn.source` is "people" and `learn.batch` is "auto", `base_turns` is `learn.least_turns` unless set. Raises BadConfig.
    """
    import torch

    settings: dict[str, Any] = {}
    if config.train.compute == "auto":
        settings["compute"] = "bf16" if compute(config) == torch.bfloat16 else "fp32"
    if config.train.publish == "auto":
        settings["publish"] = "bf16" if config.model.dtype == "bfloat16" else "fp32"
    # steps with rollouts have the number of turns that the learning rate was tuned for
    people = config.learn.source == "people"
    if people and config.learn.batch == "auto" and config.train.base_turns is None:
        settings["base_turns"] = config.learn.least_turns
    return config.train.model_copy(update=settings)


def _contract(config: Config, dtype: torch.dtype, threads: int, quantisation: str = "none") -> Contract:
    from ostinato.model.config import backend
    from ostinato.model.numerics import contract

    _use_order(config)
    mode, found_at, block = numerics_mode(config).mode, backend(config.model), config.engine.block
    if mode == "fast":  # no bits are guaranteed, so the number of threads is not part of the contract
        return contract(dtype, mode, 1, block, quantisation, backend=found_at)
    found = verdict(config, dtype, threads)
    if not found.exact:
        raise BadConfig(found.reason)
    return contract(
        dtype,
        mode,
        found.threads,
        block,
        quantisation,
        backend=found_at,
        library=found.library,
        definitions=found.definitions,
    )


def verdict(config: Config, dtype: torch.dtype, threads: int) -> ExactnessVerdict:
    """Return the self-test's verdict on this machine and the configured model, from the cache or measured now.

    Ideally all thread counts of trainer and engine give the same bits as one thread. If they do not, the verdict is on `threads` alone.
    """
    return examined(config, dtype, threads).value


def examined(config: Config, dtype: torch.dtype, threads: int) -> Measured[ExactnessVerdict]:
    """Return `verdict` with when it was measured and where it is cached."""
    found = _examined(config, dtype, _all_threads(config))
    return found if found.value.exact else _examined(config, dtype, (threads,))


def threads_agree(config: Config) -> bool:
    """Return whether all engine threads together give the bits of one, by the self-test. True in fast mode, which guarantees none."""
    if numerics_mode(config).mode != "exact":
        return True
    return _examined(config, compute(config), _all_threads(config)).value.exact


def _all_threads(config: Config) -> tuple[int, ...]:
    return tuple(sorted({1, config.train.threads, engine_threads(config)}))


def _examined(config: Config, dtype: torch.dtype, threads: tuple[int, ...]) -> Measured[ExactnessVerdict]:
    from ostinato.engine.embedded.form import prepack
    from ostinato.model.selftest import ExactnessVerdict, examine

    path = model_path(config)
    about = {"dtype": str(dtype), "threads": list(threads), "block": config.engine.block}
    parts = {**_parts(config, path), **about}

    def run() -> ExactnessVerdict:
        return examine(path, dtype, threads, prepack, config.engine.block)

    return measured(places(config), "exact", parts, run, ExactnessVerdict)


def form(
    config: Config, path: Path, name: str, architecture: str, dtype: torch.dtype, trial: Callable[[], EngineForm]
) -> EngineForm:
    """Return a trial's result for the engine's form `name` and an architecture on this machine: cached, or run now (`fused.TrialCache`)."""
    from ostinato.engine.embedded.fused import EngineForm

    about = hashlib.sha256(architecture.encode()).hexdigest()[:16]
    parts = {**_parts(config, path), "form": name, "architecture": about, "dtype": str(dtype)}
    return measured(places(config), "form", parts, trial, EngineForm).value


@lru_cache
def _integers(path: Path) -> Integers:
    import torch

    from ostinato.engine.embedded.form import NO_LINEARS, check_dense
    from ostinato.model.linear import choose_integers
    from ostinato.model.load import empty_model
    from ostinato.model.selftest import shapes_of

    model = empty_model(path, torch.float32, shallow=True)
    check_dense(model)
    widths = {shape.inputs for shape in shapes_of(model.base_model)}
    if not widths:
        raise BadConfig(NO_LINEARS)
    return choose_integers(widths)


async def stamp(log: Log, contract: Contract) -> None:
    """Record in the log what a contract's id stands for, before the first turn that names it. Idempotent."""
    await log.append(Stamp(id=contract.id, contract=contract.to_json(), at=wall_clock()))
