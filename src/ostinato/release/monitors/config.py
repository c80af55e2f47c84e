"""Configuration of the monitors of the model's behaviour."""

from __future__ import annotations

from pydantic import BaseModel, Field

DAY = 86_400.0


class MonitorsConfig(BaseModel, frozen=True, extra="forbid"):
    """Monitors of reward hacking."""

    enabled: bool = Field(default=True, description="False: no behaviour is watched.")
    poll_s: float = Field(default=1.0, gt=0.0, description="Pause between looks at the log.")
    pauses: bool = Field(
        default=False,
        description="Ship nothing while an alarm about a harmful shift stands, or while the control arm, once a reference, is silent "
        "(`stale_sessions`) and no other is heard: nothing would be seen then. Look at the alarms of some days before you switch it on.",
    )
    off: tuple[str, ...] = Field(default=(), description="Built-in behaviour rates that are not watched.")
    own: dict[str, str] = Field(
        default_factory=dict,
        description="Rates of your own: a name, and the function as 'module:function'. It takes a `TurnText` and answers in [0, 1] or "
        "None; it runs in the release worker for each turn.",
    )
    reference: tuple[str, ...] = Field(
        default=("previous", "control"),
        description="Arms on an earlier release whose people say what is usual now: the first of these that has traffic. Without "
        "one, what is usual is learned once and stays. People without a name are always served by live: beside a reference arm they are "
        "left out.",
    )
    false_alarm_sessions: float = Field(
        default=125_000.0,
        gt=1.0,
        description="Sessions between two false alarms of all monitors together, at least and on average, if what is expected is right.",
    )
    false_comfort_sessions: float = Field(
        default=1_000.0, gt=1.0, description="Sessions, at least and on average, until an alarm is cleared wrongly."
    )
    gold: float = Field(
        default=0.0,
        ge=0.0,
        le=0.5,
        description="Share of the users, chosen by hash, whose feedback is never trained on: they are held back as `gold`, and say whether "
        "those who teach are pleased more than others. 0.05 costs a twentieth of the feedback and says nothing below some 400 users, so it "
        "is off by default. Raising it only adds users.",
    )
    gold_gap: float = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        description="By how much the share of turns with a positive reward may be higher among users who teach than among gold ones.",
    )
    gold_alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Chance of a false alarm about that in `gold_s` seconds, however often one looks.",
    )
    gold_s: float = Field(default=7 * DAY, gt=0, description="Seconds after which both are counted anew.")
    influence_user: float = Field(
        default=0.08,
        gt=0.0,
        le=1.0,
        description="Largest share of what is learned that may come from one user (or 4 / users where that is more) before an alarm.",
    )
    influence_tenant: float = Field(
        default=0.45,
        gt=0.0,
        le=1.0,
        description="Likewise from one tenant (or 4 / tenants where that is more).",
    )
    influence_steps: int = Field(default=50, ge=1, description="Optimizer steps over which that is measured.")
    most_turns: int = Field(
        default=50_000,
        ge=1,
        description="Turns of which it is remembered whose they were, for rewards and batches to come.",
    )
    session_turns: int = Field(default=8, ge=1, le=64, description="Turns of one person that are judged together.")
    session_pause_s: float = Field(default=600.0, gt=0, description="Seconds without a turn that end a session.")
    turns_a_day: int = Field(default=24, ge=1, description="Turns of one person that count in a day.")
    least_people: int = Field(
        default=5, ge=1, le=20, description="People who must have shown a shift before an alarm is raised."
    )
    reference_sessions: float = Field(
        default=100.0, ge=20.0, description="Sessions of the reference arm that its mean remembers."
    )
    stale_sessions: int = Field(
        default=500,
        ge=1,
        description="Watched sessions without one of the reference arm after which, once `stale_s` is over too, nothing is judged until "
        "it has had ten sessions again. Another arm of `reference` that is heard takes its place."
        " Where none is, control was heard before and `pauses` is set, nothing ships meanwhile.",
    )
    stale_s: float = Field(
        default=1_800.0,
        ge=0.0,
        description="Seconds without the reference arm that this takes at least, so that a flood of sessions alone does not do it.",
    )
    learn_sessions: int = Field(
        default=1_000,
        ge=100,
        description="Sessions of each group that are learned from where there is no reference arm.",
    )
    learn_s: float = Field(default=DAY, ge=0, description="Seconds that learning takes at least there: a day.")
    most_sessions: int = Field(default=20_000, ge=1, description="Open sessions held in memory.")
    most_people: int = Field(
        default=20_000,
        ge=1,
        description="People whose activity is remembered, and who count for `proxy_gap`. Where more come, the largest tenants yield.",
    )
    start_turns: int = Field(
        default=100_000, ge=0, description="Turns read at a start that finds no state: the newest ones."
    )
    fold_rows: int = Field(default=20_000, ge=1, description="Rows read between two savings of the state.")
