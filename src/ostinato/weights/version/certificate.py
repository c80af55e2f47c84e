"""Certificates of erasures (machine unlearning by exact replay): which steps were trained again without some turns, from which checkpoint,
and which weights resulted.

A certificate names no person. A file beside it lists all batches behind the weights, from the first step on, one JSON line
[step, [turn ids]] each. The certificate holds their Merkle root, so that anyone who knows the ids of a person's turns can check that the
weights were not trained on any of them. With the log and the checkpoint, a second machine of the same type can verify the root of the
weights by a replay.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from ostinato.core.errors import Corrupt
from ostinato.weights.version.manifest import Signature
from ostinato.weights.version.signing import Signer, check_certificate

FORMAT: Final = "ostinato-erasure/1"
DEFINITION: Final = (
    "From the named checkpoint on, the recorded batches were trained on again in their order without the erased turns: credits folded "
    "anew from the log without any row about these turns, references replaced by the replay's own versions, nothing promised about "
    "recorded log-probabilities. The weights have the bits that training on that log gives. They are not those of a world in which "
    "the erased people never came: the others' turns were sampled by policies that had seen them, and which turns each step took "
    "stays as it was."
)

BRANCH_DEFINITION: Final = (
    "A tenant's branch began anew: its weights and its optimizer's moments are those of the named version of the shared run and of the "
    "shared trainer's newest checkpoint, which nobody who was erased is in, and nothing that the branch itself had learned, from anybody, "
    "is in them. Its checkpoints of before are deleted, and its versions as soon as nothing names them. What is behind the shared version "
    "is said by the shared run's own certificates and log. Turns that the branch learns from afterwards may have been sampled by versions "
    "that knew the erased people."
)
SHARED: Final = "shared version "
"""Prefix of `ErasureCertificate.checkpoint` for a branch that began anew, followed by the version."""

ReplayedRow = tuple[int, tuple[str, ...]]
"""A step, and the ids of its turns."""


class ErasureCertificate(BaseModel):
    """The record of a replay.

    `checkpoint`: the name and hash of the state that the replay began from; ``base``: the base model; for a branch that began anew, a
    version (`SHARED`). `rows`: the Merkle root of the batches behind the weights. `weights`: number and root of the resulting version.
    `refused`: the number of steps that were skipped because they had nothing to train on, or because the policy had drifted too far from
    their turns. `ess_turns`: the smallest effective sample size of a step as a share of its turns, None if no step was taken. `verdict`:
    the decision of the release gate and of people on the version, "" until there is one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["ostinato-erasure/1"] = FORMAT
    definition: str = DEFINITION
    id: str
    code: str
    contract: str
    checkpoint: str
    first: int
    last: int
    steps: int
    refused: int
    erased_turns: int
    ess_turns: float | None
    rows: str
    weights: tuple[int, str]
    verdict: str
    at: float
    signature: Signature | None = None

    def body(self) -> bytes:
        """Return the canonical form, which is signed."""
        return json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True, separators=(",", ":")).encode()

    def signed(self, signer: Signer | None) -> ErasureCertificate:
        """Return the certificate with a signature, or unchanged without a signer."""
        if signer is None:
            return self
        return self.model_copy(update={"signature": signer.sign_certificate(self.body())})


def read_certificate(data: bytes) -> ErasureCertificate:
    """Parse a certificate. Raises Corrupt."""
    try:
        return ErasureCertificate.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Corrupt(f"this is no certificate of an erasure: {where}: {first['msg']}") from error


def rows_root(rows: Iterable[ReplayedRow]) -> str:
    """Return the Merkle root of replayed batches: each row's JSON -> leaf; leaves in order -> root."""
    total = blake3(b"ostinato replayed batches 1\n")
    for step, turns in rows:
        total.update(blake3(json.dumps([step, list(turns)], separators=(",", ":")).encode()).digest())
    return total.hexdigest()


def read_rows(lines: Iterable[str]) -> list[ReplayedRow]:
    """Parse replayed batches, one per line. Raises Corrupt."""
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        return [(int(step), tuple(str(turn) for turn in turns)) for step, turns in rows]
    except (ValueError, TypeError) as error:
        raise Corrupt(f"these are no replayed batches, lines of [step, [turn ids]]: {error}") from error


def check_erasure(
    certificate: ErasureCertificate,
    rows: Sequence[ReplayedRow],
    turns: Collection[str],
    trusted: Sequence[str],
) -> None:
    """Raise Corrupt unless a certificate is signed by one of the `trusted` keys (none: by anybody), is about these rows, and none of the
    `turns` is in them. The id of a call stands for all its turns.
    """
    signature = certificate.signature
    keys = trusted or ([signature.key] if signature is not None else [])
    check_certificate(certificate.body(), signature, keys)
    if rows_root(rows) != certificate.rows:
        raise Corrupt("the batches beside the certificate are not the certified ones: their Merkle root differs")
    known = set(turns)
    for step, ids in rows:
        if found := known.intersection([*ids, *(id.rpartition(":")[0] for id in ids)]):
            raise Corrupt(f"step {step} was trained on turn {min(found)}")
