"""Configuration of the log."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, Field, field_validator


class Encrypt(StrEnum):
    """Whose key is used to encrypt what people wrote."""

    NONE = "none"
    TENANT = "tenant"
    USER = "user"


class RecordConfig(BaseModel, frozen=True, extra="forbid"):
    """How the log is segmented, how long it is kept, and whether user text is encrypted.

    Example: ``RecordConfig(retain_days=30, encrypt="user")``
    """

    url: str = Field(
        default="",
        description="postgresql://user@host/database: keeps the log there, for workers on several machines. Empty: in "
        "the run's directory.",
    )
    password_env: str = Field(
        default="",
        description="Environment variable that holds the password for record.url. Empty: no password, or libpq's own "
        "sources.",
    )
    allow_unverified: bool = Field(
        default=False,
        description="Accept a Postgres on another host whose certificate is not checked. Only for a network that nobody "
        "else can reach; otherwise add ?sslmode=verify-full to record.url.",
    )
    namespace: str = Field(
        default="ostinato",
        description="Database schema of this run's log; each run needs its own. Names that begin with pg_ are "
        "Postgres's own.",
    )
    retain_days: float | None = Field(
        default=None, gt=0, description="Days after which turns, signals and rewards are dropped. Unset: never."
    )
    segment_rows: int = Field(default=250_000, ge=1, description="Rows after which a new segment begins.")
    segment_mb: float = Field(default=256.0, gt=0, description="Megabytes after which a new segment begins.")
    segment_hours: float = Field(default=24.0, gt=0, description="Hours after which a new segment begins.")
    append_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest wait for the disk, for Postgres or for another writing process, in seconds; then 503.",
    )
    lease_s: float = Field(
        default=15.0,
        ge=1,
        description="On Postgres: seconds without a sign of life after which a worker on another host takes over a "
        "role.",
    )
    away_s: float = Field(
        default=3600.0,
        ge=0,
        description="On Postgres: seconds that a trainer, rollout or housekeeping worker waits for an unreachable "
        "server; then it ends and is started anew.",
    )
    encrypt: Encrypt = Field(
        default=Encrypt.NONE,
        description="Encrypt text, tokens, comments and corrections at rest, with one key per 'tenant' or per 'user'.",
    )
    master_key: Path | None = Field(
        default=None, description="File of 32 or more random bytes that wraps the keys. Unset: they are not wrapped."
    )

    @field_validator("namespace")
    @classmethod
    def _a_schema(cls, namespace: str) -> str:
        if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", namespace):
            raise ValueError(
                "no name for a schema; use up to 63 of a-z, 0-9 and _, no digit first, and not pg_, which is Postgres's own"
            )
        return namespace
