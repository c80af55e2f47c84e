"""Configuration of the log."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, Field, field_validator


class Encrypt(StrEnum):
    """Whether user text is encrypted, and with a key per tenant or per user."""

    NONE = "none"
    TENANT = "tenant"
    USER = "user"


class RecordConfig(BaseModel, frozen=True, extra="forbid"):
    """How the log is segmented, how long it is kept, and whether user text is encrypted.

    Example: ``RecordConfig(retain_days=30, encrypt="user")``
    """

    url: str = Field(
        default="",
        description="URL of a Postgres database that holds the log, for workers on several machines: postgresql://user@host/database. "
        "Empty: the log is in the run's directory.",
    )
    password_env: str = Field(
        default="",
        description="Environment variable that holds the password for record.url. Empty: no password, or one from libpq's own sources.",
    )
    allow_unverified: bool = Field(
        default=False,
        description="Accept a Postgres on another host whose certificate is not checked. Set it only on a network that nobody else can "
        "reach; otherwise add ?sslmode=verify-full to record.url.",
    )
    namespace: str = Field(
        default="ostinato",
        description="Database schema of this run's log. Each run needs its own. Names that begin with pg_ are reserved by Postgres.",
    )
    retain_days: float | None = Field(
        default=None,
        gt=0,
        description="Age, in days, at which turns, signals and rewards are dropped. Unset: they are kept.",
    )
    segment_rows: int = Field(
        default=250_000, ge=1, description="Rows in a segment of the log after which a new one begins."
    )
    segment_mb: float = Field(
        default=256.0, gt=0, description="Size of a segment, in megabytes, after which a new one begins."
    )
    segment_hours: float = Field(
        default=24.0, gt=0, description="Age of a segment, in hours, after which a new one begins."
    )
    append_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest wait of a write for the disk, for Postgres or for another writing process, in seconds; then the call gets "
        "503.",
    )
    lease_s: float = Field(
        default=15.0,
        ge=1,
        description="On Postgres: seconds without a heartbeat after which a worker on another host takes over a role.",
    )
    away_s: float = Field(
        default=3600.0,
        ge=0,
        description="On Postgres: longest time that a trainer, rollout or housekeeping worker waits for an unreachable server, in "
        "seconds. Then it ends and is restarted.",
    )
    encrypt: Encrypt = Field(
        default=Encrypt.NONE,
        description="Encrypt text, tokens, comments and corrections at rest, with one key per 'tenant' or per 'user'. 'none': nothing is "
        "encrypted.",
    )
    master_key: Path | None = Field(
        default=None,
        description="File of 32 or more random bytes that encrypts (wraps) the keys. Unset: the keys are stored unwrapped.",
    )

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, namespace: str) -> str:
        if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", namespace):
            raise ValueError(
                "not a valid schema name; use up to 63 of a-z, 0-9 and _, not starting with a digit or with pg_, which Postgres reserves"
            )
        return namespace
