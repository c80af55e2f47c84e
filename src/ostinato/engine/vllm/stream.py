"""An open request at one vLLM server, and what may happen to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ostinato.core.errors import OstinatoError
from ostinato.core.records import Finish, PolicyVersion
from ostinato.engine.vllm.replica import Replica
from ostinato.engine.vllm.wire import WireChoice

Event = tuple[WireChoice, PolicyVersion] | Finish | OstinatoError
"""Tokens with the version that their server held when they arrived, or how a request ends."""


@dataclass(eq=False, slots=True)
class Stream:
    """An open request at one replica. `samples`: how many have not ended; `said`: output has arrived; `lent`: the replica was on loan."""

    slot: str
    samples: int
    replica: Replica
    policy: PolicyVersion
    lent: bool
    said: bool = False
    pump: asyncio.Task[None] | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])
