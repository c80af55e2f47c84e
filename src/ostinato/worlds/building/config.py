"""Settings for building tasks from packages."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BuildConfig(BaseModel, frozen=True, extra="forbid"):
    seed: int = Field(default=0, description="Draws the functions and the faults that are tried.")
    tasks: int = Field(default=80, ge=1, le=5000, description="Tasks of one package, at most.")
    cpu_seconds: float = Field(
        default=240.0, gt=0, description="CPU time for one package; what is found by then is kept."
    )
    most_failing: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="A change that more than this share of the suite notices is too plain to be a task.",
    )
    selection_seconds: float = Field(
        default=4.0, gt=0, description="Functions whose tests take longer than this are left out."
    )
    beside: int = Field(
        default=20, ge=0, description="Quick tests of the same files that are run beside those that enter the function."
    )
    body_lines: int = Field(
        default=3, ge=1, description="Lines of code that a function must have to lose its body, or to be taken away."
    )
    undocumented_lines: int = Field(
        default=8,
        ge=0,
        description="Lines that a function without a docstring may have to lose its body, or to be taken away.",
    )
    lines_a_word: float = Field(
        default=4.0,
        gt=0,
        description="Lines of code for which a docstring must have a word; with fewer words, or fewer than three, it counts as none.",
    )
    faults_tried: int = Field(default=5, ge=0, description="Faults that are tried in one function.")
    faults_kept: int = Field(default=3, ge=0, description="Faults of one function that become tasks, at most.")
    batch: int = Field(default=8, ge=1, description="Functions that are tried in one sandbox, one after the other.")
