"""The device on which tests of torch's kernels compute: the CPU, or the one that the environment names, for a run on a GPU."""

from __future__ import annotations

import os

from ostinato.model.devices.backend import Backend

TORCH = Backend(device=os.environ.get("OSTINATO_TEST_DEVICE", "cpu"), kernels="torch")
"""Example: ``OSTINATO_TEST_DEVICE=cuda pytest tests/e2e/test_torch_kernels.py tests/unit/train/test_gradients.py``."""
