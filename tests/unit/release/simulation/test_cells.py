"""The simulated release path: what its cells run, what they say, and that a run which was cut goes on."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.release.path.__main__ import Sheet
from benchmarks.release.path.cells import OUTAGE, SLOTS_A_DAY, Cell, cells, figures, histories, plan_of, settings_of
from benchmarks.release.path.release_path import PathConfig
from benchmarks.release.path.rivals import Doubling, GrowthBookLike, KayentaLike
from benchmarks.release.path.rules import History, Ostinato, Record, Screen
from benchmarks.release.path.shares import Dealt, found
from benchmarks.release.path.table import AIMS, Aim, judged, lines
from benchmarks.release.path.world import Change, Habits, Product

from ostinato.release.trial.config import HOUR, TrialConfig

AA = Cell(size="1k", rule="ostinato", kind="aa", runs=2)
QUICK = PathConfig(trial=TrialConfig(margin=0.06, trials_a_week=7))
USERS = Habits(active=2_000)


def bad(effect):
    return lambda trial: Change(effect=effect, against_first=True)


@pytest.mark.parametrize("rule", [Doubling, GrowthBookLike, KayentaLike])
def test_every_other_rule_stops_what_is_much_worse_and_ships_what_is_as_good(rule):
    stopped = rule(Product(Habits(active=6_000), 1), bad(-0.4)).run(3 * 6)
    assert stopped.records[0].stopped is not None
    assert rule(Product(USERS, 1), bad(0.0)).run(6).records[0].shipped is not None


def test_ostinatos_own_stops_what_is_much_worse_before_it_is_live():
    history = Ostinato(Product(USERS, 1), bad(-0.3), QUICK).run(SLOTS_A_DAY)
    assert history.records[0].stopped is not None
    assert history.records[0].shipped is None
    assert history.records[0].turns > 0
    assert history.lowest == 0.0


def test_a_staircase_goes_down_from_live_and_a_fault_is_against_the_first_version():
    down = plan_of(Cell(size="1k", rule="ostinato", kind="every", effect=-0.01))
    assert [down(k).effect for k in range(3)] == [-0.01] * 3
    assert not down(0).against_first
    fourth = plan_of(Cell(size="1k", rule="ostinato", kind="fourth", effect=-0.01))
    assert [fourth(k).effect for k in range(6)] == [0.0, -0.01, 0.0, 0.0, 0.0, -0.01]
    assert fourth(0).against_first
    assert plan_of(Cell(size="1k", rule="ostinato", kind="disagree", effect=0.02))(1).suite == -0.02


def test_what_is_worse_on_the_suite_does_not_come_before_users():
    rule = Ostinato(Product(USERS, 1), lambda trial: Change(suite=-0.2), QUICK, Screen(Product(USERS, 1), 500))
    history = rule.run(12)
    assert [record.refused for record in history.records] == [True, True]
    assert sum(record.turns for record in history.records) == 0
    assert Screen(Product(USERS, 1), 500).passes(Change(suite=0.05))


def test_so_that_better_can_be_said_a_fifth_stays_behind_and_the_next_waits_a_day():
    settings = settings_of(replace(AA, kind="better", effect=0.05))
    assert (settings.trial.holdback, settings.trial.better_evidence, settings.proving_s) == (0.2, 20.0, 24 * HOUR)
    assert settings_of(AA).proving_s == 0.0


def test_a_cell_counts_what_became_of_its_candidates():
    change = Change(effect=-0.03, against_first=True)
    records = [
        Record(change=Change(), start=0, shipped=10),
        Record(change=change, start=12, turns=700.0, stopped=22),
        Record(change=Change(), start=24, stopped=30),
        Record(change=change, start=36, turns=900.0, shipped=40, stopped=66),
        Record(change=change, start=100, shipped=110),
        Record(change=change, start=14 * SLOTS_A_DAY - 10, shipped=None),
    ]
    run = History(records=records, rollbacks=[66], lowest=-0.03)
    said = figures(replace(AA, kind="fourth", effect=-0.03), [[run], [History()]])
    assert said["weeks"] == pytest.approx(4.0)
    assert said["false_stops_a_week"] == pytest.approx(0.25)
    assert said["candidates"] == 3, "who began on the last day is not judged"
    assert said["stopped"] == pytest.approx(2 / 3)
    assert said["shipped_for_good"] == pytest.approx(1 / 3)
    assert (said["hours"], said["turns"]) == (10.0, 800.0)
    assert said["lowest_pp"] == pytest.approx(-1.5)


def test_an_outage_is_counted_beside_the_same_hours_without_it():
    during, later = History(rollbacks=[OUTAGE[0] + 5]), History(rollbacks=[OUTAGE[0] + 90])
    calm = History(rollbacks=[OUTAGE[0] + 7])
    said = figures(replace(AA, kind="outage"), [[during, calm], [later, calm], [during, History()]])
    assert (said["rollbacks_with"], said["rollbacks_without"]) == (2, 2)
    assert (said["seeds_with_more_rollbacks"], said["seeds_with_fewer_rollbacks"]) == (1, 1)


def test_an_outage_runs_the_same_seed_with_and_without_it():
    struck, calm = histories(Cell(size="1k", rule="growthbook-like", kind="outage"), 1)
    assert len(struck.records) == len(calm.records)
    assert struck.records[0].turns == calm.records[0].turns


def test_better_is_counted_from_the_first_user():
    records = [
        Record(change=Change(effect=0.02), start=0, shipped=9, better=48),
        Record(change=Change(effect=0.02), start=60, shipped=70, better=120),
    ]
    said = figures(Cell(size="10k", rule="ostinato", kind="better", effect=0.02), [[History(records=records)]])
    assert (said["candidates"], said["better_in_24_h"], said["better_in_72_h"]) == (2, 0.5, 1.0)


def test_a_deal_that_is_far_off_is_found_and_a_right_one_is_not():
    assert found(Dealt(name="", set=(0.5, 0.5), true=(0.6, 0.4), users=5_000), 0) is not None
    assert found(Dealt(name="", set=(0.5, 0.5), true=(0.5, 0.5), users=5_000), 0) is None


def test_a_run_that_was_cut_keeps_its_cells_and_runs_what_is_lacking(tmp_path):
    path, said = tmp_path / "path.json", figures(AA, [[History()], [History()]])
    sheet = Sheet(path, resume=False)
    sheet.put(AA, said)
    again = Sheet(path, resume=True)
    assert not again.lacks(AA)
    assert not again.lacks(replace(AA, runs=1))
    assert again.lacks(replace(AA, runs=3)), "more runs are another figure"
    assert again.lacks(replace(AA, kind="swing"))
    assert Sheet(path, resume=False).lacks(AA)
    kept = json.loads(path.read_text())
    kept["cells"][0]["settings"]["trial"]["margin"] = 0.5
    path.write_text(json.dumps(kept))
    assert Sheet(path, resume=True).lacks(AA), "other settings are another figure"


def test_an_aim_is_unsure_where_the_interval_holds_it():
    aim = Aim(cell="", figure="stopped", least=0.9)
    assert judged({"stopped": 1.0, "candidates": 100}, aim) == "met"
    assert judged({"stopped": 0.92, "candidates": 50}, aim) == "met (unsure)"
    assert judged({"stopped": 0.88, "candidates": 50}, aim) == "missed (unsure)"
    assert judged({"stopped": 0.5, "candidates": 50}, aim) == "missed"
    assert (
        judged({"false_stops_a_week": 0.01, "weeks": 100.0}, Aim(cell="", figure="false_stops_a_week", most=0.2))
        == "met"
    )


def test_every_aim_has_a_cell_and_every_cell_a_row():
    names = {str(cell) for cell in cells()}
    assert {aim.cell for aim in AIMS} <= names
    assert len(names) == len(cells())
    entry = {"cell": {"size": "1k", "rule": "ostinato", "kind": "aa", "effect": 0.0, "runs": 2}}
    said = figures(AA, [[History()], [History()]])
    assert "1k ostinato aa" in lines({"cells": [entry | {"figures": said}]})[-1]
    assert np.isclose(cells(0.5)[0].runs * 2, cells()[0].runs)
