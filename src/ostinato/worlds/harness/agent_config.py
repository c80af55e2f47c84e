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
        default_factory=dict[str, str], description="Environment variables of the agent, in place of the sandbox's."
    )
    files: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Files written for the agent, such as its settings: path below {home} -> text.",
    )
    runtime: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="The agent's installation: path in the sandbox -> directory of this machine, mounted read-only.",
    )
    dialect: Dialect = Field(
        default="chat", description="API that the agent speaks: chat (chat completions), messages or responses."
    )
    version: str = Field(
        default="", description="The agent's own version. It is informational and part of the harness's hash."
    )
    turns: int = Field(
        default=64, ge=1, description="Most model calls per rollout, or the task's `turns` if that is lower."
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Most tokens of all the model's answers in one rollout together."
    )
    sent_bytes: int = Field(
        default=128 << 20, ge=1024, description="Most bytes of requests that the agent may send in one rollout."
    )
    memory_mb: int = Field(
        default=1024, ge=32, description="Memory of the sandbox in MiB, or the task's limit if that is larger."
    )
    disk_mb: int = Field(
        default=256, ge=1, description="Disk of the sandbox in MiB, or the task's limit if that is larger."
    )
    processes: int = Field(
        default=128, ge=4, description="Most processes and threads, or the task's limit if that is larger."
    )
    open_files: int = Field(
        default=1024, ge=8, le=1024, description="Most open files per process, or the task's limit if that is larger."
    )
    output_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        description="Bytes that the agent may print to stdout or stderr. Beyond that it is ended.",
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if not path or path.startswith("/") or ".." in path.split("/") or path.endswith("/") or "\0" in path:
                raise ValueError(f"{path!r} must be a relative path without '..': it lies below {HOME}")
        return files
