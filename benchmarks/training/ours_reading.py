"""Our trainer as a contender of reading.py: each command asks for one training step, or for the held-out loss."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.contender import THREADS, quiet_stdout, serve
from benchmarks.engine.ours import compute_on, make_trainer

import ostinato


def main() -> None:
    answers = quiet_stdout()
    torch.set_num_threads(THREADS)
    path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    texts = json.loads(Path(settings["texts"]).read_text())
    trainer = make_trainer(path, "fast", microbatch_tokens=settings["microbatch"])

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        if command["do"] == "measure":
            return {"held_out": trainer.surprise(texts["held_out"]), "seconds": time.perf_counter() - started}
        made = trainer.read(texts["steps"][trainer.step_count], learning_rate=settings["learning_rate"])
        seconds = time.perf_counter() - started
        phases = {name: made[f"seconds_{name}"] for name in ("forward", "backward", "optimizer")}
        found = {"loss": made["loss"], "tokens": made["tokens"], "seconds": seconds, "phases": phases}
        return found | {"peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}

    about = {"version": ostinato.__version__, "torch": torch.__version__, "compute": str(compute_on("cpu", path))}
    serve(about | {"masters": "torch.float32", "microbatch": settings["microbatch"]}, answer, answers)


if __name__ == "__main__":
    main()
