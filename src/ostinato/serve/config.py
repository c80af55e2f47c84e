"""The gateway's part of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field, SecretStr


class ServeConfig(BaseModel, frozen=True, extra="forbid"):
    """How the gateway admits, times and assigns requests.

    Example: ``ServeConfig(api_keys=("acme:sk-0123456789abcdef",), control_share=0.2)``
    """

    api_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="Keys that clients may use, each 'key' or 'tenant:key'. Empty: no authentication, loopback only.",
    )
    admin_key: SecretStr | None = Field(
        default=None, description="Key of the evaluation runner and the operator; lets a request name its weight slot."
    )
    control_share: float = Field(default=0.0, ge=0.0, le=1.0, description="Share of users on the frozen control arm.")
    canary_share: float = Field(default=0.0, ge=0.0, le=1.0, description="Share of users on the canary arm.")
    arm_salt: str = Field(default="ostinato", description="Changing it deals all users to the arms anew.")
    max_body_bytes: int = Field(default=2 * 1024 * 1024, ge=1024, description="Longest request body; beyond it 413.")
    max_depth: int = Field(default=64, ge=4, le=500, description="Deepest nesting of a JSON body.")
    max_inflight: int = Field(default=512, ge=1, description="Model calls served at once; beyond it 503.")
    default_max_tokens: int = Field(default=512, ge=1, description="Token budget of a call that names none.")
    body_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a request body, in seconds.")
    chunk_timeout_s: float = Field(
        default=120.0, gt=0, description="Longest wait for the engine's next token, in seconds."
    )
    send_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait for a client to take the next piece of a stream, in seconds."
    )
    session_tokens: int = Field(
        default=4_000_000, ge=0, description="Tokens of past turns kept in memory so that follow-ups reuse their ids."
    )
    session_rebuild_rows: int = Field(
        default=2_000, ge=0, description="How many of the log's last rows are read at the start to find sessions again."
    )
