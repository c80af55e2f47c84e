"""Deductions from a grade: the cost of effort, and the whole grade of a canary, which is a task that cannot be solved.

A canary that seems solved shows that the policy found a way to be rewarded for nothing. The cost of effort is concave, so that the first
needless call costs more than the hundredth:

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   ln(1 + k x) / k for q -> 1,   x for k -> 0

(Composer 2 report, arXiv 2603.24477, section 4.2.) x is a weighted sum of thinking, tool-call, tool-output, final and summary tokens,
calls, turns and summaries. On easy tasks, where x is small, the marginal cost of a unit is nearly 1; on long tasks it falls to
(1 + k x)^-q, so that hard work still pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig
from ostinato.worlds.grading.grade import Grade, Grader
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Split, Task

EFFORTS = (
    "thinking_tokens", "call_tokens", "output_tokens", "final_tokens", "calls", "turns", "summaries", "summary_tokens",
)  # fmt: skip
"""The keys of `Rollout.effort` that have a cost. A missing key counts as 0."""


class EffortConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.effort]`: how effort is measured, and how much it costs."""

    weight: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Largest share of an outcome's value that effort can cost. 0: effort is free.",
    )
    k: float = Field(
        default=1e-3,
        ge=0.0,
        le=1e6,
        description="How early the marginal cost falls: one more unit at effort x costs (1 + k x)^-q. 0: never.",
    )
    q: float = Field(
        default=0.5,
        ge=0.0,
        le=10.0,
        description="How far the marginal cost falls: one more unit at effort x costs (1 + k x)^-q.",
    )
    most: float = Field(
        default=20_000.0,
        gt=0.0,
        le=1e12,
        description="Effort, in units, at which the cost reaches `weight`. More effort costs no more.",
    )
    thinking_tokens: float = Field(
        default=1.0, ge=0.0, description="Units per reasoning token, if the harness counts them separately."
    )
    call_tokens: float = Field(default=1.0, ge=0.0, description="Units per token of an answer with a tool call.")
    output_tokens: float = Field(default=0.1, ge=0.0, description="Units per token of a tool's output.")
    final_tokens: float = Field(default=1.0, ge=0.0, description="Units per token of an answer without a tool call.")
    calls: float = Field(default=20.0, ge=0.0, description="Units per tool call.")
    turns: float = Field(default=20.0, ge=0.0, description="Units per turn. Summaries are not counted.")
    summaries: float = Field(
        default=50.0, ge=0.0, description="Units per summary of a window, if the harness has memory."
    )
    summary_tokens: float = Field(
        default=1.0, ge=0.0, description="Units per token of a summary, including refused attempts."
    )


def effort_cost(x: float, k: float, q: float) -> float:
    """Return C(x), numerically stable for all k, q >= 0. C(0) = 0, and C(x) never exceeds x.

    Computed as x * f(log1p(k x), k x) * f(expm1(a), a) with a = (1 - q) log1p(k x) and f(y, z) = y / z, 1 for z = 0. There is no
    cancellation, so the limits need no special case.

    Example: ``effort_cost(3.0, 1.0, 1.0) == math.log(4.0)``
    """
    if x < 0.0 or k < 0.0 or q < 0.0 or not math.isfinite(x):
        raise ValueError(f"effort {x}, k {k} and q {q} must be finite and not negative")
    logarithm = math.log1p(k * x)
    exponent = (1.0 - q) * logarithm
    shrunk = logarithm / k if k * x > 1e-17 else x  # for smaller y, log1p(y) == y exactly
    return shrunk * (math.expm1(exponent) / exponent if exponent else 1.0)


def effort_of(effort: Mapping[str, float], config: EffortConfig) -> float:
    """Return x, the weighted sum of a rollout's effort, in the configured units."""
    units = (
        config.thinking_tokens, config.call_tokens, config.output_tokens, config.final_tokens, config.calls, config.turns,
        config.summaries, config.summary_tokens,
    )  # fmt: skip
    return math.fsum(max(0.0, effort.get(name, 0.0)) * unit for name, unit in zip(EFFORTS, units, strict=True))


def priced(value: float, effort: Mapping[str, float], config: EffortConfig) -> tuple[float, float]:
    """Return an outcome's value after the cost of its effort, and that cost as a share, in [0, 1], of the largest.

    The value never falls below 0, and 0 stays 0, so giving up early gains nothing. Since `weight` < 1, a positive value stays
    positive, so a solved task always beats one that is graded 0.
    """
    x = min(effort_of(effort, config), config.most)
    share = min(1.0, effort_cost(x, config.k, config.q) / effort_cost(config.most, config.k, config.q))
    return max(0.0, value * (1.0 - config.weight * share)), share


# ---------------------------------------------------------------- canaries


Alarm = Callable[[Task, Rollout, Grade], None]


class WatchedGrader:
    """Implements `Grader`: calls the grader that a task names, watches canaries, and deducts the cost of effort.

    A canary always gets 0. The alarm is called for a canary that seems solved and for any other attempt to fake an outcome.
    """

    def __init__(self, graders: dict[str, Grader], effort: EffortConfig, alarm: Alarm) -> None:
        self._graders = graders
        self._effort = effort
        self._alarm = alarm

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        grader = self._graders.get(task.grading.grader)
        if grader is None:
            names = ", ".join(sorted(self._graders))
            raise BadConfig(
                f"task {task.id!r}: there is no grader {task.grading.grader!r} (grading.grader); there are {names}"
            )
        grade = await grader.grade(task, rollout)
        if task.split is Split.CANARY:
            cheat = ("solved what cannot be solved",) if grade.value > 0.0 else ()
            grade = replace(grade, value=0.0, cheated=(*grade.cheated, *cheat))
        if grade.cheated:
            grade = replace(grade, value=0.0)
            self._alarm(task, rollout, grade)
        value, share = priced(grade.value, rollout.effort, self._effort)
        if not self._effort.weight:
            return grade
        verified = grade.value if grade.verified is None else grade.verified
        return replace(grade, value=value, parts={**grade.parts, "effort": share}, verified=verified)
