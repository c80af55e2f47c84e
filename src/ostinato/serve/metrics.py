"""The gateway's numbers for Prometheus, in a registry of their own. Labels never hold keys, users or text; their count is bounded."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ostinato.core.records import Signal, Turn
from ostinato.core.seams import Engine
from ostinato.core.weights import Swap

_MAX_NAMES = 64  # distinct signal names shown; the rest is counted as "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts what the gateway does. Implements `capture.Observer`.

    Args:
        engine: its `stats()` are read at each scrape as `ostinato_engine_<name>`; None for a gateway's counts alone.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._names: set[str] = set()
        self._requests = Counter(
            "ostinato_requests", "HTTP requests by route and status.", ["route", "status"], registry=registry
        )
        self._inflight = Gauge("ostinato_inflight", "Model calls being served.", registry=registry)
        self._first = Histogram(
            "ostinato_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=registry
        )
        self._duration = Histogram(
            "ostinato_turn_seconds", "First to last moment of a turn.", buckets=_SECONDS, registry=registry
        )
        self._prompt = Counter("ostinato_prompt_tokens", "Prompt tokens of stored turns.", registry=registry)
        self._sampled = Counter("ostinato_sampled_tokens", "Sampled tokens of stored turns.", registry=registry)
        self._turns = Counter("ostinato_turns", "Stored turns by arm and finish.", ["arm", "finish"], registry=registry)
        self._reused = Counter(
            "ostinato_continued_turns", "Stored turns whose prompt continues another turn's ids.", registry=registry
        )
        self._feedback = Counter("ostinato_feedback", "Accepted signals by name.", ["name"], registry=registry)
        self._store_errors = Counter("ostinato_store_errors", "Writes that the log refused.", registry=registry)
        self._pause = Histogram(
            "ostinato_swap_pause_seconds", "Pause of a hot swap.", ["slot"], buckets=_SECONDS, registry=registry
        )
        if engine is not None:
            registry.register(_EngineStats(engine))

    def answered(self, route: str, status: int) -> None:
        """A request ended. `route` is the path's pattern; status 499 stands for a client that left."""
        self._requests.labels(route, str(status)).inc()

    def calls(self, change: int) -> None:
        """A model call began (+1) or ended (-1)."""
        self._inflight.inc(change)

    def first_token(self, seconds: float) -> None:
        """The wait for a response's first token."""
        self._first.observe(seconds)

    def turn(self, turn: Turn) -> None:
        """A turn is in the log."""
        self._turns.labels(str(turn.arm), str(turn.finish)).inc()
        self._prompt.inc(len(turn.prompt_ids))
        self._sampled.inc(len(turn.sampled_ids))
        self._duration.observe(max(0.0, turn.ended_at - turn.started_at))
        if turn.parent is not None:
            self._reused.inc()

    def store_error(self) -> None:
        """The log refused a write."""
        self._store_errors.inc()

    def feedback(self, signals: Iterable[Signal]) -> None:
        """Signals were accepted."""
        for signal in signals:
            if len(self._names) < _MAX_NAMES:
                self._names.add(signal.name)
            self._feedback.labels(signal.name if signal.name in self._names else "other").inc()

    def swapped(self, swap: Swap) -> None:
        """A slot's weights were exchanged."""
        self._pause.labels(swap.slot).observe(swap.pause_s)

    def page(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineStats(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._engine.stats().items():
            yield GaugeMetricFamily(f"ostinato_engine_{name}", f"The engine's {name}.", value=value)
