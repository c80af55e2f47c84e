"""Harbor's own models, run in their own environment, for tests that Harbor accepts the files written for it."""

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
from harbor.models.trajectories import Trajectory
found = []
for line in sys.stdin:
    kind, value = json.loads(line)
    if kind == "trajectory":
        found.append(Trajectory.model_validate(value).to_json_dict())
    else:
        task = Task(Path(value))
        assert Task.is_valid_dir(Path(value))
        found.append({"name": task.name, "instruction": task.instruction, "config": task.config.model_dump(mode="json")})
print(json.dumps(found))
"""


def harbor_reads(*things):
    """Harbor's parse of trajectories, ("trajectory", JSON), and of task folders, ("task", path)."""
    lines = "".join(json.dumps([kind, str(value) if kind == "task" else value]) + "\n" for kind, value in things)
    done = subprocess.run([PYTHON, "-c", _PROGRAM], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
