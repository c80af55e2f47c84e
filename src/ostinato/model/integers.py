"""Exactly summed 8-bit integer matrix products by one of torch's libraries: finds the library that is exact here, and its levels.

A CPU without instructions for it multiplies bytes in pairs whose sums saturate at 16 bits (vpmaddubsw): two products of 255 and 127
overflow silently. So every library is compared with exact integer arithmetic, with the largest numbers too, and gets fewer levels,
or is not used, if one sum differs. Exact sums are the same with every library.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.core.errors import BadConfig
from ostinato.model.cpu import capabilities

WEIGHT_LEVELS = 127
_LEVELS = (127, 63)  # of activations, to either side of zero: eight bits, and seven
_ROWS = (1, 5, 64)
_OUTPUTS = 1024  # of a trial; more columns are computed like these


class Matrix(ABC):
    """An integer weight [outputs, inputs], laid out for one library."""

    @abstractmethod
    def sums(self, levels_ND: Tensor, most: int) -> Tensor:
        """[N, outputs] in fp32: the sums of products, rounded once if above 2^24."""

    @staticmethod
    @abstractmethod
    def room(rows: int, inputs: int, most: int) -> tuple[Tensor, int]:
        """A buffer for levels, with at least `rows` rows, and the offset that is added to each level."""


class FbgemmMatrix(Matrix):
    """FBGEMM: the fastest at few rows, and on CPUs without byte instructions. It takes levels as floats."""

    def __init__(self, weight_OI: Tensor) -> None:
        ones, nothing = torch.ones(len(weight_OI), dtype=torch.float64), torch.zeros(len(weight_OI), dtype=torch.long)
        make: Any = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateUsage]
        quantised: Tensor = make(weight_OI, ones, nothing, 0)
        before = torch.backends.quantized.engine
        if before not in ("fbgemm", "x86"):
            raise RuntimeError("torch's quantised engine is another one")
        self._packed: Any = torch.ops.quantized.linear_prepack(quantised, None)

    def sums(self, levels_ND: Tensor, most: int) -> Tensor:
        """See `Matrix`."""
        call: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        return call(levels_ND, 1.0, most + 1, self._packed)

    @staticmethod
    def room(rows: int, inputs: int, most: int) -> tuple[Tensor, int]:
        """See `Matrix`."""
        del most
        return torch.empty(rows, inputs, dtype=torch.float32), 0  # another thread may change torch's default meanwhile


class OnednnMatrix(Matrix):
    """oneDNN: the fastest with VNNI or AMX."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(weight_OI, None)
        self._ones = torch.ones(len(weight_OI), dtype=torch.float32)
        self._nothing = torch.zeros(len(weight_OI), dtype=torch.long)

    def sums(self, levels_ND: Tensor, most: int) -> Tensor:
        """See `Matrix`."""
        call: Any = torch.ops.onednn.qlinear_pointwise.default
        return call(
            levels_ND, 1.0, most + 1, self._packed, self._ones, self._nothing, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip

    @staticmethod
    def room(rows: int, inputs: int, most: int) -> tuple[Tensor, int]:
        """See `Matrix`. oneDNN caches code for each row count, so only few row counts are used."""
        padded = padded_rows(rows)
        levels = torch.empty(padded, inputs, dtype=torch.uint8)
        levels[rows:] = most + 1
        return levels, most + 1


LIBRARIES: dict[str, Callable[[Tensor], Matrix]] = {"fbgemm": FbgemmMatrix, "onednn": OnednnMatrix}


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """This process's integer arithmetic. `most`: the largest level of an activation; `library`: a name in `LIBRARIES`.

    Example: ``Integers(library="fbgemm", most=63)``
    """

    library: str
    most: int

    @property
    def name(self) -> str:
        """The name in a numerics contract. It leaves the library out, because exact sums have one value."""
        return f"int8 weights by output, activations of {2 * self.most + 1} levels by row, both rotated"

    def matrix(self, weight_OI: Tensor) -> Matrix:
        """Lay out an int8 weight [outputs, inputs]."""
        return LIBRARIES[self.library](weight_OI)


def find(widths: Iterable[int]) -> Integers:
    """The arithmetic that is exact for every number of inputs in `widths`: as many levels as possible, then the faster library.

    Raises BadConfig if there is none.
    """
    widths = sorted(set(widths))
    for most in _LEVELS:
        for library in _order():
            if all(is_exact(library, most, inputs) for inputs in widths):
                return Integers(library=library, most=most)
    raise BadConfig(
        f"engine.products = 'int8' cannot be used on this machine: neither {' nor '.join(LIBRARIES)} sums products of bytes "
        "exactly here; set engine.products = 'plain'"
    )


def has_instructions() -> bool:
    """Whether this CPU multiplies bytes into sums of 32 bits itself (VNNI, AMX, Arm's i8mm)."""
    flags = capabilities()
    return any(flags.get(name) for name in ("avx512_vnni", "avx_vnni", "avx2_vnni", "amx_int8", "i8mm"))


def _order() -> tuple[str, ...]:
    return ("onednn", "fbgemm") if has_instructions() else ("fbgemm", "onednn")


@torch.inference_mode()
def is_exact(library: str, most: int, inputs: int) -> bool:
    """Whether a library's sums equal exact integer sums, for random levels and for the largest ones."""
    weight = _drawn(_OUTPUTS, inputs, WEIGHT_LEVELS, seed=inputs)
    try:
        with warnings.catch_warnings():
            # torch announces once that it will change how such tensors are made
            warnings.simplefilter("ignore", UserWarning)
            matrix = LIBRARIES[library](weight.to(torch.int8))
        for rows in _ROWS:
            levels = _drawn(rows, inputs, most, seed=rows)
            room, zero = matrix.room(rows, inputs, most)
            room[:rows] = (levels + zero).to(room.dtype)
            want = (levels.double() @ weight.double().t()).float()
            if not torch.equal(matrix.sums(room, most)[:rows], want):
                return False
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # this torch was built without the library, or the library does not support this CPU
    return True


def _drawn(rows: int, columns: int, most: int, *, seed: int) -> Tensor:
    """Random integers up to `most`; one row is the largest everywhere, and another row, if there are three, the smallest."""
    drawn = torch.randint(-most, most + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    for row, sign in zip(range(0, rows, 2), (1, -1), strict=False):
        drawn[row] = sign * most
    return drawn


def padded_rows(rows: int) -> int:
    """The row count that is computed for `rows` rows.

    oneDNN keeps code and buffers for each row count it has seen: some 0.5 MB each, in all up to half a gigabyte.
    """
    step = 1 if rows <= 32 else 4 if rows <= 128 else 16 if rows <= 512 else 64
    return -(-rows // step) * step
