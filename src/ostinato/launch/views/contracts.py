"""Numerics contracts in words."""

from __future__ import annotations

from ostinato.core.numerics import Contract, differences


def parts(contract: Contract) -> str:
    """A contract in one line: its id, then its fields."""
    return (
        f"{contract.id} = {contract.mode}, {contract.dtype}, {contract.threads} threads, rows {contract.rows}, block {contract.block}, "
        f"quantisation {contract.quantisation}, torch {contract.torch}, {contract.blas}, {contract.kernels}, {contract.isa}"
    )


def apart(one: Contract, other: Contract) -> str:
    """How two contracts differ. Example: "dtype float32, not bfloat16"."""
    names = differences(one, other)
    return (
        "; ".join(f"{name} {getattr(other, name)}, not {getattr(one, name)}" for name in names)
        or "fast mode promises nothing"
    )
