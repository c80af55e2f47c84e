"""The dependencies that all handlers of the gateway share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.core.seams import Clock, Engine, Log, Renderer
from ostinato.serve.arms import Arms
from ostinato.serve.auth import Keyring
from ostinato.serve.auto_deals import Deals
from ostinato.serve.config import PrivacyConfig, ServeConfig
from ostinato.serve.fair_thread import FairThread
from ostinato.serve.metrics import Metrics
from ostinato.serve.priority import PeopleFirst
from ostinato.serve.quotas import Quotas
from ostinato.serve.scrub import Scrubbing
from ostinato.serve.tracing import Tracing
from ostinato.serve.writes import Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The gateway's shared parts.

    `model` is the name that clients send; `clock` gives Unix seconds; `thread` runs what grows with a request; `room` tells the free
    bytes on the log's disk, if that is known; `deals` is Auto, or None without arms; `tracing` makes spans, or is None without a
    collector; `scrubbing` masks secrets or finds them, or is None if they are not looked for.

    Example: ``Calls(parts, stored=intake.turn)``
    """

    engine: Engine
    renderer: Renderer
    log: Log
    config: ServeConfig
    clock: Clock
    model: str
    keys: Keyring
    quotas: Quotas
    metrics: Metrics
    writes: Writes
    arms: Arms
    people: PeopleFirst
    thread: FairThread
    privacy: PrivacyConfig
    room: Callable[[], int] | None = None
    deals: Deals | None = None
    tracing: Tracing | None = None
    scrubbing: Scrubbing | None = None
