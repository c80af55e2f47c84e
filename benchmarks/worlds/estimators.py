"""Our advantage estimator beside TRL's and verl's own code, on groups where estimators differ; also k1 and k3, and the cost of effort.

    python -m benchmarks.peers trl verl           # once
    python -m benchmarks.worlds.estimators        # a minute

Advantages are compared on groups of one, with equal grades, with one success, with a single graded rollout, and with almost equal
grades. For a short and a long failure the loss's gradient for each token is compared. Missing peers are reported. Nothing is timed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.contender import PEERS, RESULTS, ROOT
from rich.console import Console
from rich.table import Table

from ostinato.core.errors import NoSignal
from ostinato.core.samples import Episode
from ostinato.reward.credit import GroupRelative
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.losses import k1, k3, policy_loss
from ostinato.worlds.grading.effort import effort_cost

RESULT = RESULTS / "worlds_estimators.json"
GROUPS: dict[str, Sequence[float | None]] = {
    "n = 1": [1.0],
    "16 equal (0.1)": [0.1] * 16,
    "1 of 8 solved": [1.0] + [0.0] * 7,
    "1 of 8 graded": [1.0] + [None] * 7,
    "0.51 and 0.5": [0.51, 0.5],
}
LENGTHS = (2, 8)
LOGPROBS, REFERENCE = (-1.0, -0.5, -3.0), (-1.5, -0.4, -1.0)
DISTANCES = (0.1, 0.5, 1.0, 1.5, 2.0)
SAMPLES = 1_000_000
X, K, QS = 5_000.0, 1e-3, (0.0, 0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 2.0)
console = Console()


def our_advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each rollout; 0 for a rollout that is not learned from."""
    graded = {n: reward for n, reward in enumerate(rewards) if reward is not None}
    episodes = [
        Episode(id=str(n), tenant="default", turns=(a_turn(f"{n}:0", sampled=(7,)),), group="g") for n in graded
    ]
    try:
        found = GroupRelative()(episodes, {f"{n}:0": reward for n, reward in graded.items()})
    except NoSignal:
        found = {}
    return [found.get(f"{n}:0", (0.0,))[0] for n in range(len(rewards))]


def our_weights() -> list[float]:
    """The loss's gradient for the log-probability of a token of each answer. All answers have an advantage of -1."""
    turns = torch.tensor([turn for turn, length in enumerate(LENGTHS) for _ in range(length)])
    logps = torch.full((len(turns),), -1.0, requires_grad=True)
    loss = policy_loss(
        logps,
        behaviour_M=logps.detach(),
        advantages_M=torch.full((len(turns),), -1.0),
        turns_M=turns,
        normaliser=len(LENGTHS) * max(LENGTHS),
    )
    (found,) = torch.autograd.grad(loss, logps)
    return [float(found[turns == turn][0]) for turn in range(len(LENGTHS))]


def ours() -> dict[str, Any]:
    now, then = torch.tensor(LOGPROBS), torch.tensor(REFERENCE)
    return {
        "version": "Ostinato",
        "advantages": {"group": {name: our_advantages(rewards) for name, rewards in GROUPS.items()}},
        "weights": {"constant": our_weights()},
        "penalties": {"k1, in the reward": k1(now, then).tolist(), "k3, watched": k3(now, then).tolist()},
    }


def peer(name: str, model: Path) -> dict[str, Any]:
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        return {"version": name, "missing": f"not installed: python -m benchmarks.peers {name}"}
    asked = {"groups": GROUPS, "lengths": LENGTHS, "logprobs": LOGPROBS, "reference": REFERENCE}
    done = subprocess.run(
        [python, "-m", "benchmarks.worlds.peer_estimators", name, str(model)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        return {"version": name, "missing": f"cannot be imported here: {done.stderr.strip().splitlines()[-1][:200]}"}
    return json.loads(done.stdout)


def variances() -> list[dict[str, float]]:
    """Means and variances of k1 and k3 as estimates of KL(N(0, 1) || N(d, 1)) = d^2 / 2 from samples of the first, and exact variances."""
    x = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = []
    for d in DISTANCES:
        policy, reference = -(x**2) / 2, -((x - d) ** 2) / 2
        exact = math.expm1(d**2) - d**2
        row = {"distance": d, "kl": d**2 / 2, "k1_mean": float(k1(policy, reference).mean())}
        row |= {"k3_mean": float(k3(policy, reference).mean()), "k1_var": float(k1(policy, reference).var())}
        rows.append(row | {"k3_var": float(k3(policy, reference).var()), "k1_var_exact": d**2, "k3_var_exact": exact})
    return rows


def in_words(value: Any) -> str:
    """A group's advantages as text, with repetitions counted, or the reason why there are none."""
    if isinstance(value, str):
        return "refused" if value.startswith("refused") else value
    if len(value) > 2 and len(set(value[1:])) == 1 and value[0] != value[1]:
        return f"{value[0]:.4g}, {len(value) - 1} x {value[1]:.4g}"
    return f"all {value[0]:.3g}" if len(set(value)) == 1 and len(value) > 1 else ", ".join(f"{v:.4g}" for v in value)


def show(sides: list[dict[str, Any]]) -> None:
    for what, columns in (
        ("advantages", list(GROUPS)),
        ("weights", [f"token of {LENGTHS}"]),
        ("penalties", ["tokens"]),
    ):
        table = Table("whose", *columns, title=what, title_justify="left")
        for side in sides:
            for label, found in side.get(what, {}).items():
                cells = [in_words(found[name]) for name in columns] if isinstance(found, dict) else [in_words(found)]
                table.add_row(f"{side['version']}: {label}", *cells)
        console.print(table)
    for side in sides:
        if "missing" in side:
            console.print(f"{side['version']}: {side['missing']}")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        model = tiny_model(Path(place) / "tiny")
        sides = [ours(), peer("trl", model), peer("verl", model)]
    show(sides)
    spread, costs = variances(), {str(q): effort_cost(X, K, q) for q in QS}
    for row in spread:
        console.print(
            f"d {row['distance']}: KL {row['kl']:.4f}, k1 {row['k1_mean']:.4f}, k3 {row['k3_mean']:.4f}, variances "
            f"{row['k1_var']:.4g} (exact {row['k1_var_exact']:.4g}) and {row['k3_var']:.4g} (exact {row['k3_var_exact']:.4g})"
        )
    limit = math.log1p(K * X) / K
    console.print(f"C({X:g}) with k {K:g}: {costs}; ln(1 + k x) / k = {limit}")
    found = {"sides": sides, "variances": spread, "effort": {"x": X, "k": K, "C by q": costs, "limit at q = 1": limit}}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
