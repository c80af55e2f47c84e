"""Settings for rollouts on other machines: the door on the trainer's side, and a worker's connection to it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DoorConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.door]`: where rollout workers on other machines connect, each with its own certificate."""

    host: str = Field(default="", description="Address to bind. Empty: no door.")
    port: int = Field(default=8443, ge=0, le=65535, description="TCP port; 0 lets the system choose.")
    certificate: str = Field(default="", description="The door's certificate chain (PEM file).")
    key: str = Field(default="", description="The door's private key (PEM file).")
    authority: str = Field(
        default="",
        description="Certificates (PEM file) that sign the workers' certificates. They should sign nobody else's.",
    )
    names: tuple[str, ...] = Field(
        default=(), description="Common names of the certificates of workers that may connect. Empty: all signed ones."
    )
    refused: str = Field(
        default="",
        description="File of the serial numbers of certificates that are refused though validly signed, one a line, in hexadecimal as "
        "`openssl x509 -serial` prints them; `#` begins a comment. It is read again within a second of a change. Empty: none.",
    )
    connections: int = Field(default=256, ge=1, description="Open connections per worker; more are closed at once.")
    calls: int = Field(default=64, ge=1, description="Concurrent requests per worker; more get 429.")
    body_bytes: int = Field(default=2 << 20, ge=1024, description="Longest request, in bytes; longer ones get 413.")


class ConnectConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.connect]`, or the options of `ostinato rollout`: the door that the worker connects to."""

    url: str = Field(
        default="", pattern=r"^(https://[^/]+/?)?$", description="The door's URL, https://host:port. Empty: none."
    )
    certificate: str = Field(default="", description="This worker's certificate chain (PEM file).")
    key: str = Field(default="", description="This worker's private key (PEM file).")
    authority: str = Field(default="", description="Certificates (PEM file) that sign the door's certificate.")
