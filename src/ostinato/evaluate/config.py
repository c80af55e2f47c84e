"""Configuration of how candidates are measured and judged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

_DAY = 86_400.0
_DAILY_SHARES = 8.0
"""The number of daily shares that a week's alpha is divided into: seven days, and the one before the week."""


class BarConfig(BaseModel, frozen=True, extra="forbid"):
    """An absolute bar that a candidate must clear, independently of any comparison, before it serves anybody."""

    suite: str = Field(
        default="",
        description="Task file whose answers count. If it is not also compared by the gate, only the candidate is sampled on it. Empty: "
        "evaluate.suite.",
    )
    taskset: str = Field(
        default="",
        description="Another name for suite, which reads better where the file belongs to a simulated world.",
    )
    axis: Literal["score", "format", "latency"] = Field(
        default="score",
        description="What the bar is about. 'score': the grader's score. 'format': share of answers that are not empty and ended by "
        "themselves. 'latency': seconds per request, or per rollout, as the evaluation measures them.",
    )
    at_least: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="Least mean: the 99% lower bound of the mean must not be below this."
    )
    at_most: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest mean: the 99% upper bound of the mean must not be above this. For latency: the seconds within which `share` "
        "of the answers must stay.",
    )
    share: float = Field(
        default=0.95,
        gt=0.0,
        lt=1.0,
        description="Share of the answers that must stay within `at_most` seconds (latency only).",
    )

    @model_validator(mode="after")
    def _one_side(self) -> BarConfig:
        if self.suite and self.taskset:
            raise ValueError("a bar names a suite or a taskset, not both; leave one out")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a bar needs one of at_least and at_most; set the one that is meant")
        if self.axis == "latency" and self.at_most is None:
            raise ValueError("a latency bar needs at_most, in seconds")
        if self.axis != "latency" and self.at_most is not None and self.at_most >= 1.0:
            raise ValueError(f"at_most={self.at_most} is no bar for {self.axis}, which lies in [0, 1]; set it below 1")
        return self

    @property
    def wanted(self) -> float:
        """The value in (0, 1) that the lower bound must reach, on a scale where higher is better."""
        if self.axis == "latency":
            return self.share
        return self.at_least if self.at_least is not None else 1.0 - (self.at_most or 0.0)


class GateConfig(BaseModel, frozen=True, extra="forbid"):
    """How much worse a candidate may be, the error probabilities, and how many samples may be drawn."""

    require: Literal["no_loss", "win"] = Field(
        default="no_loss",
        description="'no_loss' ships a candidate that is worse by no more than the margins. 'win' ships only one that is proven better "
        "than the best release so far.",
    )
    margin: float = Field(
        default=0.03,
        gt=0.0,
        lt=1.0,
        description="Largest tolerated true loss against live, in mean suite score (0.03 = 3 points).",
    )
    total_margin: float = Field(
        default=0.03,
        gt=0.0,
        lt=1.0,
        description="Largest tolerated true loss of all releases together, against the best release so far and "
        "against the anchor.",
    )
    alpha: float = Field(
        default=0.05,
        gt=0.0,
        lt=0.5,
        description="Probability of shipping a candidate that is worse than live by the margin, over all looks. Against the best release "
        "and the anchor, and for 'better', it is the probability over a whole week.",
    )
    candidates_per_week: Literal["auto"] | Annotated[float, Field(ge=1.0)] = Field(
        default="auto",
        description="How the weekly alpha is shared among candidates. 'auto': a candidate gets what has accrued since the one before, "
        "for a day at most. One candidate a day gets an eighth of the week's alpha, and a week's candidates together never get more than "
        "all of it, however many there are. A number: this many equal shares, regardless of how many candidates there are.",
    )
    first_draws: int = Field(default=8, ge=1, le=1024, description="Samples per item and policy at the first look.")
    max_draws: int = Field(default=8, ge=1, le=1024, description="Samples per item and policy at the last look.")
    early_share: float = Field(
        default=0.5,
        gt=0.0,
        lt=1.0,
        description="Share of alpha that is spent on all looks before the last. The rest is kept for the last look.",
    )
    share_draws: bool = Field(
        default=False,
        description="Sample little more than the candidate for a verdict. Ten consecutive candidates share the draws of "
        "best, as they share the anchor's, and the first candidate after a release is compared with the draws with "
        "which live shipped. Use it where candidates follow each other closely and mostly ship. Comparisons are then "
        "not paired by seeds, so their standard errors are larger by a tenth to a fifth.",
    )
    items_per_round: int = Field(
        default=0,
        ge=0,
        description="Items drawn per candidate if a suite has more; each candidate gets different ones. 0: all items.",
    )
    sealed_share: float = Field(
        default=0.1,
        ge=0.0,
        le=0.5,
        description="Share of a suite's items, chosen by hash, that are sealed. Few candidates see them, so that nothing is fitted to "
        "them.",
    )
    sealed_every: int = Field(
        default=20,
        ge=1,
        description="One in this many candidates also sees the sealed items. It is blocked if it is worse on them.",
    )
    sample_best: bool = Field(
        default=True,
        description="Load the best release into a slot of its own while a candidate is compared with it, if it is neither live nor the "
        "anchor. This takes the memory of one more copy of the model. False: the best release is left out in that case, and losses are "
        "bounded against the anchor only.",
    )
    item_spread: float = Field(
        default=0.122,
        ge=0.0,
        description="Assumed standard deviation, before any measurement, of a version's own effect on an item.",
    )
    draw_spread: float = Field(
        default=0.245, gt=0.0, description="Assumed standard deviation, before any measurement, of one draw of an item."
    )

    @model_validator(mode="after")
    def _ordered(self) -> GateConfig:
        if self.max_draws < self.first_draws:
            raise ValueError(f"max_draws={self.max_draws} is below first_draws={self.first_draws}; raise it")
        if self.require == "win" and not self.sample_best:
            raise ValueError(
                "require='win' compares with the best release, which sample_best=false leaves out; set it to true"
            )
        return self

    def total_alpha_at(self, draws: int) -> float:
        """Return the part of the weekly alpha that one candidate may spend at the look with this many draws.

        With 'auto' it is that of a candidate that comes after a day or more; `after` gives the settings for one that comes sooner.
        """
        return self.alpha_at(draws) / (
            _DAILY_SHARES if self.candidates_per_week == "auto" else self.candidates_per_week
        )

    def after(self, since_s: float | None) -> GateConfig:
        """Return the settings for a candidate that comes `since_s` seconds after another was looked at; None: none was.

        A share that is not used within a day is lost: seven days, and the one before them, have ``alpha (7 + 1) / 8`` to spend.
        """
        if self.candidates_per_week != "auto" or since_s is None:
            return self
        return self.model_copy(update={"candidates_per_week": _DAILY_SHARES * _DAY / min(max(since_s, 1.0), _DAY)})

    def schedule(self) -> tuple[int, ...]:
        """Return the draw counts at which the gate looks: doubling from `first_draws` and ending at `max_draws`.

        Example: ``GateConfig(first_draws=2, max_draws=6).schedule()`` is ``(2, 4, 6)``.
        """
        looks = [self.first_draws]
        while looks[-1] < self.max_draws:
            looks.append(min(2 * looks[-1], self.max_draws))
        return tuple(looks)

    def alpha_at(self, draws: int) -> float:
        """Return the part of `alpha` that the look with this many draws may spend."""
        looks = len(self.schedule())
        if looks == 1:
            return self.alpha
        if draws >= self.max_draws:
            return self.alpha * (1.0 - self.early_share)
        return self.alpha * self.early_share / (looks - 1)

    def next_draws(self, held: int) -> int:
        """Return the draw count of the next look when `held` draws per item are known."""
        return next((draws for draws in self.schedule() if draws > held), self.max_draws)


class RunnerConfig(BaseModel, frozen=True, extra="forbid"):
    """The load on the gateway, and the timeouts and retries for it."""

    concurrency: int = Field(default=16, ge=1, le=1024, description="Requests in flight at once.")
    samples_per_request: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Draws of one item per request. The number is part of a draw's identity: after a change, all samples are drawn again.",
    )
    request_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Longest request, including queueing, in seconds."
    )
    slot_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Longest wait for a slot to serve the expected version, in seconds."
    )
    deadline_s: float = Field(default=3600.0, gt=0.0, description="Longest evaluation run, in seconds.")
    retry_pause_s: float = Field(
        default=0.5, gt=0.0, description="First pause after a failed attempt, in seconds. It doubles up to 8 s."
    )
    attempts: int = Field(default=8, ge=1, le=100, description="Attempts per request before the run is given up.")
    seed: int = Field(
        default=0,
        ge=0,
        le=2**31 - 1,
        description="Offset of all item seeds. Change it for another sample of the same suite.",
    )
