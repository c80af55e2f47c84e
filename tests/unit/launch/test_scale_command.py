"""`ostinato scale`, and what `up --on ray` refuses before it asks for anything."""

import json

import pytest
from rich.console import Console

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.launch.commands.compute import read_requested, scale_rollouts, write_requested
from ostinato.launch.commands.crew import supervised
from ostinato.launch.commands.up import check_placeable
from ostinato.launch.placing.supervision import Supervisor

PLACEABLE = ("record.url='postgresql:///a'", "weights.url='s3://b/c'")


def configured(tmp_path, *overrides):
    return load(None, [f"run.directory='{tmp_path}'", "learn.source='worlds'", *overrides])


def up(tmp_path, *names, at=None, node=""):
    fields = dict.fromkeys(("pid", "since", "doing_since", "restarts"), 0)
    texts = dict.fromkeys(("trouble", "reason", "reason_at"))
    workers = [{"name": name, "condition": "running", "doing": "", "node": node, **fields, **texts} for name in names]
    board = {"at": wall_clock() if at is None else at, "pid": 1, "ended": None, "workers": workers}
    home(load(None, [f"run.directory='{tmp_path}'"])).workers.write_text(json.dumps(board))


def test_a_wish_is_written_for_a_run_that_is_up_on_ray(tmp_path):
    config = configured(tmp_path)
    up(tmp_path, "serve", "rollout")
    write_requested(home(config).scale, 1)
    console = Console(record=True, width=200)
    scale_rollouts(config, 4, console)
    assert read_requested(home(config).scale) == 4
    assert "1 now, 4 wanted" in console.export_text()


def test_without_a_run_that_is_up_nothing_is_written(tmp_path):
    config = configured(tmp_path)
    for board in (lambda: None, lambda: up(tmp_path, "serve", at=wall_clock() - 60)):
        board()
        with pytest.raises(NotFound, match="is not up"):
            scale_rollouts(config, 2, Console())
    assert not home(config).scale.exists()


def test_a_run_of_one_machine_or_one_that_learns_from_people_has_nothing_to_scale(tmp_path):
    up(tmp_path, "serve", "rollout")
    with pytest.raises(BadRequest, match="one machine"):
        scale_rollouts(configured(tmp_path), 2, Console())
    with pytest.raises(BadRequest, match="no rollouts"):
        scale_rollouts(configured(tmp_path, "learn.source='people'"), 2, Console())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rollout": -1}', '{"rollout": "4"}', '{"rollout": 1e9}', "\0"])
def test_a_wish_that_nobody_can_read_is_none(tmp_path, text):
    (tmp_path / "scale.json").write_text(text)
    assert read_requested(tmp_path / "scale.json") is None


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ((), "record.url"),
        (("record.url='postgresql:///a'",), "weights.url"),
        (
            ("record.url='postgresql:///a'", "weights.url='s3://b/c'", "ray.cpus={trainer=1}"),
            "ray.cpus.trainer: no such worker",
        ),
        ((*PLACEABLE, "ray.cpus={housekeeping=0}"), "ray.cpus.housekeeping is 0, and it takes nothing else"),
        ((*PLACEABLE, "ray.cpus={train=-1}"), "ray.cpus.train is -1"),
        ((*PLACEABLE, "ray.cpus={train=0.00001}"), "ray.cpus.train is 1e-05"),
        ((*PLACEABLE, "ray.resources.train={disk=inf}"), "ray.resources.train.disk is inf"),
        ((*PLACEABLE, "ray.resources.train={GPU=1.5}"), "ray.resources.train.GPU is 1.5"),
        ((*PLACEABLE, "ray.resources.train={object_store_memory=1e9}"), "ray.resources.train.object_store_memory"),
    ],
)
def test_what_cannot_be_on_several_machines_is_refused_by_the_name_of_its_setting(tmp_path, overrides, what):
    with pytest.raises(BadConfig, match=what):
        check_placeable(configured(tmp_path, *overrides))


def test_amounts_that_ray_takes_are_let_through(tmp_path):
    takes = "ray.resources={train={GPU=2, memory=3e10}, serve={GPU=0.5}, housekeeping={spare=0.001}}"
    check_placeable(configured(tmp_path, *PLACEABLE, "ray.cpus={housekeeping=0, rollout=0}", takes))


def test_on_another_node_than_ups_there_is_nothing_to_ask_for(tmp_path):
    config = configured(tmp_path)
    up(tmp_path, "serve", "rollout", node="10.0.0.7")
    with pytest.raises(BadRequest, match="runs on another machine"):
        scale_rollouts(config, 4, Console())
    write_requested(home(config).scale, 1)
    scale_rollouts(config, 4, Console())


async def test_a_wish_that_a_killed_run_left_is_none_of_the_next_one(tmp_path):
    place = home(configured(tmp_path))
    write_requested(place.scale, 4)
    async with supervised(place, Supervisor([], configured(tmp_path).supervise, lambda *_: None), "", lambda: None):
        assert not place.scale.exists()
