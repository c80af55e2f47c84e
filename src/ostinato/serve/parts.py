"""The dependencies that all handlers of the gateway share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostinato.core.seams import Adaptation, Clock, Engine, Log, Renderer, StyleDealer
from ostinato.serve.arms import Arms
from ostinato.serve.auth import Keyring, UserKeys
from ostinato.serve.auto_deals import Deals
from ostinato.serve.calls.compaction import BlockSigner
from ostinato.serve.config import PrivacyConfig, ServeConfig
from ostinato.serve.fair_thread import FairThread
from ostinato.serve.metrics import Metrics
from ostinato.serve.priority import PeopleFirst
from ostinato.serve.quotas import Quotas
from ostinato.serve.scrub import Scrubbing
from ostinato.serve.writes import Writes

if TYPE_CHECKING:  # reader would be a circular import; tracing needs a library that few gateways use
    from ostinato.serve.reader import RequestReader
    from ostinato.serve.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The gateway's shared parts.

    `model` is the name that clients send. `clock` returns Unix seconds. `thread` runs work whose cost grows with the request. `blocks`
    signs compaction summaries that clients keep. `room` returns the free bytes on the log's disk, if known. `deals` draws Auto's arms (None
    without arms). `tracing` exports spans (None without a collector). `adaptation` and `styles` personalise answers (None: not configured).
    `scrubbing` masks or detects secrets (None: off). `trained` are the tenants whose branches are trained. `reader` parses long requests in
    another process (None: they are parsed here).

    Example: ``ServerInfo(parts)``
    """

    engine: Engine
    renderer: Renderer
    log: Log
    config: ServeConfig
    clock: Clock
    model: str
    keys: Keyring
    blocks: BlockSigner
    privacy: PrivacyConfig
    room: Callable[[], int] | None = None
    deals: Deals | None = None
    adaptation: Adaptation | None = None
    styles: StyleDealer | None = None
    scrubbing: Scrubbing | None = None
    trained: Collection[str] = ()
    reader: RequestReader | None = None
    thread: FairThread = field(init=False, default_factory=FairThread)
    users: UserKeys = field(init=False)
    metrics: Metrics = field(init=False)
    quotas: Quotas = field(init=False)
    writes: Writes = field(init=False)
    arms: Arms = field(init=False)
    people: PeopleFirst = field(init=False)
    tracing: Tracing | None = field(init=False)

    def __post_init__(self) -> None:
        config, clock, metrics = self.config, self.clock, Metrics(self.engine)
        made = {
            "users": UserKeys(config.user_keys),
            "metrics": metrics,
            "quotas": Quotas(config, self.keys.tenants, clock, metrics.refused),
            "writes": Writes(clock, slow_s=config.store_timeout_s),
            "arms": Arms(
                control=config.control_share,
                learner=config.learner_share,
                salt=config.arm_salt,
                branches=config.branches,
                trained=self.trained,
                holdout=config.branch_holdout,
            ),
            "people": PeopleFirst(config.first_token_s, config.tokens_per_s, config.give_way_s, metrics.giving_way),
            "tracing": _tracing(config, clock),
        }
        for name, part in made.items():
            object.__setattr__(self, name, part)


def _tracing(config: ServeConfig, clock: Clock) -> Tracing | None:
    """The exporter of spans; None if no collector is configured."""
    if not config.otlp.endpoint:
        return None
    from ostinato.serve.tracing import Tracing

    return Tracing(config.otlp, clock)
