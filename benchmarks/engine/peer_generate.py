"""transformers' `generate` as a contender of throughput.py: one left-padded batch, bf16, scaled-dot-product attention, sampling."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from benchmarks.contender import THREADS, quiet_stdout, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Records when the first sampled token arrived. The library calls `put` with the prompt, then with one token per row at each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def main() -> None:
    answers = quiet_stdout()
    torch.set_num_threads(THREADS)
    device = sys.argv[2]
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.eval().to(device)

    def run(command: dict[str, Any]) -> dict[str, Any]:
        prompts: list[list[int]] = [prompt for prompt in command["prompts"] for _ in range(command["group"])]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=command["tokens"], pad_token_id=0
        )  # no end-of-sequence token is named, so every row is sampled to its full length
        model.generation_config = settings
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=settings, streamer=clock
            )
            made = made.cpu()
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": made[:, width:].numel(),
            "first_s": [clock.times[1] - started] * len(prompts),
        }

    serve({"version": transformers.__version__, "torch": torch.__version__}, run, answers)


if __name__ == "__main__":
    main()
