"""Configuration of the monitors of behaviour and reward hacking."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ostinato.release.trial.config import DAY


class MonitorsConfig(BaseModel, frozen=True, extra="forbid"):
    """Monitors of reward hacking."""

    enabled: bool = Field(default=True, description="Monitor behaviour. False: none is monitored.")
    poll_s: float = Field(default=1.0, gt=0.0, description="Seconds between two checks of the log.")
    pauses: bool = Field(
        default=False,
        description="Ship nothing while an alarm about a harmful shift is active, or while the control arm, having become the reference, "
        "is silent (`stale_sessions`) with no other arm to replace it, since no shift could then be seen. Watch the alarms for some days "
        "before you enable it.",
    )
    off: tuple[str, ...] = Field(default=(), description="Built-in behaviour rates that are not monitored.")
    own: dict[str, str] = Field(
        default_factory=dict,
        description="Rates of your own: name -> function as 'module:function'. The function takes a `TurnText` and returns a value in "
        "[0, 1] or None. The release worker calls it for each turn.",
    )
    reference: tuple[str, ...] = Field(
        default=("previous", "control"),
        description="Arms on an earlier release, whose users define what is usual now. Each of them that has traffic serves as a "
        "comparison. If none has, the usual rates are learned once and stay. Users without a name are always on live, so they are left "
        "out where there is a reference arm.",
    )
    false_alarm_sessions: float = Field(
        default=125_000.0,
        gt=1.0,
        description="Lower bound on the mean number of sessions between two false alarms of all monitors together, if their assumptions "
        "hold.",
    )
    false_comfort_sessions: float = Field(
        default=1_000.0,
        gt=1.0,
        description="Lower bound on the mean number of sessions until an alarm is wrongly cleared.",
    )
    gold: float = Field(
        default=0.0,
        ge=0.0,
        le=0.5,
        description="Share of the users, chosen by hash, whose feedback is never trained on. Their turns are held back as `gold` and "
        "show whether the other users are pleased more. 0.05 costs a twentieth of the feedback and shows nothing with fewer than some 400 "
        "users, so it is off by default. Raising the share only adds users to the group.",
    )
    gold_gap: float = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        description="Tolerated excess in the share of turns with a positive reward, of users who are learned from over gold users.",
    )
    gold_alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Probability of a false alarm within `gold_s` seconds, however often it is checked. It applies to alarms about "
        "`gold_gap`, about an outcome (`outcomes`), about turns that get less feedback (`feedback_gap`), about sessions with more or "
        "fewer turns (`session_length`), and about answers to different users that are alike (`users_alike`).",
    )
    gold_s: float = Field(
        default=7 * DAY, gt=0, description="Seconds after which the counts of both groups start over."
    )
    outcomes: tuple[str, ...] = Field(
        default=("returned",),
        description="Outcomes that the reward does not contain. They are compared between live and control, besides the reward: "
        "'returned', whether people come back the next day (UTC), or signals with values from 0 to 1, such as 'tests_passed' or "
        "'survived'. This needs control users (`serve.control_share`). Empty: none.",
    )
    influence_user: float = Field(
        default=0.08,
        gt=0.0,
        le=1.0,
        description="Largest share of what is learned that may come from one user (or 4 / users if that is more). A larger share raises "
        "an alarm.",
    )
    influence_tenant: float = Field(
        default=0.45, gt=0.0, le=1.0, description="The same for one tenant (or 4 / tenants if that is more)."
    )
    influence_steps: int = Field(default=50, ge=1, description="Optimizer steps over which these shares are measured.")
    most_turns: int = Field(
        default=50_000, ge=1, description="Turns whose user is remembered, for later rewards and batches."
    )
    session_turns: int = Field(
        default=8, ge=1, le=64, description="Turns of one user that are judged together as a session."
    )
    session_pause_s: float = Field(
        default=600.0, gt=0, description="Seconds without a turn after which a session ends."
    )
    turns_a_day: int = Field(default=24, ge=1, description="Most turns of one user that count per day.")
    least_people: int = Field(
        default=5,
        ge=1,
        le=20,
        description="Least number of users who must have shown a shift before an alarm is raised.",
    )
    reference_sessions: float = Field(
        default=100.0, ge=20.0, description="Number of reference sessions over which the reference mean is averaged."
    )
    stale_sessions: int = Field(
        default=500,
        ge=1,
        description="Monitored sessions without one of the reference arm after which, once `stale_s` has also passed, nothing is judged "
        "until that arm has ten sessions again. Another active arm of `reference` takes its place. If there is none, control was active "
        "before and `pauses` is set, nothing ships meanwhile.",
    )
    stale_s: float = Field(
        default=1_800.0,
        ge=0.0,
        description="Shortest absence of the reference arm for this, in seconds, so that a flood of sessions alone does not cause it.",
    )
    learn_sessions: int = Field(
        default=1_000,
        ge=100,
        description="Sessions of each group from which the usual rate is learned if there is no reference arm.",
    )
    learn_s: float = Field(
        default=DAY, ge=0, description="Shortest duration of that learning, in seconds. The default is a day."
    )
    most_sessions: int = Field(default=20_000, ge=1, description="Open sessions held in memory.")
    most_people: int = Field(
        default=20_000,
        ge=1,
        description="Users whose activity is remembered and who count for `teacher_favour` and `outcome_gap`. If there are more users, "
        "the largest tenants lose some of theirs.",
    )
    start_turns: int = Field(
        default=100_000, ge=0, description="Newest turns that are read at a start without saved state."
    )
    fold_rows: int = Field(default=20_000, ge=1, description="Rows of the log between two saves of the state.")
