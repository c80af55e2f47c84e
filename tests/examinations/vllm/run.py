"""Does the loop learn over vLLM servers, with versions loaded by the follower while users are served?

    python -m benchmarks.peers vllm
    python -m tests.examinations.vllm.run [--minutes 60] [--seed 0] [--keep DIR]

`ostinato demo` with `engine.kind = "vllm"` over four real vLLM servers on this machine. They take 15 GB, and the whole run 25, or less
memory and some swap. Reports the demo's figures, among them the mismatch between vLLM's log-probabilities and the trainer's. How learning
compares with the embedded engine at equal steps is measured by `python -m tests.examinations.learning.run functions --engine vllm`.
Passes if the held-out gain is at least 12 points with its interval above zero, no request failed, a version was loaded by the follower
and released, and every turn is accounted for. A released version's server has it already, from its evaluation, so that live changes
servers without a pause.
Writes tests/examinations/results/vllm.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.fakes.vllm import serving_smollm2, usable

RESULT = Path(__file__).parents[1] / "results" / "vllm.json"
_SERVERS = 4  # live, control, previous, a candidate
_WANTED_POINTS = 12.0
_GAIN = "held-out suite, final minus base"


def demo(urls: Sequence[str], args: argparse.Namespace, place: Path) -> None:
    """Run the demo over these servers. Raises CalledProcessError."""
    settings = ["engine.kind=vllm", f"engine.urls={json.dumps(list(urls))}", "evaluate.gate.sample_best=false"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "ostinato.cli", "demo", "--minutes", str(args.minutes), "--seed", str(args.seed)]
    subprocess.run([*command, "--out", str(place), "--directory", str(place / "run"), *words], check=True)


def findings(place: Path) -> dict[str, Any]:
    """The demo's figures, and under `problems` the requirements that are not met."""
    report = json.loads((place / "report.json").read_text())
    said = dict(report["summary"])
    gain, lower = (float(number) for number in re.findall(r"[+-]\d+\.\d", said[_GAIN])[:2])
    problems: list[str] = []
    if gain < _WANTED_POINTS or lower <= 0:
        problems.append(f"the held-out gain is {said[_GAIN]}; at least {_WANTED_POINTS:g} are wanted, all above 0")
    if not said["user requests, failed"].endswith(", 0"):
        problems.append(f"requests failed: {said['user requests, failed']}")
    loads = loaded((place / "run" / "logs" / "serve.log").read_text())
    if not loads:
        problems.append("no new version was loaded into a server")
    if len(report["releases"]) < 2:  # the first is the starting model
        problems.append("nothing was released")
    if said["turns accounted for"] != "all, once each":
        problems.append(said["turns accounted for"])
    return {"summary": said, "held_out": report["held_out"], "loads_ms": loads, "problems": problems}


def loaded(log: str) -> dict[str, float]:
    """The learned versions that the follower loaded into a server, each with that server's pause in milliseconds."""
    found = re.findall(r" is now v(\d+)@\w+: pause ([\d.]+) ms", log)
    return {f"v{number}": float(pause) for number, pause in found if number != "0" and float(pause) > 0}


def main() -> int:
    """Returns 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of simulated users")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the run and the servers' logs are kept; none: nowhere")
    args = parser.parse_args()
    if not usable():
        parser.error("needs vLLM's environment: python -m benchmarks.peers vllm")
    with tempfile.TemporaryDirectory() as nowhere:
        place = (args.keep or Path(nowhere)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        with serving_smollm2(_SERVERS, place) as urls:
            demo(urls, args, place)
        found = findings(place)
    found |= {"minutes": args.minutes, "seed": args.seed, "cores": os.cpu_count()}
    table = Table(show_header=False)
    for name, value in found.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else str(value))
    Console().print(table)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
