"""The device on which tests of torch's kernels compute: the CPU, or the one that the environment names, for a run on a GPU."""

from __future__ import annotations

import os

from ostinato.model.backend import ComputeBackend

DEVICE = os.environ.get("OSTINATO_TEST_DEVICE", "cpu")
TORCH = ComputeBackend(device=DEVICE, kernels="torch")
"""Example: ``OSTINATO_TEST_DEVICE=cuda pytest tests/e2e/test_torch_kernels.py tests/unit/train/test_gradients.py``."""
SETTINGS = () if DEVICE == "cpu" else (f"model.device={DEVICE}", "model.numerics=fast", "model.compute=fp32")
"""What a run of the tiny model is given besides, as `--set` words, to compute there: ``pytest tests/e2e/test_loop.py`` is a whole one."""
