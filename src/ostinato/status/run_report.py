"""The schema of `report.json`, the measurements of a demo run. Only `report.render`, which draws it, knows the page's layout."""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.errors import BadConfig


class _Part(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the report's parts; refuses unknown fields and NaN."""


class CurvePoint(_Part, frozen=True):
    """A share of turns (accepted, unless the chart says otherwise) in a window that ends `t` minutes into the run, and its 95% interval."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    mean: float = Field(ge=0.0, le=1.0, description="The share.")
    lower: float = Field(description="Lower end of the interval.")
    upper: float = Field(description="Upper end of the interval.")
    n: int = Field(ge=0, description="Turns in the window.")


class Curve(_Part, frozen=True):
    """One arm over time."""

    arm: str = Field(description="live, control or canary.")
    points: tuple[CurvePoint, ...] = Field(description="In order of time.")


class Mark(_Part, frozen=True):
    """A release or a rollback."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    label: str = Field(description="The policy version that became live, such as v12.")
    action: str = Field(default="shipped", description="shipped or rolled_back.")


class Gate(_Part, frozen=True):
    """One look of the gate. Differences are shares in [-1, 1], candidate minus live."""

    t: float = Field(ge=0.0, description="Minutes since the start.")
    candidate: str = Field(description="Version that was judged.")
    live: str = Field(description="Version it was compared with.")
    difference: float = Field(description="Mean paired difference.")
    lower: float = Field(description="One-sided lower bound.")
    upper: float = Field(description="Upper bound.")
    margin: float = Field(description="Tolerated loss.")
    power: float = Field(description="Probability that an equal candidate passes.")
    items: int = Field(ge=0, description="Suite items.")
    draws: int = Field(ge=0, description="Samples per item.")
    verdict: str = Field(description="SHIP, BLOCK or EXTEND.")


class Delta(_Part, frozen=True):
    """The bytes sent to publish one version."""

    version: str = Field(description="Policy version.")
    bytes: int = Field(ge=0, description="Size of the delta, in bytes.")
    full_bytes: int = Field(gt=0, description="Size of the full weights, in bytes.")


class Pause(_Part, frozen=True):
    """One hot swap."""

    version: str = Field(description="Policy version swapped in.")
    slot: str = Field(default="live", description="Engine slot.")
    seconds: float = Field(ge=0.0, description="Seconds during which no token could be made.")
    streams: int = Field(default=0, ge=0, description="Streams that continued across the swap.")


class HeldOut(_Part, frozen=True):
    """Score of one version on the held-out suite."""

    label: str = Field(description="Such as base or final.")
    mean: float = Field(ge=0.0, le=1.0, description="Mean score.")
    lower: float = Field(description="Lower end of the 95% interval.")
    upper: float = Field(description="Upper end of the 95% interval.")
    items: int = Field(ge=0, description="Suite items.")


class OutcomeShare(_Part, frozen=True):
    """A share of `n` outcomes and its 95% interval."""

    mean: float = Field(ge=0.0, le=1.0, description="The share.")
    lower: float = Field(ge=0.0, le=1.0, description="Lower end of the interval.")
    upper: float = Field(ge=0.0, le=1.0, description="Upper end of the interval.")
    n: int = Field(ge=0, description="Number of outcomes.")


class Suggesting(_Part, frozen=True):
    """How one policy treats one family of tasks."""

    suggested: OutcomeShare = Field(description="Share of answers that suggest something.")
    accepted: OutcomeShare | None = Field(
        description="Share of suggestions that are right; null if there were too few to say."
    )


class CalibratedFamily(_Part, frozen=True):
    """One family of tasks under the starting model and under the last release."""

    family: str = Field(description="The family's name.")
    before: Suggesting = Field(description="The starting model.")
    after: Suggesting = Field(description="The last release.")


class Calibration(_Part, frozen=True):
    """Whether suggestions are made where they pay: in families where more than a share `threshold` of them is right."""

    threshold: float = Field(gt=0.0, lt=1.0, description="The share above which a suggestion pays.")
    families: tuple[CalibratedFamily, ...] = Field(description="All families of the suite.")


class RunReport(_Part, frozen=True):
    """The content of `report.json`.

    Example::

        RunReport(title="Inline copilot", seed=0, minutes=12.0, model="SmolLM2-135M-Instruct", users=50,
                  curves=(Curve(arm="live", points=(CurvePoint(t=1.0, mean=0.25, lower=0.2, upper=0.3, n=200),)),),
                  summary=(("Releases", "5"),), accounting=(("turns", 3000), ("trained", 2400), ("held back", 600)))
    """

    title: str = Field(description="Headline of the page.")
    seed: int = Field(description="Seed of the run.")
    minutes: float = Field(ge=0.0, description="Length of the run, in minutes.")
    model: str = Field(description="The starting model.")
    users: int = Field(default=0, ge=0, description="Number of simulated users.")
    curves: tuple[Curve, ...] = Field(default=(), description="Acceptance per arm.")
    suggested: tuple[Curve, ...] = Field(default=(), description="Share of requests with a suggestion, per arm.")
    calibration: Calibration | None = Field(default=None, description="Present for a model that may suggest nothing.")
    releases: tuple[Mark, ...] = Field(default=(), description="Releases and rollbacks.")
    gates: tuple[Gate, ...] = Field(default=(), description="Looks of the gate, in order.")
    deltas: tuple[Delta, ...] = Field(default=(), description="Published deltas, in order.")
    pauses: tuple[Pause, ...] = Field(default=(), description="Hot swaps, in order.")
    held_out: tuple[HeldOut, ...] = Field(default=(), description="Held-out scores.")
    accounting: tuple[tuple[str, int], ...] = Field(default=(), description="How every served turn ended.")
    summary: tuple[tuple[str, str], ...] = Field(default=(), description="The terminal's summary table: label, value.")
    notes: tuple[str, ...] = Field(default=(), description="Remarks shown under the summary.")

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RunReport:
        """Read `report.json`. Raises BadConfig, which names the field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "(file)"
            raise BadConfig(
                f"report.json, field {field!r}: {first['msg']}; write it again with this version"
            ) from error
