"""Settings for rollouts on other machines: the door on the trainer's side, and a worker's connection to it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DoorConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.door]`: where rollout workers on other machines connect, each with its own certificate."""

    host: str = Field(default="", description="Address to bind. Empty: there is no door.")
    port: int = Field(default=8443, ge=0, le=65535, description="TCP port; 0 lets the system choose.")
    certificate: str = Field(default="", description="This side's certificate chain (PEM).")
    key: str = Field(default="", description="Its private key (PEM).")
    authority: str = Field(
        default="", description="The certificates (PEM) that sign the workers'. Nobody else should be signed by them."
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="The workers that may come in, by their certificates' common names; none: all that are signed.",
    )
    calls: int = Field(default=64, ge=1, description="Requests of one worker at once; beyond it 429.")
    body_bytes: int = Field(default=2 << 20, ge=1024, description="Longest request; beyond it 413.")


class ConnectConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.connect]`, or the options of `ostinato rollout`: the door that the worker connects to."""

    url: str = Field(
        default="", pattern=r"^(https://[^/]+/?)?$", description="The door, https://host:port. Empty: none."
    )
    certificate: str = Field(default="", description="This worker's certificate chain (PEM).")
    key: str = Field(default="", description="Its private key (PEM).")
    authority: str = Field(default="", description="The certificates (PEM) that sign the door's.")
