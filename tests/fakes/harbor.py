"""Harbor's own models, run in their own environment, for tests that it accepts the task folders written for it."""

import json
import os
import subprocess

import pytest

PYTHON = os.environ.get("OSTINATO_HARBOR_PYTHON", "")
"""A Python of version 3.12 or later, in whose environment `harbor==0.25.0` is installed."""

needs_harbor = pytest.mark.skipif(not PYTHON, reason="needs Harbor: OSTINATO_HARBOR_PYTHON names a Python that has it")

_PROGRAM = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
found = []
for path in map(Path, json.load(sys.stdin)):
    task = Task(path)
    assert Task.is_valid_dir(path)
    found.append({"name": task.name, "instruction": task.instruction, "config": task.config.model_dump(mode="json")})
print(json.dumps(found))
"""


def harbor_reads(*folders):
    """Harbor's parse of task folders."""
    done = subprocess.run(
        [PYTHON, "-c", _PROGRAM],
        input=json.dumps(list(map(str, folders))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
