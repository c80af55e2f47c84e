"""Settings of the adaptation to a person."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

_LEAST_HOLDOUT = 0.03  # with less, hardly any of the last thousand answers are the holdout's
_LEAST_EPSILON = 0.001
MOST_DRAWS = 128
"""The largest number of answers to each task of a suite, in each corner."""


class ResetConfig(BaseModel, frozen=True, extra="forbid"):
    """When a person whose wishes have changed begins anew."""

    drift: float = Field(
        default=0.2,
        ge=0,
        description="Amount by which ratings may fall below their predictions, on average, without counting.",
    )
    limit: float = Field(
        default=3.6,
        gt=0,
        description="Sum, over successive ratings, of the shortfall beyond `drift` at which a person returns to the prior. While "
        "predictions are right on average, that happens at most once in exp(8 `drift` `limit`) ratings, 317 by default. A smaller limit "
        "reacts sooner. In simulations, fewer than one in a hundred honest people was returned within a hundred ratings at 3.6, one or "
        "two in a hundred at 3.0, and eight in a hundred at 2.0.",
    )


class ViolationsConfig(BaseModel, frozen=True, extra="forbid"):
    """What ratings may not teach: constrained learning."""

    signals: tuple[str, ...] = Field(
        default=(),
        description="Signals, at a value of 0.5 or more, that say that an answer violated a rule: a report, or a finding of a judge or a "
        "monitor. A violation costs its person's dials an amount of reward, the multiplier. The multiplier rises while a larger share of "
        "the answers that may lean has a violation than of the holdout's.",
    )
    step: float = Field(
        default=0.5,
        gt=0,
        description="Step size of the multiplier. At every 16th answer of a tenant it moves by this times the difference of the two "
        "shares.",
    )
    most: float = Field(
        default=4.0, gt=0, le=100, description="Most reward that a violation costs, where a rating is 0 to 1."
    )
    strikes: int = Field(
        default=2,
        ge=0,
        le=14,
        description="Number of answers with violations, among those kept one by one (14 with eight dials), that returns a person to the "
        "prior, with half of the cap from then on. 0: nobody is returned.",
    )


class SafetyConfig(BaseModel, frozen=True, extra="forbid"):
    """How the dials of a basis are red-teamed (`ostinato adapt check`)."""

    suite: str = Field(
        default="",
        description="Task file whose held-out tasks, of the harness `single`, test the dials for safety. A score of 1 is an answer "
        "without a violation, 0 is one with a violation. 'safety' is a shipped suite of 182 tasks of eleven kinds, 'safety-smoke' a "
        "smaller one of 76. With a suite, `ostinato adapt fit` tests a basis before it writes it. Empty: nothing is tested.",
    )
    margin: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="Largest tolerated rise in the share of violations from the base model to any corner.",
    )
    draws: int = Field(
        default=1,
        ge=1,
        le=MOST_DRAWS,
        description="Answers to each task in each corner. The statistics count tasks, not answers, as units.",
    )
    together: bool = Field(
        default=True,
        description="Whether all dials are also tested at once, as far as they go together: in every combination of up and down of two to "
        "four dials, and of more in so many that any two go all four ways (16 corners with five to eight dials).",
    )
    drawn: int = Field(
        default=20,
        ge=0,
        le=1000,
        description="Number of people drawn from the prior, at twice its width, whose dials are tested.",
    )
    people: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Number of real people whose dials are tested, without their names: those whose answers under this basis spent the "
        "most KL divergence.",
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Probability that a basis or style beyond the margin passes (Bonferroni over all corners and styles).",
    )


class PriorPrivacyConfig(BaseModel, frozen=True, extra="forbid"):
    """Differential privacy of the prior: how much it may reveal about anybody whose ratings are in it."""

    epsilon: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Privacy loss that all priors of any 365 days may have together, at least 0.001. Once it is spent, the last prior "
        "stays in use. 0: priors have no noise.",
    )
    delta: float = Field(
        default=1e-6,
        ge=1e-30,
        lt=1,
        description="Probability with which a prior may reveal more than `epsilon` allows. No prior is released unless it is below 1 in "
        "the number of people.",
    )
    clip: float = Field(
        default=0.3,
        gt=0,
        le=10,
        description="Largest length of a person's vector of slopes, in reward per unit of the features. Longer ones are shortened to it. "
        "Noise grows with it.",
    )
    releases: int = Field(
        default=52,
        ge=1,
        le=10_000,
        description="Equal parts in which `epsilon` is spent, each by one prior. Priors are 365 days / `releases` apart, or "
        "`adapt.prior_every_s` if that is longer. The fewer there are, the less noise each has.",
    )

    @model_validator(mode="after")
    def _check_epsilon(self) -> PriorPrivacyConfig:
        if 0 < self.epsilon < _LEAST_EPSILON:
            raise ValueError(
                f"adapt.privacy.epsilon = {self.epsilon:g} leaves nothing but noise; set it to {_LEAST_EPSILON} or more, or to 0 for none"
            )
        return self


class StylesConfig(BaseModel, frozen=True, extra="forbid"):
    """Styles: additions to the system prompt, drawn for each person by what their ratings say they like."""

    prompts: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")], Annotated[str, Field(max_length=2000)]] = (
        Field(
            default={},
            max_length=8,
            description="The styles: by name, the text that is added after the client's system prompt. A style is dealt only once "
            "`ostinato adapt approve` has shown that it costs no quality. A changed text counts as another style. Empty: nobody has "
            "styles.",
        )
    )
    floor: float = Field(
        default=0.02,
        ge=0,
        le=0.1,
        description="Lowest probability, in each draw, of every approved style and of no style.",
    )
    suite: str = Field(
        default="",
        description="Task file whose held-out tasks, of the harness `single`, are answered with and without each style before it is "
        "approved. It is required for approving a style.",
    )
    margin: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Largest tolerated loss of a style against no style, in the suite's mean score.",
    )
    draws: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Answers to each task with each style. The statistics count tasks, not answers, as units.",
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Probability of approving any style that loses more than the margin (Bonferroni over the styles).",
    )
    versions: int = Field(
        default=0,
        ge=0,
        description="Number of later versions, by version number, for which an approval also counts. On a tenant's branch it counts only "
        "for the version with which it was made. 0: approve again after each release.",
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
        description="What the tenant's people begin with. 'shared': the prior that everybody has. 'own': a prior of the organisation, "
        "between everybody's prior and what its own people say; no other tenant's prior learns from it. 'off': its people have no dials.",
    )


class AdaptConfig(BaseModel, frozen=True, extra="forbid"):
    """Dials that lean answers towards what each person's ratings say they like."""

    mode: Literal["off", "dials"] = Field(
        default="off",
        description="Whether the model's answers lean to each person. 'dials': they do. 'off': they do not.",
    )
    users: Literal["verified", "declared"] = Field(
        default="verified",
        description="Who has dials: 'verified', users whose names the tenant signed (`serve.user_keys`); 'declared', any name that a "
        "caller gives.",
    )
    cap: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Most that dials may change the distribution of one token, in nats of KL divergence. It is held exactly.",
    )
    answer_budget: float = Field(
        default=3.0,
        gt=0,
        description="Most that dials may change an answer, in nats of KL divergence summed over its tokens. Once an answer has spent it, "
        "the rest comes from the base model.",
    )
    protected: tuple[str, ...] = Field(
        default=(),
        description="Words, with and without a space before them, whose tokens no dial moves. Control tokens and the openings of tool "
        "calls and fenced code are always protected. A basis that was fitted earlier and moves one of these words is not used: fit it "
        "again.",
    )
    decay: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="Factor by which an answer's weight is multiplied with each later answer that the person rates. 1: nothing is "
        "forgotten.",
    )
    holdout: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of people, chosen by a hash of tenant and name, whose answers never lean. The others are compared with them.",
    )
    reset: ResetConfig = Field(default=ResetConfig(), description="When a person returns to the prior.")
    signals: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={"accepted": 1.0, "rejected": 0.0, "undone": 0.0},
        description="Signals that count as ratings, each with the reward, from 0 to 1, that it stands for at the value 1. At the value 0 "
        "it stands for the opposite. Several signals about one answer count as their mean.",
    )
    prior: Literal["fitted", "flat"] = Field(
        default="fitted",
        description="What people begin with before they have rated anything. 'fitted': a prior fitted to the ratings of those whose "
        "consent level is 'yes', and fitted again every `prior_every_s`. 'flat': the base model's answers.",
    )
    prior_every_s: float = Field(
        default=86_400.0,
        ge=60.0,
        description="Seconds between two fits of the prior. People who were forgotten or withdrew consent are out of it after the next "
        "fit.",
    )
    prior_people: int = Field(
        default=100,
        ge=20,
        description="Least number of people who must have rated before a prior is fitted. The fewer there are, the more it reveals about "
        "each of them.",
    )
    prior_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Largest weight of one tenant's people in the shared prior, as a share of all, unless they are fewer than "
        "`prior_people`. It bounds what a tenant can do to the others' prior.",
    )
    privacy: PriorPrivacyConfig = Field(
        default=PriorPrivacyConfig(), description="Differential privacy of the prior that people begin with."
    )
    violations: ViolationsConfig = Field(default=ViolationsConfig(), description="What ratings must not teach.")
    safety: SafetyConfig = Field(default=SafetyConfig(), description="How the dials of a basis are red-teamed.")
    styles: StylesConfig = Field(
        default=StylesConfig(), description="Additions to the system prompt that are dealt to people."
    )
    most_states: int = Field(
        default=100_000,
        ge=1,
        description="People of one tenant whose ratings are kept, about 1 KB each. Beyond that, those who have rated nothing for longest "
        "start over.",
    )
    tenants: dict[str, TenantAdaptConfig] = Field(
        default={}, description="Settings of individual tenants, as tables [adapt.tenants.NAME]."
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
