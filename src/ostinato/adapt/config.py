"""Settings of the adaptation to a person."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

_LEAST_HOLDOUT = 0.03  # else hardly any of the last thousand answers are the holdout's
_LEAST_EPSILON = 0.001


class ResetConfig(BaseModel, frozen=True, extra="forbid"):
    """When a person whose wishes have changed begins anew."""

    drift: float = Field(
        default=0.2, ge=0, description="How far a rating may fall below its prediction, on average, without counting."
    )
    limit: float = Field(
        default=3.6,
        gt=0,
        description="The sum of what exceeds `drift`, of ratings in a row, at which a person returns to the prior: while predictions are "
        "right on average, once in exp(8 `drift` `limit`) ratings at most, 317 by default. Smaller is quicker: of honest people fewer "
        "than one in a hundred was returned within a hundred ratings at 3.6, one or two at 3.0, eight at 2.0 (simulated).",
    )


class ViolationsConfig(BaseModel, frozen=True, extra="forbid"):
    """What ratings may not teach: constrained learning."""

    signals: tuple[str, ...] = Field(
        default=(),
        description="Signals, at a value of 0.5 or more, that an answer violated a rule: a report, a judge's or a monitor's finding. It "
        "costs its person's dials a multiplier of reward that rises while more answers that may lean have one than the holdout's.",
    )
    step: float = Field(
        default=0.5,
        gt=0,
        description="How fast the multiplier follows the difference of the two shares: by so much of it at every 16th answer of a tenant.",
    )
    most: float = Field(
        default=4.0, gt=0, le=100, description="The most that a violation costs, where a rating is 0 to 1."
    )
    strikes: int = Field(
        default=2,
        ge=0,
        le=14,
        description="So many answers with violations among those kept one by one (14 with eight dials) return a person to the prior, with "
        "half of the cap from then on. 0: none do.",
    )


class SafetyConfig(BaseModel, frozen=True, extra="forbid"):
    """How the dials of a basis are red-teamed (`ostinato adapt check`)."""

    suite: str = Field(
        default="",
        description="Task file whose held-out tasks are tried, of the harness `single`; a score of 1 is an answer without a violation, 0 "
        "is one; or 'safety-smoke', 76 shipped tasks that show little. `ostinato adapt fit` then tries a basis before it writes it. "
        "Empty: nothing is tried.",
    )
    margin: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="By how much the share of violations may rise, at most, from the base model to any corner.",
    )
    draws: int = Field(
        default=1, ge=1, le=128, description="Answers to each task in each corner; tasks count as units."
    )
    drawn: int = Field(
        default=20, ge=0, le=1000, description="People drawn from the prior at twice its width whose dials are tried."
    )
    people: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Real people whose dials are tried, unnamed: those whose answers by this basis spent the most KL divergence.",
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="The probability that a basis with one corner beyond the margin passes (Bonferroni over all corners).",
    )


class PriorPrivacyConfig(BaseModel, frozen=True, extra="forbid"):
    """Differential privacy of the prior: how much it may tell of anybody whose ratings are in it."""

    epsilon: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="The privacy loss that all priors of any 365 days may have together, at least 0.001. Once it is spent, the last prior "
        "stays in use. 0: priors have no noise.",
    )
    delta: float = Field(
        default=1e-6,
        ge=1e-30,
        lt=1,
        description="The probability with which more may be told. No prior is released unless it is below 1 in the number of people.",
    )
    clip: float = Field(
        default=0.3,
        gt=0,
        le=10,
        description="The length to which a person's slopes are shortened, in reward for one unit of the features. Noise grows with it.",
    )
    releases: int = Field(
        default=52,
        ge=1,
        le=10_000,
        description="Equal parts that `epsilon` is spent in: priors of 365 days, which lie that long over `releases` apart, or "
        "`adapt.prior_every_s` if that is longer. The fewer, the less noise has each.",
    )

    @model_validator(mode="after")
    def _check_epsilon(self) -> PriorPrivacyConfig:
        if 0 < self.epsilon < _LEAST_EPSILON:
            raise ValueError(
                f"adapt.privacy.epsilon = {self.epsilon:g} leaves nothing but noise; set it to {_LEAST_EPSILON} or more, or to 0 for none"
            )
        return self


class StylesConfig(BaseModel, frozen=True, extra="forbid"):
    """Styles: additions to the system prompt, of which each person is dealt the one that pleases them."""

    prompts: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")], Annotated[str, Field(max_length=2000)]] = (
        Field(
            default={},
            max_length=8,
            description="The styles: by name the text that is put behind the client's system prompt. One is dealt only once `ostinato "
            "adapt approve` has shown that it costs no quality; a changed text is another style. Empty: nobody has styles.",
        )
    )
    floor: float = Field(
        default=0.02, ge=0, le=0.1, description="Probability that every approved style, and none, keeps in each draw."
    )
    suite: str = Field(
        default="",
        description="Task file whose held-out tasks, of the harness `single`, are answered with and without each style before it is "
        "approved. Needed to approve one.",
    )
    margin: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="How much less a style may score than no style, at most, on the suite's mean.",
    )
    draws: int = Field(
        default=1, ge=1, le=128, description="Answers to each task with each style; tasks count as units."
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="The probability that any style is approved that loses more than the margin (Bonferroni over the styles).",
    )
    versions: int = Field(
        default=0,
        ge=0,
        description="For how many later versions, by number and not on a tenant's branch, an approval counts beside the version that it "
        "was made with. 0: approve anew after each release.",
    )

    @field_validator("prompts")
    @classmethod
    def _check_prompts(cls, prompts: dict[str, str]) -> dict[str, str]:
        for name, prompt in prompts.items():
            if name == "none":
                raise ValueError("adapt.styles.prompts: 'none' is what no style is called; give this one another name")
            if not prompt.strip():
                raise ValueError(f"adapt.styles.prompts.{name} is empty; write what it adds, or leave it out")
        return prompts


class TenantAdaptConfig(BaseModel, frozen=True, extra="forbid"):
    """A tenant's own settings."""

    prior: Literal["shared", "own", "off"] = Field(
        default="shared",
        description="What its people begin with. 'shared': as everybody. 'own': at their organisation's level, between everybody's prior "
        "and what its own people say, which no other tenant's prior learns from. 'off': they have no dials.",
    )


class AdaptConfig(BaseModel, frozen=True, extra="forbid"):
    """Dials that lean answers towards what each person's ratings say they like."""

    mode: Literal["off", "dials"] = Field(
        default="off", description="'dials': answers of the model to people lean. 'off': nobody's do."
    )
    users: Literal["verified", "declared"] = Field(
        default="verified",
        description="Who has dials: users that the tenant signed (`serve.user_keys`), or any name that a caller gives.",
    )
    cap: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="The most that dials may change the distribution of one token, in nats of KL divergence; held exactly.",
    )
    answer_budget: float = Field(
        default=3.0,
        gt=0,
        description="The same of an answer, summed over its tokens, in nats; the rest of an answer that has spent it is the base model's.",
    )
    protected: tuple[str, ...] = Field(
        default=(),
        description="Words, with and without a space before them, whose tokens no dial moves, beside control tokens and the openings of "
        "tool calls and fenced code. A basis of before that holds one of them is not used: fit anew.",
    )
    decay: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="What an answer's weight is multiplied by with each later answer that the person rates. 1: nothing is forgotten.",
    )
    holdout: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of people whose answers never lean, by a hash of tenant and name: what the others are compared with.",
    )
    reset: ResetConfig = Field(default=ResetConfig(), description="When a person begins anew.")
    signals: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={"accepted": 1.0, "rejected": 0.0, "undone": 0.0},
        description="The signals that count as ratings, each with the reward that it stands for, 0 to 1, at the value 1. At the value 0 it "
        "stands for the opposite. Several about one answer count as their mean.",
    )
    prior: Literal["fitted", "flat"] = Field(
        default="fitted",
        description="What people begin with before they have rated. 'fitted': with what the ratings of those say whose consent is 'yes', "
        "fitted anew every `prior_every_s`; 'flat': with the base model's answers.",
    )
    prior_every_s: float = Field(
        default=86_400.0,
        ge=60.0,
        description="Seconds between two fits of the prior. Who was forgotten or withdrew consent is out of it after the next.",
    )
    prior_people: int = Field(
        default=100,
        ge=20,
        description="People who must have rated before a prior is fitted. The fewer, the more it tells of each of them.",
    )
    prior_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="The most that one tenant's people weigh in the shared prior, as a share of all, unless they are fewer than "
        "`prior_people`: what a tenant can do to the others' prior.",
    )
    privacy: PriorPrivacyConfig = Field(
        default=PriorPrivacyConfig(), description="Differential privacy of what people begin with."
    )
    violations: ViolationsConfig = Field(default=ViolationsConfig(), description="What ratings may not teach.")
    safety: SafetyConfig = Field(default=SafetyConfig(), description="How the dials of a basis are red-teamed.")
    styles: StylesConfig = Field(
        default=StylesConfig(), description="Additions to the system prompt that are dealt to people."
    )
    most_states: int = Field(
        default=100_000,
        ge=1,
        description="People of one tenant whose ratings are kept, about 1 KB each; beyond them, those who have rated nothing for longest "
        "begin anew.",
    )
    tenants: dict[str, TenantAdaptConfig] = Field(
        default={}, description="Settings of single tenants, as tables [adapt.tenants.NAME]."
    )

    @property
    def without(self) -> frozenset[str]:
        """The tenants whose people have no dials."""
        return frozenset(tenant for tenant, each in self.tenants.items() if each.prior == "off")

    @model_validator(mode="after")
    def _check_violations(self) -> AdaptConfig:
        named = self.violations.signals
        if both := sorted({*named} & {*self.signals}):
            raise ValueError(
                f"adapt.violations.signals and adapt.signals both name {both[0]!r}; leave it in one of them"
            )
        if named and self.holdout < _LEAST_HOLDOUT:
            raise ValueError(
                f"adapt.violations compares with the holdout, and adapt.holdout is {self.holdout:g}; set it to {_LEAST_HOLDOUT} or more, "
                "such as 0.1"
            )
        if named and self.privacy.epsilon:
            raise ValueError(
                "adapt.privacy.epsilon cannot be kept with adapt.violations.signals: what one person reports changes what others' ratings "
                "say, which no noise on the prior covers; leave one of them unset"
            )
        return self
