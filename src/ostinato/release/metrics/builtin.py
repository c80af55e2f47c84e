"""Built-in metrics: their definitions, and which of them every trial reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
"""Names of signals that a metric may use without `release.signals`."""

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "acceptance": {
        "role": "goal",
        "direction": "higher",
        "numerator": ("accepted > 0",),
        "unless": ("rejected", "ignored", "undone", "stopped", "turn.stopped"),
    },
    "accepted_of_all": {
        "direction": "higher",
        "numerator": ("accepted > 0",),
        "unless": ("rejected", "ignored", "undone", "stopped", "turn.stopped"),
        "denominator": ("turn",),
        "tolerance": 0.02,
    },
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
}
"""By name of the metric, the fields of its declaration."""

DEFAULT_GOAL = "acceptance"
"""The goal if none is declared."""

DEFAULT_GUARDRAILS = (
    "failed",
    "stopped",
    "dissatisfied_follow_up",
    "latency_p99",
    "feedback_coverage",
    "accepted_of_all",
)
"""Guardrails of every trial, unless a declaration of that name says otherwise. The last is there because acceptance covers only turns with
feedback: a version that silences dissatisfied users raises it, but cannot raise the accepted share of all turns."""
