"""The numerics contract: the arithmetic behind a log-probability, as a record whose id is stamped on every turn.

Two processes with the same contract in exact mode compute the same bits for the same tokens under the same weights. Different
contracts do not say by how much results differ, only that nothing is promised.

Also describes contracts, and their differences, in words.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from ostinato.core.errors import BadConfig, Corrupt

MODES = ("exact", "fast")
_LONGEST = 4096  # most characters of a contract's JSON; a real one has about 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Everything that determines the bits of a forward pass, apart from weights and tokens.

    `order` names the definition of our own arithmetic and its version; it is empty if torch's kernels compute. A pass that uses nothing
    else has the same bits on every CPU. Then `torch`, `blas` and `isa` (the library, its settings and the vector instructions by which it
    chooses kernels) are empty, except that `blas` has a hash of a few results. `block` is the number of tokens of a KV block;
    `kernels` names our own kernels and the model code around them.

    Example::

        Contract(mode="exact", order="blocks 1", torch="", blas="bits 1f0c22d9", isa="", threads=1, block=32, dtype="bfloat16",
                 quantisation="none", kernels="ostinato 3 transformers 5.23.0")
    """

    mode: Literal["exact", "fast"]
    torch: str
    blas: str
    isa: str
    threads: int
    block: int
    dtype: str
    quantisation: str
    kernels: str
    order: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadConfig(f"numerics mode {self.mode!r}: choose 'exact' or 'fast'")
        for name in ("threads", "block"):
            if getattr(self, name) < 1:
                raise BadConfig(f"a numerics contract needs {name} >= 1, not {getattr(self, name)}")

    @property
    def id(self) -> str:
        """The first 16 hex digits of the SHA-256 of `to_json()`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return canonical JSON: sorted keys, no spaces, ASCII. Equal contracts give equal text. An empty `order` is left out."""
        values = asdict(self)
        if not self.order:
            del values["order"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Parse the text of `to_json`. Raises Corrupt for anything that is not exactly a contract's JSON."""
        try:
            values = json.loads(text) if len(text) <= _LONGEST else None
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"a numerics contract is not JSON ({error}); restore the log from a copy") from error
        if not isinstance(values, dict):
            raise Corrupt("a numerics contract must be a JSON object of at most 4096 characters")
        values = cast("dict[str, Any]", {"order": ""} | values)
        values.pop("rows", None)  # older contracts state a row rule; if it was not 1, they name other kernels
        names = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if odd := sorted(names.keys() ^ values.keys()):
            raise Corrupt(
                f"a numerics contract has a missing or unknown field {odd[0]!r}; it was written by another version"
            )
        for name, kind in names.items():
            if type(values[name]) is not kind:
                raise Corrupt(f"a numerics contract's {name} is {values[name]!r}, not {kind.__name__}")
        try:
            return cls(**values)
        except BadConfig as error:
            raise Corrupt(f"a stored numerics contract cannot be: {error}") from error


def differences(one: Contract, other: Contract) -> tuple[str, ...]:
    """Return the names of the fields in which two contracts differ, in the record's order."""
    return tuple(field.name for field in fields(Contract) if getattr(one, field.name) != getattr(other, field.name))


def same_arithmetic(one: Contract, other: Contract) -> bool:
    """Return True if both contracts promise the same bits: both exact, and equal in all but the KV block size.

    The exact kernels sum in the order of absolute positions, so their result does not depend on how the KV cache is cut
    into blocks. If a library computes, the thread count must be equal, because the library chooses kernels by it. Fast mode promises
    nothing, even between equal contracts.

    Example: ``same_arithmetic(a, replace(a, block=64))`` is True for an exact `a`, and False for a fast one.
    """
    return one.mode == other.mode == "exact" and set(differences(one, other)) <= {"block"}


# ---------------------------------------------------------------- descriptions for people


def contract_in_words(contract: Contract, stamped: str = "") -> str:
    """Describe a contract in one line: the id under which the log has it, if given, else its own, then its fields."""
    library = (
        [f"torch {contract.torch}", contract.isa]
        if contract.torch
        else ["no library, so all CPUs give the same bits in this order"]
    )
    order = [f"products in {contract.order}"] if contract.order else []
    told = [contract.mode, contract.dtype, *order, f"{contract.threads} threads", f"block {contract.block}"]
    told += [f"quantisation {contract.quantisation}", contract.blas, contract.kernels, *library]
    return f"{stamped or contract.id} = {', '.join(told)}"


def differences_in_words(one: Contract, other: Contract) -> str:
    """Describe how two contracts differ. Example: "dtype float32, not bfloat16"."""
    names = differences(one, other)
    return (
        "; ".join(f"{name} {getattr(other, name)}, not {getattr(one, name)}" for name in names)
        or "fast mode promises nothing"
    )
