"""The serving worker waits for nothing that others need: neither for libraries that it does not use, nor for the trainer's code."""

import json
import subprocess
import sys

from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.launch.placing.warm_process import LIBRARIES

NEEDLESS = {
    *("aiohttp", "datasets", "gguf", "matplotlib", "opentelemetry.sdk", "pandas", "ray", "requests"),
    *("scipy.stats", "sklearn", "torchvision"),
}
OTHERS = ("train", "corpus", "demo", "engine.vllm", "launch.commands", "launch.workers.release", "launch.workers.train")
SETTINGS = {"ostinato.train", "ostinato.train.config"}
"""The configuration's part of the trainer, which is everybody's."""


def test_the_warm_process_forks_it_before_it_imports_what_only_others_need():
    code = f"import importlib, json, sys; [importlib.import_module(name) for name in {LIBRARIES!r}]; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=WHOLE_PROGRAM_S
    )
    imported = {*json.loads(done.stdout.splitlines()[-1])}
    assert {"torch", "transformers.modeling_utils", "ostinato.launch.workers.serve"} <= imported
    assert not imported & NEEDLESS
    others = tuple(f"ostinato.{room}" for room in OTHERS)
    assert (
        not {name for name in imported if name in others or name.startswith(tuple(f"{room}." for room in others))}
        - SETTINGS
    )
