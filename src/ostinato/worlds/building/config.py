"""Settings for building tasks from packages."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BuildConfig(BaseModel, frozen=True, extra="forbid"):
    seed: int = Field(default=0, description="Seeds the choice of functions and faults to try.")
    tasks: int = Field(default=80, ge=1, le=5000, description="Most tasks per package.")
    cpu_seconds: float = Field(
        default=240.0, gt=0, description="CPU seconds per package; the tasks found by then are kept."
    )
    most_failing: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="A change that makes a larger share of the suite fail is too obvious to be a task.",
    )
    selection_seconds: float = Field(
        default=4.0, gt=0, description="Functions whose tests take longer than this many seconds are left out."
    )
    beside: int = Field(
        default=20,
        ge=0,
        description="Quick tests of the same files that are run besides those that enter the function.",
    )
    body_lines: int = Field(
        default=3, ge=1, description="Fewest lines of code of a function whose body is removed, or which is deleted."
    )
    undocumented_lines: int = Field(
        default=8,
        ge=0,
        description="Most lines of code of a function without a docstring whose body is removed, or which is deleted.",
    )
    lines_a_word: float = Field(
        default=4.0,
        gt=0,
        description="Lines of code per word that a docstring needs; with fewer words, or fewer than three, it does "
        "not count.",
    )
    faults_tried: int = Field(default=5, ge=0, description="Faults tried per function.")
    faults_kept: int = Field(default=3, ge=0, description="Most faults per function that become tasks.")
    batch: int = Field(default=8, ge=1, description="Functions tried in one sandbox, one after the other.")
