"""Who holds sampling's share: the number of rollout workers follows what the log says, within bounds, through the wish of `scale`."""

import asyncio
import itertools

import pytest
from tests.unit.launch.computing.test_ledger import turn

from ostinato.app.storage import home, open_log
from ostinato.compute.ledger import OperationLedger, ShareRules, rollout_workers
from ostinato.config import load
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Arm, Batch
from ostinato.launch.commands.compute import ShareController, check_sharing, read_requested, write_requested
from ostinato.testing.tiny import tiny_model


def spent(sampling, training):
    return OperationLedger(decode=sampling, forward=training / 3, backward=2 * training / 3)


def configured(tmp_path, *more):
    config = load(None, [f"run.directory='{tmp_path}'", "learn.source=worlds", "compute.share=0.5", *more])
    home(config).root.mkdir(parents=True, exist_ok=True)
    write_requested(home(config).scale, 2)
    return config


@pytest.mark.parametrize("each", [0.05, 0.3, 1.0, 1.7, 20.0])
@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.6])
def test_a_share_that_can_be_held_is_held_and_one_that_cannot_ends_at_a_bound(each, share):
    """Each worker samples `each` for every 4 operations of training."""
    rules, workers, seen = ShareRules(share=share), 3, []
    for _ in range(20):
        workers = rollout_workers(rules, workers, 1, 12, workers * each / (workers * each + 4))
        seen.append(workers)
    wanted = 4 * share / (1 - share) / each
    assert len({*seen[8:]}) == 1, "it comes to rest"
    assert abs(workers - min(12.0, max(1.0, wanted))) <= rules.slack


def test_bounds_hold_whatever_was_observed():
    rules = ShareRules(share=0.5)
    for workers, observed in itertools.product((0, 1, 5, 50), (0.0, 0.2, 1.0)):
        assert 2 <= rollout_workers(rules, workers, 2, 6, observed) <= 6
    assert rollout_workers(rules, 2, 1, 9, 0.0) == 6, "at most `moves` at once"


async def test_the_wish_follows_the_ledger_and_a_time_without_a_step_is_left_out(tmp_path):
    looks, said = iter([spent(9, 0), spent(1, 20), spent(10, 10), spent(30, 10)]), []
    sharing = ShareController(configured(tmp_path), lambda who, what: said.append(what), looks.__next__)
    assert await sharing.look() is None
    assert await sharing.look() == 4, "a third of all, over both looks together"
    assert (read_requested(tmp_path / "scale.json"), len(said)) == (4, 1)
    assert "33.3% of all operations, 50.0% is wanted" in said[0]
    assert await sharing.look() == 4
    write_requested(tmp_path / "scale.json", 6)  # somebody's `ostinato scale`
    assert await sharing.look() == 2
    assert len(said) == 2


async def test_without_a_wish_nobody_is_moved(tmp_path):
    sharing = ShareController(configured(tmp_path), lambda *_: None, lambda: spent(1, 20))
    (tmp_path / "scale.json").unlink()
    assert await sharing.look() is None
    assert not (tmp_path / "scale.json").exists()


async def test_a_log_that_cannot_be_read_is_said_once_and_tried_again(tmp_path):
    said, tries = [], []

    def fails():
        tries.append(1)
        raise Unavailable("the database is away")

    sharing = ShareController(configured(tmp_path, "compute.every_s=0.01"), lambda who, what: said.append(what), fails)
    keeping = asyncio.create_task(sharing.keep())
    while len(tries) < 4:
        await asyncio.sleep(0.01)
    keeping.cancel()
    assert said == ["compute.share waits: the database is away"]


async def test_it_counts_what_was_logged_since_the_last_look(tmp_path):
    config = configured(tmp_path / "run", f"model.source='{tiny_model(tmp_path / 'model')}'")
    old, new = turn("a", 4, 40, arm=Arm.WORLD), turn("b", 4, 3, arm=Arm.WORLD)
    batch = Batch(step=1, turns=("a", "b"), credits=((1.0,) * 40, (1.0,) * 3), reference=old.spans[0].policy, at=50.0)
    with open_log(config) as log:
        await log.append(old)
    said = []
    sharing = ShareController(config, lambda who, what: said.append(what))
    assert await sharing.look() is None
    with open_log(config) as log:
        await log.append(new, batch)
    assert await sharing.look() == 6, "a step over both, and three tokens sampled: far too little sampling"
    assert "sampling had 3." in said[0] or "sampling had 2." in said[0], said


@pytest.mark.parametrize(
    ("on_ray", "more", "message"),
    [(False, (), "up --on ray"), (True, ("learn.source=people",), 'no rollout workers; set it to "worlds" or "both"')],
)
def test_a_run_whose_workers_cannot_move_is_refused(tmp_path, on_ray, more, message):
    with pytest.raises(BadConfig, match=message):
        check_sharing(configured(tmp_path, *more), on_ray=on_ray)
    check_sharing(load(), on_ray=False)


def test_only_the_shape_is_read_and_a_model_out_of_reach_is_refused_at_the_start(tmp_path):
    made = tiny_model(tmp_path / "model")
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text((made / "config.json").read_text())  # no weights beside it
    check_sharing(configured(tmp_path, f"model.source='{shape}'"), on_ray=True)
    (shape / "config.json").unlink()
    with pytest.raises(
        BadConfig, match=r"compute\.share counts .* reachable from this machine, or set compute.share = 0"
    ):
        check_sharing(configured(tmp_path, f"model.source='{shape}'"), on_ray=True)


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(BadConfig, match="least_workers is above most_workers"):
        load(None, ["compute.least_workers=9"])
