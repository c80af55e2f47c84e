"""Configuration of metrics: [[release.metrics]], the built-in ones, and how the log's turns and signals are joined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, field_validator, model_validator

from ostinato.release.metrics.facts import MEANINGS, USER_FACTS, parse_term

# ---------------------------------------------------------------- built-in metrics


SIGNALS = (
    "accepted",
    "rejected",
    "ignored",
    "undone",
    "still_there",
    "survived",
    "followed_up",
    "dissatisfied",
    "stopped",
    "tool_error",
    "tests_passed",
)
"""Names of signals that a metric may use without listing them in `release.signals`."""

_ACCEPTED: Mapping[str, Any] = {
    "direction": "higher",
    "numerator": ("accepted > 0",),
    "unless": ("rejected", "ignored", "undone", "stopped", "turn.stopped"),
}

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "acceptance": {"role": "goal", **_ACCEPTED},
    "accepted_of_all": {**_ACCEPTED, "denominator": ("turn",), "tolerance": 0.02},
    "harmed_users": {**_ACCEPTED, "tail": 0.05},
    "edit_survival": {
        "direction": "higher",
        "numerator": ("survived",),
        "unless": ("undone",),
        "tolerance": 0.02,
    },
    "dissatisfied_follow_up": {
        "direction": "lower",
        "numerator": ("dissatisfied > 0",),
        "denominator": ("turn",),
        "tolerance": 0.02,
    },
    "stopped": {
        "direction": "lower",
        "numerator": ("turn.stopped", "stopped > 0"),
        "tolerance": 0.02,
    },
    "failed": {"direction": "lower", "numerator": ("turn.failed",), "tolerance": 0.01},
    "tool_error": {
        "direction": "lower",
        "numerator": ("turn.broken_tool_calls > 0", "tool_error > 0"),
        "tolerance": 0.01,
    },
    "latency_p50": {"direction": "lower", "numerator": ("turn.latency",), "quantile": 0.5, "tolerance": 0.05},
    "latency_p99": {"direction": "lower", "numerator": ("turn.latency",), "quantile": 0.99, "tolerance": 0.01},
    "suggestions_shown": {"direction": "higher", "numerator": ("turn.suggests",), "tolerance": 0.05},
    "feedback_coverage": {"direction": "higher", "numerator": ("turn.heard",), "tolerance": 0.05},
    "returned": {"direction": "higher", "numerator": ("user.returned",), "tolerance": 0.02},
    "turns_per_user": {"direction": "higher", "numerator": ("user.log_turns",), "most": 6.0, "tolerance": 0.1},
    "sessions_per_user": {"direction": "higher", "numerator": ("user.sessions",), "most": 10.0, "tolerance": 0.1},
    "days_to_return": {"direction": "lower", "numerator": ("user.days_away",), "most": 7.0, "tolerance": 0.1},
}
"""The fields of each built-in metric's declaration, by the metric's name."""

DEFAULT_GOAL = "acceptance"
"""The goal if none is declared."""

DEFAULT_GUARDRAILS = (
    "failed",
    "stopped",
    "dissatisfied_follow_up",
    "latency_p99",
    "feedback_coverage",
    "accepted_of_all",
    "returned",
    "harmed_users",
)
"""Guardrails of every trial, unless a declaration of that name says otherwise. `accepted_of_all` is there because acceptance covers only
turns with feedback: a version that silences dissatisfied users raises it, but cannot raise the accepted share of all turns. `returned` is
there because all of these are ratios over turns, in which people who leave soon hardly count, and `harmed_users` because an average hides
a minority."""


RESERVED = "turn"
"""The reserved prefix of facts' names; no signal's name may have it."""


class MetricConfig(BaseModel, frozen=True, extra="forbid"):
    """A ratio over turns, or over users' days, that a trial wants to raise or lower, or must not make worse.

    Fields that a declaration leaves out are taken from the built-in metric of its name, if there is one.
    """

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]{0,63}$",
        description=f"Its name in the ledger and on the page. Built in: {', '.join(BUILT_IN)}.",
    )
    role: Literal["goal", "guardrail", "diagnostic"] = Field(
        default="guardrail",
        description="'goal': a release must not lose it, and is better if it gains it. 'guardrail': harm to it stops a trial, whatever "
        "the goals do. 'diagnostic': it is shown but decides nothing.",
    )
    direction: Literal["higher", "lower"] = Field(default="higher", description="Which direction is better.")
    numerator: tuple[str, ...] = Field(
        default=(),
        description="Terms: signals by name, or facts of the turn (`turn.latency`), with or without a threshold ('stars >= 4'). Of a "
        "turn's known terms, the largest counts. Alternatively, facts of a user's day (`user.returned`) alone.",
    )
    unless: tuple[str, ...] = Field(
        default=(), description="Terms. If one of them is above 0, the turn counts as 0, whatever the numerator says."
    )
    denominator: tuple[str, ...] = Field(
        default=(),
        description="Terms by which the numerator is divided. An unknown numerator then counts as 0. Empty: the number of turns with a "
        "known numerator term or with one of `unless`.",
    )
    most: float = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Largest numerator per 1 of the denominator. Numerators are clipped to between 0 and this.",
    )
    quantile: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="If set, the metric is the share of turns whose value exceeds this quantile of the values before the trial. 0.99 "
        "gives a p99.",
    )
    tail: float | None = Field(
        default=None,
        ge=0.01,
        le=0.5,
        description="If set, the metric is the share of users who are as badly off, beyond what was expected of each, as this share of "
        "the comparator's users. 0.05 stands for the worst twentieth.",
    )
    tolerance: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Tolerated change for the worse, in the metric's own units. Default: `release.trial.margin` for a goal that is a "
        "share, 0 for a guardrail. A goal with `most` must set it.",
    )
    unit: Literal["user"] = Field(
        default="user",
        description="The independent unit of the statistics: users. Each user counts once, however many turns they make.",
    )

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        """Fill in the fields of the built-in metric of that name."""
        if not isinstance(given, Mapping):
            return given
        declared = cast("Mapping[str, Any]", given)
        name = declared.get("name")
        if name in BUILT_IN:
            return {**BUILT_IN[cast("str", name)], **declared}
        if isinstance(name, str) and not declared.get("numerator"):
            hint = _nearest(name, BUILT_IN)
            raise ValueError(f"there is no built-in metric {name!r}; {hint}; one of your own needs a numerator")
        return declared

    @field_validator("numerator", "unless", "denominator")
    @classmethod
    def _terms(cls, terms: tuple[str, ...]) -> tuple[str, ...]:
        for text in terms:
            name = parse_term(text).name
            if (name == RESERVED or name.startswith(f"{RESERVED}.")) and name not in MEANINGS:
                raise ValueError(f"there is no fact {name!r} of a turn; {_nearest(name, MEANINGS)}")
        return terms

    @model_validator(mode="after")
    def _whole(self) -> MetricConfig:
        if not self.numerator:
            raise ValueError("a metric needs a numerator: name a signal or a fact")
        of_days = [name for name in self.names() if name in USER_FACTS]
        if of_days and (self.quantile is not None or len(of_days) < len(self.names())):
            raise ValueError(
                f"{of_days[0]} is a fact of a user's day: name no signals or facts of turns beside it, and no quantile"
            )
        if self.quantile is not None and (self.denominator or self.most != 1.0):
            raise ValueError("with a quantile each turn counts as one: leave out denominator and most")
        if self.tail is not None and (of_days or self.role == "goal" or self.quantile is not None or self.most != 1.0):
            raise ValueError(
                "with a tail users are counted: no goal, no facts of users' days, no quantile and no `most`"
            )
        if self.role == "goal" and self.most != 1.0 and self.tolerance is None:
            raise ValueError(f"a goal of values up to {self.most:g} needs a tolerance, in its own units")
        return self

    @property
    def tolerated(self) -> float | None:
        """The tolerance, which a guardrail always has."""
        return 0.0 if self.tolerance is None and self.role != "goal" else self.tolerance

    def names(self) -> dict[str, str]:
        """Return the signals and facts that the metric reads, each with the field that names it first."""
        fields = {"numerator": self.numerator, "unless": self.unless, "denominator": self.denominator}
        pairs = [(parse_term(text).name, field) for field, texts in fields.items() for text in texts]
        return dict(reversed(pairs))


def completed(declared: Sequence[MetricConfig], signals: Collection[str]) -> tuple[MetricConfig, ...]:
    """Return the declared metrics, after the default goal if none is declared, and before the guardrails of every trial.

    Raises:
        ValueError: two have the same name, none is a goal, or one names a signal that is neither built in nor in `signals`.
    """
    metrics = {metric.name: metric for metric in declared}
    names = [metric.name for metric in declared]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two metrics are named {twice!r}; give one of them another name")
    known = [*SIGNALS, *signals]
    for metric in metrics.values():
        for name, field in metric.names().items():
            if name not in MEANINGS and name not in known:
                where, hint = f"metric {metric.name!r}, {field}", _nearest(name, [*known, *USER_FACTS])
                raise ValueError(
                    f"{where}: no signal {name!r} is known; {hint}; list signals of your own in release.signals"
                )
    if DEFAULT_GOAL not in metrics and not any(metric.role == "goal" for metric in metrics.values()):
        metrics = {DEFAULT_GOAL: MetricConfig(name=DEFAULT_GOAL)} | metrics
    if not any(metric.role == "goal" for metric in metrics.values()):
        raise ValueError("no metric has the role 'goal', so no candidate could ever go live; give it to one")
    return (*metrics.values(), *(MetricConfig(name=name) for name in DEFAULT_GUARDRAILS if name not in metrics))


def _nearest(name: str, known: Iterable[str]) -> str:
    there = list(known)
    close = get_close_matches(name, there, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(there)}"


DEFAULT_METRICS = completed((), ())
"""The metrics that every trial reads if none are declared."""


# ---------------------------------------------------------------- joining turns and signals


class OutcomeConfig(BaseModel, frozen=True, extra="forbid"):
    """How long a turn may wait for its signals, and how much is held in memory."""

    maturity_s: float = Field(
        default=30.0, ge=0.0, description="Seconds after a turn at which its outcome is evaluated."
    )
    window: int = Field(
        default=50_000,
        ge=100,
        description="Newest turns kept in memory, and as many signals about turns that are not in the log yet.",
    )
    past: int = Field(
        default=200_000,
        ge=100,
        description="Newest turns before a trial from which each user's usual behaviour is learned.",
    )
    early_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds after which a signal about a turn that is not in the log yet is forgotten.",
    )
    nothing: str = Field(
        default="-",
        description="The answer that suggests nothing, as in the reward function `tab`. An empty answer also counts as that.",
    )
