"""Where a run's log lies: in its directory or in Postgres, never in both, and copied from one to the other."""

import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from tests.contract.test_log import EVENT, ROWS, read
from tests.unit.weights.test_transfer import published

from ostinato.app.storage import home, open_folds, open_log, open_run
from ostinato.cli.commands import app
from ostinato.cli.options import Common
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, NotFound
from ostinato.launch.commands import release as commands_release
from ostinato.launch.commands.release import roll_back
from ostinato.record.log import SqlLog
from ostinato.record.postgres.log import PostgresLog


@pytest.fixture
def elsewhere(in_postgres, tmp_path):
    """The `--set` words of a run whose log is in Postgres."""
    record = in_postgres()
    return [
        f"run.directory='{tmp_path / 'run'}'",
        f"record.url='{record.url}'",
        f"record.namespace='{record.namespace}'",
    ]


async def test_log_and_folds_lie_where_record_url_says_and_the_directory_knows_it(elsewhere):
    config = load(None, elsewhere)
    with open_log(config) as log:
        assert isinstance(log, PostgresLog)
        await log.append(*ROWS)
        await open_folds(config).save("desk", 3, {"n": 1})
    with open_log(config) as log:
        assert log.newest() == len(ROWS)
    assert await open_folds(config).load("desk") == (3, {"n": 1})
    assert [path.name for path in home(config).log.iterdir()] == ["postgres"]
    with pytest.raises(BadConfig, match=r"is in Postgres; name it in record\.url"):
        open_log(load(None, elsewhere[:1]))


def test_a_run_does_not_go_on_with_another_log(elsewhere):
    with open_log(load(None, elsewhere)):
        pass
    with pytest.raises(BadConfig, match=r"belongs to the log \w+, and record\.url names"):
        open_log(load(None, [*elsewhere, "record.namespace='other_log'"]))


def test_a_run_with_a_log_of_its_own_does_not_begin_another(elsewhere):
    with open_log(load(None, elsewhere[:1])):
        pass
    with pytest.raises(BadConfig, match="has a log of its own"):
        open_log(load(None, elsewhere))


async def test_the_command_copies_a_log_to_postgres_and_back(elsewhere, tmp_path, in_postgres):
    place, record = tmp_path / "run", in_postgres()
    with SqlLog.open(place / "log") as log:
        await log.append(*ROWS)

    def copy(source, target):
        program = [sys.executable, "-m", "ostinato.cli", "log", "copy", source, target, "--set", elsewhere[2]]
        return subprocess.run(program, capture_output=True, text=True, check=False)

    done = copy(str(place), record.url)
    assert (done.returncode, f"copied: the newest row is {len(ROWS)}" in done.stdout) == (0, True), done.stderr
    done = copy(record.url, str(tmp_path / "back"))
    assert done.returncode == 0, done.stderr
    with SqlLog.open(tmp_path / "back" / "log") as back:
        assert await read(back) == list(enumerate(ROWS, 1))


def test_what_is_not_there_is_not_copied(tmp_path):
    with pytest.raises(NotFound, match="no log in"):
        app(["log", "copy", str(tmp_path / "a"), str(tmp_path / "b")], result_action="return_value")
    assert list(tmp_path.iterdir()) == []


def test_without_psycopg_a_directory_works_and_a_url_names_the_remedy(elsewhere):
    program = f"""
import sys
sys.modules["psycopg"] = None
from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.errors import BadConfig
try:
    open_log(load(None, {elsewhere!r}))
except BadConfig as error:
    print(error)
open_log(load(None, {elsewhere[:1]!r})).close()
print("opened")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'ostinato[postgres]'" in done.stdout
    assert "opened" in done.stdout


# ---------------------------------------------------------------- a host that has nothing of the run


@pytest.fixture
def shared(elsewhere, tmp_path):
    """The `--set` words of a run whose log and weights lie elsewhere, but for its directory."""
    return [*elsewhere[1:], f"weights.url='{tmp_path / 'weights'}'"]


async def test_a_person_decides_from_a_host_that_never_saw_the_run(shared, tmp_path, monkeypatch):
    here, there = [[f"run.directory='{tmp_path / name}'", *shared] for name in ("here", "there")]
    with open_run(load(None, here)) as run:
        _, (one, two) = await published(2, run.store)
        await run.log.append(replace(EVENT, id="r0", policy=one), replace(EVENT, id="r1", policy=two, previous=one))
    config = Common(overrides=tuple(there)).of_run()
    assert not (tmp_path / "there").exists()
    await roll_back(config, None, "by hand", "ann", Console())
    for behind_s in (0.0, 5.0):  # the clock of the host of whoever saw the same and was slower
        monkeypatch.setattr(commands_release, "wall_clock", lambda behind_s=behind_s: wall_clock() - behind_s)
        with pytest.raises(Conflict, match=r"live went back to .* ago: nothing was done; to go back further, name"):
            await roll_back(config, None, "by hand", "bob", Console())
    with open_run(load(None, here)) as run:
        assert await run.follower.resolve("live") == one
        assert [row.action for _, row in await read(run.log)] == ["shipped", "shipped", "rolled_back"]


def test_what_is_missing_is_named_and_nothing_is_made(shared, tmp_path):
    there = f"run.directory='{tmp_path / 'there'}'"
    with pytest.raises(NotFound, match=r"no run's log at .*record\.namespace"):
        Common(overrides=(there, *shared)).of_run()
    with open_log(load(None, [f"run.directory='{tmp_path / 'here'}'", *shared])):
        pass
    with pytest.raises(BadConfig, match=r"weights\.url"):
        Common(overrides=(there, *shared[:-1])).of_run()
    assert not (tmp_path / "there").exists()
