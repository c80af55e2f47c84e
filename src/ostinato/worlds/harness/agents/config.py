"""The settings of an agent: how it is started, which files it gets, and what it may use."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

HOME = "/tmp"  # the home directory of every sandbox's programs
Dialect = Literal["chat", "messages", "responses"]


class AgentConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.agent]`, or `[worlds.harness.agent-NAME]` for one of several.

    In `command`, `environment` and `files` these words are replaced: {prompt} by the task's messages, {base_url} by the address of
    the agent's model, without /v1, {model} by the model's name, {workdir} and {home} by the sandbox's directories.
    """

    command: tuple[str, ...] = Field(
        min_length=1, description="The program and its arguments. It gets no input and runs in the working directory."
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str], description="Variables of the agent, in place of the sandbox's."
    )
    files: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Files that are put there for it, its settings for instance: path below {home} -> text.",
    )
    runtime: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="What it is made of: place in the sandbox -> directory of this machine, which is shown read-only.",
    )
    dialect: Dialect = Field(
        default="chat", description="How it asks its model: chat completions, messages, responses."
    )
    version: str = Field(default="", description="The agent's own version, for people and for the harness's hash.")
    turns: int = Field(
        default=64, ge=1, description="Model calls of one rollout at most, and never more than the task's."
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Tokens that the model may say in one rollout, all answers together."
    )
    sent_bytes: int = Field(
        default=128 << 20, ge=1024, description="Bytes of requests that it may send in one rollout."
    )
    memory_mb: int = Field(default=1024, ge=32, description="Memory of the sandbox, if its task has less, in MiB.")
    disk_mb: int = Field(default=256, ge=1, description="Disk of the sandbox, if its task has less, in MiB.")
    processes: int = Field(default=128, ge=4, description="Processes and threads, if its task has fewer.")
    open_files: int = Field(
        default=1024, ge=8, le=1024, description="Open files of each process, if its task has fewer."
    )
    output_bytes: int = Field(
        default=1 << 20, ge=1024, description="What it may print to stdout or stderr; beyond it, it is ended."
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if not path or path.startswith("/") or ".." in path.split("/") or path.endswith("/") or "\0" in path:
                raise ValueError(f"{path!r} must be a relative path without '..': it lies below {HOME}")
        return files
