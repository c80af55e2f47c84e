"""The configuration of the judge of next messages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from ostinato.serve.auto.config import AutoArm, check_url


class JudgeConfig(BaseModel, frozen=True, extra="forbid"):
    """A model that labels next messages in addition to the rules; without a `url` there is none.

    Example: ``JudgeConfig(url="https://api.example.com/v1", model="small-2", key_env="JUDGE_KEY", share=0.1)``
    """

    url: str = Field(
        default="",
        description="Base URL, up to and with /v1, of a judge model with OpenAI's chat completions API. It is sent a "
        "user's request, the beginning and end of the answer, and the user's next message, in plain text whatever "
        "record.encrypt says, but not the user's identity. Empty: only the rules judge.",
    )
    model: str = Field(default="", description="The model's name there.")
    key_env: str = Field(default="", description="Environment variable that holds the judge's key. Empty: no key.")
    tenants: tuple[str, ...] = Field(
        default=(), description="Tenants whose messages may be sent to the judge. Empty: all tenants."
    )
    share: float = Field(default=1.0, ge=0.0, le=1.0, description="Share of the messages that the judge labels.")
    calls_per_minute: int = Field(
        default=60, ge=1, description="Most calls in any minute; only the rules label further messages."
    )
    timeout_s: float = Field(default=20.0, gt=0.0, description="Longest wait for the judge's answer, in seconds.")
    decides: bool = Field(
        default=False,
        description="False: the judge's label is a signal of its own (judged_dissatisfied, ...), which a reward must "
        "read explicitly. True: it replaces the rules' signal, which is retracted.",
    )
    schema_sent: bool = Field(
        default=True,
        description="Send a JSON schema with each question (response_format). False, for endpoints without schemas: "
        "the prompt describes it.",
    )
    max_tokens: int = Field(
        default=64,
        ge=8,
        le=8192,
        description="Token budget of the judge's answer; a model that reasons first needs more.",
    )
    budget_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="The judge API's field for the token budget."
    )
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        le=2.0,
        description="The judge's sampling temperature; some reasoning models accept only 1.",
    )
    prompt_price: float = Field(default=0.0, ge=0.0, description="Price of a million prompt tokens, in your currency.")
    answer_price: float = Field(default=0.0, ge=0.0, description="Price of a million answer tokens, in your currency.")

    @model_validator(mode="after")
    def _whole(self) -> JudgeConfig:
        if self.url:
            check_url(self.url, "the judge")
            if not self.model:
                raise ValueError("the judge has a url and needs the model's name there")
        return self

    @property
    def arm(self) -> AutoArm:
        """The judge as an outside arm: URL, model, key, limits and prices."""
        return AutoArm(
            name="judge",
            url=self.url,
            model=self.model,
            key_env=self.key_env,
            budget_field=self.budget_field,
            prompt_price=self.prompt_price,
            answer_price=self.answer_price,
            silence_s=self.timeout_s,
            longest_s=self.timeout_s,
        )
