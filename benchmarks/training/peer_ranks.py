"""A policy-gradient step over two processes, by accelerate or by torch's FSDP2 alone. Runs in TRL's environment.

    .peers/trl/bin/python -m benchmarks.training.peer_ranks MODEL SETTINGS

This process is the first rank and starts the other, which it notifies over gloo when a step begins. accelerate 1.x has no FSDP without an
accelerator (its list of devices for FSDP has no CPU), so with it the two processes are DDP: each has the whole model.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.contender import quiet_stdout, serve
from torch import Tensor
from transformers import AutoModelForCausalLM

RANKS = 2


def peak_gib() -> float:
    """This process's peak resident memory so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def prepared(model: torch.nn.Module, how: str, rate: float) -> tuple[torch.nn.Module, Any, Any]:
    """The distributed model, its optimizer, and the function for the backward pass."""
    if how == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        return model, optimizer, accelerator.backward
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0), lambda loss: loss.backward()


def loss_of(model: torch.nn.Module, turns: list[dict[str, Any]], tokens: int) -> Tensor:
    """This rank's part of the mean of -advantage * log-probability over all sampled tokens. Rows are padded to the longest."""
    longest = max(len(turn["prompt"]) + len(turn["sampled"]) for turn in turns)
    ids = torch.zeros(len(turns), longest, dtype=torch.long)
    mask, weight = torch.zeros_like(ids), torch.zeros(len(turns), longest)
    for row, turn in enumerate(turns):
        said, first = turn["prompt"] + turn["sampled"], len(turn["prompt"])
        ids[row, : len(said)], mask[row, : len(said)] = torch.tensor(said), 1
        weight[row, first : len(said)] = turn["advantage"]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    nats = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (nats * weight[:, 1:].flatten()).sum() * RANKS / tokens  # gradients are averaged over ranks


def main() -> None:
    model_path, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    rank = int(os.environ.setdefault("RANK", "0"))
    if rank == 0:
        answers = quiet_stdout()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
        os.environ.update(here, GLOO_SOCKET_IFNAME="lo")
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.peer_ranks", *sys.argv[1:]],
            env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"},
        )
    if settings["how"] == "fsdp2":
        dist.init_process_group("gloo")
    turns = json.loads(Path(settings["turns"]).read_text())
    turns.sort(key=lambda turn: len(turn["prompt"]) + len(turn["sampled"]))
    mine, tokens = turns[rank::RANKS], sum(len(turn["sampled"]) for turn in turns)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model, optimizer, backward = prepared(plain, settings["how"], settings["rate"])
    model.train()
    rows = settings["rows"]

    def step() -> float:
        loss = 0.0
        for start in range(0, len(mine), rows):
            part = loss_of(model, mine[start : start + rows], tokens)
            backward(part)
            loss += float(part.detach()) / RANKS
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def together(command: int) -> bool:
        told = torch.tensor([command])
        dist.broadcast(told, 0)
        return bool(told.item())

    if rank:
        while together(0):
            dist.all_reduce(torch.tensor(step(), dtype=torch.float64))
            dist.all_reduce(torch.tensor([0.0, peak_gib()]))
        return

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        del command
        together(1)
        started = time.perf_counter()
        loss = torch.tensor(step(), dtype=torch.float64)
        dist.all_reduce(loss)
        seconds = time.perf_counter() - started
        peaks = torch.tensor([peak_gib(), 0.0])
        dist.all_reduce(peaks)
        return {"loss": float(loss), "seconds": seconds, "peaks_gib": [round(float(peak), 3) for peak in peaks]}

    serve({"torch": torch.__version__}, answer, answers)


if __name__ == "__main__":
    main()
