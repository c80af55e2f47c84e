"""Configuration of the monitors of the model's behaviour."""

from __future__ import annotations

from pydantic import BaseModel, Field

DAY = 86_400.0


class MonitorsConfig(BaseModel, frozen=True, extra="forbid"):
    """Monitors of reward hacking."""

    enabled: bool = Field(default=True, description="False: no behaviour is monitored.")
    poll_s: float = Field(default=1.0, gt=0.0, description="Seconds between looks at the log.")
    pauses: bool = Field(
        default=False,
        description="Ship nothing while an alarm about a harmful shift is active, or while the control arm, once a "
        "reference, is silent (`stale_sessions`) with no other to replace it: no shift would be seen. Watch the "
        "alarms for some days before you enable it.",
    )
    off: tuple[str, ...] = Field(default=(), description="Built-in behaviour rates that are not monitored.")
    own: dict[str, str] = Field(
        default_factory=dict,
        description="Rates of your own: name -> function as 'module:function'. It takes a `TurnText` and returns a "
        "value in [0, 1] or None; the release worker calls it for each turn.",
    )
    reference: tuple[str, ...] = Field(
        default=("previous", "control"),
        description="Arms on an earlier release whose users define what is usual now; each of these with traffic is "
        "compared with. Without any, what is usual is learned once and stays. Users without a name are always on live: "
        "beside a reference arm they are left out.",
    )
    false_alarm_sessions: float = Field(
        default=125_000.0,
        gt=1.0,
        description="Least mean number of sessions between two false alarms of all monitors together, if their "
        "assumptions hold.",
    )
    false_comfort_sessions: float = Field(
        default=1_000.0, gt=1.0, description="Least mean number of sessions until an alarm is wrongly cleared."
    )
    gold: float = Field(
        default=0.0,
        ge=0.0,
        le=0.5,
        description="Share of the users, chosen by hash, whose feedback is never trained on: it is held back as "
        "`gold` and shows whether the other users are pleased more. 0.05 costs a twentieth of the feedback and shows "
        "nothing below some 400 users, so it is off by default. Raising it only adds users.",
    )
    gold_gap: float = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        description="Tolerated excess of the share of turns with a positive reward among users who are learned from "
        "over gold users.",
    )
    gold_alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Chance of a false alarm about that, about an outcome (`outcomes`), about turns of which less is said "
        "(`feedback_gap`), about sessions of more or fewer turns (`session_length`), or about answers to different users that are alike "
        "(`users_alike`), in `gold_s` seconds, however often it is checked.",
    )
    gold_s: float = Field(default=7 * DAY, gt=0, description="Seconds after which both groups are counted anew.")
    outcomes: tuple[str, ...] = Field(
        default=("returned",),
        description="Outcomes that the reward does not contain, compared between live and control beside the reward: "
        "'returned', whether people come again the next day (UTC), or signals with values from 0 to 1, such as "
        "'tests_passed' or 'survived'. It takes control users (`serve.control_share`). Empty: none.",
    )
    influence_user: float = Field(
        default=0.08,
        gt=0.0,
        le=1.0,
        description="Largest share of what is learned that may come from one user (or 4 / users if that is more) "
        "before an alarm.",
    )
    influence_tenant: float = Field(
        default=0.45, gt=0.0, le=1.0, description="The same for one tenant (or 4 / tenants if that is more)."
    )
    influence_steps: int = Field(default=50, ge=1, description="Optimizer steps over which these shares are measured.")
    most_turns: int = Field(
        default=50_000, ge=1, description="Turns whose user is remembered for later rewards and batches."
    )
    session_turns: int = Field(
        default=8, ge=1, le=64, description="Turns of one user that are judged together as a session."
    )
    session_pause_s: float = Field(
        default=600.0, gt=0, description="Seconds without a turn after which a session ends."
    )
    turns_a_day: int = Field(default=24, ge=1, description="Most turns of one user that count per day.")
    least_people: int = Field(
        default=5, ge=1, le=20, description="Users who must have shown a shift before an alarm is raised."
    )
    reference_sessions: float = Field(
        default=100.0, ge=20.0, description="Number of reference sessions that the reference mean averages over."
    )
    stale_sessions: int = Field(
        default=500,
        ge=1,
        description="Monitored sessions without one of the reference arm after which, once `stale_s` has also passed, "
        "nothing is judged until it has ten sessions again. Another active arm of `reference` takes its place. If "
        "there is none, control was active before and `pauses` is set, nothing ships meanwhile.",
    )
    stale_s: float = Field(
        default=1_800.0,
        ge=0.0,
        description="Shortest time without the reference arm for this, in seconds, so that a flood of sessions alone "
        "does not cause it.",
    )
    learn_sessions: int = Field(
        default=1_000,
        ge=100,
        description="Sessions of each group from which the usual rate is learned without a reference arm.",
    )
    learn_s: float = Field(default=DAY, ge=0, description="Shortest duration of that learning, in seconds: a day.")
    most_sessions: int = Field(default=20_000, ge=1, description="Open sessions held in memory.")
    most_people: int = Field(
        default=20_000,
        ge=1,
        description="Users whose activity is remembered and who count for `teacher_favour` and `outcome_gap`. If there "
        "are more, the largest tenants lose some.",
    )
    start_turns: int = Field(default=100_000, ge=0, description="Newest turns read at a start without saved state.")
    fold_rows: int = Field(default=20_000, ge=1, description="Rows of the log between two saves of the state.")
