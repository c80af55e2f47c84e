"""Long-lived subprocesses that answer one JSON line per command, so that peers in other environments can be measured alternately.

It uses the standard library only, because the subprocess imports it too and may run in an environment without our packages.
A contender is stopped (SIGSTOP, with its children) while it is idle, so that a spinning thread pool cannot slow the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]
HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PEERS = Path(os.environ.get("OSTINATO_PEERS", ROOT / ".peers"))
THREADS = 2


def end_on_sigterm() -> None:
    """Turn SIGTERM into an ordinary exit, so that contenders are closed as well: a stopped process cannot exit by itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Contender:
    """One subprocess. `ask` blocks until it has answered. Between two calls of `ask` the subprocess is stopped."""

    def __init__(self, name: str, command: list[str], *, log: Path, env: dict[str, str] | None = None) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,  # where `python -m benchmarks...` finds its module in any environment
                env=os.environ | {"OMP_NUM_THREADS": str(THREADS)} | (env or {}),
                start_new_session=True,  # its process group holds all of its children
            )
        self.about = self._answer()

    def ask(self, **command: Any) -> dict[str, Any]:
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Terminate the subprocess and its children."""
        for sign in (signal.SIGCONT, signal.SIGTERM):
            if self._process.poll() is None:
                os.killpg(self._process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # children that outlived their parent
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            self.close()
            raise SystemExit(
                f"{self.name} ended (exit status {self._process.returncode}). Its log, {self._log}:\n{tail}"
            )
        os.killpg(self._process.pid, signal.SIGSTOP)
        return json.loads(line)


def serve(about: dict[str, Any], handler: Handler, answers: Any) -> None:
    """The subprocess's main loop: print `about`, then one answer per line of input until the input ends. See `quiet_stdout`."""
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(handler(json.loads(line))), file=answers, flush=True)


def quiet_stdout() -> Any:
    """Return the real standard output, for answers only. From now on whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def reward(sampled_ids: Sequence[int]) -> float:
    """A trivial reward that every contender computes in the same way: the share of even token ids."""
    return sum(token % 2 == 0 for token in sampled_ids) / max(1, len(sampled_ids))


def gpu_peak_gib() -> float:
    """The most memory that this process's tensors have used on a GPU; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def texts(count: int, characters: int, seed: int) -> list[str]:
    """Distinct windows of real English, from the language reference that comes with Python. Each starts at a word."""
    from pydoc_data import topics

    whole = " ".join(" ".join(topics.topics[name] for name in sorted(topics.topics)).split())
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        start = whole.index(" ", draw.randrange(len(whole) - 2 * characters)) + 1
        found[whole[start : start + characters]] = None
    return list(found)


def machine() -> dict[str, Any]:
    """The machine that the figures were measured on, and its load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "cores": os.cpu_count(), "threads": THREADS, "load": [round(x, 2) for x in os.getloadavg()]}
