"""The configuration of Auto's arms. The router decides how their shares change (`release.auto`)."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, model_validator

_NAME = r"^[a-z][a-z0-9_-]{0,31}$"


def check_url(url: str, whose: str) -> None:
    """Raises ValueError if this is not a base URL for an outside model, or if it holds credentials."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError(f"the url of {whose} holds a password; name a variable in key_env instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"url {url!r} of {whose} must be http(s)://host/path")


class AutoArm(BaseModel, frozen=True, extra="forbid"):
    """One arm: a slot that is served here, or, with `url` and `model`, an outside model that speaks OpenAI's chat completions.

    Example: ``AutoArm(name="large", url="https://api.example.com/v1", model="large-2", key_env="LARGE_KEY", answer_price=8.0)``
    """

    name: str = Field(pattern=_NAME, description="The arm's name in the log, in metrics and to clients.")
    slot: Literal["live", "canary", "previous", "control"] | None = Field(
        default=None,
        description="The slot that answers. canary and previous are available only while a trial uses them.",
    )
    url: str = Field(
        default="", description="Base URL of an outside model, up to and with /v1. Redirects are not followed."
    )
    model: str = Field(default="", description="The outside model's name there.")
    key_env: str = Field(
        default="", description="Environment variable that holds the outside model's key. Empty: no key."
    )
    budget_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="The outside API's field for the token budget."
    )
    prompt_price: float = Field(default=0.0, ge=0.0, description="Price of a million prompt tokens, in your currency.")
    answer_price: float = Field(default=0.0, ge=0.0, description="Price of a million answer tokens, in your currency.")
    tenants: tuple[str, ...] = Field(
        default=(), description="Tenants whose conversations this arm may answer. Empty: all tenants."
    )
    silence_s: float = Field(
        default=30.0,
        gt=0.0,
        description="Longest pause in the outside model's answer, in seconds; then the call fails.",
    )
    longest_s: float = Field(default=300.0, gt=0.0, description="Longest call to the outside model, in seconds.")
    max_open: int = Field(
        default=64, ge=1, description="Most outside calls at once; while so many are open, the arm is not drawn."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> AutoArm:
        if (self.slot is None) == (not self.url):
            raise ValueError(f"arm {self.name!r} needs either slot or url")
        if self.url:
            check_url(self.url, f"arm {self.name!r}")
            if not self.model:
                raise ValueError(f"arm {self.name!r} has a url and needs the model's name there")
        return self

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """The cost of these tokens, in the configured currency."""
        return (prompt_tokens * self.prompt_price + answer_tokens * self.answer_price) / 1e6


class AutoConfig(BaseModel, frozen=True, extra="forbid"):
    """Auto's arms; without any, there is no model of this name.

    Example: ``AutoConfig(arms=(AutoArm(name="live", slot="live"), AutoArm(name="large", url=..., model=...)))``
    """

    name: str = Field(default="auto", min_length=1, max_length=512, description="The model name that clients send.")
    arms: tuple[AutoArm, ...] = Field(
        default=(), max_length=16, description="The arms; the model exists once two or more are given."
    )
    failures: int = Field(
        default=5, ge=1, description="Failed calls in a row after which an outside model is not called for a while."
    )
    rest_s: float = Field(
        default=15.0, gt=0.0, description="Seconds until it is tried again; doubled after each further failure."
    )
    longest_rest_s: float = Field(default=600.0, gt=0.0, description="Longest pause, in seconds.")
    episodes: int = Field(
        default=100_000, ge=1, description="Episodes whose arm is remembered; the arm of an older one is drawn anew."
    )

    @model_validator(mode="after")
    def _different(self) -> AutoConfig:
        names = [arm.name for arm in self.arms]
        slots = [arm.slot for arm in self.arms if arm.slot is not None]
        if len(set(names)) < len(names) or len(set(slots)) < len(slots):
            raise ValueError(f"two of the arms {', '.join(names)} have one name or one slot")
        return self
