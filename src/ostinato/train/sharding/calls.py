"""Messages from the first rank to the others, as lines of JSON, parsed into types at the boundary of a rank's process."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, SteeringBasis
from ostinato.core.samples import Sample
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A rank's task at its start: the model to train, and the port of this machine at which the ranks meet.

    `backend`: that of all ranks.

    `line`: the file descriptor of its socket to the first rank, over which its published part is requested, as `settings` say; None: it
    publishes nothing.

    Example: ``RankTask(model=path, config=config, contract=None, rank=1, port=41235)``
    """

    model: Path
    config: TrainConfig
    contract: Contract | None
    rank: int
    port: int
    backend: ComputeBackend = OWN
    line: int | None = None
    settings: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """A method of `PolicyTrainer` that all ranks call now. It contains no weights: the first rank sends them when they are needed.

    `bases`: the argument of `PolicyTrainer.set_bases`, which is called before the step. `held`: the step is kept near references,
    `release` and `anchor`. `number`: the policy that training goes back to. The rest: a checkpoint's directory, cursor, and the number of
    checkpoints kept.

    Example: ``RankCall(method="save", directory=Path("checkpoints"), cursor=812, keep=2)``
    """

    method: Literal["step", "go_back", "hold_nothing", "skip_step", "weights", "present", "save", "resume"]
    samples: tuple[Sample, ...] = ()
    bases: tuple[SteeringBasis, ...] = ()
    held: bool = False
    release: PolicyVersion | None = None
    anchor: PolicyVersion | None = None
    number: int | None = None
    directory: Path = Path()
    cursor: int = 0
    keep: int = 1


_CALL: TypeAdapter[RankCall] = TypeAdapter(RankCall)
_TASK: TypeAdapter[RankTask] = TypeAdapter(RankTask)


def task_line(task: RankTask) -> bytes:
    """Encode a task as one line of JSON."""
    return _line(_TASK.dump_python(task, mode="json"))


def read_task(line: bytes) -> RankTask:
    """Decode a line from `task_line`. Raises ValueError."""
    return _TASK.validate_python(json.loads(line))


def call_line(call: RankCall) -> bytes:
    """Encode a call as one line of JSON. Numbers that are not finite are kept, because the step must refuse them."""
    return _line(_CALL.dump_python(call))


def read_call(line: bytes) -> RankCall:
    """Decode a line from `call_line`. Raises ValueError."""
    found = json.loads(line)
    for sample in found["samples"]:
        for name in ("routes", "nucleus"):
            sample["turn"][name] = base64.b64decode(sample["turn"][name])
    for basis in found["bases"]:
        for name in ("tokens", "directions"):
            basis[name] = base64.b64decode(basis[name])
    return _CALL.validate_python(found)


def _line(value: Any) -> bytes:
    return json.dumps(value, default=_plain, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
