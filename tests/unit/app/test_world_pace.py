"""A pace at which long rollouts would be held back as too stale is said aloud."""

from ostinato.app.worlds_rollouts import warn_of_staleness
from ostinato.config import load


def test_it_is_said_with_what_to_change_and_only_then(caplog):
    warn_of_staleness(load(None, []))
    assert caplog.text == ""
    warn_of_staleness(load(None, ["worlds.lead=7", "worlds.window=32"]))
    assert "12 steps behind" in caplog.text
    assert "reward.world_staleness is 8" in caplog.text
