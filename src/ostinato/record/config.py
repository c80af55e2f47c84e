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
        description="postgresql://user@host/database: the log lies there, for workers on several machines; empty: in the run's directory.",
    )
    password_env: str = Field(
        default="",
        description="The environment variable that holds the password for record.url; empty: none, or libpq's own ways.",
    )
    namespace: str = Field(
        default="ostinato",
        description="The schema of the database that this run's log lies in: one for each run. Those of Postgres begin with pg_.",
    )
    retain_days: float | None = Field(
        default=None, gt=0, description="Turns, signals and rewards are dropped so many days later; unset: never."
    )
    segment_rows: int = Field(default=250_000, ge=1, description="Rows of a segment, after which a new one begins.")
    segment_mb: float = Field(default=256.0, gt=0, description="Megabytes of a segment, after which a new one begins.")
    segment_hours: float = Field(default=24.0, gt=0, description="Hours after which a new segment begins.")
    append_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest wait for the disk, for Postgres, or for another process that writes; then 503.",
    )
    lease_s: float = Field(
        default=15.0,
        ge=1,
        description="On Postgres: seconds without a sign of life after which another host's worker takes a role over.",
    )
    away_s: float = Field(
        default=3600.0,
        ge=0,
        description="On Postgres: seconds that a trainer, rollout or housekeeping worker waits for a server that is away; then it ends and "
        "starts anew.",
    )
    encrypt: Encrypt = Field(
        default=Encrypt.NONE,
        description="Encrypt text, tokens, comments and corrections at rest, under one key per 'tenant' or per 'user'.",
    )
    master_key: Path | None = Field(
        default=None,
        description="A file of 32 or more random bytes that the keys are wrapped with; unset: not wrapped.",
    )

    @field_validator("namespace")
    @classmethod
    def _a_schema(cls, namespace: str) -> str:
        if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", namespace):
            raise ValueError(
                "no name for a schema; use up to 63 of a-z, 0-9 and _, no digit first, and not pg_, which is Postgres's own"
            )
        return namespace
