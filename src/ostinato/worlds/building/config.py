"""Configuration of building tasks from packages."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BuildConfig(BaseModel, frozen=True, extra="forbid"):
    seed: int = Field(default=0, description="Seed for choosing the functions and faults to try.")
    tasks: int = Field(default=80, ge=1, le=5000, description="Most tasks per package.")
    cpu_seconds: float = Field(
        default=240.0, gt=0, description="CPU seconds per package. The tasks found by then are kept."
    )
    most_failing: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Largest share of the suite that a change may make fail. A change that breaks more is too obvious to be a task.",
    )
    selection_seconds: float = Field(
        default=4.0,
        gt=0,
        description="Longest run of a function's tests, in seconds. Functions whose tests take longer are left out.",
    )
    beside: int = Field(
        default=20,
        ge=0,
        description="Quick tests of the same files that are run in addition to those that enter the function.",
    )
    body_lines: int = Field(
        default=3,
        ge=1,
        description="Fewest lines of code that a function must have for its body to be removed or for it to be deleted.",
    )
    undocumented_lines: int = Field(
        default=8,
        ge=0,
        description="Most lines of code that a function without a docstring may have for its body to be removed or for it to be deleted.",
    )
    lines_a_word: float = Field(
        default=4.0,
        gt=0,
        description="Lines of code per word that a docstring needs. A docstring with fewer words, or with fewer than three, does not "
        "count.",
    )
    faults_tried: int = Field(default=5, ge=0, description="Faults tried per function.")
    faults_kept: int = Field(default=3, ge=0, description="Most faults per function that become tasks.")
    batch: int = Field(default=8, ge=1, description="Functions tried in one sandbox, one after the other.")
