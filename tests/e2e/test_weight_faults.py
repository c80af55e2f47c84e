"""Every fault of the weight store and what came of it: the right hash, or a refusal that names the object and then the right hash.

The cases are `tests.examinations.weight_faults`; `make examine` runs all of their places.
"""

import json
import sys
from pathlib import Path

import pytest
from tests.deadlines import LEARNING_S
from tests.examinations.weight_faults.outcome import FELL_BACK, OBEYED, REPAIRED, RIGHT, WAITED, Case, problems
from tests.fakes.fork_server import FORK_SERVER

# part -> the least number of cases, and outcomes of which there must be some: an examination that reaches nothing would pass
ROOT = Path(__file__).parents[2]
PARTS = {
    "publisher-kills": (60, {RIGHT}),
    "follower-kills": (60, {RIGHT, REPAIRED, FELL_BACK}),
    "damage": (150, {RIGHT, REPAIRED, WAITED, OBEYED}),
    "races": (30, {f"one won, one Conflict, {RIGHT}"}),
    "transient": (20, {RIGHT, REPAIRED}),
    "full-disk": (60, {RIGHT, REPAIRED}),
    "clocks": (4, {RIGHT}),
    "network": (30, {RIGHT, REPAIRED}),
}


# what is left to `make examine`: tests of publishing, of transfers and of properties meet some of each, too
LONG = PARTS.keys() - {"follower-kills", "clocks"}


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.examination] * (p in LONG)) for p in PARTS])
def test_every_fault_ends_at_the_right_hash_or_in_a_refusal_by_name(tmp_path, part):
    command = [sys.executable, "-m", "tests.examinations.weight_faults", part, tmp_path / part]
    done = FORK_SERVER.run(command, cwd=ROOT, timeout=LEARNING_S)
    assert done.returncode == 0, done.stderr
    cases = [Case(**json.loads(line)) for line in done.stdout.splitlines()]
    assert problems(cases) == []
    least, outcomes = PARTS[part]
    assert len(cases) >= least
    assert outcomes <= {case.outcome for case in cases}
