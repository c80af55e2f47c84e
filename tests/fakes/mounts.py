"""What is mounted on this machine, but for what other tests mount in their directories meanwhile."""

import os
from pathlib import Path

from tests.fakes.postgres_server import PLACE


def mounts_beside(own: Path) -> set[str]:
    """The lines of `/proc/self/mountinfo` but for other tests' directories and Postgres servers; `own` is this test's `tmp_path`."""
    tests = own.parents[1] if os.environ.get("PYTEST_XDIST_WORKER") else own.parent
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if not _of_others(line, own, tests)}


def _of_others(line: str, own: Path, tests: Path) -> bool:
    place = Path(line.split()[4])
    of_a_server = any(part.startswith(PLACE) for part in place.parts)
    return of_a_server or (place.is_relative_to(tests) and not place.is_relative_to(own))
