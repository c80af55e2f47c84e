"""`ostinato status` of a run whose log in Postgres is away: what the workers wait for stands on this machine."""

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Unavailable
from ostinato.launch.commands.status import show_status
from ostinato.status.worker_status import WorkerStatus


@pytest.mark.parametrize("machine", [False, True])
async def test_status_shows_the_workers_before_it_says_that_the_log_is_away(tmp_path, machine):
    pytest.importorskip("psycopg")
    nobody = "postgresql://ann@127.0.0.1:1/loop"  # nothing listens there
    config = load(None, [f"run.directory='{tmp_path}'", f"record.url='{nobody}'", "record.append_s=0.1"])
    place, now = home(config), wall_clock()
    place.log.mkdir()
    waits = WorkerStatus(
        name="train", pid=7, condition="running", since=now, doing="waiting for the log: no server", doing_since=now,
        trouble=None, restarts=0, reason=None, reason_at=None,
    )  # fmt: skip
    place.workers.write_text(json.dumps({"pid": 1, "at": now, "ended": None, "workers": [asdict(waits)]}))
    screen = io.StringIO()
    with pytest.raises(Unavailable, match="could not be used"):
        await show_status(config, Console(file=screen, width=200), machine=machine)
    assert ("waiting for the log: no server" in screen.getvalue()) is not machine
