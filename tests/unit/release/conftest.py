"""What the tests of releases begin with."""

import pytest
from tests.fakes.release_world import V0, Disk


@pytest.fixture
def disk():
    """Refs and a log in which the starting model is the only version."""
    disk = Disk()
    disk.publish(V0)
    return disk
