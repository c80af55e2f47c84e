"""The audit trail's file: who may read it, that it stays bounded, and that it never stops anything."""

import io
import json
import stat

import pytest
from rich.console import Console

from ostinato.app.storage import Home, open_log
from ostinato.config import load
from ostinato.core.errors import BadRequest, NotFound, OstinatoError
from ostinato.launch.commands.log import copy_between, forget
from ostinato.launch.commands.release import accept_alarm, roll_back, ship
from ostinato.launch.views.audit import AuditFile, audited


def lines(place):
    return [json.loads(line) for line in place.audit.read_text().splitlines() if line]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run").mkdir()
    return Home(tmp_path / "run")


def test_a_line_says_when_who_and_how_it_ended_and_only_its_owner_reads_it(place):
    AuditFile(place.audit, lambda: 7.0)("ship", result="done", key="0a1b2c3d", address="10.0.0.7", root="ab\n" * 100)
    (line,) = lines(place)
    assert line["at"] > 0
    assert (line["kind"], line["result"], line["key"], line["address"]) == ("ship", "done", "0a1b2c3d", "10.0.0.7")
    assert len(line["root"]) == 200
    assert stat.S_IMODE(place.audit.stat().st_mode) == 0o600


def test_strangers_cannot_push_acts_out_of_the_file(place):
    now = 0.0
    audit = AuditFile(place.audit, lambda: now)
    audit("ship", result="done")
    for _ in range(10_000):
        audit("wrong key", result="refused", stranger=True)
    assert len(lines(place)) == 21
    now = 180.0
    audit("wrong key", result="refused", stranger=True)
    assert lines(place)[-1]["left_out"] == 9_980
    audit("sign in", result="done", tenant="acme", stranger=True)
    assert (lines(place)[-1]["kind"], "left_out" in lines(place)[-1]) == ("sign in", False)
    for _ in range(30):
        audit("roll back", result="done")
    assert [line["kind"] for line in lines(place)].count("roll back") == 30


def test_a_full_disk_stops_nothing(place, caplog):
    AuditFile(place.root)("ship", result="done")  # a directory: it cannot be written
    assert "lost" in caplog.text


def test_what_fails_is_recorded_with_its_error(place):
    with pytest.raises(BadRequest), audited(place, "ship", actor="ann"):
        raise BadRequest("no")
    with audited(place, "ship", actor="ann"):
        pass
    assert [(line["result"], line["actor"]) for line in lines(place)] == [
        ("invalid_request_error", "ann"),
        ("done", "ann"),
    ]


async def test_each_act_by_command_leaves_a_line(place):
    config = load(None, [f"run.directory='{place.root}'"])
    with open_log(config):
        pass
    console = Console(file=io.StringIO())
    for act in (
        ship(config, "v9", "it is better", "ann", console),
        roll_back(config, "v9", "it is worse", "ann", console),
        accept_alarm(config, "coverage:acme", "wanted", "ann", console),
        forget(config, "acme", "bob@example.com", console),
    ):
        with pytest.raises(OstinatoError):
            await act
    await copy_between(config, str(place.root), str(place.root.with_name("copy")), console)
    found = lines(place)
    assert [line["kind"] for line in found] == ["ship", "roll back", "accept alarm", "forget", "log copy"]
    assert found[0]["result"] == NotFound.code
    assert found[-1]["result"] == "done"
    assert "bob@example.com" not in place.audit.read_text()
