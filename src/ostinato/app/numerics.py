"""The arithmetic that each worker computes with, and the self-test's verdict on this machine."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.app.storage import model_path
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Stamp
from ostinato.core.numerics import Contract
from ostinato.core.seams import Log

if TYPE_CHECKING:
    import torch

    from ostinato.model.devices.backend import Backend
    from ostinato.model.integers import Integers
    from ostinato.model.selftest import ExactnessVerdict
    from ostinato.train.config import TrainConfig


def engine_contract(config: Config) -> Contract:
    """The numerics contract of the serving worker; the same in every process of this machine.

    Imports torch. In exact mode it needs the model's directory (see `model_path`), and measures this machine for some seconds the
    first time. Raises BadConfig if exact mode cannot hold.
    """
    from ostinato.model.config import compute_dtype

    check_products(config)
    return _contract(config, compute_dtype(config.model), threads=1, quantisation=_rounding(config))


def _rounding(config: Config) -> str | None:
    """The name of the engine's rounding of products; None for plain ones."""
    if config.engine.products == "fp8":
        from ostinato.engine.embedded.forms.fp8 import NAME

        return NAME
    found = integers(config)
    return None if found is None else found.name


def check_products(config: Config) -> None:
    """Raise BadConfig if `engine.products` contradicts what other settings promise about the engine's turns. Imports no torch."""
    if config.engine.products == "plain":
        return
    if config.model.numerics == "exact":
        raise BadConfig(
            f"engine.products = {config.engine.products!r} rounds what the trainer does not, and model.numerics = 'exact' promises the "
            "same bits: set model.numerics = 'fast', or engine.products = 'plain'"
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
    """The integer products of the engine with `engine.products = "int8"`, measured once per process; else None. Raises BadConfig."""
    return _integers(model_path(config)) if config.engine.products == "int8" else None


def pace(config: Config) -> dict[int, float]:
    """The speed of the decoder's integer products relative to plain ones, by number of rows. Measures for some seconds."""
    from ostinato.engine.embedded.forms.int8 import times_as_fast
    from ostinato.model.config import compute_dtype

    found = integers(config)
    if found is None:
        return {}
    return times_as_fast(_matrices(model_path(config)), compute_dtype(config.model), found)


def slower(times: dict[int, float]) -> str:
    """A message about integer products that are slower than plain ones; "" if none is."""
    late = [f"{factor:.1f}x at {rows} rows" for rows, factor in times.items() if factor < 1]
    return f"slower here than plain products: {', '.join(late)}" if late else ""


def trainer_contract(config: Config) -> Contract:
    """The numerics contract of the training worker: the engine's, unless its dtype differs or its threads give other bits."""
    import torch

    dtype = torch.bfloat16 if training(config).compute == "bf16" else torch.float32
    return _contract(config, dtype, threads=config.train.threads)


def trainer_backend(config: Config) -> Backend:
    """The training worker's device and kernels: the engine's. Raises BadConfig, also for ranks that cannot compute with them."""
    from ostinato.model.config import backend

    found = backend(config.model)
    if config.train.ranks > 1:
        from ostinato.train.sharding.group import check_ranks

        check_ranks(config.train, found)
    return found


def training(config: Config) -> TrainConfig:
    """The trainer's settings with `compute` resolved: "auto" is the engine's. Raises BadConfig."""
    import torch

    from ostinato.model.config import compute_dtype

    if config.train.compute != "auto":
        return config.train
    compute = "bf16" if compute_dtype(config.model) == torch.bfloat16 else "fp32"
    return config.train.model_copy(update={"compute": compute})


def _contract(config: Config, dtype: torch.dtype, threads: int, quantisation: str | None = None) -> Contract:
    from ostinato.model.config import backend
    from ostinato.model.numerics import contract

    mode, found_at, library = config.model.numerics, backend(config.model), ()
    if mode == "exact":
        found = verdict(config, dtype, threads)
        if not found.exact:
            raise BadConfig(found.reason)
        threads, library = found.threads, found.library
    return contract(
        dtype, mode, threads, 1, config.engine.block, quantisation or "none", backend=found_at, library=library
    )


def verdict(config: Config, dtype: torch.dtype, threads: int) -> ExactnessVerdict:
    """The self-test's verdict on this machine and the configured model; measured once per process.

    Ideally all thread counts of trainer and engine give the same bits as one thread. If they do not, the verdict is
    on `threads` alone.
    """
    found = _examined(model_path(config), dtype, _all_threads(config))
    return found if found.exact else _examined(model_path(config), dtype, (threads,))


def threads_agree(config: Config) -> bool:
    """Whether the engine's threads together give the bits of one thread, by the self-test. True in fast mode, which promises no bits."""
    from ostinato.model.config import compute_dtype

    if config.model.numerics != "exact":
        return True
    return _examined(model_path(config), compute_dtype(config.model), _all_threads(config)).exact


def _all_threads(config: Config) -> tuple[int, ...]:
    return tuple(sorted({1, config.train.threads, config.engine.threads}))


@lru_cache
def _examined(path: Path, dtype: torch.dtype, threads: tuple[int, ...]) -> ExactnessVerdict:
    from ostinato.engine.embedded.form import prepack
    from ostinato.model.selftest import examine

    return examine(path, dtype, threads, prepack)


@lru_cache
def _integers(path: Path) -> Integers:
    import torch

    from ostinato.engine.embedded.forms.int8 import NO_LINEARS, check_dense
    from ostinato.model.integers import find
    from ostinato.model.load import empty_model

    check_dense(empty_model(path, torch.float32, shallow=True))
    shapes = _matrices(path)
    if not shapes:
        raise BadConfig(NO_LINEARS)
    return find(inputs for inputs, _ in shapes)


@lru_cache
def _matrices(path: Path) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers of a decoder layer."""
    import torch

    from ostinato.model.load import empty_model
    from ostinato.model.selftest import shapes_of

    return tuple(
        (shape.inputs, shape.outputs) for shape in shapes_of(empty_model(path, torch.float32, shallow=True).base_model)
    )


async def stamp(log: Log, contract: Contract) -> None:
    """Record in the log what a contract's id stands for, before the first turn that names it. Idempotent."""
    await log.append(Stamp(id=contract.id, contract=contract.to_json(), at=wall_clock()))
