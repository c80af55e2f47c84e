"""vLLM as a contender of throughput.py. Its CPU build runs in an environment that `python -m benchmarks.peers` makes.

It uses offline `LLM.generate`, vLLM's fastest entry point: all requests are submitted together, and nothing is detokenised or streamed.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.contender import quiet_stdout, serve


def main() -> None:
    answers = quiet_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--share", action="store_true", help="prefix caching: samples of one prompt share it")
    parser.add_argument("--gpu-share", type=float, help="of a GPU's memory that it may take, beside other contenders")
    args = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    import vllm

    engine = vllm.LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.streams,
        enforce_eager=not args.compile,
        enable_prefix_caching=args.share,
        disable_log_stats=False,  # these hold the times of first tokens
        **({"gpu_memory_utilization": args.gpu_share} if args.gpu_share else {}),
    )

    def run(command: dict[str, Any]) -> dict[str, Any]:
        sampling = vllm.SamplingParams(
            n=command["group"],
            temperature=1.0,
            max_tokens=command["tokens"],
            ignore_eos=True,
            detokenize=False,
            seed=None,
        )
        prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
        start, started = time.time(), time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": sum(len(output.token_ids) for one in done for output in one.outputs),
            "first_s": [one.metrics.arrival_time - start + one.metrics.first_token_latency for one in done],
        }

    serve({"version": vllm.__version__, "compile": args.compile}, run, answers)


if __name__ == "__main__":
    main()
