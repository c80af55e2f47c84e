"""Every fault of the weight store and what came of it: the right hash, or a refusal that names the object and then the right hash.

The cases are `ostinato.testing.weight_faults`; `benchmarks/weight_faults.py` runs all of their places and prints the table.
"""

import asyncio
import json
import sys

import pytest

from ostinato.testing.weight_faults.outcome import FELL_BACK, OBEYED, REPAIRED, RIGHT, WAITED, Case, problems

# part -> the least number of cases, and outcomes of which there must be some: an examination that reaches nothing would pass
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


@pytest.mark.parametrize("part", PARTS)
async def test_every_fault_ends_at_the_right_hash_or_in_a_refusal_by_name(tmp_path, part):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-m", "ostinato.testing.weight_faults", part, str(tmp_path / part)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, stderr.decode()
    cases = [Case(**json.loads(line)) for line in stdout.splitlines()]
    assert problems(cases) == []
    least, outcomes = PARTS[part]
    assert len(cases) >= least
    assert outcomes <= {case.outcome for case in cases}
