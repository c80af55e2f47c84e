"""The gateway's Prometheus metrics, in their own registry. Labels never hold keys, users or text; their number is bounded.

A tenant can read the metrics that carry its tenant label. Only an operator can read the rest, such as the prefix cache's hit rate,
because they would tell tenants about each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.core.records import Turn
from ostinato.core.seams import Engine
from ostinato.core.weights import Swap

_MAX_NAMES = 32  # distinct signal names shown per tenant; all others are counted as "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The gateway's counters, gauges and histograms.

    Args:
        engine: its `stats()` are read at each scrape as `ostinato_engine_<name>`; None for the gateway's metrics alone.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._requests = _Labelled("requests", "HTTP requests by route and status.", registry, "route", "status")
        self._inflight = Gauge("ostinato_inflight", "Model calls being served.", registry=registry)
        self._giving_way = Gauge(
            "ostinato_calls_giving_way", "Calls of worlds and of the gate that wait for people.", registry=registry
        )
        self._first = Histogram(
            "ostinato_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=registry
        )
        self._duration = Histogram("ostinato_turn_seconds", "Duration of a turn.", buckets=_SECONDS, registry=registry)
        self._prompt = _tenants("prompt_tokens", "Prompt tokens of stored turns.", registry)
        self._sampled = _tenants("sampled_tokens", "Sampled tokens of stored turns.", registry)
        self._turns = _tenants("turns", "Stored turns by arm and finish.", registry, "arm", "finish")
        self._consents = _tenants(
            "consent_turns", "Stored turns by consent level (privacy.train).", registry, "consent"
        )
        self._reused = _tenants("continued_turns", "Stored turns whose prompt continues another turn's ids.", registry)
        self._passed_on = _tenants(
            "auto_passed_on", "Calls passed on to another arm of Auto after a failure.", registry, "arm"
        )
        self._delivered = _tenants("delivered_turns", "Turns whose answer was delivered in full.", registry)
        self._refused = _tenants("refusals", "Calls refused by a quota or a limit, by reason.", registry, "reason")
        self._feedback = _tenants("feedback", "Feedback events by status.", registry, "status")
        self._named = _tenants("feedback_signals", "Accepted signals by name.", registry, "name")
        self._words = _tenants(
            "judge_words", "Labels by the judge, by the rules' label and its own.", registry, "rules", "judge"
        )
        self._no_words = _tenants(
            "judge_no_words", "Messages that the judge did not label, by reason.", registry, "reason"
        )
        self._judge_tokens = _tenants("judge_tokens", "Tokens that the judge reported.", registry, "of")
        self._judge_cost = _tenants("judge_cost", "Cost of the judge's tokens, in the configured currency.", registry)
        self._foreign = _Labelled("feedback_foreign", "Events about another tenant's turn.", registry, "sender")
        self._store_errors = Counter(
            "ostinato_store_errors", "Writes that the log refused or did not confirm in time.", registry=registry
        )
        self._pause = Histogram(
            "ostinato_swap_pause_seconds", "Pause of a hot swap.", ["slot"], buckets=_SECONDS, registry=registry
        )
        if engine is not None:
            registry.register(_EngineStats(engine))

    def answered(self, route: str, status: int) -> None:
        """Count a finished request. `route` is the path's pattern; status 499 stands for a client that disconnected."""
        self._requests.inc(route, str(status))

    def calls(self, change: int) -> None:
        """Count a model call that began (+1) or ended (-1)."""
        self._inflight.inc(change)

    def giving_way(self, calls: int) -> None:
        """Set how many calls of worlds and of the gate are waiting while people's calls go first."""
        self._giving_way.set(calls)

    def first_token(self, seconds: float) -> None:
        """Observe the wait for a response's first token."""
        self._first.observe(seconds)

    def turn(self, turn: Turn) -> None:
        """Count a turn that is in the log."""
        self._turns.inc(turn.tenant, turn.arm.value, turn.finish.value)
        self._consents.inc(turn.tenant, turn.consent.value)
        self._prompt.inc(turn.tenant, by=len(turn.prompt_ids))
        self._sampled.inc(turn.tenant, by=sum(span.tokens for span in turn.spans))
        self._duration.observe(max(0.0, turn.ended_at - turn.started_at))
        if turn.parent is not None:
            self._reused.inc(turn.tenant)

    def passed_on(self, tenant: str, arm: str) -> None:
        """Count a call that an arm of Auto could not answer, so that another arm is tried."""
        self._passed_on.inc(tenant, arm)

    def delivered(self, tenant: str, turns: int) -> None:
        """Count delivered turns."""
        self._delivered.inc(tenant, by=turns)

    def refused(self, tenant: str, reason: str) -> None:
        """Count a refused call: before it began, or because its output format cannot be enforced."""
        self._refused.inc(tenant, reason)

    def store_error(self) -> None:
        """Count a write that the log refused or did not confirm."""
        self._store_errors.inc()

    def event(self, tenant: str, name: str, status: str, *, foreign: bool) -> None:
        """Count an answered feedback event. `foreign`: it was about another tenant's turn, which its sender must not learn."""
        self._feedback.inc(tenant, status)
        if foreign:
            self._foreign.inc(tenant)
        names = self._names[tenant]
        if len(names) < _MAX_NAMES:
            names.add(name)
        self._named.inc(tenant, name if name in names else "other")

    def judged(self, tenant: str, rules: str, judge: str) -> None:
        """Count a message labelled by the judge; `rules` is the label by the rules."""
        self._words.inc(tenant, rules, judge)

    def not_judged(self, tenant: str, reason: str) -> None:
        """Count a message for which the judge gave no valid label."""
        self._no_words.inc(tenant, reason)

    def judge_used(self, tenant: str, prompt: float, answer: float, cost: float) -> None:
        """Add the tokens that the judge reported, and their cost (0.0 without prices)."""
        self._judge_tokens.inc(tenant, "prompt", by=prompt)
        self._judge_tokens.inc(tenant, "answer", by=answer)
        if cost:
            self._judge_cost.inc(tenant, by=cost)

    def swapped(self, swap: Swap) -> None:
        """Observe the pause of a hot swap of weights."""
        self._pause.labels(swap.slot).observe(swap.pause_s)

    def page(self, tenant: str | None = None) -> bytes:
        """All metrics in Prometheus' text format, or only one tenant's."""
        return generate_latest(self.registry if tenant is None else _OneTenant(self.registry, tenant))


class _Labelled:
    """A counter that caches its children, because looking up a child by labels costs more than counting."""

    def __init__(self, name: str, description: str, registry: CollectorRegistry, *labels: str) -> None:
        self._counter = Counter(f"ostinato_{name}", description, labels, registry=registry)
        self._children: dict[tuple[str, ...], Counter] = {}

    def inc(self, *labels: str, by: float = 1) -> None:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._counter.labels(*labels)
        child.inc(by)


def _tenants(name: str, description: str, registry: CollectorRegistry, *labels: str) -> _Labelled:
    return _Labelled(name, description, registry, "tenant", *labels)


class _OneTenant(CollectorRegistry):
    """A view of a registry with one tenant's samples only."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            own = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            if own:
                found = Metric(family.name, family.documentation, family.type)
                found.samples = own
                yield found


class _EngineStats(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._engine.stats().items():
            yield GaugeMetricFamily(f"ostinato_engine_{name}", f"The engine's {name}.", value=value)
