"""TRL's SFTTrainer as a contender of reading.py. It runs in an environment that `python -m benchmarks.peers trl` makes.

It gets the token pieces of our steps in our order and packs them as it does without flash attention: into consecutive rows of `length`
tokens, where a text attends to everything before it in its row. `dtype`: "mixed" is weights, gradients and moments in fp32 with
bf16 autocast, "bfloat16" all of it in bf16, "float32" all of it in fp32. The held-out loss is computed piece by piece by the bare model.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from benchmarks.contender import THREADS, quiet_stdout
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class Turnstile(TrainerCallback):
    """Handles commands before the first step and after each step, until one asks for the next step or the input ends."""

    def __init__(self, answers: Any, held_out: list[list[int]]) -> None:
        self._answers, self._held_out = answers, held_out
        self._started, self.loss = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> Any:
        return self._wait(control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> Any:
        seconds = time.perf_counter() - self._started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._say({"loss": self.loss, "seconds": seconds, "peak_rss_gib": peak})
        return self._wait(control, model)

    def _wait(self, control: Any, model: Any) -> Any:
        while line := sys.stdin.readline():
            self._started, self.loss = time.perf_counter(), 0.0
            if json.loads(line)["do"] == "step":
                return control
            found = surprise(model, self._held_out)
            self._say({"held_out": found, "seconds": time.perf_counter() - self._started})
        control.should_training_stop = True
        return control

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


class Told(trl.SFTTrainer):
    """Sums the parts of a step's loss. Each part is already divided by the tokens of the whole step."""

    turnstile: Turnstile

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.turnstile.loss += float(loss)
        return loss


@torch.no_grad()
def surprise(model: Any, pieces: list[list[int]]) -> float:
    """Mean nats per prediction, each piece on its own, computed in the weights' dtype."""
    training, total = model.training, 0.0
    model.eval()
    for piece in pieces:
        ids = torch.tensor([piece])
        logits = model(input_ids=ids).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    model.train(training)
    return total / sum(len(piece) - 1 for piece in pieces)


def main() -> None:
    answers = quiet_stdout()
    torch.set_num_threads(THREADS)
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    texts = json.loads(Path(settings["texts"]).read_text())
    dtype, rows = settings["dtype"], settings["batch_tokens"] // settings["length"]
    turnstile = Turnstile(answers, texts["held_out"])
    with tempfile.TemporaryDirectory() as scratch:
        config = trl.SFTConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=dtype == "mixed",
            model_init_kwargs={"dtype": "bfloat16" if dtype == "bfloat16" else "float32"},
            max_length=settings["length"],
            packing=True,
            packing_strategy="wrapped",
            per_device_train_batch_size=settings["rows"],
            gradient_accumulation_steps=rows // settings["rows"],
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=len(texts["steps"]),
            save_strategy="no",
            report_to=[],
            logging_steps=1_000_000,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        pieces = [
            piece[1:] for step in texts["steps"] for piece in step
        ]  # only the predicted tokens: each is predicted from the tokens before it in its row
        trainer = Told(
            model=path,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": pieces}),
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[turnstile],
        )
        trainer.turnstile = turnstile
        about = {"version": trl.__version__, "torch": torch.__version__, "dtype": dtype, "optimizer": str(config.optim)}
        print(json.dumps(about), file=answers, flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
