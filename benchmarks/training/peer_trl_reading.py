"""TRL's SFTTrainer as a contender of reading.py; runs in the peers' environment. `python -m benchmarks.peers trl` makes it.

It gets the token pieces of our steps in our order and packs them as it does without flash attention: one row after the other, `length`
tokens each, in which a text sees what stands before it in its row. `dtype`: "mixed" is weights, gradients and moments in fp32 with
bf16 autocast, "bfloat16" all of it in bf16, "float32" all of it in fp32. What is held out is measured piece by piece by the model alone.
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
    """Answers before the first step and at the end of each, until it is asked for the next step or the input ends."""

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
    """Adds up the parts of a step's loss, each divided by the tokens of all."""

    turnstile: Turnstile

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.turnstile.loss += float(loss)
        return loss


@torch.no_grad()
def surprise(model: Any, pieces: list[list[int]]) -> float:
    """Mean nats per prediction, each piece by itself, by the arithmetic of the weights' own type."""
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
        ]  # what is predicted: the token before stands before it
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
