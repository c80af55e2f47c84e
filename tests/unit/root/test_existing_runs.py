"""Commands about a run use the settings that it was started with, and make none where there is none."""

from pathlib import Path

import pytest

from ostinato.app.storage import open_log
from ostinato.cli.commands import app
from ostinato.cli.options import Common
from ostinato.config import Config, RunConfig, load, save
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.launch.views.screen import run_option

ABOUT_A_RUN = [
    "status",
    "log",
    "log backup kept",
    "log rekey --new-master key",
    "report",
    "rollback",
    "ship v1",
    "approve",
    "refuse",
    "eval",
    "auto",
    "forget default",
    "alarms",
    "alarms accept monitor:edit",
    "release show",
    "weights log",
    "weights show",
    "weights diff v1 v2",
    "weights fsck",
    "weights gc --dry-run",
    "weights pin a v1",
    "weights unpin a",
    "weights export out",
    "weights push elsewhere",
    "weights replay",
]


@pytest.mark.parametrize("command", ABOUT_A_RUN)
def test_a_run_that_is_not_there_is_not_made(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match=r"no run in runs/none; name its directory with --set run\.directory=\.\.\."):
        app([*command.split(), "--set", "run.directory=runs/none"], result_action="return_value")
    assert list(tmp_path.iterdir()) == []


def a_run(place, *settings):
    config = load(None, [f"run.directory={place}", *settings])
    with open_log(config):
        save(config, place / "config.json")
    return place


def test_its_own_settings_hold_but_for_those_that_are_named_now(tmp_path):
    place = a_run(tmp_path / "run", "release.trial.margin=0.07", "evaluate.gate.margin=0.09")
    found = Common(overrides=(f"run.directory={place}",)).of_run()
    assert (found.run.directory, found.release.trial.margin, found.evaluate.gate.margin) == (place, 0.07, 0.09)
    named_now = Common(overrides=(f"run.directory={place}", "evaluate.gate.margin=0.11")).of_run()
    assert (named_now.release.trial.margin, named_now.evaluate.gate.margin) == (0.07, 0.11)
    file = tmp_path / "own.toml"
    file.write_text(f'[run]\ndirectory = "{place}"\n[release.trial]\nmargin = 0.05\n')
    assert Common(config=file).of_run().release.trial.margin == 0.05


@pytest.mark.parametrize("name", ["o'brien", 'a "b"', "Zoë 東", "3"])
def test_a_run_is_found_whatever_its_directory_is_called(name, tmp_path, monkeypatch):
    place = tmp_path / name
    with open_log(Config(run=RunConfig(directory=place))) as log:
        save(Config(run=RunConfig(directory=place)), place / "config.json")
        assert log.newest() == 0
    assert Common().of_run(place).run.directory == place
    monkeypatch.chdir(tmp_path)
    assert Common().of_run(Path(name)).run.directory == Path(name)


def test_the_run_of_a_branch_is_not_read_by_the_settings_of_the_run_that_serves(tmp_path):
    file, place = tmp_path / "own.toml", a_run(tmp_path / "run" / "branches" / "acme", "run.tenant=acme")
    file.write_text("[serve]\nbranches = ['acme']\n")
    there = (f"run.directory={place}",)
    assert Common(overrides=there).of_run().run.tenant == "acme"
    with pytest.raises(BadConfig, match="is the run of acme's branch, with settings of its own: leave out --config"):
        Common(config=file, overrides=there).of_run()
    (place / "config.json").write_text("{")
    assert Common(config=file, overrides=there).of_run().run.tenant == ""


@pytest.mark.parametrize(
    "words", [["consent", "default", "", "yes"], ["consent", "", "ann"], ["forget", "default", "--user", ""]]
)
def test_a_name_that_is_empty_is_nobodys(words, tmp_path):
    place = a_run(tmp_path / "run", "record.encrypt=user")
    with pytest.raises(BadRequest, match="name"):
        app([*words, "--set", f"run.directory={place}"], result_action="return_value")


def test_a_store_without_a_run_is_read_where_its_url_is_given(tmp_path):
    store = tmp_path / "store"
    found = Common(overrides=(f"run.directory={tmp_path / 'none'}", f"weights.url={store}")).of_store()
    assert found.weights.url == str(store)
    place = a_run(tmp_path / "run", f"weights.url={store}")
    assert Common(overrides=(f"run.directory={place}",)).of_store().weights.url == str(store)
    with pytest.raises(NotFound):
        Common(overrides=(f"run.directory={tmp_path / 'none'}",)).of_store()
    (tmp_path / "pulled" / "weights").mkdir(parents=True)
    pulled = Common(overrides=(f"run.directory={tmp_path / 'pulled'}",))
    assert pulled.of_store().run.directory == tmp_path / "pulled"
    with pytest.raises(NotFound):
        pulled.of_run()


def test_the_option_that_finds_a_run_can_be_pasted(tmp_path):
    assert run_option(load(None, [])) == ""
    assert run_option(load(None, ["run.directory='runs/my demo'"])) == "--set 'run.directory=runs/my demo'"


def test_a_run_of_which_this_host_has_only_the_settings_is_found_by_its_log(tmp_path, in_postgres):
    record, place = in_postgres(), tmp_path / "run"
    config = load(None, [f"run.directory={place}", f"weights.url={tmp_path / 'weights'}"])
    config = config.model_copy(update={"record": record})
    place.mkdir()
    save(config, place / "config.json")
    found = Common(overrides=(f"run.directory={place}",))
    with pytest.raises(NotFound, match="no run's log at"):
        found.of_run()
    open_log(config.model_copy(update={"run": config.run.model_copy(update={"directory": tmp_path / "other"})})).close()
    assert found.of_run().record.url == record.url
    app(["log", "--set", f"run.directory={place}"], result_action="return_value")
