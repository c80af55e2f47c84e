"""Terminal output while a model trains in a simulated world: a line per step, from the workers' progress lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT_STEPS = 20
# all groups drawn, including those that no step uses because all their rollouts have the same reward
RECENT_GROUPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTime:
    """How a trainer spent its time: seconds from the first step's end to the last step's, and those of them spent computing.

    Example: ``TrainerTime(passed_s=100.0, computed_s=80.0).idle == 0.2``
    """

    passed_s: float
    computed_s: float

    @property
    def idle(self) -> float:
        """The share of the time in which it waited for something to learn from; 0 before the second step."""
        return max(0.0, 1.0 - self.computed_s / self.passed_s) if self.passed_s > 0 else 0.0


def busy(steps: Sequence[Mapping[str, Any]]) -> TrainerTime:
    """The `TrainerTime` of step lines, oldest first. The first step's own time lies before the clock starts."""
    if len(steps) < 2:
        return TrainerTime(passed_s=0.0, computed_s=0.0)
    computed = sum(float(step["seconds"]) for step in steps[1:])
    return TrainerTime(passed_s=float(steps[-1]["at"]) - float(steps[0]["at"]), computed_s=computed)


class WorldScreen:
    """Folds the progress lines of the trainer and the rollout worker into the lines shown. `step` is the last step taken, `stored` the
    last one whose version is stored.

    Example::

        screen = WorldScreen()
        for line in lines.new():
            for text in screen.take(line): print(text)
    """

    def __init__(self) -> None:
        self.step = 0
        self.stored = 0
        self.refused = 0
        self.flat = 0
        self.groups = 0
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS + 1)
        self._success: dict[str, str] = {}
        self._drawn: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._shapes: deque[Mapping[str, Any]] = deque(maxlen=RECENT_GROUPS)

    def take(self, line: Mapping[str, Any]) -> list[str]:
        """The lines to print for one progress line."""
        match line["kind"]:
            case "step":
                self.step = max(self.step, int(line["step"]))
                self._steps.append(line)
                return [self._told(line)]
            case "published":
                self.stored = max(self.stored, int(line["number"]))
            case "refused":
                self.refused += 1
                return [f"step {int(line['step']) + 1:>4}  refused: {line['why']}"]
            case "group":
                self.groups += 1
                self.flat += bool(line["flat"])
                if line.get("tokens"):
                    self._shapes.append(line)
                if line.get("reward") is not None:
                    self._drawn.append(float(line["reward"]))
            case "measured":
                share = line["solved"] / line["of"] if line["of"] else 0.0
                self._success[line["split"]] = f"{100 * share:.0f}% of {line['of']}"
                return [f"measured   {line['split']}: {line['solved']} of {line['of']} solved ({100 * share:.0f}%)"]
            case _:
                pass
        return []

    def _told(self, step: Mapping[str, Any]) -> str:
        shown = "".join(f"  {split} {what}" for split, what in self._success.items())
        drawn = f" (all drawn recently {sum(self._drawn) / len(self._drawn):.3f})" if self._drawn else ""
        return (
            f"step {step['step']:>4}  reward {step['reward_mean']:.3f}{drawn}  {step['episodes']:.0f} rollouts  lag {step['lag_mean']:.1f} "
            f"(at most {step['lag_max']:.0f})  KL {step.get('kl_k1', 0.0):+.4f}  ESS {step['ess']:.2f}  {step['seconds']:.1f} s  "
            f"trainer idle {100 * busy(list(self._steps)).idle:.0f}%  groups without contrast {self.flat} of {self.groups}"
            f"{_lengths(self._shapes)}{shown}"
        )


def _lengths(groups: Sequence[Mapping[str, Any]]) -> str:
    """Over all rollouts of these groups: sampled tokens and turns per rollout, and the shares cut by a length or time limit or ended by
    something other than the policy.
    """
    tokens = sorted(int(each) for group in groups for each in group["tokens"])
    if not tokens:
        return ""
    count = len(tokens)
    ninth = tokens[-(-9 * count // 10) - 1]  # the smallest that nine tenths do not exceed
    turns = sum(int(each) for group in groups for each in group["turns"]) / count
    cut, late, failed = (sum(int(group[name]) for group in groups) / count for name in ("cut", "timeouts", "failed"))
    return (
        f"  recently {sum(tokens) / count:.0f} tokens (p90 {ninth}) and {turns:.1f} turns a rollout, "
        f"{100 * cut:.0f}% cut at the length limit, {100 * late:.0f}% out of time, {100 * failed:.0f}% failed"
    )
