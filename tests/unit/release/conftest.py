"""Fixtures for the tests of releases."""

import pytest
from tests.fakes.release_world import V0, Disk


@pytest.fixture
def disk():
    """Refs and a log in which the starting model is the only version."""
    disk = Disk()
    disk.publish(V0)
    return disk


@pytest.fixture(autouse=True)
def known_salts(monkeypatch):
    """Fix the salts, so that trials deal the simulated users alike in every run. In the product salts are secret."""
    for module in ("canary", "moves"):
        monkeypatch.setattr(f"ostinato.release.{module}.token_hex", lambda size: "b5" * size)
