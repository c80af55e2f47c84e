"""Numerics contracts in words."""

from __future__ import annotations

from ostinato.core.numerics import Contract, differences


def parts(contract: Contract, stamped: str = "") -> str:
    """A contract in one line: the id under which it is in the log if that is given, else its own, then its fields."""
    library = (
        [f"torch {contract.torch}", contract.isa]
        if contract.torch
        else ["no library, so all CPUs give the same bits in this order"]
    )
    order = [f"products in {contract.order}"] if contract.order else []
    told = [contract.mode, contract.dtype, *order, f"{contract.threads} threads", f"block {contract.block}"]
    told += [f"quantisation {contract.quantisation}", contract.blas, contract.kernels, *library]
    return f"{stamped or contract.id} = {', '.join(told)}"


def apart(one: Contract, other: Contract) -> str:
    """How two contracts differ. Example: "dtype float32, not bfloat16"."""
    names = differences(one, other)
    return (
        "; ".join(f"{name} {getattr(other, name)}, not {getattr(one, name)}" for name in names)
        or "fast mode promises nothing"
    )
