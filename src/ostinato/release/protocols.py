"""The interfaces that the release controller needs from the other packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ostinato.core.records import PolicyVersion
from ostinato.core.seams import Evals


class Refs(Protocol):
    """The part of `core.seams.WeightStore` that a controller may touch."""

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare-and-swap; raises Conflict."""
        ...

    async def read_ref(self, ref: str) -> str | None:
        """The manifest hash a ref points to."""
        ...


class Versions(Protocol):
    """Maps refs to policy versions, and policy versions to manifests."""

    async def resolve(self, ref: str) -> tuple[PolicyVersion, str] | None:
        """The version a ref points to, with its manifest hash; None when the ref does not exist."""
        ...

    async def manifest_of(self, policy: PolicyVersion) -> str:
        """The manifest hash of a published version; raises NotFound."""
        ...


class GateJudge(Evals, Protocol):
    """Evaluation whose scores can be kept in the ledger and restored from it."""

    def evidence(self) -> Mapping[str, Any]:
        """The draws that are not decided on yet, JSON-ready."""
        ...

    def restore(self, evidence: Mapping[str, Any]) -> None:
        """The inverse of `evidence`."""
        ...
