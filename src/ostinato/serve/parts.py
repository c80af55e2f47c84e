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

if TYPE_CHECKING:  # the first imports what is read, which imports this; the second a library that few gateways need
    from ostinato.serve.reader import RequestReader
    from ostinato.serve.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The gateway's shared parts.

    `model` is the name that clients send; `clock` gives Unix seconds; `thread` runs what grows with a request; `blocks` signs summaries
    that clients keep; `room` tells the free bytes on the log's disk, if that is known; `deals` is Auto, or None without arms; `tracing`
    makes spans, or is None without a collector; `adaptation` leans people's answers, or is None if nobody's do; `styles` likewise;
    `scrubbing` masks secrets or finds them, or is None if they are not looked for; `trained`: tenants whose branches are trained;
    `reader` reads long requests in another process, or is None if they are read here.

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
    """What sends spans to a collector; None if none is set."""
    if not config.otlp.endpoint:
        return None
    from ostinato.serve.tracing import Tracing

    return Tracing(config.otlp, clock)
