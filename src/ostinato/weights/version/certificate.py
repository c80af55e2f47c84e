"""Certificate of an erasure (machine unlearning by exact replay): what was trained again without some turns, from where, and what came out.

It names no person. The batches behind the weights, from the first step on, stand beside it, a line of JSON each, [step, [turn ids]]: the
certificate has their Merkle root, so that somebody who knows the ids of a person's turns can check that none of them is among what the
weights learned from. A second machine of the same type with the log and the checkpoint can check the root of the weights by a replay.
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
"""What `ErasureCertificate.checkpoint` begins with for a branch that began anew, followed by the version."""

ReplayedRow = tuple[int, tuple[str, ...]]
"""A step, and the ids of its turns."""


class ErasureCertificate(BaseModel):
    """What a replay did. `checkpoint`: the name, with its hash, of the state it began from; ``base``: the model as it came;
    a branch begins at a version (`SHARED`).

    `rows`: the Merkle root of the batches behind the weights. `weights`: number and root of the version that came out. `refused`: steps
    that taught nothing, or from whose turns the policy had gone too far. `ess_turns`: the smallest effective share of a step's turns,
    None if no step was taken. `verdict`: what the gate and people said of the version; "" until they have.
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
        """The canonical form that is signed."""
        return json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True, separators=(",", ":")).encode()

    def signed(self, signer: Signer | None) -> ErasureCertificate:
        """The same with a signature; without a signer as it is."""
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
    """The Merkle root of replayed batches: each row's JSON -> leaf; leaves in order -> root."""
    total = blake3(b"ostinato replayed batches 1\n")
    for step, turns in rows:
        total.update(blake3(json.dumps([step, list(turns)], separators=(",", ":")).encode()).digest())
    return total.hexdigest()


def read_rows(lines: Iterable[str]) -> list[ReplayedRow]:
    """Parse replayed batches, a line each. Raises Corrupt."""
    try:
        found = [json.loads(line) for line in lines if line.strip()]
        return [(int(step), tuple(str(turn) for turn in turns)) for step, turns in found]
    except (ValueError, TypeError) as error:
        raise Corrupt(f"these are no replayed batches, lines of [step, [turn ids]]: {error}") from error


def check_erasure(
    certificate: ErasureCertificate,
    rows: Sequence[ReplayedRow],
    turns: Collection[str],
    trusted: Sequence[str],
) -> None:
    """Check that a certificate is signed by one of the `trusted` keys (none: by anybody), is about these rows, and that none of the `turns`
    is in them; the id of a call stands for all of its turns. Raises Corrupt.
    """
    signature = certificate.signature
    keys = trusted or ([signature.key] if signature is not None else [])
    check_certificate(certificate.body(), signature, keys)
    if rows_root(rows) != certificate.rows:
        raise Corrupt("the batches beside the certificate are not those that it is about: their Merkle root is another")
    known = set(turns)
    for step, ids in rows:
        if found := known.intersection([*ids, *(id.rpartition(":")[0] for id in ids)]):
            raise Corrupt(f"step {step} was trained on turn {min(found)}")
