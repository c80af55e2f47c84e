"""The configuration section of the gateway, including Auto's arms and the judge of next messages.

How the arms' shares change is set in `release.auto`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from ostinato.core.records import Consent

# ---------------------------------------------------------------- consent


class PrivacyConfig(BaseModel, frozen=True, extra="forbid"):
    """What may be done with people's turns. The strictest applies: of these settings, the person's choice and the request.

    Example: ``PrivacyConfig(train=Consent.YES, tenants={"bank": Consent.NEVER})``
    """

    train: Consent = Field(
        default=Consent.YES,
        description="The most that may be done with people's turns. 'never': they are answered, and no word of them is stored. "
        "'aggregate': they are stored and count in metrics. 'adapt': the user's own dials may also learn from them. 'yes': the weights "
        "may learn from them, too.",
    )
    tenants: dict[str, Consent] = Field(
        default_factory=dict[str, Consent],
        description="The same limit for particular tenants, by tenant. Each tenant must have a key. A value that allows more than "
        "`privacy.train` has no effect.",
    )
    store_false: Consent = Field(
        default=Consent.NEVER,
        description="The consent level that a request with `store: false` asks for. 'yes' ignores the field, for clients that send it "
        "without being asked to, as Codex does with every call.",
    )

    scrub: Literal["off", "mask", "hold"] = Field(
        default="off",
        description="What is done about secrets and personal data in requests. 'mask': placeholders replace them before the model sees "
        "them, and the originals are put back into answers; the log and the trainer never hold them. 'hold': nothing is changed, and a "
        "turn that contains any is not learned from. 'off': they are not looked for.",
    )
    scrub_ignored: tuple[str, ...] = Field(
        default=("IP",),
        description="Kinds that are not looked for, by the names that the placeholders use: IP, EMAIL, PHONE, CARD, IBAN, NATIONAL_ID, "
        "PASSWORD, API_KEY and so on.",
    )

    @field_validator("scrub_ignored")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        from ostinato.serve.secret_detector import KINDS  # not for every command that reads the configuration

        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"there is no kind {kind!r}; choose from {', '.join(KINDS)}")
        return kinds

    def at_most(self, tenant: str) -> Consent:
        """Return the most that may be done with a tenant's turns."""
        return Consent.strictest(self.train, self.tenants.get(tenant, Consent.YES))


# ---------------------------------------------------------------- Auto


_NAME = r"^[a-z][a-z0-9_-]{0,31}$"


def check_url(url: str, whose: str) -> None:
    """Raise ValueError unless this is a base URL for an outside model, without credentials."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError(f"the url of {whose} holds a password; name a variable in key_env instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"url {url!r} of {whose} must be http(s)://host/path")


class AutoArm(BaseModel, frozen=True, extra="forbid"):
    """One arm: either a slot that is served here, or an outside model (`url` and `model`) with OpenAI's chat completions API.

    Example: ``AutoArm(name="large", url="https://api.example.com/v1", model="large-2", key_env="LARGE_KEY", answer_price=8.0)``
    """

    name: str = Field(pattern=_NAME, description="The arm's name in the log, in metrics and to clients.")
    slot: Literal["live", "canary", "previous", "control"] | None = Field(
        default=None,
        description="The slot that answers. canary and previous are available only while a trial uses them.",
    )
    url: str = Field(
        default="", description="Base URL of an outside model, up to and including /v1. Redirects are not followed."
    )
    model: str = Field(default="", description="The outside model's name at that API.")
    key_env: str = Field(
        default="", description="Environment variable that holds the outside model's key. Empty: no key."
    )
    budget_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="The outside API's name of the field for the token budget."
    )
    prompt_price: float = Field(default=0.0, ge=0.0, description="Price of a million prompt tokens, in your currency.")
    answer_price: float = Field(default=0.0, ge=0.0, description="Price of a million answer tokens, in your currency.")
    tenants: tuple[str, ...] = Field(
        default=(), description="Tenants whose conversations this arm may answer. Empty: all tenants."
    )
    silence_s: float = Field(
        default=30.0,
        gt=0.0,
        description="Longest pause within the outside model's answer, in seconds; then the call fails.",
    )
    longest_s: float = Field(
        default=300.0,
        gt=0.0,
        description="Longest an outside model's answer may take, in seconds. What a client takes to read does not count.",
    )
    max_open: int = Field(
        default=64, ge=1, description="Most outside calls at once. While that many are open, the arm is not drawn."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> AutoArm:
        if (self.slot is None) == (not self.url):
            raise ValueError(f"arm {self.name!r} needs either slot or url")
        if self.url:
            check_url(self.url, f"arm {self.name!r}")
            if not self.model:
                raise ValueError(f"arm {self.name!r} has a url and needs the model's name at that API")
        return self

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """The cost of these tokens, in the configured currency."""
        return (prompt_tokens * self.prompt_price + answer_tokens * self.answer_price) / 1e6


class AutoConfig(BaseModel, frozen=True, extra="forbid"):
    """Auto's arms. Without any, no model of this name exists.

    Example: ``AutoConfig(arms=(AutoArm(name="live", slot="live"), AutoArm(name="large", url=..., model=...)))``
    """

    name: str = Field(
        default="auto",
        min_length=1,
        max_length=512,
        description="Name of the model that routes between the arms, as clients send it.",
    )
    arms: tuple[AutoArm, ...] = Field(
        default=(), max_length=16, description="The arms. The model exists once two or more are given."
    )
    failures: int = Field(
        default=5, ge=1, description="Consecutive failed calls after which an outside model is not called for a while."
    )
    rest_s: float = Field(
        default=15.0,
        gt=0.0,
        description="Seconds until a failing outside model is called again. The pause doubles after each further failure.",
    )
    longest_rest_s: float = Field(default=600.0, gt=0.0, description="Longest such pause, in seconds.")
    episodes: int = Field(
        default=100_000, ge=1, description="Episodes whose arm is remembered. For an older one the arm is drawn again."
    )

    @model_validator(mode="after")
    def _different(self) -> AutoConfig:
        names = [arm.name for arm in self.arms]
        slots = [arm.slot for arm in self.arms if arm.slot is not None]
        if len(set(names)) < len(names) or len(set(slots)) < len(slots):
            raise ValueError(f"two of the arms {', '.join(names)} have the same name or the same slot")
        return self


# ---------------------------------------------------------------- the judge


class JudgeConfig(BaseModel, frozen=True, extra="forbid"):
    """A model that labels next messages in addition to the rules; without a `url` there is no judge.

    Example: ``JudgeConfig(url="https://api.example.com/v1", model="small-2", key_env="JUDGE_KEY", share=0.1)``
    """

    url: str = Field(
        default="",
        description="Base URL, up to and including /v1, of a judge model with OpenAI's chat completions API. The judge is sent a user's "
        "request, the beginning and end of the answer, and the user's next message. They are sent in plain text whatever record.encrypt "
        "says, but without the user's identity. Empty: only the rules judge.",
    )
    model: str = Field(default="", description="The judge model's name at that API.")
    key_env: str = Field(default="", description="Environment variable that holds the judge's key. Empty: no key.")
    tenants: tuple[str, ...] = Field(
        default=(), description="Tenants whose messages may be sent to the judge. Empty: all tenants."
    )
    share: float = Field(default=1.0, ge=0.0, le=1.0, description="Share of the messages that the judge labels.")
    calls_per_minute: int = Field(
        default=60,
        ge=1,
        description="Most calls to the judge in any minute. Messages beyond that are labelled by the rules only.",
    )
    timeout_s: float = Field(default=20.0, gt=0.0, description="Longest wait for the judge's answer, in seconds.")
    decides: bool = Field(
        default=False,
        description="False: the judge's label is a separate signal (judged_dissatisfied, ...), which a reward function must read "
        "explicitly. True: it replaces the rules' signal, which is retracted.",
    )
    schema_sent: bool = Field(
        default=True,
        description="Send a JSON schema with each question (response_format). Set it to false for endpoints that support no schemas: the "
        "prompt then describes the answer's format.",
    )
    max_tokens: int = Field(
        default=64,
        ge=8,
        le=8192,
        description="Token budget of the judge's answer. A model that reasons first needs more.",
    )
    budget_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="The judge API's name of the field for the token budget."
    )
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        le=2.0,
        description="The judge's sampling temperature. Some reasoning models accept only 1.",
    )
    prompt_price: float = Field(default=0.0, ge=0.0, description="Price of a million prompt tokens, in your currency.")
    answer_price: float = Field(default=0.0, ge=0.0, description="Price of a million answer tokens, in your currency.")

    @model_validator(mode="after")
    def _whole(self) -> JudgeConfig:
        if self.url:
            check_url(self.url, "the judge")
            if not self.model:
                raise ValueError("the judge has a url and needs the model's name at that API")
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


# ---------------------------------------------------------------- the gateway


class QuotaConfig(BaseModel, frozen=True, extra="forbid"):
    """One tenant's limits at the gateway.

    Example: ``QuotaConfig(calls_per_s=20.0, open_samples=64)``
    """

    calls_per_s: float = Field(default=5_000.0, gt=0, description="Model calls per second. More get 429.")
    burst: float = Field(default=10_000.0, ge=1, description="Model calls that may arrive at once after a pause.")
    open_samples: int = Field(
        default=512, ge=1, description="Samples (calls times n) in progress at once. More get 429."
    )
    max_n: int = Field(default=128, ge=1, le=128, description="Samples per call (n). More get 400.")
    tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description="Prompt and answer tokens per minute. Until a call ends, its whole token budget counts. 0: no limit.",
    )
    events_per_s: float = Field(default=5_000.0, gt=0, description="Feedback events per second. More get 429.")
    bytes_per_s: float = Field(
        default=8.0 * 2**20,
        gt=0,
        description="Bytes of request bodies per second. After a pause, four times as many may arrive at once. More get 429.",
    )
    mb_per_day: float = Field(
        default=0.0,
        ge=0,
        description="Megabytes of request bodies per day. It bounds the disk space that a tenant's calls and feedback take. More get "
        "429. 0: no limit.",
    )


SHARED = QuotaConfig(calls_per_s=50.0, burst=200.0, open_samples=64, events_per_s=500.0, mb_per_day=20_000.0)
"""The default limits of each tenant where several share a server: enough for a product's users or a team's agents."""


class SamplingRule(BaseModel, frozen=True, extra="forbid"):
    """Sampling parameters that override the client's.

    Example: ``SamplingRule(temperature=1.0)``
    """

    temperature: float | None = Field(
        default=None, ge=0.0, le=2.0, description="Sampling temperature. None: the client's."
    )
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Nucleus probability. None: the client's.")


class OtlpConfig(BaseModel, frozen=True, extra="forbid"):
    """Where spans of answered calls are sent.

    Example: ``OtlpConfig(endpoint="http://127.0.0.1:4318/v1/traces")``
    """

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://.+)?$",
        description="URL of a collector that receives traces by OTLP over HTTP. Empty: no spans are sent.",
    )
    headers: dict[str, SecretStr] = Field(
        default_factory=dict[str, SecretStr], description="HTTP headers of each export, such as one with a key."
    )
    service: str = Field(default="ostinato", min_length=1, description="Service name in the spans.")
    timeout_s: float = Field(default=5.0, gt=0, description="Longest wait for the collector, in seconds.")


class ServeConfig(BaseModel, frozen=True, extra="forbid"):
    """How the gateway admits, times and assigns requests.

    Example: ``ServeConfig(api_keys=("acme:sk-0123456789abcdef",), control_share=0.2)``
    """

    api_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="Keys that clients may use, each 'key' or 'tenant:key'. Empty: requests are not authenticated, and the gateway binds "
        "only to loopback.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="File with more keys in the format of `serve.api_keys`, one per line (# begins a comment). It is read again when it "
        "changes, but a new tenant needs a restart. While the file is missing or unusable, the old keys stay valid. It must give other "
        "users no permissions.",
    )
    user_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="Secrets with which a tenant signs the names of its users, each 'secret' or 'tenant:secret'.",
    )
    admin_key: SecretStr | None = Field(
        default=None, description="The operator's key. A request with it may name its weight slot and read all metrics."
    )
    metrics_key: SecretStr | None = Field(
        default=None, description="A key for Prometheus: it reads all of GET /metrics and opens nothing else."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names besides loopback at which a server without keys answers. Web pages of these hosts may also read the "
        "answers of any server. '*': any host.",
    )
    control_share: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Share of users who stay on the control arm, whose weights are frozen."
    )
    learner_share: float = Field(
        default=0.0,
        ge=0.0,
        le=0.5,
        description="Share of the users outside the control arm who are served the trainer's newest step (arm `learner`). The step must "
        "first pass a smoke test and `evaluate.bars`, but not the gate, so that feedback on it is learned from while it is fresh. Values "
        "from 0.01 to 0.05 are sensible. The users are always the same, and all have a name. The arm takes the memory of up to two more "
        "versions. 0: nobody.",
    )
    arm_users: Literal["declared", "verified"] = Field(
        default="declared",
        description="Who may be assigned to arms other than live: 'declared', any name that a caller gives; 'verified', only users that "
        "the tenant proved.",
    )
    branches: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)*\z", max_length=64)], ...] = Field(
        default=(),
        description="Tenants whose calls are answered by a version of their own, as soon as `ostinato ship VERSION --for TENANT` has "
        "named one or their own trainer (`learn.tenants`) has started. Each takes the memory of one more version. Their users are on no "
        "other arm, and their turns never teach the shared weights (`arm:branch`, `arm:shared`).",
    )
    branch_holdout: float = Field(
        default=0.1,
        ge=0.0,
        lt=1.0,
        description="Share of the users of a tenant in `serve.branches` who stay on live (arm `shared`). A trained branch is guarded by "
        "comparison with them. If the branch is only served, nobody stays. 0: nobody stays, and the branch has no guard.",
    )
    page: bool = Field(default=True, description="Serve the web page at '/'.")
    secure_cookie: bool = Field(
        default=False,
        description="Browsers send the page's cookie over HTTPS only. Set it if a proxy in front of the gateway speaks HTTPS. Without "
        "such a proxy nobody could sign in to the page.",
    )
    arm_salt: str = Field(
        default="ostinato", description="Salt of the hash that assigns users to arms. Changing it reassigns all users."
    )
    max_body_bytes: int = Field(
        default=2 * 1024 * 1024, ge=1024, description="Longest request body, in bytes. Longer ones get 413."
    )
    max_depth: int = Field(default=64, ge=4, le=500, description="Deepest nesting of a JSON body.")
    max_values: int = Field(default=100_000, ge=1_000, description="Most values in a JSON body. More get 413.")
    max_inflight: int = Field(
        default=512,
        ge=1,
        description="Samples in progress at once, over all tenants. More get 503. Half of them are reserved for the tenants, in equal "
        "shares.",
    )
    connections_per_address: int = Field(
        default=1024,
        ge=0,
        description="Connections that one address (for IPv6 one /64 network) may have open. More are closed at once. 0: no limit.",
    )
    first_token_s: float = Field(
        default=0.0,
        ge=0,
        description="Longest acceptable wait for the first token, in seconds. While more than a tenth of people's calls wait longer, "
        "fewer and fewer calls of simulated worlds and of the gate are admitted at once. 0: no limit.",
    )
    tokens_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Lowest acceptable rate of the rest of an answer, in tokens per second; it is used like `first_token_s`. 0: no limit.",
    )
    give_way_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest time that a call of a simulated world or of the gate waits for people's calls, in seconds.",
    )
    quota: QuotaConfig | None = Field(
        default=None,
        description="Limits of each tenant. Default: wide limits; or, if the keys name several tenants, 50 calls per second, 200 at "
        "once, 64 samples in progress, 500 events per second and 20,000 MB per day for each of them.",
    )
    tenant_quotas: dict[str, QuotaConfig] = Field(
        default_factory=dict[str, QuotaConfig],
        description="Limits of particular tenants, by tenant, in place of `quota`. Each tenant must have a key.",
    )
    sampling: dict[str, SamplingRule] = Field(
        default_factory=dict[str, SamplingRule],
        description="Sampling parameters that override those of a tenant's calls, by tenant ('*': all others). Answers sampled at a "
        "temperature of 0 teach nothing. Calls that name a slot keep their own parameters. The header X-Ostinato-Sampling names what was "
        "overridden.",
    )
    default_max_tokens: int = Field(default=512, ge=1, description="Token budget of a call that does not set one.")
    max_chars_per_token: int = Field(
        default=32,
        ge=4,
        description="Most characters of text per token of the context. Longer text is refused without being tokenised.",
    )
    body_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a request body, in seconds.")
    loading_wait_s: float = Field(
        default=20.0,
        ge=0,
        description="Longest wait of a call while the first weights load, in seconds; then it gets 503.",
    )
    chunk_timeout_s: float = Field(
        default=120.0, gt=0, description="Longest wait for the engine's next token, in seconds."
    )
    send_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait for a client to take the next piece of an answer, in seconds."
    )
    keep_alive_s: int = Field(
        default=75,
        ge=1,
        description="How long an idle connection stays open, in seconds. Set it above the keep-alive time of clients "
        "and load balancers.",
    )
    least_free_mb: float = Field(
        default=256.0,
        ge=0,
        description="Free space, in megabytes, below which feedback is refused with 507. What is left on the log's disk is reserved for "
        "turns.",
    )
    store_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="Longest wait for the log to confirm a write, in seconds; then the call gets 503.",
    )
    heartbeat_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds of silence after which a stream sends a comment, or Anthropic's `ping`, so that neither clients nor proxies "
        "hang up.",
    )
    compaction_share: float = Field(
        default=0.75,
        ge=0.25,
        le=0.9,
        description="Share of the context at which a conversation is compacted at the latest, if its client asks for compaction "
        "(context_management).",
    )
    compaction_least_tokens: int = Field(
        default=50_000,
        ge=256,
        description="Smallest token count that a client may set as the trigger for summarising its conversation within a call. Smaller "
        "ones get 400.",
    )
    compaction_most: int = Field(
        default=1_000,
        ge=1,
        description="Most summaries within calls of one conversation. A call that needs another gets 400.",
    )
    session_tokens: int = Field(
        default=4_000_000,
        ge=0,
        description="Tokens of past turns kept in memory, so that follow-up calls reuse their token ids.",
    )
    history_bytes: int = Field(
        default=64_000_000,
        ge=0,
        description="Bytes of parsed messages kept in memory. Each request of a conversation repeats the earlier messages, which are "
        "then not parsed again.",
    )
    previous_chars: int = Field(
        default=64_000_000,
        ge=0,
        description="Characters of past answers and their inputs kept in memory for calls that refer to them (previous_response_id, "
        "item_reference).",
    )
    next_message: bool = Field(
        default=False,
        description="Turn a user's next message into signals, by rules for English: dissatisfied (a retry, correction "
        "or complaint), praised, followed_up, interrupted, tool_rejected.",
    )
    judge: JudgeConfig = Field(
        default_factory=JudgeConfig, description="A model that labels next messages in addition to the rules."
    )
    session_rebuild_rows: int = Field(
        default=2_000, ge=0, description="Newest rows of the log that are read at the start to restore sessions."
    )
    otlp: OtlpConfig = Field(
        default_factory=OtlpConfig, description="Export of spans of answered calls to a collector."
    )
    auto: AutoConfig = Field(default_factory=AutoConfig, description="A model name that routes among several arms.")
    repeat_keys: int = Field(
        default=100_000,
        ge=0,
        description="Idempotency keys that are remembered, in equal shares for the tenants. They detect a key that is reused with "
        "another body.",
    )

    @model_validator(mode="after")
    def _something_to_judge(self) -> ServeConfig:
        if self.judge.url and not self.next_message:
            raise ValueError(
                "judge.url is set, but no messages are read; set serve.next_message = true, or leave judge.url out"
            )
        return self
